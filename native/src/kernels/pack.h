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

// A group's scale, unless it is 0: none is, for kernels add exponents to their bits. Then it is the
// least there is, for matrix registers' widening leaves a share of it, and the group's values must be
// those that stand for 0.
OCTAVO_INLINE bool put_scale(uint8_t* to, float scale) {
  uint16_t half = float_to_half(scale);
  const bool is_zero = (half & 0x7fff) == 0;
  if (is_zero) half = 1;
  __builtin_memcpy(to, &half, 2);
  return !is_zero;
}

// The int8 values of group `g` of a column, and their scale.
static void put_group_i8(const PackedWeight& weight, uint8_t* panel, int column, int64_t g,
                         const int8_t* values, float scale) {
  uint8_t* group = panel + g * group_bytes(weight.format);
  const bool has_scale = put_scale(group + values_bytes(weight.format) + 2 * column, scale);
  for (int i = 0; i < kGroup; ++i)
    group[byte_of(column, i)] = static_cast<uint8_t>((has_scale ? values[i] : 0) + kByteOffset);
}

// The 4-bit values of group `g` of a column, their scale, and their minimum if the format has one.
static void put_group_u4(const PackedWeight& weight, uint8_t* panel, int column, int64_t g,
                         const uint8_t* values, float scale, float minimum) {
  uint8_t* group = panel + g * group_bytes(weight.format);
  uint8_t* scales = group + values_bytes(weight.format) + 2 * column;
  const bool has_scale = put_scale(scales, scale);
  const int zero = weight.format == Format::kU4Group ? 8 : 0;
  for (int i = 0; i < kGroup; ++i) {
    uint8_t* byte = group + nibble_byte(column, i);
    const int value = has_scale ? values[i] : zero;
    *byte = static_cast<uint8_t>(is_high_nibble(i) ? *byte | value << 4 : value);
  }
  if (weight.format == Format::kU4GroupMin) put_half(scales + 2 * kPanel, minimum);
}

static void pack_i8(const float* row, const PackedWeight& weight, uint8_t* panel, int column) {
  for (int64_t g = 0; g < weight.groups; ++g) {
    const float* values = row + g * kGroup;
    float most = 0;
    for (int i = 0; i < kGroup; ++i)
      most = __builtin_fabsf(values[i]) > most ? __builtin_fabsf(values[i]) : most;
    const float scale = half_to_float(float_to_half(most / 127.0f));
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    int8_t quantised[kGroup];
    for (int i = 0; i < kGroup; ++i)
      quantised[i] = static_cast<int8_t>(clamp_int(values[i] * inverse, -127, 127));
    put_group_i8(weight, panel, column, g, quantised, scale);
  }
}

OCTAVO_INLINE float get_half(const uint8_t* from) {
  uint16_t half;
  __builtin_memcpy(&half, from, 2);
  return half_to_float(half);
}

// Q8_0 keeps its values and scales bit by bit.
static void pack_q8_0(const uint8_t* row, const PackedWeight& weight, uint8_t* panel, int column) {
  for (int64_t g = 0; g < weight.groups; ++g, row += 34)
    put_group_i8(weight, panel, column, g, reinterpret_cast<const int8_t*>(row + 2), get_half(row));
}

// So do Q4_0 and Q4_1. Where minima are kept beside Q4_0, they are -8 scales, exact in float16.
static void pack_q4_0(const uint8_t* row, bool has_minimum, const PackedWeight& weight,
                      uint8_t* panel, int column) {
  for (int64_t g = 0; g < weight.groups; ++g) {
    const float scale = get_half(row);
    const float minimum = has_minimum ? get_half(row + 2) : -8 * scale;
    row += has_minimum ? 4 : 2;
    uint8_t values[kGroup];
    for (int i = 0; i < 16; ++i, ++row) {
      values[i] = *row & 15;
      values[i + 16] = *row >> 4;
    }
    put_group_u4(weight, panel, column, g, values, scale, minimum);
  }
}

// Q4_K keeps its 4-bit values; its scales and minima, products of two numbers, round to float16.
static void pack_q4_k(const uint8_t* row, const PackedWeight& weight, uint8_t* panel, int column) {
  for (int64_t g = 0; g < weight.groups; ++g) {
    uint8_t values[kGroup];
    float scale, minimum;
    decode_q4_k_group(row, g, values, &scale, &minimum);
    put_group_u4(weight, panel, column, g, values, scale, minimum);
  }
}

static void pack_u4_min(const float* row, const PackedWeight& weight, uint8_t* panel, int column) {
  for (int64_t g = 0; g < weight.groups; ++g) {
    U4Group quantised;
    quantise_u4(row + g * kGroup, &quantised);
    put_group_u4(weight, panel, column, g, quantised.values, quantised.scale, quantised.minimum);
  }
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

// Packs a row whose encoding has the format's values; false if it has others.
static bool pack_as_is(Encoding encoding, const uint8_t* row, const PackedWeight& weight,
                       uint8_t* panel, int column) {
  const Format format = weight.format;
  if (format == Format::kI8Group && encoding == Encoding::kQ8_0)
    pack_q8_0(row, weight, panel, column);
  else if (has_nibbles(format) && encoding == Encoding::kQ4_0)
    pack_q4_0(row, false, weight, panel, column);
  else if (format == Format::kU4GroupMin && encoding == Encoding::kQ4_1)
    pack_q4_0(row, true, weight, panel, column);
  else if (format == Format::kU4GroupMin && encoding == Encoding::kQ4_K)
    pack_q4_k(row, weight, panel, column);
  else
    return false;
  return true;
}

static bool is_finite(const float* values, int64_t count) {
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    __builtin_memcpy(&bits, values + i, 4);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  return most < 0x7f800000;
}

// Whether a column's scales and minima are finite, as packed.
static bool has_finite_scales(const PackedWeight& weight, const uint8_t* panel, int column) {
  const int64_t rows = (group_bytes(weight.format) - values_bytes(weight.format)) / (2 * kPanel);
  bool finite = true;
  for (int64_t g = 0; g < weight.groups; ++g)
    for (int64_t i = 0; i < rows; ++i) {
      uint16_t half;
      __builtin_memcpy(&half, panel + g * group_bytes(weight.format) + values_bytes(weight.format) +
                                  2 * (i * kPanel + column), 2);
      finite &= (half & 0x7c00) != 0x7c00;
    }
  return finite;
}

// `scratch` holds groups * 32 (or inputs) floats. `out` starts zeroed; that is the padding.
static bool pack(const PackedWeight& weight, const PackSource& source, uint8_t* out, int64_t first,
                 int64_t last, float* scratch) {
  bool finite = true;
  for (int64_t panel = first; panel < last; ++panel) {
    uint8_t* to = out + panel * weight.panel_bytes;
    for (int column = 0; column < kPanel; ++column) {
      const int64_t index = row_of_column(weight, panel, column);
      if (index < 0) continue;
      Encoding encoding = Encoding::kF32;
      const uint8_t* row = source_row(source, index, &encoding);
      if (pack_as_is(encoding, row, weight, to, column)) {
        finite &= has_finite_scales(weight, to, column);
        continue;
      }
      decode_row(encoding, row, weight.inputs, scratch);
      for (int64_t k = weight.inputs; k < weight.groups * kGroup; ++k) scratch[k] = 0.0f;
      if (!is_quantised(weight.format)) {
        pack_float(scratch, weight, to, column);
        continue;
      }
      if (weight.format == Format::kU4GroupMin)
        pack_u4_min(scratch, weight, to, column);
      else
        pack_i8(scratch, weight, to, column);
      finite &= is_finite(scratch, weight.inputs) && has_finite_scales(weight, to, column);
    }
  }
  return finite;
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
