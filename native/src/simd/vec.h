// Vectors of one instruction set. Included inside the namespace of that set; OCTAVO_BYTES is the
// width of a vector. Plain arithmetic uses the compiler's vector types, which every set has; what
// differs (byte products, half floats) is in the section of each set.
//
// No include guard and no #include: this text is compiled once per set, in its own namespace.

#define OCTAVO_INLINE static inline __attribute__((always_inline))
#define OCTAVO_MEMBER inline __attribute__((always_inline))

constexpr int kLanes = OCTAVO_BYTES / 4;

typedef float F __attribute__((vector_size(OCTAVO_BYTES)));
typedef int32_t I __attribute__((vector_size(OCTAVO_BYTES)));
typedef uint32_t U __attribute__((vector_size(OCTAVO_BYTES)));
typedef uint8_t B __attribute__((vector_size(OCTAVO_BYTES)));
typedef uint16_t P __attribute__((vector_size(OCTAVO_BYTES)));  // pairs in 32-bit lanes
typedef uint16_t Halves __attribute__((vector_size(OCTAVO_BYTES / 2)));

typedef F FUnaligned __attribute__((aligned(1), may_alias));
typedef I IUnaligned __attribute__((aligned(1), may_alias));
typedef U UUnaligned __attribute__((aligned(1), may_alias));
typedef B BUnaligned __attribute__((aligned(1), may_alias));
typedef Halves HalvesUnaligned __attribute__((aligned(1), may_alias));

OCTAVO_INLINE F load(const float* from) { return *reinterpret_cast<const FUnaligned*>(from); }
OCTAVO_INLINE U load_u32(const void* from) { return *reinterpret_cast<const UUnaligned*>(from); }
OCTAVO_INLINE B load_bytes(const uint8_t* from) {
  return *reinterpret_cast<const BUnaligned*>(from);
}
OCTAVO_INLINE P load_pairs(const uint8_t* from) {
  return reinterpret_cast<P>(load_bytes(from));
}
OCTAVO_INLINE void store(float* to, F value) { *reinterpret_cast<FUnaligned*>(to) = value; }
OCTAVO_INLINE void store_bytes(uint8_t* to, B value) {
  *reinterpret_cast<BUnaligned*>(to) = value;
}
OCTAVO_INLINE void store_halves(uint8_t* to, Halves value) { *reinterpret_cast<HalvesUnaligned*>(to) = value; }

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

// The four bytes at `base + kTimes * stride + kAt`, repeated; kTimes is 0, 1 or 2. Assembly, because
// gcc 12 keeps the sums of such offsets on the stack and reads one back for every load.
template <int kTimes, int kAt>
OCTAVO_INLINE B splat_at(const uint8_t* base, int64_t stride) {
#if defined(__AVX2__) && !defined(OCTAVO_EMULATED)
  const auto& memory = *reinterpret_cast<const uint8_t(*)[]>(base);
  B quad;
  if constexpr (kTimes == 0)
    __asm__("vpbroadcastd %c2(%1), %0" : "=v"(quad) : "r"(base), "i"(kAt), "m"(memory));
  else
    __asm__("vpbroadcastd %c2(%1,%3,%c4), %0"
            : "=v"(quad)
            : "r"(base), "i"(kAt), "r"(stride), "i"(kTimes), "m"(memory));
  return quad;
#else
  return splat_quad(base + kTimes * stride + kAt);
#endif
}
template <int kTimes, int kAt>
OCTAVO_INLINE P splat_pair(const uint8_t* base, int64_t stride) {
  return reinterpret_cast<P>(splat_at<kTimes, kAt>(base, stride));
}

// Calls body(Index<0>()), ... body(Index<count - 1>()), so that the index is a constant in each.
template <int i>
struct Index {
  static constexpr int value = i;
};
template <int count, int i = 0, typename Body>
OCTAVO_INLINE void repeat(Body body) {
  if constexpr (i < count) {
    body(Index<i>());
    repeat<count, i + 1>(body);
  }
}
#define OCTAVO_BODY(index) [&](auto index) __attribute__((always_inline))

// bfloat16 pairs in 32-bit lanes: the lower and the upper half as floats.
OCTAVO_INLINE F lower_half(U pairs) { return reinterpret_cast<F>(pairs << 16); }
OCTAVO_INLINE F upper_half(U pairs) { return reinterpret_cast<F>(pairs & 0xffff0000u); }

OCTAVO_INLINE I lane_numbers() {
  I numbers = {};
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

// Without instructions for half floats.
OCTAVO_INLINE F load_half_by_shifts(const uint16_t* from) {
  const U bits = __builtin_convertvector(*reinterpret_cast<const HalvesUnaligned*>(from), U);
  // The same exponent trick as half_to_float, for finite values.
  const F magnitude = reinterpret_cast<F>((bits & 0x7fffu) << 13) * 0x1p112f;
  return reinterpret_cast<F>(reinterpret_cast<U>(magnitude) | (bits & 0x8000u) << 16);
}

// Four products of weights and signed activations, added to each 32-bit lane.
//   dot_bytes: of weights packed with kByteOffset added; what is left for the caller to take away is
//   kByteOffset times the sum of the activations
//   dot_nibbles: of weights from 0 to 15

#if OCTAVO_BYTES == 64

constexpr int kByteOffset = 128;
constexpr bool kAddsExponents = true;  // scales times steps of activations: integer sums
constexpr int kByteRows = 6;    // rows of a tile: quantised activations,
constexpr int kFloatRows = 12;  // float ones
constexpr int kQueryTile = 12;  // query vectors of an attention tile
constexpr const char* kByteProduct = "vpdpbusd";

#if defined(__AVX512VNNI__)
// Assembly, because gcc 12 spills accumulators around the intrinsic and halves the speed.
OCTAVO_INLINE I dot_bytes(I sum, B weights, B x) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
  return sum;
}
OCTAVO_INLINE I dot_nibbles(I sum, B weights, B x) { return dot_bytes(sum, weights, x); }
OCTAVO_INLINE F load_half(const uint16_t* from) {
  return reinterpret_cast<F>(
      _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
OCTAVO_INLINE F larger(F a, F b) { return _mm512_max_ps(a, b); }
OCTAVO_INLINE F smaller(F a, F b) { return _mm512_min_ps(a, b); }
// An estimate of 14 bits and, if that is too rough, a Newton step: a division would hold the port for 16
// cycles.
OCTAVO_INLINE F rough_reciprocal(F x) { return _mm512_rcp14_ps(x); }
OCTAVO_INLINE F reciprocal(F x) {
  const F estimate = rough_reciprocal(x);
  return estimate * (2.0f - x * estimate);
}
OCTAVO_INLINE F scale_by_power(F p, F turns) { return _mm512_scalef_ps(p, turns); }
// (x & mask) | bits, which gcc 12 would take two instructions for.
OCTAVO_INLINE U bits_or(U x, U mask, U bits) {
  return reinterpret_cast<U>(_mm512_ternarylogic_epi32(
      reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(bits), 0xea));
}
#else
OCTAVO_INLINE U bits_or(U x, U mask, U bits) { return (x & mask) | bits; }
#include "simd/emulated_avx512.h"
#endif

#elif defined(__AVX2__)

constexpr int kByteRows = 6;
constexpr int kFloatRows = 6;
constexpr int kQueryTile = 6;

#if defined(__AVXVNNI__)
constexpr int kByteOffset = 128;
constexpr const char* kByteProduct = "vpdpbusd";
OCTAVO_INLINE I dot_bytes(I sum, B weights, B x) {
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(x));
  return sum;
}
OCTAVO_INLINE I dot_nibbles(I sum, B weights, B x) { return dot_bytes(sum, weights, x); }
#else
constexpr int kByteOffset = 0;
constexpr const char* kByteProduct = "vpsignb + vpmaddubsw + vpmaddwd + vpaddd";
// vpmaddubsw saturates at 16 bits, so its unsigned side must not exceed 127: that is the weights'
// magnitude, and their sign moves to the activations.
OCTAVO_INLINE I dot_bytes(I sum, B weights, B x) {
  const __m256i w = reinterpret_cast<__m256i>(weights), size = _mm256_abs_epi8(w);
  const __m256i ones = _mm256_set1_epi16(1);
  __asm__("vpsignb %2, %1, %1\n\tvpmaddubsw %1, %3, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
          : "+x"(sum), "+x"(x)
          : "x"(w), "x"(size), "xm"(ones));
  return sum;
}
OCTAVO_INLINE I dot_nibbles(I sum, B weights, B x) {
  const __m256i pairs =
      _mm256_maddubs_epi16(reinterpret_cast<__m256i>(weights), reinterpret_cast<__m256i>(x));
  return sum + reinterpret_cast<I>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// dot_nibbles in 16-bit lanes, which hold the sum of a whole group: 8 * 2 * 15 * 127 at most.
constexpr bool kHalfSums = true;
// Assembly, because gcc 12 would compute all products of a group before it adds them.
OCTAVO_INLINE void add_nibbles(P (&sum)[2], const B (&weights)[2], B x) {
  P product;
  __asm__("vpmaddubsw %2, %4, %3\n\tvpaddw %3, %0, %0\n\t"
          "vpmaddubsw %2, %5, %2\n\tvpaddw %2, %1, %1"
          : "+x"(sum[0]), "+x"(sum[1]), "+x"(x), "=&x"(product)
          : "x"(weights[0]), "x"(weights[1]));
}
OCTAVO_INLINE I joined_halves(P sum) {
  return reinterpret_cast<I>(
      _mm256_madd_epi16(reinterpret_cast<__m256i>(sum), _mm256_set1_epi16(1)));
}
#endif
OCTAVO_INLINE F load_half(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
OCTAVO_INLINE F larger(F a, F b) { return _mm256_max_ps(a, b); }
OCTAVO_INLINE F smaller(F a, F b) { return _mm256_min_ps(a, b); }
OCTAVO_INLINE F reciprocal(F x) { return 1.0f / x; }

#else

constexpr int kByteOffset = 0;

#if defined(__ARM_NEON)
constexpr int kByteRows = 6;
constexpr int kFloatRows = 10;
constexpr int kQueryTile = 10;
#else
constexpr int kByteRows = 2;
constexpr int kFloatRows = 4;
constexpr int kQueryTile = 4;
#endif

#if defined(__ARM_FEATURE_DOTPROD)
constexpr const char* kByteProduct = "sdot";
OCTAVO_INLINE I dot_signed(I sum, B weights, B x) {
  return reinterpret_cast<I>(vdotq_s32(reinterpret_cast<int32x4_t>(sum),
                                       reinterpret_cast<int8x16_t>(weights),
                                       reinterpret_cast<int8x16_t>(x)));
}
#else
constexpr const char* kByteProduct = "shifts and products";
OCTAVO_INLINE I dot_signed(I sum, B weights, B x) {
  const I w = reinterpret_cast<I>(weights), v = reinterpret_cast<I>(x);
  return sum + (w << 24 >> 24) * (v << 24 >> 24) + (w << 16 >> 24) * (v << 16 >> 24) +
         (w << 8 >> 24) * (v << 8 >> 24) + (w >> 24) * (v >> 24);
}
#endif
OCTAVO_INLINE I dot_bytes(I sum, B weights, B x) { return dot_signed(sum, weights, x); }
OCTAVO_INLINE I dot_nibbles(I sum, B weights, B x) { return dot_signed(sum, weights, x); }

OCTAVO_INLINE F load_half(const uint16_t* from) { return load_half_by_shifts(from); }
OCTAVO_INLINE F larger(F a, F b) { return choose(a > b, a, b); }
OCTAVO_INLINE F smaller(F a, F b) { return choose(a < b, a, b); }
OCTAVO_INLINE F reciprocal(F x) { return 1.0f / x; }

#endif

#if OCTAVO_BYTES != 64
constexpr bool kAddsExponents = false;
OCTAVO_INLINE F rough_reciprocal(F x) { return reciprocal(x); }
#endif

#if !defined(__AVX2__) || defined(__AVXVNNI__) || OCTAVO_BYTES == 64
constexpr bool kHalfSums = false;
OCTAVO_INLINE void add_nibbles(P (&)[2], const B (&)[2], B) {}
OCTAVO_INLINE I joined_halves(P) { return I{}; }
#endif

OCTAVO_INLINE I larger(I a, I b) { return a > b ? a : b; }
OCTAVO_INLINE I smaller(I a, I b) { return a < b ? a : b; }

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

#if !defined(__AVX512VNNI__)
// p times 2 to the power of `turns`, a whole number.
OCTAVO_INLINE F scale_by_power(F p, F turns) {
  const F result = as_float(as_int(p) + (nearest(turns) << 23));
  return choose(turns == turns, result, turns);  // integers would turn NaN into a number
}
#endif

constexpr float kLog2E = 1.44269504f;

// exp(x) within 2 units in the last place for -87 < x < 88; tiny or 0 below, about 1e38 above, NaN
// for NaN: minimum and maximum return their second operand when one is NaN.
OCTAVO_INLINE F exp_of(F x) {
  const F clipped = smaller(splat(88.0f), larger(splat(-87.3f), x));
  const F turns = (clipped * kLog2E + kRound) - kRound;
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

// bfloat16, and products of its pairs added to each float lane: for both vectors of a panel, or one.
// A set that has the instruction for them (`kBfloatProducts`) rounds what meets bfloat16 weights and
// KV to bfloat16; the others widen those, and the products here are for the emulated set alone.
#if defined(__AVX512BF16__)
constexpr bool kBfloatProducts = true;
#if defined(OCTAVO_MATRIX)
constexpr const char* kBfloatProduct = "tdpbf16ps";
#else
constexpr const char* kBfloatProduct = "vdpbf16ps";
#endif
OCTAVO_INLINE Halves bfloats_of(F x) { return reinterpret_cast<Halves>(_mm512_cvtneps_pbh(x)); }
// Assembly, as above.
OCTAVO_INLINE void dot_pairs(F (&sum)[2], P first, P second, P x) {
  __asm__("vdpbf16ps %2, %3, %0\n\tvdpbf16ps %2, %4, %1"
          : "+v"(sum[0]), "+v"(sum[1])
          : "v"(x), "v"(first), "v"(second));
}
OCTAVO_INLINE F dot_pairs(F sum, P values, P x) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(values), "v"(x));
  return sum;
}
OCTAVO_INLINE bool any_above(F x, float bound) {
  return _mm512_cmp_ps_mask(x, splat(bound), _CMP_GT_OQ) != 0;
}
#if defined(OCTAVO_MATRIX)
// CPUs with matrix registers take two cycles to convert a vector, or two vectors, and for products of pairs.
OCTAVO_INLINE F rounded_to_bfloat(F x) { return as_float((as_int(x) + 0x8000) & ~0xffff); }
OCTAVO_INLINE F add_rounded(F sum, F x, uint8_t* to) {
  x = rounded_to_bfloat(x);
  store_halves(to, bfloats_of(x));
  return sum + x;
}
OCTAVO_INLINE F add_rounded(F sum, F x, F y, uint8_t* to) {
  x = rounded_to_bfloat(x);
  y = rounded_to_bfloat(y);
  store_bytes(to, reinterpret_cast<B>(_mm512_cvtne2ps_pbh(y, x)));
  return sum + x + y;
}
#else
OCTAVO_INLINE F add_rounded(F sum, F x, uint8_t* to) {
  const Halves rounded = bfloats_of(x);
  store_halves(to, rounded);
  const __m512i pairs = _mm512_zextsi256_si512(reinterpret_cast<__m256i>(rounded));
  return dot_pairs(sum, reinterpret_cast<P>(pairs), reinterpret_cast<P>(splat_int(0x3f803f80)));
}
#endif
// 2^x within 8e-5 of it, a small part of what bfloat16 rounds off: a polynomial of least relative
// error over the fraction of x, which is 0 for infinity. Tiny or 0 for tiny results, NaN for NaN.
OCTAVO_INLINE F rough_power_of_2(F x) {
  const F r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  F p = splat(0.07802452f);
  p = p * r + 0.22606716f;
  p = p * r + 0.69583354f;
  p = p * r + 0.99992522f;
  return _mm512_scalef_ps(p, x);  // which takes the whole number below x
}
#else
#if defined(OCTAVO_EMULATED)
constexpr bool kBfloatProducts = true;
#else
constexpr bool kBfloatProducts = false;
#endif
constexpr const char* kBfloatProduct = "float products";
OCTAVO_INLINE Halves bfloats_of(F x) {
  const U bits = reinterpret_cast<U>(x);
  const U rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return __builtin_convertvector(choose(x == x, reinterpret_cast<I>(rounded), splat_int(0x7fc0)), Halves);
}
OCTAVO_INLINE F dot_pairs(F sum, P values, P x) {
  const U a = reinterpret_cast<U>(values), b = reinterpret_cast<U>(x);
  return sum + lower_half(a) * lower_half(b) + upper_half(a) * upper_half(b);
}
OCTAVO_INLINE void dot_pairs(F (&sum)[2], P first, P second, P x) {
  sum[0] = dot_pairs(sum[0], first, x);
  sum[1] = dot_pairs(sum[1], second, x);
}
OCTAVO_INLINE bool any_above(F x, float bound) { return max_of(x) > bound; }
OCTAVO_INLINE F add_rounded(F sum, F x, uint8_t* to) {
  const Halves rounded = bfloats_of(x);
  store_halves(to, rounded);
  return sum + lower_half(__builtin_convertvector(rounded, U));
}
OCTAVO_INLINE F rough_power_of_2(F x) {
  return as_float(as_int(exp_of(x * 0.693147181f)) & ~(x < splat(-125.0f)));
}
#endif

#if !defined(OCTAVO_MATRIX) || !defined(__AVX512BF16__)
OCTAVO_INLINE F add_rounded(F sum, F x, F y, uint8_t* to) {
  sum = add_rounded(sum, x, to);
  return add_rounded(sum, y, to + 2 * kLanes);
}
#endif

OCTAVO_INLINE F tanh_of(F x) {
  // The minimum returns its second operand for NaN, so NaN passes through.
  return 1.0f - 2.0f * reciprocal(exp_of(smaller(splat(87.0f), x + x)) + 1.0f);
}

#if defined(__x86_64__) && !defined(OCTAVO_EMULATED)
#define OCTAVO_VECTOR_REGISTER "+v"
#elif defined(__aarch64__)
#define OCTAVO_VECTOR_REGISTER "+w"
#else
#define OCTAVO_VECTOR_REGISTER "+m"
#endif

// The product as it is rounded: the compiler cannot look through an assembly statement.
OCTAVO_INLINE F rounded(F product) {
  __asm__("" : OCTAVO_VECTOR_REGISTER(product));
  return product;
}
