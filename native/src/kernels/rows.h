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

// A group's activations as integers, and what ActivationGroup says of them. The quads but the widest
// set the scale, unless high parts would not fit int8 then. What is not finite gives a scale of NaN,
// so that its row's result is NaN, as in float; what is so small that the inverse of its scale would
// overflow counts as zero.
OCTAVO_INLINE void quantise_group(Format format, const F (&x)[kGroup / kLanes], uint8_t* values,
                                  ActivationGroup* group) {
  constexpr int kParts = kGroup / kLanes;
  typedef int8_t S __attribute__((vector_size(kLanes)));
  typedef S SUnaligned __attribute__((aligned(1), may_alias));

  // Magnitudes of quads, as bits: as integers, magnitudes of floats keep their order, and NaN lies
  // above infinity. `most` and `next` become the largest and the second.
  I quads[kParts], most = I{}, next = I{};
#pragma GCC unroll 8
  for (int p = 0; p < kParts; ++p) {
    quads[p] = as_int(x[p]) & 0x7fffffff;
    quads[p] = larger(quads[p], flipped(quads[p], 1));
    quads[p] = larger(quads[p], flipped(quads[p], 2));
    next = larger(next, smaller(most, quads[p]));
    most = larger(most, quads[p]);
  }
#pragma GCC unroll 2
  for (int flip = 4; flip < kLanes; flip *= 2) {
    const I other = flipped(most, flip);
    next = larger(larger(next, flipped(next, flip)), smaller(most, other));
    most = larger(most, other);
  }
  I numbers[kParts], widest = splat_int(kGroup / 4);
#pragma GCC unroll 8
  for (int p = 0; p < kParts; ++p) {
    numbers[p] = (lane_numbers() >> 2) + p * (kLanes / 4);
    widest = smaller(widest, choose(quads[p] == most, numbers[p], widest));
  }
#pragma GCC unroll 2
  for (int flip = 4; flip < kLanes; flip *= 2) widest = smaller(widest, flipped(widest, flip));

  const float top = as_float(most)[0], second = as_float(next)[0];
  const float whole = second * (1.0f / 127.0f), split = top * (1.0f / (127.0f * 128.0f));
  const float scale = whole > split ? whole : split;
  const bool finite = most[0] < 0x7f800000;
  const float inverse = finite && scale > 1e-35f ? 1.0f / scale : 0.0f;
  I sum = I{};
  uint8_t high[kGroup];
#pragma GCC unroll 8
  for (int p = 0; p < kParts; ++p) {
    const I q = finite ? nearest(x[p] * inverse) : I{};
    const I upper = (q + 64 >> 7) & (numbers[p] == widest);
    sum += q;
    *reinterpret_cast<SUnaligned*>(values + p * kLanes) =
        __builtin_convertvector(q - (upper << 7), S);
    *reinterpret_cast<SUnaligned*>(high + p * kLanes) = __builtin_convertvector(upper, S);
  }
  const int32_t total = sum_of(sum);
  group->scale = finite ? scale : __builtin_nanf("");
  if (format == Format::kU4GroupMin)
    group->total = static_cast<float>(total);
  else
    group->start = -total * (format == Format::kU4Group ? 8 : kByteOffset);
  group->widest = widest[0];
  __builtin_memcpy(group->high, high + 4 * widest[0], 4);
}

static void round_to_bfloats(const float* x, int64_t inputs, uint8_t* out) {
  const int64_t padded = (inputs + kGroup - 1) / kGroup * kGroup;
  for (int64_t i = 0; i < padded; i += kLanes)
    store_halves(out + 2 * i, bfloats_of(load_upto(x, i, inputs)));
}

static void quantise(Format format, const float* x, int64_t inputs, uint8_t* out) {
  if (format == Format::kBF16) return round_to_bfloats(x, inputs, out);
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  auto* about = reinterpret_cast<ActivationGroup*>(out + groups * kGroup);
  for (int64_t group = 0; group < groups; ++group) {
    F part[kGroup / kLanes];
#pragma GCC unroll 8
    for (int p = 0; p < kGroup / kLanes; ++p)
      part[p] = load_upto(x, group * kGroup + p * kLanes, inputs);
    quantise_group(format, part, out + group * kGroup, about + group);
  }
}

static void add(const float* x, const float* y, int64_t size, float* out) {
  over_vectors(x, size, out, [&](int64_t at, F v) { return v + load_upto(y, at, size); });
}

static void gated(const float* gate_up, Gate gate, int64_t size, float* out) {
  over_vectors(gate_up, size, out, [&](int64_t at, F v) {
    return gate_of(v, gate) * load_upto(gate_up + size, at, size);
  });
}
