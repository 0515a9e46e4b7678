// Training with experts that are not on the device has the bits of training with experts that are: statistics of every step,
// and all state at the end, for any room on the device, any number of ranks, and across a stop.
#include <algorithm>
#include <filesystem>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/base/random.h"
#include "core/checkpoint/checkpoint.h"
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

// The state of all ranks together, and what all of them saw.
struct Job {
  std::vector<StepStats> stats;
  Snapshot state;
  std::vector<Snapshot> weights;
};

// Ranks are threads: no assertions of the test here.
void check_used(const Run& run) {
  for (const TierCounters& c : run.params->tiers()->counters())
    MOESAIC_CHECK(c.cache.uses > 0 && c.cache.loads > 0, c.group + " " + c.kind + " were not used");
}

Job job(const Overrides& overrides, int ranks, int steps, const std::optional<Offload>& offload) {
  Job result;
  result.weights.resize(static_cast<std::size_t>(ranks));
  std::mutex mutex;
  run_local_ranks(ranks, [&](Communicator& world) {
    Run run(hybrid_config(overrides), &world, Stream::Mode::worker, kCpu, 0, offload);
    const auto stats = run.steps(steps);
    if (world.rank() == 0) result.stats = stats;
    if (offload) check_used(run);
    run.add_to(result.state, mutex);
    result.weights[static_cast<std::size_t>(world.rank())] = run.weights_of_kernels();
  });
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
    {2, {}},
    {2, {"parallel.zero=0"}},
    {4, {"parallel.ep=2", "train.global_batch_size=8"}},
    {2, {"parallel.pp=2"}},
    {1, {"parallel.order=vertical"}},
    {2, {"parallel.order=vertical", "parallel.ep=2"}},
    {2, {"parallel.ep=2", "dispatch.exchange=flat", "dispatch.buffer_factor=0.5"}},
    {2, {"parallel.ep=2", "dispatch.overlap=true", "dispatch.chunks=2"}},
    {4, {"parallel.pp=2", "parallel.ep=2"}},
};
// Experts that go to other ranks, and slices of them.
const std::vector<Layout> kMoving{
    {2, {"parallel.ep=2", "experts.place_every=1"}},
    {4, {"parallel.ep=2", "experts.place_every=1", "parallel.zero=0", "train.global_batch_size=8"}},
    {2, {"parallel.tp=2", "parallel.etp=2"}},
    {4, {"parallel.ep=2", "parallel.tp=2", "parallel.etp=2", "experts.place_every=1"}},
};
const std::vector<Overrides> kOptimizers{
    {"optimizer.name=adamw"},
    {"optimizer.name=muon"},
    {"optimizer.name=adamw", "optimizer.ema_decay=0.9"},
    {"optimizer.name=muon", "optimizer.ema_decay=0.9", "optimizer.untouched=skip"},
};
const std::vector<Overrides> kTypes{
    {"run.precision=f64"},
    {"run.precision=f32"},
    {"run.precision=bf16", "optimizer.master=f32"},
    {"run.precision=bf16", "optimizer.master=split"},
};
const std::vector<Overrides> kBatches{
    {"train.global_batch_size=4", "train.micro_batch_size=1"},
    {"train.global_batch_size=4", "train.micro_batch_size=2"},
    {"train.global_batch_size=12", "train.micro_batch_size=1", "optimizer.clip_grad_norm=0.5"},
    {"train.global_batch_size=8", "activations.recompute=full"},
    {"train.global_batch_size=4", "debug.inject_nan_step=2"},
};

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

const std::vector<TierPolicy> kPolicies{
    TierPolicy::sched, TierPolicy::sched, TierPolicy::lru, TierPolicy::random};

std::string told(int ranks, const Offload& offload, const Overrides& overrides) {
  return fmt::format("{} ranks, {} on the device, {} in the file, policy {}: {}",
                     ranks,
                     offload.on_device,
                     offload.in_file,
                     static_cast<int>(offload.policy),
                     fmt::join(overrides, " "));
}

void check_combinations(bool weights, int count, const std::vector<Layout>& layouts = kLayouts) {
  for (int i = 0; i < count; ++i) {
    Draw draw(static_cast<std::uint64_t>(i) + (weights ? 100 : 0));
    Overrides overrides = with(with(draw.of(kOptimizers), draw.of(kTypes)), draw.of(kBatches));
    const Layout& layout = draw.of(layouts);
    overrides = with(overrides, layout.overrides);
    const Offload offload{.weights = weights,
                          .on_device = draw.of(std::vector{0.0, 0.0, 0.5, 1.0}),
                          .in_file = draw.of(std::vector{0.0, 0.0, 0.4}),
                          .policy = draw.of(kPolicies)};
    INFO(told(layout.ranks, offload, overrides));
    check_same(job(overrides, layout.ranks, 3, offload), job(overrides, layout.ranks, 3, {}));
  }
}

// Few tokens for many experts, so that some get none; where updates are made by owners of shares, lazy is dense.
void check_lazy(int count) {
  int replayed = 0;
  for (int i = 0; i < count; ++i) {
    Draw draw(static_cast<std::uint64_t>(i) + 200);
    const std::vector<Overrides> optimizers{{"optimizer.name=adamw"},
                                            {"optimizer.name=muon"},
                                            {"optimizer.name=adamw", "optimizer.ema_decay=0.9"},
                                            {"optimizer.name=muon", "optimizer.ema_decay=0.9"}};
    Overrides overrides = with(with(draw.of(optimizers), draw.of(kTypes)), draw.of(kBatches));
    const Layout& layout = draw.of(kLayouts);
    overrides = with(overrides, layout.overrides);
    overrides = with(overrides,
                     {"data.sequence_length=16",
                      "model.num_experts=64",
                      "model.balance.bias_rule=none",
                      "optimizer.untouched=lazy"});
    const Offload offload{.on_device = draw.of(std::vector{0.0, 0.2, 0.5, 1.0}),
                          .in_file = draw.of(std::vector{0.0, 0.0, 0.4}),
                          .policy = draw.of(kPolicies)};
    INFO(told(layout.ranks, offload, overrides));
    const Job lazy = job(overrides, layout.ranks, 5, offload);
    check_same(lazy, job(with(overrides, {"optimizer.untouched=dense"}), layout.ranks, 5, {}));
    std::int64_t replays = 0;
    for (const StepStats& s : lazy.stats)
      replays += s.replays ? s.replays->members : 0;
    CHECK((replays == 0 || lazy.stats.front().replays.has_value()));
    replayed += replays > 0 ? 1 : 0;
  }
  CHECK(replayed > count / 3);
}

// Slices of experts, which Muon puts together.
void check_split_matrices(bool weights) {
  const Overrides muon{"optimizer.name=muon", "parallel.tp=2", "parallel.etp=2"};
  const Offload tight{.weights = weights},
      roomy{.weights = weights, .on_device = 0.5, .in_file = 0.4};
  const auto check = [&](const Overrides& more, int ranks, const Offload& offload) {
    const Overrides overrides = with(muon, more);
    INFO(fmt::format("{} ranks: {}", ranks, fmt::join(overrides, " ")));
    check_same(job(overrides, ranks, 3, offload), job(overrides, ranks, 3, {}));
  };
  for (const Overrides& types : kTypes)
    check(types, 2, tight);
  check(
      {"optimizer.ema_decay=0.9", "optimizer.untouched=skip", "data.sequence_length=16"}, 2, roomy);
  check(
      {"optimizer.ema_decay=0.9", "optimizer.untouched=lazy", "data.sequence_length=16"}, 2, tight);
  check({"run.precision=bf16", "optimizer.master=split"}, 4, roomy);
  check({"run.precision=bf16", "optimizer.master=split", "parallel.zero=0"}, 4, roomy);
  check({"run.precision=bf16", "optimizer.master=f32", "parallel.ep=2", "experts.place_every=2"},
        4,
        roomy);
  check({"parallel.tp=1", "parallel.etp=4"}, 4, tight);
  check({"train.phases=[{until: 2, freeze: ['*.w3.weight']}, {until: 20}]",
         "optimizer.untouched=skip"},
        2,
        tight);
}

// Other pieces of dense tensors fall to the owners when experts leave the buckets, and all of them to every rank without
// sharding. Sizes that no number of ranks divides, and gradients that are clipped in every step.
void check_cuts(const Layout& layout, const Overrides& how) {
  const Overrides overrides = with(with({"model.vocab_size=262",
                                         "model.intermediate_size=52",
                                         "model.num_experts=6",
                                         "optimizer.clip_grad_norm=0.02",
                                         "train.global_batch_size=12"},
                                        layout.overrides),
                                   how);
  INFO(fmt::format("{} ranks: {}", layout.ranks, fmt::join(overrides, " ")));
  const Job expected = job(overrides, layout.ranks, 3, {});
  for (const StepStats& s : expected.stats)
    CHECK(s.grad_norm > 0.02);
  const Overrides whole = with(overrides, {"parallel.zero=0"});
  check_same(job(whole, layout.ranks, 3, {}), expected);
  check_same(job(whole, layout.ranks, 3, Offload{.on_device = 0.3}), expected);
  for (const bool weights : {false, true})
    check_same(job(overrides, layout.ranks, 3, Offload{.weights = weights}), expected);
}

// The first parameter of a family of experts.
ParamId some_expert(const ParameterStore& params) {
  for (std::size_t i = 0; i < params.params().size(); ++i) {
    if (params.params()[i].part == Part::routed_expert) return {static_cast<std::int32_t>(i)};
  }
  throw InternalError("a model without experts");
}

// Makes one number of an expert's gradient none, before anything is added to it.
class Spoiler final : public ChoiceObserver {
 public:
  Spoiler(Run& run, ParamId id, std::int64_t member) : run_(run), id_(id), member_(member) {}
  ConstTensorView replace(const Choice&, Stream& stream) override {
    if (std::exchange(is_done_, true)) return {};
    const auto spoil = [&](const TensorView& gradient) {  // all bits set: not a number
      fill_bytes(gradient.reshaped({gradient.numel()}).rows(1, 2), 0xff, stream);
    };
    const StorageId storage = run_.params->storage_of(id_);
    if (run_.params->has_tiered_weights(storage)) {
      run_.params->tiers()->with_members(
          storage,
          {&member_, 1},
          {.gradient = MemberAccess::change},
          stream,
          [&](std::span<const MemberTensors> m) { spoil(m[0].gradient); });
    } else {
      spoil(run_.params->gradient(id_, member_));
    }
    return {};
  }

 private:
  Run& run_;
  ParamId id_;
  std::int64_t member_;
  bool is_done_ = false;
};

void check_bad_gradient(bool weights, const Overrides& overrides = {}) {
  const config::Config config = hybrid_config(with({"optimizer.ema_decay=0.9"}, overrides));
  Run run(config, nullptr, Stream::Mode::worker, kCpu, 0, Offload{.weights = weights});
  Run plain(config);
  for (Run* r : {&run, &plain})
    r->steps(2);
  const Snapshot before = run.snapshot(), weights_before = run.weights_of_kernels();
  for (Run* r : {&run, &plain}) {
    Spoiler spoiler(*r, some_expert(*r->params), 3);
    r->trainer->set_choices(&spoiler);
    CHECK(r->step().skipped);
    r->trainer->set_choices(nullptr);
  }
  const Snapshot after = run.snapshot();
  CHECK(differences(run.weights_of_kernels(), weights_before).empty());
  CHECK(differences(after, before, "optimizer/").empty());
  CHECK(differences(after, before, "ema/").empty());
  CHECK(differences(after, plain.snapshot()).empty());
  CHECK(same_numbers(run.step(), plain.step()));
  CHECK(differences(run.snapshot(), plain.snapshot()).empty());
}

// Three steps under one way to keep experts, three under another.
void check_continued(const Overrides& overrides,
                     int ranks,
                     const std::optional<Offload>& first,
                     const std::optional<Offload>& second) {
  const TemporaryFolder folder("offload_resume");
  std::filesystem::remove_all(folder.path());
  run_local_ranks(ranks, [&](Communicator& world) {
    Run run(hybrid_config(overrides), &world, Stream::Mode::worker, kCpu, 0, first);
    run.steps(3);
    save_together(run, world, folder.path());
  });
  Job found;
  found.weights.resize(static_cast<std::size_t>(ranks));
  std::mutex mutex;
  run_local_ranks(ranks, [&](Communicator& world) {
    Run run(hybrid_config(overrides), &world, Stream::Mode::worker, kCpu, 0, second);
    load_newest(run, folder.path());
    const auto stats = run.steps(3);
    if (world.rank() == 0) found.stats = stats;
    run.add_to(found.state, mutex);
    found.weights[static_cast<std::size_t>(world.rank())] = run.weights_of_kernels();
  });
  Job whole = job(overrides, ranks, 6, {});
  whole.stats.erase(whole.stats.begin(), whole.stats.begin() + 3);
  check_same(found, whole);
}

void check_resume(bool weights) {
  const Offload tight{.weights = weights},
      roomy{.weights = weights, .on_device = 0.7, .in_file = 0.5};
  const Overrides split{"run.precision=bf16", "optimizer.master=split", "optimizer.name=muon"},
      plain{"optimizer.ema_decay=0.9"};
  check_continued(split, 1, tight, roomy);
  check_continued(plain, 1, tight, {});
  check_continued(split, 2, {}, roomy);
  check_continued(with(plain, {"run.precision=bf16", "optimizer.master=f32", "parallel.ep=2"}),
                  2,
                  roomy,
                  tight);
}

// Experts that are frozen, released, slower than others, and by halves.
void check_phases(bool weights) {
  const Overrides overrides{
      "train.phases=[{until: 2, freeze: ['*.experts.*']}, {until: 3, lr_scale: [{pattern: "
      "'*.w1.weight', scale: 0.5}]}, "
      "{until: 4, freeze: ['*.w3.weight']}, {until: 20}]",
      "optimizer.ema_decay=0.9"};
  for (const Overrides& more : {Overrides{},
                                Overrides{"optimizer.untouched=skip"},
                                Overrides{"optimizer.untouched=lazy", "data.sequence_length=16"}}) {
    const Job expected = job(with(overrides, more), 1, 5, {});
    for (const double on_device : {0.0, 0.6}) {
      check_same(
          job(with(overrides, more), 1, 5, Offload{.weights = weights, .on_device = on_device}),
          expected);
    }
  }
}

// Whatever comes between two steps meets experts that were updated.
void check_between(const Offload& offload, const Overrides& overrides = {}) {
  const config::Config config = hybrid_config(with({"optimizer.ema_decay=0.9"}, overrides));
  Run run(config, nullptr, Stream::Mode::worker, kCpu, 0, offload), plain(config);
  for (int i = 0; i < 4; ++i) {
    CHECK(same_numbers(run.step(), plain.step()));
    if (i % 2 == 0) CHECK(run.trainer->evaluate().loss == plain.trainer->evaluate().loss);
    if (i > 1) CHECK(differences(run.snapshot(), plain.snapshot()).empty());
  }
  CHECK(differences(run.weights_of_kernels(), plain.weights_of_kernels()).empty());
}

}  // namespace

TEST_CASE("offloaded states change no bit of training") {
  check_combinations(false, 10);
}

TEST_CASE("offloaded states and experts that move, and slices of them, change no bit of training") {
  check_combinations(false, 5, kMoving);
  check_combinations(true, 7, kMoving);
}

TEST_CASE(
    "offloaded states and experts: clipped gradients have the same bits for any cut of state") {
  const Overrides adamw{"optimizer.name=adamw"}, muon{"optimizer.name=muon"};
  const Overrides f64{"run.precision=f64"}, f32{"run.precision=f32"};
  check_cuts({2, {}}, with(muon, f32));
  check_cuts({3, {}}, with(adamw, f64));
  check_cuts({4, {}}, with(adamw, f32));
  check_cuts({4, {}}, with(muon, f64));
  check_cuts({4, {"parallel.ep=2"}}, with(adamw, f64));
  check_cuts({4, {"parallel.tp=2"}}, with(adamw, f64));
  check_cuts({4, {"parallel.tp=2", "parallel.etp=2"}}, with(muon, f64));
  check_cuts({4, {"parallel.ep=2", "experts.place_every=1"}}, with(adamw, f64));
  check_cuts({4, {"parallel.pp=2"}}, with(adamw, f64));
  check_cuts({8,
              {"parallel.tp=4",
               "model.vocab_size=268",
               "model.num_attention_heads=4",
               "model.linear_attn_config.num_heads=4",
               "model.indexer.index_n_heads=4"}},
             with(adamw, f64));
  check_cuts({4, {"parallel.cp=2"}}, with(adamw, f64));
}

TEST_CASE("offloaded states: a bad gradient of an expert leaves all of them alone") {
  check_bad_gradient(false);
}

TEST_CASE("offloaded states: a run goes on with other room, or without any offload, and back") {
  check_resume(false);
}

TEST_CASE("offloaded states: frozen, released and scaled experts") {
  check_phases(false);
}

TEST_CASE("offloaded states: slices of experts with Muon") {
  check_split_matrices(false);
}

TEST_CASE("offloaded experts: slices of experts with Muon") {
  check_split_matrices(true);
}

TEST_CASE("offloaded experts change no bit of training") {
  check_combinations(true, 14);
}

TEST_CASE("offloaded experts: evaluation and checkpoints between the steps") {
  for (const TierPolicy policy : {TierPolicy::sched, TierPolicy::random})
    check_between({.weights = true, .on_device = 0.3, .in_file = 0.3, .policy = policy});
  check_between({.weights = false});
}

TEST_CASE("offloaded experts: a bad gradient of one leaves all of them alone") {
  check_bad_gradient(true);
}

// Updates of the next layers begin with the first part of a forward.
TEST_CASE("offloaded experts: chunks and passes of an exchange beside updates") {
  for (const Overrides& parts :
       {Overrides{"dispatch.overlap=true", "dispatch.chunks=2"},
        Overrides{"dispatch.exchange=flat", "dispatch.buffer_factor=0.5"}}) {
    const Overrides overrides = with(parts, {"parallel.ep=2", "train.global_batch_size=4"});
    INFO(fmt::format("{}", fmt::join(overrides, " ")));
    const Job expected = job(overrides, 2, 3, {});
    for (const char* untouched : {"optimizer.untouched=dense", "optimizer.untouched=lazy"})
      check_same(job(with(overrides, {untouched}), 2, 3, Offload{.on_device = 0.3}), expected);
  }
}

TEST_CASE("offloaded experts: those without tokens may wait for their updates") {
  check_lazy(8);
  const Overrides lazy{
      "optimizer.untouched=lazy", "model.num_experts=32", "data.sequence_length=16"};
  check_bad_gradient(true, lazy);
  check_between({.on_device = 0.3, .in_file = 0.3}, lazy);
}

TEST_CASE("offloaded experts: a run goes on with other room, or without any offload, and back") {
  check_resume(true);
}

TEST_CASE("offloaded experts: frozen, released and scaled ones") {
  check_phases(true);
}

TEST_CASE("offloaded experts: what cannot go together yet is refused, with what to set") {
  const auto refusal = [](const Overrides& overrides, int ranks) {
    try {
      job(overrides, ranks, 1, Offload{.weights = false});
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string("nothing");
  };
  CHECK(refusal({"parallel.ep=2", "experts.place_every=2", "experts.replicas=1"}, 2)
            .find("experts.replicas=0") != std::string::npos);
}

}  // namespace moesaic::test
