#include "attention_plan.h"

#include <algorithm>
#include <numeric>
#include <queue>

#include "shared_prefix.h"

namespace octavo {

namespace {

constexpr int64_t kMaxVectors = 192;    // of an item: its sums stay in the second-level cache
constexpr int64_t kSegmentChunks = 4;   // of the deterministic mode: 512 tokens
constexpr double kWorthIt = 0.98;       // of the plain cut's time: below, another cut is taken
constexpr double kClaims = 16;          // at least so many for each thread, if items are small

// Rows that always go together: one decode, or some rows of a prefill chunk.
struct RowSet {
  int64_t first_row;
  int64_t rows;
  int64_t items = 0;          // per KV head
  int64_t states = 0;         // per query vector
  int64_t first_state = 0;    // in the plan's list, before the KV heads multiply it
  int64_t join = -1;          // place among those that are joined
};

// Row sets [first_set, first_set + sets) over a range of tokens, for every KV head.
struct Range {
  int64_t first_set;
  int64_t sets;
  int64_t first_row;
  int64_t rows;
  int64_t sequence;
  int64_t first_token;
  int64_t last_token;
  double cost;
  int64_t parts = 1;
};

class Planner {
 public:
  Planner(const Batch& batch, const AttentionWork& work, const AttentionPolicy& policy,
          int threads)
      : batch_(batch), work_(work), policy_(policy), threads_(threads),
        grid_{work.block_size, work.lanes,
              kScoreTokens / work.lanes * (policy.deterministic ? kSegmentChunks : 1)} {}

  AttentionPlan run() {
    if (policy_.deterministic) plan_.segment_units = grid_.grain;
    add_decodes();
    add_chunks();
    if (policy_.split && threads_ > 1) choose_parts();
    count_states();
    emit();
    group();
    return std::move(plan_);
  }

 private:
  int64_t oldest(int64_t position) const {
    return work_.window ? std::max<int64_t>(0, position - work_.window + 1) : 0;
  }

  void add_range(Range range) {
    range.cost = work_.cost.of(range.rows * work_.heads, range.last_token - range.first_token);
    ranges_.push_back(range);
  }

  // The tokens of [first, last) that any of the decodes in `order` sees.
  int64_t seen_from(const SharedPrefixes& found, const SharedRange& range) const {
    int64_t from = range.last_token;
    for (int64_t i = range.first; i < range.first + range.count; ++i)
      from = std::min(from, oldest(batch_.kv_lens[found.order[i]] - 1));
    return std::max(from, range.first_token);
  }

  SharedPrefixes share(std::vector<int32_t> decodes) const {
    if (!policy_.share || decodes.size() < 2) {
      std::vector<int64_t> from(decodes.size(), 0);
      return {std::move(decodes), std::move(from), {}};
    }
    const AttentionCost& cost = work_.cost;
    const auto cut = [&](int64_t tokens) { return grid_.start_of(grid_.grain_of(tokens)); };
    const auto pays = [&](int64_t, int64_t count, int64_t first, int64_t last) {
      const int64_t tokens = work_.window ? std::min(last - first, work_.window) : last - first;
      const double apart = cost.of(work_.heads, tokens) +
                           static_cast<double>(count - 1) * cost.again(work_.heads, tokens);
      const double states = static_cast<double>(2 * count * work_.heads) * cost.state;
      const double more_items = static_cast<double>(count) * (cost.item + cost.wait);
      return cost.of(count * work_.heads, tokens) + states + more_items < kWorthIt * apart;
    };
    return find_shared_prefixes(batch_, std::move(decodes), work_.block_size, cut, pays);
  }

  void add_decodes() {
    std::vector<int32_t> decodes;
    for (int64_t i = 0; i < batch_.sequences; ++i)
      if (batch_.query_starts[i + 1] - batch_.query_starts[i] == 1)
        decodes.push_back(static_cast<int32_t>(i));
    const SharedPrefixes found = share(std::move(decodes));
    for (const int32_t sequence : found.order) {
      sets_.push_back({static_cast<int64_t>(plan_.row_ids.size()), 1});
      plan_.row_ids.push_back(batch_.query_starts[sequence]);
    }
    const int64_t rows_each = std::max<int64_t>(1, kMaxVectors / work_.heads);
    for (const SharedRange& shared : found.ranges) {
      const int64_t from = seen_from(found, shared);
      if (from >= shared.last_token) continue;
      for (int64_t done = 0; done < shared.count; done += rows_each) {
        const int64_t first = shared.first + done;
        const int64_t count = std::min(rows_each, shared.count - done);
        add_range({first, count, first, count, found.order[first], from, shared.last_token, 0});
      }
    }
    for (size_t i = 0; i < found.order.size(); ++i) {
      const int64_t place = static_cast<int64_t>(i), end = batch_.kv_lens[found.order[i]];
      const int64_t from = std::max(found.own_from[i], oldest(end - 1));
      add_range({place, 1, place, 1, found.order[i], from, end, 0});
    }
  }

  void add_chunks() {
    const int64_t rows_each = std::max<int64_t>(1, kMaxVectors / work_.heads);
    for (int64_t i = 0; i < batch_.sequences; ++i) {
      const int64_t begin = batch_.query_starts[i], end = batch_.query_starts[i + 1];
      if (end - begin < 2) continue;
      for (int64_t row = begin; row < end; row += rows_each) {
        const int64_t rows = std::min(rows_each, end - row);
        const auto set = static_cast<int64_t>(sets_.size());
        const auto first = static_cast<int64_t>(plan_.row_ids.size());
        sets_.push_back({first, rows});
        for (int64_t r = row; r < row + rows; ++r)
          plan_.row_ids.push_back(static_cast<int32_t>(r));
        add_range({set, 1, first, rows, i, oldest(batch_.positions[row]),
                   batch_.positions[row + rows - 1] + 1, 0});
      }
    }
  }

  int64_t most_parts(const Range& range) const {
    return grid_.grain_of(range.last_token - 1) - grid_.grain_of(range.first_token) + 1;
  }

  double part_cost(const Range& range, int64_t parts) const {
    if (parts == 1) return range.cost;
    const double work = (range.cost - work_.cost.item) / static_cast<double>(parts);
    const auto vectors = static_cast<double>(range.rows * work_.heads);
    return work_.cost.item + work + vectors * work_.cost.state;
  }

  // When the last thread is done if each takes the most costly item that is left.
  double finish_time(const std::vector<int64_t>& parts) const {
    std::vector<double> costs;
    for (size_t i = 0; i < ranges_.size(); ++i)
      costs.insert(costs.end(), parts[i] * work_.kv_heads, part_cost(ranges_[i], parts[i]));
    std::sort(costs.begin(), costs.end(), std::greater<>());
    std::priority_queue<double, std::vector<double>, std::greater<>> busy;
    for (int thread = 0; thread < threads_; ++thread) busy.push(0);
    double last = 0;
    for (const double cost : costs) {
      const double end = busy.top() + cost;
      busy.pop();
      busy.push(end);
      last = std::max(last, end);
    }
    return last;
  }

  void choose_parts() {
    double total = 0;
    for (const Range& range : ranges_) total += range.cost * static_cast<double>(work_.kv_heads);
    const double ideal = total / threads_;
    std::vector<int64_t> best(ranges_.size(), 1), parts(ranges_.size());
    double shortest = kWorthIt * finish_time(best);
    for (const int64_t per_thread : {1, 2, 4, 8}) {
      if (shortest <= ideal) break;  // nothing to gain
      for (size_t i = 0; i < ranges_.size(); ++i) {
        const double wanted = ranges_[i].cost * static_cast<double>(per_thread) / ideal;
        parts[i] = std::clamp<int64_t>(static_cast<int64_t>(wanted + 0.5), 1,
                                       most_parts(ranges_[i]));
      }
      const double time = finish_time(parts);
      if (time >= shortest) continue;
      shortest = time;
      best = parts;
    }
    for (size_t i = 0; i < ranges_.size(); ++i) ranges_[i].parts = best[i];
  }

  // Tokens of part number `part`: cuts lie on the grid, so parts differ by a grain.
  std::pair<int64_t, int64_t> tokens_of(const Range& range, int64_t part) const {
    const int64_t first = grid_.grain_of(range.first_token), count = most_parts(range);
    const auto at = [&](int64_t index) {
      return grid_.start_of(first + count * index / range.parts);
    };
    return {part == 0 ? range.first_token : at(part),
            part + 1 == range.parts ? range.last_token : at(part + 1)};
  }

  int64_t segments(int64_t first_token, int64_t last_token) const {
    if (!policy_.deterministic) return 1;
    return grid_.grain_of(last_token - 1) - grid_.grain_of(first_token) + 1;
  }

  void count_states() {
    for (const Range& range : ranges_)
      for (int64_t set = range.first_set; set < range.first_set + range.sets; ++set) {
        sets_[set].items += range.parts;
        for (int64_t part = 0; part < range.parts; ++part) {
          const auto [first, last] = tokens_of(range, part);
          sets_[set].states += segments(first, last);
        }
      }
    int64_t next = 0;
    for (RowSet& set : sets_) {
      if (set.items < 2) continue;
      set.join = joined_++;
      set.first_state = next;
      next += set.states;
    }
    plan_.states.resize(next * work_.kv_heads);
    plan_.joins.resize(joined_ * work_.kv_heads);
    for (int64_t head = 0; head < work_.kv_heads; ++head)
      for (const RowSet& set : sets_)
        if (set.join >= 0)
          plan_.joins[head * joined_ + set.join] = {
              set.first_row, set.rows, head, set.items, head * next + set.first_state, 0};
  }

  void emit() {
    for (const Range& range : ranges_) {
      const double cost = part_cost(range, range.parts);
      plan_.most_vectors = std::max(plan_.most_vectors, range.rows * work_.heads);
      for (int64_t part = 0; part < range.parts; ++part) {
        const auto [first, last] = tokens_of(range, part);
        for (int64_t head = 0; head < work_.kv_heads; ++head)
          add_item({range.sequence, range.first_row, range.rows, head, first, last, cost, 0, 0, 0},
                   range);
      }
    }
    std::stable_sort(plan_.items.begin(), plan_.items.end(),
                     [](const AttendItem& a, const AttendItem& b) { return a.cost > b.cost; });
  }

  // Small items are claimed several at a time, costly ones alone: or whoever takes the first few
  // would still be at them when all others are done.
  void group() {
    double total = 0;
    for (const AttendItem& item : plan_.items) total += item.cost;
    const double enough = total / (kClaims * threads_);
    double claimed = enough;
    for (size_t i = 0; i < plan_.items.size(); ++i) {
      const double cost = plan_.items[i].cost;
      if (claimed + cost > enough) {
        plan_.claims.push_back(static_cast<int64_t>(i));
        claimed = 0;
      }
      claimed += cost;
    }
    plan_.claims.push_back(static_cast<int64_t>(plan_.items.size()));
  }

  // Ranges come in the order of tokens, and so do the states of each join.
  void add_item(AttendItem item, const Range& range) {
    const int64_t join = sets_[range.first_set].join;
    if (join >= 0) {
      item.first_join = item.kv_head * joined_ + join;
      item.joins = range.sets;
      item.state = plan_.state_vectors;
      const int64_t count = segments(item.first_token, item.last_token);
      const int64_t vectors = item.rows * work_.heads;
      for (int64_t j = 0; j < item.joins; ++j) {
        Join& to = plan_.joins[item.first_join + j];
        const int64_t offset = (to.first_row - item.first_row) * work_.heads;
        for (int64_t segment = 0; segment < count; ++segment)
          plan_.states[to.first_state + to.states++] = item.state + segment * vectors + offset;
      }
      plan_.state_vectors += count * vectors;
    }
    plan_.items.push_back(item);
  }

  const Batch& batch_;
  const AttentionWork& work_;
  const AttentionPolicy& policy_;
  const int threads_;
  const TokenGrid grid_;
  std::vector<RowSet> sets_;
  std::vector<Range> ranges_;
  int64_t joined_ = 0;
  AttentionPlan plan_;
};

}  // namespace

AttentionPlan plan_attention(const Batch& batch, const AttentionWork& work,
                             const AttentionPolicy& policy, int threads) {
  return Planner(batch, work, policy, threads).run();
}

}  // namespace octavo
