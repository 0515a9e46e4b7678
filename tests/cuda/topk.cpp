#include "kernels/ops/topk.h"

#include <limits>

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

// Coarse scores, so that ties are everywhere, with NaN, infinities and both zeros among them.
template <class T>
void fill_scores(TensorView view, std::uint64_t key, double steps_per_unit) {
  for (std::int64_t i = 0; i < view.numel(); ++i) {
    const auto index = static_cast<std::uint64_t>(i);
    double score = standard_normal(key, index);
    if (steps_per_unit > 0) score = std::round(score * steps_per_unit) / steps_per_unit;
    const double kind = uniform(key + 1, index);
    if (kind < 0.01) score = std::numeric_limits<double>::quiet_NaN();
    if (kind > 0.99) score = -std::numeric_limits<double>::infinity();
    if (kind > 0.4999 && kind < 0.5001) score = std::numeric_limits<double>::infinity();
    view.as<T>()[i] = static_cast<T>(score);
  }
}

template <class T>
void check(BothBackends& both,
           std::int64_t rows,
           std::int64_t n,
           std::int64_t k,
           TopK::Order order,
           bool with_valid,
           double steps) {
  INFO(rows << " x " << n << " top " << k << " " << name(dtype_of<T>) << ", best_first "
            << (order == TopK::Order::best_first) << ", valid_count " << with_valid << ", steps "
            << steps);
  const Twin scores({rows, n}, dtype_of<T>), valid({rows}, DType::i32),
      indices({rows, k}, DType::i32), counts({rows}, DType::i32);
  fill_scores<T>(scores.initial.view(), 11, steps);
  for (std::int64_t t = 0; t < rows; ++t) {  // from -1 (as 0) to n + 1 (as n)
    valid.initial.data<std::int32_t>()[t] =
        static_cast<std::int32_t>(uniform(13, static_cast<std::uint64_t>(t)) *
                                  static_cast<double>(n + 3)) -
        1;
  }
  require_cuda_matches_cpu(
      both, {&scores, &valid, &indices, &counts}, {{&indices, 0}, {&counts, 0}}, [&](auto side) {
        return TopK{.indices = side(indices),
                    .counts = side(counts),
                    .scores = side(scores),
                    .valid_count = with_valid ? side(valid) : TensorView(),
                    .order = order};
      });
}

struct Size {
  std::int64_t rows, n, k;
};
const Size kSizes[] = {{1, 1, 1},
                       {3, 5, 8},
                       {1, 33, 32},
                       {130, 64, 8},
                       {500, 896, 16},
                       {20, 3000, 1},
                       {9, 10000, 2048},
                       {2, 20000, 8192},
                       {1, 300001, 2048}};

}  // namespace

TEST_CASE("TopK on CUDA chooses what the CPU chooses", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    for (const auto order : {TopK::Order::best_first, TopK::Order::ascending}) {
      for (const double steps : {0.0, 4.0}) {
        check<float>(both, s.rows, s.n, s.k, order, false, steps);
        check<float>(both, s.rows, s.n, s.k, order, true, steps);
        check<double>(both, s.rows, s.n, s.k, order, true, steps);
      }
    }
  }
}

TEST_CASE("TopK on CUDA replays given indices", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const std::int64_t rows : {1, 7, 3000}) {
    constexpr std::int64_t kWidth = 37;
    const Twin given({rows, kWidth}, DType::i32), indices({rows, kWidth}, DType::i32),
        counts({rows}, DType::i32);
    for (std::int64_t i = 0; i < rows * kWidth; ++i) {
      given.initial.data<std::int32_t>()[i] =
          i % kWidth < i / kWidth % (kWidth + 1) ? static_cast<std::int32_t>(i * 7 % 1000) : -1;
    }
    require_cuda_matches_cpu(
        both, {&given, &indices, &counts}, {{&indices, 0}, {&counts, 0}}, [&](auto side) {
          return TopK{.indices = side(indices), .counts = side(counts), .given = side(given)};
        });
  }
}

}  // namespace moesaic::test
