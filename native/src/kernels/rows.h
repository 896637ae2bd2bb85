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

// Symmetric int8 per group of 32: scale = max / 127. An all-zero group has scale 0; a group that
// holds NaN or infinity gets a scale of NaN, so that its row's result is NaN, as in float.
static void quantise(const float* x, int64_t inputs, uint8_t* out) {
  typedef int8_t S __attribute__((vector_size(kLanes)));
  typedef S SUnaligned __attribute__((aligned(1), may_alias));
  constexpr int kVectors = kGroup / kLanes;
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  auto* scales = reinterpret_cast<GroupScale*>(out + groups * kGroup);
  float start = 0.0f;
  for (int64_t group = 0; group < groups; ++group) {
    F values[kVectors];
    I most = I{};
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      values[v] = load_upto(x, group * kGroup + v * kLanes, inputs);
      // As integers, magnitudes of floats keep their order, and NaN lies above infinity.
      most = larger(most, as_int(values[v]) & 0x7fffffff);
    }
    float largest;
    const int32_t bits = max_of(most);
    __builtin_memcpy(&largest, &bits, 4);
    const float scale = bits < 0x7f800000 ? largest / 127.0f : __builtin_nanf("");
    // A reciprocal of a subnormal maximum would be infinite; such a group counts as zeros.
    const float inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;
    I sum = I{};
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const I q = nearest(values[v] * inverse);
      sum += q;
      *reinterpret_cast<SUnaligned*>(out + group * kGroup + v * kLanes) =
          __builtin_convertvector(q, S);
    }
    const int32_t total = sum_of(sum);
    scales[group] = {scale, scale * static_cast<float>(total), -kWeightOffset * total};
    start -= scale * static_cast<float>(kWeightOffset * total);
  }
  reinterpret_cast<RowStart*>(scales + groups)->start = start;
}

static void add(const float* x, const float* y, int64_t size, float* out) {
  over_vectors(x, size, out, [&](int64_t at, F v) { return v + load_upto(y, at, size); });
}

static void gated(const float* gate_up, Gate gate, int64_t size, float* out) {
  over_vectors(gate_up, size, out, [&](int64_t at, F v) {
    return gate_of(v, gate) * load_upto(gate_up + size, at, size);
  });
}
