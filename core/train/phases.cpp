#include "core/train/phases.h"

#include <algorithm>

#include "core/config/phase_extent.h"
#include "core/model/from_config.h"

namespace moesaic {
namespace {

LrSchedule::Kind kind_of(config::LrSchedule s) {
  switch (s) {
    case config::LrSchedule::constant:
      return LrSchedule::Kind::constant;
    case config::LrSchedule::cosine:
      return LrSchedule::Kind::cosine;
    case config::LrSchedule::wsd:
      return LrSchedule::Kind::wsd;
  }
  return LrSchedule::Kind::constant;
}

LrSchedule::Shape shape_of(config::DecayShape s) {
  switch (s) {
    case config::DecayShape::linear:
      return LrSchedule::Shape::linear;
    case config::DecayShape::cosine:
      return LrSchedule::Shape::cosine;
    case config::DecayShape::one_minus_sqrt:
      return LrSchedule::Shape::one_minus_sqrt;
  }
  return LrSchedule::Shape::linear;
}

LrSchedule run_schedule(const config::Config& c) {
  const auto& o = c.optimizer;
  LrSchedule s;
  s.kind = kind_of(o.lr_schedule);
  s.shape = shape_of(o.decay_shape);
  s.peak = o.lr;
  s.floor = o.lr_min;
  s.warmup_steps = o.warmup_steps;
  s.total_steps = c.train.steps;
  s.decay_steps = o.decay_steps;
  return s;
}

}  // namespace

std::vector<Phase> make_phases(const config::Config& config) {
  std::vector<Phase> phases;
  const LrSchedule whole = run_schedule(config);
  for (const config::PhaseExtent& extent : config::phase_extents(config)) {
    Phase p;
    p.index = static_cast<int>(phases.size());
    p.begin = extent.begin;
    p.until = extent.until;
    p.sequence_length = extent.sequence_length;
    p.global_batch_size = extent.global_batch_size;
    p.micro_batch_size = extent.micro_batch_size;
    p.pieces =
        std::max<std::int64_t>(1, config::pieces_of_micro_batch(config, p.micro_batch_tokens()));
    p.schedule = whole;
    if (!config.train.phases.empty()) {
      const auto& c = config.train.phases[phases.size()];
      p.own_schedule = c.lr_schedule.has_value();
      if (p.own_schedule) {
        p.schedule.kind = kind_of(*c.lr_schedule);
        p.schedule.total_steps = p.until - p.begin;
        p.schedule.warmup_steps = c.warmup_steps.value_or(0);
      }
      if (c.lr) p.schedule.peak = *c.lr;
      if (c.lr_min) p.schedule.floor = *c.lr_min;
      p.sparse = c.sparse_stage == config::SparseStage::sparse;
      p.freeze = c.freeze;
      for (const auto& s : c.lr_scale)
        p.lr_scale.emplace_back(s.pattern, s.scale);
    }
    p.schedule.check();
    phases.push_back(p);
  }
  return phases;
}

const Phase& phase_of(const std::vector<Phase>& phases, std::int64_t step) {
  const auto it =
      std::find_if(phases.begin(), phases.end(), [&](const Phase& p) { return step <= p.until; });
  return it == phases.end() ? phases.back() : *it;
}

bool trains(const Phase& phase, const ParameterSpec& spec) {
  return !is_frozen(spec, phase.freeze, !phase.sparse);
}

std::vector<char> ever_trained(const std::vector<Phase>& phases, const ParameterStore& params) {
  std::vector<char> flags;
  for (const ParameterSpec& spec : params.params()) {
    flags.push_back(
        std::any_of(phases.begin(), phases.end(), [&](const Phase& p) { return trains(p, spec); })
            ? 1
            : 0);
  }
  return flags;
}

}  // namespace moesaic
