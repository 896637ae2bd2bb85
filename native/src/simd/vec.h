// Vectors of one instruction set. Included inside the namespace of that set; OCTAVO_BYTES is the
// width of a vector. Plain arithmetic uses the compiler's vector types, which every set has; what
// differs (byte products, half floats) is in the section of each set.
//
// No include guard and no #include: this text is compiled once per set, in its own namespace.

#define OCTAVO_INLINE static inline __attribute__((always_inline))

constexpr int kLanes = OCTAVO_BYTES / 4;

typedef float F __attribute__((vector_size(OCTAVO_BYTES)));
typedef int32_t I __attribute__((vector_size(OCTAVO_BYTES)));
typedef uint32_t U __attribute__((vector_size(OCTAVO_BYTES)));
typedef uint8_t B __attribute__((vector_size(OCTAVO_BYTES)));

typedef F FUnaligned __attribute__((aligned(1), may_alias));
typedef I IUnaligned __attribute__((aligned(1), may_alias));
typedef U UUnaligned __attribute__((aligned(1), may_alias));
typedef B BUnaligned __attribute__((aligned(1), may_alias));

OCTAVO_INLINE F load(const float* from) { return *reinterpret_cast<const FUnaligned*>(from); }
OCTAVO_INLINE U load_u32(const void* from) { return *reinterpret_cast<const UUnaligned*>(from); }
OCTAVO_INLINE B load_bytes(const uint8_t* from) {
  return *reinterpret_cast<const BUnaligned*>(from);
}
OCTAVO_INLINE void store(float* to, F value) { *reinterpret_cast<FUnaligned*>(to) = value; }
OCTAVO_INLINE void store_bytes(uint8_t* to, B value) {
  *reinterpret_cast<BUnaligned*>(to) = value;
}

OCTAVO_INLINE F splat(float value) { return value - F{}; }
OCTAVO_INLINE I splat_int(int32_t value) { return value - I{}; }
OCTAVO_INLINE F as_float(I bits) { return reinterpret_cast<F>(bits); }
OCTAVO_INLINE I as_int(F bits) { return reinterpret_cast<I>(bits); }
OCTAVO_INLINE F to_float(I value) { return __builtin_convertvector(value, F); }
OCTAVO_INLINE I choose(I mask, I yes, I no) { return (mask & yes) | (~mask & no); }
OCTAVO_INLINE F choose(I mask, F yes, F no) {
  return as_float(choose(mask, as_int(yes), as_int(no)));
}

OCTAVO_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
OCTAVO_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Four bytes repeated over the vector.
OCTAVO_INLINE B splat_quad(const uint8_t* from) {
  int32_t quad;
  __builtin_memcpy(&quad, from, 4);
  return reinterpret_cast<B>(splat_int(quad));
}

// bfloat16 pairs in 32-bit lanes: the lower and the upper half as floats.
OCTAVO_INLINE F lower_half(U pairs) { return reinterpret_cast<F>(pairs << 16); }
OCTAVO_INLINE F upper_half(U pairs) { return reinterpret_cast<F>(pairs & 0xffff0000u); }

OCTAVO_INLINE I lane_numbers() {
  I numbers = {};
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

// Products of four byte pairs added to each 32-bit lane.
//   dot_i8: weights as packed by this set (less kWeightOffset they are signed), signed activations
//   dot_u4: weights 0 to 15, signed activations

#if defined(__AVX512VNNI__) && OCTAVO_BYTES == 64

constexpr int kWeightOffset = 128;
constexpr int kIntRows = 6;    // rows of a tile of quantised weights
constexpr int kFloatRows = 12; // rows of a tile of float weights
constexpr int kQueryTile = 12; // query vectors of an attention tile

// Assembly, because gcc 12 spills accumulators around the intrinsic and halves the speed.
OCTAVO_INLINE I dot_i8(I sum, B weights, B x) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
  return sum;
}
OCTAVO_INLINE I dot_u4(I sum, B weights, B x) { return dot_i8(sum, weights, x); }
OCTAVO_INLINE F load_half(const uint16_t* from) {
  return reinterpret_cast<F>(
      _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
OCTAVO_INLINE F larger(F a, F b) { return _mm512_max_ps(a, b); }
OCTAVO_INLINE F smaller(F a, F b) { return _mm512_min_ps(a, b); }
// An estimate of 14 bits and a Newton step: a division would hold the port for 16 cycles.
OCTAVO_INLINE F reciprocal(F x) {
  const F estimate = _mm512_rcp14_ps(x);
  return estimate * (2.0f - x * estimate);
}
OCTAVO_INLINE F scale_by_power(F p, F turns) { return _mm512_scalef_ps(p, turns); }

#elif defined(__AVX2__)

constexpr int kIntRows = 3;
constexpr int kFloatRows = 6;
constexpr int kQueryTile = 6;

#if defined(__AVXVNNI__)
constexpr int kWeightOffset = 128;
OCTAVO_INLINE I dot_i8(I sum, B weights, B x) {
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(x));
  return sum;
}
OCTAVO_INLINE I dot_u4(I sum, B weights, B x) { return dot_i8(sum, weights, x); }
#else
// vpmaddubsw saturates at 16 bits, so full bytes must not exceed 127 * 127 * 2: weights stay
// signed, and their sign moves to the activations.
constexpr int kWeightOffset = 0;
OCTAVO_INLINE I dot_u4(I sum, B weights, B x) {
  const __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(weights),
                                             reinterpret_cast<__m256i>(x));
  return sum + reinterpret_cast<I>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
OCTAVO_INLINE I dot_i8(I sum, B weights, B x) {
  const __m256i w = reinterpret_cast<__m256i>(weights);
  const __m256i moved = _mm256_sign_epi8(reinterpret_cast<__m256i>(x), w);
  return dot_u4(sum, reinterpret_cast<B>(_mm256_abs_epi8(w)), reinterpret_cast<B>(moved));
}
#endif
OCTAVO_INLINE F load_half(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
OCTAVO_INLINE F larger(F a, F b) { return _mm256_max_ps(a, b); }
OCTAVO_INLINE F smaller(F a, F b) { return _mm256_min_ps(a, b); }
OCTAVO_INLINE F reciprocal(F x) { return 1.0f / x; }

#else

constexpr int kWeightOffset = 0;

#if defined(__ARM_NEON)
constexpr int kIntRows = 6;
constexpr int kFloatRows = 10;
constexpr int kQueryTile = 10;
#else
constexpr int kIntRows = 2;
constexpr int kFloatRows = 4;
constexpr int kQueryTile = 4;
#endif

#if defined(__ARM_FEATURE_DOTPROD)
OCTAVO_INLINE I dot_i8(I sum, B weights, B x) {
  return reinterpret_cast<I>(vdotq_s32(reinterpret_cast<int32x4_t>(sum),
                                       reinterpret_cast<int8x16_t>(weights),
                                       reinterpret_cast<int8x16_t>(x)));
}
#else
OCTAVO_INLINE I dot_i8(I sum, B weights, B x) {
  // Even and odd bytes as signed 16-bit lanes of 32: plain shifts, so any compiler vectorises it.
  const I w = reinterpret_cast<I>(weights), v = reinterpret_cast<I>(x);
  return sum + (w << 24 >> 24) * (v << 24 >> 24) + (w << 16 >> 24) * (v << 16 >> 24) +
         (w << 8 >> 24) * (v << 8 >> 24) + (w >> 24) * (v >> 24);
}
#endif
OCTAVO_INLINE I dot_u4(I sum, B weights, B x) { return dot_i8(sum, weights, x); }

OCTAVO_INLINE F load_half(const uint16_t* from) {
  typedef uint16_t H __attribute__((vector_size(OCTAVO_BYTES / 2)));
  typedef H HUnaligned __attribute__((aligned(1), may_alias));
  const U bits = __builtin_convertvector(*reinterpret_cast<const HUnaligned*>(from), U);
  // The same exponent trick as half_to_float, for finite values.
  const F magnitude = reinterpret_cast<F>((bits & 0x7fffu) << 13) * 0x1p112f;
  return reinterpret_cast<F>(reinterpret_cast<U>(magnitude) | (bits & 0x8000u) << 16);
}
OCTAVO_INLINE F larger(F a, F b) { return choose(a > b, a, b); }
OCTAVO_INLINE F smaller(F a, F b) { return choose(a < b, a, b); }
OCTAVO_INLINE F reciprocal(F x) { return 1.0f / x; }

#endif

OCTAVO_INLINE I larger(I a, I b) { return choose(a > b, a, b); }

// Folds a vector in halves; a loop over lanes would be a chain of extracts.
template <typename V, typename Join>
OCTAVO_INLINE auto fold(V values, Join join) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
    const I rotated = (lane_numbers() + half) & (kLanes - 1);
    values = join(values, __builtin_shuffle(values, rotated));
  }
  return values[0];
}
OCTAVO_INLINE float sum_of(F values) { return fold(values, [](F a, F b) { return a + b; }); }
OCTAVO_INLINE int32_t sum_of(I values) { return fold(values, [](I a, I b) { return a + b; }); }
OCTAVO_INLINE float max_of(F values) { return fold(values, [](F a, F b) { return larger(a, b); }); }
OCTAVO_INLINE int32_t max_of(I values) {
  return fold(values, [](I a, I b) { return larger(a, b); });
}

// Nearest integer, for |x| < 2^22: adding 1.5 * 2^23 leaves it in the low bits of the mantissa.
constexpr float kRound = 12582912.0f;
OCTAVO_INLINE I nearest(F x) { return as_int(x + kRound) - as_int(splat(kRound)); }

#if OCTAVO_BYTES != 64
// p times 2 to the power of `turns`, a whole number.
OCTAVO_INLINE F scale_by_power(F p, F turns) {
  const F result = as_float(as_int(p) + (nearest(turns) << 23));
  return choose(turns == turns, result, turns);  // integers would turn NaN into a number
}
#endif

// exp(x) within 2 units in the last place for -87 < x < 88; tiny or 0 below, about 1e38 above, NaN
// for NaN: minimum and maximum return their second operand when one is NaN.
OCTAVO_INLINE F exp_of(F x) {
  const F clipped = smaller(splat(88.0f), larger(splat(-87.3f), x));
  const F turns = (clipped * 1.44269504f + kRound) - kRound;
  F r = clipped - turns * 0.693359375f;
  r = r + turns * 2.12194440e-4f;
  F p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return scale_by_power(p, turns);
}

OCTAVO_INLINE F tanh_of(F x) {
  // The minimum returns its second operand for NaN, so NaN passes through.
  return 1.0f - 2.0f * reciprocal(exp_of(smaller(splat(87.0f), x + x)) + 1.0f);
}
