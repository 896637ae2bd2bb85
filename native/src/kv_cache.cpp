#include "kv_cache.h"

#include <cstring>

namespace octavo {

namespace {
constexpr int64_t kSlack = 128;  // vectors of the last head's values reach past its end
}

KVCache::KVCache(const KVShape& shape, int64_t lanes) : shape_(shape) {
  const int64_t padded = (shape.block_size + lanes - 1) / lanes * lanes;
  const bool wide = shape.type == KVType::kF32;
  first_.key_bytes = (wide ? shape.dim : (shape.dim + 1) / 2) * padded * 4;
  first_.value_bytes = (wide ? shape.block_size : (shape.block_size + 1) / 2) * shape.dim * 4;
  first_.block_size = shape.block_size;
  first_.padded_slots = padded;
  first_.kv_heads = shape.kv_heads;
  first_.dim = shape.dim;
  first_.type = shape.type;
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
