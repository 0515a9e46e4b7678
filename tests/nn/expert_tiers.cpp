// Offloaded experts against resident ones: the same visits, the same bits.
#include "core/nn/expert_tiers.h"

#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>

#include "core/base/random.h"
#include "core/base/split_float.h"
#include "kernels/backend.h"
#include "kernels/ops/grouped_gemm.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace moesaic::test {
namespace {

using tiers::Visit;
using tiers::VisitKind;

constexpr std::int64_t kLayers = 3, kMembers = 6, kInner = 4, kWidth = 6;

struct Experts {
  explicit Experts(const Precision& precision, MeshPosition position = {})
      : store(precision, std::move(position)) {
    store.declare({.name = "norm", .shape = {kWidth}, .init = {.kind = InitialKind::ones}});
    const bool split = store.position().extent(Axis::ep) > 1;
    const Placement placement{
        split ? std::vector<Placement::Split>{{Axis::ep, 0}} : std::vector<Placement::Split>{},
        AxisFamily::expert};
    for (std::int64_t l = 0; l < kLayers; ++l) {
      const std::string prefix = "layers." + std::to_string(l) + ".experts.";
      const auto spec = [&](const char* name, std::int64_t rows, std::int64_t cols) {
        return ParameterSpec{.name = prefix + "{}." + name + ".weight",
                             .shape = {rows, cols},
                             .members = kMembers,
                             .placement = placement,
                             .init = {.a = 0.3},
                             .part = Part::routed_expert,
                             .matrix = true};
      };
      const std::int64_t here = kMembers / store.position().extent(Axis::ep);
      const StorageId w13 =
          store.declare_storage(prefix + "w13", here, 2 * kInner, kWidth, StoredAs::compute);
      store.declare(spec("w1", kInner, kWidth), w13, 0);
      store.declare(spec("w3", kInner, kWidth), w13, kInner);
      storages.push_back({w13, store.declare(spec("w2", kWidth, kInner))});
    }
  }
  ParameterStore store;
  std::vector<std::array<StorageId, 2>> storages;  // by layer: gate_up, down
};

struct Run {
  Precision precision = kF32;
  bool weights = true;
  TierPolicy policy = TierPolicy::sched;
  std::uint64_t seed = 0;
  std::int64_t slots = 3;      // of each cache; weights of "down" have one more
  std::int64_t in_file = 0;    // of weights and states
  std::int64_t on_device = 0;  // of each kind, beside the slots
  Stream::Mode mode = Stream::Mode::worker;
  bool schedule = true;
  tiers::Updates updates = tiers::Updates::dense;
};

ExpertTierOptions options_of(const Run& run, const std::filesystem::path& folder) {
  ExpertTierOptions o;
  o.weights = run.weights;
  o.policy = run.policy;
  o.seed = run.seed;
  o.state_kinds = {"m", "v"};
  o.folder = folder;
  o.stream_mode = run.mode;
  o.io = tiers::IoKind::threads;
  o.poison = true;
  const std::int64_t here = run.weights ? run.on_device : 0, slots = run.on_device + run.slots;
  TierGroupOptions g{.weight_slots = slots,
                     .gradient_slots = slots,
                     .state_slots = slots,
                     .weights_in_file = run.weights ? run.in_file : 0,
                     .states_in_file = run.in_file,
                     .weights_on_device = here,
                     .gradients_on_device = here,
                     .states_on_device = run.on_device,
                     .staging_slots = 2};
  o.groups = {g, g};
  if (slots < kLayers * kMembers) ++o.groups[1].weight_slots;
  o.groups[1].staging_slots = 3;
  return o;
}

// Draws that depend on a key alone, so that two runs of a test's steps draw the same.
struct Draws {
  std::uint64_t key, n = 0;
  double next() { return uniform(mix64(key), n++); }
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(next() * static_cast<double>(bound));
  }
};

// What the optimizer does with an element; the types as in the store.
struct Element {
  double gradient, m, v;
};
double updated(double master, Element& e) {
  e.m = 0.5 * e.m + e.gradient;
  e.v = 0.75 * e.v + e.gradient * e.gradient;
  return 0.96875 * master - 0.0625 * e.m + 0.015625 * e.v / (1 + e.v);
}
double at(const TensorView& t, std::int64_t i) {
  return t.dtype() == DType::f64   ? t.as<double>()[i]
         : t.dtype() == DType::f32 ? t.as<float>()[i]
                                   : static_cast<float>(t.as<bf16>()[i]);
}
void put(const TensorView& t, std::int64_t i, double x) {
  if (t.dtype() == DType::f64) t.as<double>()[i] = x;
  if (t.dtype() == DType::f32) t.as<float>()[i] = static_cast<float>(x);
  if (t.dtype() == DType::bf16) t.as<bf16>()[i] = bf16(static_cast<float>(x));
}

// master -= …, in the order of the stream.
void update(const MemberTensors& t, Stream& stream) {
  stream.enqueue([t] {
    for (std::int64_t i = 0; i < t.gradient.numel(); ++i) {
      Element e{at(t.gradient, i), at(t.state[0], i), at(t.state[1], i)};
      if (!t.remainder.empty()) {
        const float master = join_float(t.weight.as<bf16>()[i], t.remainder.as<std::uint16_t>()[i]);
        split_float(static_cast<float>(updated(master, e)),
                    t.weight.as<bf16>()[i],
                    t.remainder.as<std::uint16_t>()[i]);
      } else {
        const TensorView& master = t.master.empty() ? t.weight : t.master;
        put(master, i, updated(at(master, i), e));
        if (!t.master.empty()) put(t.weight, i, at(master, i));
      }
      put(t.state[0], i, e.m);
      put(t.state[1], i, e.v);
    }
  });
}

/// The steps of a test on one store.
class Steps {
 public:
  Steps(Experts& experts, const Run& run)
      : experts_(experts),
        store_(experts.store),
        run_(run),
        owner_({.mode = run.mode, .scratch_bytes = 1 << 20}) {
    store_.initialize(7);
    for (const auto& layer : experts.storages)
      for (const StorageId id : layer)
        for (auto* kind : {&m_, &v_})
          kind->emplace(id.index, keep(store_.storage_shape(id), store_.precision().master));
    if (!run.schedule || store_.tiers() == nullptr) return;
    std::vector<Visit> step =
        tiers::step_visits(kLayers, kMicroBatches, tiers::VisitOrder::horizontal, run.updates);
    store_.tiers()->set_schedule(step, run.updates);
  }

  void step(std::uint64_t key) {
    Draws draws{key};
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
    for (const TensorView& t : outputs_)
      log_.insert(log_.end(), t.data(), t.data() + t.bytes());
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

  TensorView keep(Shape shape, DType dtype, bool until_end = true) {
    auto& list = until_end ? kept_ : inputs_;
    list.emplace_back(byte_size(dtype) * static_cast<std::size_t>(shape.numel()), kCpu, "test");
    return list.back().view(shape, dtype);
  }
  TensorView drawn(std::int64_t rows, std::int64_t cols, Draws& draws) {
    const TensorView t = keep({rows, cols}, store_.precision().compute, false);
    for (std::int64_t i = 0; i < rows * cols; ++i)
      put(t, i, draws.next() - 0.5);
    return t;
  }
  TensorView output(Shape shape, DType dtype) {
    outputs_.push_back(keep(shape, dtype));
    return outputs_.back();
  }
  static constexpr std::int64_t kRows = kMembers * 3;
  ConstTensorView offsets(std::span<const std::int64_t> rows) {
    const TensorView t = keep({kMembers + 1}, DType::i32, false);
    for (std::size_t m = 0; m < rows.size(); ++m)
      t.as<std::int32_t>()[m + 1] = t.as<std::int32_t>()[m] + static_cast<std::int32_t>(rows[m]);
    return t;
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
          update(t, stream());
      });
    }
  }

  // A part of a member on the host: 0 weight, 1 master or remainder, 2 and 3 states.
  void host(StorageId id, std::int64_t member, int part, MemberAccess access, std::uint64_t key) {
    const bool own_master = !store_.masters_are_weights(store_.params_of(id).front());
    const bool split = own_master && store_.precision().split_masters;
    if (part == 1 && !own_master) return;
    const auto work = [&](const TensorView& t) {
      Draws draws{key};
      if (access == MemberAccess::read) {
        log_.insert(log_.end(), t.data(), t.data() + t.bytes());
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
    stream().synchronize();
    work(member_of(part == 0   ? store_.storage_weight(id)
                   : part == 1 ? split ? store_.storage_remainder(id) : store_.storage_master(id)
                   : part == 2 ? m_.at(id.index)
                               : v_.at(id.index),
                   id,
                   member));
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
  Run run_;
  std::deque<Buffer> kept_, inputs_;  // live longer than the stream
  BackendOwner owner_;
  std::map<std::int32_t, TensorView> m_, v_;
  std::vector<TensorView> outputs_;
  std::vector<std::byte> log_;
};

constexpr std::uint64_t kSteps = 3;

const std::vector<std::byte>& resident(const Precision& precision) {
  static std::map<std::pair<int, bool>, std::vector<std::byte>> known;
  auto& log = known[{static_cast<int>(precision.compute), precision.split_masters}];
  if (log.empty()) {
    Experts experts(precision);
    experts.store.seal(kCpu);
    Steps steps(experts, {.precision = precision, .mode = Stream::Mode::immediate});
    for (std::uint64_t s = 0; s < kSteps; ++s)
      steps.step(s);
    log = steps.log();
  }
  return log;
}

struct Outcome {
  bool same = false;
  std::vector<TierCounters> counters;
};
Outcome offloaded(const Run& run) {
  const TemporaryFolder folder("expert_tiers");
  Experts experts(run.precision);
  experts.store.offload_experts(options_of(run, folder.path()));
  experts.store.seal(kCpu);
  Steps steps(experts, run);
  for (std::uint64_t s = 0; s < kSteps; ++s)
    steps.step(s);
  const auto counters = experts.store.tiers()->counters();
  return {steps.log() == resident(run.precision), counters};
}

const Precision kSplit{DType::bf16, DType::f32, DType::f32, DType::f32, true};

}  // namespace

TEST_CASE("expert tiers: the bits of resident experts, at any budget and with any policy") {
  for (const TierPolicy policy :
       {TierPolicy::sched, TierPolicy::lru, TierPolicy::fixed, TierPolicy::random}) {
    for (const std::int64_t slots : {3, 5, 9, 18, 21}) {
      Run run{.policy = policy, .seed = static_cast<std::uint64_t>(slots), .slots = slots};
      run.precision = slots == 5 ? kSplit : slots == 9 ? kBf16 : kF32;
      run.in_file = slots == 3 ? 18 : slots == 5 ? 4 : slots == 9 ? 11 : 0;
      INFO("policy " << static_cast<int>(policy) << ", slots " << slots);
      const Outcome outcome = offloaded(run);
      CHECK(outcome.same);
      for (const TierCounters& c : outcome.counters) {
        INFO(c.group << " " << c.kind);
        CHECK(c.cache.uses > 0);
        CHECK(c.cache.hits <= c.cache.uses);
        if (slots >= 18 && c.kind == "weights") CHECK(c.cache.loads == 18);
        if (slots >= 18 && c.kind == "gradients") CHECK(c.cache.bytes_up == 0);
        CHECK((run.in_file > 0 && c.kind != "gradients") == (c.file_bytes_written > 0));
      }
    }
  }
}

TEST_CASE("expert tiers: a store without the schedule, streams that run at once, states alone") {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    Run run{.policy = TierPolicy::random, .seed = seed, .slots = 4, .in_file = 5};
    run.precision = seed % 2 == 0 ? kSplit : kF64;
    CHECK(offloaded(run).same);
  }
  CHECK(offloaded({.slots = 4, .schedule = false}).same);
  CHECK(offloaded({.slots = 4, .mode = Stream::Mode::immediate}).same);
  CHECK(offloaded({.slots = 6, .updates = tiers::Updates::none}).same);
  for (const Precision& precision : {kF32, kBf16, kSplit}) {
    const Outcome outcome =
        offloaded({.precision = precision, .weights = false, .slots = 4, .in_file = 7});
    CHECK(outcome.same);
    REQUIRE(outcome.counters.size() == 2);
    CHECK(outcome.counters[1].kind == "states");
  }
}

TEST_CASE("expert tiers: members that live on the device alone") {
  for (const std::int64_t on_device : {1, 7, 15, 18}) {
    for (const bool weights : {true, false}) {
      Run run{.precision = on_device == 7 ? kSplit : kBf16,
              .weights = weights,
              .policy = on_device == 15 ? TierPolicy::fixed : TierPolicy::sched,
              .slots = on_device == 18 ? 0 : 3,
              .in_file = on_device < 15 ? 3 : 0,
              .on_device = on_device};
      INFO(on_device << " of 18 on the device" << (weights ? "" : ", states alone"));
      const Outcome outcome = offloaded(run);
      CHECK(outcome.same);
      for (const TierCounters& c : outcome.counters) {
        INFO(c.group << " " << c.kind);
        if (on_device == 18) CHECK(c.cache.bytes_up + c.cache.bytes_down == 0);
        if (on_device < 15) CHECK(c.cache.bytes_down > 0);
      }
    }
  }
}

}  // namespace moesaic::test
