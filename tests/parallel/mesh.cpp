#include "parallel/mesh.h"

#include <atomic>
#include <exception>
#include <functional>
#include <numeric>
#include <set>

#include "tests/support/catch.h"

namespace moesaic {
namespace {

std::vector<std::vector<int>> groups(const MeshLayout& m, std::vector<Axis> axes) {
  return m.groups(axes);
}

std::string usage_error(const MeshConfig& config, int world) {
  try {
    MeshLayout(config, world);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "accepted";
}

TEST_CASE("dense and expert axes lie over the same ranks") {
  MeshConfig c;
  c.pp = 2;
  c.cp = 2;
  c.tp = 2;
  c.ep = 4;
  const MeshLayout m(c, 16);
  REQUIRE(m.extent(Axis::dp) == 2);
  REQUIRE(m.extent(Axis::edp) == 2);
  REQUIRE(groups(m, {Axis::tp})[0] == std::vector<int>{0, 1});
  REQUIRE(groups(m, {Axis::cp})[0] == std::vector<int>{0, 2});
  REQUIRE(groups(m, {Axis::dp})[0] == std::vector<int>{0, 4});
  REQUIRE(groups(m, {Axis::pp})[3] == std::vector<int>{3, 11});
  REQUIRE(
      groups(m, {Axis::ep}) ==
      std::vector<std::vector<int>>{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}});
  REQUIRE(groups(m, {Axis::edp})[1] == std::vector<int>{1, 5});
  REQUIRE(groups(m, {Axis::dp, Axis::cp})[1] == std::vector<int>{1, 3, 5, 7});
  REQUIRE(groups(m, {Axis::dp, Axis::cp, Axis::tp}).size() == 2);
  REQUIRE(groups(m, {Axis::etp}).size() == 16);
  REQUIRE_THROWS_AS(groups(m, {Axis::dp, Axis::ep}), InternalError);
  REQUIRE_THROWS_AS(groups(m, {Axis::dp, Axis::dp}), InternalError);
  REQUIRE_THROWS_AS(groups(m, {}), InternalError);
  REQUIRE(m.table().find("  ep      4  {0 1 2 3} {4 5 6 7} ") != std::string::npos);
  REQUIRE(m.table().find("etp      ") == std::string::npos);
}

TEST_CASE("every legal mesh: coordinates are a bijection, groups a partition") {
  for (const int world : {1, 4, 6, 12}) {
    for (int pp = 1; pp <= world; ++pp) {
      for (int tp = 1; tp <= world; ++tp) {
        for (int ep = 1; ep <= world; ++ep) {
          if (world % (pp * tp) != 0 || world / pp % ep != 0) continue;
          MeshConfig c;
          c.pp = pp;
          c.tp = tp;
          c.ep = ep;
          const MeshLayout m(c, world);
          std::set<std::vector<int>> dense, expert;
          for (int r = 0; r < world; ++r) {
            dense.insert({m.coordinate(Axis::pp, r),
                          m.coordinate(Axis::dp, r),
                          m.coordinate(Axis::cp, r),
                          m.coordinate(Axis::tp, r)});
            expert.insert({m.coordinate(Axis::pp, r),
                           m.coordinate(Axis::edp, r),
                           m.coordinate(Axis::ep, r),
                           m.coordinate(Axis::etp, r)});
          }
          REQUIRE(
              (dense.size() == static_cast<std::size_t>(world) && expert.size() == dense.size()));
          for (int a = 0; a < kNumAxes; ++a) {
            std::set<int> members;
            for (const auto& g : groups(m, {static_cast<Axis>(a)})) {
              REQUIRE(static_cast<int>(g.size()) == m.extent(static_cast<Axis>(a)));
              for (std::size_t i = 0; i < g.size(); ++i)
                REQUIRE(m.coordinate(static_cast<Axis>(a), g[i]) == static_cast<int>(i));
              members.insert(g.begin(), g.end());
            }
            REQUIRE(members.size() == static_cast<std::size_t>(world));
          }
        }
      }
    }
  }
}

TEST_CASE("products that do not fit are refused with what would") {
  MeshConfig c;
  c.dp = 3;
  c.tp = 2;
  REQUIRE(usage_error(c, 8) ==
          "parallel: pp x dp x cp x tp = 1 x 3 x 1 x 2 = 6, but there are 8 ranks: with this pp, "
          "cp and tp, parallel.dp must be 4, or left out");
  c.tp = 3;
  REQUIRE(usage_error(c, 8).find("does not divide 8; nearest numbers of ranks: 6, 9") !=
          std::string::npos);
  c = MeshConfig{};
  c.pp = 16;
  REQUIRE(usage_error(c, 8).find("nearest numbers of ranks: 16") != std::string::npos);
  c = MeshConfig{};
  c.ep = 3;
  REQUIRE(usage_error(c, 8) ==
          "parallel: dp x cp x tp = 8 x 1 x 1 = 8 is not a multiple of ep x etp = 3 x 1 = 3: with "
          "etp = 1 the nearest ep: 2, 4");
  c.ep = 1;
  c.etp = 5;
  REQUIRE(usage_error(c, 8).find("nearest etp: 4, 8") != std::string::npos);
  c.etp = 0;
  REQUIRE(usage_error(c, 8) == "parallel.etp = 0: at least 1");
}

// Counts the communicators that are made.
class CountingWorld final : public Communicator {
 public:
  CountingWorld(Communicator& inner, std::atomic<int>& splits) : inner_(inner), splits_(splits) {}
  int rank() const noexcept override { return inner_.rank(); }
  int size() const noexcept override { return inner_.size(); }
  const char* name() const noexcept override { return inner_.name(); }
  std::unique_ptr<Communicator> split(int color, int key) override {
    if (rank() == 0) ++splits_;
    return inner_.split(color, key);
  }
  void all_reduce(TensorView x, ReduceOp op, Stream& s) override { inner_.all_reduce(x, op, s); }
  void reduce_scatter(TensorView out, ConstTensorView in, ReduceOp op, Stream& s) override {
    inner_.reduce_scatter(out, in, op, s);
  }
  void all_gather(TensorView out, ConstTensorView in, Stream& s) override {
    inner_.all_gather(out, in, s);
  }
  void all_to_all(TensorView out, ConstTensorView in, const AllToAllPlan& p, Stream& s) override {
    inner_.all_to_all(out, in, p, s);
  }
  void reduce_to_owners(TensorView x,
                        std::span<const std::int64_t> bounds,
                        ReduceOp op,
                        Stream& s) override {
    inner_.reduce_to_owners(x, bounds, op, s);
  }
  void gather_from_owners(TensorView x, std::span<const std::int64_t> bounds, Stream& s) override {
    inner_.gather_from_owners(x, bounds, s);
  }
  void broadcast(TensorView x, int root, Stream& s) override { inner_.broadcast(x, root, s); }
  void exchange(std::span<const OutgoingMessage> out,
                std::span<const IncomingMessage> in,
                Stream& s) override {
    inner_.exchange(out, in, s);
  }
  void barrier() override { inner_.barrier(); }
  double all_reduce_host(double v, ReduceOp op) override { return inner_.all_reduce_host(v, op); }
  std::int64_t all_reduce_host(std::int64_t v, ReduceOp op) override {
    return inner_.all_reduce_host(v, op);
  }
  void broadcast_host(std::string& bytes, int root) override { inner_.broadcast_host(bytes, root); }
  std::vector<std::string> all_gather_host(const std::string& bytes) override {
    return inner_.all_gather_host(bytes);
  }
  [[noreturn]] void abort(int code, const std::string& why) override {
    inner_.abort(code, why);
    std::terminate();  // abort() does not return
  }

 private:
  Communicator& inner_;
  std::atomic<int>& splits_;
};

int run_mesh(const MeshConfig& config, int size, const std::function<void(Mesh&)>& body) {
  std::atomic<int> splits{0};
  run_local_ranks(size, [&](Communicator& comm) {
    CountingWorld world(comm, splits);
    Mesh mesh(config, world);
    body(mesh);
  });
  return splits;
}

void fail_unless(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(what);
}

TEST_CASE("groups communicate, and none is made that is not needed") {
  MeshConfig c;
  c.pp = 2;
  c.tp = 2;
  c.ep = 2;
  // pp, dp, tp = ep, edp = dp, {dp, cp} = dp, {dp, cp, tp}: four distinct partitions.
  const int splits = run_mesh(c, 8, [](Mesh& mesh) {
    for (int a = 0; a < kNumAxes; ++a) {
      const auto& group = mesh.group(static_cast<Axis>(a));
      fail_unless(group.rank() == mesh.coordinate(static_cast<Axis>(a)), "position in the group");
      fail_unless((group.comm() == nullptr) == (group.size() == 1),
                  "only groups of several ranks communicate");
      if (group.comm() == nullptr) continue;
      fail_unless(group.comm()->rank() == group.rank() && group.comm()->size() == group.size(),
                  "communicator of the group");
      const auto ranks = group.world_ranks();
      const auto sum = group.comm()->all_reduce_host(std::int64_t{mesh.rank()}, ReduceOp::sum);
      fail_unless(sum == std::accumulate(ranks.begin(), ranks.end(), 0), "sum over the group");
    }
    fail_unless(mesh.group(Axis::tp).comm() == mesh.group(Axis::ep).comm(),
                "equal groups share a communicator");
    fail_unless(mesh.group({Axis::cp, Axis::dp}).size() == 2, "the order of axes does not matter");
    fail_unless(mesh.group({Axis::dp, Axis::cp, Axis::tp}).size() == 4, "a stage");
    bool refused = false;
    try {
      mesh.group({Axis::pp, Axis::dp});
    } catch (const InternalError&) {
      refused = true;
    }
    fail_unless(refused, "a group that was not listed");
  });
  REQUIRE(splits == 4);
  // Data parallelism alone needs the world only, one rank nothing.
  REQUIRE(run_mesh(MeshConfig{}, 3, [](Mesh& mesh) {
            fail_unless(mesh.group(Axis::dp).comm() == &mesh.world(), "the world itself");
          }) == 0);
  REQUIRE(run_mesh(MeshConfig{}, 1, [](Mesh& mesh) {
            fail_unless(mesh.group(Axis::dp).comm() == nullptr, "one rank");
          }) == 0);
}

}  // namespace
}  // namespace moesaic
