#include <immintrin.h>

#include "kernel_table.h"

#define OCTAVO_BYTES 32
#define OCTAVO_ISA_NAME "avx2"

namespace octavo::avx2 {
#include "kernels/table.h"
}  // namespace octavo::avx2
