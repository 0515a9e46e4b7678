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

template <class Act>
struct FinishBackward {
  using Piece = Vec<__nv_bfloat16, kPiece>;
  __nv_bfloat16* dgate_up;
  __nv_bfloat16* h;
  float* parts;  // [rows, groups], or null
  const __nv_bfloat16* gate_up;
  const float* row_weight;  // or null
  std::int64_t width, groups;
  bool weight_h;
  Act act;

  // What a row needs from global memory: fetched before the product is there.
  struct Fetched {
    Piece gate, up;
    float weight;
  };
  __device__ __forceinline__ void fetch(Fetched& f, std::int64_t t, std::int64_t column) const {
    f.gate = load<kPiece>(gate_up + 2 * t * width + column);
    f.up = load<kPiece>(gate_up + (2 * t + 1) * width + column);
    f.weight = row_weight == nullptr ? 1.0F : row_weight[t];
  }

  template <class Arrived>
  __device__ __forceinline__ void operator()(const Unit& unit,
                                             int group,
                                             const unsigned char* half,
                                             Arrived&& arrived) const {
    constexpr int kAhead = 2, kRows = kGroupThreads / kPieces;  // rows at a time
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, piece = thread % kPieces,
              first = thread / kPieces;
    const std::int64_t start = unit.output + group * 64, column = start + piece * kPiece;
    // Outside rows and columns: nothing to fetch or store, but the sums of a row are formed together.
    const int rows = column < width ? unit.tile.rows : 0;
    Fetched fetched[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * kRows < rows) fetch(fetched[i], unit.tile.row + first + i * kRows, column);
    }
    arrived();
    for (int base = 0; base < unit.tile.rows; base += kAhead * kRows) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int row = base + i * kRows + first;
        const std::int64_t t = unit.tile.row + row;
        float sum = 0;
        if (row < rows) {
          Fetched f = fetched[i];
          if (row + kAhead * kRows < rows) fetch(fetched[i], t + kAhead * kRows, column);
          const auto offset = static_cast<std::uint32_t>(row * kHalfPitch + piece * 16);
          Piece dh = *reinterpret_cast<const Piece*>(half + swizzled_128(offset));
          sum = glu_gradients(act, f.weight, weight_h ? f.weight : 1.0F, f.gate, f.up, dh);
          store<kPiece>(dgate_up + 2 * t * width + column, f.gate);
          store<kPiece>(dgate_up + (2 * t + 1) * width + column, f.up);
          store<kPiece>(h + t * width + column, dh);
        }
        if (parts != nullptr) {
          sum = lanes_sum<kPieces>(sum);
          if (piece == 0 && row < rows) parts[t * groups + start / 64] = sum;
        }
      }
    }
  }
};

// kClasses lanes per row; the order is in glu_math.cuh.
template <int kClasses>
__global__ void __launch_bounds__(128) sum_parts_kernel(float* sums,
                                                        const float* parts,
                                                        const std::int32_t* row_count,
                                                        std::int64_t groups) {
  constexpr int kRows = 128 / kClasses;
  const std::int64_t rows = *row_count;
  const int of_row = static_cast<int>(threadIdx.x) % kClasses;
  for (std::int64_t base = std::int64_t{blockIdx.x} * kRows; base < rows;
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
  const auto* count = rows_in_use(op.offsets).as<std::int32_t>();
  const auto run = [&]<int kClasses>(std::integral_constant<int, kClasses>) {
    const unsigned grid = grid_for(context, (op.h.dim(0) * kClasses + 127) / 128, 16);
    sum_parts_kernel<kClasses><<<grid, 128, 0, native_stream(context)>>>(
        op.drow_weight.as<float>(), parts, count, groups);
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

bool can_fuse(const GroupedGluBackward& op) {
  return can_tile_rows(op.w, op.dy, op.h) && is_aligned(op.gate_up.data(), 16) &&
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
