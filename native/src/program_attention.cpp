// Attention in a step: its plan, and the items that threads take from it.
#include <algorithm>

#include "program.h"

namespace octavo {

void Program::plan_step(const Batch& batch) {
  plans_.clear();
  items_left_.resize(plan_keys_.size());
  joins_capacity_.resize(plan_keys_.size(), 0);
  const int64_t dim = kv_.shape().dim;
  int64_t state_vectors = 0, most_vectors = 1;
  for (size_t i = 0; i < plan_keys_.size(); ++i) {
    const PlanKey& key = plan_keys_[i];
    const AttentionWork work{key.kv_heads, key.heads, key.window, kv_.shape().block_size,
                             kernels_.lanes, attention_cost(kernels_, dim, kv_.shape().type)};
    plans_.push_back(plan_attention(batch, work, policy_, pool_.threads()));
    const AttentionPlan& plan = plans_.back();
    const auto joins = static_cast<int64_t>(plan.joins.size());
    if (joins > joins_capacity_[i]) {
      items_left_[i] = std::make_unique<std::atomic<int64_t>[]>(joins);
      joins_capacity_[i] = joins;
    }
    for (int64_t j = 0; j < joins; ++j)
      items_left_[i][j].store(plan.joins[j].items, std::memory_order_relaxed);
    state_vectors = std::max(state_vectors, plan.state_vectors);
    most_vectors = std::max(most_vectors, plan.most_vectors);
  }
  const size_t state_bytes = state_vectors * (dim + 2) * sizeof(float);
  if (states_.size() < state_bytes) states_ = Memory(state_bytes);
  const size_t attention_bytes = attend_scratch(most_vectors, dim) * sizeof(float);
  for (Scratch& scratch : scratch_)
    if (scratch.attention.size() < attention_bytes) scratch.attention = Memory(attention_bytes);
}

void Program::attend(const Op& op, Counter& counter, int thread) {
  const AttentionPlan& plan = plans_[op.plan];
  const auto count = static_cast<int64_t>(plan.claims.size()) - 1;
  for (;;) {
    const int64_t claim = counter.next.fetch_add(1, std::memory_order_relaxed);
    if (claim >= count) return;
    const int64_t end = plan.claims[claim + 1];
    for (int64_t i = plan.claims[claim]; i < end; ++i) {
      AttendArgs args = attend_args(op, plan, plan.items[i], thread);
      // Behind the claimed items, what another thread may take first is still worth asking for.
      const int64_t later = std::min(counter.next.load(std::memory_order_relaxed), count);
      const int64_t after = i + 1 < end ? i + 1 : plan.claims[later];
      AttendArgs next;
      if (after < plan.claims[count]) {
        next = attend_args(op, plan, plan.items[after], thread);
        args.after = &next;
      }
      kernels_.attend(kv_.layer(op.layer), op.attention, args);
      finish_item(op, plan, plan.items[i], thread);
    }
  }
}

AttendArgs Program::attend_args(const Op& op, const AttentionPlan& plan, const AttendItem& item,
                                int thread) {
  const AttentionShape& shape = op.attention;
  const int64_t offset = item.kv_head * (shape.heads / shape.kv_heads) * shape.dim;
  AttendArgs args{};
  args.q = row(op.in, 0) + offset;
  args.q_stride = buffers_[op.in].features;
  args.positions = batch_->positions;
  args.row_ids = plan.row_ids.data() + item.first_row;
  args.rows = item.rows;
  args.block_table = batch_->block_tables + item.sequence * batch_->table_width;
  args.kv_head = item.kv_head;
  args.first_token = item.first_token;
  args.last_token = item.last_token;
  args.segment_units = plan.segment_units;
  args.scratch = scratch_[thread].attention.as<float>();
  args.out = row(op.out, 0) + offset;
  args.out_stride = buffers_[op.out].features;
  if (item.joins > 0) args.partial = states_.as<float>() + item.state * (shape.dim + 2);
  return args;
}

// Joins the states of rows of which this item was the last.
void Program::finish_item(const Op& op, const AttentionPlan& plan, const AttendItem& item,
                          int thread) {
  for (int64_t j = item.first_join; j < item.first_join + item.joins; ++j) {
    std::atomic<int64_t>& left = items_left_[op.plan][j];
    if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
    left.store(plan.joins[j].items, std::memory_order_relaxed);  // for the next layer
    join_states(op, plan, plan.joins[j], thread);
  }
}

void Program::join_states(const Op& op, const AttentionPlan& plan, const Join& join, int thread) {
  const AttentionShape& shape = op.attention;
  const int64_t heads = shape.heads / shape.kv_heads;
  std::vector<const float*>& states = scratch_[thread].states;
  states.resize(join.states);
  for (int64_t v = 0; v < join.rows * heads; ++v) {
    for (int64_t i = 0; i < join.states; ++i)
      states[i] = states_.as<float>() + (plan.states[join.first_state + i] + v) * (shape.dim + 2);
    float* out = row(op.out, plan.row_ids[join.first_row + v / heads]) +
                 (join.kv_head * heads + v % heads) * shape.dim;
    kernels_.join_states(states.data(), join.states, shape.dim, out);
  }
}

}  // namespace octavo
