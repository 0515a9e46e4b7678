#include "kernels/ops/topk.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/base/random.h"
#include "kernels/backend.h"
#include "tests/support/catch.h"

namespace moesaic {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr std::int32_t kUnwritten = -77;

struct Result {
  std::vector<std::int32_t> indices, counts;
  bool operator==(const Result&) const = default;
};

template <class T>
ConstTensorView view(const std::vector<T>& v, Shape shape) {
  return {reinterpret_cast<const std::byte*>(v.data()), dtype_of<T>, shape};
}
template <class T>
TensorView view(std::vector<T>& v, Shape shape) {
  return {reinterpret_cast<std::byte*>(v.data()), dtype_of<T>, shape};
}

template <class T>
Result top_k(const std::vector<T>& scores,
             std::int64_t n,
             std::int64_t k,
             TopK::Order order,
             const std::vector<std::int32_t>& valid = {},
             int num_threads = 1) {
  const auto rows = static_cast<std::int64_t>(scores.size()) / n;
  Result r{std::vector<std::int32_t>(static_cast<std::size_t>(rows * k), kUnwritten),
           std::vector<std::int32_t>(static_cast<std::size_t>(rows), kUnwritten)};
  BackendOwner owner({.mode = Stream::Mode::immediate, .num_threads = num_threads});
  run(owner.backend(),
      TopK{.indices = view(r.indices, {rows, k}),
           .counts = view(r.counts, {rows}),
           .scores = view(scores, {rows, n}),
           .valid_count = valid.empty() ? ConstTensorView() : view(valid, {rows}),
           .order = order});
  return r;
}

// The definition: sort all entries of a row.
template <class T>
Result by_sorting(const std::vector<T>& scores,
                  std::int64_t n,
                  std::int64_t k,
                  TopK::Order order,
                  const std::vector<std::int32_t>& valid = {}) {
  const auto rows = static_cast<std::int64_t>(scores.size()) / n;
  Result r;
  for (std::int64_t t = 0; t < rows; ++t) {
    const T* row = scores.data() + t * n;
    const auto n_t =
        valid.empty() ? n : std::clamp<std::int64_t>(valid[static_cast<std::size_t>(t)], 0, n);
    std::vector<std::int32_t> all(static_cast<std::size_t>(n_t));
    std::iota(all.begin(), all.end(), 0);
    const auto value = [row](std::int32_t i) { return std::isnan(row[i]) ? T(-kInf) : row[i]; };
    std::stable_sort(all.begin(), all.end(), [&](std::int32_t a, std::int32_t b) {
      return value(a) > value(b);
    });
    all.resize(static_cast<std::size_t>(std::min(k, n_t)));
    if (order == TopK::Order::ascending) std::sort(all.begin(), all.end());
    r.counts.push_back(static_cast<std::int32_t>(all.size()));
    all.resize(static_cast<std::size_t>(k), -1);
    r.indices.insert(r.indices.end(), all.begin(), all.end());
  }
  return r;
}

template <class T>
std::vector<T> random_scores(std::size_t size, std::uint64_t key, double steps_per_unit) {
  std::vector<T> scores(size);
  for (std::size_t i = 0; i < size; ++i) {
    double s = standard_normal(key, i);
    if (steps_per_unit > 0) s = std::round(s * steps_per_unit) / steps_per_unit;
    const double kind = uniform(key + 1, i);
    scores[i] = static_cast<T>(kind < 0.02 ? kNan : kind > 0.98 ? -kInf : kind > 0.97 ? kInf : s);
  }
  return scores;
}

}  // namespace

TEST_CASE("TopK: order, ties to the lower index, NaN last, padding") {
  using Order = TopK::Order;
  const std::vector<float> scores = {1, 3, 2, 3, 0};
  CHECK(top_k(scores, 5, 3, Order::best_first) == Result{{1, 3, 2}, {3}});
  CHECK(top_k(scores, 5, 3, Order::ascending) == Result{{1, 2, 3}, {3}});
  CHECK(top_k(std::vector<double>(6, 0.5), 6, 4, Order::best_first) == Result{{0, 1, 2, 3}, {4}});
  CHECK(top_k(std::vector<double>{0.0, -0.0, 0.0}, 3, 2, Order::best_first) == Result{{0, 1}, {2}});
  CHECK(top_k(std::vector<double>{-0.0, 0.0}, 2, 1, Order::best_first) == Result{{0}, {1}});
  CHECK(top_k(std::vector<double>{kNan, -5, -kInf, kNan, kInf}, 5, 4, Order::best_first) ==
        Result{{4, 1, 0, 2}, {4}});
  CHECK(top_k(std::vector<double>{kNan, kNan}, 2, 1, Order::best_first) == Result{{0}, {1}});
  CHECK(top_k(scores, 5, 7, Order::best_first) == Result{{1, 3, 2, 0, 4, -1, -1}, {5}});
}

TEST_CASE("TopK: only the first valid_count entries of a row count") {
  const std::vector<double> scores = {1, 2, 9, 1, 2, 9, 1, 2, 9, 1, 2, 9};
  const std::vector<std::int32_t> valid = {0, 1, 2, 100};
  CHECK(top_k(scores, 3, 2, TopK::Order::best_first, valid) ==
        Result{{-1, -1, 0, -1, 1, 0, 2, 1}, {0, 1, 2, 2}});
}

TEMPLATE_TEST_CASE("TopK equals sorting the whole row", "", float, double) {
  const struct {
    std::int64_t rows, n, k;
  } sizes[] = {{1, 1, 1},
               {40, 17, 1},
               {40, 17, 16},
               {40, 17, 17},
               {9, 3, 8},
               {64, 896, 16},
               {5, 5000, 333},
               {3, 5000, 4999}};
  for (const auto& s : sizes) {
    for (const double steps : {0.0, 2.0}) {
      const auto scores = random_scores<TestType>(static_cast<std::size_t>(s.rows * s.n), 3, steps);
      std::vector<std::int32_t> valid;
      for (std::int64_t t = 0; t < s.rows; ++t)
        valid.push_back(static_cast<std::int32_t>(t * s.n / s.rows + 1));
      for (const auto order : {TopK::Order::best_first, TopK::Order::ascending}) {
        INFO(s.rows << " x " << s.n << " top " << s.k << " steps " << steps);
        CHECK(top_k(scores, s.n, s.k, order) == by_sorting(scores, s.n, s.k, order));
        CHECK(top_k(scores, s.n, s.k, order, valid, 3) ==
              by_sorting(scores, s.n, s.k, order, valid));
      }
    }
  }
}

TEST_CASE("TopK: a rising row of a million entries, the worst case of the selection") {
  std::vector<float> scores(1000000);
  std::iota(scores.begin(), scores.end(), 0.0F);
  const auto r = top_k(scores, 1000000, 2048, TopK::Order::ascending);
  REQUIRE(r.counts[0] == 2048);
  CHECK(r.indices.front() == 1000000 - 2048);
  CHECK(r.indices.back() == 999999);
}

TEST_CASE("TopK replays given indices without reading scores") {
  const std::vector<std::int32_t> given = {5, 2, -1, 7, 7, 0};
  std::vector<std::int32_t> indices(6, kUnwritten), counts(2, kUnwritten);
  BackendOwner owner({.mode = Stream::Mode::immediate});
  run(owner.backend(),
      TopK{.indices = view(indices, {2, 3}),
           .counts = view(counts, {2}),
           .given = view(given, {2, 3})});
  CHECK(indices == given);
  CHECK(counts == std::vector<std::int32_t>{2, 3});
}

TEST_CASE("TopK refuses wrong shapes and types") {
  std::vector<std::int32_t> indices(6), counts(3);
  const std::vector<float> scores(8);
  const TopK good{.indices = view(indices, {2, 3}), .scores = view(scores, {2, 4})};
  CHECK_NOTHROW(good.check());
  TopK bad = good;
  bad.counts = view(counts, {3});
  CHECK_THROWS_AS(bad.check(), InternalError);
  bad = good;
  bad.scores = view(scores, {4, 2});
  CHECK_THROWS_AS(bad.check(), InternalError);
  bad = good;
  bad.scores = view(indices, {2, 3});
  CHECK_THROWS_AS(bad.check(), InternalError);
}

}  // namespace moesaic
