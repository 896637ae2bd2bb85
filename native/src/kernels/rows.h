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

// Largest magnitude, as bits: as integers, magnitudes of floats keep their order, and NaN lies above
// infinity.
OCTAVO_INLINE int32_t largest_bits(const float* x, int64_t first, int64_t last, int64_t size) {
  I most = I{};
  for (int64_t i = first; i < last; i += kLanes)
    most = larger(most, as_int(load_upto(x, i, size)) & 0x7fffffff);
  return max_of(most);
}

// A scale that takes magnitudes to `steps`, and its inverse. What has no finite maximum gets a scale
// of NaN, so that its row's result is NaN, as in float; what is all zero, or so small that its
// inverse would overflow, counts as zero.
struct Scale {
  float scale;
  float inverse;
};
OCTAVO_INLINE Scale scale_for(int32_t bits, float steps) {
  float largest;
  __builtin_memcpy(&largest, &bits, 4);
  if (bits >= 0x7f800000) return {__builtin_nanf(""), 0.0f};
  return {largest / steps, largest > 1e-33f ? steps / largest : 0.0f};
}

// Symmetric int8 per group of 32.
static void quantise_bytes(const float* x, int64_t inputs, uint8_t* out) {
  typedef int8_t S __attribute__((vector_size(kLanes)));
  typedef S SUnaligned __attribute__((aligned(1), may_alias));
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  auto* scales = reinterpret_cast<float*>(out + groups * kGroup);
  float start = 0.0f;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = group * kGroup;
    const Scale scale = scale_for(largest_bits(x, first, first + kGroup, inputs), 127.0f);
    I sum = I{};
#pragma GCC unroll 8
    for (int64_t i = first; i < first + kGroup; i += kLanes) {
      const I q = nearest(load_upto(x, i, inputs) * scale.inverse);
      sum += q;
      *reinterpret_cast<SUnaligned*>(out + i) = __builtin_convertvector(q, S);
    }
    scales[group] = scale.scale;
    start -= scale.scale * (static_cast<float>(kByteOffset) * static_cast<float>(sum_of(sum)));
  }
  scales[groups] = start;
}

// Symmetric int16 with one scale for the row. A value is off by at most 1/65534 of the row's
// largest, so products are nearer to float32's than with activations in bfloat16.
static void quantise_pairs(Format format, const float* x, int64_t inputs, uint8_t* out) {
  typedef int16_t S __attribute__((vector_size(kLanes * 2)));
  typedef S SUnaligned __attribute__((aligned(1), may_alias));
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  const Scale scale = scale_for(largest_bits(x, 0, inputs, inputs), 32767.0f);
  if (scale.inverse == 0.0f) __builtin_memset(out, 0, quantised_row_bytes(format, inputs));
  float* floats = reinterpret_cast<float*>(out + groups * kGroup * 2);
  for (int64_t group = 0; group < groups && scale.inverse != 0.0f; ++group) {
    I sum = I{};
#pragma GCC unroll 8
    for (int64_t i = group * kGroup; i < (group + 1) * kGroup; i += kLanes) {
      const I q = nearest(load_upto(x, i, inputs) * scale.inverse);
      sum += q;
      *reinterpret_cast<SUnaligned*>(out + 2 * i) = __builtin_convertvector(q, S);
    }
    if (has_nibbles(format)) floats[group] = static_cast<float>(sum_of(sum));
  }
  floats[has_nibbles(format) ? groups : 0] = scale.scale;
}

static void round_to_bfloats(const float* x, int64_t inputs, uint8_t* out) {
  const int64_t padded = (inputs + kGroup - 1) / kGroup * kGroup;
  for (int64_t i = 0; i < padded; i += kLanes)
    store_halves(out + 2 * i, bfloats_of(load_upto(x, i, inputs)));
}

static void quantise(Format format, const float* x, int64_t inputs, uint8_t* out) {
  if (format == Format::kBF16) return round_to_bfloats(x, inputs, out);
  if (format == Format::kI8Channel) return quantise_bytes(x, inputs, out);
  quantise_pairs(format, x, inputs, out);
}

static void add(const float* x, const float* y, int64_t size, float* out) {
  over_vectors(x, size, out, [&](int64_t at, F v) { return v + load_upto(y, at, size); });
}

static void gated(const float* gate_up, Gate gate, int64_t size, float* out) {
  over_vectors(gate_up, size, out, [&](int64_t at, F v) {
    return gate_of(v, gate) * load_upto(gate_up + size, at, size);
  });
}
