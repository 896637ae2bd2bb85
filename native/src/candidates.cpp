// Compiled without contraction of products and sums: the results are numpy's.
#include "candidates.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace octavo {

namespace {

constexpr uint32_t kOneBits = 0x3f800000;
// Weights that have a mass, 1 to 2^-45, by the upper half of their bits.
constexpr int64_t kMagnitudes = 46 * 128 + 1;

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// Bits that order floats as their values do; both zeros are equal.
uint32_t ordered(float value) {
  const uint32_t bits = bits_of(value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Where a weight lies in a histogram of the digit of its bits at `shift`, largest weights first.
int64_t bucket_of(uint32_t bits, int shift) {
  if (shift == 16)
    return std::min<int64_t>((kOneBits >> 16) - (bits >> 16), kMagnitudes - 1);
  return 255 - (bits >> shift & 255);
}

}  // namespace

int64_t target_mass(double uniform, int64_t total) {
  return std::min(static_cast<int64_t>(uniform * static_cast<double>(total)), total - 1);
}

std::pair<int64_t, int64_t> find_mass(const int64_t* masses, int64_t count, int64_t target) {
  int64_t i = 0;
  for (; i + 1 < count && masses[i] <= target; ++i) target -= masses[i];
  return {i, target};
}

Candidates::Candidates(int64_t vocab)
    : ids_(new int32_t[vocab]),
      logits_(new float[vocab]),
      weights_(new float[vocab]),
      masses_(new int64_t[vocab]),
      keys_(new uint64_t[vocab]),
      near_(new int32_t[vocab]),
      histogram_(new int64_t[kMagnitudes]) {}

void Candidates::collect(const KernelTable& kernels, const float* logits, int64_t vocab,
                         const float* block_max, float cut) {
  size_ = kernels.collect_tokens(logits, vocab, block_max, cut, ids_.get(), logits_.get());
}

void Candidates::weigh(const KernelTable& kernels, float top, float factor) {
  kernels.weigh_tokens(logits_.get(), size_, top, factor, weights_.get(), masses_.get());
}

int64_t Candidates::total() const {
  return std::accumulate(masses_.get(), masses_.get() + size_, int64_t{0});
}

uint64_t Candidates::key(int64_t i) const {
  return static_cast<uint64_t>(~ordered(logits_[i])) << 32 | static_cast<uint32_t>(ids_[i]);
}

void Candidates::keep_largest(int64_t count) {
  if (size_ <= count) return;
  for (int64_t i = 0; i < size_; ++i) keys_[i] = key(i);
  std::nth_element(keys_.get(), keys_.get() + count - 1, keys_.get() + size_);
  const uint64_t last = keys_[count - 1];
  int64_t kept = 0;
  for (int64_t i = 0; i < size_; ++i) {
    if (key(i) > last) continue;
    ids_[kept] = ids_[i];
    logits_[kept++] = logits_[i];
  }
  size_ = kept;
}

void Candidates::sort() {
  for (int64_t i = 0; i < size_; ++i) {
    keys_[i] = static_cast<uint64_t>(~ordered(logits_[i])) << 32 | static_cast<uint64_t>(i);
  }
  std::sort(keys_.get(), keys_.get() + size_);
  for (int64_t i = 0; i < size_; ++i) {
    const auto from = static_cast<int64_t>(keys_[i] & 0xffffffffu);
    near_[i] = ids_[from];
    weights_[i] = logits_[from];
  }
  std::swap(near_, ids_);
  std::swap(weights_, logits_);
}

void Candidates::keep_weights(float least) {
  int64_t count = 0;
  for (int64_t i = 0; i < size_; ++i) {
    const bool kept = weights_[i] >= least;
    ids_[count] = ids_[i];
    weights_[count] = weights_[i];
    masses_[count] = masses_[i];
    count += kept;
  }
  size_ = count;
}

int32_t Candidates::draw(double uniform) const {
  return ids_[find_mass(masses_.get(), size_, target_mass(uniform, total())).first];
}

// Finds the last token of the nucleus by the digits of its weight's bits, most significant first: no
// sort, whatever the distribution.
int32_t Candidates::draw_nucleus(int64_t wanted, double uniform) {
  const int64_t asked = wanted;
  int64_t count = size_;
  const auto at = [&](int shift, int64_t j) {
    return shift == 16 ? static_cast<int32_t>(j) : near_[j];
  };
  for (const int shift : {16, 8, 0}) {
    const int64_t buckets = shift == 16 ? kMagnitudes : 256;
    std::fill_n(histogram_.get(), buckets, int64_t{0});
    for (int64_t j = 0; j < count; ++j) {
      const int32_t i = at(shift, j);
      histogram_[bucket_of(bits_of(weights_[i]), shift)] += masses_[i];
    }
    int64_t cut = 0;
    for (; cut + 1 < buckets && histogram_[cut] < wanted; ++cut) wanted -= histogram_[cut];
    int64_t kept = 0;
    for (int64_t j = 0; j < count; ++j) {
      const int32_t i = at(shift, j);
      near_[kept] = i;
      kept += bucket_of(bits_of(weights_[i]), shift) == cut;
    }
    count = kept;
  }
  // Those that are left have equal weights and masses.
  const float weight = weights_[near_[0]];
  const int64_t mass = masses_[near_[0]];
  const int64_t more = std::min((wanted + mass - 1) / mass, count);
  const int64_t last = near_[more - 1];
  int64_t target = target_mass(uniform, asked - wanted + more * mass);
  for (int64_t i = 0; i < size_; ++i) {
    const bool in = weights_[i] > weight || (weights_[i] == weight && i <= last);
    const int64_t own = in ? masses_[i] : 0;
    if (own > target) return ids_[i];
    target -= own;
  }
  return ids_[near_[0]];  // not reached: the target is below the sum of these masses
}

}  // namespace octavo
