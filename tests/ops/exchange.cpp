// Groups, places and choices of an exchange against loops over their definitions.
#include "kernels/ops/exchange.h"

#include <algorithm>
#include <set>

#include "kernels/ops/permute.h"
#include "tests/ops/moe_support.h"

namespace moesaic {
namespace {

using moe_test::CpuRunner;
using moe_test::normal;
using moe_test::same_bits;
using moe_test::Tensor;
using Ints = std::vector<std::int64_t>;

constexpr PlaceGrid kGrid{.nodes = 3, .per_node = 4, .places_per_owner = 2, .owner = 5};

Tensor random_places(std::int64_t rows, std::int64_t k, std::uint64_t key) {
  Tensor places({rows, k}, DType::i32);
  for (std::int64_t a = 0; a < rows * k; ++a) {
    const double u = uniform(key, static_cast<std::uint64_t>(a));
    places.set(a,
               u < 0.2
                   ? -1
                   : std::floor(uniform(key + 1, static_cast<std::uint64_t>(a)) * kGrid.places()));
  }
  return places;
}

}  // namespace

TEST_CASE(
    "expert places: table, dropped choices, rows beyond the tokens, numbers that are no experts") {
  CpuRunner run;
  const Tensor topk({2, 3}, DType::i32, std::vector<int>{3, 0, -1, 2, 2, 1}),
      kept({2, 3}, DType::u8, std::vector<int>{1, 0, 1, 1, 1, 0}),
      table({4}, DType::i32, std::vector<int>{5, 7, 1, 0}), places({3, 3}, DType::i32);
  ExpertPlaces op{.places = places, .topk = topk, .kept = {}, .place_of_expert = {}, .experts = 4};
  run(op);
  CHECK(places.ints() == Ints{3, 0, -1, 2, 2, 1, -1, -1, -1});
  op.kept = kept;
  op.place_of_expert = table;
  run(op);
  CHECK(places.ints() == Ints{0, -1, -1, 1, 1, -1, -1, -1, -1});
  op.experts = 3;
  op.place_of_expert = {};
  CHECK_THROWS_AS(run(op), InternalError);
}

TEST_CASE("expert places: turns of an expert's tokens, by the number of the token") {
  CpuRunner run;
  const Tensor topk({4, 2}, DType::i32, std::vector<int>{0, 1, 1, 0, -1, 1, 0, 2}),
      table({3, 3}, DType::i32, std::vector<int>{10, 11, 12, 20, 21, 22, 30, 30, 30}),
      places({5, 2}, DType::i32);
  ExpertPlaces op{
      .places = places, .topk = topk, .kept = {}, .place_of_expert = table, .experts = 3};
  run(op);
  CHECK(places.ints() == Ints{10, 20, 21, 11, -1, 22, 10, 30, -1, -1});
  op.experts = 4;
  CHECK_THROWS_AS(run(op), InternalError);
}

TEST_CASE("exchange groups: ascending, each once, and where every choice belongs") {
  CpuRunner run(2);
  for (const std::int64_t k : {1, 5, 40, 64}) {
    const std::int64_t rows = 70;
    const Tensor places = random_places(rows, k, 11), groups({rows, k}, DType::i32),
                 index({rows, k}, DType::i32);
    for (const HopKind kind : {HopKind::owner, HopKind::node, HopKind::local, HopKind::proxy}) {
      for (const bool per_choice : {false, true}) {
        for (const std::int64_t stride : {0, 75}) {
          if (per_choice && stride > 0) continue;
          run(ExchangeGroups{.groups = groups,
                             .index = index,
                             .places = places,
                             .grid = kGrid,
                             .kind = kind,
                             .per_choice = per_choice,
                             .stride = stride});
          for (std::int64_t r = 0; r < rows; ++r) {
            // The definition in words of ranks: owner 5 is number 1 of node 1.
            Ints wanted;
            std::set<std::int64_t> distinct;
            for (std::int64_t j = 0; j < k; ++j) {
              const auto place = static_cast<std::int64_t>(places.at(r * k + j));
              const std::int64_t owner = place / 2, node = owner / 4;
              const std::int64_t group = place < 0                ? -1
                                         : kind == HopKind::owner ? owner
                                         : kind == HopKind::node  ? node
                                         : kind == HopKind::local ? owner % 4
                                         : node == 1              ? 1
                                                                  : (r + node) % 4;
              wanted.push_back(group);
              if (group >= 0) distinct.insert(group);
            }
            const Ints sorted(distinct.begin(), distinct.end());
            for (std::int64_t j = 0; j < k; ++j) {
              const auto u = static_cast<std::size_t>(j);
              const auto group = static_cast<std::int64_t>(groups.at(r * k + j)),
                         at = static_cast<std::int64_t>(index.at(r * k + j));
              if (per_choice) {
                REQUIRE(group == wanted[u]);
                REQUIRE(at == (wanted[u] < 0 ? -1 : j));
                continue;
              }
              const std::int64_t listed = u < sorted.size() ? sorted[u] : -1;
              REQUIRE(group == (stride > 0 && listed >= 0 ? listed * stride + r : listed));
              REQUIRE((at < 0) == (wanted[u] < 0));
              if (at >= 0) REQUIRE(sorted[static_cast<std::size_t>(at)] == wanted[u]);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("exchange choices: an item takes what belongs to it, in its range") {
  CpuRunner run(2);
  const std::int64_t rows = 30, k = 6;
  const Tensor places = random_places(rows, k, 21), weights = normal({rows, k}, DType::f64, 22);
  const Tensor groups({rows, k}, DType::i32), index({rows, k}, DType::i32),
      to_item({rows, k}, DType::i32), src({rows * k}, DType::i32),
      offsets({kGrid.owners() + 1}, DType::i32);
  run(ExchangeGroups{
      .groups = groups, .index = index, .places = places, .grid = kGrid, .kind = HopKind::owner});
  run(DispatchPlan{.offsets = offsets,
                   .row_of_assignment = to_item,
                   .token_of_row = src,
                   .topk = groups,
                   .kept = {}});
  for (int owner = 0; owner < kGrid.owners(); ++owner) {
    const auto begin = static_cast<std::int64_t>(offsets.at(owner)),
               end = static_cast<std::int64_t>(offsets.at(owner + 1));
    const std::int64_t items = end - begin;
    const Tensor places_out({items, k}, DType::i32), weights_out({items, k}, DType::f64);
    ExchangeChoices op{.places_out = places_out,
                       .weights_out = weights_out,
                       .places = places,
                       .weights = weights,
                       .src = src.view().rows(begin, end),
                       .to_item = to_item,
                       .index = index,
                       .first = begin,
                       .keep_begin = 0,
                       .keep_end = kGrid.places(),
                       .places_per_owner = 2};
    for (const bool localise : {false, true}) {
      op.localise = localise;
      run(op);
      std::int64_t last = -1;
      for (std::int64_t i = 0; i < items; ++i) {
        const auto row = static_cast<std::int64_t>(src.at(begin + i));
        REQUIRE(row > last);  // in the order of the rows
        last = row;
        for (std::int64_t j = 0; j < k; ++j) {
          const auto place = static_cast<std::int64_t>(places.at(row * k + j));
          const bool here = place >= 0 && place / 2 == owner;
          REQUIRE(places_out.at(i * k + j) == (!here ? -1 : localise ? place % 2 : place));
          REQUIRE(weights_out.at(i * k + j) == (here ? weights.at(row * k + j) : 0.0));
        }
      }
    }
  }
  // Without a list: all rows, the places of a range.
  const Tensor places_out({rows - 3, k}, DType::i32), weights_out({rows - 3, k}, DType::f64);
  run(ExchangeChoices{.places_out = places_out,
                      .weights_out = weights_out,
                      .places = places,
                      .weights = weights,
                      .keep_begin = 8,
                      .keep_end = 16,
                      .places_per_owner = 2});
  for (std::int64_t a = 0; a < (rows - 3) * k; ++a) {
    const bool here = 8 <= places.at(a) && places.at(a) < 16;
    REQUIRE(places_out.at(a) == (here ? places.at(a) : -1));
    REQUIRE(weights_out.at(a) == (here ? weights.at(a) : 0.0));
  }
}

TEST_CASE("exchange counts: paths of three hops") {
  CpuRunner run;
  const std::int64_t rows = 50, k = 4;
  const Tensor places = random_places(rows, k, 31);
  const HopList hops{{HopKind::proxy, HopKind::node, HopKind::local}, 3};
  const std::int64_t paths = 4 + 4 * 3 + 4 * 3 * 4;
  REQUIRE(num_path_counts(hops, kGrid, 3) == paths);
  const Tensor counts({paths + 12}, DType::i32);
  for (const bool per_choice : {false, true}) {
    run(ExchangeCounts{
        .counts = counts, .places = places, .grid = kGrid, .hops = hops, .per_choice = per_choice});
    Ints wanted(static_cast<std::size_t>(paths + 12), 0);
    for (std::int64_t r = 0; r < rows; ++r) {
      std::set<std::size_t> seen;
      for (std::int64_t j = 0; j < k; ++j) {
        const auto place = static_cast<std::int64_t>(places.at(r * k + j));
        if (place < 0) continue;
        const std::int64_t owner = place / 2, node = owner / 4,
                           proxy = node == 1 ? 1 : (r + node) % 4;
        ++wanted[static_cast<std::size_t>(paths + owner)];
        for (const std::int64_t at :
             {proxy, 4 + proxy * 3 + node, 4 + 12 + (proxy * 3 + node) * 4 + owner % 4}) {
          const auto u = static_cast<std::size_t>(at);
          if (seen.insert(u).second || per_choice) ++wanted[u];
        }
      }
    }
    CHECK(counts.ints() == wanted);
  }
}

TEST_CASE("exchange counts: choices of every owner alone, without hops") {
  CpuRunner run;
  const std::int64_t rows = 50, k = 4;
  const Tensor places = random_places(rows, k, 32);
  const std::int32_t all = kGrid.places();
  const Tensor counts({all}, DType::i32);
  run(ExchangeCounts{
      .counts = counts, .places = places, .grid = {1, all, 1, 0}, .hops = {}, .per_choice = true});
  Ints wanted(static_cast<std::size_t>(all), 0);
  for (std::int64_t a = 0; a < rows * k; ++a) {
    const auto place = static_cast<std::int64_t>(places.at(a));
    if (place >= 0) ++wanted[static_cast<std::size_t>(place)];
  }
  CHECK(counts.ints() == wanted);
}

TEST_CASE("byte checksum: equal for equal bytes, another for any other bit or place") {
  CpuRunner run;
  const Tensor x = normal({7, 5}, DType::f32, 41), sum({1}, DType::i64);
  const auto of = [&](ConstTensorView v) {
    run(ByteChecksum{.sum = sum, .x = v});
    return *sum.view().as<std::int64_t>();
  };
  const std::int64_t whole = of(x);
  CHECK(whole == of(moe_test::copy_of(x)));
  std::uint64_t by_hand = 0;
  for (std::size_t i = 0; i < x.view().bytes(); ++i)
    by_hand += checksum_term(i, static_cast<std::uint8_t>(x.view().data()[i]));
  CHECK(static_cast<std::uint64_t>(whole) == by_hand);
  for (std::size_t i = 0; i < x.view().bytes(); ++i) {
    x.view().data()[i] ^= std::byte{1};
    CHECK(of(x) != whole);
    x.view().data()[i] ^= std::byte{1};
  }
  CHECK(of(x.view().rows(0, 0)) == 0);
  CHECK(of(x.view().rows(0, 6)) != of(x.view().rows(1, 7)));
}

}  // namespace moesaic
