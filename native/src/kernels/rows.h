// Operations on single rows: norm, quantisation, addition, gates.

OCTAVO_INLINE F gate_of(F x, Gate gate) {
  if (gate == Gate::kSilu) return x * reciprocal(1.0f + exp_of(-x));
  // tanh is 1 in float32 beyond 16, and a cube of the clipped value cannot overflow.
  const F near = smaller(splat(16.0f), larger(splat(-16.0f), x));
  const F inner = 0.7978845608028654f * (near + 0.044715f * near * near * near);
  return 0.5f * x * (1.0f + tanh_of(inner));
}

// Runs `body(i, vector)` over whole vectors and once over a padded rest.
template <typename Body>
OCTAVO_INLINE void over_vectors(const float* x, int64_t size, float* out, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, body(i, load(x + i)));
  if (i == size) return;
  float rest[kLanes] = {};
  for (int64_t j = i; j < size; ++j) rest[j - i] = x[j];
  const F result = body(i, load(rest));
  for (int64_t j = i; j < size; ++j) out[j] = result[j - i];
}

// A vector of `x` at i, 0 past the end.
OCTAVO_INLINE F load_upto(const float* x, int64_t i, int64_t size) {
  if (i + kLanes <= size) return load(x + i);
  float rest[kLanes] = {};
  for (int64_t j = i; j < size; ++j) rest[j - i] = x[j];
  return load(rest);
}

static void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* out) {
  F squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      const F v = load(x + i + j * kLanes);
      squares[j] += v * v;
    }
  for (; i < size; i += kLanes) {
    const F v = load_upto(x, i, size);
    squares[0] += v * v;
  }
  const float total = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(size) + eps);
  over_vectors(x, size, out, [&](int64_t at, F v) {
    return v * factor * load_upto(weight, at, size);
  });
}

// Lanes changed places: lane i is what lane i ^ `flip` was.
OCTAVO_INLINE I flipped(I x, int flip) { return __builtin_shuffle(x, lane_numbers() ^ flip); }

// The widest quad of a group, and the largest magnitudes in it and in the others, as bits: as
// integers, magnitudes of floats keep their order, and NaN lies above infinity.
struct Widest {
  int32_t most, next;
  uint32_t quad;
};
OCTAVO_INLINE Widest widest_quad(const float* x) {
  constexpr int kParts = kGroup / kLanes;
  I quads[kParts], most = I{}, next = I{};
#pragma GCC unroll 8
  for (int p = 0; p < kParts; ++p) {
    quads[p] = as_int(load(x + p * kLanes)) & 0x7fffffff;
    quads[p] = larger(quads[p], flipped(quads[p], 1));
    quads[p] = larger(quads[p], flipped(quads[p], 2));
    next = p == 0 ? I{} : larger(next, smaller(most, quads[p]));
    most = p == 0 ? quads[p] : larger(most, quads[p]);
  }
#pragma GCC unroll 2
  for (int flip = 4; flip < kLanes; flip *= 2) {
    const I other = flipped(most, flip);
    next = larger(larger(next, flipped(next, flip)), smaller(most, other));
    most = larger(most, other);
  }
  I number = splat_int(kGroup / 4);
#pragma GCC unroll 8
  for (int p = kParts - 1; p >= 0; --p)
    number = choose(quads[p] == most, (lane_numbers() >> 2) + p * (kLanes / 4), number);
#pragma GCC unroll 2
  for (int flip = 4; flip < kLanes; flip *= 2) number = smaller(number, flipped(number, flip));
  return {most[0], next[0], static_cast<uint32_t>(number[0])};
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
  const I4 high = q + 64 >> 7;
  const S4 upper = __builtin_convertvector(high, S4);
  const S4 lower = __builtin_convertvector(q - (high << 7), S4);
  __builtin_memcpy(group->high, &upper, 4);
  __builtin_memcpy(values + at, &lower, 4);
  return sum_of(sum);
}

// Rounds a row for quantised weights. All quads but the widest set a group's scale, unless high parts
// would not fit int8 then. What is not finite gives a scale of NaN, so that its row's result is NaN,
// as in float; what is so small that the inverse of its scale would overflow counts as zero. The
// passes are short, so that a core has many groups under way.
static void round_to_bytes(Format format, const float* x, int64_t inputs, uint8_t* out) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  auto* about = reinterpret_cast<ActivationGroup*>(out + groups * kGroup);
  const int32_t per_step = format == Format::kU4Group ? -8 : -kByteOffset;
  float last[kGroup] = {};  // a group that is not whole, padded
  for (int64_t i = inputs / kGroup * kGroup; i < inputs; ++i) last[i % kGroup] = x[i];
  const auto at = [&](int64_t g) { return (g + 1) * kGroup <= inputs ? x + g * kGroup : last; };
  for (int64_t g = 0; g < groups; ++g) {
    const Widest widest = widest_quad(at(g));
    const float whole = from_bits(widest.next) * (1.0f / 127.0f);
    const float split = from_bits(widest.most) * (1.0f / (127.0f * 128.0f));
    const float scale = whole > split ? whole : split;
    const bool finite = widest.most < 0x7f800000;
    about[g].widest = widest.quad & (kGroup / 4 - 1);
    about[g].scale = finite ? scale : __builtin_nanf("");
    about[g].total = finite && scale > 1e-35f ? 1.0f / scale : 0.0f;  // the inverse, for now
  }
  for (int64_t g = 0; g < groups; ++g) {
    const int32_t total = round_group(at(g), about[g].total, out + g * kGroup, about + g);
    if (about[g].scale != about[g].scale)
      about[g].start = 0;
    else if (format == Format::kU4GroupMin)
      about[g].total = static_cast<float>(total);
    else
      about[g].start = total * per_step;
  }
}

static void round_to_bfloats(const float* x, int64_t inputs, uint8_t* out) {
  const int64_t padded = (inputs + kGroup - 1) / kGroup * kGroup;
  for (int64_t i = 0; i < padded; i += kLanes)
    store_halves(out + 2 * i, bfloats_of(load_upto(x, i, inputs)));
}

static void quantise(Format format, const float* x, int64_t inputs, uint8_t* out) {
  if (format == Format::kBF16) return round_to_bfloats(x, inputs, out);
  round_to_bytes(format, x, inputs, out);
}

static void add(const float* x, const float* y, int64_t size, float* out) {
  over_vectors(x, size, out, [&](int64_t at, F v) { return v + load_upto(y, at, size); });
}

static void gated(const float* gate_up, Gate gate, int64_t size, float* out) {
  over_vectors(gate_up, size, out, [&](int64_t at, F v) {
    return gate_of(v, gate) * load_upto(gate_up + size, at, size);
  });
}
