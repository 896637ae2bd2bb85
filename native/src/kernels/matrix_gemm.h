// Products of many rows by matrix registers (ADR 9): rows of bfloat16 times weights of any format but
// float32, as bfloat16.
//
// A panel's weights lie as [inputs / 2][outputs] pairs: bfloat16 ones do, others are widened to it, a
// chunk of inputs at a time, which the first-level cache holds while all rows meet it. Meanwhile the
// next chunk is widened: registers of matrices and of vectors work side by side if their instructions
// alternate. Sums of rows stay in matrix registers where there are no more than kPairRows rows, else
// they wait in the scratch from chunk to chunk. A row's sum runs in the same order in any company.

constexpr int64_t kPairRows = 2 * kMatrixRows;
constexpr int64_t kMostGroups = 8;          // of a chunk
constexpr int64_t kPanelRow = kPanel * 4;   // bytes of a pair of inputs, or of sums
constexpr int64_t kWideGroup = kGroup / 2 * kPanelRow;
constexpr int64_t kMostWideRows = 256;      // whose sums a scratch holds

OCTAVO_INLINE int64_t whole(int64_t count, int64_t of) { return (count + of - 1) / of; }

constexpr int64_t kChunkBytes = kMostGroups * kWideGroup;
static_assert(2 * kChunkBytes + kMostWideRows * kPanelRow <= kMatrixScratch);

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

// Widens panels chunk by chunk, half a group (16 outputs) at a time, so that it can be done in passing.
template <Format format>
class Widener {
 public:
  OCTAVO_MEMBER Widener(const PackedWeight& weight, int64_t panel, int64_t last_panel, uint8_t* buffers)
      : weight_(weight), chunk_(chunk_groups(weight)), panel_(panel), last_panel_(last_panel),
        buffers_(buffers) {}

  // Some halves of the next chunk, if that many are left.
  OCTAVO_MEMBER void advance(int64_t halves) {
    const int64_t count = panel_ < last_panel_ ? smaller(chunk_, weight_.groups - first_) : 0;
    for (; halves > 0 && half_ < 2 * count; --halves, ++half_) widen_half();
  }
  // All that is left of it; returns where it lies, until the chunk after the next is begun.
  OCTAVO_MEMBER const uint8_t* finish() {
    advance(2 * kMostGroups);
    half_ = 0;
    if ((first_ += chunk_) >= weight_.groups) first_ = 0, ++panel_;
    const uint8_t* finished = buffers_ + is_odd_ * kChunkBytes;
    is_odd_ ^= 1;
    return finished;
  }

 private:
  OCTAVO_MEMBER void widen_half() {
    const int64_t group = half_ / 2, v = half_ % 2;
    const uint8_t* values = weight_.data + panel_ * weight_.panel_bytes +
                            (first_ + group) * group_bytes(format);
    const auto* scales = reinterpret_cast<const uint16_t*>(values + values_bytes(format)) + v * kLanes;
    const F scale = load_half(scales) * kToRound;
    uint8_t* out = buffers_ + is_odd_ * kChunkBytes + group * kWideGroup + v * kMatrixBytes;
    values += v * kMatrixBytes;
    if constexpr (format == Format::kI8Group) {
      const F offset = scale * -(256.0f + kByteOffset);
      for (int quad = 0; quad < 8; ++quad, values += kPanelRow, out += 2 * kPanelRow) {
        const U word = load_u32(values);
        const auto value = [&](U turned) { return as_mantissa<15, 8>(turned) * scale + offset; };
        put(out, value(turned<15>(word)), value(turned<7>(word)));
        put(out + kPanelRow, value(turned<31>(word)), value(turned<23>(word)));
      }
    } else {
      F minimum = scale * -8.0f;
      if constexpr (format == Format::kU4GroupMin) minimum = load_half(scales + kPanel) * kToRound;
      const F offset[3] = {minimum - scale * 4096.0f, minimum - scale * 256.0f, minimum - scale * 16.0f};
      const auto low = [&](U x) { return as_mantissa<11, 4>(x) * scale + offset[0]; };
      const auto middle = [&](U x) { return as_mantissa<15, 4>(x) * scale + offset[1]; };
      const auto high = [&](U x) { return as_mantissa<19, 4>(x) * scale + offset[2]; };
      for (int quad = 0; quad < 4; ++quad, values += kPanelRow, out += 2 * kPanelRow) {
        const U word = load_u32(values);
        const U first = turned<11>(word), second = turned<31>(word), third = turned<23>(word);
        put(out, low(first), high(first));
        put(out + kPanelRow, middle(second), middle(third));
        uint8_t* later = out + 8 * kPanelRow;
        put(later, middle(first), low(second));
        put(later + kPanelRow, low(third), high(third));
      }
    }
  }

  template <int bits>
  OCTAVO_MEMBER static U turned(U x) { return x << bits | x >> (32 - bits); }
  OCTAVO_MEMBER static void put(uint8_t* to, F first, F second) {
    store_bytes(to, reinterpret_cast<B>(cut_pairs(first, second)));
  }

  const PackedWeight& weight_;
  int64_t chunk_;        // groups
  int64_t panel_, last_panel_;
  uint8_t* buffers_;     // for the chunk that is read and the one that is made
  int64_t first_ = 0;    // group that the chunk in the making starts with
  int64_t half_ = 0;     // of it, the next to widen
  int64_t is_odd_ = 0;   // the buffer that it is made in
};

// What is packed as bfloat16 needs no widening.
template <>
class Widener<Format::kBF16> {
 public:
  OCTAVO_MEMBER Widener(const PackedWeight& weight, int64_t panel, int64_t, uint8_t*)
      : weight_(weight), chunk_(chunk_groups(weight)), panel_(panel) {}
  OCTAVO_MEMBER void advance(int64_t) {}
  OCTAVO_MEMBER const uint8_t* finish() {
    const uint8_t* finished = weight_.data + panel_ * weight_.panel_bytes + first_ * kWideGroup;
    if ((first_ += chunk_) * kGroup >= weight_.inputs) first_ = 0, ++panel_;
    return finished;
  }

 private:
  const PackedWeight& weight_;
  int64_t chunk_, panel_;
  int64_t first_ = 0;
};

// ---- products

template <bool pair>
OCTAVO_INLINE void clear_sums() {
  clear_matrix<0>();
  clear_matrix<1>();
  if constexpr (pair) clear_matrix<2>(), clear_matrix<3>();
}
template <bool pair>
OCTAVO_INLINE void load_sums(const uint8_t* from) {
  load_matrix<0>(from, kPanelRow);
  load_matrix<1>(from + kMatrixBytes, kPanelRow);
  if constexpr (!pair) return;
  load_matrix<2>(from + kMatrixRows * kPanelRow, kPanelRow);
  load_matrix<3>(from + kMatrixRows * kPanelRow + kMatrixBytes, kPanelRow);
}
template <bool pair>
OCTAVO_INLINE void store_sums(uint8_t* to) {
  store_matrix<0>(to, kPanelRow);
  store_matrix<1>(to + kMatrixBytes, kPanelRow);
  if constexpr (!pair) return;
  store_matrix<2>(to + kMatrixRows * kPanelRow, kPanelRow);
  store_matrix<3>(to + kMatrixRows * kPanelRow + kMatrixBytes, kPanelRow);
}

// Adds the products of 16 or 32 rows with the weights of a group, [16][kPanel] pairs, to the sums.
template <bool pair>
OCTAVO_INLINE void multiply_group(const uint8_t* x, int64_t stride, const uint8_t* weights) {
  load_matrix<6>(weights, kPanelRow);
  load_matrix<4>(x, stride);
  multiply_matrices<0, 4, 6>();
  load_matrix<7>(weights + kMatrixBytes, kPanelRow);
  multiply_matrices<1, 4, 7>();
  if constexpr (!pair) return;
  load_matrix<5>(x + kMatrixRows * stride, stride);
  multiply_matrices<2, 5, 6>();
  multiply_matrices<3, 5, 7>();
}

// Calls body(first row, Index<M>()) for M rows at once, for the last ones one by one.
template <int M, typename Body>
OCTAVO_INLINE void over_rows(int64_t rows, Body body) {
  int64_t row = 0;
  for (; row + M <= rows; row += M) body(row, Index<M>());
  for (; row < rows; ++row) body(row, Index<1>());
}

static void finish_rows(const PackedWeight& weight, const GemmArgs& args, int64_t panel, int64_t row,
                        int64_t num_rows, const float* sums) {
  if (!finishes_in_registers(weight, args, panel))
    return finish_tile(weight, args, panel, row, static_cast<int>(num_rows), sums);
  over_rows<4>(num_rows, [&](int64_t first, auto at_once) __attribute__((always_inline)) {
    constexpr int M = decltype(at_once)::value;
    F taken[M][2];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < 2; ++v) taken[m][v] = load(sums + (first + m) * kPanel + v * kLanes);
    finish_in_registers<M>(weight, args, panel, row + first, taken);
  });
}

// Rows [row, row + num_rows), no more than kMostWideRows, times all panels.
template <Format format>
static void multiply_rows(const PackedWeight& weight, const GemmArgs& args, int64_t row, int64_t num_rows) {
  uint8_t* sums = args.scratch + 2 * kChunkBytes;
  const int64_t groups = whole(weight.inputs, kGroup), chunk = chunk_groups(weight);
  const int64_t pairs = whole(num_rows, kPairRows);
  const int64_t lines = whole(weight.panel_bytes / 64, pairs * groups);
  const int64_t halves = whole(2, pairs);  // to widen with each group that a pair of registers meets
  const uint8_t* x = args.x + row * args.x_stride;
  Widener<format> widener(weight, args.first_panel, args.last_panel, args.scratch);
  const uint8_t* weights = widener.finish();
  for (int64_t panel = args.first_panel; panel < args.last_panel; ++panel) {
    const uint8_t* ahead = weight.data + (panel + 1) * weight.panel_bytes;
    for (int64_t first = 0; first < groups; first += chunk) {
      const int64_t count = smaller(chunk, groups - first);
      const bool is_last = first + chunk >= groups;
      for (int64_t p = 0; p < pairs; ++p) {
        const uint8_t* left = x + p * kPairRows * args.x_stride + first * kGroup * 2;
        uint8_t* at = sums + p * kPairRows * kPanelRow;
        const auto add = [&](auto pair) __attribute__((always_inline)) {
          constexpr bool kPair = decltype(pair)::value;
          if (first == 0)
            clear_sums<kPair>();
          else if (pairs > 1)
            load_sums<kPair>(at);
          for (int64_t g = 0; g < count; ++g) {
            ahead = prefetch(ahead, lines);
            multiply_group<kPair>(left + g * kGroup * 2, args.x_stride, weights + g * kWideGroup);
            widener.advance(halves);
          }
          if (pairs > 1 || is_last) store_sums<kPair>(at);
        };
        if (num_rows - p * kPairRows > kMatrixRows)
          add(Index<1>());
        else
          add(Index<0>());
      }
      weights = widener.finish();
    }
    finish_rows(weight, args, panel, row, num_rows, reinterpret_cast<const float*>(sums));
  }
}

template <Format format>
static void multiply_matrix(const PackedWeight& weight, const GemmArgs& args) {
  if (args.rows == 0) return;
  const MatrixRegisters registers({});
  const int64_t blocks = whole(args.rows, kMostWideRows);
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t begin = args.rows * i / blocks, end = args.rows * (i + 1) / blocks;
    multiply_rows<format>(weight, args, begin, end - begin);
  }
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
