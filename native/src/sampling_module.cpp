// The Python face of the sampler.
#include "sampling_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>

#include "sampler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_logits(const Sampler& sampler, const Logits& logits) {
  if (static_cast<int64_t>(logits.shape(1)) != sampler.vocab())
    throw std::invalid_argument("Logits are of another vocabulary.");
}

nb::tuple tuple_of(int64_t token, const TokenScore& score) {
  return nb::make_tuple(token, score.best, score.logit, score.mass, score.rank, score.likeliest);
}

// Tokens, rows that failed with their status, and scores of rows that asked.
nb::tuple sample(Sampler& sampler, const Logits& logits, const std::vector<int64_t>& rows,
                 const std::vector<const SamplingState*>& states,
                 const std::vector<int64_t>& draws,
                 const std::vector<std::pair<int64_t, Mask>>& masks) {
  check_logits(sampler, logits);
  if (rows.size() != states.size() || draws.size() != states.size())
    throw std::invalid_argument("A state needs one row and one draw.");
  std::vector<SamplingRow> wanted(states.size());
  for (size_t i = 0; i < states.size(); ++i) {
    if (rows[i] < 0 || rows[i] >= static_cast<int64_t>(logits.shape(0)))
      throw std::invalid_argument("A row of logits does not exist.");
    wanted[i] = {logits.data() + rows[i] * sampler.vocab(), nullptr, states[i], draws[i]};
  }
  for (const auto& [i, mask] : masks) {
    if (static_cast<int64_t>(mask.size()) != (sampler.vocab() + 7) / 8)
      throw std::invalid_argument("A mask needs one bit per token.");
    wanted.at(i).mask = mask.data();
  }
  std::vector<SampledRow> sampled;
  {
    nb::gil_scoped_release release;
    sampled = sampler.sample(wanted);
  }
  std::vector<int32_t> tokens(sampled.size());
  nb::list failed, scores;
  for (size_t i = 0; i < sampled.size(); ++i) {
    tokens[i] = sampled[i].token;
    if (sampled[i].status != SamplingStatus::kOk)
      failed.append(nb::make_tuple(i, static_cast<int>(sampled[i].status)));
    else if (states[i]->settings().num_top >= 0)
      scores.append(nb::make_tuple(i, tuple_of(tokens[i], sampled[i].score)));
  }
  return nb::make_tuple(tokens, failed, scores);
}

// The status of the first row that failed, and the scores.
nb::tuple score(Sampler& sampler, const Logits& logits, const std::vector<int64_t>& tokens,
                int64_t num_top) {
  check_logits(sampler, logits);
  if (tokens.size() != logits.shape(0))
    throw std::invalid_argument("Each row of logits needs one token.");
  if (num_top < 0 || num_top > sampler.vocab())
    throw std::invalid_argument("So many likeliest tokens cannot be reported.");
  std::vector<ScoringRow> rows;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= sampler.vocab())
      throw std::invalid_argument("A token lies outside the vocabulary.");
    rows.push_back({logits.data() + i * sampler.vocab(), tokens[i]});
  }
  std::vector<SampledRow> scored;
  {
    nb::gil_scoped_release release;
    scored = sampler.score(rows, num_top);
  }
  nb::list scores;
  for (size_t i = 0; i < scored.size(); ++i) {
    if (scored[i].status != SamplingStatus::kOk)
      return nb::make_tuple(static_cast<int>(scored[i].status), nb::list());
    scores.append(tuple_of(tokens[i], scored[i].score));
  }
  return nb::make_tuple(0, scores);
}

void check_ids(const std::vector<int32_t>& ids, int64_t vocab) {
  for (const int32_t id : ids)
    if (id < 0 || id >= vocab) throw std::invalid_argument("A token lies outside the vocabulary.");
}

void check(const SamplingSettings& settings, int64_t vocab) {
  check_ids(settings.ending_ids, vocab);
  check_ids(settings.banned_ids, vocab);
  check_ids(settings.biased_ids, vocab);
  if (settings.biases.size() != settings.biased_ids.size())
    throw std::invalid_argument("Each biased token needs one bias.");
  if (settings.num_top > vocab)
    throw std::invalid_argument("So many likeliest tokens cannot be reported.");
}

}  // namespace

std::unique_ptr<Sampler> make_sampler(const KernelTable& kernels, Pool& pool, int64_t vocab) {
  if (vocab < 1 || vocab > kMaxVocab)
    throw std::invalid_argument("The sampler does not support a vocabulary of this size.");
  return std::make_unique<Sampler>(kernels, pool, vocab);
}

void bind_sampling(nb::module_& m) {
  using Ids = std::vector<int32_t>;
  nb::class_<SamplingState>(m, "SamplingState")
      .def("__init__",
           [](SamplingState* self, int64_t vocab, float factor, int64_t top_k, double top_p,
              float min_p, float repetition, float frequency, float presence, bool counts_tokens,
              int64_t min_tokens, int64_t num_top, uint64_t seed, Ids ending_ids, Ids banned_ids,
              Ids biased_ids, std::vector<float> biases, bool outside_vocab,
              const std::vector<int64_t>& prompt) {
             SamplingSettings settings{factor, top_k, top_p, min_p, repetition, frequency,
                                       presence, counts_tokens, min_tokens, num_top, seed,
                                       std::move(ending_ids), std::move(banned_ids),
                                       std::move(biased_ids), std::move(biases), outside_vocab};
             check(settings, vocab);
             new (self) SamplingState(std::move(settings), vocab, prompt);
           },
           nb::kw_only(), "vocab"_a, "factor"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition"_a,
           "frequency"_a, "presence"_a, "counts_tokens"_a, "min_tokens"_a, "num_top"_a, "seed"_a,
           "ending_ids"_a, "banned_ids"_a, "biased_ids"_a, "biases"_a, "outside_vocab"_a,
           "prompt"_a)
      .def("note_output", &SamplingState::note_output, "token_ids"_a);
  nb::class_<Sampler>(m, "Sampler")
      .def("sample", sample, "logits"_a, "rows"_a, "states"_a, "draws"_a, "masks"_a)
      .def("score", score, "logits"_a, "token_ids"_a, "num_top"_a);
}

}  // namespace octavo
