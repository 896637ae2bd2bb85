// Attention to bfloat16 KV by matrix registers (ADR 9): 16 query vectors with a unit of keys, 16 tokens,
// at once, and with a unit of values, whose pairs of tokens are half of a register's. The softmax between
// them, and what is read ahead when, are those of attention.h.

constexpr int64_t kMatrixDims = 32;  // features that a product takes
constexpr int64_t kMostMatrixDims = 512;

// Only a sequence's last unit may be short of tokens.
OCTAVO_INLINE bool fits_matrices(const KVLayer& kv) {
  return kv.dim % kMatrixDims == 0 && kv.dim <= kMostMatrixDims && kv.block_size % kLanes == 0;
}

// The values of a unit, with zeros behind its last token: what lies there may be another sequence's NaN.
OCTAVO_INLINE const uint8_t* clean_values(const Unit& unit, int64_t row_bytes, uint8_t* copy) {
  if (unit.count == kLanes) return unit.values;
  __builtin_memset(copy, 0, kLanes / 2 * row_bytes);
  __builtin_memcpy(copy, unit.values, (unit.count + 1) / 2 * row_bytes);
  if (unit.count % 2 == 0) return copy;
  uint8_t* last = copy + unit.count / 2 * row_bytes;
  for (int64_t at = 0; at < row_bytes; at += OCTAVO_BYTES)
    store_bytes(last + at, reinterpret_cast<B>(load_u32(last + at) & 0xffffu));
  return copy;
}

// Some lines of what is read a phase later: in passing, for a core takes only so many at once.
OCTAVO_INLINE void ask_for(const uint8_t* lines, int64_t count, int64_t stride) {
  for (; count > 0; --count, lines += stride) ask_for(lines);
}

// Scores of query vectors, in rows of `row_bytes`, against N units, whose values are asked for.
template <int N>
OCTAVO_INLINE void score_by_matrix(const KVLayer& kv, const uint8_t* queries, int64_t row_bytes,
                                   const Unit* units, bool asks, float* scores) {
  const int64_t stride = kv.padded_slots * 4;
  repeat<N>(OCTAVO_BODY(n) { clear_matrix<n.value>(); });
  for (int64_t d = 0; d < kv.dim; d += kMatrixDims) {
    load_matrix<4>(queries + 2 * d, row_bytes);
    repeat<N>(OCTAVO_BODY(n) {
      load_matrix<6>(units[n.value].keys + d / 2 * stride, stride);
      multiply_matrices<n.value, 4, 6>();
      if (asks) ask_for(units[n.value].values + d / 2 * 64, kMatrixDims / 2, 64);
    });
  }
  repeat<N>(OCTAVO_BODY(n) { store_matrix<n.value>(scores + n.value * kLanes, kScoreTokens * 4); });
}

// sums += weights * values, of features [d, d + 16 N). The keys of `next` are asked for.
template <int N>
OCTAVO_INLINE void add_by_matrix(const KVLayer& kv, const uint8_t* const* values, int count, int64_t d,
                                 const Chunk& next, bool asks, const float* scores, float* sums,
                                 int64_t sums_bytes) {
  const int64_t stride = kv.padded_slots * 4;
  sums += d;
  repeat<N>(OCTAVO_BODY(n) { load_matrix<n.value>(sums + n.value * kLanes, sums_bytes); });
  int asked = 0;  // of the next units, which may be more than these
  for (int u = 0; u < count; ++u) {
    load_matrix<5>(reinterpret_cast<const uint8_t*>(scores) + u * 2 * kLanes, kScoreTokens * 4);
    repeat<N>(OCTAVO_BODY(n) {
      load_matrix<7>(values[u] + d * 4 + n.value * kMatrixBytes, kv.dim * 4);
      multiply_matrices<n.value, 5, 7>();
      if (!asks) return;
      for (int i = asked; i < (u + 1) * next.count / count; ++i)
        ask_for(next.units[i].keys + (d + n.value * kLanes) / 2 * stride, kLanes / 2, stride);
    });
    asked = (u + 1) * next.count / count;
  }
  repeat<N>(OCTAVO_BODY(n) { store_matrix<n.value>(sums + n.value * kLanes, sums_bytes); });
}

// Attention of up to 16 query vectors, from number `first` on, to a chunk. The first ones ask for its
// values, the last ones for the keys of `next`.
static __attribute__((noinline)) void attend_matrix_tile(const KVLayer& kv, const AttentionShape& shape,
                                                         const AttendArgs& args, const QuerySet& set,
                                                         int64_t first, const Chunk& chunk,
                                                         const Chunk& next) {
  const int64_t vectors = smaller(kMatrixRows, set.vectors - first);
  const Span* spans = set.spans + first;
  const auto [units, count] = seen_by(spans, vectors, args.last_token, chunk);
  if (count == 0) return;
  const int64_t row_bytes = set.padded_dim * 2;
  const uint8_t* queries = reinterpret_cast<const uint8_t*>(set.queries) + first * row_bytes;
  const bool is_first = first == 0, is_last = first + vectors == set.vectors;
  int u = 0;
  for (; u + 4 <= count; u += 4)
    score_by_matrix<4>(kv, queries, row_bytes, units + u, is_first, set.scores + u * kLanes);
  for (; u < count; ++u)
    score_by_matrix<1>(kv, queries, row_bytes, units + u, is_first, set.scores + u * kLanes);
  float* sums = set.sums + first * set.padded_dim;
  for (int64_t v = 0; v < vectors; ++v) {
    const float factor = soften_pairs(kv, shape, units, count, spans[v], set.scores + v * kScoreTokens,
                                      set.maxima + first + v, set.lane_weights + (first + v) * kLanes);
    float* sum = sums + v * set.padded_dim;
    if (factor != 1.0f)
      over_vectors(sum, set.padded_dim, sum, [&](int64_t, F x) { return x * factor; });
  }
  const uint8_t* values[kUnits];
  uint8_t copy[kLanes / 2 * kMostMatrixDims * 4] __attribute__((aligned(64)));
  for (int i = 0; i < count; ++i) values[i] = clean_values(units[i], kv.dim * 4, copy);
  int64_t d = 0;
  for (; d + 4 * kLanes <= kv.dim; d += 4 * kLanes)
    add_by_matrix<4>(kv, values, count, d, next, is_last, set.scores, sums, set.padded_dim * 4);
  if (d < kv.dim)
    add_by_matrix<2>(kv, values, count, d, next, is_last, set.scores, sums, set.padded_dim * 4);
}

struct MatrixTiles {
  MatrixRegisters registers;

  explicit MatrixTiles(const QuerySet& set)
      : registers({static_cast<int>(smaller(set.vectors, kMatrixRows)), kMatrixBytes / 2, kMatrixRows / 2}) {}

  OCTAVO_MEMBER void attend(const KVLayer& kv, const AttentionShape& shape, const AttendArgs& args,
                            const QuerySet& set, const Chunk& chunk, const Chunk& next) const {
    for (int64_t first = 0; first < set.vectors; first += kMatrixRows)
      attend_matrix_tile(kv, shape, args, set, first, chunk, next);
  }
};

static void attend(const KVLayer& kv, const AttentionShape& shape, const AttendArgs& args) {
  if (kv.type == KVType::kBF16 && fits_matrices(kv))
    return attend_with<KVType::kBF16, MatrixTiles>(kv, shape, args);
  attend_by_vectors(kv, shape, args);
}
