// The machine's ceilings, measured with the pool that steps run on.
#pragma once

#include <cstdint>

#include "attention_cost.h"
#include "kernel_table.h"
#include "pool.h"

namespace octavo {

double measure_barrier_ns(Pool& pool);                     // one barrier of all threads
double measure_read_gb_per_s(Pool& pool, const KernelTable& kernels, int64_t bytes);
double measure_peak_bytes(Pool& pool, const KernelTable& kernels);  // operations per second
double measure_peak_float(Pool& pool, const KernelTable& kernels);
double measure_peak_bfloats(Pool& pool, const KernelTable& kernels);

// What attention costs one thread of this machine, in nanoseconds: the constants of `AttentionCost`
// for these sizes. `heads` counts query heads per KV head.
AttentionCost measure_attention(const KernelTable& kernels, KVType type, int64_t heads,
                                int64_t dim);

}  // namespace octavo
