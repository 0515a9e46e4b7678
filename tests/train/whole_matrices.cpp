#include "core/train/whole_matrices.h"

#include <stdexcept>
#include <vector>

#include "core/nn/module.h"
#include "tests/support/catch.h"

namespace moesaic {
namespace {

constexpr std::int64_t kRows = 4, kCols = 6;

// Ranks are threads: no assertions of the test inside them.
void fail_unless(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(what);
}

ParameterSpec matrix(const char* name) {
  return matrix_spec(name, kRows, kCols, 1.0, Part::dense_mlp);
}

/// Three matrices of one layout, each with a second tensor of small integers (u16) laid out like it.
struct Model {
  Model(MeshPosition position, int split) : params(kF64, std::move(position)) {
    for (const char* name : {"a", "b", "c"}) {
      ParameterSpec spec = split < 0 ? matrix(name) : split_over_tp(matrix(name), split);
      ids.push_back(params.params_of(params.declare(spec)).front());
    }
    params.seal(kCpu);
    params.initialize(7);
    for (const ParamId id : ids) {
      const LocalBlock& block = params.block_of_member(id);
      const TensorView u16 = memory.emplace_back(params.weight(id, 0).numel() * 2, kCpu, "test")
                                 .view(block.extent, DType::u16);
      for (std::int64_t r = 0; r < block.extent[0]; ++r) {
        for (std::int64_t c = 0; c < block.extent[1]; ++c)
          u16.as<std::uint16_t>()[r * block.extent[1] + c] = static_cast<std::uint16_t>(
              (block.offset[0] + r) * kCols + block.offset[1] + c + id.index * 100);
      }
      integers.push_back(u16);
    }
  }
  ParameterStore params;
  std::vector<ParamId> ids;
  std::vector<Buffer> memory;
  std::vector<TensorView> integers;
};

template <class T>
void require_times(const ConstTensorView& got,
                   const ConstTensorView& want,
                   T factor,
                   const char* what) {
  fail_unless(got.shape() == want.shape(), what);
  for (std::int64_t i = 0; i < want.numel(); ++i)
    fail_unless(got.as<T>()[i] == static_cast<T>(want.as<T>()[i] * factor), what);
}

}  // namespace

TEST_CASE("The ranks that split matrices work on one whole matrix each, and hand its blocks back") {
  const int split = GENERATE(0, 1);
  const auto run_ranks = [&](int ranks) {
    run_local_ranks(ranks, [&](Communicator& world) {
      const Mesh mesh({.dp = 1, .tp = ranks}, world);
      Model model(mesh.position(), split);
      const Model before(mesh.position(), split), alone({}, -1);
      WholeMatrices matrices(model.params, [](ParamId) { return true; });
      BackendOwner owner({.device = kCpu, .mode = Stream::Mode::worker, .name = "test"});
      std::vector<std::size_t> worked_on;
      // As many as ranks at a time; the last turn has one for fewer of them.
      for (std::size_t first = 0; first < model.ids.size();
           first += static_cast<std::size_t>(ranks)) {
        const std::size_t last =
            std::min(model.ids.size(), first + static_cast<std::size_t>(ranks));
        std::vector<WholeMatrices::Blocks> blocks;
        for (std::size_t i = first; i < last; ++i)
          blocks.push_back({model.ids[i],
                            {{{model.params.weight(model.ids[i], 0)},
                              {},
                              {model.integers[i]},
                              {before.params.weight(before.ids[i], 0), true},
                              {}}}});
        matrices.work(owner.backend(),
                      &mesh,
                      blocks,
                      [&](std::size_t turn, const WholeMatrices::Whole& whole) {
                        owner.stream().synchronize();
                        const std::size_t i = first + turn;
                        worked_on.push_back(i);
                        const ConstTensorView all = alone.params.weight(alone.ids[i], 0);
                        require_times<double>(whole[0], all, 1, "not the whole matrix");
                        require_times<std::uint16_t>(
                            whole[2], alone.integers[i], 1, "not the whole second tensor");
                        require_times<double>(whole[3], all, 1, "not what is only read");
                        fail_unless(whole[1].empty() && whole[4].empty(), "tensors from nowhere");
                        for (std::int64_t e = 0; e < all.numel(); ++e) {
                          whole[0].as<double>()[e] *= 2;
                          whole[2].as<std::uint16_t>()[e] *= 3;
                          whole[3].as<double>()[e] = 0;
                        }
                      });
      }
      owner.stream().synchronize();
      std::vector<std::size_t> expected;
      for (auto i = static_cast<std::size_t>(world.rank()); i < model.ids.size();
           i += static_cast<std::size_t>(ranks))
        expected.push_back(i);
      fail_unless(worked_on == expected, "another rank's matrix");
      for (std::size_t i = 0; i < model.ids.size(); ++i) {
        const Model fresh(mesh.position(), split);
        require_times<double>(model.params.weight(model.ids[i], 0),
                              fresh.params.weight(fresh.ids[i], 0),
                              2,
                              "not the block of the result");
        require_times<std::uint16_t>(
            model.integers[i], fresh.integers[i], 3, "not the second tensor's block");
        require_times<double>(before.params.weight(before.ids[i], 0),
                              fresh.params.weight(fresh.ids[i], 0),
                              1,
                              "what is only read has changed");
      }
    });
  };
  CHECK_NOTHROW(run_ranks(2));
  if (split == 1) CHECK_NOTHROW(run_ranks(3));
  if (split == 0) CHECK_NOTHROW(run_ranks(4));
}

TEST_CASE("Without ranks to send to every matrix is worked on") {
  const auto layout = std::make_shared<MeshLayout>(MeshConfig{.dp = 1, .tp = 2}, 2);
  const Model model(MeshPosition(layout, 1), 0);
  WholeMatrices matrices(model.params, [](ParamId) { return true; });
  BackendOwner owner({.device = kCpu, .mode = Stream::Mode::dry, .name = "test"});
  std::vector<WholeMatrices::Blocks> blocks;
  for (const std::size_t i : {0, 1})
    blocks.push_back({model.ids[i], {{{model.params.weight(model.ids[i], 0)}, {}, {}, {}, {}}}});
  int calls = 0;
  matrices.work(
      owner.backend(), nullptr, blocks, [&](std::size_t, const WholeMatrices::Whole& whole) {
        CHECK(whole[0].shape() == Shape{kRows, kCols});
        ++calls;
      });
  CHECK(calls == 2);
  blocks.push_back(blocks.front());
  CHECK_THROWS_AS(matrices.work(owner.backend(), nullptr, blocks, {}), InternalError);
}

}  // namespace moesaic
