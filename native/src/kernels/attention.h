// Attention of a set of query vectors (rows times query heads of one KV head) over a range of
// tokens of their sequence, block by block through the block table, with an online softmax
// (Milakov and Gimelshein 2018). The same code serves decodes, whose set is one row's heads, and
// prefill chunks, whose set is many rows': keys and values are read once for the whole set.
//
// A query vector's result does not depend on the set it is in. Steps of the online softmax start at
// fixed tokens, counted from the sequence's first; every sum runs in the order of the tokens; and
// what a vector does not see adds a zero. Where the states of parts are joined, the place of the
// cut shows in last bits, so whoever wants equal bits cuts at fixed tokens too (`segment`).

constexpr int kUnits = kScoreTokens / kLanes;  // of a chunk, which is a step of the softmax

// One vector of tokens: `count` consecutive slots of a block.
struct Unit {
  const uint8_t* keys;    // first feature of these tokens
  const uint8_t* values;  // first feature of token 0 of these (bfloat16: of its pair)
  const float* key_scales;    // int8 only
  const float* value_scales;
  int64_t token;
  int64_t count;
};

// A step's units: those up to the end of a chunk.
struct Chunk {
  Unit units[kUnits];
  int count;
};

// Tokens [first, last) that a query vector sees within the call's range.
struct Span { int64_t first, last; };

// State of a call, cut from the caller's scratch.
struct QuerySet {
  int64_t vectors;
  int64_t room;           // vectors that arrays of rows have room for: matrix registers take 16 at once
  int64_t heads;          // query heads per KV head
  int64_t dim;
  int64_t even_dim;       // rows of a transposed query tile
  int64_t padded_dim;     // floats of a sum
  float* queries;         // tiles of up to kQueryTile vectors, [even_dim][vectors of the tile];
                          // where products of bfloat16 are, bfloat16 in [vectors][padded_dim]
  float* sums;            // [vectors][padded_dim]
  float* maxima;          // [vectors]
  float* weights;         // [vectors]: sum of exponentials
  float* lane_weights;    // products of bfloat16 only: the same before lanes are added, [vectors][kLanes]
  float* joined_sums;     // the same of all segments before this one
  float* joined_maxima;
  float* joined_weights;
  float* scores;          // [kMaxQueryTile][kScoreTokens]
  Span* spans;            // [vectors]
};

OCTAVO_INLINE int64_t batch_row(const AttendArgs& args, int64_t row) {
  return args.row_ids ? args.row_ids[row] : row;
}

OCTAVO_INLINE Span visible(const AttendArgs& args, const AttentionShape& shape, int64_t row) {
  const int64_t position = args.positions[batch_row(args, row)];
  const int64_t oldest = shape.window ? position - shape.window + 1 : 0;
  return {larger(args.first_token, oldest), smaller(args.last_token, position + 1)};
}

// Whether this set multiplies keys and values of a type as they are, in pairs of bfloat16.
template <KVType type>
constexpr bool kPaired = kBfloatProducts && type == KVType::kBF16;

template <KVType type>
static QuerySet make_query_set(const AttentionShape& shape, const AttendArgs& args) {
  QuerySet set;
  set.heads = shape.heads / shape.kv_heads;
  set.vectors = args.rows * set.heads;
  set.room = set.vectors <= kMatrixRows ? set.vectors : (set.vectors + kMatrixRows - 1) / kMatrixRows * kMatrixRows;
  set.dim = shape.dim;
  set.even_dim = (shape.dim + 1) / 2 * 2;
  set.padded_dim = (shape.dim + kLanes - 1) / kLanes * kLanes;
  set.spans = reinterpret_cast<Span*>(args.scratch);
  for (int64_t row = 0, v = 0; row < args.rows; ++row)
    for (int64_t head = 0; head < set.heads; ++head) set.spans[v++] = visible(args, shape, row);
  float* next = args.scratch + set.vectors * 4;
  const auto take = [&](int64_t floats) { float* p = next; next += floats; return p; };
  set.scores = take(kMaxQueryTile * kScoreTokens);
  set.sums = take(set.room * set.padded_dim);
  set.joined_sums = take(set.room * set.padded_dim);
  set.queries = take(set.room * larger(set.even_dim, set.padded_dim / 2));
  set.maxima = take(set.vectors);
  set.weights = take(set.vectors);
  set.joined_maxima = take(set.vectors);
  set.joined_weights = take(set.vectors);
  if constexpr (kPaired<type>) {
    set.lane_weights = take(set.vectors * kLanes);
    for (int64_t v = 0; v < set.vectors; ++v) {
      const int64_t row = v / set.heads, head = v % set.heads;
      const float* q = args.q + batch_row(args, row) * args.q_stride + head * shape.dim;
      uint8_t* to = reinterpret_cast<uint8_t*>(set.queries) + v * set.padded_dim * 2;
      for (int64_t d = 0; d < set.dim; d += kLanes)
        store_halves(to + 2 * d, bfloats_of(load_upto(q, d, set.dim) * shape.scale));
    }
    return set;
  }
  for (int64_t first = 0; first < set.vectors; first += kQueryTile) {
    const int64_t size = smaller(kQueryTile, set.vectors - first);
    float* tile = set.queries + first * set.even_dim;
    for (int64_t v = 0; v < size; ++v) {
      const int64_t row = (first + v) / set.heads, head = (first + v) % set.heads;
      const float* q = args.q + batch_row(args, row) * args.q_stride + head * shape.dim;
      for (int64_t d = 0; d < set.even_dim; ++d)
        tile[d * size + v] = d < shape.dim ? q[d] * shape.scale : 0.0f;
    }
  }
  return set;
}

template <KVType type>
static void start_segment(const QuerySet& set) {
  if constexpr (kPaired<type>)
    __builtin_memset(set.lane_weights, 0, set.vectors * kLanes * sizeof(float));
  for (int64_t i = 0; i < set.vectors * set.padded_dim; ++i) set.sums[i] = 0.0f;
  for (int64_t v = 0; v < set.vectors; ++v) {
    set.maxima[v] = -__builtin_inff();
    set.weights[v] = 0.0f;
  }
}

// Bytes that a lane loads at once, and how many features (keys) or tokens (values) these are.
constexpr int64_t word_bytes(KVType type) { return type == KVType::kI8 ? 1 : 4; }
constexpr int64_t word_parts(KVType type) { return type == KVType::kBF16 ? 2 : 1; }

OCTAVO_INLINE F load_i8(const uint8_t* from) {
#if defined(__AVX512F__) && OCTAVO_BYTES == 64
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return to_float(reinterpret_cast<I>(_mm512_cvtepi8_epi32(bytes)));
#elif defined(__AVX2__) && OCTAVO_BYTES == 32
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return to_float(reinterpret_cast<I>(_mm256_cvtepi8_epi32(bytes)));
#else
  typedef int8_t S __attribute__((vector_size(kLanes)));
  typedef S SUnaligned __attribute__((aligned(1), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const SUnaligned*>(from), F);
#endif
}

// The one or two parts of each lane's word as floats.
template <KVType type>
OCTAVO_INLINE void load_words(const uint8_t* from, F& first, F& second) {
  if constexpr (type == KVType::kI8) {
    first = load_i8(from);
  } else {
    const U word = load_u32(from);
    first = type == KVType::kF32 ? reinterpret_cast<F>(word) : lower_half(word);
    if constexpr (type == KVType::kBF16) second = upper_half(word);
  }
}

// The token that unit number `unit` of a sequence starts with, and the unit that a token is in.
OCTAVO_INLINE int64_t token_of(const KVLayer& kv, int64_t unit) {
  const int64_t per_block = kv.padded_slots / kLanes;
  return unit / per_block * kv.block_size + unit % per_block * kLanes;
}
OCTAVO_INLINE int64_t unit_of(const KVLayer& kv, int64_t token) {
  const int64_t per_block = kv.padded_slots / kLanes;
  return token / kv.block_size * per_block + token % kv.block_size / kLanes;
}

// Lists the units from `token` to the end of its chunk or to `end`; returns the token behind them.
template <KVType type>
OCTAVO_INLINE int64_t list_units(const KVLayer& kv, const int32_t* block_table, int64_t kv_head,
                                 int64_t token, int64_t end, Chunk& chunk) {
  chunk.count = 0;
  int64_t index = token / kv.block_size, slot = token % kv.block_size / kLanes * kLanes;
  for (int64_t left = kUnits - unit_of(kv, token) % kUnits; left > 0 && token < end; --left) {
    const int64_t block = block_table[index];
    Unit& unit = chunk.units[chunk.count++];
    unit.token = index * kv.block_size + slot;
    unit.count = smaller(smaller(kLanes, kv.block_size - slot), end - unit.token);
    const uint8_t* keys = kv.key(block, kv_head);
    const uint8_t* values = kv.value(block, kv_head);
    unit.keys = keys + slot * word_bytes(type);
    unit.values = values + slot / word_parts(type) * kv.dim * word_bytes(type);
    unit.key_scales = reinterpret_cast<const float*>(keys + kv.key_scales) + slot;
    unit.value_scales = reinterpret_cast<const float*>(values + kv.value_scales) + slot;
    token = unit.token + unit.count;
    slot += kLanes;
    if (slot < kv.block_size) continue;
    slot = 0;
    ++index;
  }
  return token;
}

// Vectors that M rows may hold each, so that all sums stay in registers.
constexpr int vectors_for(int rows) {
  return rows * 4 <= 2 * kQueryTile ? 4 : rows * 2 <= 2 * kQueryTile ? 2 : 1;
}

// Adds to M * N sums the products of N vectors' words with M weights for each part of a word.
// `ahead` is prefetched in passing, if `wanted`.
template <KVType type, int M, int N>
OCTAVO_INLINE void add_products(const uint8_t* const (&words)[N], const uint8_t* const (&ahead)[N],
                                bool wanted, bool both, const float* weights, int64_t stride,
                                int64_t part_stride, F (&sum)[M][N]) {
  F first[N], second[N];
  // AVX2 has 16 registers for 12 sums and the rest: where that is too much, take one vector after
  // the other and load the weights again for each, or else the compiler spills sums. bfloat16 takes
  // 0.7 of the time so; what fits anyway, and float32, would take more.
  constexpr bool kOneByOne =
      OCTAVO_BYTES == 32 && (type == KVType::kBF16 || (type == KVType::kI8 && N == 4));
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    load_words<type>(words[n], first[n], second[n]);
    if (wanted) __builtin_prefetch(ahead[n]);
    if constexpr (!kOneByOne) continue;
    __asm__ volatile("" : : : "memory");
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) sum[m][n] += splat(weights[m * stride]) * first[n];
    if (word_parts(type) == 1 || !both) continue;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) sum[m][n] += splat(weights[m * stride + part_stride]) * second[n];
  }
  if constexpr (kOneByOne) return;
#pragma GCC unroll 2
  for (int part = 0; part < word_parts(type); ++part) {
    if (part == 1 && !both) return;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const F weight = splat(weights[m * stride + part * part_stride]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[m][n] += weight * (part == 0 ? first[n] : second[n]);
    }
  }
}

// Scores of M query vectors against `count` units; int8 keys are yet to be scaled.
template <KVType type, int M>
OCTAVO_INLINE void score_tile(const KVLayer& kv, const float* tile, const Unit* units, int count,
                              float* scores) {
  constexpr int N = vectors_for(M);
  constexpr int step = word_parts(type);
  const int64_t stride = kv.padded_slots * word_bytes(type);
  for (int u = 0; u < count; u += N) {
    const uint8_t* keys[N];
    const uint8_t* next[N];  // blocks lie anywhere: only the block table knows what comes next
    for (int n = 0; n < N; ++n) {
      keys[n] = units[u + n < count ? u + n : count - 1].keys;
      next[n] = units[u + n + N < count ? u + n + N : count - 1].keys;
    }
    F sum[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[m][n] = F{};
    int64_t at = 0;
    for (int64_t d = 0; d < kv.dim; d += step, at += stride) {
      const uint8_t *words[N], *ahead[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        words[n] = keys[n] + at;
        ahead[n] = next[n] + at;
      }
      add_products<type, M, N>(words, ahead, type != KVType::kI8 || d % 4 == 0, true,
                               tile + d * M, 1, M, sum);
    }
    // A rest of less than N units repeats the last one, whose place takes the same scores again.
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        store(scores + m * kScoreTokens + (u + n < count ? u + n : count - 1) * kLanes, sum[m][n]);
  }
}

// exp(x), and exactly 0 for what is out of its range below.
OCTAVO_INLINE F weight_of(F x) {
  const F p = exp_of(x);
  return as_float(as_int(p) & ~(x < splat(-87.3f)));
}

// Caps one vector's scores and makes those that it does not see minus infinity; returns the largest
// of each lane.
template <KVType type>
OCTAVO_INLINE F mask_scores(const KVLayer& kv, const AttentionShape& shape, const Unit* units,
                            int count, Span span, float* scores) {
  F most = splat(-__builtin_inff());
  const bool sees_all = kv.block_size % kLanes == 0 && span.first <= units[0].token &&
                        span.last >= units[count - 1].token + kLanes;
  if (sees_all && type != KVType::kI8 && shape.softcap == 0.0f) {  // most chunks: nothing to store
    for (int u = 0; u < count; ++u) most = larger(load(scores + u * kLanes), most);
    return most;
  }
  for (int u = 0; u < count; ++u) {
    F score = load(scores + u * kLanes);
    if constexpr (type == KVType::kI8) score *= load(units[u].key_scales);
    if (shape.softcap != 0.0f) score = shape.softcap * tanh_of(score / shape.softcap);
    const int64_t first = span.first - units[u].token;
    const int64_t last = smaller(units[u].count, span.last - units[u].token);
    if (first > 0 || last < kLanes) {
      const I lane = lane_numbers();
      const I seen = (lane >= static_cast<int32_t>(smaller(first, kLanes))) &
                     (lane < static_cast<int32_t>(larger(last, 0)));
      score = choose(seen, score, splat(-__builtin_inff()));
    }
    most = larger(score, most);
    store(scores + u * kLanes, score);
  }
  return most;
}

// Turns one vector's scores into weights of the values as they are stored; returns the factor for
// what was summed before.
template <KVType type>
OCTAVO_INLINE float soften(const KVLayer& kv, const AttentionShape& shape, const Unit* units,
                           int count, Span span, float* scores, float* maximum, float* weight) {
  const F most = mask_scores<type>(kv, shape, units, count, span, scores);
  const float before = *maximum;
  const float now = max_of(most) > before ? max_of(most) : before;
  *maximum = now;
  // Nothing seen yet: any finite reference makes all weights 0 (or NaN where a score is).
  const float reference = now > -__builtin_inff() ? now : 0.0f;
  F total = F{};
  for (int u = 0; u < count; ++u) {
    F p = weight_of(load(scores + u * kLanes) - reference);
    total += p;
    if constexpr (type == KVType::kI8) p *= load(units[u].value_scales);
    store(scores + u * kLanes, p);
  }
  const float factor = exp_of(splat(before - reference))[0];
  *weight = *weight * factor + sum_of(total);
  return factor;
}

// sum[m] += weights * values, of features [d, d + N vectors).
template <KVType type, int M, int N>
OCTAVO_INLINE void value_tile(const Unit* units, int count, const float* scores, int64_t dim,
                              int64_t d, F (&sum)[M][N]) {
  constexpr int step = word_parts(type);
  constexpr int64_t bytes = word_bytes(type);
  for (int u = 0; u < count; ++u) {
    const uint8_t* values = units[u].values + d * bytes;
    const int64_t ahead = units[u + 1 < count ? u + 1 : u].values - units[u].values;
    const float* p = scores + u * kLanes;
    for (int64_t t = 0; t < units[u].count; t += step, values += dim * bytes, p += step) {
      const uint8_t *words[N], *next[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        words[n] = values + n * kLanes * bytes;
        next[n] = words[n] + ahead;
      }
      // The slot after the last token may hold another sequence's NaN: a weight of 0 would not do.
      add_products<type, M, N>(words, next, true, t + 1 < units[u].count, p, kScoreTokens, 1, sum);
    }
  }
}

// The same three steps for pairs of bfloat16, which are multiplied as they are stored.
//
// Decodes read KV that no cache holds, and blocks lie anywhere, so the CPU does not foresee them.
// What is read next is asked for a phase ahead (values while scores are computed, the next chunk's
// keys while values are added), and into the second-level cache: far more can be on its way there
// than to the first. gcc 12 loads words again for each row of a tile; keeping them in registers
// makes attention to what is cached faster by a seventh, to what is not slower by as much.

OCTAVO_INLINE void ask_for(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

// Scores of M query vectors, in rows of `row_bytes`, against N units.
template <int M, int N>
OCTAVO_INLINE void score_units(const KVLayer& kv, const uint8_t* queries, int64_t row_bytes,
                               const Unit* units, float* scores) {
  const int64_t stride = kv.padded_slots * 4, bytes = (kv.dim + 1) / 2 * stride;
  const uint8_t *keys[N], *values[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    keys[n] = units[n].keys;
    values[n] = units[n].values;
  }
  F sum[M][N] = {};
  TileRows<M> rows(queries, row_bytes);
  for (int64_t at = 0; at < bytes; at += stride) {
    P words[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      words[n] = load_pairs(keys[n] + at);
      ask_for(values[n]);
      values[n] += OCTAVO_BYTES;
    }
    repeat<M>(OCTAVO_BODY(m) {
      const P x = splat_pair<m.value % 3, 0>(rows.base[m.value / 3], rows.stride);
      repeat<N>(OCTAVO_BODY(n) {
        F& to = sum[m.value][n.value];
        to = dot_pairs(to, words[n.value], x);
      });
    });
    rows.advance(4);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(scores + m * kScoreTokens + n * kLanes, sum[m][n]);
}

// Scores against `count` units.
template <int M, int N = vectors_for(M)>
OCTAVO_INLINE void score_pairs(const KVLayer& kv, const uint8_t* queries, int64_t row_bytes,
                               const Unit* units, int count, float* scores) {
  for (; count >= N; count -= N, units += N, scores += N * kLanes)
    score_units<M, N>(kv, queries, row_bytes, units, scores);
  if constexpr (N > 1)
    if (count > 0) score_pairs<M, N / 2>(kv, queries, row_bytes, units, count, scores);
}

// Weights in bfloat16, whose sum is that of the rounded ones. The reference follows the maximum only
// when that runs ahead of it by so much that sums could get large: most chunks rescale nothing.
OCTAVO_INLINE float soften_pairs(const KVLayer& kv, const AttentionShape& shape,
                                 const Unit* units, int count, Span span, float* scores,
                                 float* maximum, float* lane_weights) {
  constexpr float kAhead = 8.0f;
  const F most = mask_scores<KVType::kBF16>(kv, shape, units, count, span, scores);
  float factor = 1.0f;
  if (any_above(most, *maximum + kAhead)) {
    const float now = max_of(most);
    factor = exp_of(splat(*maximum - now))[0];
    *maximum = now;
  }
  const float reference = *maximum > -__builtin_inff() ? *maximum : 0.0f;
  const F offset = splat(-reference * kLog2E);
  F total = load(lane_weights) * factor;
  auto* to = reinterpret_cast<uint8_t*>(scores);
  const auto weight = [&](int u) __attribute__((always_inline)) {
    return rough_power_of_2(load(scores + u * kLanes) * kLog2E + offset);
  };
  int u = 0;
  for (; u + 2 <= count; u += 2, to += 4 * kLanes) {
    const F first = weight(u), second = weight(u + 1);
    total = add_rounded(total, first, second, to);
  }
  if (u < count) total = add_rounded(total, weight(u), to);
  store(lane_weights, total);
  return factor;
}

// sum[m] += weights * values, of features [d, d + N vectors).
template <int M, int N>
OCTAVO_INLINE void value_pairs(const KVLayer& kv, const Unit* units, int count, const Chunk& next,
                               const float* scores, int64_t d, F (&sum)[M][N]) {
  const int64_t stride = kv.padded_slots * 4;  // of the keys: a unit has as many vectors of them
  const auto add = [&](const P (&words)[N], const uint8_t* p) __attribute__((always_inline)) {
    repeat<M>(OCTAVO_BODY(m) {
      const P x = splat_pair<0, m.value * kScoreTokens * 4>(p, 0);
      repeat<N>(OCTAVO_BODY(n) {
        F& to = sum[m.value][n.value];
        to = dot_pairs(to, words[n.value], x);
      });
    });
  };
  for (int u = 0; u < count; ++u) {
    const uint8_t* values = units[u].values + d * 4;
    const uint8_t* ahead = next.units[smaller(u, next.count - 1)].keys + d / kLanes * stride;
    const uint8_t* p = reinterpret_cast<const uint8_t*>(scores) + u * 2 * kLanes;
    P words[N];
    for (int64_t left = units[u].count / 2; left > 0; --left, values += kv.dim * 4, p += 4) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        words[n] = load_pairs(values + n * OCTAVO_BYTES);
        ask_for(ahead + n * stride);
      }
      ahead += kv.dim / kLanes * stride;
      add(words, p);
    }
    if (units[u].count % 2 == 0) continue;
    // The slot after the last token may hold another sequence's NaN: a weight of 0 would not do.
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      words[n] = reinterpret_cast<P>(load_u32(values + n * OCTAVO_BYTES) & 0xffffu);
    add(words, p);
  }
}

// sums[m][d .. d + N vectors) = sums * factor + weights * values.
template <KVType type, int M, int N>
OCTAVO_INLINE void add_values(const KVLayer& kv, const Unit* units, int count, const Chunk& next,
                              const QuerySet& set, const float* factors, int64_t d, float* sums) {
  const int64_t padded = set.padded_dim;
  F sum[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[m][n] = load(sums + m * padded + d + n * kLanes) * factors[m];
  if constexpr (kPaired<type>)
    value_pairs<M, N>(kv, units, count, next, set.scores, d, sum);
  else
    value_tile<type, M, N>(units, count, set.scores, set.dim, d, sum);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(sums + m * padded + d + n * kLanes, sum[m][n]);
}

// The units of a chunk that any of some query vectors sees.
struct Seen {
  const Unit* units;
  int count;
};
OCTAVO_INLINE Seen seen_by(const Span* spans, int64_t vectors, int64_t last_token, const Chunk& chunk) {
  int64_t first_seen = last_token, last_seen = 0;
  for (int64_t v = 0; v < vectors; ++v) {
    first_seen = smaller(first_seen, spans[v].first);
    last_seen = larger(last_seen, spans[v].last);
  }
  int first = 0, last = chunk.count;
  while (last > 0 && chunk.units[last - 1].token >= last_seen) --last;
  while (first < last && chunk.units[first].token + chunk.units[first].count <= first_seen) ++first;
  return {chunk.units + first, last - first};
}

// Attention of M query vectors, from number `first` on, to a chunk; `next` is what keys are read of
// after it.
template <KVType type, int M>
static __attribute__((noinline)) void attend_tile(const KVLayer& kv, const AttentionShape& shape,
                                                  const AttendArgs& args, const QuerySet& set,
                                                  int64_t first, const Chunk& chunk,
                                                  const Chunk& next) {
  const Span* spans = set.spans + first;
  const auto [units, count] = seen_by(spans, M, args.last_token, chunk);
  if (count == 0) return;
  float factors[M];
  if constexpr (kPaired<type>) {
    const int64_t row_bytes = set.padded_dim * 2;
    score_pairs<M>(kv, reinterpret_cast<const uint8_t*>(set.queries) + first * row_bytes,
                   row_bytes, units, count, set.scores);
    for (int m = 0; m < M; ++m)
      factors[m] = soften_pairs(kv, shape, units, count, spans[m], set.scores + m * kScoreTokens,
                                set.maxima + first + m, set.lane_weights + (first + m) * kLanes);
  } else {
    score_tile<type, M>(kv, set.queries + first * set.even_dim, units, count, set.scores);
    for (int m = 0; m < M; ++m)
      factors[m] = soften<type>(kv, shape, units, count, spans[m], set.scores + m * kScoreTokens,
                                set.maxima + first + m, set.weights + first + m);
  }
  constexpr int N = vectors_for(M);
  float* sums = set.sums + first * set.padded_dim;
  int64_t d = 0;
  for (; d + N * kLanes <= set.padded_dim; d += N * kLanes)
    add_values<type, M, N>(kv, units, count, next, set, factors, d, sums);
  for (; d < set.padded_dim; d += kLanes)
    add_values<type, M, 1>(kv, units, count, next, set, factors, d, sums);
}

template <KVType type, int M>
OCTAVO_INLINE void attend_tile_of(int64_t vectors, const KVLayer& kv, const AttentionShape& shape,
                                  const AttendArgs& args, const QuerySet& set, int64_t first,
                                  const Chunk& chunk, const Chunk& next) {
  if (vectors == M)
    attend_tile<type, M>(kv, shape, args, set, first, chunk, next);
  else if constexpr (M > 1)
    attend_tile_of<type, M - 1>(vectors, kv, shape, args, set, first, chunk, next);
}

// How all query vectors attend to a chunk: by tiles of them in vector registers.
template <KVType type>
struct VectorTiles {
  explicit VectorTiles(const QuerySet&) {}

  OCTAVO_MEMBER void attend(const KVLayer& kv, const AttentionShape& shape, const AttendArgs& args,
                            const QuerySet& set, const Chunk& chunk, const Chunk& next) const {
    for (int64_t first = 0; first < set.vectors; first += kQueryTile) {
      const int64_t left = set.vectors - first;
      attend_tile_of<type, kQueryTile>(smaller(kQueryTile, left), kv, shape, args, set, first, chunk,
                                       left > kQueryTile ? chunk : next);
    }
  }
};

// Adds the state of later tokens to a state. A state that has seen nothing changes nothing.
static __attribute__((noinline)) void join_state(float* sums, float* maximum, float* weight,
                                                 const float* more, float more_maximum,
                                                 float more_weight, int64_t dim) {
  const float most = more_maximum > *maximum ? more_maximum : *maximum;
  const float reference = most > -__builtin_inff() ? most : 0.0f;
  const float keep = exp_of(splat(*maximum - reference))[0];
  const float factor = exp_of(splat(more_maximum - reference))[0];
  *maximum = most;
  *weight = *weight * keep + more_weight * factor;
  over_vectors(more, dim, sums, [&](int64_t at, F sum) {
    return load_upto(sums, at, dim) * keep + sum * factor;
  });
}

static void finish_vector(const float* sums, float weight, int64_t dim, float* out) {
  const float factor = 1.0f / weight;
  over_vectors(sums, dim, out, [&](int64_t, F sum) { return sum * factor; });
}

// Leaves the state of segment number `segment` of the call where the caller wants it.
static void save_segment(const AttendArgs& args, const QuerySet& set, int64_t segment) {
  float* to = args.partial + segment * set.vectors * (set.dim + 2);
  for (int64_t v = 0; v < set.vectors; ++v, to += set.dim + 2) {
    __builtin_memcpy(to, set.sums + v * set.padded_dim, set.dim * 4);
    to[set.dim] = set.maxima[v];
    to[set.dim + 1] = set.weights[v];
  }
}

static void join_segment(QuerySet& set, int64_t segment) {
  if (segment == 0) {
    const auto swap = [](float*& a, float*& b) { float* c = a; a = b; b = c; };
    swap(set.sums, set.joined_sums);
    swap(set.maxima, set.joined_maxima);
    swap(set.weights, set.joined_weights);
    return;
  }
  for (int64_t v = 0; v < set.vectors; ++v)
    join_state(set.joined_sums + v * set.padded_dim, set.joined_maxima + v, set.joined_weights + v,
               set.sums + v * set.padded_dim, set.maxima[v], set.weights[v], set.dim);
}

template <KVType type, typename Tiles>
static void attend_with(const KVLayer& kv, const AttentionShape& shape, const AttendArgs& args) {
  QuerySet set = make_query_set<type>(shape, args);
  const Tiles tiles(set);
  Chunk chunks[2];
  int current = 0;
  int64_t listed = list_units<type>(kv, args.block_table, args.kv_head, args.first_token,
                                    args.last_token, chunks[current]);
  int64_t segment = 0;
  for (int64_t token = args.first_token; token < args.last_token; ++segment) {
    int64_t end = args.last_token;
    if (args.segment_units > 0) {
      const int64_t next = (unit_of(kv, token) / args.segment_units + 1) * args.segment_units;
      end = smaller(end, token_of(kv, next));
    }
    start_segment<type>(set);
    while (token < end) {
      const Chunk& chunk = chunks[current];
      Chunk& next = chunks[current ^= 1];
      token = listed;
      if (token < args.last_token)
        listed = list_units<type>(kv, args.block_table, args.kv_head, token, args.last_token, next);
      else if (const AttendArgs* after = args.after)
        list_units<type>(kv, after->block_table, after->kv_head, after->first_token,
                         after->last_token, next);
      else
        next = chunk;
      tiles.attend(kv, shape, args, set, chunk, next);
    }
    if constexpr (kPaired<type>)
      for (int64_t v = 0; v < set.vectors; ++v)
        set.weights[v] = sum_of(load(set.lane_weights + v * kLanes));
    if (args.partial)
      save_segment(args, set, segment);
    else
      join_segment(set, segment);
  }
  if (args.partial) return;
  for (int64_t v = 0; v < set.vectors; ++v)
    finish_vector(set.joined_sums + v * set.padded_dim, set.joined_weights[v], set.dim,
                  args.out + batch_row(args, v / set.heads) * args.out_stride +
                      v % set.heads * set.dim);
}

template <KVType type>
static void attend_by_tiles(const KVLayer& kv, const AttentionShape& shape, const AttendArgs& args) {
  attend_with<type, VectorTiles<type>>(kv, shape, args);
}

static void attend_by_vectors(const KVLayer& kv, const AttentionShape& shape, const AttendArgs& args) {
  switch (kv.type) {
    case KVType::kF32: return attend_by_tiles<KVType::kF32>(kv, shape, args);
    case KVType::kBF16: return attend_by_tiles<KVType::kBF16>(kv, shape, args);
    case KVType::kI8: return attend_by_tiles<KVType::kI8>(kv, shape, args);
  }
}

// Joins states of one query vector, in the order of their tokens, as `attend` joins segments.
static void join_states(const float* const* states, int64_t count, int64_t dim, float* out) {
  __builtin_memcpy(out, states[0], dim * 4);
  float maximum = states[0][dim], weight = states[0][dim + 1];
  for (int64_t i = 1; i < count; ++i)
    join_state(out, &maximum, &weight, states[i], states[i][dim], states[i][dim + 1], dim);
  finish_vector(out, weight, dim, out);
}
