// The packed ragged batch of one step; field by field the StepBatch of the Python side.
#pragma once

#include <cstdint>
#include <string>

namespace octavo {

struct Batch {
  int64_t tokens;
  int64_t sequences;
  int64_t table_width;
  int64_t logits;
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* query_starts;   // sequences + 1
  const int32_t* kv_lens;
  const int32_t* block_tables;   // [sequences][table_width]
  const int32_t* slots;
  const int32_t* logits_rows;
};

struct BatchLimits {
  int64_t vocab;
  int64_t blocks;
  int64_t block_size;
};

// Empty if every index of the batch stays inside its array; else one sentence on what does not.
std::string check_batch(const Batch& batch, const BatchLimits& limits);

}  // namespace octavo
