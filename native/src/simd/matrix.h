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

#endif
