// Physical KV of all layers.
#pragma once

#include <cstdint>
#include <memory>

#include "kernel_table.h"
#include "memory.h"
#include "populate.h"

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
// slots, so a block size that is no multiple of them costs the padding, and what is stored for a
// head takes whole cache lines.
int64_t kv_block_bytes(const KVShape& shape, int64_t lanes);

// Blocks lie one behind the other, each as [layer][keys, values][head]: what a block holds is one
// piece, to copy it is one copy (to other memory, too), and blocks that were never used are memory
// that was never touched.
class KVCache {
 public:
  KVCache(const KVShape& shape, int64_t lanes);

  const KVShape& shape() const { return shape_; }
  KVLayer layer(int64_t index) const;
  void copy_block(int64_t source, int64_t target);

  // From now on `lead` bytes beyond the last block used are populated while no `Use` lives. Does
  // nothing for so little memory that a thread is not worth it, nor when called again.
  void populate(int64_t lead);

  // Held by what uses the memory of blocks before number `end`.
  class Use {
   public:
    Use(const KVCache& kv, int64_t end) : populator_(kv.populator_.get()) {
      if (populator_) populator_->begin_step(end * kv.first_.block_bytes);
    }
    ~Use() {
      if (populator_) populator_->end_step();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Populator* populator_;
  };

 private:
  KVShape shape_;
  KVLayer first_;  // layer 0
  Memory memory_;
  std::unique_ptr<Populator, Populator::Release> populator_;
};

}  // namespace octavo
