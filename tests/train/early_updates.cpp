// experts.update=in_backward: each layer of experts is updated behind its last backward, and its gradients are given up. The
// bits are those of updates after the step without clipping, whatever lies where; what cannot be undone ends the run.
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <mutex>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/base/error.h"
#include "core/base/random.h"
#include "core/train/memory_plan.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

using Overrides = std::vector<std::string>;

// Later ones take the place of earlier ones with the same key.
Overrides with(Overrides all, const Overrides& more) {
  const auto key = [](const std::string& text) { return text.substr(0, text.find('=')); };
  for (const std::string& one : more) {
    std::erase_if(all, [&](const std::string& other) { return key(other) == key(one); });
    all.push_back(one);
  }
  return all;
}

const Overrides kLate{"optimizer.clip_grad_norm=0", "parallel.order=vertical"};
Overrides late(const Overrides& overrides) {
  return with(kLate, overrides);
}
Overrides early(const Overrides& overrides) {
  return with(late(overrides), {"experts.offload=full", "experts.update=in_backward"});
}

// The state of all ranks together, and what all of them saw.
struct Job {
  std::vector<StepStats> stats;
  Snapshot state;
  std::vector<Snapshot> weights;
  std::int64_t replays = 0;
};

// Ranks are threads: no assertions of the test here.
void check_ring(const Run& run) {
  MOESAIC_CHECK(run.params->tiers()->gradients_in_ring(), "gradients do not go round");
  for (const TierCounters& c : run.params->tiers()->counters()) {
    MOESAIC_CHECK(c.cache.uses > 0, c.group + " " + c.kind + " were not used");
    MOESAIC_CHECK(c.kind != "gradients" || c.cache.bytes_up + c.cache.bytes_down == 0,
                  "a gradient went to host memory");
  }
}

Job job(const Overrides& overrides,
        int ranks,
        int steps,
        const std::optional<Offload>& offload,
        Stream::Mode mode = Stream::Mode::worker) {
  Job result;
  result.weights.resize(static_cast<std::size_t>(ranks));
  std::mutex mutex;
  run_local_ranks(ranks, [&](Communicator& world) {
    Run run(hybrid_config(overrides), &world, mode, kCpu, 0, offload);
    const auto stats = run.steps(steps);
    if (world.rank() == 0) result.stats = stats;
    if (offload) check_ring(run);
    run.add_to(result.state, mutex);
    result.weights[static_cast<std::size_t>(world.rank())] = run.weights_of_kernels();
  });
  for (const StepStats& s : result.stats)
    result.replays += s.replays ? s.replays->members : 0;
  return result;
}

void check_same(const Job& found, const Job& expected) {
  REQUIRE(found.stats.size() == expected.stats.size());
  for (std::size_t i = 0; i < expected.stats.size(); ++i)
    CHECK(same_numbers(found.stats[i], expected.stats[i]));
  CHECK(differences(found.state, expected.state).empty());
  CHECK(found.state.size() > 100);
  for (std::size_t r = 0; r < expected.weights.size(); ++r)
    CHECK(differences(found.weights[r], expected.weights[r]).empty());
}

struct Layout {
  int ranks;
  Overrides overrides;
};
const std::vector<Layout> kLayouts{
    {1, {}},
    {1, {}},
    {2, {"parallel.ep=2"}},
    {2, {"parallel.ep=2", "experts.place_every=1"}},
    {2, {"parallel.ep=2", "parallel.tp=2"}},
    {2, {"parallel.ep=2", "dispatch.exchange=flat", "dispatch.buffer_factor=0.5"}},
    {2, {"parallel.ep=2", "dispatch.overlap=true", "dispatch.chunks=2"}},
};
const std::vector<Overrides> kOptimizers{
    {"optimizer.name=adamw"},
    {"optimizer.name=muon"},
    {"optimizer.name=adamw", "optimizer.ema_decay=0.9"},
    {"optimizer.name=muon", "optimizer.ema_decay=0.9"},
};
const std::vector<Overrides> kTypes{
    {"run.precision=f64"},
    {"run.precision=f32"},
    {"run.precision=bf16", "optimizer.master=f32"},
    {"run.precision=bf16", "optimizer.master=split"},
};
// Per rank one micro-batch, two or four; without the MTP module the last layer turns each of them round at once.
const std::vector<Overrides> kBatches{
    {"train.global_batch_size=2", "train.micro_batch_size=1"},
    {"train.global_batch_size=4", "train.micro_batch_size=1"},
    {"train.global_batch_size=8", "train.micro_batch_size=1", "activations.recompute=full"},
    {"train.global_batch_size=4",
     "train.micro_batch_size=1",
     "model.mtp.num_nextn_predict_layers=0"},
};
const std::vector<TierPolicy> kPolicies{
    TierPolicy::sched, TierPolicy::sched, TierPolicy::lru, TierPolicy::fixed, TierPolicy::random};

// Combinations drawn from the lists, the same ones each time.
class Draw {
 public:
  explicit Draw(std::uint64_t key) : key_(mix64(key)) {}
  template <class T>
  const T& of(const std::vector<T>& list) {
    const auto i = static_cast<std::size_t>(uniform(key_, n_++) * static_cast<double>(list.size()));
    return list[std::min(i, list.size() - 1)];
  }

 private:
  std::uint64_t key_, n_ = 0;
};

void check_combination(std::uint64_t key, int steps, const Overrides& more = {}) {
  Draw draw(key);
  Overrides overrides = with(with(draw.of(kOptimizers), draw.of(kTypes)), draw.of(kBatches));
  const Layout& layout = draw.of(kLayouts);
  overrides = with(with(overrides, layout.overrides), more);
  const Offload offload{.on_device = draw.of(std::vector{0.0, 0.0, 0.3, 0.6, 1.0}),
                        .in_file = draw.of(std::vector{0.0, 0.0, 0.4}),
                        .policy = draw.of(kPolicies)};
  INFO(fmt::format("{} ranks, {} on the device, {} in the file, policy {}: {}",
                   layout.ranks,
                   offload.on_device,
                   offload.in_file,
                   static_cast<int>(offload.policy),
                   fmt::join(overrides, " ")));
  check_same(job(early(overrides), layout.ranks, steps, offload),
             job(late(with(overrides, {"optimizer.untouched=dense"})), layout.ranks, steps, {}));
}

ParamId expert_of(const ParameterStore& params, bool is_last) {
  std::optional<std::size_t> found;
  for (std::size_t i = 0; i < params.params().size(); ++i)
    if (params.params()[i].part == Part::routed_expert && (is_last || !found)) found = i;
  return {static_cast<std::int32_t>(found.value())};
}

// Makes one number of an expert's gradient none, before anything is added to it.
class Spoiler final : public ChoiceObserver {
 public:
  Spoiler(Run& run, ParamId id, std::int64_t member) : run_(run), id_(id), member_(member) {}
  ConstTensorView replace(const Choice&, Stream& stream) override {
    if (std::exchange(is_done_, true)) return {};
    run_.params->tiers()->with_members(
        run_.params->storage_of(id_),
        {&member_, 1},
        {.gradient = MemberAccess::change},
        stream,
        [&](std::span<const MemberTensors> m) {  // all bits set: not a number
          const TensorView& gradient = m[0].gradient;
          fill_bytes(gradient.reshaped({gradient.numel()}).rows(1, 2), 0xff, stream);
        });
    return {};
  }

 private:
  Run& run_;
  ParamId id_;
  std::int64_t member_;
  bool is_done_ = false;
};

std::string numerics_error(const std::function<void()>& work) {
  try {
    work();
  } catch (const NumericsError& e) {
    CHECK(e.exit_code() == ExitCode::numerics);
    return e.what();
  }
  return "none";
}

bool all_finite(const Snapshot& state) {
  for (const auto& [name, bytes] : state)
    for (std::size_t i = 0; i < bytes.size() / sizeof(double); ++i)
      if (!std::isfinite(reinterpret_cast<const double*>(bytes.data())[i])) return false;
  return true;
}

// Of a snapshot what belongs to the experts that `wanted` says.
template <class Wanted>
Snapshot of_experts(const Snapshot& state, const Wanted& wanted) {
  Snapshot some;
  for (const auto& [name, bytes] : state)
    if (name.find(".experts.") != std::string::npos && wanted(name)) some[name] = bytes;
  return some;
}

std::string usage_error(const Overrides& overrides, int ranks) {
  try {
    job(overrides, ranks, 1, Offload{});
  } catch (const UsageError& e) {
    return e.what();
  }
  return "none";
}

void put(Run& run, const char* name, double value) {
  run.trainer->stream().synchronize();
  run.params->weight(run.params->find(name), 0).as<double>()[0] = value;
}

}  // namespace

TEST_CASE("updates in the backward change no bit") {
  for (std::uint64_t key = 0; key < 14; ++key)
    check_combination(key, 3);
}

TEST_CASE("updates in the backward: one micro-batch in either order, streams that wait or not") {
  const Overrides one{"train.global_batch_size=1", "train.micro_batch_size=1"};
  const Job expected = job(late(one), 1, 3, {});
  for (const char* order : {"parallel.order=horizontal", "parallel.order=vertical"})
    for (const Stream::Mode mode : {Stream::Mode::worker, Stream::Mode::immediate})
      check_same(job(early(with(one, {order})), 1, 3, Offload{.on_device = 0.3}, mode), expected);
}

// Holds the stream of forward and backward up where updates wait for it.
class Laggard final : public OpObserver {
 public:
  explicit Laggard(Stream& stream) : stream_(stream) {}
  void begin(const char* op) override {
    const bool is_guard = std::string(op) == "guard_finite";
    if (!is_guard && uniform(mix64(7), n_++) > 0.05) return;
    const auto time = std::chrono::microseconds(is_guard ? 3000 : 300);
    stream_.enqueue([time] { std::this_thread::sleep_for(time); });
  }
  void end(const char*, const OpCost&) override {}

 private:
  Stream& stream_;
  std::uint64_t n_ = 0;
};

TEST_CASE("updates in the backward wait for the backward, however late it is") {
  for (const Overrides& more :
       {Overrides{"optimizer.ema_decay=0.9"},
        Overrides{"optimizer.untouched=lazy", "data.sequence_length=16", "model.num_experts=32"}}) {
    Run run(hybrid_config(early(more)),
            nullptr,
            Stream::Mode::worker,
            kCpu,
            0,
            Offload{.on_device = 0.3}),
        plain(hybrid_config(late(more)));
    Laggard laggard(run.trainer->stream());
    run.trainer->observe(&laggard);
    for (int i = 0; i < 3; ++i)
      CHECK(same_numbers(run.step(), plain.step()));
    run.trainer->observe(nullptr);
    CHECK(differences(run.snapshot(), plain.snapshot()).empty());
  }
}

TEST_CASE("updates in the backward: slices of experts with AdamW") {
  const Overrides slices{"parallel.tp=2", "parallel.etp=2", "run.precision=bf16"};
  check_same(job(early(slices), 2, 3, Offload{.on_device = 0.3}), job(late(slices), 2, 3, {}));
}

TEST_CASE("updates in the backward: experts without tokens may wait for theirs") {
  const Overrides few{"optimizer.untouched=lazy",
                      "data.sequence_length=16",
                      "model.num_experts=64",
                      "model.balance.bias_rule=none"};
  for (std::uint64_t key = 50; key < 55; ++key)
    check_combination(key, 5, few);
  CHECK(job(early(few), 1, 4, Offload{}).replays > 0);
}

TEST_CASE("updates in the backward: evaluation, checkpoints and looks between the steps") {
  for (const Overrides& more :
       {Overrides{}, Overrides{"optimizer.untouched=lazy", "data.sequence_length=16"}}) {
    const Overrides overrides = with({"optimizer.ema_decay=0.9"}, more);
    Run run(hybrid_config(early(overrides)),
            nullptr,
            Stream::Mode::worker,
            kCpu,
            0,
            Offload{.on_device = 0.3, .in_file = 0.3}),
        plain(hybrid_config(late(overrides)));
    for (int i = 0; i < 4; ++i) {
      CHECK(same_numbers(run.step(), plain.step()));
      if (i % 2 == 0) CHECK(run.trainer->evaluate().loss == plain.trainer->evaluate().loss);
      if (i > 1) CHECK(differences(run.snapshot(), plain.snapshot()).empty());
    }
    CHECK(differences(run.weights_of_kernels(), plain.weights_of_kernels()).empty());
  }
}

TEST_CASE("updates in the backward: experts that are frozen, released and scaled, by halves too") {
  const Overrides phases{
      "train.phases=[{until: 2, freeze: ['*.experts.*']}, {until: 3, lr_scale: [{pattern: "
      "'*.w1.weight', scale: 0.5}]}, {until: 4, freeze: ['*.w3.weight']}, {until: 5, "
      "global_batch_size: 2, sequence_length: 32}, {until: 20}]"};
  for (const Overrides& more : {Overrides{},
                                Overrides{"optimizer.ema_decay=0.9"},
                                Overrides{"optimizer.untouched=lazy", "data.sequence_length=16"}}) {
    const Job expected = job(late(with(phases, more)), 1, 6, {});
    for (const double on_device : {0.0, 0.6})
      check_same(job(early(with(phases, more)), 1, 6, Offload{.on_device = on_device}), expected);
  }
}

TEST_CASE("updates in the backward: a run goes on with updates after the step, and back") {
  const auto check = [](const Overrides& overrides, int ranks, bool early_first) {
    INFO(fmt::format("{}", fmt::join(overrides, " ")));
    const TemporaryFolder folder("early_resume");
    std::filesystem::remove_all(folder.path());
    const std::optional<Offload> tight = Offload{.on_device = 0.1}, none;
    run_local_ranks(ranks, [&](Communicator& world) {
      Run run(hybrid_config(early_first ? early(overrides) : late(overrides)),
              &world,
              Stream::Mode::worker,
              kCpu,
              0,
              early_first ? tight : none);
      run.steps(2);
      save_together(run, world, folder.path());
    });
    Job found;
    found.weights.resize(static_cast<std::size_t>(ranks));
    std::mutex mutex;
    run_local_ranks(ranks, [&](Communicator& world) {
      Run run(hybrid_config(early_first ? late(overrides) : early(overrides)),
              &world,
              Stream::Mode::worker,
              kCpu,
              0,
              early_first ? none : tight);
      load_newest(run, folder.path());
      const auto stats = run.steps(2);
      if (world.rank() == 0) found.stats = stats;
      run.add_to(found.state, mutex);
      found.weights[static_cast<std::size_t>(world.rank())] = run.weights_of_kernels();
    });
    Job whole = job(late(overrides), ranks, 4, {});
    whole.stats.erase(whole.stats.begin(), whole.stats.begin() + 2);
    check_same(found, whole);
  };
  const Overrides split{"run.precision=bf16", "optimizer.master=split"};
  for (const bool early_first : {false, true}) {
    check(split, 1, early_first);
    check({"optimizer.ema_decay=0.9", "parallel.ep=2"}, 2, early_first);
  }
}

TEST_CASE("updates in the backward: a loss that is not finite skips the whole step") {
  for (const Overrides& more :
       {Overrides{}, Overrides{"optimizer.name=muon"}, Overrides{"optimizer.untouched=lazy"}}) {
    Run run(hybrid_config(early(more)), nullptr, Stream::Mode::worker, kCpu, 0, Offload{}),
        plain(hybrid_config(late(more)));
    for (Run* r : {&run, &plain}) {
      r->steps(2);
      put(*r, "model.norm.weight", std::numeric_limits<double>::infinity());
    }
    const Snapshot before = run.snapshot(), weights_before = run.weights_of_kernels();
    for (int i = 0; i < 2; ++i) {
      const StepStats bad = run.step();
      CHECK(bad.skipped);
      CHECK(same_numbers(bad, plain.step()));
    }
    CHECK(differences(run.snapshot(), before).empty());
    CHECK(differences(run.weights_of_kernels(), weights_before).empty());
    for (Run* r : {&run, &plain})
      put(*r, "model.norm.weight", 1.0);
    CHECK(same_numbers(run.step(), plain.step()));
    CHECK(differences(run.snapshot(), plain.snapshot()).empty());
  }
}

TEST_CASE("updates in the backward: one rank's bad loss skips the step of all") {
  const Overrides overrides{"parallel.ep=2", "parallel.zero=0"};
  std::vector<Snapshot> states(2);
  run_local_ranks(2, [&](Communicator& world) {
    Run run(hybrid_config(early(overrides)), &world, Stream::Mode::worker, kCpu, 0, Offload{});
    run.step();
    const Snapshot before = run.snapshot();
    const double kept =
        run.params->weight(run.params->find("model.norm.weight"), 0).as<double>()[0];
    if (world.rank() == 1) put(run, "model.norm.weight", std::numeric_limits<double>::infinity());
    const bool skipped = run.step().skipped;
    if (world.rank() == 1) put(run, "model.norm.weight", kept);
    const bool same = differences(run.snapshot(), before).empty();
    const bool next = run.step().skipped;
    if (!skipped || !same || next)
      throw InternalError(fmt::format("rank {} decides alone", world.rank()));
  });
}

// The last layer's backward comes first: everything behind it is left alone. The first layer's comes last.
TEST_CASE(
    "updates in the backward: a bad gradient of an expert ends the run, and poisons nothing") {
  for (const bool is_last : {true, false})
    for (const Overrides& more : {Overrides{"optimizer.ema_decay=0.9"},
                                  Overrides{"optimizer.name=muon"},
                                  Overrides{"optimizer.untouched=lazy"}}) {
      CAPTURE(is_last, more);
      const TemporaryFolder folder("early_bad");
      std::filesystem::remove_all(folder.path());
      run_local_ranks(1, [&](Communicator& world) {
        Run run(hybrid_config(early(more)),
                &world,
                Stream::Mode::worker,
                kCpu,
                0,
                Offload{.on_device = 1});
        run.steps(2);
        save_together(run, world, folder.path());
        const Snapshot before = run.snapshot();
        Spoiler spoiler(run, expert_of(*run.params, is_last), 3);
        run.trainer->set_choices(&spoiler);
        const std::string error = numerics_error([&] { run.step(); });
        run.trainer->set_choices(nullptr);
        CHECK(error.find("step 3: the norm of the gradients is not finite") != std::string::npos);
        CHECK(error.find("experts.update: in_backward") != std::string::npos);
        CHECK(error.find("from the last checkpoint with experts.update=after_step") !=
              std::string::npos);
        CHECK(run.trainer->steps_done() == 2);
      });
      // The same with a look at the tiers, which still hold what the step left.
      Run run(hybrid_config(early(more)),
              nullptr,
              Stream::Mode::worker,
              kCpu,
              0,
              Offload{.on_device = 1});
      load_newest(run, folder.path());
      const Snapshot before = run.snapshot();
      Spoiler spoiler(run, expert_of(*run.params, is_last), 3);
      run.trainer->set_choices(&spoiler);
      CHECK(numerics_error([&] { run.step(); }) != "none");
      const Snapshot after = run.snapshot();
      CHECK(all_finite(of_experts(after, [](const auto&) { return true; })));
      const std::string spoiled = run.params->spec(expert_of(*run.params, is_last)).name;
      const std::string layer = spoiled.substr(0, spoiled.find(".experts."));
      const auto is_in = [&](const std::string& name) {
        return name.find(layer + ".") != std::string::npos;
      };
      const auto changed = [&](const auto& wanted) {
        return differences(of_experts(after, wanted), of_experts(before, wanted));
      };
      const std::string in_layer = changed(is_in),
                        elsewhere = changed([&](const auto&name) { return !is_in(name); });
      if (is_last) {
        CHECK(in_layer.empty());
        CHECK(elsewhere.empty());
      } else {
        CHECK(!elsewhere.empty());
        CHECK(in_layer.find(spoiled.substr(spoiled.rfind("}") + 1)) == std::string::npos);
      }
      // From the checkpoint the run goes on as if nothing had been.
      Run next(hybrid_config(late(more)));
      load_newest(next, folder.path());
      Run plain(hybrid_config(late(more)));
      plain.steps(2);
      CHECK(same_numbers(next.step(), plain.step()));
      CHECK(differences(next.snapshot(), plain.snapshot()).empty());
    }
}

TEST_CASE(
    "updates in the backward: a bad gradient elsewhere ends the run, unless no expert is trained") {
  const Overrides bad{"debug.inject_nan_step=2"};
  Run run(hybrid_config(early(bad)), nullptr, Stream::Mode::worker, kCpu, 0, Offload{});
  run.step();
  CHECK(numerics_error([&] { run.step(); }).find("step 2: the norm") != std::string::npos);
  const Overrides frozen{"debug.inject_nan_step=2",
                         "train.phases=[{until: 3, freeze: ['*.experts.*']}, {until: 20}]"};
  const Job skipped = job(early(frozen), 1, 4, Offload{});
  CHECK(skipped.stats[1].skipped);
  check_same(skipped, job(late(frozen), 1, 4, {}));
}

TEST_CASE("updates in the backward: layouts that cannot have them are refused, with what to set") {
  const auto refused = [](const Overrides& overrides, int ranks, const char* text) {
    const std::string error = usage_error(early(overrides), ranks);
    INFO(error);
    CHECK(error.find("experts.update: in_backward") != std::string::npos);
    CHECK(error.find("allowed: experts.update=after_step, or ") != std::string::npos);
    CHECK(error.find(text) != std::string::npos);
  };
  refused({}, 2, "several ranks have the same experts");
  refused({"parallel.ep=2", "train.global_batch_size=8"}, 4, "several ranks have the same experts");
  refused({"parallel.tp=2", "parallel.etp=2", "optimizer.name=muon"}, 2, "parallel.etp=1");
  refused({"parallel.order=horizontal"}, 1, "horizontal with 4 micro-batches a step");
  refused({"parallel.order=horizontal",
           "train.global_batch_size=1",
           "train.phases=[{until: 2}, {until: 20, global_batch_size: 2}]"},
          1,
          "horizontal with 2 micro-batches a step");
}

TEST_CASE("updates in the backward: the plan has gradients of two layers, on the device alone") {
  const auto plan = [](const Overrides& overrides) {
    return plan_memory(hybrid_config(overrides), kCpu, kF32, {}, 1);
  };
  const Overrides small{"experts.device_cache=192KiB",
                        "model.num_hidden_layers=5",
                        "model.linear_attn_config.kda_layers=[1, 2, 3, 4]",
                        "model.linear_attn_config.full_attn_layers=[5]"};
  const MemoryPlan before = plan(with(late(small), {"experts.offload=full"})),
                   after = plan(early(small));
  REQUIRE(before.tier_parts.size() == after.tier_parts.size());
  for (std::size_t i = 0; i < after.tier_parts.size(); ++i) {
    const TierPart &a = after.tier_parts[i], &b = before.tier_parts[i];
    if (a.kind != TierPart::Kind::gradients) continue;
    CAPTURE(a.group);
    CHECK(b.host > 0);
    CHECK(b.blocks == 5 * 8);
    CHECK(a.is_ring);
    CHECK(a.host == 0);
    CHECK(a.slots == 2 * 8);
    CHECK(a.device == static_cast<std::uint64_t>(a.slots) * a.block_bytes);
  }
  const TierLinkBytes least = link_bytes(after.tier_parts, 4, 1),
                      most = link_bytes(before.tier_parts, 4, 1);
  CHECK(least.up < most.up);
  CHECK(least.up + least.down < most.up + most.down);
  try {
    plan(with(early(small), {"experts.device_cache=1KiB"}));
    CHECK(false);
  } catch (const ResourceError& e) {
    INFO(e.what());
    CHECK(std::string(e.what()).find("11 slots of") != std::string::npos);
    CHECK(std::string(e.what()).find("for gradients of gate_up") != std::string::npos);
  }
  // plan finds what the configuration alone does not show.
  CHECK_THROWS_AS(plan_memory(hybrid_config(early({})), kCpu, kF32, {}, 2), UsageError);
}

}  // namespace moesaic::test
