// Weights in the form that kernels read.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernel_table.h"
#include "mapped_file.h"
#include "memory.h"
#include "pool.h"

namespace octavo {

struct WeightShape {
  Format format;
  bool gated;           // as many rows of gate as of up
  int64_t outputs;
  int64_t inputs;
};

class Weight {
 public:
  // Packs the stacked `parts` on all threads. `bias` holds one value per output, or is null.
  Weight(const KernelTable& kernels, Pool& pool, Arena& arena, const WeightShape& shape,
         const std::vector<SourcePart>& parts, const float* bias);

  // Takes what an equal weight left at `offset` of a file that is known to be sound.
  Weight(const KernelTable& kernels, const WeightShape& shape,
         std::shared_ptr<const MappedFile> file, int64_t offset, const float* bias);

  const PackedWeight& packed() const { return packed_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  void lay_out(const KernelTable& kernels, const WeightShape& shape);
  void pack_bias(const float* bias, int64_t lanes);

  Arena::Piece memory_;                     // the panels are here,
  std::shared_ptr<const MappedFile> file_;  // or in here
  int64_t num_bytes_ = 0;
  std::vector<float> bias_;
  PackedWeight packed_;
};

// A digest of the source files that decide where packing puts each bit. Packed weights kept on
// disk belong to one such digest: nobody has to remember to count a version up.
const char* packed_layout();

}  // namespace octavo
