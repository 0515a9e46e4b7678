#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "core/config/check_parts.h"
#include "core/config/check_topics.h"

namespace moesaic::config {
namespace {

using Keys = std::vector<std::string>;

class LayoutChecker : public Checker {
 public:
  using Checker::Checker;

  void run() {
    parallel();
    pipeline();
    dispatch();
    activations();
  }

 private:
  /// dp * cp * tp = edp * ep * etp over the same ranks, and each rank holds whole experts.
  void parallel() {
    const ParallelConfig& parallel = config_.parallel;
    if (model_.num_experts > 0 && model_.num_experts % parallel.ep != 0) {
      add({"parallel.ep", "model.num_experts"},
          fmt::format("{} does not divide model.num_experts ({}). Nearest valid: {}",
                      parallel.ep,
                      model_.num_experts,
                      near_divisors(model_.num_experts, parallel.ep)));
    }
    if (parallel.dp &&
        (*parallel.dp * parallel.cp * parallel.tp) % (parallel.ep * parallel.etp) != 0) {
      add({"parallel.ep", "parallel.dp", "parallel.cp", "parallel.tp", "parallel.etp"},
          fmt::format("ep * etp ({}) does not divide dp * cp * tp ({}){}",
                      parallel.ep * parallel.etp,
                      *parallel.dp * parallel.cp * parallel.tp,
                      nearest_ep(*parallel.dp * parallel.cp * parallel.tp)));
    }
    divides("etp", parallel.etp, "model.moe_intermediate_size", routed_inner());
    divides("tp", parallel.tp, "model.num_attention_heads", mla_heads());
    divides("tp",
            parallel.tp,
            "model.linear_attn_config.num_heads",
            model_.linear_attn_config ? model_.linear_attn_config->num_heads : 0);
    divides("tp", parallel.tp, "model.intermediate_size", dense_inner());
    divides("tp",
            parallel.tp,
            "model.moe_intermediate_size",
            model_.num_shared_experts > 0 ? routed_inner() : 0);
    divides("tp",
            parallel.tp,
            "model.vocab_size",
            model_.vocab_size,
            fmt::format("; or model.vocab_size: {} (it may be more than the tokenizer has)",
                        next_multiple(model_.vocab_size, parallel.tp)));
    if (uses_data_length())
      divides("tp", parallel.tp, "data.sequence_length", config_.data.sequence_length);
    for (std::size_t i = 0; i < config_.train.phases.size(); ++i)
      divides("tp",
              parallel.tp,
              fmt::format("train.phases[{}].sequence_length", i),
              config_.train.phases[i].sequence_length.value_or(0));
    if (uses_data_length())
      context("data.sequence_length",
              config_.data.sequence_length,
              "train.micro_batch_size",
              config_.train.micro_batch_size);
    for (std::size_t i = 0; i < config_.train.phases.size(); ++i) {
      const PhaseConfig& phase = config_.train.phases[i];
      if (!phase.sequence_length && !phase.micro_batch_size) continue;
      context(fmt::format("train.phases[{}].sequence_length", i),
              phase.sequence_length.value_or(config_.data.sequence_length),
              fmt::format("train.phases[{}].micro_batch_size", i),
              phase.micro_batch_size.value_or(config_.train.micro_batch_size));
    }
  }

  /// ". Nearest valid ep: 2": for so many ranks of a stage.
  std::string nearest_ep(std::int64_t ranks) const {
    const std::int64_t etp = config_.parallel.etp, share = ranks / etp;
    if (ranks % etp != 0 || share > kMostToSearch || model_.num_experts < 1) return "";
    return fmt::format(". Nearest valid ep: {}",
                       near_divisors(std::gcd(share, model_.num_experts), config_.parallel.ep));
  }

  /// The tokens of a micro-batch are cut into cp equal contiguous pieces, and these among tp ranks; a short convolution
  /// reaches into the piece before, no further.
  void context(const std::string& length_key,
               std::int64_t length,
               const std::string& micro_key,
               std::int64_t micro) {
    const std::int64_t cp = config_.parallel.cp,
                       tp = std::max<std::int64_t>(1, config_.parallel.tp), tokens = length * micro;
    if (cp <= 1 || tokens <= 0 || tokens % tp != 0) return;
    const auto problem = [&](const std::string& message) {
      add({"parallel.cp", length_key, micro_key}, message);
    };
    if (tokens / tp % cp != 0) {
      return problem(fmt::format(
          "{} does not cut the {} tokens of a micro-batch ({} x {}){} into equal pieces. Nearest "
          "valid: {}",
          cp,
          tokens,
          length_key,
          micro_key,
          tp > 1 ? fmt::format(", {} for each of {} ranks along tp,", tokens / tp, tp) : "",
          near_divisors(tokens / tp, cp)));
    }
    const std::int64_t reach =
        model_.linear_attn_config ? model_.linear_attn_config->short_conv_kernel_size - 1 : 0;
    if (tokens / cp >= reach) return;
    std::int64_t most = std::max<std::int64_t>(1, tokens / reach);
    while (tokens / tp % most != 0)
      --most;
    problem(fmt::format(
        "pieces of {} tokens are shorter than the {} that "
        "model.linear_attn_config.short_conv_kernel_size reaches back. Nearest valid: {}",
        tokens / cp,
        reach,
        most));
  }

  // Sizes that are split; 0 when there is nothing of the kind.
  std::int64_t mla_heads() const {
    return full_attention_layers() > 0 || has_mtp() ? model_.num_attention_heads : 0;
  }

  std::int64_t routed_inner() const {
    return model_.num_experts > 0 ? model_.moe_intermediate_size : 0;
  }

  std::int64_t dense_inner() const {
    for (std::int64_t l = 0; l < model_.num_hidden_layers; ++l) {
      if (!model_.is_moe_layer(l)) return model_.intermediate_size;
    }
    return 0;
  }

  static std::int64_t next_multiple(std::int64_t size, std::int64_t of) {
    return of < 1 ? size : (size + of - 1) / of * of;
  }

  /// `or_else`: what else could be done.
  void divides(const char* axis,
               std::int64_t degree,
               const std::string& key,
               std::int64_t size,
               const std::string& or_else = "") {
    if (size <= 0 || degree < 1 || size % degree == 0) return;
    add({std::string("parallel.") + axis, key},
        fmt::format("{} does not divide {} ({}). Nearest valid: {}{}",
                    degree,
                    key,
                    size,
                    near_divisors(size, degree),
                    or_else));
  }

  /// What the pipeline's sizes allow beyond this needs the model: core/model/pipeline_plan.h.
  void pipeline() {
    const ParallelConfig& parallel = config_.parallel;
    if (parallel.pp > 1 && parallel.order == LayerOrder::vertical)
      add({"parallel.order", "parallel.pp"},
          fmt::format("vertical is an order for one pipeline stage, and parallel.pp is {}: the "
                      "stages' schedule has an order of its own; allowed: horizontal, or pp 1",
                      parallel.pp));
    if (parallel.pp > 1) return;
    const std::string reason = "is of use with parallel.pp above 1 only; remove it, or set pp";
    if (parallel.chunks.value_or(1) > 1) add({"parallel.chunks", "parallel.pp"}, reason);
    if (!parallel.layers.empty()) add({"parallel.layers", "parallel.pp"}, reason);
  }

  /// Further passes need counts on the host, and the memory of the pass before.
  void dispatch() {
    const DispatchConfig& dispatch = config_.dispatch;
    if (dispatch.chunks > 1 && !dispatch.overlap)
      add({"dispatch.chunks", "dispatch.overlap"},
          "chunks one after the other only take longer: they are of use beside the experts' work; "
          "allowed: 1, or overlap: true");
    if (config_.experts.replicas > 0 && config_.experts.place_every == 0)
      add({"experts.replicas", "experts.place_every"},
          "copies of busy experts are chosen by their average load when experts are dealt; "
          "allowed: 0, "
          "or a place_every above 0, as in 500");
    if (dispatch.buffer_factor == 0) return;
    if (dispatch.exchange == Exchange::dense || dispatch.exchange == Exchange::hdense)
      add({"dispatch.buffer_factor", "dispatch.exchange"},
          fmt::format(
              "{} exchanges do not count what comes and need room for all of it; allowed: 0, or "
              "exchange: auto, flat, hierarchical or pair",
              name_of(dispatch.exchange)));
    if (config_.parallel.pp > 1 && config_.parallel.schedule == PipelineSchedule::zero_bubble)
      add({"dispatch.buffer_factor", "parallel.schedule"},
          "zero_bubble keeps weight gradients for later, and further passes have no memory to keep "
          "theirs in; allowed: 0, or another schedule");
  }

  void activations() {
    const std::vector<std::string>& patterns = config_.activations.recompute;
    const auto is_exception = [](const std::string& word) { return word.starts_with('!'); };
    const auto exceptions = std::count_if(patterns.begin(), patterns.end(), is_exception);
    const auto others = static_cast<std::ptrdiff_t>(patterns.size()) - exceptions;
    const auto has = [&](const char* word) {
      return std::find(patterns.begin(), patterns.end(), word) != patterns.end();
    };
    if (patterns.size() > 1 && has("none"))
      add({"activations.recompute"}, "'none' stands alone; remove it or the patterns");
    if (others > 1 && has("full"))
      add({"activations.recompute"},
          "'full' stands alone, or before names with ! that are kept; remove it or the patterns");
    if (exceptions > 0 && others == 0)
      add({"activations.recompute"},
          "names with ! are kept of what else is named here; write them behind full, selective or "
          "patterns, as in [full, \"!cur.mid\"]");
    const bool leaves =
        config_.activations.residual_offload || !config_.activations.offload.empty();
    if (leaves && config_.parallel.pp > 1 &&
        config_.parallel.schedule == PipelineSchedule::zero_bubble)
      add({config_.activations.residual_offload ? "activations.residual_offload"
                                                : "activations.offload",
           "parallel.schedule"},
          "zero_bubble keeps weight gradients for later, and activations that have left are not "
          "there for them; allowed: no offload, or another schedule");
  }
};

}  // namespace

void add_layout_findings(const Config& config, std::vector<Finding>& findings) {
  LayoutChecker(config, findings).run();
}

}  // namespace moesaic::config
