// Loops that do nothing but what limits kernels: byte products, float products, reads.

// The dot product instruction on 12 independent sums; returns products and sums done, times 2.
static int64_t spin_int8(int64_t rounds, float* sink) {
  constexpr int kChains = 12;
  I sum[kChains];
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) sum[c] = splat_int(c);
  B weights = reinterpret_cast<B>(splat_int(0x01020304)), x = weights;
  for (int64_t i = 0; i < rounds; ++i) {
    __asm__ volatile("" : "+m"(sink[0]));  // keeps the loop from folding
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sum[c] = dot_u4(sum[c], weights, x);
  }
  I total = I{};
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) total += sum[c];
  sink[0] = static_cast<float>(total[0]);
  return rounds * kChains * kLanes * 8;
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
