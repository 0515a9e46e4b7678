// Where choices travel: integers, so the CUDA ops give the bits of the CPU's.
#include "kernels/ops/exchange.h"

#include "kernels/ops/permute.h"
#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

void fill_places(TensorView places, std::int32_t limit, double dropped, std::uint64_t key) {
  for (std::int64_t a = 0; a < places.numel(); ++a) {
    const auto i = static_cast<std::uint64_t>(a);
    places.as<std::int32_t>()[a] =
        uniform(key, i) < dropped
            ? -1
            : static_cast<std::int32_t>(uniform(key + 1, i) * static_cast<double>(limit));
  }
}

struct Sizes {
  PlaceGrid grid;
  std::int64_t rows, k;
};
const std::vector<Sizes>& sizes() {
  static const std::vector<Sizes> all{{{1, 1, 4, 0}, 0, 2},
                                      {{1, 2, 3, 1}, 1, 1},
                                      {{2, 2, 5, 2}, 37, 4},
                                      {{3, 4, 2, 5}, 300, 33},
                                      {{4, 2, 8, 7}, 513, 64},
                                      {{8, 8, 14, 11}, 4096, 16}};
  return all;
}
std::string text_of(const Sizes& s) {
  return std::to_string(s.rows) + " rows, top " + std::to_string(s.k) + ", " +
         std::to_string(s.grid.nodes) + " x " + std::to_string(s.grid.per_node);
}
constexpr HopKind kKinds[] = {HopKind::owner, HopKind::node, HopKind::local, HopKind::proxy};

void poison(const Twin& twin) {
  std::memset(twin.initial.view().data(), 0x5a, twin.initial.view().bytes());
}

}  // namespace

TEST_CASE("places of experts on CUDA are the CPU's", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const std::int64_t tokens : {0, 1, 700}) {
    const Twin topk({tokens, 5}, DType::i32), kept({tokens, 5}, DType::u8), table({40}, DType::i32),
        turns({40, 3}, DType::i32), places({tokens + 9, 5}, DType::i32);
    fill_places(topk.initial.view(), 40, 0.1, 1);
    for (std::int64_t a = 0; a < tokens * 5; ++a)
      kept.initial.data<std::uint8_t>()[a] =
          uniform(3, static_cast<std::uint64_t>(a)) < 0.7 ? 1 : 0;
    for (int e = 0; e < 40; ++e)
      table.initial.data<std::int32_t>()[e] = (e * 7 + 3) % 40;
    for (int i = 0; i < 120; ++i)
      turns.initial.data<std::int32_t>()[i] = (i * 11 + 5) % 48;
    poison(places);
    for (const bool all : {false, true}) {
      require_cuda_matches_cpu(
          both, {&topk, &kept, &table, &places}, {{&places, 0}}, [&](auto side) {
            return ExpertPlaces{.places = side(places),
                                .topk = side(topk),
                                .kept = all ? TensorView() : side(kept),
                                .place_of_expert = all ? TensorView() : side(table),
                                .experts = 40};
          });
    }
    require_cuda_matches_cpu(both, {&topk, &kept, &turns, &places}, {{&places, 0}}, [&](auto side) {
      return ExpertPlaces{.places = side(places),
                          .topk = side(topk),
                          .kept = side(kept),
                          .place_of_expert = side(turns),
                          .experts = 40};
    });
  }
}

TEST_CASE("groups and counts of an exchange on CUDA are the CPU's", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const Sizes& s : sizes()) {
    INFO(text_of(s));
    const Twin places({s.rows, s.k}, DType::i32), groups({s.rows, s.k}, DType::i32),
        index({s.rows, s.k}, DType::i32);
    fill_places(places.initial.view(), s.grid.places(), 0.15, 5);
    poison(groups);
    poison(index);
    for (const HopKind kind : kKinds) {
      for (const bool per_choice : {false, true}) {
        for (const std::int64_t stride : {std::int64_t{0}, s.rows + 3}) {
          if (per_choice && stride > 0) continue;
          INFO("kind " << static_cast<int>(kind) << ", per choice " << per_choice << ", stride "
                       << stride);
          require_cuda_matches_cpu(
              both, {&places, &groups, &index}, {{&groups, 0}, {&index, 0}}, [&](auto side) {
                return ExchangeGroups{.groups = side(groups),
                                      .index = side(index),
                                      .places = side(places),
                                      .grid = s.grid,
                                      .kind = kind,
                                      .per_choice = per_choice,
                                      .stride = stride};
              });
        }
      }
    }
    for (const HopList hops : {HopList{{HopKind::owner}, 1},
                               HopList{{HopKind::node, HopKind::local}, 2},
                               HopList{{HopKind::proxy, HopKind::node, HopKind::local}, 3}}) {
      const Twin counts({num_path_counts(hops, s.grid, hops.size) + s.grid.owners()}, DType::i32);
      poison(counts);
      for (const bool per_choice : {false, true}) {
        require_cuda_matches_cpu(both, {&places, &counts}, {{&counts, 0}}, [&](auto side) {
          return ExchangeCounts{.counts = side(counts),
                                .places = side(places),
                                .grid = s.grid,
                                .hops = hops,
                                .per_choice = per_choice};
        });
      }
    }
  }
}

TEST_CASE("choices of an exchange on CUDA are the CPU's", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const Sizes& s : sizes()) {
    for (const DType dtype : {DType::f64, DType::f32}) {
      INFO(text_of(s) << ", " << name(dtype));
      const std::int64_t items = s.rows * s.k;
      const Twin places({s.rows, s.k}, DType::i32), weights({s.rows, s.k}, dtype),
          groups({s.rows, s.k}, DType::i32), index({s.rows, s.k}, DType::i32),
          to_item({s.rows, s.k}, DType::i32), src({items}, DType::i32),
          offsets({s.grid.owners() + 1}, DType::i32), places_out({items, s.k}, DType::i32),
          weights_out({items, s.k}, dtype);
      fill_places(places.initial.view(), s.grid.places(), 0.15, 6);
      fill_normal(weights.initial.view(), 7);
      poison(places_out);
      poison(weights_out);
      run(both.cpu.backend(),
          ExchangeGroups{.groups = groups.initial.view(),
                         .index = index.initial.view(),
                         .places = places.initial.view(),
                         .grid = s.grid});
      run(both.cpu.backend(),
          DispatchPlan{.offsets = offsets.initial.view(),
                       .row_of_assignment = to_item.initial.view(),
                       .token_of_row = src.initial.view(),
                       .topk = groups.initial.view(),
                       .kept = {}});
      const std::int64_t used = offsets.initial.data<std::int32_t>()[s.grid.owners()];
      for (const std::int64_t first : {std::int64_t{0}, used / 3}) {
        for (const bool localise : {false, true}) {
          require_cuda_matches_cpu(
              both,
              {&places, &weights, &index, &to_item, &src, &places_out, &weights_out},
              {{&places_out, 0}, {&weights_out, 0}},
              [&](auto side) {
                return ExchangeChoices{.places_out = side(places_out).rows(first, used),
                                       .weights_out = side(weights_out).rows(first, used),
                                       .places = side(places),
                                       .weights = side(weights),
                                       .src = side(src).rows(first, used),
                                       .to_item = side(to_item),
                                       .index = side(index),
                                       .first = first,
                                       .keep_begin = 0,
                                       .keep_end = s.grid.places(),
                                       .places_per_owner = s.grid.places_per_owner,
                                       .localise = localise};
              });
        }
      }
      require_cuda_matches_cpu(both,
                               {&places, &weights, &places_out, &weights_out},
                               {{&places_out, 0}, {&weights_out, 0}},
                               [&](auto side) {
                                 return ExchangeChoices{
                                     .places_out = side(places_out).rows(0, s.rows),
                                     .weights_out = side(weights_out).rows(0, s.rows),
                                     .places = side(places),
                                     .weights = side(weights),
                                     .keep_begin = s.grid.places() / 3,
                                     .keep_end = s.grid.places() / 2,
                                     .places_per_owner = s.grid.places_per_owner};
                               });
    }
  }
}

TEST_CASE("checksums of bytes on CUDA are the CPU's", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const std::int64_t rows : {0, 1, 3, 4099}) {
    const Twin x({rows, 65}, DType::u8), sum({1}, DType::i64);
    for (std::int64_t i = 0; i < rows * 65; ++i)
      x.initial.data<std::uint8_t>()[i] =
          static_cast<std::uint8_t>(mix64(static_cast<std::uint64_t>(i)));
    poison(sum);
    require_cuda_matches_cpu(both, {&x, &sum}, {{&sum, 0}}, [&](auto side) {
      return ByteChecksum{.sum = side(sum), .x = side(x)};
    });
  }
}

}  // namespace moesaic::test
