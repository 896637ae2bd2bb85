#include <immintrin.h>

#include "kernel_table.h"

#define OCTAVO_BYTES 32
#define OCTAVO_ISA_NAME "avxvnni"

namespace octavo::avxvnni {
#include "kernels/table.h"
}  // namespace octavo::avxvnni
