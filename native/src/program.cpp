#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace octavo {

namespace {

constexpr int64_t kBlockRows = 128;   // of activations that fit the second-level cache
constexpr int64_t kMatrixBlockRows = 256;  // where weights are widened once a block
constexpr int64_t kPrepareAlone = 2;  // rows that each thread prepares for itself: no barrier
constexpr int kHelped = 4;            // other threads whose columns one takes when its own are done

int64_t share(int64_t count, int part, int parts) { return count * part / parts; }

}  // namespace

Program::Program(const KernelTable& kernels, Pool& pool, KVCache& kv,
                 const AttentionPolicy& policy)
    : kernels_(kernels),
      pool_(pool),
      kv_(kv),
      policy_(policy),
      scratch_(pool.threads()),
      offers_(std::make_unique<Offer[]>(pool.threads())) {}

int Program::buffer(int64_t features, Rows rows) {
  buffers_.push_back({features, rows, Memory()});
  token_capacity_ = logits_capacity_ = 0;
  return static_cast<int>(buffers_.size()) - 1;
}

int Program::rope(Rope rope) {
  ropes_.push_back(std::move(rope));
  return static_cast<int>(ropes_.size()) - 1;
}

void Program::append(const Op& appended) {
  Op op = appended;
  if (op.kind == Op::Kind::kEmbed) vocab_ = std::min(vocab_, op.weight->packed().outputs);
  if (op.kind == Op::Kind::kLinear) {
    for (const bool many : {false, true})
      max_prepared_ = std::max(max_prepared_, prepared_stride(op, rounded_to(op, many)));
    max_inputs_ = std::max(max_inputs_, op.weight->packed().inputs);
  }
  if (op.kind == Op::Kind::kAttend) {
    const AttentionShape& shape = op.attention;
    const PlanKey key{shape.kv_heads, shape.heads / shape.kv_heads, shape.window};
    const auto same = [&](const PlanKey& other) {
      return other.kv_heads == key.kv_heads && other.heads == key.heads &&
             other.window == key.window;
    };
    const auto found = std::find_if(plan_keys_.begin(), plan_keys_.end(), same);
    op.plan = static_cast<int>(found - plan_keys_.begin());
    if (found == plan_keys_.end()) plan_keys_.push_back(key);
  }
  ops_.push_back(op);
  panels_.push_back(op.kind == Op::Kind::kLinear ? std::make_unique<Claims[]>(pool_.threads()) : nullptr);
  cut_segments();
}

void Program::cut_segments() {
  segments_.clear();
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    const bool rows_only = op.kind != Op::Kind::kAttend && op.kind != Op::Kind::kTakeRows &&
                           buffers_[op.out].rows == Rows::kTokens;
    if (rows_only && !segments_.empty() && segments_.back().rows_only)
      segments_.back().last = i + 1;
    else
      segments_.push_back({i, i + 1, rows_only});
  }
  counters_ = std::make_unique<Counter[]>(segments_.size());
}

int64_t Program::result_features() const { return buffers_[ops_.back().out].features; }

float* Program::row(int buffer, int64_t index) const {
  return buffers_[buffer].data.as<float>() + index * buffers_[buffer].features;
}

// From so many rows a thread on, threads take rows instead of columns: they share nothing then, but
// every one reads all weights, which the more of them there are the more rows must pay for.
int64_t Program::rows_to_part() const {
  return kernels_.matrix_rows > 0 ? 128 : std::min(8 * pool_.threads(), 48);
}

int64_t Program::block_rows() const {
  return kernels_.matrix_rows > 0 ? kMatrixBlockRows : kBlockRows;
}

int64_t Program::num_rows(Rows rows) const {
  return rows == Rows::kTokens ? batch_->tokens : batch_->logits;
}

// What rows that meet a weight are rounded to, few or many: as the weight is, to bfloat16, or not at all
// (kF32).
Format Program::rounded_to(const Op& op, bool many) const {
  const Format format = op.weight->packed().format;
  if (format == Format::kBF16) return kernels_.bfloat_products ? format : Format::kF32;
  return is_quantised(format) && many && kernels_.matrix_rows > 0 ? Format::kBF16 : format;
}

// The rows of the whole batch decide or, for equal bits in any company, nothing does.
Format Program::rounded_to(const Op& op) const {
  const bool many = num_rows(buffers_[op.out].rows) >= kernels_.matrix_rows;
  return rounded_to(op, many || policy_.deterministic);
}

// Whether an operation leaves its result as the rows that the next one meets its weight with.
bool Program::feeds(const Op& op) const {
  return op.feeds_next && op.gate != Gate::kGeluTanh && op.softcap == 0.0f &&
         kernels_.matrix_rows > 0 && rounded_to(op) == Format::kBF16 &&
         rounded_to(ops_[&op - ops_.data() + 1]) == Format::kBF16 &&
         op.weight->packed().features() % kGroup == 0;
}

bool Program::is_fed(const Op& op) const { return &op != ops_.data() && feeds(*(&op - 1)); }

// What meets float values without a norm is read where it is.
bool Program::is_in_place(const Op& op) const {
  return rounded_to(op) == Format::kF32 && !op.norm;
}

int64_t Program::prepared_stride(const Op& op, Format rounded) const {
  const int64_t inputs = op.weight->packed().inputs;
  return rounded == Format::kF32 ? inputs * static_cast<int64_t>(sizeof(float))
                                 : quantised_row_bytes(rounded, inputs);
}

void Program::check(const Batch& batch) const {
  const KVShape& shape = kv_.shape();
  const std::string fault = check_batch(batch, {vocab_, shape.blocks, shape.block_size});
  if (!fault.empty()) throw std::invalid_argument(fault);
}

void Program::reserve_rows(int64_t tokens, int64_t logits) {
  if (tokens <= token_capacity_ && logits <= logits_capacity_) return;
  // Decodes come and go one by one: grow in steps so that a step seldom allocates.
  const auto rounded = [](int64_t rows) { return (rows + 63) / 64 * 64; };
  token_capacity_ = std::max(token_capacity_, rounded(tokens));
  logits_capacity_ = std::max(logits_capacity_, rounded(logits));
  for (Buffer& buffer : buffers_) {
    const int64_t rows = buffer.rows == Rows::kTokens ? token_capacity_ : logits_capacity_;
    const size_t bytes = rows * buffer.features * sizeof(float);
    if (buffer.data.size() < bytes) buffer.data = Memory(bytes);
  }
  const int64_t prepared_rows = std::max(token_capacity_, logits_capacity_) + kPairRows;
  prepared_ = Memory(prepared_rows * max_prepared_);
  if (kernels_.matrix_rows > 0) fed_ = Memory(prepared_rows * max_prepared_);
  angles_.clear();
  for (const Rope& rope : ropes_)
    angles_.emplace_back(token_capacity_ * 2 * rope.inv_freq.size() * sizeof(float));
}

void Program::reserve(const Batch& batch) {
  reserve_rows(batch.tokens, batch.logits);
  const int64_t rows = std::max(block_rows(), kPrepareAlone) + kPairRows;
  for (Scratch& scratch : scratch_) {
    scratch.normed.resize(max_inputs_);
    if (scratch.prepared.size() < static_cast<size_t>(rows * max_prepared_)) {
      scratch.prepared = Memory(rows * max_prepared_);
      if (kernels_.matrix_rows > 0) scratch.fed = Memory(rows * max_prepared_);
    }
    const size_t widened = gemm_scratch(max_inputs_, kernels_.lanes);
    if (scratch.widened.size() < widened) scratch.widened = Memory(widened);
  }
  const int threads = pool_.threads();
  by_blocks_ = batch.tokens >= threads * rows_to_part();
  if (by_blocks_) {
    // As many blocks as fill every thread equally often.
    const int64_t rounds = (batch.tokens + block_rows() * threads - 1) / (block_rows() * threads);
    block_rows_ = (batch.tokens + rounds * threads - 1) / (rounds * threads);
  }
  for (size_t i = 0; i < segments_.size(); ++i) {
    counters_[i].next.store(0, std::memory_order_relaxed);
    counters_[i].done.store(0, std::memory_order_relaxed);
  }
}

const float* Program::run(Batch batch) {
  check(batch);
  place_tokens(batch, kv_.shape().block_size, places_);
  int32_t last_slot = 0;
  for (int64_t i = 0; i < batch.tokens; ++i) last_slot = std::max(last_slot, batch.slots[i]);
  const KVCache::Use use(kv_, last_slot / kv_.shape().block_size + 1);
  reserve(batch);
  plan_step(batch);
  batch_ = &batch;
  pool_.run([this](int thread) { run_thread(thread); });
  batch_ = nullptr;
  return row(ops_.back().out, 0);
}

void Program::run_thread(int thread) {
  const int threads = pool_.threads();
  compute_angles(share(batch_->tokens, thread, threads),
                 share(batch_->tokens, thread + 1, threads));
  offer_columns(thread);
  pool_.barrier().wait();
  for (size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    if (segment.rows_only && by_blocks_) {
      run_blocks(segment, counters_[i], thread);
      pool_.barrier().wait();
      continue;
    }
    for (size_t at = segment.first; at < segment.last; ++at) {
      if (ops_[at].kind == Op::Kind::kAttend)
        attend(ops_[at], counters_[i], thread);
      else
        run_by_columns(ops_[at], thread);
      pool_.barrier().wait();
    }
  }
}

// A thread's share of all linears, long before others look for more to do.
void Program::offer_columns(int thread) {
  const int threads = pool_.threads();
  for (size_t i = 0; i < ops_.size(); ++i) {
    if (ops_[i].kind != Op::Kind::kLinear) continue;
    const int64_t panels = ops_[i].weight->packed().panels;
    panels_[i][thread].offer(share(panels, thread, threads), share(panels, thread + 1, threads));
  }
}

void Program::compute_angles(int64_t begin, int64_t end) {
  for (size_t r = 0; r < ropes_.size(); ++r) {
    const Rope& rope = ropes_[r];
    const auto pairs = static_cast<int64_t>(rope.inv_freq.size());
    for (int64_t token = begin; token < end; ++token) {
      float* cos = angles_[r].as<float>() + token * 2 * pairs;
      for (int64_t i = 0; i < pairs; ++i) {
        // The product is rounded to float32, as in the tables that models were trained with.
        const float angle = static_cast<float>(batch_->positions[token]) * rope.inv_freq[i];
        cos[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * rope.magnitude;
        cos[pairs + i] = static_cast<float>(std::sin(static_cast<double>(angle))) * rope.magnitude;
      }
    }
  }
}

void Program::run_blocks(const Segment& segment, Counter& counter, int thread) {
  for (;;) {
    const int64_t begin = counter.next.fetch_add(block_rows_, std::memory_order_relaxed);
    if (begin >= batch_->tokens) return help_others(counter, thread);
    const int64_t end = std::min(batch_->tokens, begin + block_rows_);
    for (size_t at = segment.first; at < segment.last; ++at) {
      if (ops_[at].kind == Op::Kind::kLinear)
        linear_of_block(ops_[at], begin, end, thread);
      else
        on_rows(ops_[at], begin, end, thread);
    }
    counter.done.fetch_add(end - begin, std::memory_order_relaxed);
  }
}

void Program::linear_of_block(const Op& op, int64_t begin, int64_t end, int thread) {
  if (!is_fed(op)) prepare(op, begin, end, scratch_[thread].prepared.data(), 0, thread);
  Offer& offer = offers_[thread];
  offer.op.store(&op, std::memory_order_relaxed);
  offer.begin.store(begin, std::memory_order_relaxed);
  offer.end.store(end, std::memory_order_relaxed);
  offer.panels.offer(0, op.weight->packed().panels);
  while (help(thread, thread)) {}
  for (Patience patience; !offer.panels.are_finished();) patience.wait();
}

// Computes some columns of the linear that `owner` computes of its block; false if there are no more.
bool Program::help(int owner, int thread) {
  Offer& offer = offers_[owner];
  const Op* op;
  int64_t begin, end;
  const Claims::Part panels = offer.panels.take([&] {
    op = offer.op.load(std::memory_order_relaxed);
    begin = offer.begin.load(std::memory_order_relaxed);
    end = offer.end.load(std::memory_order_relaxed);
  });
  if (!panels) return false;
  Scratch& scratch = scratch_[owner];
  const uint8_t* x = is_fed(*op)        ? scratch.fed.data()
                     : is_in_place(*op) ? reinterpret_cast<const uint8_t*>(row(op->in, begin))
                                        : scratch.prepared.data();
  gemm(*op, x, scratch.fed.data(), begin, end, panels, thread);
  offer.panels.finish(panels);
  return true;
}

// Until all blocks are done.
void Program::help_others(const Counter& counter, int thread) {
  const int threads = pool_.threads();
  Patience patience;
  while (counter.done.load(std::memory_order_relaxed) < batch_->tokens) {
    bool helped = false;
    for (int i = 1; i < threads; ++i) helped |= help((thread + i) % threads, thread);
    if (helped) patience = {};
    patience.wait();
  }
}

void Program::run_by_columns(const Op& op, int thread) {
  if (op.kind == Op::Kind::kLinear) return linear_by_columns(op, thread);
  const int64_t rows = num_rows(buffers_[op.out].rows);
  on_rows(op, share(rows, thread, pool_.threads()), share(rows, thread + 1, pool_.threads()),
          thread);
}

void Program::linear_by_columns(const Op& op, int thread) {
  const int64_t rows = num_rows(buffers_[op.out].rows);
  const int threads = pool_.threads();
  const uint8_t* x;
  if (is_fed(op)) {
    x = fed_.data();
  } else if (rows <= kPrepareAlone || is_in_place(op)) {
    x = prepare(op, 0, rows, scratch_[thread].prepared.data(), 0, thread);
  } else {
    const int64_t begin = share(rows, thread, threads), end = share(rows, thread + 1, threads);
    x = prepare(op, begin, end, prepared_.data(), begin, thread);
    pool_.barrier().wait();
  }
  Claims* panels = panels_[&op - ops_.data()].get();
  for (int i = 0; i < std::min(threads, 1 + kHelped); ++i)
    while (const Claims::Part part = panels[(thread + i) % threads].take())
      gemm(op, x, fed_.data(), 0, rows, part, thread);
}

// Norms and quantises rows [begin, end) of the input as the weight's format wants it, to be rows number
// `place` and so on of `rows`; returns where all rows lie.
const uint8_t* Program::prepare(const Op& op, int64_t begin, int64_t end, uint8_t* rows, int64_t place,
                                int thread) {
  if (is_in_place(op)) return reinterpret_cast<const uint8_t*>(row(op.in, begin));
  const PackedWeight& weight = op.weight->packed();
  const Format format = rounded_to(op);
  for (int64_t r = begin; r < end; ++r, ++place) {
    const float* x = row(op.in, r);
    if (format == Format::kF32) {
      uint8_t* out = rows + place * prepared_stride(op, format);
      kernels_.rms_norm(x, op.norm, op.eps, weight.inputs, reinterpret_cast<float*>(out));
      continue;
    }
    if (op.norm) {
      float* normed = scratch_[thread].normed.data();
      kernels_.rms_norm(x, op.norm, op.eps, weight.inputs, normed);
      x = normed;
    }
    kernels_.quantise(format, x, weight.inputs, rows, place);
  }
  return rows;
}

// `fed`: where the result goes if it feeds the next operation.
void Program::gemm(const Op& op, const uint8_t* x, uint8_t* fed, int64_t begin, int64_t end,
                   const Claims::Part& panels, int thread) {
  GemmArgs args{};
  args.x = x;
  args.x_stride = is_in_place(op) ? buffers_[op.in].features * static_cast<int64_t>(sizeof(float))
                                  : prepared_stride(op, rounded_to(op));
  args.rows = end - begin;
  args.is_bfloat = rounded_to(op) == Format::kBF16;
  args.first_panel = panels.begin;
  args.last_panel = panels.end;
  args.out = row(op.out, begin);
  args.out_rows = feeds(op) ? fed : nullptr;
  args.out_stride = buffers_[op.out].features;
  args.residual = op.other >= 0 ? row(op.other, begin) : nullptr;
  args.gate = op.gate;
  args.softcap = op.softcap;
  args.scratch = scratch_[thread].widened.data();
  kernels_.gemm(op.weight->packed(), args);
}

void Program::on_rows(const Op& op, int64_t begin, int64_t end, int thread) {
  (void)thread;
  for (int64_t r = begin; r < end; ++r) {
    float* out = row(op.out, r);
    const int64_t features = buffers_[op.out].features;
    switch (op.kind) {
      case Op::Kind::kEmbed:
        kernels_.unpack_row(op.weight->packed(), batch_->token_ids[r], op.scale, out);
        break;
      case Op::Kind::kNorm:
        kernels_.rms_norm(row(op.in, r), op.norm, op.eps, features, out);
        break;
      case Op::Kind::kAdd:
        kernels_.add(row(op.in, r), row(op.other, r), features, out);
        break;
      case Op::Kind::kGated:
        kernels_.gated(row(op.in, r), op.gate, features, out);
        break;
      case Op::Kind::kTakeRows:
        std::memcpy(out, row(op.in, batch_->logits_rows[r]), features * sizeof(float));
        break;
      case Op::Kind::kRopeAndStore: {
        const auto pairs = static_cast<int64_t>(ropes_[op.rope].inv_freq.size());
        const float* cos = angles_[op.rope].as<float>() + r * 2 * pairs;
        kernels_.rope_and_store(kv_.layer(op.layer), op.attention,
                                {row(op.in, r), cos, cos + pairs, batch_->slots[r]});
        break;
      }
      case Op::Kind::kLinear:
      case Op::Kind::kAttend:
        break;  // not row by row
    }
  }
}

}  // namespace octavo
