// The kernels of one instruction set, put together. Included inside its namespace.

#include "simd/vec.h"
#if defined(OCTAVO_MATRIX)
#include "simd/matrix.h"
#else
constexpr int64_t kMatrixFrom = 0;
#endif
#include "kernels/rows.h"
#include "kernels/tiles.h"
#include "kernels/activations.h"
#include "kernels/gemm.h"
#include "kernels/quantise4.h"
#include "kernels/pack.h"
#include "kernels/rope.h"
#include "kernels/attention.h"
#if defined(OCTAVO_MATRIX)
#include "kernels/matrix_gemm.h"
#include "kernels/matrix_attention.h"
#else
static void gemm(const PackedWeight& weight, const GemmArgs& args) { gemm_by_vectors(weight, args); }
static void attend(const KVLayer& kv, const AttentionShape& shape, const AttendArgs& args) {
  attend_by_vectors(kv, shape, args);
}
#endif
#include "kernels/logits.h"
#include "kernels/ceilings.h"

const KernelTable& table() {
  static constexpr KernelTable kTable = {
      OCTAVO_ISA_NAME, kLanes, kBfloatProducts, kMatrixFrom, panel_bytes, pack, unpack_row, quantise, rms_norm, add, gated,
      join_states, gemm, rope_and_store, attend,
      scan_logits, weigh_blocks, weigh_tokens, collect_tokens, count_ahead,
      kByteProduct, spin_bytes, kBfloatProduct, spin_float, spin_bfloats, read_stream,
  };
  return kTable;
}
