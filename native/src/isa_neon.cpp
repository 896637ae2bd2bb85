#include <arm_neon.h>

#include "kernel_table.h"

#define OCTAVO_BYTES 16
#define OCTAVO_ISA_NAME "neon"

namespace octavo::neon {
#include "kernels/table.h"
}  // namespace octavo::neon
