// The Python face of the backend. Arrays cross it as buffers; nothing keeps a Python object.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "isa.h"
#include "machine.h"
#include "mapped_file.h"
#include "measure.h"
#include "program.h"
#include "sampling_module.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace octavo;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;
using Panels = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>;
using Logits = nb::ndarray<nb::numpy, const float, nb::ndim<2>>;

// A norm's weight.
struct Vector {
  std::vector<float> values;
};

class Backend {
 public:
  Backend(const std::string& isa, int threads, const std::vector<int>& cpus, bool pin_caller)
      : kernels_(kernels_of(isa)), pool_(threads, cpus, pin_caller) {
    if (!kernels_) throw std::invalid_argument("This CPU does not run the kernels of " + isa + ".");
  }

  const KernelTable& kernels() const { return *kernels_; }
  Pool& pool() { return pool_; }
  Arena& arena() { return arena_; }

  KVCache& kv() {
    if (!kv_) throw std::logic_error("allocate_kv must be called first.");
    return *kv_;
  }

  AttentionPolicy& attention() { return attention_; }

  void allocate_kv(const KVShape& shape) { kv_.emplace(shape, kernels_->lanes); }

 private:
  const KernelTable* kernels_;
  Pool pool_;
  Arena arena_;
  std::optional<KVCache> kv_;
  AttentionPolicy attention_;
};

KVType checked_kv_type(int type) {
  if (type < 0 || type > static_cast<int>(KVType::kI8))
    throw std::invalid_argument("There is no number format of KV of this number.");
  return static_cast<KVType>(type);
}

Format checked_format(int format) {
  if (format < 0 || format > static_cast<int>(Format::kU4GroupMin))
    throw std::invalid_argument("There is no packed format of this number.");
  return static_cast<Format>(format);
}

void check_bias(const std::optional<Floats>& bias, int64_t outputs) {
  if (bias && static_cast<int64_t>(bias->shape(0)) != outputs)
    throw std::invalid_argument("A bias needs one value per output.");
}

std::unique_ptr<Weight> pack(Backend& backend, const std::vector<std::pair<int, Bytes>>& parts,
                             int64_t inputs, int format, bool gated, std::optional<Floats> bias) {
  std::vector<SourcePart> sources;
  int64_t outputs = 0;
  for (const auto& [encoding, data] : parts) {
    sources.push_back({static_cast<Encoding>(encoding), data.data(),
                       static_cast<int64_t>(data.shape(0)), static_cast<int64_t>(data.shape(1))});
    outputs += static_cast<int64_t>(data.shape(0));
  }
  check_bias(bias, outputs);
  const WeightShape shape{checked_format(format), gated, outputs, inputs};
  nb::gil_scoped_release release;
  return std::make_unique<Weight>(backend.kernels(), backend.pool(), backend.arena(), shape, sources,
                                  bias ? bias->data() : nullptr);
}

std::unique_ptr<Weight> map_weight(Backend& backend, std::shared_ptr<MappedFile> file,
                                   int64_t offset, int64_t outputs, int64_t inputs, int format,
                                   bool gated, std::optional<Floats> bias) {
  check_bias(bias, outputs);
  const WeightShape shape{checked_format(format), gated, outputs, inputs};
  return std::make_unique<Weight>(backend.kernels(), shape, std::move(file), offset,
                                  bias ? bias->data() : nullptr);
}

Op op_of(Op::Kind kind, int in, int out) {
  Op op{};
  op.kind = kind;
  op.in = in;
  op.out = out;
  return op;
}

void append_linear(Program& program, int in, int out, const Weight& weight, const Vector* norm,
                   float eps, int residual, int gate, float softcap, bool feeds_next) {
  Op op = op_of(Op::Kind::kLinear, in, out);
  op.weight = &weight;
  op.norm = norm ? norm->values.data() : nullptr;
  op.eps = eps;
  op.other = residual;
  op.gate = static_cast<Gate>(gate);
  op.softcap = softcap;
  op.feeds_next = feeds_next;
  program.append(op);
}

AttentionShape shape_of(const std::vector<int64_t>& sizes, float scale, float softcap,
                        const Vector* q_norm, const Vector* k_norm, float norm_eps) {
  AttentionShape shape{};
  shape.heads = sizes.at(0);
  shape.kv_heads = sizes.at(1);
  shape.dim = sizes.at(2);
  shape.window = sizes.at(3);
  shape.rotary_dim = sizes.at(4);
  shape.scale = scale;
  shape.softcap = softcap;
  shape.q_norm = q_norm ? q_norm->values.data() : nullptr;
  shape.k_norm = k_norm ? k_norm->values.data() : nullptr;
  shape.norm_eps = norm_eps;
  return shape;
}

Logits run(Program& program, const Ints& token_ids, const Ints& query_starts, const Ints& kv_lens,
           const Ints& block_tables, const Ints& logits_rows) {
  Batch batch{};
  batch.tokens = static_cast<int64_t>(token_ids.size());
  batch.sequences = static_cast<int64_t>(kv_lens.size());
  batch.table_width = block_tables.ndim() == 2 ? static_cast<int64_t>(block_tables.shape(1)) : 0;
  batch.logits = static_cast<int64_t>(logits_rows.size());
  if (static_cast<int64_t>(query_starts.size()) != batch.sequences + 1 ||
      static_cast<int64_t>(block_tables.size()) != batch.sequences * batch.table_width)
    throw std::invalid_argument("The batch's arrays do not fit together.");
  batch.token_ids = token_ids.data();
  batch.query_starts = query_starts.data();
  batch.kv_lens = kv_lens.data();
  batch.block_tables = block_tables.data();
  batch.logits_rows = logits_rows.data();
  const float* result;
  {
    nb::gil_scoped_release release;
    result = program.run(batch);
  }
  return Logits(result, {static_cast<size_t>(batch.logits),
                         static_cast<size_t>(program.result_features())});
}

// Items as (sequence, rows, KV head, first token, last token, whether states are joined).
using PlannedItem = std::tuple<int64_t, std::vector<int32_t>, int64_t, int64_t, int64_t, bool>;

// In the order and the groups in which threads take them.
std::vector<std::vector<PlannedItem>> plan_of(Backend& backend, const Ints& query_starts, const Ints& kv_lens,
                                 const Ints& block_tables, int64_t heads, int64_t window) {
  Batch batch{};
  batch.sequences = static_cast<int64_t>(kv_lens.size());
  batch.tokens = query_starts.data()[batch.sequences];
  batch.table_width = static_cast<int64_t>(block_tables.shape(1));
  batch.query_starts = query_starts.data();
  batch.kv_lens = kv_lens.data();
  batch.block_tables = block_tables.data();
  const KVShape& kv = backend.kv().shape();
  std::vector<int32_t> places;
  place_tokens(batch, kv.block_size, places);
  const AttentionWork work{kv.kv_heads,   heads, window, kv.block_size, backend.kernels().lanes,
                           attention_cost(backend.kernels(), kv.dim, kv.type)};
  const AttentionPlan plan =
      plan_attention(batch, work, backend.attention(), backend.pool().threads());
  std::vector<std::vector<PlannedItem>> claims(plan.claims.size() - 1);
  for (size_t claim = 0; claim < claims.size(); ++claim)
    for (int64_t i = plan.claims[claim]; i < plan.claims[claim + 1]; ++i) {
      const AttendItem& item = plan.items[i];
      const auto first = plan.row_ids.begin() + item.first_row;
      claims[claim].emplace_back(item.sequence, std::vector<int32_t>(first, first + item.rows),
                                 item.kv_head, item.first_token, item.last_token, item.joins > 0);
    }
  return claims;
}

void bind_program(nb::module_& m) {
  nb::class_<Program>(m, "Program")
      .def("__init__",
           [](Program* self, Backend& backend) {
             new (self) Program(backend.kernels(), backend.pool(), backend.kv(), backend.attention());
           },
           "backend"_a, nb::keep_alive<1, 2>())
      .def("buffer", [](Program& p, int64_t features, bool logits) {
        return p.buffer(features, logits ? Rows::kLogits : Rows::kTokens);
      }, "features"_a, "logits"_a)
      .def("rope", [](Program& p, const Floats& inv_freq, float magnitude) {
        const float* values = inv_freq.data();
        return p.rope({std::vector<float>(values, values + inv_freq.size()), magnitude});
      }, "inv_freq"_a, "magnitude"_a)
      .def("embed", [](Program& p, int out, const Weight& table, float scale) {
        Op op = op_of(Op::Kind::kEmbed, -1, out);
        op.weight = &table;
        op.scale = scale;
        p.append(op);
      }, "out"_a, "table"_a, "scale"_a, nb::keep_alive<1, 3>())
      .def("rms_norm", [](Program& p, int in, int out, const Vector& weight, float eps) {
        Op op = op_of(Op::Kind::kNorm, in, out);
        op.norm = weight.values.data();
        op.eps = eps;
        p.append(op);
      }, "x"_a, "out"_a, "weight"_a, "eps"_a, nb::keep_alive<1, 4>())
      .def("linear", append_linear, "x"_a, "out"_a, "weight"_a, "norm"_a.none(), "eps"_a,
           "residual"_a, "gate"_a, "softcap"_a, "feeds_next"_a, nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def("add", [](Program& p, int x, int y, int out) {
        Op op = op_of(Op::Kind::kAdd, x, out);
        op.other = y;
        p.append(op);
      }, "x"_a, "y"_a, "out"_a)
      .def("gated", [](Program& p, int in, int out, int gate) {
        Op op = op_of(Op::Kind::kGated, in, out);
        op.gate = static_cast<Gate>(gate);
        p.append(op);
      }, "x"_a, "out"_a, "gate"_a)
      .def("rope_and_store",
           [](Program& p, int qkv, int64_t layer, int rope, const std::vector<int64_t>& sizes,
              const Vector* q_norm, const Vector* k_norm, float norm_eps) {
             Op op = op_of(Op::Kind::kRopeAndStore, qkv, qkv);
             op.layer = layer;
             op.rope = rope;
             op.attention = shape_of(sizes, 1.0f, 0.0f, q_norm, k_norm, norm_eps);
             p.append(op);
           },
           "qkv"_a, "layer"_a, "rope"_a, "sizes"_a, "q_norm"_a.none(), "k_norm"_a.none(),
           "norm_eps"_a, nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>())
      .def("attend",
           [](Program& p, int q, int out, int64_t layer, const std::vector<int64_t>& sizes,
              float scale, float softcap) {
             Op op = op_of(Op::Kind::kAttend, q, out);
             op.layer = layer;
             op.attention = shape_of(sizes, scale, softcap, nullptr, nullptr, 0.0f);
             p.append(op);
           },
           "q"_a, "out"_a, "layer"_a, "sizes"_a, "scale"_a, "softcap"_a)
      .def("take_rows", [](Program& p, int in, int out) {
        p.append(op_of(Op::Kind::kTakeRows, in, out));
      }, "x"_a, "out"_a)
      .def("run", run, "token_ids"_a, "query_starts"_a, "kv_lens"_a, "block_tables"_a,
           "logits_rows"_a,
           nb::rv_policy::reference_internal);  // a view: automatic would copy
}

void bind_backend(nb::module_& m) {
  nb::class_<MappedFile>(m, "MappedFile").def(nb::init<int>(), "descriptor"_a);
  nb::class_<Weight>(m, "Weight")
      .def_prop_ro("num_bytes", &Weight::num_bytes)
      .def_prop_ro("panels", [](const Weight& w) {
        return Panels(w.packed().data, {static_cast<size_t>(w.num_bytes())});
      }, nb::rv_policy::reference_internal);
  nb::class_<Vector>(m, "Vector").def(
      "__init__",
      [](Vector* self, const Floats& values) {
        new (self) Vector{std::vector<float>(values.data(), values.data() + values.size())};
      },
      "values"_a);
  nb::class_<Backend>(m, "Backend")
      .def(nb::init<const std::string&, int, const std::vector<int>&, bool>(), "isa"_a, "threads"_a,
           "cpus"_a, "pin_caller"_a)
      .def_prop_ro("isa", [](const Backend& b) { return std::string(b.kernels().name); })
      .def_prop_ro("threads", [](Backend& b) { return b.pool().threads(); })
      .def("pack", pack, "parts"_a, "inputs"_a, "format"_a, "gated"_a, "bias"_a.none())
      .def("map", map_weight, "file"_a, "offset"_a, "outputs"_a, "inputs"_a, "format"_a, "gated"_a,
           "bias"_a.none())
      .def("checksums", [](Backend& b, const MappedFile& file, int64_t bytes) {
        nb::gil_scoped_release release;
        return piece_checksums(b.pool(), file, bytes);
      }, "file"_a, "num_bytes"_a)
      .def("allocate_kv", [](Backend& b, int64_t layers, int64_t kv_heads, int64_t dim,
                             int64_t block_size, int64_t blocks, int type) {
        b.allocate_kv({layers, kv_heads, dim, block_size, blocks, checked_kv_type(type)});
      }, "layers"_a, "kv_heads"_a, "dim"_a, "block_size"_a, "blocks"_a, "type"_a)
      .def("populate_kv", [](Backend& b, int64_t lead) {
        if (lead < 0) throw std::invalid_argument("A lead has no less than 0 bytes.");
        b.kv().populate(lead);
      }, "lead"_a)
      .def("kv_block_bytes", [](Backend& b, int64_t layers, int64_t kv_heads, int64_t dim,
                                int64_t block_size, int type) {
        return kv_block_bytes({layers, kv_heads, dim, block_size, 1, checked_kv_type(type)},
                              b.kernels().lanes);
      }, "layers"_a, "kv_heads"_a, "dim"_a, "block_size"_a, "type"_a)
      .def("set_attention", [](Backend& b, bool split, bool share, bool deterministic) {
        b.attention() = {split, share, deterministic};
      }, "split"_a, "share"_a, "deterministic"_a)
      .def("plan_attention", plan_of, "query_starts"_a, "kv_lens"_a, "block_tables"_a, "heads"_a,
           "window"_a)
      .def("copy_block", [](Backend& b, int64_t source, int64_t target) {
        const int64_t blocks = b.kv().shape().blocks;
        if (source < 0 || source >= blocks || target < 0 || target >= blocks)
          throw std::invalid_argument("A block id lies outside the KV cache.");
        b.kv().copy_block(source, target);
      }, "source"_a, "target"_a)
      .def("sampler", [](Backend& b, int64_t vocab) {
        return make_sampler(b.kernels(), b.pool(), vocab);
      }, "vocab"_a, nb::keep_alive<0, 1>())
      .def("attention_costs", [](Backend& b, int type, int64_t heads, int64_t dim, bool measured) {
        const KVType kv_type = checked_kv_type(type);
        const AttentionCost cost =
            measured ? measure_attention(b.kernels(), kv_type, heads, dim)
                     : attention_cost(b.kernels(), dim, kv_type);
        return std::vector<double>{cost.item, cost.token, cost.tile_token, cost.vector_token,
                                   cost.state};
      }, "type"_a, "heads"_a, "dim"_a, "measured"_a)
      .def("barrier_ns", [](Backend& b) { return measure_barrier_ns(b.pool()); })
      .def("read_gb_per_s", [](Backend& b, int64_t bytes) {
        return measure_read_gb_per_s(b.pool(), b.kernels(), bytes);
      }, "num_bytes"_a)
      .def("matrix_rows", [](Backend& b) { return b.kernels().matrix_rows; })
      .def("byte_product", [](Backend& b) { return std::string(b.kernels().byte_product); })
      .def("peak_byte_ops", [](Backend& b) { return measure_peak_bytes(b.pool(), b.kernels()); })
      .def("bfloat_product", [](Backend& b) { return std::string(b.kernels().bfloat_product); })
      .def("peak_bfloat_ops",
           [](Backend& b) { return measure_peak_bfloats(b.pool(), b.kernels()); })
      .def("peak_float_ops", [](Backend& b) { return measure_peak_float(b.pool(), b.kernels()); });
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Kernels, thread pool and step programs of the native backend.";
  m.def("available_isas", available_isas);
  m.def("usable_cpus", usable_cpus);
  m.def("usable_threads", usable_threads, "cgroups"_a = "/sys/fs/cgroup",
        "memberships"_a = "/proc/self/cgroup");
  m.def("packed_layout", packed_layout);
  bind_sampling(m);
  bind_backend(m);
  bind_program(m);
}
