#include "kernels/ops/initial_values.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

struct Case {
  InitialKind kind;
  double a, b;
};
constexpr Case kCases[] = {{InitialKind::zeros, 0, 0},
                           {InitialKind::ones, 0, 0},
                           {InitialKind::normal, 0.02, 0},
                           {InitialKind::normal, 3, -1},
                           {InitialKind::uniform, -0.25, 0.5},
                           {InitialKind::log_uniform, 1, 16},
                           {InitialKind::inverse_softplus, 1e-3, 1e-1}};

// Every layout and backend starts from the same bits, so the tolerance is 0.
TEST_CASE("InitialValues draws the bits of the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const Case& c : kCases) {
    for (const std::int64_t n : {1, 1000, 300001}) {
      for (const DType y : {DType::f64, DType::f32, DType::bf16}) {
        for (const DType copy : {DType::f64, DType::f32}) {
          INFO("kind " << static_cast<int>(c.kind) << " n " << n << " " << name(y));
          const Twin a({n}, y), b({n}, copy);
          require_cuda_matches_cpu(both, {&a, &b}, {{&a, 0}, {&b, 0}}, [&](const auto& side) {
            return InitialValues{.y = side(a),
                                 .copy = side(b),
                                 .kind = c.kind,
                                 .a = c.a,
                                 .b = c.b,
                                 .key = 0x123456789abcdefULL + static_cast<std::uint64_t>(n)};
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace moesaic::test
