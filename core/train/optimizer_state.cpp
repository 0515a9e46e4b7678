// What an optimizer keeps from step to step: its memory, and what checkpoints hold of it.
#include "core/train/offloaded_state.h"
#include "core/train/optimizer.h"
#include "core/train/store_ids.h"
#include "kernels/ops/elementwise.h"

namespace moesaic {
namespace {
constexpr std::int64_t kAlignElements = 64;
std::int64_t aligned(std::int64_t n) {
  return (n + kAlignElements - 1) / kAlignElements * kAlignElements;
}
}  // namespace

void Optimizer::allocate_state(DType master) {
  states_.resize(params_.num_storages());
  std::int64_t elements = 0;
  // Counts first, then hands out.
  for (const bool counting : {true, false}) {
    TensorView all;
    if (!counting) {
      memory_ = params_.allocate(static_cast<std::size_t>(elements) * byte_size(master),
                                 "optimizer state");
      all = memory_.view({elements}, master);
    }
    std::int64_t at = 0;
    const auto take = [&](TensorView& view, std::int64_t n) {
      if (!counting) view = all.rows(at, at + n);
      at += aligned(n);
    };
    for (std::size_t s = 0; s < states_.size(); ++s) {
      const auto ids = params_.params_of(storage_id(s));
      if (ids.empty() || params_.has_tiered_state(storage_id(s))) continue;
      const Entry& first = entry(ids.front());
      for (const ParamId id : ids)
        MOESAIC_CHECK(entry(id).trained == first.trained && entry(id).muon == first.muon,
                      "the parameters of a storage are optimised alike");
      const FlatRange& own = params_.own_range(storage_id(s));
      const std::int64_t n = own.end - own.begin;
      if (n == 0) continue;
      if (first.trained && first.muon) take(states_[s].momentum, n);
      if (first.trained && !first.muon) {
        take(states_[s].m, n);
        take(states_[s].v, n);
      }
      if (options_.ema_decay) take(states_[s].average, n);
    }
    elements = at;
  }
}

// Device memory starts with anything.
void Optimizer::clear_state() {
  Stream stream(params_.device(),
                "optimizer state",
                params_.is_pretend() ? Stream::Mode::dry : Stream::Mode::immediate);
  if (memory_.bytes() > 0)
    zero_tensor(memory_.view({static_cast<std::int64_t>(memory_.bytes())}, DType::u8), stream);
  if (!params_.is_pretend()) stream.synchronize();
}

std::optional<StateTensor::Place> place_in_whole(const ParameterStore& params,
                                                 ParamId id,
                                                 std::int64_t member) {
  const LocalBlock block = params.own_piece(id, member).block;
  const Shape& whole = params.spec(id).shape;
  if (block.extent == whole) return std::nullopt;
  return StateTensor::Place{whole, block.offset};
}

std::vector<StateTensor> Optimizer::state() const {
  std::vector<StateTensor> all;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const ParamId id = param_id(i);
    const State& own = state_of(id);
    for (std::int64_t k = 0; k < params_.members_here(id); ++k) {
      if (params_.own_piece(id, k).is_empty()) continue;
      const std::string name = params_.member_name(id, k);
      if (params_.has_tiered_state(params_.storage_of(id))) {
        add_of_member(all, id, k);
        continue;
      }
      const auto add = [&](const char* kind, const TensorView& view) {
        if (!view.empty())
          all.push_back(
              {kind + name, params_.part_of(view, id, k), {}, place_in_whole(params_, id, k)});
      };
      add("optimizer/m/", own.m);
      add("optimizer/v/", own.v);
      add("optimizer/momentum/", own.momentum);
      add("ema/", own.average);
    }
  }
  return all;
}

void Optimizer::add_of_member(std::vector<StateTensor>& all,
                              ParamId id,
                              std::int64_t member) const {
  const std::vector<std::string> kinds = expert_state_kinds(options_);
  for (std::size_t k = 0; k < kinds.size(); ++k) {
    const bool is_average = kinds[k] == kAverageKind;
    if (!is_average && !entry(id).trained) continue;
    const std::string prefix = is_average ? "ema/" : "optimizer/" + kinds[k] + "/";
    all.push_back(state_of_member(
        params_, id, member, prefix + params_.member_name(id, member), static_cast<int>(k)));
  }
}

std::vector<TensorView> Optimizer::state_of_storage(StorageId id) const {
  MOESAIC_CHECK(!params_.has_tiered_state(id), "offloaded state comes with ExpertTiers");
  const State& own = states_[static_cast<std::size_t>(id.index)];
  const Entry& of = entry(params_.params_of(id).front());
  std::vector<TensorView> kinds;
  if (of.trained && of.muon) kinds = {own.momentum};
  if (of.trained && !of.muon) kinds = {own.m, own.v};
  if (options_.ema_decay) kinds.push_back(own.average);
  return kinds;
}

void Optimizer::save_counters(StateValues& values) const {
  values.integers["optimizer.updates"] = updates_;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    // Only what differs from the rule: parameters that were frozen in some of the updates.
    if (entries_[i].trained && entries_[i].updates != updates_)
      values.integers["optimizer.updates_of." + params_.params()[i].name] = entries_[i].updates;
  }
}

void Optimizer::load_counters(const StateValues& values) {
  const auto it = values.integers.find("optimizer.updates");
  if (it == values.integers.end())
    throw InputError("the checkpoint's manifest holds no optimizer.updates");
  updates_ = it->second;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto own = values.integers.find("optimizer.updates_of." + params_.params()[i].name);
    entries_[i].updates =
        own == values.integers.end() ? (entries_[i].trained ? updates_ : 0) : own->second;
  }
}

}  // namespace moesaic
