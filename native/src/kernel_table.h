// What a translation unit of one instruction set offers to the rest of the backend.
//
// Everything that crosses this border is plain data. Code compiled for one instruction set must not
// instantiate templates of the standard library: the linker keeps one copy of each for the whole
// extension, and that copy could use instructions that this CPU lacks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "encodings.h"

namespace octavo {

// How a packed weight holds its values. Groups are 32 consecutive inputs of one output.
enum class Format : int {
  kF32 = 0,
  kBF16 = 1,
  kI8Group = 2,    // int8, one float16 scale per group (GGUF Q8_0 as it is)
  kU4Group = 3,    // 4 bits less 8, one float16 scale per group (GGUF Q4_0 as it is)
  kU4GroupMin = 4, // 4 bits, float16 scale and minimum per group (GGUF Q4_1 as it is)
};

constexpr int64_t kGroup = 32;

constexpr bool is_quantised(Format format) { return format >= Format::kI8Group; }

// A matrix cut into panels of 2 * lanes outputs each. In a gated matrix a panel holds `lanes` rows
// of the gate and the same rows of up, so that activation(gate) * up never leaves registers.
struct PackedWeight {
  Format format;
  int64_t outputs;      // rows of the matrix (gate and up together)
  int64_t inputs;
  int64_t groups;       // ceil(inputs / 32); 0 for float formats
  int64_t panels;
  int64_t panel_bytes;
  bool gated;
  const uint8_t* data;
  const float* bias;    // per panel column, 0 in the padding; null: none

  int64_t features() const { return gated ? outputs / 2 : outputs; }
};

// A matrix as a file holds it, in parts that are stacked along the outputs.
struct SourcePart {
  Encoding encoding;
  const uint8_t* data;
  int64_t rows;
  int64_t row_bytes;
};

struct PackSource {
  const SourcePart* parts;
  int64_t num_parts;
};

constexpr bool has_nibbles(Format format) {
  return format == Format::kU4Group || format == Format::kU4GroupMin;
}

enum class Gate : int { kNone = 0, kSilu = 1, kGeluTanh = 2 };

struct GemmArgs {
  const uint8_t* x;     // rows, prepared for the weight's format or, if `is_bfloat`, as bfloat16
  int64_t x_stride;     // bytes, unless matrix registers take them
  int64_t rows;
  bool is_bfloat;
  int64_t first_panel;
  int64_t last_panel;
  float* out;           // first row
  int64_t out_stride;   // floats
  uint8_t* out_rows;    // instead: bfloat16 rows, as `quantise` prepares them; for whole groups that
                        // matrix registers compute, without tanh or a soft cap; null: `out`
  const float* residual;  // added to the result, same stride as out; null: none
  Gate gate;            // kNone unless the weight is gated
  float softcap;        // 0: none
  uint8_t* scratch;     // gemm_scratch(...) bytes, owned by the calling thread
};

// Rows of a matrix register, and rows that products by them take at once, also where fewer are left.
constexpr int64_t kMatrixRows = 16;
constexpr int64_t kPairRows = 2 * kMatrixRows;
constexpr int64_t kMatrixScratch = 64 << 10;

// Bytes of scratch that `gemm` needs: for a panel of nibbles, a byte each, or for matrix registers.
inline int64_t gemm_scratch(int64_t inputs, int64_t lanes) {
  const int64_t widened = (inputs + kGroup - 1) / kGroup * kGroup * 2 * lanes;
  return widened > kMatrixScratch ? widened : kMatrixScratch;
}

enum class KVType : int { kF32 = 0, kBF16 = 1, kI8 = 2 };

// The KV of one layer. For each block and head: keys [dim/2][padded slots][2] (bfloat16) or
// [dim][padded slots] (float32, int8), values [slots/2][dim][2] or [slots][dim]. Tokens lie across
// lanes in the keys and along them in the values, so neither product needs a horizontal sum.
// Behind int8 keys and values lie their float32 scales, one for each of the padded slots.
struct KVLayer {
  uint8_t* keys;        // of block 0, head 0
  uint8_t* values;
  int64_t block_bytes;  // from a block to the next, of all layers
  int64_t key_bytes;    // of one block and head, scales included
  int64_t value_bytes;
  int64_t key_scales;   // where the scales start within these bytes; int8 only
  int64_t value_scales;
  int64_t block_size;
  int64_t padded_slots; // block_size rounded up to whole vectors
  int64_t kv_heads;
  int64_t dim;
  KVType type;

  uint8_t* key(int64_t block, int64_t head) const {
    return keys + block * block_bytes + head * key_bytes;
  }
  uint8_t* value(int64_t block, int64_t head) const {
    return values + block * block_bytes + head * value_bytes;
  }
};

struct AttentionShape {
  int64_t heads;
  int64_t kv_heads;
  int64_t dim;
  float scale;
  float softcap;        // 0: none
  int64_t window;       // 0: none
  int64_t rotary_dim;
  const float* q_norm;  // null: none
  const float* k_norm;
  float norm_eps;
};

// Rotates q and k of one row of [q | k | v] and stores k and v. q stays in place.
struct RopeArgs {
  float* qkv;
  const float* cos;     // rotary_dim / 2 values, magnitude applied
  const float* sin;
  int64_t slot;
};

// Queries of some rows of the batch and all query heads of one KV head, over the tokens
// [first_token, last_token), which are the same in the sequences of all rows.
struct AttendArgs {
  const float* q;       // the KV head's first query head in the batch's row 0
  int64_t q_stride;     // floats from row to row
  const int32_t* positions;  // of the batch's rows
  const int32_t* row_ids;    // [rows]: rows of the batch; null: 0, 1, ...
  int64_t rows;
  const int32_t* block_table;
  int64_t kv_head;
  int64_t first_token;
  int64_t last_token;
  int64_t segment_units;  // vectors of slots after which a state ends and another starts; 0: none
  float* scratch;       // attend_scratch(...) floats, owned by the calling thread
  float* out;           // normalised result, laid out as q
  int64_t out_stride;
  float* partial;       // instead of `out`, the state of each segment: sums, maximum, weight sum as
                        // [segment][rows * heads per KV head][dim + 2]; null: `out`
  const AttendArgs* after;  // what this thread likely attends to next, whose first keys are asked
                            // for; only where its KV lies matters; null: unknown
};

// Tokens of a row of logits that are summed up by their maximum or their mass.
constexpr int64_t kTokenBlock = 64;

// Most tokens whose masses an int64 can add up (MAX_VOCAB in weights.py).
constexpr int64_t kMaxVocab = (1 << 18) + (1 << 17);

inline int64_t token_blocks(int64_t vocab) { return (vocab + kTokenBlock - 1) / kTokenBlock; }

struct LogitsRange {
  float best;           // the largest logit; meaningless if one is NaN
  bool has_nan;
};

struct KernelTable {
  const char* name;
  int lanes;            // floats in a vector
  bool bfloat_products; // rows that meet bfloat16 weights are prepared by `quantise`, too
  int64_t matrix_rows;  // from so many rows on, quantised weights had better meet bfloat16; 0: never

  // Packing. `pack` fills panels [first, last) of `weight.data`, which the caller allocated; false
  // where quantised weights or their scales are not finite.
  int64_t (*panel_bytes)(Format, int64_t inputs);
  bool (*pack)(const PackedWeight& weight, const PackSource& source, uint8_t* out,
               int64_t first, int64_t last, float* scratch);
  void (*unpack_row)(const PackedWeight& weight, int64_t row, float scale, float* out);

  // Rows.
  void (*quantise)(Format format, const float* x, int64_t inputs, uint8_t* rows, int64_t row);
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t size, float* out);
  void (*add)(const float* x, const float* y, int64_t size, float* out);
  void (*gated)(const float* gate_up, Gate gate, int64_t size, float* out);
  void (*join_states)(const float* const* states, int64_t count, int64_t dim, float* out);

  void (*gemm)(const PackedWeight& weight, const GemmArgs& args);
  void (*rope_and_store)(const KVLayer& kv, const AttentionShape& shape, const RopeArgs& args);
  void (*attend)(const KVLayer& kv, const AttentionShape& shape, const AttendArgs& args);

  // Rows of logits. A token's weight is exp2((logit - top) * factor), its mass the weight in whole
  // units of 2^-44: bit for bit the same in every set, and in numpy.
  //
  // `scan_logits` finds the largest logit of a row and, in `block_max`, of each block. With `copy`
  // the row is copied, and with `mask` (a bit a token) others become minus infinity in the copy;
  // the maxima of blocks are the copy's, `best` is the row's. A mask needs a copy.
  LogitsRange (*scan_logits)(const float* x, int64_t size, const uint8_t* mask, float* copy,
                             float* block_max);
  // The mass of each block.
  void (*weigh_blocks)(const float* x, int64_t size, const float* block_max, float top,
                       float factor, int64_t* masses);
  // Weight and mass of each of `size` logits.
  void (*weigh_tokens)(const float* x, int64_t size, float top, float factor, float* weights,
                       int64_t* masses);
  // Tokens whose logit is `cut` or more, ascending; returns their number.
  int64_t (*collect_tokens)(const float* x, int64_t size, const float* block_max, float cut,
                            int32_t* ids, float* logits);
  // Tokens with a larger logit than `token`, or an equal one and a lower id.
  int64_t (*count_ahead)(const float* x, int64_t size, const float* block_max, int64_t token);

  // The machine's ceilings. Loops return operations done; a float sink has 2 values.
  const char* byte_product;  // the instructions that multiply quantised activations
  int64_t (*spin_bytes)(int64_t rounds, float* sink);
  const char* bfloat_product;  // and those that meet bfloat16 weights
  int64_t (*spin_float)(int64_t rounds, float* sink);
  int64_t (*spin_bfloats)(int64_t rounds, float* sink);
  void (*read_stream)(const uint8_t* data, int64_t bytes, float* sink);
};

// Eight quads of activations, rounded to int8: value = step * (int8 + 128 * high), where only the
// group's widest quad has high parts. So one outlier does not coarsen the other values.
// A step is 2^e or 2^(e + 1/2).
struct ActivationGroup {
  union {
    float step;
    int32_t exponent;   // e, at the place of a float32's; sets that add it to the bits of scales
  };
  union {
    float total;        // sum of the group, in steps where steps are multiplied; kU4GroupMin
    int32_t start;      // what takes the offset of the weights away: added to the integer sums of
                        // kU4Group, to those of the high parts of kI8Group; other formats
  };
  uint8_t high[4];      // int8, of the widest quad
  uint16_t widest;      // its number, 0 to 7
  uint16_t has_root;    // 1 if the step is 2^(e + 1/2), else 0
};

// Bytes of one row of activations as `quantise` prepares it, padded to whole groups.
//   kBF16: bfloat16 values; where there are matrix registers, kPairRows rows together, group by group:
//   [rows / kPairRows][groups][kPairRows][kGroup]
//   quantised formats: int8 values, an ActivationGroup for each group, and a float: 0, or NaN where
//   the row holds what int8 cannot stand for
inline int64_t quantised_row_bytes(Format format, int64_t inputs) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  if (format == Format::kBF16) return groups * kGroup * 2;
  return groups * (kGroup + static_cast<int64_t>(sizeof(ActivationGroup))) + 4;
}

// Most tokens whose scores are held at once, and most query vectors of a tile (any set).
constexpr int64_t kScoreTokens = 128;
constexpr int64_t kMaxQueryTile = kMatrixRows;

// Floats of scratch that `attend` needs: the query tile, its scores, and state per query vector.
inline int64_t attend_scratch(int64_t query_vectors, int64_t dim) {
  const int64_t padded = (dim + 15) / 16 * 16 + 16;
  return (query_vectors + kMatrixRows) * (3 * padded + 8) + kMaxQueryTile * (kScoreTokens + padded) + 64;
}

}  // namespace octavo
