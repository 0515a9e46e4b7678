#include <algorithm>

#include <fmt/format.h>

#include "core/config/check_parts.h"
#include "core/config/check_topics.h"

namespace moesaic::config {
namespace {

using Keys = std::vector<std::string>;

class TrainingChecker : public Checker {
 public:
  using Checker::Checker;

  void run() {
    data();
    batch();
    phases();
    optimizer();
  }

 private:
  void data() {
    if (config_.data.format == DataFormat::bytes_text && model_.vocab_size < 256) {
      add({"model.vocab_size", "data.format"},
          fmt::format(
              "found {}; data.format bytes_text has 256 different tokens; allowed: at least 256",
              model_.vocab_size));
    }
    if (config_.data.end_of_text && *config_.data.end_of_text >= model_.vocab_size) {
      add({"data.end_of_text", "model.vocab_size"},
          fmt::format("found {}; allowed: below model.vocab_size ({})",
                      *config_.data.end_of_text,
                      model_.vocab_size));
    }
    weights();
    if (uses_data_length() && config_.data.sequence_length > model_.max_position_embeddings) {
      add({"data.sequence_length", "model.max_position_embeddings"},
          fmt::format("found {}; allowed: at most model.max_position_embeddings ({})",
                      config_.data.sequence_length,
                      model_.max_position_embeddings));
    }
    if (config_.train.eval_every > 0 && config_.data.valid.empty()) {
      add({"train.eval_every", "data.valid"},
          "there is nothing to evaluate on; set data.valid, or eval_every: 0");
    }
  }

  /// A blend has a weight for every entry; held-out data has none.
  void weights() {
    const auto& train = config_.data.train;
    const auto has_weight = [](const DataFileConfig& file) { return file.weight.has_value(); };
    const bool blend = std::any_of(train.begin(), train.end(), has_weight);
    for (std::size_t i = 0; blend && i < train.size(); ++i) {
      if (!train[i].weight)
        add({fmt::format("data.train[{}]", i), "data.train"},
            fmt::format(
                "has no weight, but others have; give every entry one: {{path: {}, weight: 1}}",
                train[i].path));
    }
    for (std::size_t i = 0; i < config_.data.valid.size(); ++i) {
      if (config_.data.valid[i].weight)
        add({fmt::format("data.valid[{}].weight", i), "data.valid"},
            "held-out data is not drawn by weight; remove it");
    }
  }

  /// A number that derive_steps() could not find is 0 here, and has been complained about.
  void batch() {
    batch("train.", config_.train.global_batch_size, config_.train.micro_batch_size);
    for (std::size_t i = 0; i < config_.train.phases.size(); ++i) {
      const PhaseConfig& phase = config_.train.phases[i];
      if (!phase.global_batch_size && !phase.micro_batch_size &&
          !(phase.sequence_length && config_.train.global_batch_tokens))
        continue;
      const std::int64_t length = phase.sequence_length.value_or(config_.data.sequence_length);
      batch(fmt::format("train.phases[{}].", i),
            config_.train.global_batch_tokens
                ? *config_.train.global_batch_tokens / std::max<std::int64_t>(1, length)
                : phase.global_batch_size.value_or(config_.train.global_batch_size),
            phase.micro_batch_size.value_or(config_.train.micro_batch_size));
    }
  }

  /// "; or micro_batch_size 2, 4".
  std::string nearest_micro(std::int64_t batch, std::int64_t micro) const {
    const std::int64_t ranks = config_.parallel.dp.value_or(1), share = batch / ranks;
    if (batch % ranks != 0 || share < 1 || share > kMostToSearch) return "";
    return fmt::format("; or micro_batch_size {}", near_divisors(share, micro));
  }

  void batch(const std::string& section, std::int64_t batch, std::int64_t micro) {
    const std::int64_t unit = micro * config_.parallel.dp.value_or(1);
    if (unit < 1 || batch % unit == 0) return;
    const std::int64_t below = batch / unit * unit;
    const std::string near =
        below > 0 ? fmt::format("{}, {}", below, below + unit) : fmt::format("{}", below + unit);
    const std::string by =
        config_.parallel.dp ? "micro_batch_size * parallel.dp" : "micro_batch_size";
    add({section + "global_batch_size", section + "micro_batch_size", "parallel.dp"},
        fmt::format("{} is not divisible by {} ({}). Nearest valid: {}{}",
                    batch,
                    by,
                    unit,
                    near,
                    nearest_micro(batch, micro)));
  }

  void phases() {
    const std::vector<PhaseConfig>& phases = config_.train.phases;
    std::int64_t before = 0;
    for (std::size_t i = 0; i < phases.size(); ++i) {
      const std::string key = fmt::format("train.phases[{}]", i);
      const PhaseConfig& phase = phases[i];
      if (phase.until < 1) return;
      if (phase.until <= before)
        add({key + ".until", "train.phases"},
            fmt::format("found {}; phases end one after the other; allowed: more than {}",
                        phase.until,
                        before));
      before = phase.until;
      if (phase.sequence_length.value_or(1) > model_.max_position_embeddings) {
        add({key + ".sequence_length", "model.max_position_embeddings"},
            fmt::format("found {}; allowed: at most model.max_position_embeddings ({})",
                        *phase.sequence_length,
                        model_.max_position_embeddings));
      }
      if (phase.sparse_stage == SparseStage::warmup && !model_.indexer)
        add({key + ".sparse_stage", "model.indexer"},
            "there is no model.indexer to warm up; allowed: sparse");
      const std::int64_t length = phase.until - (i == 0 ? 0 : phases[i - 1].until);
      const OptimizerConfig& optimizer = config_.optimizer;
      if (phase.warmup_steps && !phase.lr_schedule)
        add({key + ".warmup_steps"},
            "belongs to a schedule of the phase's own; give lr_schedule in this phase too");
      if (phase.lr_schedule && length > 0) {
        const std::int64_t warmup = phase.warmup_steps.value_or(0);
        if (warmup > length)
          add({key + ".warmup_steps"},
              fmt::format("found {}; allowed: at most the phase's {} steps", warmup, length));
        else if (*phase.lr_schedule == LrSchedule::wsd && warmup + optimizer.decay_steps > length)
          add({key + ".lr_schedule", "optimizer.decay_steps"},
              fmt::format(
                  "warm-up ({}) and optimizer.decay_steps ({}) do not fit the phase's {} steps",
                  warmup,
                  optimizer.decay_steps,
                  length));
      }
      if (phase.lr_min.value_or(config_.optimizer.lr_min) > phase.lr.value_or(config_.optimizer.lr))
        add({key + (phase.lr_min ? ".lr_min" : ".lr"), "optimizer.lr", "optimizer.lr_min"},
            "lr_min is above lr in this phase");
    }
    if (!phases.empty() && config_.train.steps > 0 && before != config_.train.steps) {
      add({fmt::format("train.phases[{}].until", phases.size() - 1), "train.steps", "train.phases"},
          fmt::format("found {}; the last phase ends with the run; allowed: train.steps ({})",
                      before,
                      config_.train.steps));
    }
  }

  void optimizer() {
    const OptimizerConfig& optimizer = config_.optimizer;
    const std::int64_t steps = config_.train.steps > 0 ? config_.train.steps : INT64_MAX;
    if (optimizer.lr_min > optimizer.lr)
      add({"optimizer.lr_min", "optimizer.lr"},
          fmt::format("found {}; allowed: at most lr ({})", optimizer.lr_min, optimizer.lr));
    if (optimizer.warmup_steps > steps)
      add({"optimizer.warmup_steps", "train.steps"},
          fmt::format(
              "found {}; allowed: at most train.steps ({})", optimizer.warmup_steps, steps));
    const bool wsd = optimizer.lr_schedule == LrSchedule::wsd;
    if (wsd && optimizer.warmup_steps + optimizer.decay_steps > steps &&
        optimizer.warmup_steps <= steps) {
      add({"optimizer.decay_steps", "optimizer.warmup_steps", "train.steps"},
          fmt::format(
              "found {}; warm-up and decay do not fit into train.steps ({}); allowed: at most {}",
              optimizer.decay_steps,
              steps,
              steps - optimizer.warmup_steps));
    }
    const bool wide = config_.run.precision == PrecisionChoice::f32 ||
                      config_.run.precision == PrecisionChoice::f64;
    if (optimizer.master == MasterWeights::split && wide)
      add({"optimizer.master", "run.precision"},
          fmt::format("found split; weights of precision {} are their own masters; allowed: f32",
                      name_of(config_.run.precision)));
    if (optimizer.qk_clip_tau && full_attention_layers() == 0 && !has_mtp())
      add({"optimizer.qk_clip_tau", "model.linear_attn_config"},
          "there is no full-attention layer that it could act on; remove the key");
  }
};

}  // namespace

void add_training_findings(const Config& config, std::vector<Finding>& findings) {
  TrainingChecker(config, findings).run();
}

}  // namespace moesaic::config
