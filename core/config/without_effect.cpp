#include "core/config/without_effect.h"

#include <algorithm>
#include <string>
#include <utility>

#include <fmt/format.h>

namespace moesaic::config {
namespace {

class Search {
 public:
  explicit Search(const Config& config) : config_(config) {}

  std::vector<Finding> run() {
    run_and_data();
    schedules();
    optimizer();
    parallel();
    dispatch();
    experts();
    offload();
    others();
    return std::move(found_);
  }

 private:
  /// `is_set`: to something else than the default. `cause`: the key that would have to be another one.
  void add(bool is_set, const std::string& key, const std::string& cause, std::string message) {
    if (is_set) found_.push_back({{key, cause}, std::move(message)});
  }
  /// A member of a section, against its default.
  template <class Section, class Value>
  bool differs(Section Config::*section, Value Section::*member) const {
    return config_.*section.*member != defaults_.*section.*member;
  }

  bool has_experts() const { return config_.model.num_experts > 0; }
  bool offloads_experts() const { return config_.experts.offload != ExpertOffload::none; }
  bool offloads_activations() const {
    return config_.activations.residual_offload || !config_.activations.offload.empty();
  }

  void run_and_data() {
    const auto& indexer = config_.model.indexer;
    const bool may_vary = indexer && indexer->key_sums == KeySumsChoice::float_atomics;
    add(!config_.run.deterministic && !may_vary,
        "run.deterministic",
        "model.indexer.key_sums",
        "false changes nothing by itself; it allows model.indexer.key_sums: float_atomics");
    add(differs(&Config::train, &TrainConfig::eval_batches) && config_.data.valid.empty(),
        "train.eval_batches",
        "data.valid",
        "is of use with data.valid, on which is evaluated");
  }

  /// Whether the run, or a phase of it, follows this schedule.
  bool follows(LrSchedule schedule) const {
    const auto& phases = config_.train.phases;
    return config_.optimizer.lr_schedule == schedule ||
           std::any_of(phases.begin(), phases.end(), [&](const PhaseConfig& phase) {
             return phase.lr_schedule == schedule;
           });
  }

  void schedules() {
    const std::string cause = "optimizer.lr_schedule";
    const auto of_decay = [&](bool is_set, const std::string& key) {
      add(is_set && !follows(LrSchedule::wsd),
          key,
          cause,
          "is of use with optimizer.lr_schedule: wsd, which decays over the last steps");
    };
    of_decay(differs(&Config::optimizer, &OptimizerConfig::decay_steps), "optimizer.decay_steps");
    of_decay(differs(&Config::optimizer, &OptimizerConfig::decay_shape), "optimizer.decay_shape");
    add(differs(&Config::optimizer, &OptimizerConfig::lr_min) && !follows(LrSchedule::wsd) &&
            !follows(LrSchedule::cosine),
        "optimizer.lr_min",
        cause,
        "is of use with optimizer.lr_schedule: cosine or wsd; constant stays at optimizer.lr");
  }

  void optimizer() {
    const auto of_muon = [&](bool is_set, const char* key) {
      add(is_set && config_.optimizer.name != OptimizerName::muon,
          std::string("optimizer.") + key,
          "optimizer.name",
          "is of use with optimizer.name: muon");
    };
    of_muon(differs(&Config::optimizer, &OptimizerConfig::muon_momentum), "muon_momentum");
    of_muon(differs(&Config::optimizer, &OptimizerConfig::muon_nesterov), "muon_nesterov");
    of_muon(differs(&Config::optimizer, &OptimizerConfig::muon_per_head), "muon_per_head");
    of_muon(differs(&Config::optimizer, &OptimizerConfig::ns_steps), "ns_steps");
    of_muon(differs(&Config::optimizer, &OptimizerConfig::ns_products), "ns_products");
    const Untouched untouched = config_.optimizer.untouched;
    add(untouched != Untouched::dense && !has_experts(),
        "optimizer.untouched",
        "model.num_experts",
        "is about experts, and there are none (model.num_experts is 0)");
    add(untouched == Untouched::lazy && has_experts() &&
            config_.experts.offload != ExpertOffload::full,
        "optimizer.untouched",
        "experts.offload",
        "lazy does what dense does here: it takes experts.offload=full for an update to wait");
  }

  void parallel() {
    add(differs(&Config::parallel, &ParallelConfig::schedule) && config_.parallel.pp == 1,
        "parallel.schedule",
        "parallel.pp",
        "is of use with parallel.pp above 1, in a pipeline");
  }

  /// The types of tokens and gradients are not among them: every layout trains the same model.
  void dispatch() {
    const DispatchConfig& dispatch = config_.dispatch;
    const bool exchanges = has_experts() && config_.parallel.ep > 1;
    const auto of_exchange = [&](bool is_set, const char* key) {
      add(is_set && !exchanges,
          std::string("dispatch.") + key,
          "parallel.ep",
          "is of use with parallel.ep above 1, where tokens go to the experts of other ranks");
    };
    of_exchange(differs(&Config::dispatch, &DispatchConfig::exchange), "exchange");
    of_exchange(differs(&Config::dispatch, &DispatchConfig::buffer_factor), "buffer_factor");
    of_exchange(differs(&Config::dispatch, &DispatchConfig::overlap), "overlap");
    of_exchange(differs(&Config::dispatch, &DispatchConfig::chunks), "chunks");
    of_exchange(differs(&Config::dispatch, &DispatchConfig::checksum), "checksum");
    const bool is_hierarchical = exchanges && dispatch.exchange == Exchange::hierarchical;
    const std::string reason = "is of use with dispatch.exchange: hierarchical";
    add(differs(&Config::dispatch, &DispatchConfig::hierarchy) && !is_hierarchical,
        "dispatch.hierarchy",
        "dispatch.exchange",
        reason);
    add(differs(&Config::dispatch, &DispatchConfig::hops) &&
            !(is_hierarchical && dispatch.hierarchy == Hierarchy::intra_first),
        "dispatch.hops",
        "dispatch.exchange",
        reason + " and dispatch.hierarchy: intra_first");
  }

  void experts() {
    const ExpertsConfig& experts = config_.experts;
    const bool are_spread = has_experts() && config_.parallel.ep > 1;
    add(experts.place_every > 0 && !are_spread,
        "experts.place_every",
        "parallel.ep",
        "is of use with parallel.ep above 1, where there are ranks to deal experts to");
    add(experts.replicas > 0 && !are_spread,
        "experts.replicas",
        "parallel.ep",
        "is of use with parallel.ep above 1, where there are experts of other ranks to copy");
    add(differs(&Config::experts, &ExpertsConfig::place_decay) && experts.place_every == 0,
        "experts.place_decay",
        "experts.place_every",
        "is of use with experts.place_every above 0, which goes by the average load");
  }

  void offload() {
    const MemoryConfig& memory = config_.memory;
    add(memory.host_budget.has_value() && !offloads_experts() && !offloads_activations(),
        "memory.host_budget",
        "experts.offload",
        "nothing is offloaded to host memory; it counts with experts.offload: states or full, "
        "activations.residual_offload or activations.offload");
    const auto of_experts = [&](bool is_set, const std::string& key) {
      add(is_set && !offloads_experts(),
          key,
          "experts.offload",
          "no experts are offloaded; it counts with experts.offload: states or full");
    };
    of_experts(memory.file_budget.has_value(), "memory.file_budget");
    of_experts(memory.file_path.has_value(), "memory.file_path");
    of_experts(config_.experts.device_cache.has_value(), "experts.device_cache");
    of_experts(differs(&Config::experts, &ExpertsConfig::policy), "experts.policy");
    add(!memory.verify_reads && !(offloads_experts() && memory.file_budget),
        "memory.verify_reads",
        "memory.file_budget",
        "is about the file of offloaded experts; it counts with experts.offload, memory.file_path "
        "and memory.file_budget");
  }

  void others() {
    add(config_.checkpoint.on_error != OnSaveError::stop && config_.checkpoint.every == 0,
        "checkpoint.on_error",
        "checkpoint.every",
        "is of use with checkpoint.every above 0: the last save of a run always has to succeed");
    add(differs(&Config::comm, &CommConfig::first_step_s) && config_.comm.watchdog_s == 0,
        "comm.first_step_s",
        "comm.watchdog_s",
        "is of use with comm.watchdog_s above 0; 0 waits for ever");
  }

  const Config& config_;
  const Config defaults_;
  std::vector<Finding> found_;
};

}  // namespace

std::vector<Finding> without_effect(const Config& config) {
  return Search(config).run();
}

}  // namespace moesaic::config
