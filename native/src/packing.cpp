#include "packing.h"

namespace octavo {

Weight::Weight(const KernelTable& kernels, Pool& pool, Format format, bool gated, int64_t inputs,
               const std::vector<SourcePart>& parts, const float* bias) {
  int64_t outputs = 0;
  for (const SourcePart& part : parts) outputs += part.rows;
  const int64_t groups = is_quantised(format) ? (inputs + kGroup - 1) / kGroup : 0;
  const int64_t width = gated ? kernels.lanes : 2 * kernels.lanes;
  const int64_t features = gated ? outputs / 2 : outputs;
  const int64_t panels = (features + width - 1) / width;
  const int64_t panel_bytes = kernels.panel_bytes(format, inputs);
  // Kernels prefetch past the end of the panel they read, which needs no memory, and never load
  // there; 64 bytes more keep vector loads of the last scales inside.
  data_ = Memory(panels * panel_bytes + 64);
  packed_ = {format, outputs, inputs, groups, panels, panel_bytes, gated, data_.data(), nullptr};
  if (bias) pack_bias(bias, kernels.lanes);
  const PackSource source{parts.data(), static_cast<int64_t>(parts.size())};
  pool.for_each(panels, 4, [&](int64_t first, int64_t last) {
    std::vector<float> scratch(inputs + kGroup);
    kernels.pack(packed_, source, data_.data(), first, last, scratch.data());
  });
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

}  // namespace octavo
