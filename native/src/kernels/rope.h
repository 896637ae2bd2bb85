// Rotary embedding of one row, and its keys and values into the paged KV.

OCTAVO_INLINE void rotate_head(float* head, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F low = load(head + i), high = load(head + half + i);
    const F c = load(cos + i), s = load(sin + i);
    store(head + i, low * c - high * s);
    store(head + half + i, high * c + low * s);
  }
  for (; i < half; ++i) {
    const float low = head[i], high = head[half + i];
    head[i] = low * cos[i] - high * sin[i];
    head[half + i] = high * cos[i] + low * sin[i];
  }
}

// Symmetric int8 with one scale, which is returned: max / 127. As in `quantise`, values that hold
// NaN or infinity get a scale of NaN, and those too small for a reciprocal count as zeros.
OCTAVO_INLINE float quantise_head(const float* x, int64_t dim, uint8_t* to, int64_t stride) {
  I most = I{};
  for (int64_t i = 0; i < dim; i += kLanes)
    most = larger(most, as_int(load_upto(x, i, dim)) & 0x7fffffff);
  const int32_t bits = max_of(most);
  const float largest = from_bits(bits);
  const float inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;
  for (int64_t i = 0; i < dim; i += kLanes) {
    const I q = nearest(load_upto(x, i, dim) * inverse);
    const int64_t count = smaller(kLanes, dim - i);
    for (int64_t lane = 0; lane < count; ++lane)
      to[(i + lane) * stride] = static_cast<uint8_t>(q[lane]);
  }
  return bits < 0x7f800000 ? largest / 127.0f : __builtin_nanf("");
}

OCTAVO_INLINE void store_key(const KVLayer& kv, uint8_t* to, int64_t offset, const float* key) {
  if (kv.type == KVType::kI8) {
    reinterpret_cast<float*>(to + kv.key_scales)[offset] =
        quantise_head(key, kv.dim, to + offset, kv.padded_slots);
    return;
  }
  if (kv.type == KVType::kF32) {
    auto* keys = reinterpret_cast<float*>(to) + offset;
    for (int64_t d = 0; d < kv.dim; ++d) keys[d * kv.padded_slots] = key[d];
    return;
  }
  auto* pairs = reinterpret_cast<uint32_t*>(to) + offset;
  for (int64_t first = 0; first < kv.dim; first += kLanes) {
    uint32_t rounded[kLanes / 2];
    store_halves(reinterpret_cast<uint8_t*>(rounded), bfloats_of(load_upto(key, first, kv.dim)));
    const int64_t count = smaller(kLanes, kv.dim - first);
    for (int64_t d = 0; d < count; d += 2)
      pairs[(first + d) / 2 * kv.padded_slots] = rounded[d / 2];
  }
}

OCTAVO_INLINE void store_value(const KVLayer& kv, uint8_t* to, int64_t offset,
                               const float* value) {
  if (kv.type == KVType::kI8) {
    reinterpret_cast<float*>(to + kv.value_scales)[offset] =
        quantise_head(value, kv.dim, to + offset * kv.dim, 1);
    return;
  }
  if (kv.type == KVType::kF32) {
    __builtin_memcpy(to + offset * kv.dim * 4, value, kv.dim * 4);
    return;
  }
  auto* halves = reinterpret_cast<uint16_t*>(to) + offset / 2 * kv.dim * 2 + offset % 2;
  for (int64_t first = 0; first < kv.dim; first += kLanes) {
    uint16_t rounded[kLanes];
    store_halves(reinterpret_cast<uint8_t*>(rounded), bfloats_of(load_upto(value, first, kv.dim)));
    const int64_t count = smaller(kLanes, kv.dim - first);
    for (int64_t d = 0; d < count; ++d) halves[2 * (first + d)] = rounded[d];
  }
}

static void rope_and_store(const KVLayer& kv, const AttentionShape& shape, const RopeArgs& args) {
  const int64_t half = shape.rotary_dim / 2;
  const int64_t rotated = shape.heads + shape.kv_heads;
  for (int64_t h = 0; h < rotated; ++h) {
    float* head = args.qkv + h * shape.dim;
    const float* norm = h < shape.heads ? shape.q_norm : shape.k_norm;
    if (norm) rms_norm(head, norm, shape.norm_eps, shape.dim, head);
    rotate_head(head, args.cos, args.sin, half);
  }
  const int64_t block = args.slot / kv.block_size, offset = args.slot % kv.block_size;
  const float* key = args.qkv + shape.heads * shape.dim;
  const float* value = key + shape.kv_heads * shape.dim;
  for (int64_t h = 0; h < shape.kv_heads; ++h) {
    store_key(kv, kv.key(block, h), offset, key + h * shape.dim);
    store_value(kv, kv.value(block, h), offset, value + h * shape.dim);
  }
}
