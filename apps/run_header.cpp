#include "apps/run_header.h"

#include <fmt/format.h>

#include "apps/version.h"
#include "core/base/crc32c.h"
#include "core/model/from_config.h"
#include "core/model/plan.h"
#include "memory/device_hooks.h"

namespace moesaic::apps {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

std::string memory_line() {
  std::string line = "memory     per rank:";
  for (const auto& use : memory_in_use()) {
    if (static_cast<double>(use.bytes) >= 0.05 * kMiB)
      line += fmt::format(" {} {:.1f} MiB |", use.tag, static_cast<double>(use.bytes) / kMiB);
  }
  return line.substr(0, line.find_last_not_of(" |") + 1);
}

std::vector<std::string> header_lines(const RunFacts& facts) {
  const auto& c = facts.loaded.config;
  const ModelPlan plan = make_plan(c);
  std::vector<std::string> lines;
  lines.push_back(first_line(version_text()));
  lines.push_back(
      fmt::format("run        {} | seed {} | {} rank(s) x {} thread(s) | device {} | precision {}",
                  c.run.dir,
                  c.run.seed,
                  facts.host.size(),
                  c.run.threads,
                  to_string(facts.assembly.device),
                  name(facts.assembly.precision.compute)));
  lines.push_back(
      fmt::format("model      {} layers | {} parameters, {} active per token | training {:.2f} "
                  "MFLOP per token (3 x forward; formulas: moesaic plan)",
                  plan.layers.size(),
                  plan.model.all,
                  plan.model.active,
                  static_cast<double>(plan.training_flops) / 1e6));
  lines.push_back(
      fmt::format("data       {}: {} documents, {} tokens | sequences of {} tokens, {} per step",
                  facts.train.name(),
                  facts.train.num_documents(),
                  facts.train.num_tokens(),
                  c.data.sequence_length,
                  c.train.global_batch_size));
  lines.push_back(memory_line());
  if (facts.assembly.device.kind == Device::Kind::cuda) {
    lines.push_back(
        fmt::format("device     {} | {} | exchange between ranks {}",
                    cuda::device_name(facts.assembly.device),
                    facts.device_line,
                    facts.uses_nccl ? "NCCL " + device_communicator_version() : "none"));
  }
  lines.push_back(fmt::format("checkpoint {}/checkpoints | every {} steps | keep last {}",
                              c.run.dir,
                              c.checkpoint.every,
                              c.checkpoint.keep_last));
  return lines;
}

}  // namespace

RunHeader run_header(const RunFacts& facts) {
  RunHeader header;
  if (facts.host.rank() != 0) return header;
  header.config = config::effective_yaml(facts.loaded);
  header.config_hash = fmt::format("{:08x}", crc32c(header.config.data(), header.config.size()));
  header.version = first_line(version_text());
  header.ranks = facts.host.size();
  header.start_step = facts.steps_done;
  header.run_dir = facts.loaded.config.run.dir;
  header.texts["device"] = to_string(facts.assembly.device);
  header.texts["precision"] = name(facts.assembly.precision.compute);
  header.texts["flops"] = "training FLOPs per token of `moesaic plan`: 3 x forward";
  header.lines = header_lines(facts);
  return header;
}

}  // namespace moesaic::apps
