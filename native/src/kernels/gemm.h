// Matrix products: rows of activations times panels of packed weights.
//
// A tile is a few rows times one panel (two vectors of outputs), whose sums stay in registers over
// all inputs. Rows outside, panels inside would stream the weights once per tile; so a panel, which
// fits the first-level cache, meets all rows before the next one.

constexpr int kPanel = 2 * kLanes;

// Bytes of one group of a panel: 32 inputs times all outputs, with the scales behind them.
constexpr int64_t group_bytes(Format format) {
  switch (format) {
    case Format::kI8Channel: return kGroup * kPanel;
    case Format::kI8Group: return kGroup * kPanel + 2 * kPanel;
    case Format::kU4Group: return kGroup / 2 * kPanel + 2 * kPanel;
    case Format::kU4GroupMin: return kGroup / 2 * kPanel + 4 * kPanel;
    default: return 0;
  }
}

static int64_t panel_bytes(Format format, int64_t inputs) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  if (format == Format::kF32) return inputs * kPanel * 4;
  if (format == Format::kBF16) return inputs * kPanel * 2;
  return groups * group_bytes(format) + (format == Format::kI8Channel ? kPanel * 4 : 0);
}

// Sums of one group, as integers. `x` points at the group's values in the tile's first row.
template <Format format, int M>
OCTAVO_INLINE void dot_group(const uint8_t* panel, const uint8_t* x, int64_t stride,
                             I (&sum)[M][2]) {
  constexpr bool nibbles = format == Format::kU4Group || format == Format::kU4GroupMin;
#pragma GCC unroll 8
  for (int step = 0; step < (nibbles ? 4 : 8); ++step) {
    const B first = load_bytes(panel + step * kPanel * 4);
    const B second = load_bytes(panel + step * kPanel * 4 + kLanes * 4);
    if constexpr (nibbles) {
      const B low0 = first & 15, low1 = second & 15;
      const B high0 = reinterpret_cast<B>(reinterpret_cast<U>(first) >> 4) & 15;
      const B high1 = reinterpret_cast<B>(reinterpret_cast<U>(second) >> 4) & 15;
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const B a = splat_quad(x + m * stride + step * 8);
        sum[m][0] = dot_u4(sum[m][0], low0, a);
        sum[m][1] = dot_u4(sum[m][1], low1, a);
        const B b = splat_quad(x + m * stride + step * 8 + 4);
        sum[m][0] = dot_u4(sum[m][0], high0, b);
        sum[m][1] = dot_u4(sum[m][1], high1, b);
      }
    } else {
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const B a = splat_quad(x + m * stride + step * 4);
        sum[m][0] = dot_i8(sum[m][0], first, a);
        sum[m][1] = dot_i8(sum[m][1], second, a);
      }
    }
  }
}

// Adds a group's integer sums, scaled, to the tile.
template <Format format, int M>
OCTAVO_INLINE void add_group(const uint8_t* scales, const GroupScale* x, int64_t stride,
                             const I (&sum)[M][2], F (&out)[M][2]) {
  F scale[2], minimum[2];
  if constexpr (format != Format::kI8Channel) {
    for (int v = 0; v < 2; ++v) {
      const auto* halves = reinterpret_cast<const uint16_t*>(scales) + v * kLanes;
      scale[v] = load_half(halves);
      if constexpr (format == Format::kU4GroupMin) minimum[v] = load_half(halves + kPanel);
      if constexpr (format == Format::kU4Group) minimum[v] = scale[v] * -8.0f;
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    const auto* row = reinterpret_cast<const GroupScale*>(
        reinterpret_cast<const uint8_t*>(x) + m * stride);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const F scaled = to_float(sum[m][v]) * row->scale;
      if constexpr (format == Format::kI8Channel)
        out[m][v] += scaled;
      else
        out[m][v] += scaled * scale[v];
      if constexpr (format == Format::kU4Group || format == Format::kU4GroupMin)
        out[m][v] += minimum[v] * row->scaled_sum;
    }
  }
}

// Where a tile works, and its share of the next panel, which it asks for while it computes: so
// memory and arithmetic overlap whatever the number of rows.
struct TileArgs {
  const uint8_t* panel;
  const uint8_t* x;
  int64_t stride;       // bytes from row to row of x
  const uint8_t* ahead;
  int64_t lines;        // cache lines to ask for per group of 32 inputs
};

OCTAVO_INLINE const uint8_t* prefetch(const uint8_t* ahead, int64_t lines) {
  for (int64_t line = 0; line < lines; ++line, ahead += 64)
    __builtin_prefetch(ahead, 0, 2);  // into the second-level cache: the first is full of this panel
  return ahead;
}

template <Format format, int M>
OCTAVO_INLINE void quantised_tile(const PackedWeight& weight, const TileArgs& args,
                                  F (&out)[M][2]) {
  const uint8_t* panel = args.panel;
  const uint8_t* x = args.x;
  const uint8_t* ahead = args.ahead;
  const int64_t stride = args.stride;
  constexpr bool has_minimum = format == Format::kU4GroupMin;
  constexpr int64_t scales_at = group_bytes(format) - (has_minimum ? 4 : 2) * kPanel;
  const auto* scales = reinterpret_cast<const GroupScale*>(x + weight.groups * kGroup);
  const auto row = [&](auto* first, int m) {
    return reinterpret_cast<decltype(first)>(reinterpret_cast<const uint8_t*>(first) + m * stride);
  };
  if constexpr (format == Format::kI8Channel) {
    const auto* start = reinterpret_cast<const RowStart*>(scales + weight.groups);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) out[m][0] = out[m][1] = splat(row(start, m)->start);
  }
  for (int64_t group = 0; group < weight.groups; ++group) {
    I sum[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
      sum[m][0] = sum[m][1] =
          format == Format::kI8Group ? splat_int(row(scales, m)->start) : I{};
    ahead = prefetch(ahead, args.lines);
    dot_group<format, M>(panel, x, stride, sum);
    add_group<format, M>(panel + scales_at, scales, stride, sum, out);
    panel += group_bytes(format);
    x += kGroup;
    ++scales;
  }
  if constexpr (format == Format::kI8Channel) {
    const auto* channel = reinterpret_cast<const float*>(panel);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      out[m][0] *= load(channel);
      out[m][1] *= load(channel + kLanes);
    }
  }
}

template <Format format, int M>
OCTAVO_INLINE void float_tile(const PackedWeight& weight, const TileArgs& args, F (&out)[M][2]) {
  const uint8_t* panel = args.panel;
  const uint8_t* x = args.x;
  const uint8_t* ahead = args.ahead;
  const int64_t stride = args.stride;
  for (int64_t first = 0; first < weight.inputs; first += kGroup) {
    ahead = prefetch(ahead, args.lines);
    const int64_t last = smaller(first + kGroup, weight.inputs);
    for (int64_t k = first; k < last; ++k) {
      F w[2];
      if constexpr (format == Format::kF32) {
        w[0] = load(reinterpret_cast<const float*>(panel));
        w[1] = load(reinterpret_cast<const float*>(panel) + kLanes);
        panel += kPanel * 4;
      } else {
        const U pairs = load_u32(panel);
        w[0] = lower_half(pairs);
        w[1] = upper_half(pairs);
        panel += kPanel * 2;
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const F a = splat(*reinterpret_cast<const float*>(x + m * stride + k * 4));
        out[m][0] += w[0] * a;
        out[m][1] += w[1] * a;
      }
    }
  }
}

// Bias, gate or residual, soft cap: from a tile's sums, in memory, to the output. A function of its
// own, with no M, so that the sums' registers are not held hostage by loops over rows.
static __attribute__((noinline)) void finish_tile(const PackedWeight& weight, const GemmArgs& args,
                                                  int64_t panel, int64_t row, int rows,
                                                  const float* sums) {
  const int64_t width = weight.gated ? kLanes : kPanel;
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
      first = gate_of(first, args.gate) * second;
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

template <Format format, int M>
static __attribute__((noinline)) void tile(const PackedWeight& weight, const GemmArgs& args,
                                           const TileArgs& at, int64_t panel, int64_t row) {
  F out[M][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) out[m][0] = out[m][1] = F{};
  if constexpr (format == Format::kF32 || format == Format::kBF16)
    float_tile<format, M>(weight, at, out);
  else
    quantised_tile<format, M>(weight, at, out);
  float sums[M * kPanel] __attribute__((aligned(64)));
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    store(sums + m * kPanel, out[m][0]);
    store(sums + m * kPanel + kLanes, out[m][1]);
  }
  finish_tile(weight, args, panel, row, M, sums);
}

template <Format format, int M>
OCTAVO_INLINE void tile_of(int rows, const PackedWeight& weight, const GemmArgs& args,
                           const TileArgs& at, int64_t panel, int64_t row) {
  if constexpr (M > 1)
    if (rows < M) return tile_of<format, M - 1>(rows, weight, args, at, panel, row);
  tile<format, M>(weight, args, at, panel, row);
}

template <Format format, int kMaxRows>
static void gemm_of(const PackedWeight& weight, const GemmArgs& args) {
  // Tiles of equal height, give or take a row: 32 rows are 6+6+5+5+5+5, not 6+6+6+6+6+2.
  const int64_t tiles = (args.rows + kMaxRows - 1) / kMaxRows;
  if (tiles == 0) return;
  const int64_t groups = (weight.inputs + kGroup - 1) / kGroup;
  const int64_t steps = tiles * groups;
  TileArgs at{};
  at.stride = args.x_stride;
  at.lines = (weight.panel_bytes / 64 + steps - 1) / steps;
  for (int64_t panel = args.first_panel; panel < args.last_panel; ++panel) {
    at.panel = weight.data + panel * weight.panel_bytes;
    int64_t row = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int rows = static_cast<int>((args.rows - row + tiles - t - 1) / (tiles - t));
      at.x = args.x + row * args.x_stride;
      at.ahead = at.panel + weight.panel_bytes + t * groups * at.lines * 64;
      tile_of<format, kMaxRows>(rows, weight, args, at, panel, row);
      row += rows;
    }
  }
}

static void gemm(const PackedWeight& weight, const GemmArgs& args) {
  switch (weight.format) {
    case Format::kF32: return gemm_of<Format::kF32, kFloatRows>(weight, args);
    case Format::kBF16: return gemm_of<Format::kBF16, kFloatRows>(weight, args);
    case Format::kI8Channel: return gemm_of<Format::kI8Channel, kIntRows>(weight, args);
    case Format::kI8Group: return gemm_of<Format::kI8Group, kIntRows>(weight, args);
    case Format::kU4Group: return gemm_of<Format::kU4Group, kIntRows>(weight, args);
    case Format::kU4GroupMin: return gemm_of<Format::kU4GroupMin, kIntRows>(weight, args);
  }
}
