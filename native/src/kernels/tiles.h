// Tiles of a matrix product: a few rows of activations times one panel of packed weights, summed
// over all inputs into `sums`, [rows][kPanel].

constexpr int kPanel = 2 * kLanes;

// Bytes of one group of a panel: 32 inputs times all outputs, with the scales behind them.
constexpr int64_t values_bytes(Format format) {
  return has_nibbles(format) ? kGroup / 2 * kPanel : kGroup * kPanel;
}
constexpr int64_t group_bytes(Format format) {
  const int64_t scales =
      format == Format::kU4GroupMin ? 4 : format == Format::kI8Channel ? 0 : 2;
  return values_bytes(format) + scales * kPanel;
}

static int64_t panel_bytes(Format format, int64_t inputs) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  if (format == Format::kF32) return inputs * kPanel * 4;
  if (format == Format::kBF16) return (kBfloatProducts ? groups * kGroup : inputs) * kPanel * 2;
  return groups * group_bytes(format) + (format == Format::kI8Channel ? kPanel * 4 : 0);
}

// Where a tile works, and its share of the next panel, which it asks for while it computes: so
// memory and arithmetic overlap whatever the number of rows.
struct TileArgs {
  const uint8_t* panel;
  const uint8_t* wide;  // the panel's values as 16-bit pairs; null: they are widened as they are read
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

// The value of type T that each row of a tile holds, `stride` bytes apart.
template <typename T>
OCTAVO_INLINE T of_row(const uint8_t* first, int m, int64_t stride) {
  T value;
  __builtin_memcpy(&value, first + m * stride, sizeof value);
  return value;
}

template <int M>
OCTAVO_INLINE void store_sums(const F (&out)[M][2], float* sums) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    store(sums + m * kPanel, out[m][0]);
    store(sums + m * kPanel + kLanes, out[m][1]);
  }
}

// ---- 16-bit activations

// Where a tile's rows lie: row m is at base[m / 3] + m % 3 * stride, which x86 adds up in a load.
template <int M>
struct TileRows {
  const uint8_t* base[(M + 2) / 3];
  int64_t stride;

  OCTAVO_MEMBER TileRows(const uint8_t* x, int64_t row_stride) : stride(row_stride) {
    repeat<(M + 2) / 3>(OCTAVO_BODY(b) {
      base[b.value] = x + 3 * b.value * row_stride;
      __asm__("" : "+r"(base[b.value]));  // or the compiler computes it again from x
    });
  }
  OCTAVO_MEMBER void advance(int64_t bytes) {
    repeat<(M + 2) / 3>(OCTAVO_BODY(b) { base[b.value] += bytes; });
  }
};

// Two inputs of a lane, which lie `kAt` bytes on in the rows, times the same two of each row.
template <int kAt, typename V, int M>
OCTAVO_INLINE void dot_rows(P first, P second, const TileRows<M>& rows, V (&sum)[M][2]) {
  repeat<M>(OCTAVO_BODY(m) {
    const P x = splat_pair<m.value % 3, kAt>(rows.base[m.value / 3], rows.stride);
    dot_pairs(sum[m.value], first, second, x);
  });
}

// The pairs of 8 inputs that 16-bit halves hold as nibbles.
template <int pair>
OCTAVO_INLINE P nibbles(P values) {
  if constexpr (pair == 0) return values & 15;
  if constexpr (pair == 3) return values >> 12;
  return values >> 4 * pair & 15;
}

// Widens the values of a panel of nibbles, [groups][inputs / 2][output][2].
template <Format format>
static void widen(const uint8_t* panel, int64_t groups, uint8_t* out) {
  for (; groups > 0; --groups, panel += group_bytes(format), out += kGroup * kPanel * 2)
    for (int i = 0; i < 8; ++i) {  // four steps of two vectors
      const P values = reinterpret_cast<P>(load_bytes(panel + i * OCTAVO_BYTES));
      repeat<4>(OCTAVO_BODY(pair) {
        const int at = (i / 2 * 4 + pair.value) * 2 + i % 2;
        store_bytes(out + at * OCTAVO_BYTES, reinterpret_cast<B>(nibbles<pair.value>(values)));
      });
    }
}

// Products of one group, whose values are `wide` or as packed.
template <Format format, bool wide, int M>
OCTAVO_INLINE void dot_group(const uint8_t* values, const TileRows<M>& rows, I (&sum)[M][2]) {
  if constexpr (wide || !has_nibbles(format)) {
    repeat<16>(OCTAVO_BODY(pair) {
      constexpr int kBytes = wide ? OCTAVO_BYTES : OCTAVO_BYTES / 2;
      const uint8_t* from = values + pair.value * 2 * kBytes;
      const P first = wide ? load_pairs(from) : widened_bytes(from);
      const P second = wide ? load_pairs(from + kBytes) : widened_bytes(from + kBytes);
      dot_rows<pair.value * 4>(first, second, rows, sum);
    });
  } else {
    repeat<4>(OCTAVO_BODY(step) {
      const P a = load_pairs(values + step.value * 2 * OCTAVO_BYTES);
      const P b = load_pairs(values + step.value * 2 * OCTAVO_BYTES + OCTAVO_BYTES);
      repeat<4>(OCTAVO_BODY(pair) {
        constexpr int kAt = (decltype(step)::value * 4 + decltype(pair)::value) * 4;
        dot_rows<kAt>(nibbles<pair.value>(a), nibbles<pair.value>(b), rows, sum);
      });
    });
  }
}

// Adds the integers of a group, times the weights' scales, to the tile. The sums in float stay in
// memory: so all registers but a few hold integers. `totals` are the rows' sums of the group.
template <Format format, int M>
OCTAVO_INLINE void add_group(const uint8_t* scales, const uint8_t* totals, int64_t stride,
                             const I (&sum)[M][2], float* sums) {
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const auto* halves = reinterpret_cast<const uint16_t*>(scales) + v * kLanes;
    const F scale = load_half(halves);
    F minimum{};
    if constexpr (format == Format::kU4Group) minimum = scale * -8.0f;
    if constexpr (format == Format::kU4GroupMin) minimum = load_half(halves + kPanel);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      float* to = sums + m * kPanel + v * kLanes;
      F out = load(to) + to_float(sum[m][v]) * scale;
      if constexpr (has_nibbles(format)) out += minimum * of_row<float>(totals, m, stride);
      store(to, out);
    }
  }
}

template <Format format, bool wide, int M>
OCTAVO_INLINE void pair_tile(const PackedWeight& weight, const TileArgs& args, float* sums) {
  const uint8_t* values = wide ? args.wide : args.panel;
  const uint8_t* scales = args.panel + values_bytes(format);
  const uint8_t* ahead = args.ahead;
  const int64_t stride = args.stride;
  const uint8_t* floats = args.x + weight.groups * kGroup * 2;
  TileRows<M> rows(args.x, stride);
#pragma GCC unroll 32
  for (int i = 0; i < 2 * M; ++i) store(sums + i * kLanes, F{});
  for (int64_t group = 0; group < weight.groups; ++group) {
    I sum[M][2] = {};
    ahead = prefetch(ahead, args.lines);
    dot_group<format, wide, M>(values, rows, sum);
    add_group<format, M>(scales, floats, stride, sum, sums);
    rows.advance(kGroup * 2);
    values += wide ? kGroup * kPanel * 2 : group_bytes(format);
    scales += group_bytes(format);
    if (has_nibbles(format)) floats += 4;
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    const float scale = of_row<float>(floats, m, stride);
    store(sums + m * kPanel, load(sums + m * kPanel) * scale);
    store(sums + m * kPanel + kLanes, load(sums + m * kPanel + kLanes) * scale);
  }
}

// ---- 8-bit activations

template <int M>
OCTAVO_INLINE void byte_tile(const PackedWeight& weight, const TileArgs& args, float* sums) {
  const uint8_t* panel = args.panel;
  const uint8_t* x = args.x;
  const uint8_t* ahead = args.ahead;
  const int64_t stride = args.stride, groups = weight.groups;
  const uint8_t* scales = x + groups * kGroup;
  F out[M][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    out[m][0] = out[m][1] = splat(of_row<float>(scales + groups * 4, m, stride));
  for (int64_t group = 0; group < groups; ++group) {
    I sum[M][2] = {};
    ahead = prefetch(ahead, args.lines);
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step) {
      const B first = load_bytes(panel + step * kPanel * 4);
      const B second = load_bytes(panel + step * kPanel * 4 + kLanes * 4);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const B a = splat_quad(x + m * stride + step * 4);
        sum[m][0] = dot_bytes(sum[m][0], first, a);
        sum[m][1] = dot_bytes(sum[m][1], second, a);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const float scale = of_row<float>(scales, m, stride);
      out[m][0] += to_float(sum[m][0]) * scale;
      out[m][1] += to_float(sum[m][1]) * scale;
    }
    panel += group_bytes(Format::kI8Channel);
    x += kGroup;
    scales += 4;
  }
  const auto* channel = reinterpret_cast<const float*>(panel);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    out[m][0] *= load(channel);
    out[m][1] *= load(channel + kLanes);
  }
  store_sums<M>(out, sums);
}

// ---- float activations

template <Format format, int M>
OCTAVO_INLINE void float_tile(const PackedWeight& weight, const TileArgs& args, float* sums) {
  F out[M][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) out[m][0] = out[m][1] = F{};
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
  store_sums<M>(out, sums);
}

// ---- bfloat16 activations, where the set has products of them

template <int M>
OCTAVO_INLINE void bfloat_tile(const PackedWeight& weight, const TileArgs& args, float* sums) {
  const uint8_t* panel = args.panel;
  const uint8_t* ahead = args.ahead;
  TileRows<M> rows(args.x, args.stride);
  F sum[M][2] = {};
  for (int64_t first = 0; first < weight.inputs; first += kGroup) {
    ahead = prefetch(ahead, args.lines);
    repeat<kGroup / 2>(OCTAVO_BODY(pair) {
      const uint8_t* from = panel + pair.value * 2 * OCTAVO_BYTES;
      dot_rows<pair.value * 4>(load_pairs(from), load_pairs(from + OCTAVO_BYTES), rows, sum);
    });
    rows.advance(kGroup * 2);
    panel += kGroup * kPanel * 2;
  }
  store_sums<M>(sum, sums);
}
