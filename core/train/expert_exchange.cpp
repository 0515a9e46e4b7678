#include "core/train/expert_exchange.h"

#include <fmt/format.h>

#include "core/base/dtype.h"

namespace moesaic {
namespace {

ExchangeMethod hierarchical_method(const config::DispatchConfig& dispatch) {
  if (dispatch.hierarchy == config::Hierarchy::inter_first) return ExchangeMethod::inter_first;
  return dispatch.hops == 3 ? ExchangeMethod::intra_first_3 : ExchangeMethod::intra_first;
}

}  // namespace

NodeGrid expert_nodes(const MeshPosition& position, int ranks_per_node) {
  const int ep = position.extent(Axis::ep), etp = position.extent(Axis::etp);
  if (ranks_per_node <= 0 || ranks_per_node >= position.world_size()) return {1, ep};
  // Members of a group are etp ranks apart.
  const int per_node = ranks_per_node / etp;
  if (per_node * etp != ranks_per_node) return {ep, 1};
  if (per_node % ep == 0) return {1, ep};
  return ep % per_node == 0 ? NodeGrid{ep / per_node, per_node} : NodeGrid{ep, 1};
}

MethodChoice exchange_method(const config::Config& config,
                             const NodeGrid& nodes,
                             std::int64_t tokens,
                             const Precision& precision) {
  using config::Exchange;
  const auto& model = config.model;
  switch (config.dispatch.exchange) {
    case Exchange::dense:
      return {ExchangeMethod::dense, "dispatch.exchange: dense"};
    case Exchange::hdense:
      return {ExchangeMethod::hdense, "dispatch.exchange: hdense"};
    case Exchange::flat:
      return {ExchangeMethod::flat, "dispatch.exchange: flat"};
    case Exchange::pair:
      return {ExchangeMethod::pair, "dispatch.exchange: pair"};
    case Exchange::hierarchical:
      return {hierarchical_method(config.dispatch), "dispatch.exchange: hierarchical"};
    case Exchange::automatic:
      break;
  }
  const std::int64_t width = model.routed_expert_hidden_size.value_or(model.hidden_size);
  // Smaller buffers need counts.
  return choose_method(nodes,
                       model.num_experts,
                       model.num_experts_per_token,
                       tokens,
                       width * static_cast<std::int64_t>(byte_size(precision.compute)),
                       {},
                       config.dispatch.buffer_factor > 0);
}

namespace {

// Tokens are cut over cp and tp; along etp those of all ranks travel with each.
std::int64_t most_tokens(const Phase& phase, const MeshPosition& position) {
  return phase.piece_tokens() / position.extent(Axis::cp) / position.extent(Axis::tp) *
         position.extent(Axis::etp);
}

}  // namespace

std::string exchange_text(const config::Config& config,
                          const Phase& phase,
                          const Precision& precision,
                          const MeshPosition& position,
                          int ranks_per_node) {
  if (position.extent(Axis::ep) == 1 || config.model.num_experts == 0) return "";
  const config::DispatchConfig& dispatch = config.dispatch;
  std::string text =
      exchange_method(
          config, expert_nodes(position, ranks_per_node), most_tokens(phase, position), precision)
          .reason;
  if (dispatch.buffer_factor > 0)
    text +=
        fmt::format(" | room for {:g} x the mean, further passes beyond", dispatch.buffer_factor);
  const auto fp8 = [](config::DispatchDtype type) { return type == config::DispatchDtype::fp8; };
  if (fp8(dispatch.dtype)) text += " | tokens in fp8";
  if (fp8(dispatch.backward_dtype)) text += " | gradients in fp8";
  if (dispatch.overlap) text += " | beside other work";
  if (dispatch.chunks > 1) text += fmt::format(" in {} chunks", dispatch.chunks);
  if (dispatch.checksum) text += " | with checksums";
  return text;
}

std::unique_ptr<ExpertExchange> make_expert_exchange(const config::Config& config,
                                                     const Phase& phase,
                                                     const Precision& precision,
                                                     const MeshPosition& position,
                                                     int ranks_per_node,
                                                     Communicator* group,
                                                     bool count_experts) {
  if (position.extent(Axis::ep) == 1 || config.model.num_experts == 0) return nullptr;
  const NodeGrid nodes = expert_nodes(position, ranks_per_node);
  const std::int64_t tokens = most_tokens(phase, position);
  return std::make_unique<ExpertExchange>(
      group,
      ExchangeOptions{.method = exchange_method(config, nodes, tokens, precision).method,
                      .grid = nodes,
                      .experts = config.model.num_experts,
                      .replicas = static_cast<std::int32_t>(config.experts.replicas),
                      .choices = config.model.num_experts_per_token,
                      .max_tokens = tokens,
                      .weights = precision.stats,
                      .buffer_factor = config.dispatch.buffer_factor,
                      .chunks = static_cast<int>(config.dispatch.chunks),
                      .count_experts = count_experts,
                      .verify = config.dispatch.checksum});
}

}  // namespace moesaic
