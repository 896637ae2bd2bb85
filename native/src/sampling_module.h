// The Python face of the sampler.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "kernel_table.h"
#include "pool.h"
#include "sampler.h"

namespace octavo {

// Throws std::invalid_argument if masses of so many tokens could overflow.
std::unique_ptr<Sampler> make_sampler(const KernelTable& kernels, Pool& pool, int64_t vocab);

void bind_sampling(nanobind::module_& m);

}  // namespace octavo
