// Weights in the form that kernels read.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel_table.h"
#include "memory.h"
#include "pool.h"

namespace octavo {

class Weight {
 public:
  // Packs the stacked `parts` on all threads. `bias` holds one value per output, or is null.
  // A gated weight has as many rows of gate as of up.
  Weight(const KernelTable& kernels, Pool& pool, Format format, bool gated, int64_t inputs,
         const std::vector<SourcePart>& parts, const float* bias);

  const PackedWeight& packed() const { return packed_; }
  int64_t num_bytes() const { return static_cast<int64_t>(data_.size()); }

 private:
  void pack_bias(const float* bias, int64_t lanes);

  Memory data_;
  std::vector<float> bias_;
  PackedWeight packed_;
};

}  // namespace octavo
