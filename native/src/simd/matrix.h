// Matrix registers (AMX): eight of up to 16 rows of 64 bytes, numbered 0 to 7.
//
// A product adds to the floats sum[m][n], 16 x 16, the products of row m of `left` and column n of
// `right`: of the pairs left[m][k] and right[k][n] of bfloat16, for 16 k.

constexpr int kMatrixBytes = 64;  // of a row
constexpr int64_t kMatrixFrom = 10;  // rows, from which on widening weights for them pays

// Registers 0 to 5 have `rows` rows, 5 perhaps shorter ones, 6 has 16, and 7 perhaps fewer.
struct MatrixShape {
  int rows = kMatrixRows;
  int fifth_bytes = kMatrixBytes;
  int seventh_rows = kMatrixRows;
};

#if defined(__AMX_BF16__)

// Gives a thread the registers for as long as this lives. All instructions are assembly that clobbers
// memory: gcc 12 does not know what its intrinsics read and write.
class MatrixRegisters {
 public:
  OCTAVO_MEMBER explicit MatrixRegisters(const MatrixShape& shape) {
    struct alignas(64) {
      uint8_t palette, start_row, zero[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = static_cast<uint16_t>(i == 5 ? shape.fifth_bytes : kMatrixBytes);
      config.rows[i] = static_cast<uint8_t>(i < 6 ? shape.rows : i == 6 ? kMatrixRows : shape.seventh_rows);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  OCTAVO_MEMBER ~MatrixRegisters() { __asm__ volatile("tilerelease" : : : "memory"); }
  MatrixRegisters(const MatrixRegisters&) = delete;
  MatrixRegisters& operator=(const MatrixRegisters&) = delete;
};

template <int to>
OCTAVO_INLINE void load_matrix(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(to) : "memory");
}
// What will not be read again soon: other lines stay in the first-level cache.
template <int to>
OCTAVO_INLINE void stream_matrix(const void* from, int64_t stride) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(to) : "memory");
}
template <int from>
OCTAVO_INLINE void store_matrix(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(from) : "memory");
}
template <int to>
OCTAVO_INLINE void clear_matrix() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(to) : "memory");
}
template <int sum, int left, int right>
OCTAVO_INLINE void multiply_matrices() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(left), "i"(right) : "memory");
}

#else

// The same registers in memory, so that tests reach what uses them on any machine: see
// OCTAVO_EMULATE_AVX512.
struct EmulatedMatrices {
  MatrixShape shape;
  uint8_t rows[8][kMatrixRows][kMatrixBytes];

  int num_rows(int i) const {
    return i < 6 ? shape.rows : i == 6 ? static_cast<int>(kMatrixRows) : shape.seventh_rows;
  }
  int num_bytes(int i) const { return i == 5 ? shape.fifth_bytes : kMatrixBytes; }
};
static thread_local EmulatedMatrices emulated_matrices;

struct MatrixRegisters {
  explicit MatrixRegisters(const MatrixShape& shape) {
    emulated_matrices = {};
    emulated_matrices.shape = shape;
  }
};

template <int to>
OCTAVO_INLINE void load_matrix(const void* from, int64_t stride) {
  EmulatedMatrices& all = emulated_matrices;
  __builtin_memset(all.rows[to], 0, sizeof all.rows[to]);
  for (int m = 0; m < all.num_rows(to); ++m)
    __builtin_memcpy(all.rows[to][m], static_cast<const uint8_t*>(from) + m * stride, all.num_bytes(to));
}
template <int to>
OCTAVO_INLINE void stream_matrix(const void* from, int64_t stride) { load_matrix<to>(from, stride); }
template <int from>
OCTAVO_INLINE void store_matrix(void* to, int64_t stride) {
  const EmulatedMatrices& all = emulated_matrices;
  for (int m = 0; m < all.num_rows(from); ++m)
    __builtin_memcpy(static_cast<uint8_t*>(to) + m * stride, all.rows[from][m], all.num_bytes(from));
}
template <int to>
OCTAVO_INLINE void clear_matrix() {
  __builtin_memset(emulated_matrices.rows[to], 0, sizeof emulated_matrices.rows[to]);
}
// In the order of the instruction: products of first and of second halves of pairs are summed apart.
template <int sum, int left, int right>
OCTAVO_INLINE void multiply_matrices() {
  EmulatedMatrices& all = emulated_matrices;
  for (int m = 0; m < all.num_rows(sum); ++m) {
    F halves[2] = {};
    for (int k = 0; k < all.num_bytes(left) / 4; ++k) {
      uint32_t pair;
      __builtin_memcpy(&pair, all.rows[left][m] + 4 * k, 4);
      const U x = pair - U{}, weights = load_u32(all.rows[right][k]);
      halves[0] += lower_half(x) * lower_half(weights);
      halves[1] += upper_half(x) * upper_half(weights);
    }
    auto* to = reinterpret_cast<float*>(all.rows[sum][m]);
    store(to, load(to) + (halves[0] + halves[1]));
  }
}

#endif
