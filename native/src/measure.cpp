#include "measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "kv_cache.h"
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

double measure_peak_bytes(Pool& pool, const KernelTable& kernels) {
  return measure_peak(pool, kernels.spin_bytes);
}

double measure_peak_bfloats(Pool& pool, const KernelTable& kernels) {
  return measure_peak(pool, kernels.spin_bfloats);
}

double measure_peak_float(Pool& pool, const KernelTable& kernels) {
  return measure_peak(pool, kernels.spin_float);
}

AttentionCost measure_attention(const KernelTable& kernels, KVType type, int64_t heads,
                                int64_t dim) {
  constexpr int64_t kBlock = 16, kNear = 1024, kWideRows = 16, kStates = 8;
  constexpr int64_t kFar = 262144;  // tokens, which few caches hold
  KVCache kv({1, 1, dim, kBlock, kFar / kBlock, type}, kernels.lanes);
  const KVLayer layer = kv.layer(0);
  std::memset(layer.keys, 0x3c, kFar / kBlock * layer.block_bytes);  // 0.0115 as a float
  const int64_t vectors = kWideRows * heads;
  std::vector<float> q(vectors * dim, 0.1f), out(vectors * dim), scratch(attend_scratch(vectors, dim));
  std::vector<int32_t> blocks(kFar / kBlock), positions(kWideRows, kFar);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(0));  // as they lie after some requests
  const AttentionShape shape{heads, 1, dim, 0.1f, 0, 0, 0, nullptr, nullptr, 0};
  const auto time_ns = [&](int tries, const auto& job) {
    double best = 1e9;
    for (int i = 0; i < tries; ++i) {
      const double start = now_s();
      job();
      best = std::min(best, now_s() - start);
    }
    return best * 1e9;
  };
  const auto attend_ns = [&](int tries, int64_t rows, int64_t tokens) {
    AttendArgs args{};
    args.q = q.data();
    args.q_stride = args.out_stride = heads * dim;
    args.positions = positions.data();
    args.rows = rows;
    args.block_table = blocks.data();
    args.last_token = tokens;
    args.scratch = scratch.data();
    args.out = out.data();
    return time_ns(tries, [&] { kernels.attend(layer, shape, args); });
  };
  const double few = attend_ns(100, 1, kBlock), near = attend_ns(30, 1, kNear);
  const double wide = attend_ns(10, kWideRows, kNear), far = attend_ns(5, 1, kFar);
  // near = tiles * tile_token + vectors * vector_token, and wide likewise.
  AttentionCost cost = attention_cost(kernels, dim, type);
  const auto tiles = [&](int64_t count) { return static_cast<double>((count + cost.tile - 1) / cost.tile); };
  const double narrow_token = (near - few) / (kNear - kBlock);
  const double wide_token = (wide - few) / (kNear - kBlock);
  const double determinant = tiles(heads) * static_cast<double>(vectors) -
                             tiles(vectors) * static_cast<double>(heads);
  cost.vector_token =
      std::max(0.0, (tiles(heads) * wide_token - tiles(vectors) * narrow_token) / determinant);
  cost.tile_token = std::max(
      0.0, (narrow_token - static_cast<double>(heads) * cost.vector_token) / tiles(heads));
  cost.item = std::max(0.0, few - kBlock * narrow_token);
  cost.token = (far - few) / (kFar - kBlock);
  std::vector<float> state((dim + 2) * kStates, 0.5f);
  std::vector<const float*> states;
  for (int64_t i = 0; i < kStates; ++i) states.push_back(state.data() + i * (dim + 2));
  cost.state =
      time_ns(100, [&] { kernels.join_states(states.data(), kStates, dim, out.data()); }) / kStates;
  return cost;
}

}  // namespace octavo
