// Attention of a set of query vectors (rows times query heads of one KV head) over a range of
// tokens of their sequence, block by block through the block table, with an online softmax
// (Milakov and Gimelshein 2018). The same code serves decodes, whose set is one row's heads, and
// prefill chunks, whose set is many rows': keys and values are read once for the whole set.

constexpr int kUnits = kScoreTokens / kLanes;  // of a chunk

// One vector of tokens: `count` consecutive slots of a block.
struct Unit {
  const uint8_t* keys;    // first feature of these tokens
  const uint8_t* values;  // first feature of token 0 of these (bfloat16: of its pair)
  int64_t token;
  int64_t count;
};

// State of a call, cut from the caller's scratch.
struct QuerySet {
  int64_t vectors;
  int64_t heads;          // query heads per KV head
  int64_t dim;
  int64_t even_dim;       // rows of a transposed query tile
  int64_t padded_dim;     // floats of a sum
  float* queries;         // tiles of up to kQueryTile vectors, [even_dim][vectors of the tile]
  float* sums;            // [vectors][padded_dim]
  float* maxima;          // [vectors]
  float* weights;         // [vectors]: sum of exponentials
  float* scores;          // [kQueryTile][kScoreTokens]
};

// Tokens [first, last) that a query vector sees within the call's range.
struct Span { int64_t first, last; };

OCTAVO_INLINE Span visible(const AttendArgs& args, const AttentionShape& shape, int64_t row) {
  const int64_t position = args.positions[row];
  const int64_t oldest = shape.window ? position - shape.window + 1 : 0;
  return {larger(args.first_token, oldest), smaller(args.last_token, position + 1)};
}

static QuerySet make_query_set(const AttentionShape& shape, const AttendArgs& args) {
  QuerySet set;
  set.heads = shape.heads / shape.kv_heads;
  set.vectors = args.rows * set.heads;
  set.dim = shape.dim;
  set.even_dim = (shape.dim + 1) / 2 * 2;
  set.padded_dim = (shape.dim + kLanes - 1) / kLanes * kLanes;
  float* next = args.scratch;
  const auto take = [&](int64_t floats) { float* p = next; next += floats; return p; };
  set.scores = take(kQueryTile * kScoreTokens);
  set.sums = take(set.vectors * set.padded_dim);
  set.queries = take(set.vectors * set.even_dim);
  set.maxima = take(set.vectors);
  set.weights = take(set.vectors);
  for (int64_t i = 0; i < set.vectors * set.padded_dim; ++i) set.sums[i] = 0.0f;
  for (int64_t first = 0; first < set.vectors; first += kQueryTile) {
    const int64_t size = smaller(kQueryTile, set.vectors - first);
    float* tile = set.queries + first * set.even_dim;
    for (int64_t v = 0; v < size; ++v) {
      const int64_t row = (first + v) / set.heads, head = (first + v) % set.heads;
      const float* q = args.q + row * args.q_stride + head * shape.dim;
      for (int64_t d = 0; d < set.even_dim; ++d)
        tile[d * size + v] = d < shape.dim ? q[d] * shape.scale : 0.0f;
      set.maxima[first + v] = -__builtin_inff();
      set.weights[first + v] = 0.0f;
    }
  }
  return set;
}

// Lists the units of the chunk that starts at `token`, up to kUnits; moves `token` past them.
static int list_units(const KVLayer& kv, const AttendArgs& args, int64_t& token, Unit* units) {
  int count = 0;
  while (count < kUnits && token < args.last_token) {
    const int64_t block = args.block_table[token / kv.block_size];
    const int64_t vector = token % kv.block_size / kLanes;
    const int64_t slot = vector * kLanes;
    Unit& unit = units[count++];
    unit.token = token / kv.block_size * kv.block_size + slot;
    unit.count = smaller(smaller(kLanes, kv.block_size - slot), args.last_token - unit.token);
    unit.keys = kv.key(block, args.kv_head) + slot * 4;
    // Both layouts take `dim` 4-byte words a step; a bfloat16 step is two tokens.
    const int64_t step = kv.type == KVType::kF32 ? slot : slot / 2;
    unit.values = kv.value(block, args.kv_head) + step * kv.dim * 4;
    token = unit.token + unit.count;
  }
  return count;
}

// Vectors that M rows may hold each, so that all sums stay in registers.
constexpr int vectors_for(int rows) {
  return rows * 4 <= 2 * kQueryTile ? 4 : rows * 2 <= 2 * kQueryTile ? 2 : 1;
}

// Scores of M query vectors against `count` units.
template <KVType type, int M>
OCTAVO_INLINE void score_tile(const KVLayer& kv, const float* tile, const Unit* units, int count,
                              int64_t dim, float* scores) {
  constexpr int N = vectors_for(M);
  const int64_t stride = kv.padded_slots * 4;
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
    constexpr int step = type == KVType::kF32 ? 1 : 2;
    int64_t at = 0;
    for (int64_t d = 0; d < dim; d += step, at += stride) {
      F low[N], high[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const U word = load_u32(keys[n] + at);
        __builtin_prefetch(next[n] + at);
        low[n] = type == KVType::kF32 ? reinterpret_cast<F>(word) : lower_half(word);
        high[n] = upper_half(word);
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const F q = splat(tile[d * M + m]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[m][n] += q * low[n];
      }
      if constexpr (type == KVType::kBF16) {
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const F q = splat(tile[(d + 1) * M + m]);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sum[m][n] += q * high[n];
        }
      }
    }
    // A rest of less than N units repeats the last one, whose place takes the same scores again.
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        store(scores + m * kScoreTokens + (u + n < count ? u + n : count - 1) * kLanes, sum[m][n]);
  }
}

// Turns one vector's scores into weights; returns the factor for what was summed before.
OCTAVO_INLINE float soften(const AttentionShape& shape, const Unit* units, int count, Span span,
                           float* scores, float* maximum, float* weight) {
  F most = splat(-__builtin_inff());
  for (int u = 0; u < count; ++u) {
    F score = load(scores + u * kLanes);
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
  const float before = *maximum;
  const float now = max_of(most) > before ? max_of(most) : before;
  *maximum = now;
  // Nothing seen yet: any finite reference makes all weights 0 (or NaN where a score is).
  const float reference = now > -__builtin_inff() ? now : 0.0f;
  F total = F{};
  for (int u = 0; u < count; ++u) {
    const F p = exp_of(load(scores + u * kLanes) - reference);
    total += p;
    store(scores + u * kLanes, p);
  }
  const float factor = exp_of(splat(before - reference))[0];
  *weight = *weight * factor + sum_of(total);
  return factor;
}

// sums[m][d .. d + N vectors) = sums * factor + weights * values.
template <KVType type, int M, int N>
OCTAVO_INLINE void value_tile(const Unit* units, int count, const float* scores,
                              const float* factors, int64_t dim, int64_t d, int64_t padded,
                              float* sums) {
  F sum[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[m][n] = load(sums + m * padded + d + n * kLanes) * factors[m];
  for (int u = 0; u < count; ++u) {
    const uint8_t* values = units[u].values + d * 4;
    const int64_t ahead = units[u + 1 < count ? u + 1 : u].values - units[u].values;
    const float* p = scores + u * kLanes;
    constexpr int step = type == KVType::kF32 ? 1 : 2;
    for (int64_t t = 0; t < units[u].count; t += step, values += dim * 4, p += step) {
      U words[N];
      F low[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        words[n] = load_u32(values + n * kLanes * 4);
        __builtin_prefetch(values + ahead + n * kLanes * 4);
        low[n] = type == KVType::kF32 ? reinterpret_cast<F>(words[n]) : lower_half(words[n]);
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const F weight = splat(p[m * kScoreTokens]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[m][n] += weight * low[n];
      }
      // The slot after the last token may hold another sequence's NaN: a weight of 0 would not do.
      if (type == KVType::kF32 || t + 1 == units[u].count) continue;
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const F weight = splat(p[m * kScoreTokens + 1]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[m][n] += weight * upper_half(words[n]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(sums + m * padded + d + n * kLanes, sum[m][n]);
}

template <KVType type, int M>
static __attribute__((noinline)) void attend_tile(const KVLayer& kv, const AttentionShape& shape,
                                                  const AttendArgs& args, const QuerySet& set,
                                                  int64_t first, const Unit* units, int count) {
  Span spans[M];
  int64_t last_seen = 0;
  for (int m = 0; m < M; ++m) {
    spans[m] = visible(args, shape, (first + m) / set.heads);
    last_seen = larger(last_seen, spans[m].last);
  }
  while (count > 0 && units[count - 1].token >= last_seen) --count;
  int skipped = 0;  // the first vector's window reaches back furthest
  while (skipped < count && units[skipped].token + units[skipped].count <= spans[0].first)
    ++skipped;
  units += skipped;
  count -= skipped;
  if (count == 0) return;
  score_tile<type, M>(kv, set.queries + first * set.even_dim, units, count, set.even_dim,
                      set.scores);
  float factors[M];
  for (int m = 0; m < M; ++m)
    factors[m] = soften(shape, units, count, spans[m], set.scores + m * kScoreTokens,
                        set.maxima + first + m, set.weights + first + m);
  constexpr int N = vectors_for(M);
  float* sums = set.sums + first * set.padded_dim;
  int64_t d = 0;
  for (; d + N * kLanes <= set.padded_dim; d += N * kLanes)
    value_tile<type, M, N>(units, count, set.scores, factors, set.dim, d, set.padded_dim, sums);
  for (; d < set.padded_dim; d += kLanes)
    value_tile<type, M, 1>(units, count, set.scores, factors, set.dim, d, set.padded_dim, sums);
}

template <KVType type, int M>
OCTAVO_INLINE void attend_tile_of(int64_t vectors, const KVLayer& kv, const AttentionShape& shape,
                                  const AttendArgs& args, const QuerySet& set, int64_t first,
                                  const Unit* units, int count) {
  if (vectors == M)
    attend_tile<type, M>(kv, shape, args, set, first, units, count);
  else if constexpr (M > 1)
    attend_tile_of<type, M - 1>(vectors, kv, shape, args, set, first, units, count);
}

static void finish_attention(const AttendArgs& args, const QuerySet& set) {
  for (int64_t v = 0; v < set.vectors; ++v) {
    const float* sums = set.sums + v * set.padded_dim;
    if (args.partial) {
      float* partial = args.partial + v * (set.dim + 2);
      __builtin_memcpy(partial, sums, set.dim * 4);
      partial[set.dim] = set.maxima[v];
      partial[set.dim + 1] = set.weights[v];
      continue;
    }
    const float factor = 1.0f / set.weights[v];
    float* out = args.out + v / set.heads * args.out_stride + v % set.heads * set.dim;
    over_vectors(sums, set.dim, out, [&](int64_t, F sum) { return sum * factor; });
  }
}

template <KVType type>
static void attend_with(const KVLayer& kv, const AttentionShape& shape, const AttendArgs& args) {
  const QuerySet set = make_query_set(shape, args);
  Unit units[kUnits];
  for (int64_t token = args.first_token; token < args.last_token;) {
    const int count = list_units(kv, args, token, units);
    for (int64_t first = 0; first < set.vectors; first += kQueryTile)
      attend_tile_of<type, kQueryTile>(smaller(kQueryTile, set.vectors - first), kv, shape, args,
                                       set, first, units, count);
  }
  finish_attention(args, set);
}

static void attend(const KVLayer& kv, const AttentionShape& shape, const AttendArgs& args) {
  if (kv.type == KVType::kF32)
    attend_with<KVType::kF32>(kv, shape, args);
  else
    attend_with<KVType::kBF16>(kv, shape, args);
}

// Joins partial states of one query vector exactly: as if one call had seen all tokens.
static void softmax_merge(const float* const* partials, int64_t count, int64_t dim, float* out) {
  float most = -__builtin_inff();
  for (int64_t i = 0; i < count; ++i)
    most = partials[i][dim] > most ? partials[i][dim] : most;
  float weight = 0.0f;
  for (int64_t d = 0; d < dim; ++d) out[d] = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float factor = exp_of(splat(partials[i][dim] - most))[0];
    weight += factor * partials[i][dim + 1];
    over_vectors(partials[i], dim, out, [&](int64_t at, F sum) {
      return load_upto(out, at, dim) + sum * factor;
    });
  }
  const float factor = 1.0f / weight;
  over_vectors(out, dim, out, [&](int64_t, F sum) { return sum * factor; });
}
