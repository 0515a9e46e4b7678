#include "kernels/ops/exchange.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

constexpr PlaceGrid kGrid{.nodes = 3, .per_node = 4, .places_per_owner = 5, .owner = 6};
constexpr HopKind kKinds[] = {HopKind::owner, HopKind::node, HopKind::local, HopKind::proxy};

void fill_places(TensorView places, std::uint64_t key) {
  for (std::int64_t a = 0; a < places.numel(); ++a) {
    const auto i = static_cast<std::uint64_t>(a);
    places.as<std::int32_t>()[a] =
        uniform(key, i) < 0.2 ? -1
                              : static_cast<std::int32_t>(uniform(key + 1, i) * kGrid.places());
  }
}

void poison(std::initializer_list<const Twin*> outputs) {
  for (const Twin* t : outputs)
    std::memset(t->initial.view().data(), 0x5a, t->initial.view().bytes());
}

}  // namespace

TEST_CASE("Exchange on CUDA: places of experts") {
  BothBackends both;
  const std::int64_t tokens = 700, k = 16, experts = kGrid.places();
  const Twin places({tokens + 40, k}, DType::i32), topk({tokens, k}, DType::i32),
      kept({tokens, k}, DType::u8), table({experts}, DType::i32);
  for (std::int64_t a = 0; a < tokens * k; ++a) {
    const auto i = static_cast<std::uint64_t>(a);
    topk.initial.data<std::int32_t>()[a] =
        uniform(31, i) < 0.1
            ? -1
            : static_cast<std::int32_t>(uniform(32, i) * static_cast<double>(experts));
    kept.initial.data<std::uint8_t>()[a] = uniform(33, i) < 0.8 ? 1 : 0;
  }
  for (std::int64_t e = 0; e < experts; ++e)
    table.initial.data<std::int32_t>()[e] = static_cast<std::int32_t>((e * 7 + 3) % experts);
  poison({&places});
  for (const bool drops : {false, true}) {
    for (const bool in_order : {false, true}) {
      require_cuda_matches_cpu(
          both, {&places, &topk, &kept, &table}, {{&places, 0}}, [&](auto side) {
            return ExpertPlaces{.places = side(places),
                                .topk = side(topk),
                                .kept = drops ? side(kept) : TensorView(),
                                .place_of_expert = in_order ? TensorView() : side(table),
                                .experts = static_cast<std::int32_t>(experts)};
          });
    }
  }
}

TEST_CASE("Exchange on CUDA: groups and counts of rows") {
  BothBackends both;
  for (const std::int64_t k : {1, 8, 16, 33, 64}) {
    const std::int64_t rows = 1111;
    const Twin places({rows, k}, DType::i32), groups({rows, k}, DType::i32),
        index({rows, k}, DType::i32);
    fill_places(places.initial.view(), 41);
    poison({&groups, &index});
    for (const HopKind kind : kKinds) {
      for (const bool per_choice : {false, true}) {
        INFO("k " << k << ", kind " << static_cast<int>(kind) << ", per choice " << per_choice);
        require_cuda_matches_cpu(
            both, {&places, &groups, &index}, {{&groups, 0}, {&index, 0}}, [&](auto side) {
              return ExchangeGroups{.groups = side(groups),
                                    .index = side(index),
                                    .places = side(places),
                                    .grid = kGrid,
                                    .kind = kind,
                                    .per_choice = per_choice,
                                    .stride = per_choice ? 0 : rows + 9};
            });
      }
    }
    const HopList lists[] = {{{HopKind::owner}, 1},
                             {{HopKind::node, HopKind::local}, 2},
                             {{HopKind::proxy, HopKind::node, HopKind::local}, 3}};
    for (const HopList& hops : lists) {
      for (const bool per_choice : {false, true}) {
        if (per_choice && hops.size > 1) continue;
        INFO("k " << k << ", hops " << hops.size << ", per choice " << per_choice);
        const Twin counts({num_path_counts(hops, kGrid, hops.size) + kGrid.owners()}, DType::i32);
        poison({&counts});
        require_cuda_matches_cpu(both, {&places, &counts}, {{&counts, 0}}, [&](auto side) {
          return ExchangeCounts{.counts = side(counts),
                                .places = side(places),
                                .grid = kGrid,
                                .hops = hops,
                                .per_choice = per_choice};
        });
      }
    }
  }
}

TEST_CASE("Exchange on CUDA: choices that travel with the rows of a hop") {
  BothBackends both;
  for (const DType dtype : {DType::f32, DType::f64}) {
    const std::int64_t rows = 333, k = 16, items = 200;
    const Twin places({rows, k}, DType::i32), weights({rows, k}, dtype), src({items}, DType::i32),
        to_item({rows, k}, DType::i32), index({rows, k}, DType::i32),
        places_out({items, k}, DType::i32), weights_out({items, k}, dtype);
    fill_places(places.initial.view(), 51);
    for (std::int64_t a = 0; a < rows * k; ++a) {
      const double w = standard_normal(52, static_cast<std::uint64_t>(a));
      if (dtype == DType::f64) {
        weights.initial.data<double>()[a] = w;
      } else {
        weights.initial.data<float>()[a] = static_cast<float>(w);
      }
    }
    // Choice j of a row belongs to its item j % 3; items are rows in turn, three to a row.
    for (std::int64_t a = 0; a < rows * k; ++a) {
      index.initial.data<std::int32_t>()[a] = static_cast<std::int32_t>(a % k % 3);
      const std::int64_t item = a / k * 3 + a % k;
      to_item.initial.data<std::int32_t>()[a] = a % k < 3 ? static_cast<std::int32_t>(item) : -1;
    }
    const std::int64_t first = 120;
    for (std::int64_t i = 0; i < items; ++i)
      src.initial.data<std::int32_t>()[i] = static_cast<std::int32_t>((first + i) / 3);
    poison({&places_out, &weights_out});
    for (const bool localise : {false, true}) {
      for (const bool listed : {true, false}) {
        require_cuda_matches_cpu(
            both,
            {&places, &weights, &src, &to_item, &index, &places_out, &weights_out},
            {{&places_out, 0}, {&weights_out, 0}},
            [&](auto side) {
              return ExchangeChoices{.places_out = side(places_out),
                                     .weights_out = side(weights_out),
                                     .places = side(places),
                                     .weights = side(weights),
                                     .src = listed ? side(src) : TensorView(),
                                     .to_item = listed ? side(to_item) : TensorView(),
                                     .index = listed ? side(index) : TensorView(),
                                     .first = listed ? first : 0,
                                     .keep_begin = 10,
                                     .keep_end = 45,
                                     .places_per_owner = kGrid.places_per_owner,
                                     .localise = localise};
            });
      }
    }
  }
}

}  // namespace moesaic::test
