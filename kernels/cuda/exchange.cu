// Where choices travel. Integers only, without atomics: every result is a function of the choices.
#include <algorithm>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/device_check.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/map.cuh"
#include "kernels/ops/exchange.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAll = 0xffffffffU;

struct PlaceChoices {
  std::int32_t* places;
  const std::int32_t* topk;
  const std::uint8_t* kept;
  const std::int32_t* table;  // [experts, turns]
  std::int64_t choices;       // of tokens
  std::int32_t experts;
  std::int64_t k, turns;
  template <int N>
  __device__ void at(std::int64_t i) const {
    std::int32_t expert = -1;
    if (i < choices) {
      expert = topk[i];
      MOESAIC_DEVICE_CHECK(-1 <= expert && expert < experts,
                           "topk holds a number that is no expert");
      if (kept != nullptr && kept[i] == 0) expert = -1;
    }
    places[i] = expert >= 0 && table != nullptr ? table[expert * turns + i / k % turns] : expert;
  }
};

// A warp per row; lane l holds choices l and l + 32. A choice is the first of its group when no earlier one has the same;
// its index is the number of first ones with smaller groups.
__global__ void __launch_bounds__(kThreads) groups_kernel(std::int32_t* groups,
                                                          std::int32_t* index,
                                                          const std::int32_t* places,
                                                          PlaceGrid grid,
                                                          HopKind kind,
                                                          bool per_choice,
                                                          std::int64_t stride,
                                                          std::int64_t rows,
                                                          int k) {
  constexpr int kHalves = static_cast<int>(ExchangeGroups::kMaxChoices) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (std::int64_t r = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; r < rows;
       r += std::int64_t{gridDim.x} * kWarps) {
    std::int32_t group[kHalves], smaller[kHalves] = {};
    bool first[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int j = h * kWarp + lane;
      const std::int32_t place = j < k ? places[r * k + j] : -1;
      group[h] = place < 0 ? -1 : group_of(kind, grid, place, r);
      first[h] = place >= 0;
    }
    if (per_choice) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const int j = h * kWarp + lane;
        if (j >= k) continue;
        groups[r * k + j] = group[h];
        index[r * k + j] = group[h] < 0 ? -1 : j;
      }
      continue;
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      for (int i = 0; i < kWarp && h * kWarp + i < k; ++i) {
        const std::int32_t other = __shfl_sync(kAll, group[h], i);
#pragma unroll
        for (int own = 0; own < kHalves; ++own) {
          if (h * kWarp + i < own * kWarp + lane && other == group[own]) first[own] = false;
        }
      }
    }
    int found = 0;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const unsigned firsts = __ballot_sync(kAll, first[h]);
      found += __popc(firsts);
      for (int i = 0; i < kWarp && h * kWarp + i < k; ++i) {
        const std::int32_t other = __shfl_sync(kAll, group[h], i);
        if ((firsts >> i & 1U) == 0) continue;
#pragma unroll
        for (int own = 0; own < kHalves; ++own)
          smaller[own] += other < group[own] ? 1 : 0;
      }
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int j = h * kWarp + lane;
      if (j < k) index[r * k + j] = group[h] < 0 ? -1 : smaller[h];
      if (j < k && j >= found) groups[r * k + j] = -1;
      if (first[h])
        groups[r * k + smaller[h]] =
            stride > 0 ? static_cast<std::int32_t>(group[h] * stride + r) : group[h];
    }
  }
}

// A block per counter and slice of the rows: counts [slices, counters].
__global__ void __launch_bounds__(kThreads) counts_kernel(std::int32_t* counts,
                                                          const std::int32_t* places,
                                                          PlaceGrid grid,
                                                          HopList hops,
                                                          std::int64_t paths,
                                                          bool per_choice,
                                                          std::int64_t rows,
                                                          int k) {
  // The path of this block: groups of its first `length` hops, or an owner for the counters behind the paths.
  std::int32_t path[3] = {};
  int length = 0;
  std::int64_t counter = blockIdx.x;
  const bool copies = counter >= paths;
  if (!copies) {
    std::int64_t width = 1;
    for (length = 1;; ++length) {
      width *= num_groups(hops.kind[static_cast<std::size_t>(length - 1)], grid);
      if (counter < width) break;
      counter -= width;
    }
    for (int h = length - 1; h >= 0; --h) {
      const std::int32_t groups = num_groups(hops.kind[static_cast<std::size_t>(h)], grid);
      path[h] = static_cast<std::int32_t>(counter % groups);
      counter /= groups;
    }
  }
  const auto owner = static_cast<std::int32_t>(blockIdx.x - paths);
  std::int32_t sum = 0;
  for (std::int64_t r = std::int64_t{blockIdx.y} * kThreads + threadIdx.x; r < rows;
       r += std::int64_t{gridDim.y} * kThreads) {
    std::int32_t matches = 0;
    for (int j = 0; j < k; ++j) {
      const std::int32_t place = places[r * k + j];
      if (place < 0) continue;
      bool same = true;
      if (copies) {
        same = group_of(HopKind::owner, grid, place, r) == owner;
      } else {
        for (int h = 0; h < length; ++h)
          same =
              same && group_of(hops.kind[static_cast<std::size_t>(h)], grid, place, r) == path[h];
      }
      matches += same ? 1 : 0;
    }
    sum += copies || per_choice ? matches : min(matches, 1);
  }
  sum = row_sum<kThreads>(sum);
  if (threadIdx.x == 0) counts[std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = sum;
}

// A thread per counter: the sum of its slices.
__global__ void __launch_bounds__(kThreads) sum_slices_kernel(std::int32_t* counts,
                                                              const std::int32_t* of_slices,
                                                              unsigned counters,
                                                              unsigned slices) {
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= counters) return;
  std::int32_t sum = 0;
  for (unsigned slice = 0; slice < slices; ++slice)
    sum += of_slices[slice * counters + i];
  counts[i] = sum;
}

template <class A>
struct TakeChoices {
  std::int32_t* places_out;
  A* weights_out;
  const std::int32_t* places;
  const A* weights;
  const std::int32_t* src;
  const std::int32_t* to_item;
  const std::int32_t* index;
  std::int64_t first, k;
  std::int32_t keep_begin, keep_end, places_per_owner;
  bool localise;
  template <int N>
  __device__ void at(std::int64_t i) const {
    const std::int64_t item = i / k, row = src == nullptr ? item : std::int64_t{src[item]};
    const std::int64_t from = row * k + i % k;
    const std::int32_t place = places[from];
    const bool mine = place >= 0 && keep_begin <= place && place < keep_end &&
                      (to_item == nullptr || to_item[row * k + index[from]] == first + item);
    places_out[i] = !mine ? -1 : localise ? place % places_per_owner : place;
    weights_out[i] = mine ? weights[from] : A(0);
  }
};

// partial[block] = the sum of the block's share of bytes.
__global__ void __launch_bounds__(kThreads)
    checksum_kernel(unsigned long long* partial, const std::uint8_t* x, std::uint64_t bytes) {
  unsigned long long sum = 0;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x; i < bytes;
       i += std::uint64_t{gridDim.x} * kThreads)
    sum += checksum_term(i, x[i]);
  sum = row_sum<kThreads>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block.
__global__ void __launch_bounds__(kThreads)
    sum_kernel(unsigned long long* sum, const unsigned long long* partial, unsigned blocks) {
  unsigned long long own = 0;
  for (unsigned i = threadIdx.x; i < blocks; i += kThreads)
    own += partial[i];
  own = row_sum<kThreads>(own);
  if (threadIdx.x == 0) *sum = own;
}

}  // namespace

void launch(CudaContext& context, const ByteChecksum& op) {
  const auto bytes = static_cast<std::int64_t>(op.x.bytes());
  const unsigned blocks = grid_for(context, (bytes + kThreads - 1) / kThreads);
  const Arena::Mark mark(context.scratch);
  const TensorView partial = context.scratch.take(
      {std::int64_t{context.num_sms} * 8 + 1}, DType::i64, "byte_checksum.partial");
  if (is_dry(context)) return;
  const auto stream = native_stream(context);
  auto* sums = reinterpret_cast<unsigned long long*>(partial.data());
  checksum_kernel<<<blocks, kThreads, 0, stream>>>(
      sums, reinterpret_cast<const std::uint8_t*>(op.x.data()), static_cast<std::uint64_t>(bytes));
  check_launch("kernel byte_checksum");
  sum_kernel<<<1, kThreads, 0, stream>>>(
      reinterpret_cast<unsigned long long*>(op.sum.data()), sums, blocks);
  check_launch("kernel byte_checksum: sum");
}

void launch(CudaContext& context, const ExpertPlaces& op) {
  if (is_dry(context) || op.places.numel() == 0) return;
  map<1>(context,
         "kernel expert_places",
         op.places.numel(),
         {},
         PlaceChoices{op.places.as<std::int32_t>(),
                      op.topk.as<std::int32_t>(),
                      op.kept.as<std::uint8_t>(),
                      op.place_of_expert.as<std::int32_t>(),
                      op.topk.numel(),
                      op.experts,
                      op.places.dim(1),
                      op.place_of_expert.rank() == 2 ? op.place_of_expert.dim(1) : 1});
}

void launch(CudaContext& context, const ExchangeGroups& op) {
  if (is_dry(context) || op.places.numel() == 0) return;
  const std::int64_t rows = op.places.dim(0);
  groups_kernel<<<grid_for(context, (rows + kWarps - 1) / kWarps, 16),
                  kThreads,
                  0,
                  native_stream(context)>>>(op.groups.as<std::int32_t>(),
                                            op.index.as<std::int32_t>(),
                                            op.places.as<std::int32_t>(),
                                            op.grid,
                                            op.kind,
                                            op.per_choice,
                                            op.stride,
                                            rows,
                                            static_cast<int>(op.places.dim(1)));
  check_launch("kernel exchange_groups");
}

void launch(CudaContext& context, const ExchangeCounts& op) {
  // Few counters (few ranks) leave most multiprocessors to slices of the rows.
  const std::int64_t counters = op.counts.numel(), rows = op.places.dim(0),
                     wanted = (std::int64_t{context.num_sms} * 4 + counters - 1) / counters,
                     slices = std::clamp((rows + kThreads - 1) / kThreads, std::int64_t{1}, wanted);
  const Arena::Mark mark(context.scratch);
  const TensorView of_slices =
      slices == 1 ? op.counts
                  : context.scratch.take({slices, counters}, DType::i32, "exchange_counts.slices");
  if (is_dry(context)) return;
  const auto stream = native_stream(context);
  counts_kernel<<<dim3(static_cast<unsigned>(counters), static_cast<unsigned>(slices)),
                  kThreads,
                  0,
                  stream>>>(of_slices.as<std::int32_t>(),
                            op.places.as<std::int32_t>(),
                            op.grid,
                            op.hops,
                            num_path_counts(op.hops, op.grid, op.hops.size),
                            op.per_choice,
                            rows,
                            static_cast<int>(op.places.dim(1)));
  check_launch("kernel exchange_counts");
  if (slices == 1) return;
  const auto blocks = static_cast<unsigned>((counters + kThreads - 1) / kThreads);
  sum_slices_kernel<<<blocks, kThreads, 0, stream>>>(op.counts.as<std::int32_t>(),
                                                     of_slices.as<std::int32_t>(),
                                                     static_cast<unsigned>(counters),
                                                     static_cast<unsigned>(slices));
  check_launch("kernel exchange_counts: sum");
}

void launch(CudaContext& context, const ExchangeChoices& op) {
  if (is_dry(context) || op.places_out.numel() == 0) return;
  const auto run = [&]<class A>(TypeTag<A>) {
    map<1>(context,
           "kernel exchange_choices",
           op.places_out.numel(),
           {},
           TakeChoices<A>{op.places_out.as<std::int32_t>(),
                          op.weights_out.as<A>(),
                          op.places.as<std::int32_t>(),
                          op.weights.as<A>(),
                          op.src.as<std::int32_t>(),
                          op.to_item.as<std::int32_t>(),
                          op.index.as<std::int32_t>(),
                          op.first,
                          op.places.dim(1),
                          op.keep_begin,
                          op.keep_end,
                          op.places_per_owner,
                          op.localise});
  };
  if (op.weights.dtype() == DType::f64) {
    run(TypeTag<double>{});
  } else {
    run(TypeTag<float>{});
  }
}

}  // namespace moesaic
