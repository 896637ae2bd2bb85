// How the attention of a step is cut into work for threads.
//
// A row's context may be a thousand times another's, so work is cut by cost, not by rows: an item
// is (rows of one sequence, KV head, range of tokens). Long items are split along the tokens; each
// part leaves its sums, and whoever finishes last joins them exactly. The shape of this queue
// follows PersistentKV (arXiv 2606.26666): items sized by each row's own length, none empty.
#pragma once

#include <cstdint>
#include <vector>

#include "batch.h"

namespace octavo {

struct AttendItem {
  int64_t sequence;
  int64_t row;
  int64_t rows;
  int64_t kv_head;
  int64_t first_token;
  int64_t last_token;
  int64_t cost;
  int64_t group;     // which split item this is a part of; -1: a whole
  int64_t part;
};

struct SplitGroup {
  int64_t parts;
  int64_t state;     // first query vector in the buffer of partial states
};

struct AttentionPlan {
  std::vector<AttendItem> items;    // most costly first
  std::vector<SplitGroup> groups;
  int64_t partial_vectors = 0;      // query vectors of partial state, over all groups
  int64_t most_vectors = 0;         // query vectors of the largest item
};

// `heads` counts query heads per KV head; `window` is 0 for none.
AttentionPlan plan_attention(const Batch& batch, int64_t kv_heads, int64_t heads, int64_t window,
                             int threads);

}  // namespace octavo
