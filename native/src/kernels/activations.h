// Rows of activations rounded for the weights they meet (ADR 7).

// Lanes changed places: lane i is what lane i ^ `flip` was.
OCTAVO_INLINE I flipped(I x, int flip) { return __builtin_shuffle(x, lane_numbers() ^ flip); }

// The widest quad of a group, and the largest magnitudes in it and in the others, as bits: as
// integers, magnitudes of floats keep their order, and NaN lies above infinity. Their last three bits
// are numbers of quads.
struct Widest {
  int32_t most, next;
  uint32_t quad;
};
OCTAVO_INLINE Widest widest_quad(const float* x) {
  constexpr int kQuads = kGroup / 4;
  I most = I{}, next = I{};
#pragma GCC unroll 8
  for (int i = 0; i < kGroup; i += kLanes) {
    I quad = as_int(load(x + i)) & 0x7fffffff;
    quad = larger(quad, flipped(quad, 1));
    quad = larger(quad, flipped(quad, 2));
    quad = (quad & -kQuads) | ((lane_numbers() >> 2) + i / 4);
    next = larger(next, smaller(most, quad));
    most = larger(most, quad);
  }
#pragma GCC unroll 2
  for (int flip = 4; flip < kLanes; flip *= 2) {
    const I other = flipped(most, flip);
    next = larger(larger(next, flipped(next, flip)), smaller(most, other));
    most = larger(most, other);
  }
  return {most[0], next[0], static_cast<uint32_t>(most[0]) % kQuads};
}

OCTAVO_INLINE float from_bits(int32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// A group in steps, of which those of the widest quad are split; returns their sum.
OCTAVO_INLINE int32_t round_group(const float* x, float inverse, uint8_t* values,
                                  ActivationGroup* group) {
  typedef int8_t S __attribute__((vector_size(kLanes)));
  typedef S SUnaligned __attribute__((aligned(1), may_alias));
  I sum = I{};
#pragma GCC unroll 8
  for (int i = 0; i < kGroup; i += kLanes) {
    const I q = nearest(load(x + i) * inverse);
    sum += q;
    *reinterpret_cast<SUnaligned*>(values + i) = __builtin_convertvector(q, S);
  }
  typedef float F4 __attribute__((vector_size(16)));
  typedef F4 F4Unaligned __attribute__((aligned(1), may_alias));
  typedef int32_t I4 __attribute__((vector_size(16)));
  typedef int8_t S4 __attribute__((vector_size(4)));
  const int64_t at = 4 * static_cast<int64_t>(group->widest);
  const F4 moved = *reinterpret_cast<const F4Unaligned*>(x + at) * inverse + kRound;
  const I4 q = reinterpret_cast<I4>(moved) - as_int(splat(kRound))[0];
  const I4 high = (q + kHighStep / 2) >> kHighBits;
  const S4 upper = __builtin_convertvector(high, S4);
  const S4 lower = __builtin_convertvector(q - (high << kHighBits), S4);
  __builtin_memcpy(group->high, &upper, 4);
  __builtin_memcpy(values + at, &lower, 4);
  return sum_of(sum);
}

// Exponents of groups lie between, so that none of a product with a weight's scale, a float16, leaves
// those of float32.
constexpr int kLeastExponent = -100, kMostExponent = 100;

// The least n for which 127 * 2^(n / 2) is no less than a magnitude, given as bits but for the last
// three; above any step, with high parts too, for what is not finite.
OCTAVO_INLINE int halves_of_step(int32_t magnitude) {
  // 127 is 2^6 with a mantissa of 0x7e0000, times the root of 2 it is 2^7 with 0x339ae9; what exceeds
  // them in the last bits is rounded to them.
  constexpr uint32_t kAbove = 0x7fffff - (0x7e0000 + 7), kAboveRoot = 0x7fffff - (0x339ae9 + 7);
  const auto bits = static_cast<uint32_t>(magnitude);
  const int even = static_cast<int>((bits + kAbove) >> 23) - (127 + 6);
  const int odd = static_cast<int>((bits + kAboveRoot) >> 23) - (127 + 7);
  return even + odd;
}

// Rounds a row for quantised weights. All quads but the widest set a group's step, unless high parts
// would not fit int8 then. What is not finite, or so large that it might as well not be, gives a row
// that starts at NaN, so that its result is NaN; what is below the least step counts as zero. The
// passes are short, so that a core has many groups under way.
static void round_to_bytes(Format format, const float* x, int64_t inputs, uint8_t* out) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  auto* about = reinterpret_cast<ActivationGroup*>(out + groups * kGroup);
  const int32_t per_step = format == Format::kU4Group ? -8 : -kByteOffset / kHighStep;
  float last[kGroup] = {};  // a group that is not whole, padded
  for (int64_t i = inputs / kGroup * kGroup; i < inputs; ++i) last[i % kGroup] = x[i];
  const auto at = [&](int64_t g) { return (g + 1) * kGroup <= inputs ? x + g * kGroup : last; };
  int highest = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const Widest widest = widest_quad(at(g));
    const int whole = halves_of_step(widest.next);
    const int split = halves_of_step(widest.most) - 2 * kHighBits;
    const int halves = whole > split ? whole : split;
    about[g].start = halves;  // for now
    about[g].widest = static_cast<uint16_t>(widest.quad);
    highest = halves > highest ? halves : highest;
  }
  for (int64_t g = 0; g < groups; ++g) {
    const int halves = about[g].start;
    if (halves < 2 * kLeastExponent || halves > 2 * kMostExponent) {
      about[g] = {};
      __builtin_memset(out + g * kGroup, 0, kGroup);
      continue;
    }
    const int exponent = halves >> 1, has_root = halves & 1;
    const float inverse = from_bits((127 - exponent) << 23) * (has_root ? kRootOf2 / 2 : 1.0f);
    const int32_t total = round_group(at(g), inverse, out + g * kGroup, about + g);
    const float step = from_bits((127 + exponent) << 23) * (has_root ? kRootOf2 : 1.0f);
    if (kAddsExponents)
      about[g].exponent = exponent << 23;
    else
      about[g].step = step;
    about[g].has_root = static_cast<uint16_t>(has_root);
    if (format == Format::kU4GroupMin)
      about[g].total = static_cast<float>(total) * (kAddsExponents ? step : 1.0f);
    else
      about[g].start = total * per_step;
  }
  const float start = highest <= 2 * kMostExponent ? 0.0f : __builtin_nanf("");
  __builtin_memcpy(about + groups, &start, 4);
}

// `group_stride`: bytes from a group of the row to the next.
static void round_to_bfloats(const float* x, int64_t inputs, int64_t group_stride, uint8_t* out) {
  for (int64_t g = 0; g * kGroup < inputs; ++g, out += group_stride)
#pragma GCC unroll 8
    for (int64_t i = 0; i < kGroup; i += kLanes)
      store_halves(out + 2 * i, bfloats_of(load_upto(x, g * kGroup + i, inputs)));
}

// Rounds a row, which becomes number `row` of `rows`.
static void quantise(Format format, const float* x, int64_t inputs, uint8_t* rows, int64_t row) {
  const int64_t bytes = quantised_row_bytes(format, inputs);
  if (format != Format::kBF16) return round_to_bytes(format, x, inputs, rows + row * bytes);
  if constexpr (kMatrixFrom == 0) return round_to_bfloats(x, inputs, kGroup * 2, rows + row * bytes);
  const int64_t first = row / kPairRows * kPairRows;
  round_to_bfloats(x, inputs, kPairRows * kGroup * 2, rows + first * bytes + row % kPairRows * kGroup * 2);
}
