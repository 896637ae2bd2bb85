// Packing: from a file's rows to panels, and single rows back.
//
// Quantised panels hold, per group of 32 inputs, [inputs / 4][output][4] as int8 plus kByteOffset;
// or nibbles, [inputs / 8][output][4], the low ones of the first 16 inputs; then float16 scales
// (and minima) of all outputs. Float panels are [input][output];
// bfloat16 pairs output c with output c + lanes, so that a shift and a mask make two vectors, or where
// its products have an instruction lies as [inputs / 2][output][2], in whole groups.

// Where output row `row` of the stacked parts lies; null past the end.
static const uint8_t* source_row(const PackSource& source, int64_t row, Encoding* encoding) {
  for (int64_t i = 0; i < source.num_parts; ++i) {
    const SourcePart& part = source.parts[i];
    if (row < part.rows) {
      *encoding = part.encoding;
      return part.data + row * part.row_bytes;
    }
    row -= part.rows;
  }
  return nullptr;
}

// The output row that column `column` of a panel holds; -1 in the padding.
static int64_t row_of_column(const PackedWeight& weight, int64_t panel, int column) {
  if (!weight.gated) {
    const int64_t row = panel * kPanel + column;
    return row < weight.outputs ? row : -1;
  }
  const int64_t half = weight.outputs / 2;
  const int64_t row = panel * kLanes + column % kLanes;
  return row < half ? row + (column >= kLanes ? half : 0) : -1;
}

OCTAVO_INLINE void put_half(uint8_t* to, float value) {
  const uint16_t half = float_to_half(value);
  __builtin_memcpy(to, &half, 2);
}

OCTAVO_INLINE int clamp_int(float value, int low, int high) {
  const int rounded = static_cast<int>(__builtin_rintf(value));
  return rounded < low ? low : rounded > high ? high : rounded;
}

// Where input `i` of a group lies at `column`: the byte, if it is a nibble in which half.
OCTAVO_INLINE int byte_of(int column, int i) { return (i / 4 * kPanel + column) * 4 + i % 4; }
OCTAVO_INLINE int nibble_byte(int column, int i) { return byte_of(column, i % 16); }
OCTAVO_INLINE bool is_high_nibble(int i) { return i >= 16; }

// The int8 values of a group at `column`.
static void put_group_i8(uint8_t* group, int column, const int8_t* values) {
  for (int i = 0; i < kGroup; ++i)
    group[byte_of(column, i)] = static_cast<uint8_t>(values[i] + kByteOffset);
}

// The 4-bit values of a group at `column`.
static void put_group_u4(uint8_t* group, int column, const uint8_t* values) {
  for (int i = 0; i < kGroup; ++i) {
    uint8_t* byte = group + nibble_byte(column, i);
    if (is_high_nibble(i))
      *byte |= static_cast<uint8_t>(values[i] << 4);
    else
      *byte = values[i];
  }
}

static void pack_i8(const float* row, const PackedWeight& weight, uint8_t* panel, int column) {
  for (int64_t g = 0; g < weight.groups; ++g) {
    uint8_t* group = panel + g * group_bytes(weight.format);
    const float* values = row + g * kGroup;
    float most = 0;
    for (int i = 0; i < kGroup; ++i)
      most = __builtin_fabsf(values[i]) > most ? __builtin_fabsf(values[i]) : most;
    const float scale = half_to_float(float_to_half(most / 127.0f));
    put_half(group + kGroup * kPanel + 2 * column, scale);
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    int8_t quantised[kGroup];
    for (int i = 0; i < kGroup; ++i)
      quantised[i] = static_cast<int8_t>(clamp_int(values[i] * inverse, -127, 127));
    put_group_i8(group, column, quantised);
  }
}

// Q4_0, Q4_1 and Q8_0 keep their values and scales bit by bit.
static void pack_as_is(const uint8_t* row, const PackedWeight& weight, uint8_t* panel,
                       int column) {
  for (int64_t g = 0; g < weight.groups; ++g) {
    uint8_t* group = panel + g * group_bytes(weight.format);
    if (weight.format == Format::kI8Group) {
      const uint8_t* block = row + g * 34;
      put_group_i8(group, column, reinterpret_cast<const int8_t*>(block + 2));
      __builtin_memcpy(group + kGroup * kPanel + 2 * column, block, 2);
      continue;
    }
    const bool has_minimum = weight.format == Format::kU4GroupMin;
    const uint8_t* block = row + g * (has_minimum ? 20 : 18);
    const uint8_t* nibbles = block + (has_minimum ? 4 : 2);
    uint8_t values[kGroup];
    for (int i = 0; i < 16; ++i) {
      values[i] = nibbles[i] & 15;
      values[i + 16] = nibbles[i] >> 4;
    }
    put_group_u4(group, column, values);
    uint8_t* scales = group + kGroup / 2 * kPanel + 2 * column;
    __builtin_memcpy(scales, block, 2);
    if (has_minimum) __builtin_memcpy(scales + 2 * kPanel, block + 2, 2);
  }
}

// Q4_K keeps its 4-bit values; its scales and minima, products of two numbers, round to float16.
static void pack_q4_k(const uint8_t* row, const PackedWeight& weight, uint8_t* panel, int column) {
  for (int64_t g = 0; g < weight.groups; ++g) {
    uint8_t* group = panel + g * group_bytes(weight.format);
    uint8_t values[kGroup];
    float scale, minimum;
    decode_q4_k_group(row, g, values, &scale, &minimum);
    put_group_u4(group, column, values);
    put_half(group + kGroup / 2 * kPanel + 2 * column, scale);
    put_half(group + kGroup / 2 * kPanel + 2 * kPanel + 2 * column, minimum);
  }
}

// Q4_0 keeps its values where a minimum is kept too: that is -8 scales, which is exact in float16.
static void pack_q4_0_min(const uint8_t* row, const PackedWeight& weight, uint8_t* panel,
                          int column) {
  for (int64_t g = 0; g < weight.groups; ++g) {
    uint8_t* group = panel + g * group_bytes(weight.format);
    const uint8_t* block = row + g * 18;
    uint8_t values[kGroup];
    for (int i = 0; i < 16; ++i) {
      values[i] = block[2 + i] & 15;
      values[i + 16] = block[2 + i] >> 4;
    }
    put_group_u4(group, column, values);
    uint8_t* scales = group + kGroup / 2 * kPanel + 2 * column;
    __builtin_memcpy(scales, block, 2);
    uint16_t scale;
    __builtin_memcpy(&scale, block, 2);
    put_half(scales + 2 * kPanel, -8 * half_to_float(scale));
  }
}

static void pack_u4_min(const float* row, const PackedWeight& weight, uint8_t* panel, int column) {
  for (int64_t g = 0; g < weight.groups; ++g) {
    uint8_t* group = panel + g * group_bytes(weight.format);
    U4Group quantised;
    quantise_u4(row + g * kGroup, &quantised);
    put_group_u4(group, column, quantised.values);
    put_half(group + kGroup / 2 * kPanel + 2 * column, quantised.scale);
    put_half(group + kGroup / 2 * kPanel + 2 * kPanel + 2 * column, quantised.minimum);
  }
}

static bool same_layout(Format format, Encoding encoding) {
  return (format == Format::kI8Group && encoding == Encoding::kQ8_0) ||
         (format == Format::kU4Group && encoding == Encoding::kQ4_0) ||
         (format == Format::kU4GroupMin && encoding == Encoding::kQ4_1);
}

// Where the bfloat16 of input `k` lies in a panel.
OCTAVO_INLINE int64_t bfloat_byte(int64_t k, int column) {
  if constexpr (kBfloatProducts) return (k / 2 * kPanel + column) * 4 + k % 2 * 2;
  return (k * kLanes + column % kLanes) * 4 + column / kLanes * 2;
}

static void pack_float(const float* row, const PackedWeight& weight, uint8_t* panel, int column) {
  for (int64_t k = 0; k < weight.inputs; ++k) {
    if (weight.format == Format::kF32) {
      __builtin_memcpy(panel + (k * kPanel + column) * 4, row + k, 4);
    } else {
      const uint16_t bits = float_to_bfloat16(row[k]);
      __builtin_memcpy(panel + bfloat_byte(k, column), &bits, 2);
    }
  }
}

// `scratch` holds groups * 32 (or inputs) floats. `out` starts zeroed; that is the padding.
static void pack(const PackedWeight& weight, const PackSource& source, uint8_t* out, int64_t first,
                 int64_t last, float* scratch) {
  for (int64_t panel = first; panel < last; ++panel) {
    uint8_t* to = out + panel * weight.panel_bytes;
    for (int column = 0; column < kPanel; ++column) {
      const int64_t index = row_of_column(weight, panel, column);
      if (index < 0) continue;
      Encoding encoding = Encoding::kF32;
      const uint8_t* row = source_row(source, index, &encoding);
      if (same_layout(weight.format, encoding)) {
        pack_as_is(row, weight, to, column);
        continue;
      }
      if (weight.format == Format::kU4GroupMin && encoding == Encoding::kQ4_K) {
        pack_q4_k(row, weight, to, column);
        continue;
      }
      if (weight.format == Format::kU4GroupMin && encoding == Encoding::kQ4_0) {
        pack_q4_0_min(row, weight, to, column);
        continue;
      }
      decode_row(encoding, row, weight.inputs, scratch);
      for (int64_t k = weight.inputs; k < weight.groups * kGroup; ++k) scratch[k] = 0.0f;
      if (!is_quantised(weight.format))
        pack_float(scratch, weight, to, column);
      else if (weight.format == Format::kU4GroupMin)
        pack_u4_min(scratch, weight, to, column);
      else
        pack_i8(scratch, weight, to, column);
    }
  }
}

OCTAVO_INLINE float get_half(const uint8_t* from) {
  uint16_t half;
  __builtin_memcpy(&half, from, 2);
  return half_to_float(half);
}

// The values of group `g` of a column.
static void unpack_group(const PackedWeight& weight, const uint8_t* panel, int column, int64_t g,
                         float* values) {
  const uint8_t* group = panel + g * group_bytes(weight.format);
  if (!has_nibbles(weight.format)) {
    const float scale = get_half(group + kGroup * kPanel + 2 * column);
    for (int i = 0; i < kGroup; ++i)
      values[i] = scale * static_cast<int8_t>(group[byte_of(column, i)] - kByteOffset);
    return;
  }
  const uint8_t* scales = group + kGroup / 2 * kPanel + 2 * column;
  const float scale = get_half(scales);
  const float minimum =
      weight.format == Format::kU4Group ? -8 * scale : get_half(scales + 2 * kPanel);
  for (int i = 0; i < kGroup; ++i) {
    const uint8_t byte = group[nibble_byte(column, i)];
    values[i] = scale * (is_high_nibble(i) ? byte >> 4 : byte & 15) + minimum;
  }
}

// Writes row `row` (an output) of a weight that is not gated, times `scale`.
static void unpack_row(const PackedWeight& weight, int64_t row, float scale, float* out) {
  const uint8_t* panel = weight.data + row / kPanel * weight.panel_bytes;
  const int column = static_cast<int>(row % kPanel);
  for (int64_t g = 0; g < weight.groups; ++g) {
    float values[kGroup];
    unpack_group(weight, panel, column, g, values);
    const int64_t count = smaller(kGroup, weight.inputs - g * kGroup);
    for (int64_t i = 0; i < count; ++i) out[g * kGroup + i] = values[i] * scale;
  }
  if (weight.groups > 0) return;
  for (int64_t k = 0; k < weight.inputs; ++k) {
    float value;
    if (weight.format == Format::kF32) {
      __builtin_memcpy(&value, panel + (k * kPanel + column) * 4, 4);
    } else {
      uint32_t bits = 0;
      __builtin_memcpy(reinterpret_cast<uint8_t*>(&bits) + 2, panel + bfloat_byte(k, column), 2);
      __builtin_memcpy(&value, &bits, 4);
    }
    out[k] = value * scale;
  }
}
