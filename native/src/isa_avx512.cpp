#include <immintrin.h>

#include "kernel_table.h"

#define OCTAVO_BYTES 64
#if defined(__AVX512VNNI__)
#define OCTAVO_ISA_NAME "avx512"
#else
#define OCTAVO_ISA_NAME "avx512-emulated"
#define OCTAVO_EMULATED  // see OCTAVO_EMULATE_AVX512
#endif

namespace octavo::avx512 {
#include "kernels/table.h"
}  // namespace octavo::avx512
