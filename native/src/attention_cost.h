// What attention costs, to decide how it is cut into work.
//
// The constants are nanoseconds of one core, for a head of 64 in bfloat16: of an AMD Zen 3 (AVX2),
// of a Zen 4 where bfloat16 is multiplied as it is (AVX512_BF16), and of a Xeon with matrix registers.
// `benchmarks/attention.py --calibrate` measures all but `wait`, which its cases of shared prefixes
// gave. Only their ratios matter, and only for speed. They are not measured at each start: cuts would then move, and last bits with them, from
// one run of the same requests to the next.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernel_table.h"

namespace octavo {

struct AttentionCost {
  double item = 330;          // starting an item
  double token = 20;          // a token's key and value from memory
  double tile_token = 4;      // the same widened to floats, once for a tile of query vectors
  double vector_token = 3.4;  // products with one query vector
  double state = 30;          // leaving one query vector's state, and joining it later
  double wait = 600;          // for an item's first KV, if no cache holds it
  int64_t tile = 6;           // query vectors

  // Of `vectors` query vectors over `tokens` tokens: memory and arithmetic overlap.
  double of(int64_t vectors, int64_t tokens) const {
    return item + static_cast<double>(tokens) * std::max(token, arithmetic(vectors));
  }

  // The same of some tokens of an item that another one has just read, so a cache has them: in half
  // the time (of 2,048 tokens in a third-level cache).
  double again(int64_t vectors, int64_t tokens) const {
    return static_cast<double>(tokens) * std::max(token / 2, arithmetic(vectors));
  }

 private:
  double arithmetic(int64_t vectors) const {
    const double tiles = static_cast<double>((vectors + tile - 1) / tile);
    return tiles * tile_token + static_cast<double>(vectors) * vector_token;
  }
};

// For an instruction set, head size and number format.
inline AttentionCost attention_cost(const KernelTable& kernels, int64_t dim, KVType type) {
  const double size = static_cast<double>(dim) / 64;
  const double bytes = type == KVType::kF32 ? 2 : type == KVType::kBF16 ? 1 : 0.5;
  AttentionCost cost;
  if (kernels.bfloat_products && type == KVType::kBF16) cost = {145, 12, 2.8, 0.9, 16, 600};
  if (kernels.matrix_rows > 0 && type == KVType::kBF16) cost = {210, 12, 3.3, 0.2, 13, 600, kMatrixRows};
  cost.token *= size * bytes;
  cost.tile_token *= size;
  cost.vector_token *= size;
  cost.state *= size;
  return cost;
}

}  // namespace octavo
