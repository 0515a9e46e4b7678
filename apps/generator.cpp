#include "apps/generator.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "core/base/random.h"
#include "core/data/batch.h"
#include "core/data/token_source.h"

namespace moesaic::apps {
namespace {

constexpr std::int64_t kSmallestWindow = 32;

// Short contexts run in short windows: powers of two up to the training length.
std::int64_t window_for(std::int64_t tokens, std::int64_t context) {
  std::int64_t window = kSmallestWindow;
  while (window < tokens)
    window *= 2;
  return std::min(window, context);
}

LoadedModel::Options model_options(const config::Config& config,
                                   const std::filesystem::path& checkpoint,
                                   bool average) {
  LoadedModel::Options options{.checkpoint = checkpoint,
                               .average = average,
                               .device = resolve_device(config),
                               .windows = {}};
  const std::int64_t context = config.data.sequence_length;
  for (std::int64_t tokens = 1;;) {
    const std::int64_t window = window_for(tokens, context);
    options.windows.push_back({.tokens = window, .longest = window, .documents = 2});
    if (window == context) return options;
    tokens = window + 1;
  }
}

// The rest of the window is a document of its own, which the context cannot see.
data::Batch batch_of(std::span<const std::int32_t> tokens, std::int64_t window) {
  data::Batch batch = data::make_batch(window, 1);
  batch.num_samples = 1;
  batch.tokens.assign(tokens.begin(), tokens.end());
  batch.labels.assign(tokens.size(), data::kIgnoredLabel);
  for (std::size_t t = 0; t < tokens.size(); ++t)
    batch.positions.push_back(static_cast<std::int32_t>(t));
  batch.cu.push_back(static_cast<std::int32_t>(tokens.size()));
  data::append_filler(batch, window - static_cast<std::int64_t>(tokens.size()));
  return batch;
}

}  // namespace

Generator::Generator(const config::Config& config,
                     const std::filesystem::path& checkpoint,
                     bool average)
    : context_(config.data.sequence_length),
      options_(model_options(config, checkpoint, average)),
      plan_(LoadedModel::plan(config, options_)),
      model_(config, options_, plan_) {}

std::vector<double> Generator::next_logits(const std::vector<std::int32_t>& tokens) {
  MOESAIC_CHECK(!tokens.empty(), "a context holds at least one token");
  const std::size_t used = std::min(static_cast<std::size_t>(context_), tokens.size());
  const std::span<const std::int32_t> last = std::span(tokens).last(used);
  const auto rows = static_cast<std::int64_t>(used);
  return model_.logits(batch_of(last, window_for(rows, context_)), rows - 1);
}

std::int32_t sample_token(const std::vector<double>& logits,
                          const SamplingOptions& options,
                          std::uint64_t position) {
  for (const double logit : logits) {
    if (!std::isfinite(logit))
      throw NumericsError(
          "the model's logits are not finite: this checkpoint holds broken weights; take an "
          "earlier one with --step");
  }
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto better = [&](std::int32_t a, std::int32_t b) {
    const double x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x > y || (x == y && a < b);
  };
  const auto keep = options.top_k > 0 ? std::min<std::size_t>(
                                            order.size(), static_cast<std::size_t>(options.top_k))
                                      : order.size();
  std::partial_sort(
      order.begin(), order.begin() + static_cast<std::ptrdiff_t>(keep), order.end(), better);
  if (options.temperature <= 0) return order[0];
  order.resize(keep);
  const double top = logits[static_cast<std::size_t>(order[0])];
  double total = 0;
  for (const auto i : order)
    total += std::exp((logits[static_cast<std::size_t>(i)] - top) / options.temperature);
  double at = uniform(mix64(options.seed), position) * total;
  for (const auto i : order) {
    at -= std::exp((logits[static_cast<std::size_t>(i)] - top) / options.temperature);
    if (at < 0) return i;
  }
  return order.back();
}

void Generator::generate(std::vector<std::int32_t> tokens,
                         std::int64_t max_new_tokens,
                         const SamplingOptions& options,
                         const std::function<bool(std::int32_t)>& on_token) {
  for (std::int64_t i = 0; i < max_new_tokens; ++i) {
    auto logits = next_logits(tokens);
    if (options.vocabulary > 0)
      logits.resize(std::min(logits.size(), static_cast<std::size_t>(options.vocabulary)));
    const std::int32_t next = sample_token(logits, options, static_cast<std::uint64_t>(i));
    tokens.push_back(next);
    if (!on_token(next)) return;
  }
}

}  // namespace moesaic::apps
