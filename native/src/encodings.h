// Number formats of GGUF files, decoded to float32.
#pragma once

#include <cstdint>

namespace octavo {

enum class Encoding : int {
  kF32 = 0, kF16, kBF16, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K,
};

float half_to_float(uint16_t half);
uint16_t float_to_half(float value);        // round to nearest even; too large becomes infinity
uint16_t float_to_bfloat16(float value);    // round to nearest even; NaN stays NaN

// Takes group `group` (32 values) of a Q4_K row apart: value = scale * values[i] + minimum.
void decode_q4_k_group(const uint8_t* row, int64_t group, uint8_t* values, float* scale,
                       float* minimum);

// Decodes `count` values of a row; `count` is a multiple of the encoding's block.
void decode_row(Encoding encoding, const uint8_t* row, int64_t count, float* out);

}  // namespace octavo
