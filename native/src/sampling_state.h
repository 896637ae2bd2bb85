// What the sampler knows of one sequence.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace octavo {

// What a request asks for, checked by the caller.
struct SamplingSettings {
  float factor;          // log2(e) / temperature; 0: greedy
  int64_t top_k;         // 0: all
  double top_p;
  float min_p;
  float repetition;
  float frequency;
  float presence;
  bool counts_tokens;    // whether any penalty is set
  int64_t min_tokens;
  int64_t num_top;       // likeliest tokens reported with each token; -1: no logprobs
  uint64_t seed;
  std::vector<int32_t> ending_ids;
  std::vector<int32_t> banned_ids;
  std::vector<int32_t> biased_ids;
  std::vector<float> biases;
  bool outside_vocab;    // whether a bias names a token that is none
};

class SamplingState {
 public:
  // `prompt` are tokens that the repetition penalty is to see.
  SamplingState(SamplingSettings settings, int64_t vocab, const std::vector<int64_t>& prompt);

  const SamplingSettings& settings() const { return settings_; }

  // Counts tokens of the output.
  void note_output(const std::vector<int64_t>& ids);

  // Whether bans, bias or penalties change the logits of output token `draw`.
  bool changes_logits(int64_t draw) const;

  // Applies them. A mask has settled the bans of `min_tokens`.
  void apply(float* logits, int64_t draw, bool masked) const;

  // At most so many tokens are changed, and these.
  int64_t most_changed() const;
  template <typename Body>
  void over_changed(int64_t draw, bool masked, Body body) const {
    if (bans_ending(draw, masked))
      for (const int32_t id : settings_.ending_ids) body(id);
    for (const int32_t id : settings_.banned_ids) body(id);
    for (const int32_t id : settings_.biased_ids) body(id);
    for (const int32_t id : ids_) body(id);
  }

 private:
  bool bans_ending(int64_t draw, bool masked) const {
    return !masked && draw < settings_.min_tokens;
  }
  int64_t slot(int64_t id);  // where a token is counted; -1: no token of the vocabulary

  SamplingSettings settings_;
  int64_t vocab_;
  std::unordered_map<int64_t, int64_t> slots_;
  std::vector<int32_t> ids_;     // tokens seen, prompt included if repetition is penalised
  std::vector<float> counts_;    // how often each is in the output
};

// Draw `draw` of the stream of `seed`, in [0, 1): SplitMix64, as in random_stream.py.
double uniform_draw(uint64_t seed, int64_t draw);

}  // namespace octavo
