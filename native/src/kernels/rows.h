// Operations on single rows: norm, addition, gates.

// `rough` is for what is rounded to 8 bits or bfloat16 next.
OCTAVO_INLINE F gate_of(F x, Gate gate, bool rough = false) {
  if (gate == Gate::kSilu) {
    if (rough) return x * rough_reciprocal(1.0f + rough_power_of_2(smaller(splat(126.0f), x * -kLog2E)));
    return x * reciprocal(1.0f + exp_of(-x));
  }
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

static void add(const float* x, const float* y, int64_t size, float* out) {
  over_vectors(x, size, out, [&](int64_t at, F v) { return v + load_upto(y, at, size); });
}

static void gated(const float* gate_up, Gate gate, int64_t size, float* out) {
  over_vectors(gate_up, size, out, [&](int64_t at, F v) {
    return gate_of(v, gate) * load_upto(gate_up + size, at, size);
  });
}
