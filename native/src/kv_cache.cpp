#include "kv_cache.h"

#include <cstring>

namespace octavo {

namespace {
constexpr int64_t kSlack = 128;  // vectors of the last head's values reach past its end
constexpr int64_t kLine = 64;    // of a cache, and the widest vector
constexpr size_t kWorthAThread = size_t{16} << 20;

int64_t whole_lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

int64_t layer_bytes(const KVLayer& layer) {
  return layer.kv_heads * (layer.key_bytes + layer.value_bytes);
}

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
  layer.key_bytes = whole_lines(layer.key_bytes);
  layer.value_bytes = whole_lines(layer.value_bytes);
  layer.block_bytes = shape.layers * layer_bytes(layer);
  return layer;
}
}  // namespace

int64_t kv_block_bytes(const KVShape& shape, int64_t lanes) {
  return layout(shape, lanes).block_bytes;
}

KVCache::KVCache(const KVShape& shape, int64_t lanes)
    : shape_(shape),
      first_(layout(shape, lanes)),
      memory_(shape.blocks * first_.block_bytes + kSlack) {
  first_.keys = memory_.data();
  first_.values = first_.keys + first_.kv_heads * first_.key_bytes;
}

KVLayer KVCache::layer(int64_t index) const {
  KVLayer layer = first_;
  layer.keys += index * layer_bytes(first_);
  layer.values += index * layer_bytes(first_);
  return layer;
}

void KVCache::copy_block(int64_t source, int64_t target) {
  const Use use(*this, target + 1);
  std::memmove(first_.key(target, 0), first_.key(source, 0), first_.block_bytes);
}

void KVCache::populate(int64_t lead) {
  if (!populator_ && memory_.size() >= kWorthAThread)
    populator_.reset(new Populator(memory_.data(), memory_.size(), lead));
}

}  // namespace octavo
