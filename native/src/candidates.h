// Tokens of one row that may still be drawn, in ascending order of their ids.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "kernel_table.h"

namespace octavo {

class Candidates {
 public:
  // Room for a whole vocabulary; pages that no row needs are never touched.
  explicit Candidates(int64_t vocab);

  int64_t size() const { return size_; }
  int32_t id(int64_t i) const { return ids_[i]; }
  float logit(int64_t i) const { return logits_[i]; }

  // Takes the tokens of a row whose logit is `cut` or more.
  void collect(const KernelTable& kernels, const float* logits, int64_t vocab,
               const float* block_max, float cut);
  // Keeps the `count` largest logits, of equal ones those of lower id.
  void keep_largest(int64_t count);
  // Sorts by logit, the largest first, equal ones by id; nothing but `id` and `logit` is valid then.
  void sort();
  // Computes weights and masses; the calls below need them.
  void weigh(const KernelTable& kernels, float top, float factor);
  void keep_weights(float least);
  int64_t total() const;
  // The token at the share `uniform` of the masses.
  int32_t draw(double uniform) const;
  // The same of the nucleus: the fewest of the largest weights whose masses reach `wanted`, which
  // is not above their total; equal weights by id.
  int32_t draw_nucleus(int64_t wanted, double uniform);

 private:
  // The key of a candidate: ascending keys mean descending logits, then ascending ids.
  uint64_t key(int64_t i) const;

  int64_t size_ = 0;
  std::unique_ptr<int32_t[]> ids_;
  std::unique_ptr<float[]> logits_;
  std::unique_ptr<float[]> weights_;
  std::unique_ptr<int64_t[]> masses_;
  std::unique_ptr<uint64_t[]> keys_;
  std::unique_ptr<int32_t[]> near_;  // candidates that may be the last of the nucleus
  std::unique_ptr<int64_t[]> histogram_;
};

// The index at which cumulated masses exceed `uniform` of their total, and what of it is left.
std::pair<int64_t, int64_t> find_mass(const int64_t* masses, int64_t count, int64_t target);

// `uniform` of a total mass: below the total, whatever the rounding.
int64_t target_mass(double uniform, int64_t total);

}  // namespace octavo
