// Compiled without contraction of products and sums: the results are numpy's.
#include "sampling_state.h"

#include <cmath>
#include <limits>

namespace octavo {

namespace {

uint64_t scatter(uint64_t value) {
  value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
  value = (value ^ value >> 27) * 0x94D049BB133111EBu;
  return value ^ value >> 31;
}

}  // namespace

double uniform_draw(uint64_t seed, int64_t draw) {
  const uint64_t turn = (static_cast<uint64_t>(draw) + 1) * 0x9E3779B97F4A7C15u;
  return static_cast<double>(scatter(scatter(seed) + turn) >> 11) * 0x1p-53;
}

SamplingState::SamplingState(SamplingSettings settings, int64_t vocab,
                             const std::vector<int64_t>& prompt)
    : settings_(std::move(settings)), vocab_(vocab) {
  for (const int64_t id : prompt) slot(id);
}

void SamplingState::note_output(const std::vector<int64_t>& ids) {
  if (!settings_.counts_tokens) return;
  for (const int64_t id : ids) {
    const int64_t found = slot(id);
    if (found >= 0) counts_[found] += 1.0f;
  }
}

int64_t SamplingState::slot(int64_t id) {
  if (id < 0 || id >= vocab_) return -1;
  const auto [found, added] = slots_.try_emplace(id, static_cast<int64_t>(ids_.size()));
  if (added) {
    ids_.push_back(static_cast<int32_t>(id));
    counts_.push_back(0.0f);
  }
  return found->second;
}

bool SamplingState::changes_logits(int64_t draw) const {
  return settings_.counts_tokens || settings_.outside_vocab || !settings_.banned_ids.empty() ||
         !settings_.biased_ids.empty() ||
         (draw < settings_.min_tokens && !settings_.ending_ids.empty());
}

int64_t SamplingState::most_changed() const {
  return static_cast<int64_t>(settings_.ending_ids.size() + settings_.banned_ids.size() +
                              settings_.biased_ids.size() + ids_.size());
}

void SamplingState::apply(float* logits, int64_t draw, bool masked) const {
  constexpr float kBanned = -std::numeric_limits<float>::infinity();
  const SamplingSettings& s = settings_;
  if (bans_ending(draw, masked))
    for (const int32_t id : s.ending_ids) logits[id] = kBanned;
  for (const int32_t id : s.banned_ids) logits[id] = kBanned;
  for (size_t i = 0; i < s.biased_ids.size(); ++i) logits[s.biased_ids[i]] += s.biases[i];
  for (size_t i = 0; i < ids_.size(); ++i) {
    float seen = logits[ids_[i]];
    seen = seen > 0.0f ? seen / s.repetition : seen * s.repetition;
    seen -= s.frequency * counts_[i];
    seen -= counts_[i] > 0.0f ? s.presence : 0.0f;
    logits[ids_[i]] = seen;
  }
}

}  // namespace octavo
