#include <immintrin.h>

#include "kernel_table.h"

#define OCTAVO_BYTES 64
#define OCTAVO_ISA_NAME "avx512bf16"

namespace octavo::avx512bf16 {
#include "kernels/table.h"
}  // namespace octavo::avx512bf16
