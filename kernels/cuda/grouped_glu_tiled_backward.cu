// The down projection's input gradient, and behind it the gradient of the gated linear unit before it: the gradient of the
// unit's result exists in shared memory only. Gate and up are read, their gradients and the weighted result written while
// the next tile is multiplied. A row's part of its weight's gradient goes to scratch, one number per 64 outputs; a second
// kernel adds them in the order of GluBackward.
#include "kernels/cuda/glu_math.cuh"
#include "kernels/cuda/grouped_finish.cuh"
#include "kernels/cuda/grouped_glu_tiled.h"
#include "kernels/ops/permute.h"

namespace moesaic::cuda {
namespace {

constexpr int kPiece = 8;             // elements of an access
constexpr int kPieces = 64 / kPiece;  // in a row of a warpgroup's half
static_assert(kPieces == kGroupPieces);

std::int64_t groups_of(std::int64_t width) {
  return (width + kPieces * kPiece - 1) / (kPieces * kPiece);
}

// Gates and ups come by cp.async, into slots that each thread has for itself, kAhead passes of kRows rows ahead: beside the
// copies of the products' operands, which keep the way into the multiprocessor full, a load takes microseconds.
template <class Act>
struct FinishBackward {
  using Piece = Vec<__nv_bfloat16, kPiece>;
  static constexpr int kAhead = 4, kRows = kGroupThreads / kPieces;
  static constexpr int kSlotBytes = 2 * kGroupThreads * static_cast<int>(sizeof(Piece));
  static constexpr int kOwnBytes = kAhead * kSlotBytes;
  __nv_bfloat16* dgate_up;
  __nv_bfloat16* h;
  float* parts;  // [rows, groups], or null
  const __nv_bfloat16* gate_up;
  const float* row_weight;  // or null
  std::int64_t width, groups;
  bool weight_h;
  Act act;

  // Where a thread works in a pass: outside rows and columns there is nothing to fetch or store.
  struct Place {
    int group, row;
    std::int64_t t, column;
    bool inside;
  };
  __device__ __forceinline__ Place place(const Unit& unit, int passes, int pass) const {
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, group = pass >= passes,
              row = (pass - group * passes) * kRows + thread / kPieces;
    const std::int64_t column = unit.output + group * 64 + thread % kPieces * kPiece;
    return {group,
            row,
            unit.tile.row + std::int64_t{row},
            column,
            pass < 2 * passes && row < unit.tile.rows && column < width};
  }
  __device__ __forceinline__ void fetch(const Place& p, unsigned char* slot, float& weight) const {
    const __nv_bfloat16* const gate = p.inside ? gate_up + 2 * p.t * width + p.column : gate_up;
    cp_async_16(slot, gate, p.inside);
    cp_async_16(slot + kSlotBytes / 2, p.inside ? gate + width : gate, p.inside);
    cp_async_commit();
    weight = p.inside && row_weight != nullptr ? row_weight[p.t] : 1.0F;
  }
  __device__ __forceinline__ float finish_piece(const Place& p,
                                                const unsigned char* half,
                                                const unsigned char* slot,
                                                float weight) const {
    const auto offset = static_cast<std::uint32_t>(p.row * kHalfPitch) +
                        static_cast<std::uint32_t>(threadIdx.x % kPieces * sizeof(Piece));
    Piece gate = *reinterpret_cast<const Piece*>(slot),
          up = *reinterpret_cast<const Piece*>(slot + kSlotBytes / 2),
          dh = *reinterpret_cast<const Piece*>(half + swizzled_128(offset));
    const float sum = glu_gradients(act, weight, weight_h ? weight : 1.0F, gate, up, dh);
    store<kPiece>(dgate_up + 2 * p.t * width + p.column, gate);
    store<kPiece>(dgate_up + (2 * p.t + 1) * width + p.column, up);
    store<kPiece>(h + p.t * width + p.column, dh);
    return sum;
  }

  __device__ __forceinline__ void operator()(const Unit& unit, const FinishedTile& tile) const {
    const int passes =
        (unit.tile.rows + kRows - 1) / kRows;  // of one half; both halves are one sequence
    unsigned char* const slots =
        tile.own() + threadIdx.x % kGroupThreads * static_cast<int>(sizeof(Piece));
    float weight[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      fetch(place(unit, passes, i), slots + i * kSlotBytes, weight[i]);
    for (int base = 0; base < 2 * passes; base += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int pass = base + i;
        if (pass >= 2 * passes) break;
        const Place p = place(unit, passes, pass);
        if (pass == p.group * passes) tile.arrived(p.group);
        cp_async_wait<kAhead - 1>();
        float sum = 0;
        if (p.inside) sum = finish_piece(p, tile.half(p.group), slots + i * kSlotBytes, weight[i]);
        // What the slot held is in what was stored: it can be filled again.
        fetch(place(unit, passes, pass + kAhead), slots + i * kSlotBytes, weight[i]);
        if (parts != nullptr) {
          sum = lanes_sum<kPieces>(sum);
          if (p.inside && threadIdx.x % kPieces == 0)
            parts[p.t * groups + p.column / (kPieces * kPiece)] = sum;
        }
        if (pass == (p.group + 1) * passes - 1) tile.done(p.group);
      }
    }
    cp_async_wait<0>();
  }
};

// kClasses lanes per row; the order is in glu_math.cuh.
template <int kClasses>
__global__ void __launch_bounds__(128) sum_parts_kernel(float* sums,
                                                        const float* parts,
                                                        const std::int32_t* first_row,
                                                        const std::int32_t* row_count,
                                                        std::int64_t groups) {
  constexpr int kRows = 128 / kClasses;
  const std::int64_t rows = *row_count;  // up to there; rows before the first have no parts
  const int of_row = static_cast<int>(threadIdx.x) % kClasses;
  for (std::int64_t base = *first_row + std::int64_t{blockIdx.x} * kRows; base < rows;
       base += std::int64_t{gridDim.x} * kRows) {
    const std::int64_t t = base + threadIdx.x / kClasses;
    float x = 0;
    if (t < rows) {
      for (std::int64_t g = of_row; g < groups; g += kClasses)
        x += parts[t * groups + g];
    }
    x += __shfl_xor_sync(0xffffffffU, x, 1);
    x += __shfl_xor_sync(0xffffffffU, x, 2);
    float sum = x;
#pragma unroll
    for (int four = 1; four < kClasses / 4; ++four)
      sum += __shfl_down_sync(0xffffffffU, x, 4 * four);
    if (of_row == 0 && t < rows) sums[t] = sum;
  }
}

void sum_parts(const CudaContext& context, const GroupedGluBackward& op, const float* parts) {
  const std::int64_t width = op.h.dim(1), groups = groups_of(width);
  const auto* first = first_row(op.offsets).as<std::int32_t>();
  const auto* count = rows_in_use(op.offsets).as<std::int32_t>();
  const auto run = [&]<int kClasses>(std::integral_constant<int, kClasses>) {
    const unsigned grid = grid_for(context, (op.h.dim(0) * kClasses + 127) / 128, 16);
    sum_parts_kernel<kClasses><<<grid, 128, 0, native_stream(context)>>>(
        op.drow_weight.as<float>(), parts, first, count, groups);
  };
  if (row_classes(width, kPiece) == 4) {
    run(std::integral_constant<int, 4>{});
  } else {
    run(std::integral_constant<int, 16>{});
  }
  check_launch("grouped_glu_backward_sums");
}

template <class Act>
void launch_backward(CudaContext& context,
                     const GroupedGluBackward& op,
                     float* parts,
                     const GroupTiles& tiles) {
  const FinishBackward<Act> finish{.dgate_up = device_data<bf16>(op.dgate_up),
                                   .h = device_data<bf16>(op.h),
                                   .parts = parts,
                                   .gate_up = device_data<bf16>(op.gate_up),
                                   .row_weight = op.row_weight.as<float>(),
                                   .width = op.h.dim(1),
                                   .groups = groups_of(op.h.dim(1)),
                                   .weight_h = op.weight_h,
                                   .act = Act(op.activation)};
  launch_finished<Major::mn, WeightLoads<Major::mn>>(context,
                                                     map_weights(op.w, Major::mn),
                                                     op.dy,
                                                     op.h.dim(1),
                                                     tiles,
                                                     finish,
                                                     "grouped_glu_backward");
}

}  // namespace

// Short sums end before the finisher is through with the tile before. Measured on an H200, fused against separate: swiglu, sums of 2048, 1.33 against 1.42 ms; situ, sums of 1024, 2.10
// against 1.46 ms, of 3584, 5.88 against 5.96 ms.
bool can_fuse(const GroupedGluBackward& op) {
  constexpr std::int64_t kLongSum = 2048, kLongSumSitu = 3072;
  const bool gains =
      op.dy.dim(1) >= (op.activation.kind == GluKind::situ ? kLongSumSitu : kLongSum);
  return gains && can_tile_rows(op.w, op.dy, op.h) && is_aligned(op.gate_up.data(), 16) &&
         is_aligned(op.dgate_up.data(), 16);
}

TensorView take_row_parts(CudaContext& context, const GroupedGluBackward& op) {
  if (op.drow_weight.empty()) return {};
  return context.scratch.take(
      {op.h.dim(0), groups_of(op.h.dim(1))}, DType::f32, "grouped_glu.row_weight_parts");
}

void launch_fused(CudaContext& context,
                  const GroupedGluBackward& op,
                  const TensorView& parts,
                  const GroupTiles& tiles) {
  if (op.activation.kind == GluKind::situ) {
    launch_backward<SituGlu<float, true>>(context, op, parts.as<float>(), tiles);
  } else {
    launch_backward<SwiGlu<float, true>>(context, op, parts.as<float>(), tiles);
  }
  if (!parts.empty()) sum_parts(context, op, parts.as<float>());
}

}  // namespace moesaic::cuda
