#include <immintrin.h>

#include "kernel_table.h"

#define OCTAVO_BYTES 64
#define OCTAVO_MATRIX
#if defined(__AMX_BF16__)
#define OCTAVO_ISA_NAME "amx"
#else
#define OCTAVO_ISA_NAME "amx-emulated"
#define OCTAVO_EMULATED  // see OCTAVO_EMULATE_AVX512
#endif

namespace octavo::amx {
#include "kernels/table.h"
}  // namespace octavo::amx
