// The parameter store with offloaded experts: who owns what, what takes memory, what is refused.
#include <cstring>
#include <map>
#include <memory>

#include "tests/nn/expert_tiers_support.h"

namespace moesaic::test {
namespace {

using tiers::VisitKind;

TEST_CASE("expert tiers: owners of state, and what is left in buckets") {
  const auto layout = [](int ranks) {
    return std::make_shared<MeshLayout>(MeshConfig{.dp = ranks, .ep = ranks == 6 ? 2 : 1}, ranks);
  };
  for (const int ranks : {1, 2, 4, 6}) {  // 6: three owners of three members each
    for (const bool weights : {true, false}) {
      INFO(ranks << " ranks, weights " << weights);
      std::map<std::string, int> owners;
      for (int r = 0; r < ranks; ++r) {
        Experts e(kBf16, MeshPosition(layout(ranks), r));
        ParameterStore& store = e.store;
        store.shard_state({.bucket_bytes = 64});
        ExpertTierOptions options;
        options.weights = weights;
        store.offload_experts(options);
        store.seal_pretend(kCpu);
        const auto groups = store.tier_groups({"m", "v"});
        REQUIRE(groups.size() == 2);
        CHECK((groups[0].name == "gate_up" && groups[1].name == "down"));
        const std::int64_t here = ranks == 6 ? 3 : 6, each = ranks == 6 ? 3 : ranks;
        for (std::size_t g = 0; g < 2; ++g) {
          CHECK(groups[g].storages.size() == kLayers);
          CHECK(groups[g].members == here);
          CHECK(groups[g].weight_bytes == (g == 0 ? 48u : 24u) * 2);
          CHECK(groups[g].gradient_bytes == (g == 0 ? 48u : 24u) * 4);
          REQUIRE(groups[g].state_sections.size() == 3);
          CHECK(groups[g].state_sections[0].first == "master");
          CHECK(groups[g].state_bytes() == (g == 0 ? 48u : 24u) * 12);
          std::int64_t owned = 0;
          for (std::size_t l = 0; l < kLayers; ++l) {
            const RowRange own = groups[g].own[l];
            owned += own.end - own.begin;
            const StorageId id = e.storages[l][g];
            CHECK((store.has_tiered_state(id) && store.has_tiered_weights(id) == weights));
            CHECK(store.has_gradient(id));
            for (std::int64_t m = 0; m < here; ++m) {
              const ParamId p = store.params_of(id).front();
              const bool is_own = own.begin <= m && m < own.end;
              CHECK(store.owns_whole(p, m) == is_own);
              owners[store.member_name(p, m)] += is_own ? 1 : 0;
              CHECK((is_own || store.own_piece(p, m).is_empty()));
            }
            if (!weights) continue;
            const std::int64_t me = ranks == 6 ? r / 2 : r;
            CHECK((own.begin == here * me / each && own.end == here * (me + 1) / each));
            const FlatRange last = store.range_of_owner(id, static_cast<int>(each) - 1);
            CHECK(last.end == store.storage_shape(id).numel());
            CHECK(last.begin == here * (each - 1) / each * store.storage_shape(id).numel() / here);
          }
          CHECK(groups[g].owned == owned);
        }
        std::int64_t in_buckets = 0;
        for (const auto& bucket : store.buckets())
          in_buckets += bucket.end - bucket.begin;
        CHECK(in_buckets == (ranks == 1 ? 0 : store.all_grads().numel()));
        CHECK(store.all_grads().numel() < (weights ? 65 : 10000));  // the norm alone, padded
      }
      for (const auto& [name, n] : owners) {
        INFO(name);
        CHECK(n == 1);
      }
    }
  }
}

TEST_CASE("expert tiers: a rank keeps the state of its own members alone") {
  const auto layout = std::make_shared<MeshLayout>(MeshConfig{.dp = 2}, 2);
  Experts e(kBf16, MeshPosition(layout, 1)), whole(kBf16);
  e.store.shard_state({});
  e.store.offload_experts(options_of({.slots = 3}, {}));
  e.store.seal(kCpu);
  e.store.initialize(7);
  whole.store.seal(kCpu);
  whole.store.initialize(7);
  ExpertTiers& tiers = *e.store.tiers();
  const StorageId id = e.storages[1][0];
  using Kind = MemberPart::Kind;
  for (std::int64_t m = 0; m < kMembers; ++m) {
    const auto same_as = [&](const TensorView& all) {
      return [all, m](const TensorView& t) {
        CHECK(std::memcmp(t.data(), all.rows(m, m + 1).data(), t.bytes()) == 0);
      };
    };
    tiers.with_host(
        id, m, {Kind::weight}, MemberAccess::read, same_as(whole.store.storage_weight(id)));
    const auto master = [&] {
      tiers.with_host(
          id, m, {Kind::master}, MemberAccess::read, same_as(whole.store.storage_master(id)));
    };
    if (m < 3) CHECK_THROWS_AS(master(), InternalError);
    if (m >= 3) master();
    CHECK_THROWS_AS(
        tiers.with_host(id, m, {Kind::remainder}, MemberAccess::read, [](TensorView) {}),
        InternalError);
  }
}

TEST_CASE("expert tiers: dry runs and pretended stores do nothing") {
  const auto bytes_in_use = [] {
    std::size_t sum = 0;
    for (const MemoryUse& use : memory_in_use())
      sum += use.bytes;
    return sum;
  };
  const std::size_t before = bytes_in_use();
  const Run run{.slots = 3};
  Experts pretended(kBf16), real(kBf16);
  pretended.store.offload_experts(options_of(run, {}));
  pretended.store.seal_pretend(kCpu);
  CHECK(bytes_in_use() == before);
  real.store.offload_experts(options_of(run, {}));
  real.store.seal(kCpu);
  const auto sum = [](const std::vector<MemoryUse>& list) {
    std::size_t bytes = 0;
    for (const MemoryUse& use : list)
      bytes += use.bytes;
    return bytes;
  };
  CHECK(sum(pretended.store.memory_use()) == sum(real.store.memory_use()));
  CHECK(bytes_in_use() - before ==
        sum(real.store.memory_use()) + sum(real.store.tiers()->host_use()));
  CHECK(sum(pretended.store.tiers()->host_use()) == sum(real.store.tiers()->host_use()));
  Stream stream(kCpu, "dry", Stream::Mode::dry);
  for (Experts* e : {&pretended, &real}) {
    const StorageId id = e->storages[1][1];
    for (const bool gradients : {false, true}) {
      int calls = 0;
      const MemberWork work = [&](const MemberRun& r) {
        ++calls;
        CHECK((r.begin == 0 && r.end == kMembers && r.slot_of_member.dim(0) == kMembers));
        CHECK((r.slots.dim(1) == kWidth && r.slots.dim(2) == kInner));
        CHECK(r.slots.dtype() == (gradients ? DType::f32 : DType::bf16));
      };
      const std::vector<std::int64_t> rows(kMembers, 0);
      const MemberVisit visit{.kind = VisitKind::backward, .rows = rows};
      gradients ? e->store.gradients_of_members(id, visit, stream, work)
                : e->store.weights_of_members(id, visit, stream, work);
      CHECK(calls == 1);
    }
    const std::vector<std::int64_t> members{4, 5};
    e->store.tiers()->with_members(
        id,
        members,
        {MemberAccess::change, MemberAccess::read, MemberAccess::change},
        stream,
        [&](const auto& tensors) {
          REQUIRE(tensors.size() == 2);
          CHECK(tensors[1].weight.dim(0) == kWidth);
          CHECK((!tensors[1].master.empty() && tensors[1].remainder.empty()));
          CHECK((tensors[1].state.size() == 2 && !tensors[1].state[1].empty()));
        });
  }
  for (const TierCounters& c : real.store.tiers()->counters())
    CHECK(c.cache.uses == 0);
}

TEST_CASE("expert tiers: how many members are in use at once") {
  TierGroup group{.name = "gate_up", .storages = {{0}}, .members = 400, .rows = 2, .cols = 2};
  group.own = {{0, 0}};
  group.trained = false;
  group.weight_bytes = 16;
  const auto at_once = [&](std::int64_t slots) {
    ExpertTierOptions options = options_of({.slots = slots}, {});
    options.groups.pop_back();
    return ExpertTiers({group}, options, kF32, kCpu, true)
        .members_at_once({0}, {.weight = MemberAccess::read});
  };
  CHECK(at_once(3) == 1);
  CHECK(at_once(8) == 3);     // few slots: all for what passes, half of it under way
  CHECK(at_once(20) == 7);    // a twentieth of all, less what updates beside a forward pass through
  CHECK(at_once(100) == 12);  // a quarter
  CHECK(at_once(300) == 16);
  CHECK(at_once(400) == 400);
}

TEST_CASE("expert tiers: mistakes and budgets that are too small have names") {
  const auto sealed = [](const ExpertTierOptions& options) {
    auto e = std::make_unique<Experts>(kBf16);
    e->store.offload_experts(options);
    e->store.seal(kCpu);
    return e;
  };
  ExpertTierOptions options = options_of({.slots = 3}, {});
  options.groups[1].gradient_slots = 2;
  {
    const std::string text = message_of<ResourceError>([&] { sealed(options); });
    CHECK(contains(text, "2 slots of 96 bytes"));
    CHECK(contains(text, "down gradients"));
    CHECK(contains(text, "at least 3"));
  }
  CHECK_THROWS_AS(sealed(options), ResourceError);
  options.groups.pop_back();
  CHECK_THROWS_AS(sealed(options), InternalError);
  // A file that no disk holds.
  {
    const TemporaryFolder folder("expert_tiers_full");
    TierGroup group{
        .name = "gate_up", .storages = {{0}}, .members = 1000000, .rows = 4096, .cols = 4096};
    group.own = {{0, 0}};
    group.trained = false;
    group.weight_bytes = std::size_t{64} << 20;
    ExpertTierOptions large = options_of({.slots = 3}, folder.path());
    large.groups = {{.weight_slots = 3, .weights_in_file = 1000000, .staging_slots = 2}};
    CHECK(
        contains(message_of<ResourceError>([&] { ExpertTiers({group}, large, kF32, kCpu, false); }),
                 "memory.file_budget"));
    CHECK_THROWS_AS(ExpertTiers({group}, large, kF32, kCpu, false), ResourceError);
  }

  const auto e = sealed(options_of({.slots = 3}, {}));
  ParameterStore& store = e->store;
  store.initialize(1);
  ExpertTiers& tiers = *store.tiers();
  const StorageId id = e->storages[0][0], norm{0};
  CHECK((tiers.covers(id) && !tiers.covers(norm) && tiers.holds_weights()));
  const ParamId p = store.params_of(id).front();
  Stream stream(kCpu, "user");
  CHECK(contains(message_of<InternalError>([&] { store.acquire(id, stream); }),
                 "layers.0.experts.w13' is offloaded"));
  CHECK_THROWS_AS(store.storage_weight(id), InternalError);
  CHECK_THROWS_AS(store.slot_of_member(id), InternalError);
  CHECK_THROWS_AS(store.grad(id), InternalError);
  CHECK_THROWS_AS(store.weight(p, 0), InternalError);
  CHECK_THROWS_AS(store.own_gradient(p, 0), InternalError);
  CHECK_THROWS_AS(store.storage_master(id), InternalError);
  CHECK_THROWS_AS(store.master(p, 0), InternalError);
  CHECK(!store.storage_weight(norm).empty());
  CHECK_THROWS_AS(tiers.weights(norm, {}, stream, [](const MemberRun&) {}), InternalError);
  store.set_frozen(p, true);
  CHECK((store.grad(id).empty() && !store.has_gradient(id)));
  CHECK_THROWS_AS(store.gradients_of_members(id, {}, stream, [](const MemberRun&) {}),
                  InternalError);
  store.set_frozen(p, false);

  const std::vector<std::int64_t> four{0, 1, 2, 3}, three{0, 1, 2}, one{2};
  const auto nothing = [](const auto&) {};
  const ExpertTiers::Access read{.weight = MemberAccess::read};
  CHECK(contains(
      message_of<ResourceError>([&] { tiers.with_members(id, four, read, stream, nothing); }),
      "all 3 slots of 'experts' gate_up weights'"));
  tiers.with_members(id, three, read, stream, nothing);  // all are free again
  CHECK(tiers.members_at_once(id, read) == 1);

  // A gradient that was given up is not read again in this step.
  tiers.begin_step();
  CHECK(!tiers.has_gradient(id, 2));
  tiers.gradients(id, {.kind = VisitKind::backward}, stream, [](const MemberRun&) {});
  CHECK(tiers.has_gradient(id, 2));
  const ExpertTiers::Access last{.gradient = MemberAccess::read, .last_use_of_gradient = true};
  tiers.with_members(id, one, last, stream, nothing);
  CHECK(!tiers.has_gradient(id, 2));
  CHECK(contains(
      message_of<InternalError>([&] { tiers.with_members(id, one, last, stream, nothing); }),
      "given up"));
  tiers.begin_step();
  tiers.with_members(id, one, last, stream, [&](const auto& tensors) {
    stream.synchronize();
    for (std::int64_t i = 0; i < tensors[0].gradient.numel(); ++i)
      CHECK(tensors[0].gradient.template as<float>()[i] == 0);
  });

  tiers.set_schedule(
      tiers::step_visits(kLayers, 1, tiers::VisitOrder::horizontal, tiers::Updates::none),
      tiers::Updates::none);
  tiers.weights(id, {}, stream, [](const MemberRun&) {});
  tiers.weights(id, {}, stream, [](const MemberRun&) {});  // another part
  tiers.weights(e->storages[2][0], {.outside = true}, stream, [](const MemberRun&) {});
  CHECK(contains(message_of<InternalError>([&] {
                   tiers.weights(e->storages[2][0], {}, stream, [](const MemberRun&) {});
                 }),
                 "the schedule has forward of layer 1"));
  stream.synchronize();
}

}  // namespace
}  // namespace moesaic::test
