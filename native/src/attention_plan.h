// How the attention of a step is cut into work for threads.
//
// A row's context may be a thousand times another's, so work is cut by cost, not by rows: an item
// is (rows, KV head, range of tokens). Rows of one item are those of a prefill chunk, or decodes
// that read the same blocks, which are then read once (as in cascade attention, FlashInfer). Long
// items are cut along the tokens where that ends the step sooner; each part leaves its states, and
// whoever finishes last joins them exactly. The shape of this queue follows PersistentKV (arXiv
// 2606.26666): items sized by each row's own length, none empty, and a cost model that keeps the
// plain cut (one item for each row and KV head) unless another is cheaper.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_cost.h"
#include "batch.h"

namespace octavo {

// What the planner may do.
struct AttentionPolicy {
  bool split = true;          // cut along the tokens
  bool share = true;          // read shared prefixes once
  // Cut at fixed tokens, and join states there even where one item reads across: then a row's
  // result does not depend on how the step was cut.
  bool deterministic = false;
};

// Where tokens lie in vectors of slots ("units"), which the kernel takes a chunk at a time.
struct TokenGrid {
  int64_t block_size;
  int64_t lanes;
  int64_t grain;              // units between places where a cut may be

  int64_t per_block() const { return (block_size + lanes - 1) / lanes; }
  int64_t unit_of(int64_t token) const {
    return token / block_size * per_block() + token % block_size / lanes;
  }
  int64_t grain_of(int64_t token) const { return unit_of(token) / grain; }
  int64_t start_of(int64_t grain_index) const {
    const int64_t unit = grain_index * grain;
    return unit / per_block() * block_size + unit % per_block() * lanes;
  }
};

struct AttendItem {
  int64_t sequence;           // whose block table is read
  int64_t first_row;          // of the plan's row_ids
  int64_t rows;
  int64_t kv_head;
  int64_t first_token;
  int64_t last_token;
  double cost;
  int64_t first_join;         // joins that get a part of these rows' results
  int64_t joins;              // 0: the item writes the results itself
  int64_t state;              // else its first query vector in the buffer of states
};

// Rows whose results are joined from states.
struct Join {
  int64_t first_row;
  int64_t rows;
  int64_t kv_head;
  int64_t items;              // that must be finished first
  int64_t first_state;        // of the plan's states
  int64_t states;             // of each query vector
};

struct AttentionPlan {
  std::vector<int32_t> row_ids;   // rows of the batch
  std::vector<AttendItem> items;  // most costly first
  std::vector<int64_t> claims;    // items that a thread takes at once: [claims[i], claims[i + 1])
  std::vector<Join> joins;
  std::vector<int64_t> states;    // first query vectors in the buffer, in the order of tokens
  int64_t segment_units = 0;      // what the kernel wants
  int64_t state_vectors = 0;      // room in the buffer
  int64_t most_vectors = 0;       // query vectors of the largest item
};

struct AttentionWork {
  int64_t kv_heads;
  int64_t heads;              // query heads per KV head
  int64_t window;             // 0: none
  int64_t block_size;
  int64_t lanes;
  AttentionCost cost;
};

AttentionPlan plan_attention(const Batch& batch, const AttentionWork& work,
                             const AttentionPolicy& policy, int threads);

}  // namespace octavo
