#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "parallel/pipeline/partition.h"
#include "tests/support/catch.h"

namespace moesaic::pipeline {
namespace {

std::vector<std::int64_t> sizes(const std::vector<LayerRange>& chunks) {
  std::vector<std::int64_t> all;
  std::int64_t begin = 0;
  for (const LayerRange& c : chunks) {
    REQUIRE(c.begin == begin);
    begin = c.end;
    all.push_back(c.size());
  }
  return all;
}

using Sizes = std::vector<std::int64_t>;

std::string refusal(const Sizes& layers, int chunks, std::int64_t model) {
  try {
    given_layers(layers, chunks, model);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "accepted";
}

bool contains(const std::string& all, const std::string& part) {
  return all.find(part) != std::string::npos;
}

TEST_CASE("partition: equal layers, and what stands beside them") {
  const std::vector<double> seven(7, 1.0), eighty(80, 1.0);
  CHECK(sizes(balance_layers({.layers = seven}, 2)) == Sizes{3, 4});
  CHECK(sizes(balance_layers({.layers = seven, .before = 0, .after = 1}, 2)) == Sizes{4, 3});
  CHECK(sizes(balance_layers({.layers = seven, .before = 0, .after = 5}, 2)) == Sizes{6, 1});
  CHECK(sizes(balance_layers({.layers = seven, .before = 2, .after = 0}, 3)) == Sizes{1, 3, 3});
  // 80 layers in 32 chunks do not divide: every layer is there all the same.
  const Sizes many = sizes(balance_layers({.layers = eighty}, 32));
  CHECK(std::count(many.begin(), many.end(), 3) == 16);
  CHECK(std::count(many.begin(), many.end(), 2) == 16);
  CHECK(chunk_costs({.layers = seven, .before = 2, .after = 0.5},
                    balance_layers({.layers = seven, .before = 2, .after = 0.5}, 3)) ==
        std::vector<double>{3, 3, 3.5});
}

TEST_CASE("partition: fewer layers than chunks") {
  CHECK_THROWS_WITH(balance_layers({.layers = {1, 1, 1}}, 4),
                    "3 layers cannot fill 4 chunks (stages x chunks per rank), since each needs a "
                    "layer. Nearest valid: 3 chunks");
  CHECK_THROWS_AS(balance_layers({.layers = {1, -1}}, 1), InternalError);
}

/// The lowest ceiling and sum of squares over all cuts.
void search(const ModelCosts& costs,
            int chunks,
            std::int64_t begin,
            std::vector<LayerRange>& cut,
            double& ceiling,
            double& squares) {
  const auto layers = static_cast<std::int64_t>(costs.layers.size());
  if (static_cast<int>(cut.size()) == chunks) {
    if (begin != layers) return;
    double dearest = 0, sum = 0;
    for (const double c : chunk_costs(costs, cut)) {
      dearest = std::max(dearest, c);
      sum += c * c;
    }
    if (dearest < ceiling || (dearest == ceiling && sum < squares)) {
      ceiling = dearest;
      squares = sum;
    }
    return;
  }
  for (std::int64_t end = begin + 1; end <= layers; ++end) {
    cut.push_back({begin, end});
    search(costs, chunks, end, cut, ceiling, squares);
    cut.pop_back();
  }
}

TEST_CASE("partition: as good as the best of all cuts") {
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    ModelCosts costs;
    costs.layers.resize(1 + random() % 9);
    // Whole numbers, zero among them: sums are exact.
    for (double& c : costs.layers)
      c = static_cast<double>(random() % 5);
    costs.before = static_cast<double>(random() % 4);
    costs.after = static_cast<double>(random() % 9);
    const int chunks = 1 + static_cast<int>(random() % costs.layers.size());
    double ceiling = 1e9, squares = 1e9;
    std::vector<LayerRange> none;
    search(costs, chunks, 0, none, ceiling, squares);
    const auto found = balance_layers(costs, chunks);
    double dearest = 0, sum = 0;
    for (const double c : chunk_costs(costs, found)) {
      dearest = std::max(dearest, c);
      sum += c * c;
    }
    CAPTURE(round, chunks, costs.layers.size());
    REQUIRE(static_cast<int>(found.size()) == chunks);
    REQUIRE(found.back().end == static_cast<std::int64_t>(costs.layers.size()));
    REQUIRE(dearest == ceiling);
    REQUIRE(sum == squares);
  }
}

TEST_CASE("partition: many layers in no time") {
  const std::vector<double> layers(16384, 1.0);
  const auto chunks = balance_layers({.layers = layers, .before = 3, .after = 50}, 128);
  CHECK(chunks.back().size() < chunks.front().size());
}

TEST_CASE("partition: a list that the user wrote") {
  CHECK(sizes(given_layers(Sizes{4, 2, 1}, 3, 7)) == Sizes{4, 2, 1});
  CHECK(sizes(given_layers(Sizes{0, 7, 0}, 3, 7)) == Sizes{0, 7, 0});
  CHECK(contains(refusal({4, 3}, 3, 7), "2 entries; allowed: one for each of the 3 chunks"));
  CHECK(contains(refusal({4, 2, 2}, 3, 7), "[4, 2, 2] are 8 layers, but the model has 7"));
  CHECK(contains(refusal({4, 0, 3}, 3, 7), "found 0 layers for chunk 1; allowed: at least 1"));
  CHECK(contains(refusal({-1, 4, 4}, 3, 7), "found -1 layers for chunk 0; allowed: at least 0"));
  CHECK(contains(refusal({INT64_MAX, INT64_MAX, 2}, 3, 7), "but the model has 7"));
}

}  // namespace
}  // namespace moesaic::pipeline
