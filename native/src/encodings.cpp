#include "encodings.h"

#include <cmath>
#include <cstring>

namespace octavo {

namespace {

uint16_t read_u16(const uint8_t* bytes) {
  uint16_t value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

float read_half(const uint8_t* bytes) { return half_to_float(read_u16(bytes)); }

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Q4_0 and Q4_1: 32 values, the first 16 in the low nibbles. Q5 adds a fifth bit from 4 bytes.
void decode_4bit(const uint8_t* nibbles, float scale, float minimum, float* out) {
  for (int i = 0; i < 16; ++i) {
    out[i] = (nibbles[i] & 15) * scale + minimum;
    out[i + 16] = (nibbles[i] >> 4) * scale + minimum;
  }
}

void decode_5bit(const uint8_t* high, const uint8_t* nibbles, float scale, float minimum,
                 float* out) {
  uint32_t bits;
  std::memcpy(&bits, high, sizeof bits);
  for (int i = 0; i < 16; ++i) {
    out[i] = ((nibbles[i] & 15) | (bits >> i & 1) << 4) * scale + minimum;
    out[i + 16] = ((nibbles[i] >> 4) | (bits >> (i + 16) & 1) << 4) * scale + minimum;
  }
}

// The 6-bit scale and minimum of part `i` of a Q4_K or Q5_K block, packed in 12 bytes.
void k_scale(const uint8_t* packed, int i, int* scale, int* minimum) {
  if (i < 4) {
    *scale = packed[i] & 63;
    *minimum = packed[i + 4] & 63;
  } else {
    *scale = (packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4;
    *minimum = (packed[i + 4] >> 4) | (packed[i] >> 6) << 4;
  }
}

void decode_q4_k(const uint8_t* block, float* out) {
  for (int part = 0; part < 8; ++part, out += 32) {
    uint8_t values[32];
    float scale, minimum;
    decode_q4_k_group(block, part, values, &scale, &minimum);
    for (int i = 0; i < 32; ++i) out[i] = scale * values[i] + minimum;
  }
}

void decode_q5_k(const uint8_t* block, float* out) {
  const float scale = read_half(block), minimum = read_half(block + 2);
  const uint8_t* high = block + 16;
  for (int part = 0; part < 8; ++part) {
    int s, m;
    k_scale(block + 4, part, &s, &m);
    const uint8_t* nibbles = block + 48 + part / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      const int low = part % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
      out[part * 32 + i] = scale * s * (low | (high[i] >> part & 1) << 4) - minimum * m;
    }
  }
}

void decode_q6_k(const uint8_t* block, float* out) {
  const uint8_t* low = block;
  const uint8_t* high = block + 128;
  const auto* scales = reinterpret_cast<const int8_t*>(block + 192);
  const float scale = read_half(block + 208);
  for (int half = 0; half < 2; ++half, low += 64, high += 32, scales += 8, out += 128) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      for (int i = 0; i < 32; ++i) {
        const uint8_t nibbles = low[quarter % 2 * 32 + i];
        const int value = (quarter < 2 ? nibbles & 15 : nibbles >> 4) |
                          (high[i] >> (2 * quarter) & 3) << 4;
        out[quarter * 32 + i] = scale * scales[quarter * 2 + i / 16] * (value - 32);
      }
    }
  }
}

void decode_block(Encoding encoding, const uint8_t* block, float* out) {
  switch (encoding) {
    case Encoding::kQ4_0: {
      const float scale = read_half(block);
      return decode_4bit(block + 2, scale, -8 * scale, out);
    }
    case Encoding::kQ4_1:
      return decode_4bit(block + 4, read_half(block), read_half(block + 2), out);
    case Encoding::kQ5_0: {
      const float scale = read_half(block);
      return decode_5bit(block + 2, block + 6, scale, -16 * scale, out);
    }
    case Encoding::kQ5_1:
      return decode_5bit(block + 4, block + 8, read_half(block), read_half(block + 2), out);
    case Encoding::kQ8_0: {
      const float scale = read_half(block);
      for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<int8_t>(block[2 + i]);
      return;
    }
    case Encoding::kQ4_K: return decode_q4_k(block, out);
    case Encoding::kQ5_K: return decode_q5_k(block, out);
    case Encoding::kQ6_K: return decode_q6_k(block, out);
    default: return;  // the unblocked formats are decode_row's
  }
}

struct BlockShape { int values, bytes; };

BlockShape block_shape(Encoding encoding) {
  switch (encoding) {
    case Encoding::kQ4_0: return {32, 18};
    case Encoding::kQ4_1: return {32, 20};
    case Encoding::kQ5_0: return {32, 22};
    case Encoding::kQ5_1: return {32, 24};
    case Encoding::kQ8_0: return {32, 34};
    case Encoding::kQ4_K: return {256, 144};
    case Encoding::kQ5_K: return {256, 176};
    case Encoding::kQ6_K: return {256, 210};
    default: return {1, 0};
  }
}

}  // namespace

float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // Shifting into float32's fields leaves the exponent 112 too small; a product sets it right, for
  // subnormal halves too.
  return float_of(sign | bits_of(float_of(magnitude << 13) * float_of(0x77800000)));
}

uint16_t float_to_half(float value) {
  const uint32_t sign = bits_of(value) >> 16 & 0x8000;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 6.103515625e-05f)  // subnormal: a multiple of 2^-24
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(magnitude * 16777216.0f)));
  const uint32_t bits = bits_of(magnitude);
  const uint32_t rounded = bits + 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112 << 10)));
}

uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  if (std::isnan(value)) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void decode_q4_k_group(const uint8_t* row, int64_t group, uint8_t* values, float* scale,
                       float* minimum) {
  const uint8_t* block = row + group / 8 * 144;
  const int part = static_cast<int>(group % 8);
  int s, m;
  k_scale(block + 4, part, &s, &m);
  *scale = read_half(block) * s;
  *minimum = -read_half(block + 2) * m;
  const uint8_t* nibbles = block + 16 + part / 2 * 32;
  for (int i = 0; i < 32; ++i) values[i] = part % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
}

void decode_row(Encoding encoding, const uint8_t* row, int64_t count, float* out) {
  if (encoding == Encoding::kF32) {
    std::memcpy(out, row, count * sizeof(float));
    return;
  }
  if (encoding == Encoding::kF16 || encoding == Encoding::kBF16) {
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t bits = read_u16(row + 2 * i);
      out[i] = encoding == Encoding::kF16 ? half_to_float(bits)
                                          : float_of(static_cast<uint32_t>(bits) << 16);
    }
    return;
  }
  const BlockShape shape = block_shape(encoding);
  for (int64_t done = 0; done < count; done += shape.values, row += shape.bytes)
    decode_block(encoding, row, out + done);
}

}  // namespace octavo
