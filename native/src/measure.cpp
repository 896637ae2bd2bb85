#include "measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "memory.h"

namespace octavo {

namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Seconds of the fastest of `tries` runs of `job` on all threads.
double fastest(Pool& pool, int tries, const Pool::Job& job) {
  double best = 1e9;
  for (int i = 0; i < tries; ++i) {
    const double start = now_s();
    pool.run(job);
    best = std::min(best, now_s() - start);
  }
  return best;
}

double measure_peak(Pool& pool, int64_t (*spin)(int64_t, float*)) {
  constexpr int64_t kRounds = 200000;  // under a millisecond: a busy machine leaves such gaps
  std::atomic<int64_t> operations{0};
  constexpr int kTries = 50;
  const double seconds = fastest(pool, kTries, [&](int) {
    float sink[2] = {1.0f, 1e-9f};
    operations.fetch_add(spin(kRounds, sink));
  });
  return static_cast<double>(operations.load()) / kTries / seconds;
}

}  // namespace

double measure_barrier_ns(Pool& pool) {
  constexpr int kRounds = 20000;
  return fastest(pool, 5, [&](int) {
    for (int i = 0; i < kRounds; ++i) pool.barrier().wait();
  }) / kRounds * 1e9;
}

double measure_read_gb_per_s(Pool& pool, const KernelTable& kernels, int64_t bytes) {
  const int threads = pool.threads();
  const int64_t each = bytes / threads / 1024 * 1024;
  Memory memory(each * threads);
  std::memset(memory.data(), 1, each * threads);
  const double seconds = fastest(pool, 9, [&](int thread) {
    float sink[1];
    kernels.read_stream(memory.data() + thread * each, each, sink);
  });
  return static_cast<double>(each * threads) / seconds * 1e-9;
}

double measure_peak_int8(Pool& pool, const KernelTable& kernels) {
  return measure_peak(pool, kernels.spin_int8);
}

double measure_peak_float(Pool& pool, const KernelTable& kernels) {
  return measure_peak(pool, kernels.spin_float);
}

}  // namespace octavo
