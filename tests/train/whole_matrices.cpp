#include "core/train/whole_matrices.h"

#include <stdexcept>

#include "core/nn/module.h"
#include "tests/support/catch.h"

namespace moesaic {
namespace {

void fail_unless(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(what);
}

}  // namespace

TEST_CASE("Matrices split by rows or columns are put together, and each rank keeps its part") {
  constexpr std::int64_t kRows = 4, kCols = 6;
  const int split = GENERATE(0, 1);
  run_local_ranks(2, [&](Communicator& world) {
    const Mesh mesh({.dp = 1, .tp = 2}, world);
    ParameterStore params(kF64, mesh.position());
    const StorageId storage =
        params.declare(split_over_tp(matrix_spec("w", kRows, kCols, 1.0, Part::dense_mlp), split));
    params.seal(kCpu);
    params.initialize(7);
    const ParamId id = params.params_of(storage).front();
    WholeMatrices matrices(params, [](ParamId) { return true; });
    BackendOwner owner({.device = kCpu, .mode = Stream::Mode::worker, .name = "test"});
    const TensorView own = params.weight(id, 0);
    const TensorView whole = matrices.gather(owner.backend(), &mesh, id, own, 0);
    owner.stream().synchronize();

    ParameterStore alone(kF64);
    const StorageId same = alone.declare(matrix_spec("w", kRows, kCols, 1.0, Part::dense_mlp));
    alone.seal(kCpu);
    alone.initialize(7);
    const TensorView expected = alone.weight(alone.params_of(same).front(), 0);
    for (std::int64_t i = 0; i < expected.numel(); ++i)
      fail_unless(whole.as<double>()[i] == expected.as<double>()[i], "not the whole matrix");

    const double first = own.as<double>()[0];
    for (std::int64_t i = 0; i < whole.numel(); ++i)
      whole.as<double>()[i] *= 2;
    matrices.keep_own(owner.backend(), id, own, whole);
    owner.stream().synchronize();
    fail_unless(own.as<double>()[0] == 2 * first, "not the rank's part");
  });
}

}  // namespace moesaic
