#include "apps/run_header.h"

#include <algorithm>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "apps/data_lines.h"
#include "apps/plan_context.h"
#include "apps/plan_offload.h"
#include "apps/run_environment.h"
#include "apps/stop_requests.h"
#include "apps/version.h"
#include "core/base/crc32c.h"
#include "core/model/from_config.h"
#include "core/model/plan.h"
#include "core/train/expert_exchange.h"
#include "memory/device_hooks.h"

namespace moesaic::apps {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

// "2,048,000".
std::string grouped(std::int64_t n) {
  std::string digits = std::to_string(n);
  for (std::size_t at = digits.size(); at > 3; at -= 3)
    digits.insert(at - 3, 1, ',');
  return digits;
}

std::string version_line(const RunFacts& facts) {
  std::string text = version_text(), line;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    std::string part = text.substr(at, end - at);
    // "git       1234" -> "git 1234"
    const std::size_t gap = part.find("  "), next = part.find_first_not_of(' ', gap);
    if (gap != std::string::npos && next != std::string::npos) part.erase(gap + 1, next - gap - 1);
    line += (line.empty() ? "" : " | ") + part;
    at = end + 1;
  }
  const std::string mpi = facts.mpi_version.substr(0, facts.mpi_version.find_first_of(",\n"));
  return mpi.empty() ? line : line + " | " + mpi;
}

std::string layout_line(const RunFacts& facts) {
  const auto& p = facts.loaded.config.parallel;
  const int ranks = facts.host.size();
  return fmt::format(
      "layout     {} rank(s) = dp {} x tp {} x pp {} x cp {} | experts: ep {} x etp {}",
      ranks,
      p.dp.value_or(ranks / (p.tp * p.pp * p.cp)),
      p.tp,
      p.pp,
      p.cp,
      p.ep,
      p.etp);
}

// "dp 4 {0 2 4 6} {1 3 5 7} | ep 2 {0 1} … {6 7}": which ranks each axis brings together.
std::string groups_line(const RunFacts& facts) {
  const MeshLayout mesh(mesh_config(facts.loaded.config.parallel), facts.host.size());
  const auto ranks = [](const std::vector<int>& group) {
    return group.size() <= 8 ? fmt::format("{{{}}}", fmt::join(group, " "))
                             : fmt::format("{{{} {} … {}}}", group[0], group[1], group.back());
  };
  std::string line = "mesh       groups of ranks:";
  for (int i = 0; i < kNumAxes; ++i) {
    const auto axis = static_cast<Axis>(i);
    if (mesh.extent(axis) == 1) continue;
    const auto groups = mesh.groups(std::span(&axis, 1));
    line += fmt::format("{} {} {} {}",
                        line.back() == ':' ? "" : " |",
                        name(axis),
                        mesh.extent(axis),
                        ranks(groups.front()));
    if (groups.size() > 2) line += " …";
    if (groups.size() > 1) line += " " + ranks(groups.back());
  }
  return line;
}

std::string model_line(const RunFacts& facts, const ModelPlan& plan) {
  const ParameterStore& params = *facts.assembly.params;
  std::int64_t held = 0;
  for (std::size_t i = 0; i < params.num_storages(); ++i)
    held += params.storage_shape(StorageId{static_cast<std::int32_t>(i)}).numel();
  for (const auto& spec : params.buffers()) {
    if (spec.is_parameter_in_checkpoint) held += spec.shape.numel();
  }
  std::string line = fmt::format("model      {} layers | {} parameters, {} active per token",
                                 plan.layers.size(),
                                 grouped(plan.model.all),
                                 grouped(plan.model.active));
  if (plan.mtp.all > 0)
    line += fmt::format(" | {} more for predicting further tokens", grouped(plan.mtp.all));
  return line + fmt::format(" | {} on a rank", grouped(held));
}

std::string flops_line(const ModelPlan& plan) {
  return fmt::format(
      "flops      training {:.2f} MFLOP per token = 3 x forward at {} tokens of context "
      "(moesaic plan prints the formula of every part)",
      static_cast<double>(plan.training_flops) / 1e6,
      plan.sequence_length);
}

// "MFU = …" with whose peak that is; on the CPU nobody expects one.
std::string mfu_text(const RunFacts& facts) {
  const bool is_gpu = facts.assembly.device.kind == Device::Kind::cuda;
  if (facts.peak.tflops == 0) return is_gpu ? "no MFU: " + facts.peak.source : "";
  return fmt::format("MFU = FLOPs of a step / (its seconds x {} {} x {} TFLOP/s, {})",
                     facts.host.size(),
                     is_gpu ? "GPU(s)" : "rank(s)",
                     facts.peak.tflops,
                     facts.peak.source);
}

std::string memory_line() {
  std::string line = "memory     per rank:";
  for (const auto& use : memory_in_use()) {
    if (static_cast<double>(use.bytes) >= 0.05 * kMiB)
      line += fmt::format(" {} {:.1f} MiB |", use.tag, static_cast<double>(use.bytes) / kMiB);
  }
  return line.substr(0, line.find_last_not_of(" |") + 1);
}

std::string checkpoint_line(const config::Config& c) {
  const auto& k = c.checkpoint;
  std::string line = fmt::format("checkpoint {}/checkpoints | ", c.run.dir);
  line += k.every > 0 ? fmt::format("every {} steps", k.every) : "none on the way";
  if (k.save_at_end) line += " and at the end";
  line += k.keep_last > 0 ? fmt::format(" | keep last {}", k.keep_last) : " | keep all";
  if (k.keep_every > 0) line += fmt::format(" and every multiple of {} steps", k.keep_every);
  return line;
}

std::vector<std::string> header_lines(const RunFacts& facts, const std::string& hosts) {
  const auto& c = facts.loaded.config;
  const ModelPlan plan = make_plan(c);
  std::vector<std::string> lines;
  lines.push_back(version_line(facts));
  lines.push_back(
      fmt::format("run        {} | seed {} | {} rank(s) x {} thread(s) | device {} | precision {}",
                  c.run.dir,
                  c.run.seed,
                  facts.host.size(),
                  c.run.threads,
                  to_string(facts.assembly.device),
                  name(facts.assembly.precision.compute)));
  lines.push_back("hosts      " + hosts);
  lines.push_back(layout_line(facts));
  if (facts.host.size() > 1) lines.push_back(groups_line(facts));
  if (const auto context = plan_context(facts.loaded.config, plan))
    lines.push_back("context    " + context_summary(context->phases.front()));
  if (const std::string exchange = exchange_text(c,
                                                 make_phases(c).front(),
                                                 facts.assembly.precision,
                                                 facts.assembly.params->position(),
                                                 facts.ranks_per_node);
      !exchange.empty())
    lines.push_back("tokens     " + exchange);
  lines.push_back(model_line(facts, plan));
  lines.push_back(flops_line(plan));
  if (const std::string mfu = mfu_text(facts); !mfu.empty()) lines.push_back("mfu        " + mfu);
  const auto data = data_lines(c, facts.train, facts.valid, plan, facts.host.size());
  lines.insert(lines.end(), data.begin(), data.end());
  lines.push_back(memory_line());
  if (facts.memory != nullptr && facts.memory->tiers) {
    lines.push_back("offload    " + offload_summary(c, *facts.memory));
    std::istringstream table(facts.memory->table());
    for (std::string line; std::getline(table, line);)
      lines.push_back(line);
  }
  if (facts.assembly.device.kind == Device::Kind::cuda) {
    lines.push_back(
        fmt::format("device     {} | {} | exchange between ranks {}",
                    cuda::device_name(facts.assembly.device),
                    facts.device_line,
                    facts.uses_nccl ? "NCCL " + device_communicator_version() : "none"));
  }
  lines.push_back(checkpoint_line(c));
  if (const auto set = notable_variables(); !set.empty())
    lines.push_back(fmt::format("env        {}", fmt::join(set, " ")));
  lines.push_back("stop       " + how_to_stop(c.run.dir));
  return lines;
}

}  // namespace

RunHeader run_header(const RunFacts& facts) {
  RunHeader header;
  const std::string hosts = host_list(facts.host.all_gather_host(host_name()));
  const std::string warning = binding_warning(facts.host, facts.loaded.config.run.threads);
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
  if (const std::string mfu = mfu_text(facts); !mfu.empty()) header.texts["mfu"] = mfu;
  header.texts["hosts"] = hosts;
  header.lines = header_lines(facts, hosts);
  if (!warning.empty()) header.lines.push_back("warning    " + warning);
  return header;
}

}  // namespace moesaic::apps
