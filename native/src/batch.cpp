#include "batch.h"

namespace octavo {

namespace {

bool all_within(const int32_t* values, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= limit) return false;
  return true;
}

std::string check_sequence(const Batch& batch, const BatchLimits& limits, int64_t i) {
  const std::string name = "Sequence " + std::to_string(i) + " of the batch ";
  const int64_t begin = batch.query_starts[i], end = batch.query_starts[i + 1];
  const int64_t kv_len = batch.kv_lens[i];
  if (begin > end || end > batch.tokens) return name + "has query starts that do not ascend.";
  const int64_t blocks = (kv_len + limits.block_size - 1) / limits.block_size;
  if (kv_len < end - begin || blocks > batch.table_width)
    return name + "has a KV length that its block table or its tokens contradict.";
  if (!all_within(batch.block_tables + i * batch.table_width, blocks, limits.blocks))
    return name + "has a block id outside the KV cache.";
  return "";
}

}  // namespace

std::string check_batch(const Batch& batch, const BatchLimits& limits) {
  if (!all_within(batch.token_ids, batch.tokens, limits.vocab))
    return "The batch has a token id outside the vocabulary.";
  if (!all_within(batch.logits_rows, batch.logits, batch.tokens))
    return "The batch has a logits row outside itself.";
  if (batch.query_starts[0] != 0 || batch.query_starts[batch.sequences] != batch.tokens)
    return "The batch's query starts do not span its tokens.";
  for (int64_t i = 0; i < batch.sequences; ++i) {
    std::string fault = check_sequence(batch, limits, i);
    if (!fault.empty()) return fault;
  }
  return "";
}

void place_tokens(Batch& batch, int64_t block_size, std::vector<int32_t>& memory) {
  memory.resize(2 * batch.tokens);
  int32_t* positions = memory.data();
  int32_t* slots = positions + batch.tokens;
  for (int64_t i = 0; i < batch.sequences; ++i) {
    const int32_t* table = batch.block_tables + i * batch.table_width;
    const int64_t end = batch.query_starts[i + 1];
    for (int64_t row = batch.query_starts[i]; row < end; ++row) {
      const int64_t position = batch.kv_lens[i] - (end - row);
      positions[row] = static_cast<int32_t>(position);
      slots[row] = static_cast<int32_t>(table[position / block_size] * block_size +
                                        position % block_size);
    }
  }
  batch.positions = positions;
  batch.slots = slots;
}

}  // namespace octavo
