#include "kernel_table.h"

#define OCTAVO_BYTES 16
#define OCTAVO_ISA_NAME "portable"

namespace octavo::portable {
#include "kernels/table.h"
}  // namespace octavo::portable
