#include "apps/plan_recompute.h"

#include <algorithm>

#include <fmt/format.h>

#include "apps/plan_report.h"
#include "apps/text_table.h"
#include "core/model/from_config.h"

namespace moesaic::apps {
namespace {

using Words = std::vector<std::string>;

std::vector<RecomputeChoice::LayerKind> kinds_of(const config::Config& config) {
  std::vector<RecomputeChoice::LayerKind> kinds;
  for (const LayerPlan& layer : make_plan(config).layers) {
    const std::string name = layer.attention + " + " + layer.mixer;
    const bool is_known =
        std::any_of(kinds.begin(), kinds.end(), [&](const auto& k) { return k.name == name; });
    if (!is_known) kinds.push_back({name, layer.activation_bytes});
  }
  return kinds;
}

std::string size_or_not(const std::optional<std::int64_t>& bytes) {
  return bytes ? binary(*bytes) : "beyond 64 bits";
}

std::int64_t part(const std::vector<MemoryUse>& parts, const std::string& tag) {
  std::int64_t bytes = 0;
  for (const MemoryUse& use : parts)
    if (use.tag == tag) bytes += static_cast<std::int64_t>(use.bytes);
  return bytes;
}

std::int64_t total(const RecomputeChoice& choice) {
  return static_cast<std::int64_t>(choice.memory.total());
}

}  // namespace

std::vector<RecomputeChoice> plan_recompute(const config::Config& config,
                                            std::int64_t least_document) {
  std::vector<std::pair<std::string, Words>> settings{
      {"none", {}}, {"selective", {"selective"}}, {"full", {"full"}}};
  Words set = config.activations.recompute;
  if (set == Words{"none"}) set.clear();
  const bool is_named =
      std::any_of(settings.begin(), settings.end(), [&](const auto& s) { return s.second == set; });
  if (!is_named) settings.emplace_back("as set", set);
  std::vector<RecomputeChoice> choices;
  for (const auto& [policy, words] : settings) {
    config::Config changed = config;
    changed.activations.recompute = words;
    auto memory = plan_rank_memory(changed, {.least_caches = true}, least_document);
    if (!memory) return {};
    choices.push_back({policy, words == set, kinds_of(changed), std::move(*memory)});
  }
  return choices;
}

const RecomputeChoice* cheapest_within(const std::vector<RecomputeChoice>& choices,
                                       std::int64_t budget) {
  const auto fits = std::find_if(choices.begin(), choices.end(), [&](const RecomputeChoice& c) {
    return c.policy != "as set" && total(c) <= budget;
  });
  return fits == choices.end() ? nullptr : &*fits;
}

std::string recompute_text(const std::vector<RecomputeChoice>& choices,
                           std::optional<std::int64_t> budget) {
  if (choices.empty())
    return budget ? "--device-memory: what cannot be trained yet has no plan of its memory; see "
                    "the notes\n"
                  : "";
  std::vector<std::string> heading{"activations.recompute"};
  for (const RecomputeChoice& c : choices)
    heading.push_back(c.policy + (c.is_set ? " *" : ""));
  TextTable table("l" + std::string(choices.size(), 'r'), heading);
  const auto row = [&](const std::string& what, const auto& cell) {
    std::vector<std::string> cells{what};
    for (const RecomputeChoice& c : choices)
      cells.push_back(cell(c));
    table.row(cells);
  };
  for (std::size_t k = 0; k < choices.front().kinds.size(); ++k)
    row("kept in a layer of " + choices.front().kinds[k].name,
        [&](const RecomputeChoice& c) { return size_or_not(c.kinds[k].saved); });
  for (const char* tag : {"saved activations", "transient", "scratch"})
    row(fmt::format("of a rank: {}", tag),
        [&](const RecomputeChoice& c) { return binary(part(c.memory.parts, tag)); });
  const bool leaves = std::any_of(choices.begin(), choices.end(), [](const RecomputeChoice& c) {
    return !c.memory.host.empty();
  });
  if (leaves) {
    row("of a rank: offloaded activations", [&](const RecomputeChoice& c) {
      return binary(part(c.memory.parts, "offloaded activations"));
    });
    row("of a rank, in host memory", [&](const RecomputeChoice& c) {
      return binary(part(c.memory.host, "offloaded activations, host"));
    });
  }
  row("of a rank: all of its memory", [&](const RecomputeChoice& c) { return binary(total(c)); });
  std::string text =
      "\nWhat backward may compute again instead of keeping it, for one micro-batch (layers: "
      "before they "
      "are split over ranks; * = as configured" +
      std::string(choices.front().memory.tier_parts.empty()
                      ? ""
                      : "; caches of offloaded experts at their smallest") +
      ")\n" + table.text();
  if (!budget) return text;
  const RecomputeChoice* cheapest = cheapest_within(choices, *budget);
  if (cheapest != nullptr)
    return text + fmt::format("within {}: activations.recompute={} computes least again\n\n",
                              binary(*budget),
                              cheapest->policy);
  const RecomputeChoice& least =
      *std::min_element(choices.begin(), choices.end(), [](const auto& a, const auto& b) {
        return total(a) < total(b);
      });
  return text + fmt::format(
                    "within {}: no setting fits; {} needs {}: take more ranks, a smaller "
                    "train.micro_batch_size or a shorter data.sequence_length\n\n",
                    binary(*budget),
                    least.policy,
                    binary(total(least)));
}

}  // namespace moesaic::apps
