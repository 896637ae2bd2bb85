// Physical KV of all layers.
#pragma once

#include <cstdint>

#include "kernel_table.h"
#include "memory.h"

namespace octavo {

struct KVShape {
  int64_t layers;
  int64_t kv_heads;
  int64_t dim;
  int64_t block_size;
  int64_t blocks;
  KVType type;
};

// Bytes of one block over all layers, if vectors have `lanes` floats: keys take whole vectors of
// slots, so a block size that is no multiple of them costs the padding.
int64_t kv_block_bytes(const KVShape& shape, int64_t lanes);

class KVCache {
 public:
  KVCache(const KVShape& shape, int64_t lanes);

  const KVShape& shape() const { return shape_; }
  KVLayer layer(int64_t index) const;
  void copy_block(int64_t source, int64_t target);

 private:
  KVShape shape_;
  KVLayer first_;       // layer 0
  int64_t key_layer_bytes_;
  int64_t value_layer_bytes_;
  Memory keys_;
  Memory values_;
};

}  // namespace octavo
