#pragma once
// Steps of forward, backward and update on experts, resident or offloaded, on any device.
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#include "core/base/random.h"
#include "kernels/backend.h"
#include "kernels/ops/adamw.h"
#include "kernels/ops/grouped_gemm.h"
#include "tests/nn/expert_tiers_support.h"

namespace moesaic::test {

using tiers::VisitKind;

// Draws that depend on a key alone, so that two runs of a test's steps draw the same.
struct Draws {
  std::uint64_t key, n = 0;
  double next() { return uniform(mix64(key), n++); }
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(next() * static_cast<double>(bound));
  }
};

inline double at(const TensorView& t, std::int64_t i) {
  return t.dtype() == DType::f64   ? t.as<double>()[i]
         : t.dtype() == DType::f32 ? t.as<float>()[i]
                                   : static_cast<float>(t.as<bf16>()[i]);
}
inline void put(const TensorView& t, std::int64_t i, double x) {
  if (t.dtype() == DType::f64) t.as<double>()[i] = x;
  if (t.dtype() == DType::f32) t.as<float>()[i] = static_cast<float>(x);
  if (t.dtype() == DType::bf16) t.as<bf16>()[i] = bf16(static_cast<float>(x));
}

/// The steps of a test on one store.
class Steps {
 public:
  Steps(Experts& experts, const Run& run)
      : experts_(experts),
        store_(experts.store),
        owner_({.device = store_.device(), .mode = run.mode, .scratch_bytes = 1 << 20}) {
    store_.initialize(7);
    scalars_ = keep({kNumStepScalars}, store_.precision().master);
    for (const auto& layer : experts.storages)
      for (const StorageId id : layer)
        for (auto* kind : {&m_, &v_})
          kind->emplace(id.index, keep(store_.storage_shape(id), store_.precision().master));
    if (!run.schedule || store_.tiers() == nullptr) return;
    store_.tiers()->set_schedule(
        tiers::step_visits(kLayers, kMicroBatches, tiers::VisitOrder::horizontal, run.updates),
        run.updates);
  }

  void step(std::uint64_t key) {
    Draws draws{key};
    // The second step is skipped.
    const TensorView scalars = host_memory(scalars_.shape(), scalars_.dtype());
    StepScalars{.learning_rate = 0.01,
                .bias_correction1 = bias_correction(0.9, static_cast<double>(key) + 1),
                .bias_correction2 = bias_correction(0.95, static_cast<double>(key) + 1),
                .clip_factor = 0.75,
                .skip = key == 1 ? 1.0 : 0.0}
        .write(scalars);
    copy_tensor(scalars_, scalars, stream());
    if (store_.tiers() != nullptr) store_.tiers()->begin_step();
    store_.zero_grads(stream());
    for (std::int32_t mb = 0; mb < kMicroBatches; ++mb) {
      // Experts of each layer, in two parts now and then.
      std::array<std::vector<std::vector<std::int64_t>>, kLayers> rows;
      for (auto& layer : rows) {
        layer.resize(draws.next() < 0.3 ? 2 : 1);
        for (auto& part : layer)
          for (std::int64_t m = 0; m < kMembers; ++m)
            part.push_back(draws.next() < 0.4 ? 0 : 1 + draws.below(3));
      }
      for (std::int64_t l = 0; l < kLayers; ++l) {
        if (draws.next() < 0.2)
          forward(l, {.outside = true, .micro_batch = 0, .rows = rows[0][0]}, draws);
        for (const auto& part : rows[static_cast<std::size_t>(l)])
          forward(l, {.micro_batch = mb, .rows = part}, draws);
      }
      for (std::int64_t l = kLayers; l-- > 0;) {
        if (draws.next() < 0.2) look(draws);
        for (const auto& part : rows[static_cast<std::size_t>(l)])
          backward(l, {.kind = VisitKind::backward, .micro_batch = mb, .rows = part}, draws);
      }
    }
    for (const auto& layer : experts_.storages)
      for (const StorageId id : layer)
        read_gradients(id);
    for (std::int64_t l = kLayers; l-- > 0;)
      for (std::size_t k = 2; k-- > 0;)
        update_storage(experts_.storages[static_cast<std::size_t>(l)][k]);
    for (int i = 0; i < 2; ++i)
      look(draws);
    stream().synchronize();
    inputs_.clear();
  }

  // Everything that was computed, and all that is kept, in bytes.
  const std::vector<std::byte>& log() {
    stream().synchronize();
    for (const TensorView& t : outputs_) {
      const TensorView here = host_memory(t.shape(), t.dtype());
      copy_tensor(here, t, stream());
      stream().synchronize();
      note(here);
    }
    outputs_.clear();
    for (const auto& layer : experts_.storages)
      for (const StorageId id : layer)
        for (std::int64_t e = 0; e < kMembers; ++e)
          for (int part = 0; part < 4; ++part)
            host(id, e, part, MemberAccess::read, 0);
    return log_;
  }

 private:
  static constexpr std::int32_t kMicroBatches = 2;
  Stream& stream() { return owner_.stream(); }

  // Zeros, on the device until the end, or in host memory until the end of the step.
  TensorView keep(Shape shape, DType dtype) {
    kept_.emplace_back(
        byte_size(dtype) * static_cast<std::size_t>(shape.numel()), store_.device(), "test");
    const TensorView t = kept_.back().view(shape, dtype);
    zero_tensor(t, stream());
    return t;
  }
  TensorView host_memory(Shape shape, DType dtype) {
    inputs_.push_back(make_host_buffer(
        byte_size(dtype) * static_cast<std::size_t>(shape.numel()), store_.device(), "test"));
    return inputs_.back().view(shape, dtype);
  }
  TensorView on_device(const TensorView& host) {
    const TensorView t = keep(host.shape(), host.dtype());
    copy_tensor(t, host, stream());
    return t;
  }
  TensorView drawn(std::int64_t rows, std::int64_t cols, Draws& draws) {
    const TensorView t = host_memory({rows, cols}, store_.precision().compute);
    for (std::int64_t i = 0; i < rows * cols; ++i)
      put(t, i, draws.next() - 0.5);
    return on_device(t);
  }
  TensorView output(Shape shape, DType dtype) {
    outputs_.push_back(keep(shape, dtype));
    return outputs_.back();
  }
  void note(const TensorView& here) {
    log_.insert(log_.end(), here.data(), here.data() + here.bytes());
  }
  static constexpr std::int64_t kRows = kMembers * 3;
  ConstTensorView offsets(std::span<const std::int64_t> rows) {
    const TensorView t = host_memory({kMembers + 1}, DType::i32);
    t.as<std::int32_t>()[0] = 0;
    for (std::size_t m = 0; m < rows.size(); ++m)
      t.as<std::int32_t>()[m + 1] = t.as<std::int32_t>()[m] + static_cast<std::int32_t>(rows[m]);
    return on_device(t);
  }
  void check_run(const MemberRun& run, const MemberVisit& visit, std::int64_t& before) {
    CHECK((run.begin >= 0 && run.begin < run.end && run.end <= kMembers));
    CHECK(run.slot_of_member.dim(0) == run.end - run.begin);
    if (before >= 0)
      CHECK((visit.kind == VisitKind::backward ? run.end <= before : run.begin >= before));
    before = visit.kind == VisitKind::backward ? run.begin : run.end;
  }

  void forward(std::int64_t layer, const MemberVisit& visit, Draws& draws) {
    for (std::size_t k = 0; k < 2; ++k) {
      const StorageId id = experts_.storages[static_cast<std::size_t>(layer)][k];
      const Shape& shape = store_.storage_shape(id);
      const TensorView x = drawn(kRows, shape[2], draws);
      const TensorView y = output({kRows, shape[1]}, x.dtype());
      const ConstTensorView all = offsets(visit.rows);
      std::int64_t before = -1;
      store_.weights_of_members(id, visit, stream(), [&](const MemberRun& run) {
        check_run(run, visit, before);
        moesaic::run(owner_.backend(),
                     GroupedLinearForward{.y = y,
                                          .x = x,
                                          .w = run.slots,
                                          .offsets = all.rows(run.begin, run.end + 1),
                                          .slot_of_expert = run.slot_of_member});
      });
    }
  }

  void backward(std::int64_t layer, const MemberVisit& visit, Draws& draws) {
    for (std::size_t k = 2; k-- > 0;) {
      const StorageId id = experts_.storages[static_cast<std::size_t>(layer)][k];
      const Shape& shape = store_.storage_shape(id);
      const TensorView dy = drawn(kRows, shape[1], draws), x = drawn(kRows, shape[2], draws);
      const TensorView dx = output({kRows, shape[2]}, x.dtype());
      const ConstTensorView all = offsets(visit.rows);
      std::int64_t before = -1;
      store_.weights_of_members(id, visit, stream(), [&](const MemberRun& run) {
        check_run(run, visit, before);
        moesaic::run(owner_.backend(),
                     GroupedLinearBackwardInput{.dx = dx,
                                                .dy = dy,
                                                .w = run.slots,
                                                .offsets = all.rows(run.begin, run.end + 1),
                                                .slot_of_expert = run.slot_of_member});
      });
      before = -1;
      store_.gradients_of_members(id, visit, stream(), [&](const MemberRun& run) {
        check_run(run, visit, before);
        moesaic::run(owner_.backend(),
                     GroupedLinearBackwardWeight{.dw = run.slots,
                                                 .dy = dy,
                                                 .x = x,
                                                 .offsets = all.rows(run.begin, run.end + 1),
                                                 .slot_of_expert = run.slot_of_member});
      });
    }
  }

  // A member of a whole view of its storage.
  TensorView member_of(const TensorView& all, StorageId id, std::int64_t member) const {
    const Shape& shape = store_.storage_shape(id);
    return all.empty() ? TensorView() : all.rows(member, member + 1).reshaped({shape[1], shape[2]});
  }
  void with_members(StorageId id,
                    const std::vector<std::int64_t>& members,
                    const ExpertTiers::Access& access,
                    const std::function<void(std::span<const MemberTensors>)>& work) {
    std::vector<MemberTensors> resident;
    for (const std::int64_t m : members) {
      MemberTensors t;
      if (!store_.has_tiered_weights(id)) {
        t.weight = member_of(store_.storage_weight(id), id, m);
        t.gradient = member_of(store_.grad(id), id, m);
      }
      if (!store_.has_tiered_state(id)) {
        if (!store_.masters_are_weights(store_.params_of(id).front()))
          t.master = member_of(store_.storage_master(id), id, m);
        t.remainder = member_of(store_.storage_remainder(id), id, m);
        t.state = {member_of(m_.at(id.index), id, m), member_of(v_.at(id.index), id, m)};
      }
      resident.push_back(t);
    }
    if (store_.tiers() == nullptr) return work(resident);
    store_.tiers()->with_members(id, members, access, stream(), [&](const auto& tensors) {
      REQUIRE(tensors.size() == members.size());
      for (std::size_t i = 0; i < members.size(); ++i) {
        MemberTensors& t = resident[i];
        if (store_.has_tiered_weights(id)) {
          t.weight = tensors[i].weight;
          t.gradient = tensors[i].gradient;
        }
        t.master = tensors[i].master;
        t.remainder = tensors[i].remainder;
        t.state = tensors[i].state;
      }
      work(resident);
    });
  }
  std::vector<std::vector<std::int64_t>> in_turns(StorageId id, const ExpertTiers::Access& access) {
    const std::int64_t most =
        store_.tiers() == nullptr ? 1 : store_.tiers()->members_at_once(id, access);
    std::vector<std::vector<std::int64_t>> turns;
    for (std::int64_t m = 0; m < kMembers; ++m) {
      if (m % most == 0) turns.emplace_back();
      turns.back().push_back(m);
    }
    return turns;
  }
  void read_gradients(StorageId id) {
    const ExpertTiers::Access access{.gradient = MemberAccess::read};
    for (const auto& members : in_turns(id, access)) {
      with_members(id, members, access, [&](const auto& tensors) {
        for (const MemberTensors& t : tensors)
          copy_tensor(output(t.gradient.shape(), t.gradient.dtype()), t.gradient, stream());
      });
    }
  }
  void update_storage(StorageId id) {
    const ExpertTiers::Access access{.weight = MemberAccess::change,
                                     .gradient = MemberAccess::read,
                                     .state = MemberAccess::change,
                                     .last_use_of_gradient = true};
    std::vector<std::int64_t> all;
    for (std::int64_t m = 0; m < kMembers; ++m)
      all.push_back(m);
    if (store_.tiers() != nullptr) store_.tiers()->begin_update(id, all);
    for (const auto& members : in_turns(id, access)) {
      with_members(id, members, access, [&](const auto& tensors) {
        for (const MemberTensors& t : tensors)
          update(t);
      });
    }
  }

  void update(const MemberTensors& t) {
    AdamW op{.m = t.state[0], .v = t.state[1], .dw = t.gradient, .scalars = scalars_};
    op.weight_decay = 0.1;
    op.remainder = t.remainder;
    op.w = !t.remainder.empty() ? TensorView() : t.master.empty() ? t.weight : t.master;
    if (!t.remainder.empty() || !t.master.empty()) op.w_compute = t.weight;
    moesaic::run(owner_.backend(), op);
  }

  // A part of a member on the host: 0 weight, 1 master or remainder, 2 and 3 states.
  void host(StorageId id, std::int64_t member, int part, MemberAccess access, std::uint64_t key) {
    const bool own_master = !store_.masters_are_weights(store_.params_of(id).front());
    const bool split = own_master && store_.precision().split_masters;
    if (part == 1 && !own_master) return;
    const auto work = [&](const TensorView& t) {
      Draws draws{key};
      if (access == MemberAccess::read) {
        note(t);
      } else {
        for (std::int64_t i = 0; i < t.numel(); ++i) {
          if (t.dtype() == DType::u16) {
            t.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(draws.below(65536));
          } else {
            put(t, i, draws.next() - (access == MemberAccess::change ? at(t, i) : 0.5));
          }
        }
      }
    };
    if (part == 0 ? store_.has_tiered_weights(id) : store_.has_tiered_state(id)) {
      using Kind = MemberPart::Kind;
      const MemberPart which{part == 0   ? Kind::weight
                             : part == 1 ? split ? Kind::remainder : Kind::master
                                         : Kind::state,
                             part - 2};
      return store_.tiers()->with_host(id, member, which, access, work);
    }
    const TensorView there =
        member_of(part == 0   ? store_.storage_weight(id)
                  : part == 1 ? split ? store_.storage_remainder(id) : store_.storage_master(id)
                  : part == 2 ? m_.at(id.index)
                              : v_.at(id.index),
                  id,
                  member);
    const TensorView here = host_memory(there.shape(), there.dtype());
    copy_tensor(here, there, stream());
    stream().synchronize();
    work(here);
    copy_tensor(there, here, stream());
  }
  void look(Draws& draws) {
    const auto& layer = experts_.storages[static_cast<std::size_t>(draws.below(kLayers))];
    const StorageId id = layer[static_cast<std::size_t>(draws.below(2))];
    const std::int64_t member = draws.below(kMembers), part = draws.below(4), how = draws.below(4);
    host(id,
         member,
         static_cast<int>(part),
         how == 0   ? MemberAccess::replace
         : how == 1 ? MemberAccess::change
                    : MemberAccess::read,
         draws.key);
  }

  Experts& experts_;
  ParameterStore& store_;
  std::deque<Buffer> kept_, inputs_;  // live longer than the stream
  BackendOwner owner_;
  TensorView scalars_;
  std::map<std::int32_t, TensorView> m_, v_;
  std::vector<TensorView> outputs_;
  std::vector<std::byte> log_;
};

constexpr std::uint64_t kSteps = 3;

/// What all steps computed and left behind, and what the tiers did.
struct Outcome {
  std::vector<std::byte> log;
  std::vector<TierCounters> counters;
};
inline Outcome steps_of(Experts& experts, const Run& run) {
  Steps steps(experts, run);
  for (std::uint64_t s = 0; s < kSteps; ++s)
    steps.step(s);
  Outcome outcome;
  if (experts.store.tiers() != nullptr) outcome.counters = experts.store.tiers()->counters();
  outcome.log = steps.log();
  return outcome;
}
inline Outcome resident(const Run& run, Device device) {
  Experts experts(run.precision);
  experts.store.seal(device);
  return steps_of(experts, run);
}
inline Outcome offloaded(const Run& run, Device device) {
  const TemporaryFolder folder("expert_tiers");
  Experts experts(run.precision);
  experts.store.offload_experts(options_of(run, folder.path()));
  experts.store.seal(device);
  return steps_of(experts, run);
}

inline const Precision kSplit{DType::bf16, DType::f32, DType::f32, DType::f32, true};

}  // namespace moesaic::test
