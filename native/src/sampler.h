// Chooses tokens from rows of logits: the semantics of octavo/kernels/sampling, bit for bit.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernel_table.h"
#include "pool.h"
#include "sampling_state.h"

namespace octavo {

enum class SamplingStatus : int {
  kOk = 0,
  kNan = 1,
  kInfinite = 2,
  kNoneFinite = 3,    // all logits are minus infinity
  kOutsideVocab = 4,  // a bias names a token that is none
  kAllBanned = 5,     // mask and bans leave no token
};

// One row to choose a token from.
struct SamplingRow {
  const float* logits;
  const uint8_t* mask;  // a bit a token; null: all are allowed
  const SamplingState* state;
  int64_t draw;         // number of output tokens before this one
};

// One token to score under a row as the model gave it.
struct ScoringRow {
  const float* logits;
  int64_t token;
};

struct TokenScore {
  float best = 0;     // the row's largest logit
  float logit = 0;    // the token's
  int64_t mass = 0;   // of the row: exp(logit - best) in units of 2^-44
  int64_t rank = 0;   // from 1
  std::vector<std::pair<int32_t, float>> likeliest;  // ids and logits
};

struct SampledRow {
  SamplingStatus status = SamplingStatus::kOk;
  int32_t token = -1;
  TokenScore score;   // if asked for
};

// Serves one thread at a time; rows are shared out over the pool, each to one thread.
class Sampler {
 public:
  Sampler(const KernelTable& kernels, Pool& pool, int64_t vocab);
  ~Sampler();
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  int64_t vocab() const { return vocab_; }
  std::vector<SampledRow> sample(const std::vector<SamplingRow>& rows);
  std::vector<SampledRow> score(const std::vector<ScoringRow>& rows, int64_t num_top);

 private:
  struct Scratch;
  struct View;

  template <typename Body>
  void over_rows(int64_t count, Body body);
  View scan(const float* logits, float* block_max, SamplingStatus& status) const;
  View changed(const SamplingRow& row, Scratch& scratch, SamplingStatus& status) const;
  void sample_row(const SamplingRow& row, Scratch& scratch, SampledRow& out) const;
  int32_t likeliest(const View& view) const;
  int32_t draw(const View& view, const SamplingRow& row, Scratch& scratch) const;
  int32_t draw_from_all(const View& view, const SamplingSettings& settings, double uniform,
                        Scratch& scratch) const;
  int32_t draw_from_nucleus(const View& view, const SamplingSettings& settings, double uniform,
                            Scratch& scratch) const;
  int64_t weigh(const View& view, float factor, Scratch& scratch) const;
  float largest_cut(const View& view, int64_t count, Scratch& scratch) const;
  void score_token(const View& view, int64_t token, Scratch& scratch, TokenScore& out) const;

  const KernelTable& kernels_;
  Pool& pool_;
  const int64_t vocab_;
  std::vector<std::unique_ptr<Scratch>> scratch_;  // one a thread
};

}  // namespace octavo
