// Vectors of 64 bytes on a CPU without AVX-512: the same meaning in plain vector arithmetic, so that
// tests reach the layouts of 16 lanes. Slow, and only built with OCTAVO_EMULATE_AVX512.

// The weights' bytes are unsigned, the activations' are signed.
OCTAVO_INLINE I dot_bytes(I sum, B weights, B x) {
  const I w = reinterpret_cast<I>(weights), v = reinterpret_cast<I>(x);
  return sum + (w & 255) * (v << 24 >> 24) + (w >> 8 & 255) * (v << 16 >> 24) +
         (w >> 16 & 255) * (v << 8 >> 24) + (w >> 24 & 255) * (v >> 24);
}
OCTAVO_INLINE I dot_nibbles(I sum, B weights, B x) { return dot_bytes(sum, weights, x); }
OCTAVO_INLINE F load_half(const uint16_t* from) { return load_half_by_shifts(from); }
// As the instructions do, the second operand where one is NaN.
OCTAVO_INLINE F larger(F a, F b) { return choose(a > b, a, b); }
OCTAVO_INLINE F smaller(F a, F b) { return choose(a < b, a, b); }
// An estimate of 14 bits, infinite for 0, and the Newton step that follows it.
OCTAVO_INLINE F rough_reciprocal(F x) { return as_float(as_int(1.0f / x) & ~0x3ff); }
OCTAVO_INLINE F reciprocal(F x) {
  const F estimate = rough_reciprocal(x);
  return estimate * (2.0f - x * estimate);
}
