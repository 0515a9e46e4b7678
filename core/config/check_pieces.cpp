#include "core/config/check_pieces.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "core/config/phase_extent.h"

namespace moesaic::config {
namespace {

constexpr const char* kKey = "activations.piece_tokens";

class PieceChecker {
 public:
  PieceChecker(const Config& config, std::vector<Finding>& findings)
      : config_(config), findings_(findings) {}

  void run() {
    if (config_.activations.piece_tokens == 0) return;
    layout();
    std::int64_t most = 1;
    for (const std::int64_t tokens : micro_batches())
      most = std::max(most, lengths(tokens));
    if (most > 1) rules_of_batches();
  }

 private:
  // Tokens of the micro-batches of every phase, as far as they are known.
  std::set<std::int64_t> micro_batches() const {
    std::set<std::int64_t> tokens;
    const auto phase = [&](std::int64_t length, std::int64_t sequences) {
      if (length > 0 && sequences > 0) tokens.insert(length * sequences);
    };
    const TrainConfig& train = config_.train;
    if (train.phases.empty()) phase(config_.data.sequence_length, train.micro_batch_size);
    for (const PhaseConfig& p : train.phases)
      phase(p.sequence_length.value_or(config_.data.sequence_length),
            p.micro_batch_size.value_or(train.micro_batch_size));
    return tokens;
  }

  void add(std::vector<std::string> keys, std::string message) {
    keys.insert(keys.begin(), kKey);
    findings_.push_back({std::move(keys), std::move(message)});
  }

  void layout() {
    if (config_.parallel.cp > 1)
      add({"parallel.cp"},
          fmt::format("the ranks along cp ({}) work off pieces side by side, and cannot cut them "
                      "again; allowed: 0, or cp 1",
                      config_.parallel.cp));
    if (config_.parallel.pp > 1)
      add({"parallel.pp"},
          fmt::format("the stages of a pipeline ({}) hand whole micro-batches on; allowed: 0, or "
                      "pp 1",
                      config_.parallel.pp));
  }

  // Of a micro-batch of so many tokens; how many pieces it has.
  std::int64_t lengths(std::int64_t tokens) {
    const std::int64_t pieces = pieces_of_micro_batch(config_, tokens),
                       most = config_.activations.piece_tokens;
    if (pieces == 0) {
      add({"data.sequence_length", "train.micro_batch_size", "parallel.tp"},
          fmt::format("found {}; the {} tokens of a micro-batch cannot be cut into equal pieces of "
                      "at most so many and at least half as many tokens{}. Nearest valid: {}",
                      most,
                      tokens,
                      config_.parallel.tp > 1
                          ? fmt::format(" that divide among {} ranks along tp", config_.parallel.tp)
                          : "",
                      valid_lengths(tokens)));
      return 1;
    }
    const std::int64_t reach = config_.model.linear_attn_config
                                   ? config_.model.linear_attn_config->short_conv_kernel_size - 1
                                   : 0;
    if (pieces > 1 && tokens / pieces < reach)
      add({"model.linear_attn_config.short_conv_kernel_size"},
          fmt::format(
              "pieces of {} tokens are shorter than the {} that a short convolution reaches "
              "back; allowed: at least {}",
              tokens / pieces,
              reach,
              reach));
    return pieces;
  }

  // The lengths next to what was asked for.
  std::string valid_lengths(std::int64_t tokens) const {
    const std::int64_t most = config_.activations.piece_tokens,
                       ranks = std::max<std::int64_t>(1, config_.parallel.tp);
    const auto cuts = [&](std::int64_t length) {
      return tokens % length == 0 && length % ranks == 0;
    };
    std::int64_t above = most;
    while (above < tokens && !cuts(above))
      ++above;
    for (std::int64_t below = most; below > 0; --below)
      if (cuts(below)) return fmt::format("{}, {}", below, above);
    return fmt::format("{}", above);
  }

  void rules_of_batches() {
    const AuxLoss aux = config_.model.balance.aux_loss;
    if (aux == AuxLoss::switch_loss || aux == AuxLoss::sequence)
      add({"model.balance.aux_loss"},
          fmt::format("the auxiliary loss '{}' is formed of all tokens of a micro-batch at once, "
                      "which do not meet in pieces; allowed: 0, or aux_loss: none or global",
                      name_of(aux)));
    if (config_.model.capacity_factor)
      add({"model.capacity_factor"},
          "all tokens of a micro-batch compete for an expert's places, and do not meet in pieces; "
          "allowed: 0, or capacity_factor: null");
  }

  const Config& config_;
  std::vector<Finding>& findings_;
};

}  // namespace

void add_piece_findings(const Config& config, std::vector<Finding>& findings) {
  PieceChecker(config, findings).run();
}

}  // namespace moesaic::config
