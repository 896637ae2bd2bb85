#include "attention_plan.h"

#include <algorithm>

namespace octavo {

namespace {

constexpr int64_t kMaxVectors = 192;      // of a prefill item: its sums stay in the second-level cache
constexpr int64_t kMinSplitTokens = 128;  // below, joining the parts costs more than it saves
constexpr int64_t kItemsPerThread = 4;    // enough for the last items to even out
constexpr int64_t kOverheadTokens = 16;   // starting an item costs about as much as these

AttendItem make_item(const Batch& batch, int64_t sequence, int64_t row, int64_t rows,
                     int64_t kv_head, int64_t heads, int64_t window) {
  AttendItem item{};
  item.sequence = sequence;
  item.row = row;
  item.rows = rows;
  item.kv_head = kv_head;
  item.first_token = window ? std::max<int64_t>(0, batch.positions[row] - window + 1) : 0;
  item.last_token = batch.positions[row + rows - 1] + 1;
  item.group = -1;
  item.cost = rows * heads * (item.last_token - item.first_token + kOverheadTokens);
  return item;
}

void split(const AttendItem& whole, int64_t parts, int64_t heads, AttentionPlan& plan) {
  const auto group = static_cast<int64_t>(plan.groups.size());
  plan.groups.push_back({parts, plan.partial_vectors});
  plan.partial_vectors += parts * whole.rows * heads;
  const int64_t tokens = whole.last_token - whole.first_token;
  for (int64_t part = 0; part < parts; ++part) {
    AttendItem item = whole;
    item.first_token = whole.first_token + tokens * part / parts;
    item.last_token = whole.first_token + tokens * (part + 1) / parts;
    item.cost = whole.cost / parts;
    item.group = group;
    item.part = part;
    plan.items.push_back(item);
  }
}

}  // namespace

AttentionPlan plan_attention(const Batch& batch, int64_t kv_heads, int64_t heads, int64_t window,
                             int threads) {
  std::vector<AttendItem> wholes;
  const int64_t rows_each = std::max<int64_t>(1, kMaxVectors / heads);
  int64_t total = 0;
  for (int64_t i = 0; i < batch.sequences; ++i) {
    const int64_t begin = batch.query_starts[i], end = batch.query_starts[i + 1];
    for (int64_t row = begin; row < end; row += rows_each) {
      const int64_t rows = std::min(rows_each, end - row);
      for (int64_t head = 0; head < kv_heads; ++head) {
        wholes.push_back(make_item(batch, i, row, rows, head, heads, window));
        total += wholes.back().cost;
      }
    }
  }
  AttentionPlan plan;
  const int64_t target = std::max<int64_t>(1, total / (threads * kItemsPerThread));
  for (const AttendItem& whole : wholes) {
    plan.most_vectors = std::max(plan.most_vectors, whole.rows * heads);
    const int64_t most = (whole.last_token - whole.first_token) / kMinSplitTokens;
    const int64_t parts = threads == 1 ? 1 : std::min(most, (whole.cost + target / 2) / target);
    if (parts > 1)
      split(whole, parts, heads, plan);
    else
      plan.items.push_back(whole);
  }
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const AttendItem& a, const AttendItem& b) { return a.cost > b.cost; });
  return plan;
}

}  // namespace octavo
