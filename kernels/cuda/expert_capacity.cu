// Which assignments survive a limit per expert. The assignments are sorted by expert; `position`
// then compares places, `prob` lets one block per expert find its capacity-th largest weight by
// radix selection.
#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/digit_pick.cuh"
#include "kernels/cuda/expert_sort.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/order_key.cuh"
#include "kernels/ops/router.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = kPickDigits;

__global__ void __launch_bounds__(kThreads) keep_first_kernel(std::uint8_t* kept,
                                                              const std::int32_t* topk,
                                                              ExpertSort sort,
                                                              std::int64_t assignments,
                                                              std::int64_t capacity) {
  const std::int64_t a = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (a < assignments) kept[a] = sort.position(a, topk[a]) < capacity ? 1 : 0;
}

// list [assignments]: the assignments by expert, in order.
__global__ void __launch_bounds__(kThreads) list_kernel(std::int32_t* list,
                                                        const std::int32_t* topk,
                                                        ExpertSort sort,
                                                        std::int64_t assignments) {
  const std::int64_t a = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (a >= assignments) return;
  const std::int32_t expert = topk[a];
  list[sort.offsets[expert] + sort.position(a, expert)] = static_cast<std::int32_t>(a);
}

template <class A>
__global__ void __launch_bounds__(kThreads) keep_largest_kernel(std::uint8_t* kept,
                                                                const A* weights,
                                                                const std::int32_t* all,
                                                                const std::int32_t* offsets,
                                                                std::int64_t capacity) {
  using Key = order_key_t<A>;
  __shared__ int histogram[kPickDigits];
  __shared__ int ties_in_warp[2][kThreads / kWarp];
  const int n = offsets[blockIdx.x + 1] - offsets[blockIdx.x];
  const std::int32_t* list = all + offsets[blockIdx.x];
  const int thread = static_cast<int>(threadIdx.x);
  if (n <= capacity || capacity == 0) {
    for (int i = thread; i < n; i += kThreads)
      kept[list[i]] = capacity == 0 ? 0 : 1;
    return;
  }
  int wanted = static_cast<int>(capacity);
  Key bar = 0, mask = 0;
  for (int shift = static_cast<int>(sizeof(Key)) * 8 - 8; shift >= 0; shift -= 8) {
    histogram[thread] = 0;
    __syncthreads();
    for (int i = thread; i < n; i += kThreads) {
      const Key key = OrderKey<A>::of(weights[list[i]]);
      if ((key & mask) == bar) atomicAdd(&histogram[(key >> shift) & (kPickDigits - 1)], 1);
    }
    __syncthreads();
    const DigitPick pick = pick_digit(histogram[thread], wanted);
    bar |= static_cast<Key>(pick.digit) << shift;
    mask |= static_cast<Key>(kPickDigits - 1) << shift;
    wanted -= pick.above;
  }
  // All above the bar survive, and the first `wanted` that equal it.
  const unsigned lower_lanes = (1U << (threadIdx.x % kWarp)) - 1U;
  int ties = 0, half = 0;
  for (int begin = 0; begin < n; begin += kThreads, half ^= 1) {
    const int i = begin + thread;
    const Key key = i < n ? OrderKey<A>::of(weights[list[i]]) : Key(0);
    const unsigned tie_mask = __ballot_sync(0xffffffffU, key == bar);
    if (threadIdx.x % kWarp == 0) ties_in_warp[half][thread / kWarp] = __popc(tie_mask);
    __syncthreads();
    int before = ties + __popc(tie_mask & lower_lanes);
    for (int w = 0; w < kThreads / kWarp; ++w) {
      if (w < thread / kWarp) before += ties_in_warp[half][w];
      ties += ties_in_warp[half][w];
    }
    if (i < n) kept[list[i]] = key > bar || (key == bar && before < wanted) ? 1 : 0;
  }
}

template <class A>
void keep_largest(CudaContext& context,
                  const ExpertCapacity& op,
                  const TensorView& list,
                  const TensorView& offsets) {
  keep_largest_kernel<A>
      <<<static_cast<unsigned>(op.num_experts), kThreads, 0, native_stream(context)>>>(
          op.kept.as<std::uint8_t>(),
          op.weights.as<A>(),
          list.as<std::int32_t>(),
          offsets.as<std::int32_t>(),
          op.capacity);
  check_launch("kernel expert_capacity: largest weights");
}

}  // namespace

void launch(CudaContext& context, const ExpertCapacity& op) {
  const std::int64_t assignments = op.topk.numel();
  const Arena::Mark mark(context.scratch);
  const auto take = [&](std::int64_t n, const char* tag) {
    return context.scratch.take({n}, DType::i32, tag);
  };
  const TensorView offsets = take(op.num_experts + 1, "expert_capacity.offsets"),
                   rank = take(assignments, "expert_capacity.rank"),
                   list = take(assignments, "expert_capacity.list"),
                   counts = take_sort_scratch(context.scratch, assignments, op.num_experts);
  if (is_dry(context) || assignments == 0) return;
  const ExpertSort sort = sort_by_expert(context, rank, offsets, counts, op.topk, {});
  const auto blocks = static_cast<unsigned>((assignments + kThreads - 1) / kThreads);
  const auto stream = native_stream(context);
  if (op.policy == DropPolicy::position) {
    keep_first_kernel<<<blocks, kThreads, 0, stream>>>(
        op.kept.as<std::uint8_t>(), op.topk.as<std::int32_t>(), sort, assignments, op.capacity);
    return check_launch("kernel expert_capacity: first tokens");
  }
  list_kernel<<<blocks, kThreads, 0, stream>>>(
      list.as<std::int32_t>(), op.topk.as<std::int32_t>(), sort, assignments);
  check_launch("kernel expert_capacity: list");
  if (op.weights.dtype() == DType::f64) return keep_largest<double>(context, op, list, offsets);
  keep_largest<float>(context, op, list, offsets);
}

}  // namespace moesaic
