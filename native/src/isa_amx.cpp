#include <immintrin.h>

#include "kernel_table.h"

#define OCTAVO_BYTES 64
#define OCTAVO_MATRIX
#define OCTAVO_ISA_NAME "amx"

namespace octavo::amx {
#include "kernels/table.h"
}  // namespace octavo::amx
