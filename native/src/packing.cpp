#include "packing.h"

#include <atomic>
#include <stdexcept>
#include <utility>

#ifndef OCTAVO_PACKED_LAYOUT
#error "CMakeLists.txt defines OCTAVO_PACKED_LAYOUT, the digest of the files that decide a layout."
#endif

namespace octavo {

Weight::Weight(const KernelTable& kernels, Pool& pool, Arena& arena, const WeightShape& shape,
               const std::vector<SourcePart>& parts, const float* bias) {
  lay_out(kernels, shape);
  memory_ = arena.take(static_cast<size_t>(num_bytes_));
  packed_.data = memory_.data;
  if (bias) pack_bias(bias, kernels.lanes);
  const PackSource source{parts.data(), static_cast<int64_t>(parts.size())};
  std::atomic<bool> finite{true};
  pool.for_each(packed_.panels, 4, [&](int64_t first, int64_t last) {
    std::vector<float> scratch(shape.inputs + kGroup);
    if (!kernels.pack(packed_, source, memory_.data, first, last, scratch.data()))
      finite.store(false, std::memory_order_relaxed);
  });
  if (!finite)
    throw std::domain_error(
        "the matrix holds NaN, infinity, or values too large for scales in float16, so it cannot be "
        "quantised: the model's file is damaged, or needs --dtype float32.");
}

Weight::Weight(const KernelTable& kernels, const WeightShape& shape,
               std::shared_ptr<const MappedFile> file, int64_t offset, const float* bias)
    : file_(std::move(file)) {
  lay_out(kernels, shape);
  if (offset < 0 || offset % 64 != 0 || offset > file_->size() - num_bytes_)
    throw std::invalid_argument("The file holds no weight of this shape at this offset.");
  packed_.data = file_->data() + offset;
  if (bias) pack_bias(bias, kernels.lanes);
}

void Weight::lay_out(const KernelTable& kernels, const WeightShape& shape) {
  const int64_t groups = is_quantised(shape.format) ? (shape.inputs + kGroup - 1) / kGroup : 0;
  const int64_t width = shape.gated ? kernels.lanes : 2 * kernels.lanes;
  const int64_t features = shape.gated ? shape.outputs / 2 : shape.outputs;
  const int64_t panels = (features + width - 1) / width;
  const int64_t panel_bytes = kernels.panel_bytes(shape.format, shape.inputs);
  // Kernels prefetch past the end of the panel they read, which needs no memory, and never load
  // there; 64 bytes more keep vector loads of the last scales inside.
  num_bytes_ = panels * panel_bytes + 64;
  packed_ = {shape.format, shape.outputs, shape.inputs, groups, panels,
             panel_bytes,  shape.gated,   nullptr,      nullptr};
}

void Weight::pack_bias(const float* bias, int64_t lanes) {
  bias_.assign(packed_.panels * 2 * lanes, 0.0f);
  const int64_t half = packed_.outputs / 2;
  for (int64_t row = 0; row < packed_.outputs; ++row) {
    int64_t at = row;
    if (packed_.gated) {
      const int64_t in_half = row % half;
      at = in_half / lanes * 2 * lanes + in_half % lanes + (row >= half ? lanes : 0);
    }
    bias_[at] = bias[row];
  }
  packed_.bias = bias_.data();
}

const char* packed_layout() { return OCTAVO_PACKED_LAYOUT; }

}  // namespace octavo
