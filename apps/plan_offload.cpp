#include "apps/plan_offload.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "apps/text_table.h"
#include "core/train/phases.h"

namespace moesaic::apps {
namespace {

// "12.5%" of what finds room in the caches.
std::string percent(double share) {
  return fmt::format("{:.1f}%", 100 * share);
}

std::string size(std::uint64_t bytes) {
  return binary(static_cast<std::int64_t>(bytes));
}

std::string places(const MemoryPlan& memory) {
  TextTable table("lrrrrrrrr",
                  {"experts'",
                   "blocks",
                   "each",
                   "slots",
                   "stay",
                   "share",
                   "in file",
                   "staging",
                   "host memory"});
  for (const TierPart& p : memory.tier_parts)
    table.row({p.group + " " + name(p.kind),
               grouped(p.blocks),
               size(p.block_bytes),
               grouped(p.slots),
               grouped(p.on_device),
               percent(p.share()),
               grouped(p.in_file),
               grouped(p.staging_slots),
               size(p.host)});
  return table.text();
}

// What all experts, used once, cost a step.
std::string link_text(const config::Config& config, const OffloadTraffic& t) {
  return fmt::format(
      "over the link in a step of {} tokens, all experts used: {} up, {} down; {:.2f} s at {:.0f} "
      "GB/s each way, which is the compute of some {} tokens a step (at {:.0f} TFLOP/s a rank): "
      "with more tokens a step it can hide behind compute\n",
      grouped(make_phases(config).front().step_tokens()),
      size(static_cast<std::uint64_t>(t.bytes.up)),
      size(static_cast<std::uint64_t>(t.bytes.down)),
      t.seconds,
      kLinkBytesPerSecond / 1e9,
      grouped((static_cast<std::int64_t>(t.tokens) + 999) / 1000 * 1000),
      kProductsPerSecond / 1e12);
}

}  // namespace

OffloadTraffic offload_traffic(const config::Config& config,
                               const ModelPlan& model,
                               const MemoryPlan& memory) {
  OffloadTraffic traffic;
  const std::int64_t data_parallel =
      memory.ranks / (config.parallel.tp * config.parallel.pp * config.parallel.cp);
  const Phase phase = make_phases(config).front();
  const std::int64_t micro_batches =
      std::max<std::int64_t>(1, phase.micro_batches(static_cast<int>(data_parallel)));
  traffic.bytes =
      link_bytes(memory.tier_parts,
                 micro_batches * phase.pieces,
                 config.parallel.order == config::LayerOrder::vertical ? 1 : micro_batches);
  traffic.seconds = std::max(traffic.bytes.up, traffic.bytes.down) / kLinkBytesPerSecond;
  traffic.tokens = traffic.seconds * kProductsPerSecond * memory.ranks /
                   static_cast<double>(std::max<std::int64_t>(1, model.training_flops));
  return traffic;
}

std::string offload_text(const config::Config& config,
                         const ModelPlan& model,
                         const MemoryPlan& memory,
                         const std::string& whose) {
  if (memory.tier_parts.empty()) return "";
  std::string text = fmt::format(
      "\nExperts{} outside the device (experts.offload: {}, policy {}); a block is an expert's "
      "matrix of "
      "a layer, slots are its places on the device; blocks that stay live there alone\n",
      whose,
      name_of(config.experts.offload),
      name_of(config.experts.policy));
  text += places(memory);
  const auto goes_round = [](const TierPart& p) { return p.is_ring; };
  if (std::any_of(memory.tier_parts.begin(), memory.tier_parts.end(), goes_round))
    text +=
        "gradients go round in their slots: a layer's experts are updated behind its last backward "
        "(experts.update: in_backward)\n";
  const OffloadTraffic t = offload_traffic(config, model, memory);
  const auto all_fits = [](const TierPart& p) { return p.share() >= 1; };
  const bool fits = std::all_of(memory.tier_parts.begin(), memory.tier_parts.end(), all_fits);
  if (t.bytes.up + t.bytes.down == 0) {
    text += "over the link in a step: nothing, as the caches hold everything\n";
  } else {
    text += link_text(config, t);
  }
  if (fits && config.experts.offload == config::ExpertOffload::full &&
      !config.experts.device_cache && !memory.device_limit)
    text +=
        "no experts.device_cache, memory.device_budget or --device-memory: caches hold everything "
        "here; a run on a GPU takes what is free\n";
  return text;
}

std::string offload_summary(const config::Config& config, const MemoryPlan& memory) {
  if (memory.tier_parts.empty())
    return fmt::format(
        "{}, policy {} | rank 0 has nothing to offload: no experts in its stage, or no state of "
        "them",
        name_of(config.experts.offload),
        name_of(config.experts.policy));
  std::map<std::string, std::pair<double, double>> by_kind;  // bytes on the device, of all
  for (const TierPart& p : memory.tier_parts) {
    auto& [held, all] = by_kind[name(p.kind)];
    held += p.share() * static_cast<double>(p.bytes());
    all += static_cast<double>(p.bytes());
  }
  std::string text = fmt::format("{}, policy {} | room on the device for",
                                 name_of(config.experts.offload),
                                 name_of(config.experts.policy));
  for (const auto& [kind, bytes] : by_kind)
    text += fmt::format("{} {} of {}",
                        text.back() == 'r' ? "" : ",",
                        percent(bytes.second > 0 ? bytes.first / bytes.second : 1),
                        kind);
  text += fmt::format(" | host memory {}", size(host_bytes(memory.tier_parts)));
  if (const std::uint64_t file = file_bytes(memory.tier_parts); file > 0)
    text += fmt::format(" | file {} in {}", size(file), memory.tiers->folder.string());
  return text;
}

}  // namespace moesaic::apps
