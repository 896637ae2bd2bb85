// Which decodes of a batch read the same KV: their block tables start with the same blocks, as
// those of forks and of requests with one system prompt do.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "batch.h"

namespace octavo {

// Decodes [first, first + count) of the sorted list all read tokens [first_token, last_token) of
// the same blocks. A list of these is in the order of tokens for each decode.
struct SharedRange {
  int64_t first;
  int64_t count;
  int64_t first_token;
  int64_t last_token;
};

struct SharedPrefixes {
  std::vector<int32_t> order;     // sequences with one query each, sorted by block table
  std::vector<int64_t> own_from;  // per place in `order`: first token that is its own to read
  std::vector<SharedRange> ranges;
};

// Finds what is worth sharing. `cut` rounds a number of tokens down to where a cut may be;
// `pays(count, first, last)` says whether `count` decodes should read those tokens together.
SharedPrefixes find_shared_prefixes(
    const Batch& batch, std::vector<int32_t> decodes, int64_t block_size,
    const std::function<int64_t(int64_t)>& cut,
    const std::function<bool(int64_t first, int64_t count, int64_t first_token,
                             int64_t last_token)>& pays);

}  // namespace octavo
