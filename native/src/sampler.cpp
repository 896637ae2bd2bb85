// Compiled without contraction of products and sums: the results are numpy's.
#include "sampler.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "candidates.h"

namespace octavo {

namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.4426950408889634f;
// Logits of a call below which waking other threads costs more than they save.
constexpr int64_t kFewLogits = 32768;

SamplingStatus status_of(float best, bool has_nan) {
  if (has_nan) return SamplingStatus::kNan;
  if (best == kLowest) return SamplingStatus::kNoneFinite;
  return std::isinf(best) ? SamplingStatus::kInfinite : SamplingStatus::kOk;
}

// A logit that is at most the smallest whose token weighs `weight` or more: roundings of the weight
// are far within the margins.
float logit_of_weight(double weight, float top, float factor) {
  const double power = std::log2(weight);
  if (!(power > -99.0)) return kLowest;
  const double logit = top + (power * (1.0 + 1e-5) - 1e-3) / factor;
  return std::nextafter(static_cast<float>(logit), kLowest);
}

// What a nucleus must add up to.
int64_t wanted_mass(double top_p, int64_t total) {
  return std::min(total, static_cast<int64_t>(std::ceil(top_p * static_cast<double>(total))));
}

}  // namespace

// What a thread needs for a row.
struct Sampler::Scratch {
  explicit Scratch(int64_t vocab)
      : copy(new float[vocab]),
        raw_max(new float[token_blocks(vocab)]),
        block_max(new float[token_blocks(vocab)]),
        order(new float[token_blocks(vocab)]),
        block_masses(new int64_t[token_blocks(vocab)]),
        candidates(vocab) {}

  std::unique_ptr<float[]> copy;       // a row that is changed
  std::unique_ptr<float[]> raw_max;    // of the row's blocks
  std::unique_ptr<float[]> block_max;  // of the copy's blocks
  std::unique_ptr<float[]> order;      // maxima of blocks, to be put in order
  std::unique_ptr<int64_t[]> block_masses;
  Candidates candidates;
};

// A row of logits, raw or changed, its largest value finite.
struct Sampler::View {
  const float* logits;
  const float* block_max;
  float best;
};

Sampler::Sampler(const KernelTable& kernels, Pool& pool, int64_t vocab)
    : kernels_(kernels), pool_(pool), vocab_(vocab) {
  for (int thread = 0; thread < pool.threads(); ++thread)
    scratch_.push_back(std::make_unique<Scratch>(vocab));
}

Sampler::~Sampler() = default;

template <typename Body>
void Sampler::over_rows(int64_t count, Body body) {
  if (count <= 1 || count * vocab_ < kFewLogits) {
    for (int64_t i = 0; i < count; ++i) body(i, *scratch_[0]);
    return;
  }
  std::atomic<int64_t> next{0};
  pool_.run([&](int thread) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
      body(i, *scratch_[thread]);
  });
}

std::vector<SampledRow> Sampler::sample(const std::vector<SamplingRow>& rows) {
  std::vector<SampledRow> out(rows.size());
  for (size_t i = 0; i < rows.size(); ++i)  // here, because a job must not throw
    out[i].score.likeliest.resize(std::max<int64_t>(rows[i].state->settings().num_top, 0));
  over_rows(static_cast<int64_t>(rows.size()), [&](int64_t i, Scratch& scratch) {
    sample_row(rows[i], scratch, out[i]);
    if (out[i].status != SamplingStatus::kOk) out[i].token = -1;
  });
  return out;
}

std::vector<SampledRow> Sampler::score(const std::vector<ScoringRow>& rows, int64_t num_top) {
  std::vector<SampledRow> out(rows.size());
  for (SampledRow& row : out) row.score.likeliest.resize(num_top);
  over_rows(static_cast<int64_t>(rows.size()), [&](int64_t i, Scratch& scratch) {
    const View view = scan(rows[i].logits, scratch.raw_max.get(), out[i].status);
    if (out[i].status != SamplingStatus::kOk) return;
    score_token(view, rows[i].token, scratch, out[i].score);
  });
  return out;
}

Sampler::View Sampler::scan(const float* logits, float* block_max, SamplingStatus& status) const {
  const LogitsRange range = kernels_.scan_logits(logits, vocab_, nullptr, nullptr, block_max);
  status = status_of(range.best, range.has_nan);
  return {logits, block_max, range.best};
}

// The row after mask, bans, bias and penalties.
Sampler::View Sampler::changed(const SamplingRow& row, Scratch& scratch,
                               SamplingStatus& status) const {
  float* copy = scratch.copy.get();
  float* block_max = scratch.block_max.get();
  const LogitsRange range = kernels_.scan_logits(row.logits, vocab_, row.mask, copy, block_max);
  status = status_of(range.best, range.has_nan);  // before a ban can hide what is wrong
  if (status == SamplingStatus::kOk && row.state->settings().outside_vocab)
    status = SamplingStatus::kOutsideVocab;
  if (status != SamplingStatus::kOk) return {};

  const SamplingState& state = *row.state;
  const bool masked = row.mask != nullptr;
  state.apply(copy, row.draw, masked);
  const int64_t blocks = token_blocks(vocab_);
  if (state.most_changed() > blocks / 4) {
    kernels_.scan_logits(copy, vocab_, nullptr, nullptr, block_max);
  } else {
    state.over_changed(row.draw, masked, [&](int32_t id) {
      const int64_t block = id / kTokenBlock, first = block * kTokenBlock;
      kernels_.scan_logits(copy + first, std::min(kTokenBlock, vocab_ - first), nullptr, nullptr,
                           block_max + block);
    });
  }
  const float best = *std::max_element(block_max, block_max + blocks);
  status = best == kLowest ? SamplingStatus::kAllBanned : status_of(best, false);
  return {copy, block_max, best};
}

void Sampler::sample_row(const SamplingRow& row, Scratch& scratch, SampledRow& out) const {
  const SamplingSettings& settings = row.state->settings();
  const bool changes = row.mask || row.state->changes_logits(row.draw);
  const bool scores = settings.num_top >= 0;
  View raw{}, view{};
  if (changes) view = changed(row, scratch, out.status);
  if (out.status == SamplingStatus::kOk && (scores || !changes))
    raw = scan(row.logits, scratch.raw_max.get(), out.status);
  if (out.status != SamplingStatus::kOk) return;
  if (!changes) view = raw;
  out.token = settings.factor == 0.0f ? likeliest(view) : draw(view, row, scratch);
  if (scores) score_token(raw, out.token, scratch, out.score);
}

int32_t Sampler::likeliest(const View& view) const {
  const float* block = std::find(view.block_max, view.block_max + token_blocks(vocab_), view.best);
  const float* first = view.logits + (block - view.block_max) * kTokenBlock;
  return static_cast<int32_t>(std::find(first, view.logits + vocab_, view.best) - view.logits);
}

// Top-k, min-p and top-p need no sort: tokens that a bound rules out are never looked at again.
int32_t Sampler::draw(const View& view, const SamplingRow& row, Scratch& scratch) const {
  const SamplingSettings& s = row.state->settings();
  const double uniform = uniform_draw(s.seed, row.draw);
  const bool has_top_k = s.top_k > 0 && s.top_k < vocab_;
  if (!has_top_k && s.min_p == 0.0f)
    return s.top_p < 1.0 ? draw_from_nucleus(view, s, uniform, scratch)
                         : draw_from_all(view, s, uniform, scratch);
  float cut = has_top_k ? largest_cut(view, s.top_k, scratch) : kLowest;
  if (s.min_p > 0.0f) cut = std::max(cut, logit_of_weight(s.min_p, view.best, s.factor));
  Candidates& candidates = scratch.candidates;
  candidates.collect(kernels_, view.logits, vocab_, view.block_max, cut);
  if (has_top_k) candidates.keep_largest(s.top_k);
  candidates.weigh(kernels_, view.best, s.factor);
  if (s.min_p > 0.0f) candidates.keep_weights(s.min_p);
  if (s.top_p >= 1.0) return candidates.draw(uniform);
  return candidates.draw_nucleus(wanted_mass(s.top_p, candidates.total()), uniform);
}

// The largest weights will do, down to any bound, if they have the mass of the nucleus: a narrow
// guess, then a bound that holds by arithmetic, then all.
int32_t Sampler::draw_from_nucleus(const View& view, const SamplingSettings& s, double uniform,
                                   Scratch& scratch) const {
  const int64_t total = weigh(view, s.factor, scratch);
  const int64_t wanted = wanted_mass(s.top_p, total);
  // Masses below this are together less than 1 - p.
  const double least = (1.0 - s.top_p) * static_cast<double>(total) / static_cast<double>(vocab_);
  Candidates& candidates = scratch.candidates;
  for (const double mass : {16.0 * least, 0.99 * least, 0.0}) {
    const auto weight = static_cast<float>(mass * 0x1p-44);
    const float cut = logit_of_weight(weight, view.best, s.factor);
    candidates.collect(kernels_, view.logits, vocab_, view.block_max, cut);
    candidates.weigh(kernels_, view.best, s.factor);
    candidates.keep_weights(weight);
    if (candidates.total() >= wanted) break;
  }
  return candidates.draw_nucleus(wanted, uniform);
}

int32_t Sampler::draw_from_all(const View& view, const SamplingSettings& s, double uniform,
                               Scratch& scratch) const {
  const int64_t total = weigh(view, s.factor, scratch);
  const int64_t target = target_mass(uniform, total);
  const auto [block, rest] =
      find_mass(scratch.block_masses.get(), token_blocks(vocab_), target);
  const int64_t first = block * kTokenBlock, count = std::min(kTokenBlock, vocab_ - first);
  float weights[kTokenBlock];
  int64_t masses[kTokenBlock];
  kernels_.weigh_tokens(view.logits + first, count, view.best, s.factor, weights, masses);
  return static_cast<int32_t>(first + find_mass(masses, count, rest).first);
}

int64_t Sampler::weigh(const View& view, float factor, Scratch& scratch) const {
  int64_t* masses = scratch.block_masses.get();
  kernels_.weigh_blocks(view.logits, vocab_, view.block_max, view.best, factor, masses);
  return std::accumulate(masses, masses + token_blocks(vocab_), int64_t{0});
}

// A logit that at least `count` tokens reach, and not many more: as many blocks have a token that
// is as large.
float Sampler::largest_cut(const View& view, int64_t count, Scratch& scratch) const {
  const int64_t blocks = token_blocks(vocab_);
  if (count > blocks) return kLowest;
  float* order = scratch.order.get();
  std::copy_n(view.block_max, blocks, order);
  std::nth_element(order, order + count - 1, order + blocks, std::greater<float>());
  return order[count - 1];
}

void Sampler::score_token(const View& view, int64_t token, Scratch& scratch,
                          TokenScore& out) const {
  out.best = view.best;
  out.logit = view.logits[token];
  out.mass = weigh(view, kLog2E, scratch);
  out.rank = 1 + kernels_.count_ahead(view.logits, vocab_, view.block_max, token);
  const auto count = static_cast<int64_t>(out.likeliest.size());
  if (count == 0) return;
  Candidates& candidates = scratch.candidates;
  const float cut = largest_cut(view, count, scratch);
  candidates.collect(kernels_, view.logits, vocab_, view.block_max, cut);
  candidates.keep_largest(count);
  candidates.sort();
  for (int64_t i = 0; i < count; ++i) out.likeliest[i] = {candidates.id(i), candidates.logit(i)};
}

}  // namespace octavo
