#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/train/step_timer.h"
#include "parallel/expert_replicas.h"

namespace moesaic {

/// How the tokens of a step spread over the experts of one layer.
struct ExpertLoad {
  std::int64_t layer = 0;         ///< as in the tensor names
  double max_over_mean = 0;       ///< tokens of the busiest expert / mean over experts; 1 is even
  std::int64_t dead_experts = 0;  ///< experts without a token in this step
  double entropy = 0;  ///< of the shares of the experts, over its largest value; 1 is even
  /// With parallel.ep: assignments at the busiest of the ranks that share the experts / mean over these ranks.
  std::optional<double> rank_max_over_mean;
  // In steps with details (log.expert_every, log.detail_every), else empty:
  std::vector<std::int64_t> tokens;          ///< per expert, exact, of all ranks
  std::vector<std::int64_t> rank_tokens;     ///< assignments per rank of the experts
  std::optional<double> bias_min, bias_max;  ///< of the router's selection bias after the step
  /// Of the exchange, beyond the first of each micro-batch, on rank 0 (of a pipeline: of its stages' first ranks); with
  /// dispatch.buffer_factor.
  std::optional<std::int64_t> further_passes;
};

/// What the exchanges of a layer's tokens took in a step, on rank 0 (of a pipeline: on its stages' first ranks): forward and
/// backward of all micro-batches.
struct LayerExchange {
  struct Way {
    double seconds =
        0;  ///< of the stream that moved the rows, packing and waiting for other ranks included
    double exposed = 0;                         ///< of the experts' stream, which waited meanwhile
    std::int64_t bytes = 0, network_bytes = 0;  ///< sent to other ranks; of these, to other nodes
    /// The part that other work hid.
    double overlapped() const { return seconds > exposed ? seconds - exposed : 0; }
  };
  std::int64_t layer = 0;  ///< as in the tensor names
  Way dispatch;            ///< to the experts: tokens, choices, and the gradients of results
  Way combine;             ///< back: results, and the gradients of tokens
};

/// What caches of offloaded experts and their homes did in a step, on rank 0.
struct TierTraffic {
  std::int64_t uses = 0,
               hits = 0;  ///< blocks that were used; of these, those that were on the device
  std::int64_t bytes_up = 0, bytes_down = 0;     ///< from host memory to the device, and back
  std::int64_t file_read = 0, file_written = 0;  ///< bytes, with padding
  std::int64_t host_waits = 0;                   ///< of the host, for copies or for the file
  double host_wait_seconds = 0;
  double hit_ratio() const {
    return uses == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(uses);
  }
  TierTraffic& operator+=(const TierTraffic& more);
};
TierTraffic operator-(TierTraffic now, const TierTraffic& before);

/// The same of one layer, all kinds together.
struct LayerTierTraffic {
  std::int64_t layer = 0;  ///< as in the tensor names
  TierTraffic traffic;
};

/// Updates that offloaded experts were given later than in their step (optimizer.untouched=lazy), in a step on rank 0.
struct ExpertReplays {
  std::int64_t members = 0;  ///< times that a matrix of an expert was brought up to date
  std::int64_t steps = 0;    ///< updates that they were given then
};

/// The figures of a layer that follow from its counts (layer and bias are left alone).
ExpertLoad expert_load(std::vector<std::int64_t> tokens);
/// Adds those of the ranks on which the experts were in this step. Of an expert with copies each gets its share of turns: the
/// counts of a step do not say which of its tokens had which number.
void add_ranks(ExpertLoad& load, const ExpertCopies& copies);

/// As bytes, for ranks of one build: appends; reads from `at` on and moves it. Throws InternalError when bytes are missing.
void write_expert_load(std::string& bytes, const ExpertLoad& load);
ExpertLoad read_expert_load(const std::string& bytes, std::size_t& at);

/// What one step did, summed or averaged over all ranks. Fields without a value appear in no output.
struct StepRecord {
  std::int64_t step = 0;                     ///< counted from 1
  double time = 0;                           ///< Unix time of its end, seconds
  std::int64_t steps = 0;                    ///< of the whole run
  double loss = 0;                           ///< what is minimised
  std::map<std::string, double> loss_parts;  ///< by name: lm, mtp, balance, z, …
  std::optional<double> grad_norm;           ///< before clipping
  double learning_rate = 0;
  std::int64_t tokens = 0;           ///< of this step
  double seconds = 0;                ///< wall time of this step
  std::optional<StepSeconds> parts;  ///< where it went, on rank 0
  bool skipped = false;              ///< not finite: nothing was updated
  std::vector<ExpertLoad> experts;   ///< MoE layers
  std::vector<LayerExchange>
      exchange;  ///< in steps with details (log.detail_every), with experts on several ranks
  std::map<std::string, TierTraffic> tiers;   ///< with experts.offload: weights, gradients, states
  std::vector<LayerTierTraffic> tier_layers;  ///< in steps with details (log.detail_every)
  std::optional<ExpertReplays> replays;       ///< where experts may wait for their updates
  std::optional<double> flops;  ///< model FLOPs of this step, by the formula of the run's header
  std::optional<double> tflops_per_device;  ///< flops / seconds / devices, in 10^12 per second
  std::optional<double> mfu;  ///< the same over the device's peak, which the header names
  std::optional<std::int64_t> memory_bytes;  ///< device memory of the rank that uses most
  std::optional<std::int64_t> host_bytes;    ///< resident host memory of the rank that uses most
  /// Activations copied to host memory and back, by rank 0; where some are.
  std::optional<std::int64_t> activations_out, activations_in;
  std::optional<std::int64_t> total_tokens;  ///< consumed since step 1

  /// Of this step alone; empty when it has no tokens or took no time.
  std::optional<double> tokens_per_second() const {
    if (tokens <= 0 || !(seconds > 0)) return std::nullopt;
    return static_cast<double>(tokens) / seconds;
  }
};

}  // namespace moesaic
