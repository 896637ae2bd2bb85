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

// Decodes `count` values of a row; `count` is a multiple of the encoding's block.
void decode_row(Encoding encoding, const uint8_t* row, int64_t count, float* out);

}  // namespace octavo
