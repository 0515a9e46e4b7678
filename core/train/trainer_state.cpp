// What a checkpoint holds of a trainer.
#include <algorithm>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "core/model/from_config.h"
#include "core/train/offloaded_state.h"
#include "core/train/optimizer_config.h"
#include "core/train/store_ids.h"
#include "core/train/trainer.h"
#include "core/train/weights_alone.h"
#include "kernels/ops/elementwise.h"

namespace moesaic {

std::vector<StateTensor> weight_tensors(const ParameterStore& params) {
  std::vector<StateTensor> all;
  for (std::size_t i = 0; i < params.params().size(); ++i) {
    const ParamId id{static_cast<std::int32_t>(i)};
    for (std::int64_t e = 0; e < params.members_here(id); ++e) {
      if (params.own_piece(id, e).is_empty()) continue;  // another rank's
      if (params.keeps_weights_alone()) {
        all.push_back(weight_to_load(params, id, e));
        continue;
      }
      if (params.has_tiered_state(params.storage_of(id))) {
        all.push_back(master_of_member(params, id, e));
        continue;
      }
      const TensorView remainder = params.remainder(id, e);
      all.push_back({params.member_name(id, e),
                     remainder.empty() ? params.master(id, e) : params.own_weight(id, e),
                     remainder,
                     place_in_whole(params, id, e)});
    }
  }
  for (std::size_t i = 0; i < params.buffers().size(); ++i) {
    const BufferSpec& spec = params.buffers()[i];
    if (spec.lifetime != Lifetime::persistent) continue;
    all.push_back({spec.checkpoint_name(), params.buffer({static_cast<std::int32_t>(i)})});
  }
  return all;
}

void refresh_weights(const ParameterStore& params, Backend& backend) {
  for (std::size_t s = 0; s < params.num_storages(); ++s) {
    if (params.has_tiered_state(storage_id(s))) refresh_offloaded(params, storage_id(s), backend);
  }
  for (std::size_t i = 0; i < params.params().size(); ++i) {
    const ParamId id = param_id(i);
    if (params.masters_are_weights(id) || params.has_tiered_state(params.storage_of(id))) continue;
    for (std::int64_t e = 0; e < params.members_here(id); ++e) {
      const TensorView master = params.master(id, e);  // empty: split, or another rank's
      if (!master.empty()) run(backend, Cast{.y = params.own_weight(id, e), .x = master});
    }
  }
}

namespace {

// "optimizer/m/NAME", "ema/NAME": NAME.
std::string parameter_of(const std::string& tensor) {
  for (const char* kind : {"optimizer/m/", "optimizer/v/", "optimizer/momentum/", "ema/"}) {
    if (tensor.starts_with(kind)) return tensor.substr(std::string_view(kind).size());
  }
  return tensor;
}

}  // namespace

std::vector<StateTensor> Trainer::state() const {
  std::vector<StateTensor> all = weight_tensors(*parts_.params);
  const auto optimizer = parts_.optimizer->state();
  all.insert(all.end(), optimizer.begin(), optimizer.end());
  return all;
}

bool Trainer::is_split() const {
  const ParameterStore& params = *parts_.params;
  if (is_pipelined() || !params.buckets().empty()) return true;
  return std::any_of(params.params().begin(), params.params().end(), [&](const ParameterSpec& s) {
    return std::any_of(
        s.placement.splits.begin(), s.placement.splits.end(), [&](const Placement::Split& split) {
          return params.position().extent(split.axis) > 1;
        });
  });
}

std::vector<StateTensor> Trainer::owned_state() const {
  const ParameterStore& params = *parts_.params;
  std::set<std::string> of_others;  // parameters for which another rank speaks
  for (std::size_t i = 0; i < params.params().size(); ++i) {
    const ParamId id{static_cast<std::int32_t>(i)};
    // Every owner writes its pieces.
    if (params.is_sharded(id) || params.speaks_for(id)) continue;
    for (std::int64_t e = 0; e < params.members_here(id); ++e)
      of_others.insert(params.member_name(id, e));
  }
  // What belongs to no parameter is the same on all ranks that have it.
  const bool is_first = params.position().is_first_of_stage();
  std::set<std::string> buffers;
  for (const BufferSpec& spec : params.buffers())
    buffers.insert(spec.checkpoint_name());
  std::vector<StateTensor> all = state();
  std::erase_if(all, [&](const StateTensor& t) {
    return buffers.contains(t.name) ? !is_first : of_others.contains(parameter_of(t.name));
  });
  return all;
}

std::vector<StateTensor> Trainer::state_of_all_ranks() const {
  ParameterStore params(parts_.params->precision());
  const Model model(params, model_options(*parts_.config));
  params.seal_pretend(parts_.device, ever_trained(phases_, params));
  const Optimizer optimizer(params, optimizer_options(parts_.config->optimizer));
  std::vector<StateTensor> all = weight_tensors(params);
  const auto state = optimizer.state();
  all.insert(all.end(), state.begin(), state.end());
  return all;
}

std::vector<StateTensor> Trainer::weights() const {
  std::vector<StateTensor> all = weight_tensors(*parts_.params);
  std::erase_if(all, [](const StateTensor& t) { return t.name.starts_with("buffer/"); });
  return all;
}

void Trainer::weights_were_loaded() {
  MOESAIC_CHECK(step_ == 0, "weights alone are loaded before the first step");
  refresh_weights(*parts_.params, backend_->backend());
  gather_weights(true);
}

// What decided which samples were used up to this step. Later phases may still change, and the present one's end.
std::string Trainer::data_order() const {
  std::string text = fmt::format("run.seed={} train.global_batch_size={} tokens of data.train={}",
                                 parts_.config->run.seed,
                                 parts_.config->train.global_batch_size,
                                 parts_.train.num_tokens());
  if (parts_.train.sets.size() > 1) {
    for (const auto& set : parts_.train.sets)
      text += fmt::format(" (weight {} tokens {})", set.weight, set.source->num_tokens());
  }
  for (const Phase& p : phases_) {
    if (p.begin == 0 || p.begin < step_)
      text += fmt::format(" sequence_length={} after step {}", p.sequence_length, p.begin);
    if ((p.begin == 0 || p.begin < step_) &&
        p.global_batch_size != parts_.config->train.global_batch_size)
      text += fmt::format(" in batches of {}", p.global_batch_size);
  }
  return text;
}

namespace {

// Counters of parameters that only other stages have.
void add_of_other_stages(StateValues& values, Communicator& stages) {
  std::string own;
  for (const auto& [name, value] : values.integers)
    own += fmt::format("{}={}\n", name, value);
  for (const std::string& from : stages.all_gather_host(own)) {
    std::istringstream lines(from);
    for (std::string line; std::getline(lines, line);) {
      const auto equals = line.find('=');
      values.integers.emplace(line.substr(0, equals), std::stoll(line.substr(equals + 1)));
    }
  }
}

}  // namespace

StateValues Trainer::values() const {
  StateValues v;
  v.integers["step"] = step_;
  v.integers["tokens_seen"] = tokens_seen_;
  v.integers["skipped_steps"] = skipped_total_;
  v.integers["consecutive_bad_steps"] = bad_steps_;
  v.texts["data_order"] = data_order();
  if (placer_) v.integers["experts.ranks"] = parts_.params->position().extent(Axis::ep);
  parts_.optimizer->save_counters(v);
  if (is_pipelined()) add_of_other_stages(v, *stages());
  return v;
}

void Trainer::load_values(const StateValues& values) {
  const auto get = [&](const char* name) {
    const auto it = values.integers.find(name);
    if (it == values.integers.end())
      throw InputError(fmt::format("the checkpoint's manifest holds no value '{}'", name));
    return it->second;
  };
  step_ = get("step");
  tokens_seen_ = get("tokens_seen");
  skipped_total_ = get("skipped_steps");
  bad_steps_ = get("consecutive_bad_steps");
  const auto order = values.texts.find("data_order");
  const std::string saved = order == values.texts.end() ? "nothing" : order->second;
  if (saved != data_order()) {
    throw UsageError(
        fmt::format("the order of the data would change: the checkpoint was made with {}, this "
                    "configuration says {}. Set these keys back, or start "
                    "anew in another run.dir.",
                    saved,
                    data_order()));
  }
  if (expert_updates_) expert_updates_->finish();  // they are of the steps before
  parts_.optimizer->load_counters(values);
  refresh_weights(*parts_.params, backend_->backend());
  gather_weights(true);
  if (placer_) {
    const auto ranks = values.integers.find("experts.ranks");
    placer_->restore(ranks == values.integers.end() ? 0 : ranks->second, backend_->stream());
  }
  if (copier_) copier_->send_weights(backend_->stream());
  phase_ = -1;
}

std::vector<DataUse> Trainer::data_use() const {
  const auto& sets = parts_.train.sets;
  const std::vector<double> weights = parts_.train.weights();
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<DataUse> use;
  for (const auto& set : sets)
    use.push_back({set.source->name(), set.weight / all, 0, 0, 0});
  for (const Phase& p : phases_) {
    const std::int64_t steps = std::min(step_, p.until) - p.begin;
    if (steps <= 0) break;
    const data::BlendOrder order(
        weights, static_cast<std::uint64_t>(parts_.config->run.seed), p.index);
    const auto counts = order.counts(steps * p.global_batch_size);
    for (std::size_t i = 0; i < sets.size(); ++i) {
      use[i].samples += counts[i];
      use[i].tokens += counts[i] * p.sequence_length;
      use[i].epochs += static_cast<double>(counts[i]) /
                       static_cast<double>(data::num_windows(sets[i].source, p.sequence_length));
    }
  }
  return use;
}

}  // namespace moesaic
