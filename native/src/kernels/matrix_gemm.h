// Products of many rows by matrix registers (ADR 9): rows of bfloat16 times weights of any format but
// float32, as bfloat16.
//
// A panel's weights lie as [inputs / 2][outputs] pairs: bfloat16 ones do, others are widened to it, a
// chunk of inputs at a time, which the first-level cache holds while all rows meet it, kPairRows at a
// time. Sums of rows stay in matrix registers if there are no more rows, else they wait in the scratch
// from chunk to chunk. A row's sum runs in the same order in any company.
//
// Products of matrices and vectors of floats share a port (on Sapphire Rapids and its successors), so
// nothing is gained by mixing them; but matrices are stored and loaded for nothing where products of
// others come between.

constexpr int64_t kMostGroups = 9;          // of a chunk
constexpr int64_t kPanelRow = kPanel * 4;   // bytes of a pair of inputs, or of sums
constexpr int64_t kWideGroup = kGroup / 2 * kPanelRow;
constexpr int64_t kMostWideRows = 256;      // whose sums a scratch holds
constexpr int64_t kRowsThatPass = 128;      // see load_rows

OCTAVO_INLINE int64_t whole(int64_t count, int64_t of) { return (count + of - 1) / of; }

constexpr int64_t kChunkBytes = kMostGroups * kWideGroup;

// A thread's scratch: a chunk, the sums of all rows, and a place for sums of nothing.
constexpr int64_t kSumsAt = kChunkBytes, kNothingAt = kSumsAt + kMostWideRows * kPanelRow;
static_assert(kNothingAt + kPairRows * kPanelRow <= kMatrixScratch);

// Groups of a chunk: all chunks of a panel are equal, but for the last one.
OCTAVO_INLINE int64_t chunk_groups(const PackedWeight& weight) {
  const int64_t groups = whole(weight.inputs, kGroup);
  return whole(groups, whole(groups, kMostGroups));
}

// ---- weights as bfloat16

OCTAVO_INLINE U splat_bits(uint32_t bits) { return bits - U{}; }

// The mantissas of floats take some bits as they are: `x` with its bits at kAt as the integer v is
// 2^(23 - kAt) + v as a float, if the exponent says so.
template <int kAt, int kBits>
OCTAVO_INLINE F as_mantissa(U x) {
  constexpr uint32_t kMask = ((1u << kBits) - 1) << kAt, kExponent = (127u + 23 - kAt) << 23;
  return reinterpret_cast<F>(bits_or(x, splat_bits(kMask), splat_bits(kExponent)));
}

// Two vectors of floats as pairs of bfloat16, cut off. To make that rounding, what is cut was made
// larger by half a step, of an average mantissa.
OCTAVO_INLINE U cut_pairs(F first, F second) {
  return bits_or(reinterpret_cast<U>(second), splat_bits(0xffff0000u), reinterpret_cast<U>(first) >> 16);
}
constexpr float kToRound = 1.0f + 0.6931472f / 256;

// Widens half a group, for 16 outputs: `values` and `scales` are the first of these, `out` gets a pair of
// inputs every kPanelRow bytes. Products are `rounded`, or the compiler joins one or another with a sum,
// not the same in every copy of this code, and a row's bits depend on how many come with it.
template <Format format>
OCTAVO_INLINE void widen_half(const uint8_t* values, const uint16_t* scales, uint8_t* out) {
  const auto turned = [](auto bits, U x) { return x << bits.value | x >> (32 - bits.value); };
  const auto put = [](uint8_t* to, F first, F second) {
    store_bytes(to, reinterpret_cast<B>(cut_pairs(first, second)));
  };
  const F scale = rounded(load_half(scales) * kToRound);
  if constexpr (format == Format::kI8Group) {
    const F offset = rounded(scale * -(256.0f + kByteOffset));
    const auto value = [&](U word) { return as_mantissa<15, 8>(word) * scale + offset; };
    for (int quad = 0; quad < 8; ++quad, values += kPanelRow, out += 2 * kPanelRow) {
      const U word = load_u32(values);
      put(out, value(turned(Index<15>(), word)), value(turned(Index<7>(), word)));
      put(out + kPanelRow, value(turned(Index<31>(), word)), value(turned(Index<23>(), word)));
    }
  } else {
    F minimum = scale * -8.0f;
    if constexpr (format == Format::kU4GroupMin) minimum = rounded(load_half(scales + kPanel) * kToRound);
    const F offset[3] = {minimum - scale * 4096.0f, minimum - scale * 256.0f, minimum - scale * 16.0f};
    const auto low = [&](U word) { return as_mantissa<11, 4>(word) * scale + offset[0]; };
    const auto middle = [&](U word) { return as_mantissa<15, 4>(word) * scale + offset[1]; };
    const auto high = [&](U word) { return as_mantissa<19, 4>(word) * scale + offset[2]; };
    for (int quad = 0; quad < 4; ++quad, values += kPanelRow, out += 2 * kPanelRow) {
      const U word = load_u32(values);
      const U first = turned(Index<11>(), word), second = turned(Index<31>(), word);
      const U third = turned(Index<23>(), word);
      put(out, low(first), high(first));
      put(out + kPanelRow, middle(second), middle(third));
      uint8_t* later = out + 8 * kPanelRow;  // the high nibbles are 16 inputs further
      put(later, middle(first), low(second));
      put(later + kPanelRow, low(third), high(third));
    }
  }
}

// Groups [first, first + count) of a panel as pairs of bfloat16.
template <Format format>
OCTAVO_INLINE const uint8_t* widened(const uint8_t* panel, int64_t first, int64_t count, uint8_t* buffer) {
  if constexpr (format == Format::kBF16) return panel + first * kWideGroup;
  for (int64_t g = 0; g < count; ++g) {
    const uint8_t* group = panel + (first + g) * group_bytes(format);
    const auto* scales = reinterpret_cast<const uint16_t*>(group + values_bytes(format));
    for (int v = 0; v < 2; ++v)
      widen_half<format>(group + v * kMatrixBytes, scales + v * kLanes,
                         buffer + g * kWideGroup + v * kMatrixBytes);
  }
  return buffer;
}

// ---- products

// Calls body(register, offset of its sums) for those of 16 or 32 rows and a panel.
template <bool pair, typename Body>
OCTAVO_INLINE void over_sums(Body body) {
  repeat<pair ? 4 : 2>(OCTAVO_BODY(c) {
    body(c, (c.value / 2 * kMatrixRows * kPanelRow) + c.value % 2 * kMatrixBytes);
  });
}

// Loads activations of 16 rows. Where there are so many rows that they pass through the first-level cache,
// they had better not stay there: they came from the second.
template <int to>
OCTAVO_INLINE void load_rows(const uint8_t* x, bool pass) {
  if (pass)
    stream_matrix<to>(x, kMatrixBytes);
  else
    load_matrix<to>(x, kMatrixBytes);
}

// Adds the products of 16 or 32 rows with the weights of a group, [16][kPanel] pairs, to the sums. Calls
// before(register, offset) before each register of sums is used.
template <bool pair, typename Before>
OCTAVO_INLINE void multiply_group(const uint8_t* x, bool pass, const uint8_t* weights, Before before) {
  load_matrix<6>(weights, kPanelRow);
  load_rows<4>(x, pass);
  over_sums<pair>([&](auto c, int64_t offset) __attribute__((always_inline)) {
    constexpr int kSum = decltype(c)::value;
    before(c, offset);
    multiply_matrices<kSum, 4 + kSum / 2, 6 + kSum % 2>();
    if constexpr (kSum == 0) load_matrix<7>(weights + kMatrixBytes, kPanelRow);
    if constexpr (kSum == 1 && pair) load_rows<5>(x + kMatrixRows * kMatrixBytes, pass);
  });
}

// Calls body(first row, Index<M>()) for M rows at once, for the last ones one by one.
template <int M, typename Body>
OCTAVO_INLINE void over_rows(int64_t rows, Body body) {
  int64_t row = 0;
  for (; row + M <= rows; row += M) body(row, Index<M>());
  for (; row < rows; ++row) body(row, Index<1>());
}

// Writes sums, gated or with a bias, as rows of the next product.
template <int M>
OCTAVO_INLINE void finish_as_rows(const PackedWeight& weight, const GemmArgs& args, int64_t panel,
                                  int64_t row, F (&sums)[M][2]) {
  const int64_t width = panel_features(weight), group = panel * width / kGroup;
  const int64_t pair_bytes = weight.features() / kGroup * kPairRows * kMatrixBytes;
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    if (weight.bias)
      for (int v = 0; v < 2; ++v) sums[m][v] += load(weight.bias + panel * kPanel + v * kLanes);
    uint8_t* out = args.out_rows + (row + m) / kPairRows * pair_bytes + group * kPairRows * kMatrixBytes +
                   (row + m) % kPairRows * kMatrixBytes + panel * width % kGroup * 2;
    if (weight.gated) {
      store_halves(out, bfloats_of(gate_of(sums[m][0], Gate::kSilu, true) * sums[m][1]));
      continue;
    }
    for (int v = 0; v < 2; ++v) store_halves(out + v * kLanes * 2, bfloats_of(sums[m][v]));
  }
}

static void finish_rows(const PackedWeight& weight, const GemmArgs& args, int64_t panel, int64_t row,
                        int64_t num_rows, const float* sums) {
  if (!args.out_rows && !finishes_in_registers(weight, args, panel))
    return finish_tile(weight, args, panel, row, static_cast<int>(num_rows), sums);
  over_rows<4>(num_rows, [&](int64_t first, auto at_once) __attribute__((always_inline)) {
    constexpr int M = decltype(at_once)::value;
    F taken[M][2];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < 2; ++v) taken[m][v] = load(sums + (first + m) * kPanel + v * kLanes);
    if (args.out_rows)
      finish_as_rows<M>(weight, args, panel, row + first, taken);
    else
      finish_in_registers<M>(weight, args, panel, row + first, taken);
  });
}

// Rows [row, row + num_rows), no more than kMostWideRows, times all panels; `pair` if more than 16. `row`
// is a multiple of kPairRows.
template <Format format, bool pair>
static void multiply_rows(const PackedWeight& weight, const GemmArgs& args, int64_t row, int64_t num_rows) {
  const int64_t groups = whole(weight.inputs, kGroup), chunk = chunk_groups(weight);
  const int64_t pairs = whole(num_rows, kPairRows);
  const int64_t pair_bytes = groups * kPairRows * kMatrixBytes;
  const bool pass = num_rows >= kRowsThatPass;
  const int64_t lines = whole(weight.panel_bytes / 64, pairs * groups);
  const uint8_t* x = args.x + row / kPairRows * pair_bytes;
  uint8_t* sums = args.scratch + kSumsAt;
  for (int64_t panel = args.first_panel; panel < args.last_panel; ++panel) {
    const uint8_t* data = weight.data + panel * weight.panel_bytes;
    const uint8_t* ahead = data + weight.panel_bytes;
    uint8_t* to_store = args.scratch + kNothingAt;  // where the sums go that the registers hold
    const auto put_away = [&](auto c, int64_t offset) __attribute__((always_inline)) {
      store_matrix<decltype(c)::value>(to_store + offset, kPanelRow);
    };
    for (int64_t first = 0; first < groups; first += chunk) {
      const int64_t count = smaller(chunk, groups - first);
      const uint8_t* weights = widened<format>(data, first, count, args.scratch);
      for (int64_t p = 0; p < pairs; ++p) {
        const uint8_t* left = x + p * pair_bytes + first * kPairRows * kMatrixBytes;
        uint8_t* at = sums + p * kPairRows * kPanelRow;
        for (int64_t g = 0; g < count; ++g, left += kPairRows * kMatrixBytes) {
          ahead = prefetch(ahead, lines);
          const uint8_t* right = weights + g * kWideGroup;
          if (g > 0 || (pairs == 1 && first > 0)) {
            multiply_group<pair>(left, pass, right, [](auto, int64_t) {});
            continue;
          }
          multiply_group<pair>(left, pass, right, [&](auto c, int64_t offset) __attribute__((always_inline)) {
            put_away(c, offset);
            if (first == 0)
              clear_matrix<decltype(c)::value>();
            else
              load_matrix<decltype(c)::value>(at + offset, kPanelRow);
          });
          to_store = at;
        }
      }
    }
    over_sums<pair>(put_away);
    finish_rows(weight, args, panel, row, num_rows, reinterpret_cast<const float*>(sums));
  }
}

template <Format format>
static void multiply_matrix(const PackedWeight& weight, const GemmArgs& args) {
  if (args.rows == 0) return;
  const MatrixRegisters registers({});
  if (args.rows <= kMatrixRows) return multiply_rows<format, false>(weight, args, 0, args.rows);
  const int64_t block = whole(whole(args.rows, whole(args.rows, kMostWideRows)), kPairRows) * kPairRows;
  for (int64_t row = 0; row < args.rows; row += block)
    multiply_rows<format, true>(weight, args, row, smaller(block, args.rows - row));
}

static void gemm(const PackedWeight& weight, const GemmArgs& args) {
  if (weight.format == Format::kF32 || !args.is_bfloat) return gemm_by_vectors(weight, args);
  switch (weight.format) {
    case Format::kF32: return;
    case Format::kBF16: return multiply_matrix<Format::kBF16>(weight, args);
    case Format::kI8Group: return multiply_matrix<Format::kI8Group>(weight, args);
    case Format::kU4Group: return multiply_matrix<Format::kU4Group>(weight, args);
    case Format::kU4GroupMin: return multiply_matrix<Format::kU4GroupMin>(weight, args);
  }
}
