#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "apps/loaded_model.h"

namespace moesaic::apps {

struct SamplingOptions {
  double temperature = 0.8;  ///< 0 = always the most likely token
  std::int64_t top_k = 0;    ///< sample among the k most likely; 0 = all
  std::uint64_t seed = 1;
  std::int64_t vocabulary =
      0;  ///< ids from here on are never drawn (they are no tokens); 0 = all may be
};

/// Continues a sequence of tokens with a trained model. Every token is one forward pass over the context, at most
/// `context` tokens long (older ones are dropped): no cache, so the cost of a token grows with its context.
class Generator {
 public:
  /// Loads the weights of `checkpoint`; `average` takes the moving averages (optimizer.ema_decay) in their place.
  Generator(const config::Config& config, const std::filesystem::path& checkpoint, bool average);

  /// What lies where.
  const MemoryPlan& memory() const noexcept { return plan_.memory; }
  /// Logits of the token after `tokens`, in f64.
  std::vector<double> next_logits(const std::vector<std::int32_t>& tokens);
  /// Calls `on_token` for each new token, up to `max_new_tokens` or until it returns false.
  void generate(std::vector<std::int32_t> tokens,
                std::int64_t max_new_tokens,
                const SamplingOptions& options,
                const std::function<bool(std::int32_t)>& on_token);

 private:
  std::int64_t context_ = 0;
  LoadedModel::Options options_;
  ForwardPlan plan_;
  LoadedModel model_;
};

/// The index drawn from softmax(logits / temperature), a pure function of (options.seed, position).
std::int32_t sample_token(const std::vector<double>& logits,
                          const SamplingOptions& options,
                          std::uint64_t position);

}  // namespace moesaic::apps
