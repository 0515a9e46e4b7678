#include "core/model/context_plan.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/model/from_config.h"

namespace moesaic {
namespace {

double core_flops(const ModelOptions& options, std::int64_t tokens, bool dense_warmup) {
  double sum = 0;
  for (std::size_t l = 0; l < options.layers.size(); ++l)
    sum += static_cast<double>(layer_core_flops(options, l, tokens, dense_warmup));
  return sum;
}

// The sum of f(keys that a token sees) over tokens [begin, end) of sequences of `sequence` tokens; f is linear up to `kink`
// and beyond it.
double over_tokens(std::int64_t begin,
                   std::int64_t end,
                   std::int64_t sequence,
                   std::int64_t kink,
                   const std::function<double(std::int64_t)>& f) {
  double sum = 0;
  while (begin < end) {
    const std::int64_t first = begin % sequence + 1;
    std::int64_t n = std::min(end - begin, sequence - first + 1);
    if (first <= kink) n = std::min(n, kink - first + 1);
    sum += (f(first) + f(first + n - 1)) / 2 * static_cast<double>(n);
    begin += n;
  }
  return sum;
}

}  // namespace

double ContextPlan::Phase::busiest_over_mean() const {
  const double sum = std::accumulate(work.begin(), work.end(), 0.0);
  return *std::max_element(work.begin(), work.end()) * static_cast<double>(work.size()) / sum;
}

std::optional<ContextPlan> plan_context(const config::Config& config, const ModelPlan& plan) {
  const std::int64_t pieces = config.parallel.cp;
  if (pieces <= 1) return std::nullopt;
  const ModelOptions o = model_options(config);
  const MlaOptions& mla = o.mla;
  const auto full = static_cast<double>(std::count_if(
      o.layers.begin(), o.layers.end(), [](const LayerOptions& l) { return !l.is_kda; }));
  const double keys_of_token =
      full * 2.0 *
      static_cast<double>(mla.kv_lora_rank * mla.heads * (mla.qk_nope_dim + mla.v_dim));
  ContextPlan context;
  for (const PhasePlan& phase : plan.phases) {
    const bool warmup = phase.dense_warmup;
    const double products =
        static_cast<double>(phase.forward_flops) - core_flops(o, phase.sequence_length, warmup);
    // layer_core_flops() takes the length of a sequence, whose tokens see half of it on average.
    const auto of_token = [&](std::int64_t keys) {
      return products + core_flops(o, 2 * keys, warmup);
    };
    // The indexer's queries are lent so that both of a pair have the same (query_loan()).
    const double score =
        mla.indexer
            ? full * static_cast<double>(mla.indexer->heads * 2 * (mla.indexer->head_dim + 1))
            : 0.0;
    std::vector<double> scores;
    ContextPlan::Phase p;
    p.piece_tokens = phase.micro_batch_size * phase.sequence_length / pieces;
    for (std::int64_t r = 0; r < pieces; ++r) {
      const std::int64_t begin = r * p.piece_tokens;
      p.work.push_back(over_tokens(begin,
                                   begin + p.piece_tokens,
                                   phase.sequence_length,
                                   mla.indexer && !warmup ? mla.indexer->top_k : 0,
                                   of_token) +
                       keys_of_token * static_cast<double>(begin));
    }
    for (std::int64_t r = 0; r < pieces; ++r)
      scores.push_back(
          over_tokens(r * p.piece_tokens,
                      (r + 1) * p.piece_tokens,
                      phase.sequence_length,
                      0,
                      [&](std::int64_t keys) { return score * static_cast<double>(keys); }));
    for (std::size_t r = 0; r < p.work.size(); ++r)
      p.work[r] += (scores[scores.size() - 1 - r] - scores[r]) / 2;
    context.phases.push_back(std::move(p));
  }
  return context;
}

}  // namespace moesaic
