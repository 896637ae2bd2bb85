// Matrix products: rows of activations times panels of packed weights.
//
// A tile is a few rows times one panel (two vectors of outputs), whose sums stay in registers over
// all inputs. Rows outside, panels inside would stream the weights once per tile; so a panel, which
// fits the first-level cache, meets all rows before the next one.

template <Format format, bool wide, int M, typename Finish>
OCTAVO_INLINE void sum_tile(const PackedWeight& weight, const TileArgs& args, Finish finish) {
  if constexpr (is_quantised(format))
    quantised_tile<format, wide, M>(weight, args, finish);
  else if constexpr (format == Format::kBF16 && kBfloatProducts)
    bfloat_tile<M>(weight, args, finish);
  else
    float_tile<format, M>(weight, args, finish);
}

// Features that a panel makes: in a gated matrix half of its columns are gates.
OCTAVO_INLINE int64_t panel_features(const PackedWeight& weight) {
  return weight.gated ? kLanes : kPanel;
}

// What follows the sums of a tile, from registers to the output, row by row and unrolled: so rows
// overlap, and the next tile begins while this one ends. For whole panels without a soft cap.
OCTAVO_INLINE bool finishes_in_registers(const PackedWeight& weight, const GemmArgs& args,
                                         int64_t panel) {
  return (panel + 1) * panel_features(weight) <= weight.features() && args.softcap == 0.0f &&
         (!weight.gated || args.gate == Gate::kSilu);
}

template <int M>
OCTAVO_INLINE void finish_in_registers(const PackedWeight& weight, const GemmArgs& args,
                                       int64_t panel, int64_t row, F (&sums)[M][2]) {
  const int64_t stride = args.out_stride;
  const int64_t at = row * stride + panel * panel_features(weight);
  const auto add_to_each = [&](const float* terms, int64_t terms_stride) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m, terms += terms_stride)
      for (int v = 0; v < 2; ++v) sums[m][v] += load(terms + v * kLanes);
  };
  if (weight.bias) add_to_each(weight.bias + panel * kPanel, 0);
  if (weight.gated) {
    const bool rough = weight.format != Format::kF32;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
      store(args.out + at + m * stride, gate_of(sums[m][0], Gate::kSilu, rough) * sums[m][1]);
    return;
  }
  if (args.residual) add_to_each(args.residual + at, stride);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < 2; ++v) store(args.out + at + m * stride + v * kLanes, sums[m][v]);
}

// The same for all other tiles, from sums in memory: a function of its own, with no M, so that the
// sums' registers are not held hostage by loops over rows.
static __attribute__((noinline)) void finish_tile(const PackedWeight& weight, const GemmArgs& args,
                                                  int64_t panel, int64_t row, int rows,
                                                  const float* sums) {
  const int64_t width = panel_features(weight);
  const int64_t column = panel * width;
  const int64_t valid = smaller(width, weight.features() - column);
  F bias[2] = {};
  if (weight.bias)
    for (int v = 0; v < 2; ++v) bias[v] = load(weight.bias + panel * kPanel + v * kLanes);
  for (int m = 0; m < rows; ++m, sums += kPanel) {
    const int64_t at = (row + m) * args.out_stride + column;
    float* out = args.out + at;
    F first = load(sums) + bias[0], second = load(sums + kLanes) + bias[1];
    if (weight.gated) {
      first = gate_of(first, args.gate, weight.format != Format::kF32) * second;
    } else if (args.softcap != 0.0f) {
      first = args.softcap * tanh_of(first / args.softcap);
      second = args.softcap * tanh_of(second / args.softcap);
    } else if (args.residual) {
      first += load_upto(args.residual + at, 0, smaller(valid, kLanes));
      second += load_upto(args.residual + at, kLanes, valid);
    }
    if (valid >= kLanes) store(out, first);
    if (valid == kPanel) store(out + kLanes, second);
    if (valid % kLanes == 0) continue;
    for (int64_t i = valid / kLanes * kLanes; i < valid; ++i)
      out[i] = i < kLanes ? first[i] : second[i - kLanes];
  }
}

template <Format format, bool wide, int M>
static __attribute__((noinline)) void tile(const PackedWeight& weight, const GemmArgs& args,
                                           const TileArgs& at, int64_t panel, int64_t row) {
  // What finishing the tile reads and writes comes while it is computed.
  const float* ends = args.residual ? args.residual : args.out;
  ends += row * args.out_stride + panel * panel_features(weight);
  for (int m = 0; m < M; ++m, ends += args.out_stride) {
    __builtin_prefetch(ends, 1);
    if (!weight.gated) __builtin_prefetch(ends + kLanes, 1);
  }
  sum_tile<format, wide, M>(weight, at, [&](F (&sums)[M][2]) __attribute__((always_inline)) {
    if (finishes_in_registers(weight, args, panel))
      return finish_in_registers<M>(weight, args, panel, row, sums);
    F stored[M][2];  // a copy, for `sums` would stay in memory too
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) stored[m][0] = sums[m][0], stored[m][1] = sums[m][1];
    finish_tile(weight, args, panel, row, M, reinterpret_cast<const float*>(stored));
  });
}

template <Format format, bool wide, int M>
OCTAVO_INLINE void tile_of(int rows, const PackedWeight& weight, const GemmArgs& args,
                           const TileArgs& at, int64_t panel, int64_t row) {
  if constexpr (M > 1)
    if (rows < M) return tile_of<format, wide, M - 1>(rows, weight, args, at, panel, row);
  tile<format, wide, M>(weight, args, at, panel, row);
}

// From so many tiles on, nibbles are split once a panel instead of once a tile.
constexpr int64_t kTilesToWiden = 3;

template <Format format, bool wide, int kMaxRows>
static void gemm_of(const PackedWeight& weight, const GemmArgs& args) {
  // Tiles of equal height, give or take a row: 32 rows are 6+6+5+5+5+5, not 6+6+6+6+6+2.
  const int64_t tiles = (args.rows + kMaxRows - 1) / kMaxRows;
  if (tiles == 0) return;
  if constexpr (has_nibbles(format) && !wide)
    if (tiles >= kTilesToWiden) return gemm_of<format, true, kMaxRows>(weight, args);
  const int64_t groups = (weight.inputs + kGroup - 1) / kGroup;
  const int64_t steps = tiles * groups;
  TileArgs at{};
  at.stride = args.x_stride;
  at.wide = args.scratch;
  at.lines = (weight.panel_bytes / 64 + steps - 1) / steps;
  for (int64_t panel = args.first_panel; panel < args.last_panel; ++panel) {
    at.panel = weight.data + panel * weight.panel_bytes;
    if constexpr (wide) widen<format>(at.panel, groups, args.scratch);
    int64_t row = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int rows = static_cast<int>((args.rows - row + tiles - t - 1) / (tiles - t));
      at.x = args.x + row * args.x_stride;
      at.ahead = at.panel + weight.panel_bytes + t * groups * at.lines * 64;
      tile_of<format, wide, kMaxRows>(rows, weight, args, at, panel, row);
      row += rows;
    }
  }
}

static void gemm_by_vectors(const PackedWeight& weight, const GemmArgs& args) {
  switch (weight.format) {
    case Format::kF32: return gemm_of<Format::kF32, false, kFloatRows>(weight, args);
    case Format::kBF16: return gemm_of<Format::kBF16, false, kFloatRows>(weight, args);
    case Format::kI8Group: return gemm_of<Format::kI8Group, false, kByteRows>(weight, args);
    case Format::kU4Group: return gemm_of<Format::kU4Group, false, kByteRows>(weight, args);
    case Format::kU4GroupMin: return gemm_of<Format::kU4GroupMin, false, kByteRows>(weight, args);
  }
}
