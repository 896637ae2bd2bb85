// Tiles of a matrix product: a few rows of activations times one panel of packed weights, summed
// over all inputs. `finish` takes the sums, [rows][2] vectors, in registers where they fit.

constexpr int kPanel = 2 * kLanes;

// Bytes of one group of a panel: 32 inputs times all outputs, with the scales behind them.
constexpr int64_t values_bytes(Format format) {
  return has_nibbles(format) ? kGroup / 2 * kPanel : kGroup * kPanel;
}
constexpr int64_t group_bytes(Format format) {
  return values_bytes(format) + (format == Format::kU4GroupMin ? 4 : 2) * kPanel;
}

static int64_t panel_bytes(Format format, int64_t inputs) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  if (format == Format::kF32) return inputs * kPanel * 4;
  if (format == Format::kBF16) return (kBfloatProducts ? groups * kGroup : inputs) * kPanel * 2;
  return groups * group_bytes(format);
}

// Where a tile works, and its share of the next panel, which it asks for while it computes: so
// memory and arithmetic overlap whatever the number of rows.
struct TileArgs {
  const uint8_t* panel;
  const uint8_t* wide;  // the panel's nibbles, a byte each; null: they are split as they are read
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

// ---- quantised weights and activations

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

// Calls add(m, x) with the `i`-th four bytes of each row, repeated over a vector.
template <int i, int M, typename Add>
OCTAVO_INLINE void for_rows(const TileRows<M>& rows, Add add) {
  repeat<M>(OCTAVO_BODY(m) {
    add(m.value, splat_at<m.value % 3, i * 4>(rows.base[m.value / 3], rows.stride));
  });
}

template <Format format>
OCTAVO_INLINE I dot(I sum, B weights, B x) {
  return has_nibbles(format) ? dot_nibbles(sum, weights, x) : dot_bytes(sum, weights, x);
}

// Splits the nibbles of a panel into bytes, [groups][inputs / 4][output][4].
template <Format format>
static void widen(const uint8_t* panel, int64_t groups, uint8_t* out) {
  constexpr int64_t kHalf = kGroup / 2 * kPanel;
  for (; groups > 0; --groups, panel += group_bytes(format), out += 2 * kHalf)
    for (int64_t at = 0; at < kHalf; at += OCTAVO_BYTES) {
      const U both = load_u32(panel + at);
      store_bytes(out + at, reinterpret_cast<B>(both & 0x0f0f0f0fu));
      store_bytes(out + kHalf + at, reinterpret_cast<B>(both >> 4 & 0x0f0f0f0fu));
    }
}

// Quad `i` of a group's values, of both vectors of outputs.
template <bool packed>
OCTAVO_INLINE void load_quad(const uint8_t* values, uint32_t i, B (&quad)[2]) {
#pragma GCC unroll 2
  for (uint32_t v = 0; v < 2; ++v) {
    if constexpr (packed) {
      const U both = load_u32(values + (i % 4 * 2 + v) * OCTAVO_BYTES);
      quad[v] = reinterpret_cast<B>(both >> i / 4 * 4 & 0x0f0f0f0fu);
    } else {
      quad[v] = load_bytes(values + (i * 2 + v) * OCTAVO_BYTES);
    }
  }
}

// A step of high parts is so many of the others.
constexpr int kHighBits = 7, kHighStep = 1 << kHighBits;

// What the high parts of a row's widest quad add to its integer sums, and what takes the offset of
// the weights away again.
template <Format format, bool packed>
OCTAVO_INLINE void high_sums(const uint8_t* values, const uint8_t* group_at, I (&sum)[2]) {
  const auto* group = reinterpret_cast<const ActivationGroup*>(group_at);
  const B high = splat_quad(group->high);
  B quad[2];
  load_quad<packed>(values, group->widest, quad);
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const I start = format == Format::kI8Group && kByteOffset != 0 ? splat_int(group->start) : I{};
    sum[v] = dot<format>(start, quad[v], high) << kHighBits;
    if constexpr (format == Format::kU4Group) sum[v] += splat_int(group->start);
  }
}

// The integer sums of a group.
template <Format format, bool packed, int M>
OCTAVO_INLINE void dot_group(const uint8_t* values, const uint8_t* groups, const TileRows<M>& rows,
                             I (&sum)[M][2]) {
  if constexpr (kHalfSums && has_nibbles(format)) {
    P half[M][2] = {};
    repeat<8>(OCTAVO_BODY(i) {
      B quad[2];
      load_quad<packed>(values, i.value, quad);
      for_rows<i.value>(rows, [&](int m, B x) __attribute__((always_inline)) {
        add_nibbles(half[m], quad, x);
      });
    });
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      high_sums<format, packed>(values, groups + m * rows.stride, sum[m]);
      sum[m][0] += joined_halves(half[m][0]);
      sum[m][1] += joined_halves(half[m][1]);
    }
    return;
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) high_sums<format, packed>(values, groups + m * rows.stride, sum[m]);
  repeat<8>(OCTAVO_BODY(i) {
    B quad[2];
    load_quad<packed>(values, i.value, quad);
    if constexpr (kHalfSums) {  // a vector after the other: 16 registers are not enough for both
      repeat<2>(OCTAVO_BODY(v) {
        for_rows<decltype(i)::value>(rows, [&](int m, B x) __attribute__((always_inline)) {
          sum[m][v.value] = dot<format>(sum[m][v.value], quad[v.value], x);
        });
      });
    } else {
      for_rows<i.value>(rows, [&](int m, B x) __attribute__((always_inline)) {
        sum[m][0] = dot<format>(sum[m][0], quad[0], x);
        sum[m][1] = dot<format>(sum[m][1], quad[1], x);
      });
    }
  });
}

constexpr float kRootOf2 = 1.41421356f;

// Adds the integers of a group, times the scales of weights and the steps of activations, to the tile.
template <Format format, int M>
OCTAVO_INLINE void add_group(const uint8_t* scales, const uint8_t* groups, int64_t stride,
                             const I (&sum)[M][2], F (&out)[M][2]) {
  const auto* halves = reinterpret_cast<const uint16_t*>(scales);
  F scale[2];
  // A scale times 2^e is a sum of integers, which takes none of the multipliers that tiles wait for.
  float by_root[2][kPanel] __attribute__((aligned(64)));
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    scale[v] = load_half(halves + v * kLanes);
    if constexpr (!kAddsExponents) continue;
    store(by_root[0] + v * kLanes, scale[v]);
    store(by_root[1] + v * kLanes, scale[v] * kRootOf2);
  }
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    F minimum{};
    if constexpr (format == Format::kU4GroupMin) minimum = load_half(halves + kPanel + v * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const auto* group = reinterpret_cast<const ActivationGroup*>(groups + m * stride);
      if constexpr (kAddsExponents) {
        const I product = as_int(load(by_root[group->has_root] + v * kLanes)) + splat_int(group->exponent);
        if constexpr (format == Format::kU4GroupMin) out[m][v] += minimum * group->total;
        out[m][v] += to_float(sum[m][v]) * as_float(product);
      } else {
        F products = to_float(sum[m][v]) * scale[v];
        if constexpr (format == Format::kU4GroupMin) products += minimum * group->total;
        out[m][v] += products * group->step;
      }
    }
  }
}

template <Format format, bool wide, int M, typename Finish>
OCTAVO_INLINE void quantised_tile(const PackedWeight& weight, const TileArgs& args, Finish finish) {
  constexpr bool packed = has_nibbles(format) && !wide;
  const uint8_t* values = wide ? args.wide : args.panel;
  const uint8_t* scales = args.panel + values_bytes(format);
  const uint8_t* ahead = args.ahead;
  const int64_t stride = args.stride;
  const uint8_t* groups = args.x + weight.groups * kGroup;
  const auto* starts = reinterpret_cast<const float*>(groups + weight.groups * sizeof(ActivationGroup));
  TileRows<M> rows(args.x, stride);
  F out[M][2];
  // The sums in float stay in memory where integers take all registers.
  if constexpr (kLanes != 16) __asm__("" : "+m"(out));
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) out[m][0] = out[m][1] = splat(starts[m * stride / 4]);
  for (int64_t group = 0; group < weight.groups; ++group) {
    I sum[M][2];
    ahead = prefetch(ahead, args.lines);
    dot_group<format, packed, M>(values, groups, rows, sum);
    add_group<format, M>(scales, groups, stride, sum, out);
    rows.advance(kGroup);
    values += wide ? kGroup * kPanel : group_bytes(format);
    scales += group_bytes(format);
    groups += sizeof(ActivationGroup);
  }
  finish(out);
}

// ---- float activations

template <Format format, int M, typename Finish>
OCTAVO_INLINE void float_tile(const PackedWeight& weight, const TileArgs& args, Finish finish) {
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
  finish(out);
}

// ---- bfloat16 activations, where the set has products of them

template <int M, typename Finish>
OCTAVO_INLINE void bfloat_tile(const PackedWeight& weight, const TileArgs& args, Finish finish) {
  const uint8_t* panel = args.panel;
  const uint8_t* ahead = args.ahead;
  TileRows<M> rows(args.x, args.stride);
  F sum[M][2] = {};
  for (int64_t first = 0; first < weight.inputs; first += kGroup) {
    ahead = prefetch(ahead, args.lines);
    repeat<kGroup / 2>(OCTAVO_BODY(pair) {
      const uint8_t* from = panel + pair.value * 2 * OCTAVO_BYTES;
      const P first_word = load_pairs(from), second_word = load_pairs(from + OCTAVO_BYTES);
      for_rows<pair.value>(rows, [&](int m, B x) __attribute__((always_inline)) {
        dot_pairs(sum[m], first_word, second_word, reinterpret_cast<P>(x));
      });
    });
    rows.advance(kGroup * 2);
    panel += kGroup * kPanel * 2;
  }
  finish(sum);
}
