// Loops that do nothing but what limits kernels: byte products, float products, reads.

// 12 independent sums, of 6 rows and 2 vectors of weights as in a tile. `dot(sum, first, second, x)`
// is a row's share, of as many products as bytes or pairs fit a vector; returns operations done.
template <typename V, typename Sum, typename Dot>
OCTAVO_INLINE int64_t spin_product(int64_t rounds, float* sink, Dot dot) {
  constexpr int kRows = 6;
  int32_t x[kRows] = {1, 2, 3, 4, 5, 6}, weights[2] = {7, 8};
  __asm__ volatile("" : "+m"(weights));  // unknown to the compiler, which would fold products
  const V first = reinterpret_cast<V>(splat_int(weights[0]));
  const V second = reinterpret_cast<V>(splat_int(weights[1]));
  Sum sum[kRows][2] = {};
  for (int64_t i = 0; i < rounds; ++i) {
    __asm__ volatile("" : "+m"(x));
#pragma GCC unroll 6
    for (int m = 0; m < kRows; ++m)
      dot(sum[m], first, second, reinterpret_cast<const uint8_t*>(x + m));
  }
  Sum total = {};
#pragma GCC unroll 6
  for (int m = 0; m < kRows; ++m) total += sum[m][0] + sum[m][1];
  sink[0] = static_cast<float>(total[0]);
  return rounds * kRows * 2 * 2 * static_cast<int64_t>(sizeof(V) / sizeof(V{}[0]));
}

static int64_t spin_bytes(int64_t rounds, float* sink) {
  return spin_product<B, I>(rounds, sink, [](I (&sum)[2], B first, B second, const uint8_t* x) {
    const B row = splat_quad(x);
    sum[0] = dot_bytes(sum[0], first, row);
    sum[1] = dot_bytes(sum[1], second, row);
  });
}

static int64_t spin_float(int64_t rounds, float* sink) {
  constexpr int kChains = 12;
  F sum[kChains];
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) sum[c] = splat(static_cast<float>(c));
  F a = splat(sink[0]), b = splat(sink[1]);
  for (int64_t i = 0; i < rounds; ++i) {
    __asm__ volatile("" : "+m"(sink[0]));
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sum[c] = sum[c] * a + b;
  }
  F total = F{};
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) total += sum[c];
  sink[0] = sum_of(total);
  return rounds * kChains * kLanes * 2;
}

#if defined(OCTAVO_MATRIX)
static int64_t spin_bfloats(int64_t rounds, float* sink) {
  // Not zeros: a core that multiplies those runs faster.
  uint16_t values[kMatrixRows * kMatrixBytes] __attribute__((aligned(64)));
  for (int64_t i = 0; i < kMatrixRows * kMatrixBytes; ++i)
    values[i] = static_cast<uint16_t>(0x3f80 + i * 37 % 128 + i % 3 * 0x8000);
  const MatrixRegisters registers({});
  load_matrix<4>(values, kMatrixBytes);
  load_matrix<5>(values + kMatrixBytes / 2, kMatrixBytes);
  load_matrix<6>(values, kMatrixBytes);
  load_matrix<7>(values + kMatrixBytes / 2, kMatrixBytes);
  for (int64_t i = 0; i < rounds; ++i) {
    multiply_matrices<0, 4, 6>();
    multiply_matrices<1, 4, 7>();
    multiply_matrices<2, 5, 6>();
    multiply_matrices<3, 5, 7>();
  }
  float sums[kMatrixRows * kMatrixRows];
  store_matrix<0>(sums, kMatrixBytes);
  sink[0] = sums[0];
  return rounds * 4 * kMatrixRows * kMatrixRows * (kMatrixBytes / 2) * 2;
}
#else
static int64_t spin_bfloats(int64_t rounds, float* sink) {
  if constexpr (!kBfloatProducts) return spin_float(rounds, sink);
  return spin_product<P, F>(rounds, sink, [](F (&sum)[2], P first, P second, const uint8_t* x) {
    dot_pairs(sum, first, second, splat_pair<0, 0>(x, 0));
  });
}
#endif

// Reads `bytes` (a multiple of 1024) once, in one ascending stream.
static void read_stream(const uint8_t* data, int64_t bytes, float* sink) {
  constexpr int kStreams = 8;
  I sum[kStreams];
#pragma GCC unroll 8
  for (int s = 0; s < kStreams; ++s) sum[s] = I{};
  for (int64_t at = 0; at < bytes; at += kStreams * OCTAVO_BYTES) {
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; ++s) {
      const uint8_t* from = data + at + s * OCTAVO_BYTES;
      __builtin_prefetch(from + 4096);
      sum[s] += *reinterpret_cast<const IUnaligned*>(from);
    }
  }
  I total = I{};
#pragma GCC unroll 8
  for (int s = 0; s < kStreams; ++s) total += sum[s];
  sink[0] = static_cast<float>(total[0]);
}
