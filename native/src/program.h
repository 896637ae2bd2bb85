// A decoder's step, recorded once as a line of operations and replayed in one call.
//
// Few tokens (decodes): each linear is cut by columns over the threads, which meet at a barrier
// after every operation. Many tokens (prefill): threads claim blocks of rows and carry each through
// all operations up to the next attention without a barrier, so weights are shared in the caches and
// activations stay with their thread. Either way, who has nothing left to do takes columns of others.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "batch.h"
#include "claims.h"
#include "kernel_table.h"
#include "kv_cache.h"
#include "memory.h"
#include "packing.h"
#include "pool.h"

namespace octavo {

enum class Rows : int { kTokens = 0, kLogits = 1 };  // of a buffer: one per token, or per logits row

struct Rope {
  std::vector<float> inv_freq;
  float magnitude;
};

// One operation. Which fields mean something depends on the kind.
struct Op {
  enum class Kind { kEmbed, kNorm, kLinear, kAdd, kGated, kRopeAndStore, kAttend, kTakeRows };

  Kind kind;
  int in = -1;
  int out = -1;
  int other = -1;                 // kAdd: second operand; kLinear: residual
  const Weight* weight = nullptr;
  const float* norm = nullptr;    // kNorm; kLinear: norm of the input first; null: none
  float eps = 0;
  float scale = 1;
  float softcap = 0;
  Gate gate = Gate::kNone;
  bool feeds_next = false;        // kLinear: the next operation is one too, and alone reads the result
  int64_t layer = 0;
  int rope = -1;
  int plan = -1;                  // attention plans are shared by layers with equal windows
  AttentionShape attention{};
};

class Program {
 public:
  // `policy` may change between steps.
  Program(const KernelTable& kernels, Pool& pool, KVCache& kv, const AttentionPolicy& policy);

  int buffer(int64_t features, Rows rows);
  int rope(Rope rope);
  void append(const Op& op);      // operations that follow one another must be appended in order

  // Runs a step and returns the last operation's buffer. Throws std::invalid_argument for a batch
  // whose indices leave their arrays.
  const float* run(Batch batch);
  int64_t result_features() const;

 private:
  struct Buffer {
    int64_t features;
    Rows rows;
    Memory data;
  };
  struct PlanKey { int64_t kv_heads, heads, window; };
  // Operations [first, last) that a block of rows passes through without needing other rows.
  struct Segment { size_t first, last; bool rows_only; };
  // What one thread works on: rows [begin, end) and its share of columns.
  struct Scratch {
    std::vector<float> normed;
    Memory prepared;
    Memory fed;                   // rows that an operation left prepared for the next
    Memory widened;
    Memory attention;
    std::vector<const float*> states;
  };
  struct alignas(64) Counter { std::atomic<int64_t> next{0}, done{0}; };
  // The linear that a thread computes of its block, for others to help with.
  struct Offer {
    Claims panels;
    std::atomic<const Op*> op{nullptr};
    std::atomic<int64_t> begin{0}, end{0};  // rows
  };

  void check(const Batch& batch) const;
  void reserve(const Batch& batch);
  void reserve_rows(int64_t tokens, int64_t logits);
  void plan_step(const Batch& batch);
  void cut_segments();

  void run_thread(int thread);
  void offer_columns(int thread);
  void compute_angles(int64_t begin, int64_t end);
  void run_blocks(const Segment& segment, Counter& counter, int thread);
  void run_by_columns(const Op& op, int thread);
  void linear_of_block(const Op& op, int64_t begin, int64_t end, int thread);
  bool help(int owner, int thread);
  void help_others(const Counter& counter, int thread);
  void linear_by_columns(const Op& op, int thread);
  void attend(const Op& op, Counter& counter, int thread);
  AttendArgs attend_args(const Op& op, const AttentionPlan& plan, const AttendItem& item,
                         int thread);
  void finish_item(const Op& op, const AttentionPlan& plan, const AttendItem& item, int thread);
  void join_states(const Op& op, const AttentionPlan& plan, const Join& join, int thread);

  void on_rows(const Op& op, int64_t begin, int64_t end, int thread);
  const uint8_t* prepare(const Op& op, int64_t begin, int64_t end, uint8_t* rows, int64_t place,
                         int thread);
  void gemm(const Op& op, const uint8_t* x, uint8_t* fed, int64_t begin, int64_t end,
            const Claims::Part& panels, int thread);

  float* row(int buffer, int64_t index) const;
  int64_t num_rows(Rows rows) const;
  int64_t rows_to_part() const;
  int64_t block_rows() const;
  Format rounded_to(const Op& op, bool many) const;
  Format rounded_to(const Op& op) const;
  bool feeds(const Op& op) const;
  bool is_fed(const Op& op) const;
  int64_t prepared_stride(const Op& op, Format rounded) const;
  bool is_in_place(const Op& op) const;

  const KernelTable& kernels_;
  Pool& pool_;
  KVCache& kv_;
  const AttentionPolicy& policy_;
  std::vector<Op> ops_;
  std::vector<Buffer> buffers_;
  std::vector<Rope> ropes_;
  std::vector<PlanKey> plan_keys_;
  int64_t vocab_ = INT64_MAX;
  int64_t max_prepared_ = 0;      // bytes of the widest prepared row
  int64_t max_inputs_ = 0;

  std::vector<Segment> segments_;
  std::vector<Scratch> scratch_;  // per thread
  Memory prepared_, fed_;         // shared by threads that split columns
  std::vector<Memory> angles_;    // per rope: [tokens][2][rotary / 2], cos then sin
  int64_t token_capacity_ = 0;
  int64_t logits_capacity_ = 0;

  // Of the step that runs.
  const Batch* batch_ = nullptr;
  std::vector<int32_t> places_;
  bool by_blocks_ = false;
  int64_t block_rows_ = 1;
  std::vector<AttentionPlan> plans_;
  std::unique_ptr<Counter[]> counters_;            // per segment
  std::vector<std::unique_ptr<Claims[]>> panels_;  // per operation, of linears by columns: per thread
  std::unique_ptr<Offer[]> offers_;                // per thread: of linears by blocks
  std::vector<std::unique_ptr<std::atomic<int64_t>[]>> items_left_;  // per plan and join
  std::vector<int64_t> joins_capacity_;
  Memory states_;
};

}  // namespace octavo
