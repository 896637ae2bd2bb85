#include "kv_cache.h"

#include <cstring>

namespace octavo {

namespace {
constexpr int64_t kSlack = 128;  // vectors of the last head's values reach past its end

// The layout of a layer that lies nowhere yet.
KVLayer layout(const KVShape& shape, int64_t lanes) {
  KVLayer layer{};
  const int64_t padded = (shape.block_size + lanes - 1) / lanes * lanes;
  layer.block_size = shape.block_size;
  layer.padded_slots = padded;
  layer.kv_heads = shape.kv_heads;
  layer.dim = shape.dim;
  layer.type = shape.type;
  if (shape.type == KVType::kI8) {
    layer.key_scales = shape.dim * padded;
    layer.value_scales = (shape.block_size * shape.dim + 3) / 4 * 4;
    layer.key_bytes = layer.key_scales + padded * 4;
    layer.value_bytes = layer.value_scales + padded * 4;
  } else {
    const int64_t each = shape.type == KVType::kF32 ? 1 : 2;  // values in 4 bytes
    layer.key_bytes = (shape.dim + each - 1) / each * padded * 4;
    layer.value_bytes = (shape.block_size + each - 1) / each * shape.dim * 4;
  }
  return layer;
}
}  // namespace

int64_t kv_block_bytes(const KVShape& shape, int64_t lanes) {
  const KVLayer layer = layout(shape, lanes);
  return shape.layers * shape.kv_heads * (layer.key_bytes + layer.value_bytes);
}

KVCache::KVCache(const KVShape& shape, int64_t lanes)
    : shape_(shape), first_(layout(shape, lanes)) {
  key_layer_bytes_ = shape.blocks * shape.kv_heads * first_.key_bytes;
  value_layer_bytes_ = shape.blocks * shape.kv_heads * first_.value_bytes;
  keys_ = Memory(shape.layers * key_layer_bytes_ + kSlack);
  values_ = Memory(shape.layers * value_layer_bytes_ + kSlack);
}

KVLayer KVCache::layer(int64_t index) const {
  KVLayer layer = first_;
  layer.keys = keys_.data() + index * key_layer_bytes_;
  layer.values = values_.data() + index * value_layer_bytes_;
  return layer;
}

void KVCache::copy_block(int64_t source, int64_t target) {
  for (int64_t index = 0; index < shape_.layers; ++index) {
    const KVLayer kv = layer(index);
    std::memmove(kv.key(target, 0), kv.key(source, 0), kv.key_bytes * kv.kv_heads);
    std::memmove(kv.value(target, 0), kv.value(source, 0), kv.value_bytes * kv.kv_heads);
  }
}

}  // namespace octavo
