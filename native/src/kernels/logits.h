// Operations on rows of logits, for the sampler. Every number that decides a token is the same in
// all sets and in numpy (kernels/sampling/weights.py): only exact steps, or steps that IEEE 754
// rounds alike everywhere, so no product may be contracted with a sum.

typedef double D __attribute__((vector_size(OCTAVO_BYTES)));
typedef uint64_t L __attribute__((vector_size(OCTAVO_BYTES)));
typedef L LUnaligned __attribute__((aligned(1), may_alias));
typedef float H __attribute__((vector_size(OCTAVO_BYTES / 2)));
typedef H HUnaligned __attribute__((aligned(1), may_alias));

OCTAVO_INLINE I lane_bits() { return splat_int(1) << lane_numbers(); }

// Bit i is set where lane i of a comparison's result is.
OCTAVO_INLINE int32_t bits_of(I mask) {
#if defined(__AVX2__) && OCTAVO_BYTES == 32
  return _mm256_movemask_ps(as_float(mask));
#elif defined(__SSE2__) && OCTAVO_BYTES == 16
  return __builtin_ia32_movmskps(as_float(mask));
#endif
  return fold(mask & lane_bits(), [](I a, I b) { return a | b; });
}

// Lanes whose bit is set in a mask of a bit a token, for tokens i to i + kLanes - 1.
OCTAVO_INLINE I allowed(const uint8_t* mask, int64_t i) {
  int32_t bits = mask[i / 8] >> i % 8;
  if constexpr (kLanes == 16) bits |= mask[i / 8 + 1] << 8;
  return (splat_int(bits) & lane_bits()) != 0;
}

// 2 to the power of (x - top) * factor, at least 2^-100. Minimax polynomial on [-0.5, 0.5].
OCTAVO_INLINE F weight_of(F x, float top, float factor) {
  const F power = larger(rounded((x - top) * factor), splat(-100.0f));
  const F shifted = power + kRound;
  const F r = power - (shifted - kRound);
  F p = r * 0.00015353361959569156f;
  p = (rounded(p) + 0.0013398873852565885f) * r;
  p = (rounded(p) + 0.00961843691766262f) * r;
  p = (rounded(p) + 0.055503323674201965f) * r;
  p = (rounded(p) + 0.24022647738456726f) * r;
  p = (rounded(p) + 0.6931471824645996f) * r;
  p = rounded(p) + 1.0f;
  return as_float(as_int(p) + ((as_int(shifted) - as_int(splat(kRound))) << 23));
}

// 1.5 * 2^52: a double near it holds a whole number in its low bits.
constexpr double kWhole = 0x1.8p52;
constexpr uint64_t kWholeBits = 0x4338000000000000u;

// Weights as whole numbers of 2^-44, plus kWholeBits. Multiplying by a power of two is exact.
OCTAVO_INLINE L raised_masses(const float* weights) {
  const H half = *reinterpret_cast<const HUnaligned*>(weights);
  return reinterpret_cast<L>(__builtin_convertvector(half, D) * 0x1p44 + kWhole);
}

OCTAVO_INLINE void store_longs(int64_t* to, L value) {
  *reinterpret_cast<LUnaligned*>(to) = value;
}

// A block of tokens from `first` on, padded with minus infinity.
OCTAVO_INLINE const float* padded_block(const float* x, int64_t first, int64_t size,
                                        float* storage) {
  if (first + kTokenBlock <= size) return x + first;
  for (int64_t i = 0; i < kTokenBlock; ++i)
    storage[i] = first + i < size ? x[first + i] : -__builtin_inff();
  return storage;
}

template <bool kMasked, bool kCopies>
OCTAVO_INLINE LogitsRange scan_rows(const float* x, int64_t size, const uint8_t* mask, float* copy,
                                    float* block_max) {
  const F lowest = splat(-__builtin_inff());
  F best = lowest;
  I nan = {};
  for (int64_t first = 0; first < size; first += kTokenBlock) {
    float storage[kTokenBlock], copied[kTokenBlock];
    const bool whole = first + kTokenBlock <= size;
    const float* block = padded_block(x, first, size, storage);
    float* out = kCopies && whole ? copy + first : copied;
    F most = lowest;
#pragma GCC unroll 16
    for (int64_t i = 0; i < kTokenBlock; i += kLanes) {
      F value = load(block + i);
      nan |= value != value;
      best = larger(best, value);
      if (kMasked && (whole || first + i + kLanes <= size))
        value = choose(allowed(mask, first + i), value, lowest);
      else if (kMasked)
        for (int lane = 0; lane < kLanes && first + i + lane < size; ++lane)
          if (!(mask[(first + i + lane) / 8] >> (first + i + lane) % 8 & 1)) value[lane] = lowest[0];
      if (kCopies) store(out + i, value);
      most = larger(most, value);
    }
    if (kCopies && !whole) __builtin_memcpy(copy + first, copied, (size - first) * sizeof(float));
    block_max[first / kTokenBlock] = max_of(most);
  }
  return {max_of(best), bits_of(nan) != 0};
}

static LogitsRange scan_logits(const float* x, int64_t size, const uint8_t* mask, float* copy,
                               float* block_max) {
  if (mask) return scan_rows<true, true>(x, size, mask, copy, block_max);
  if (copy) return scan_rows<false, true>(x, size, mask, copy, block_max);
  return scan_rows<false, false>(x, size, mask, copy, block_max);
}

static void weigh_blocks(const float* x, int64_t size, const float* block_max, float top,
                         float factor, int64_t* masses) {
  for (int64_t first = 0; first < size; first += kTokenBlock) {
    if ((block_max[first / kTokenBlock] - top) * factor < -46.0f) {  // half a unit is 2^-45
      masses[first / kTokenBlock] = 0;
      continue;
    }
    float storage[kTokenBlock], weights[kTokenBlock];
    const float* block = padded_block(x, first, size, storage);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kTokenBlock; i += kLanes)
      store(weights + i, weight_of(load(block + i), top, factor));
    L sums = {};
#pragma GCC unroll 32
    for (int64_t i = 0; i < kTokenBlock; i += kLanes / 2) sums += raised_masses(weights + i);
    uint64_t sum = 0;
#pragma GCC unroll 8
    for (int lane = 0; lane < kLanes / 2; ++lane) sum += sums[lane];
    masses[first / kTokenBlock] = static_cast<int64_t>(sum - kTokenBlock * kWholeBits);
  }
}

static void weigh_tokens(const float* x, int64_t size, float top, float factor, float* weights,
                         int64_t* masses) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    store(weights + i, weight_of(load(x + i), top, factor));
    for (int64_t half = i; half < i + kLanes; half += kLanes / 2)
      store_longs(masses + half, raised_masses(weights + half) - kWholeBits);
  }
  if (i == size) return;
  float rest[kLanes], found[kLanes];
  int64_t mass[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) rest[j] = i + j < size ? x[i + j] : top;
  store(found, weight_of(load(rest), top, factor));
  for (int64_t half = 0; half < kLanes; half += kLanes / 2)
    store_longs(mass + half, raised_masses(found + half) - kWholeBits);
  __builtin_memcpy(weights + i, found, (size - i) * sizeof(float));
  __builtin_memcpy(masses + i, mass, (size - i) * sizeof(int64_t));
}

static int64_t collect_tokens(const float* x, int64_t size, const float* block_max, float cut,
                              int32_t* ids, float* logits) {
  const F least = splat(cut);
  int64_t count = 0;
  for (int64_t first = 0; first < size; first += kTokenBlock) {
    if (!(block_max[first / kTokenBlock] >= cut)) continue;
    const int64_t stop = smaller(size, first + kTokenBlock);
    int64_t i = first;
    for (; i + kLanes <= stop; i += kLanes)
      for (uint32_t bits = bits_of(load(x + i) >= least); bits; bits &= bits - 1) {
        const int64_t token = i + __builtin_ctz(bits);
        ids[count] = static_cast<int32_t>(token);
        logits[count++] = x[token];
      }
    for (; i < stop; ++i) {
      if (!(x[i] >= cut)) continue;
      ids[count] = static_cast<int32_t>(i);
      logits[count++] = x[i];
    }
  }
  return count;
}

static int64_t count_ahead(const float* x, int64_t size, const float* block_max, int64_t token) {
  const float value = x[token];
  const F values = splat(value);
  int64_t count = 0;
  for (int64_t first = 0; first < size; first += kTokenBlock) {
    const float most = block_max[first / kTokenBlock];
    const int64_t stop = smaller(size, first + kTokenBlock);
    if (most < value || (most == value && first > token)) continue;
    if (stop <= token && stop - first == kTokenBlock) {
      I found = {};
      for (int64_t i = first; i < stop; i += kLanes) found -= load(x + i) >= values;
      count += sum_of(found);
    } else if (first > token && stop - first == kTokenBlock) {
      I found = {};
      for (int64_t i = first; i < stop; i += kLanes) found -= load(x + i) > values;
      count += sum_of(found);
    } else {
      for (int64_t i = first; i < stop; ++i)
        count += x[i] > value || (x[i] == value && i < token);
    }
  }
  return count;
}
