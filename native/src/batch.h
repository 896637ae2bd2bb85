// The packed ragged batch of one step; field by field the StepBatch of the Python side, and what
// follows from it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace octavo {

struct Batch {
  int64_t tokens;
  int64_t sequences;
  int64_t table_width;
  int64_t logits;
  const int32_t* token_ids;
  const int32_t* query_starts;   // sequences + 1
  const int32_t* kv_lens;
  const int32_t* block_tables;   // [sequences][table_width]
  const int32_t* logits_rows;

  const int32_t* positions;      // of each token in its sequence; set by `place_tokens`
  const int32_t* slots;          // where each token's KV goes, likewise
};

struct BatchLimits {
  int64_t vocab;
  int64_t blocks;
  int64_t block_size;
};

// Empty if every index of the batch stays inside its array; else one sentence on what does not.
std::string check_batch(const Batch& batch, const BatchLimits& limits);

// Sets the positions and slots of a batch that is in order; they lie in `memory`.
void place_tokens(Batch& batch, int64_t block_size, std::vector<int32_t>& memory);

}  // namespace octavo
