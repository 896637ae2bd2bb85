// Quantising a group of 32 weights to 4 bits: value = scale * q + minimum, with q from 0 to 15.
//
// A search for the least squared error: for each of a few step widths around the one that just
// spans the group, values are rounded and the line through the pairs (q, value) is fitted, which
// moves scale and minimum to where the rounded values lie best. What counts is the error with both
// as the float16 numbers that are kept, and the values rounded once more to them. (The idea of the
// search is llama.cpp's, in make_qkx2_quants.)

struct U4Group {
  uint8_t values[kGroup];
  float scale;
  float minimum;
};

// A sum over a group, in 8 partial sums so that it needs no order of its own.
struct GroupSum {
  float parts[8] = {};
  float total() const {
    float sum = 0;
    for (float part : parts) sum += part;
    return sum;
  }
};

// Rounds (x - minimum) / scale into `levels`, whole numbers from 0 to 15.
OCTAVO_INLINE void round_levels(const float* x, float scale, float minimum, float* levels) {
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const float level = __builtin_rintf((x[i] - minimum) * inverse);
    const float from_0 = level > 0.0f ? level : 0.0f;
    levels[i] = from_0 < 15.0f ? from_0 : 15.0f;
  }
}

OCTAVO_INLINE float squared_error(const float* x, const float* levels, float scale,
                                  float minimum) {
  GroupSum sum;
  for (int i = 0; i < kGroup; i += 8)
    for (int j = 0; j < 8; ++j) {
      const float error = scale * levels[i + j] + minimum - x[i + j];
      sum.parts[j] += error * error;
    }
  return sum.total();
}

// The line through (levels, x); false if the levels are all one.
OCTAVO_INLINE bool fit_line(const float* x, const float* levels, float* scale, float* minimum) {
  GroupSum sum_l, sum_ll, sum_x, sum_lx;
  for (int i = 0; i < kGroup; i += 8)
    for (int j = 0; j < 8; ++j) {
      const float level = levels[i + j], value = x[i + j];
      sum_l.parts[j] += level;
      sum_ll.parts[j] += level * level;
      sum_x.parts[j] += value;
      sum_lx.parts[j] += level * value;
    }
  const float l = sum_l.total(), values = sum_x.total();
  const float spread = kGroup * sum_ll.total() - l * l;
  if (!(spread > 0)) return false;
  *scale = (kGroup * sum_lx.total() - l * values) / spread;
  *minimum = (values - *scale * l) / kGroup;
  return true;
}

OCTAVO_INLINE float as_half(float value) { return half_to_float(float_to_half(value)); }

static void quantise_u4(const float* x, U4Group* out) {
  constexpr int kTries = 9;
  float least = x[0], most = x[0];
  for (int i = 1; i < kGroup; ++i) {
    least = x[i] < least ? x[i] : least;
    most = x[i] > most ? x[i] : most;
  }
  float best_error = -1, best[kGroup], levels[kGroup];
  for (int i = 0; i < kTries; ++i) {
    // From 14 to 16 steps in the span: the outermost values may lie half a step off.
    const float steps = 14.0f + 0.25f * static_cast<float>(i);
    float scale = (most - least) / steps, minimum = least;
    round_levels(x, scale, minimum, levels);
    fit_line(x, levels, &scale, &minimum);
    scale = as_half(scale);
    minimum = as_half(minimum);
    round_levels(x, scale, minimum, levels);
    const float error = squared_error(x, levels, scale, minimum);
    if (i > 0 && !(error < best_error)) continue;
    best_error = error;
    out->scale = scale;
    out->minimum = minimum;
    __builtin_memcpy(best, levels, sizeof best);
  }
  for (int i = 0; i < kGroup; ++i) out->values[i] = static_cast<uint8_t>(best[i]);
}
