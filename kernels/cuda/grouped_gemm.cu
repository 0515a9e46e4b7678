// Grouped products: the choice of the kernel, and the plain one, for any size and type. Tiles of 64 x 64 in shared memory,
// sums in acc_t, one element after the other: an element's bits depend on its own operands only.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/grouped_gemm_tiled.h"
#include "kernels/ops/grouped_gemm.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr int kSide = 64;   // of a tile of the result
constexpr int kDepth = 16;  // terms of the sums that are in shared memory at a time
constexpr int kOwn = 4;     // a thread forms kOwn x kOwn elements
constexpr int kAcross = kSide / kOwn;
constexpr int kPitch =
    kSide + 4;  // of a shared row: spreads columns over banks, keeps 16-byte alignment
constexpr TileRule kPlainRows{.max_rows = kSide, .rows_step = 1};
constexpr TileRule kSmallestTiles{.max_rows = kMinTileRows, .rows_step = 1};

enum class Product { forward, backward_input, backward_weight };

// c[i, j] (+)= sum over p of a[i, p] b[j, p] for one expert, where the sum's index may be the rows' or the columns' of an
// operand.
template <class T, class C>
struct PlainArgs {
  C* c;
  const T* a;                     // x or dy: rows of tokens
  const T* b;                     // w, or x
  std::int64_t a_width, b_width;  // columns of a and b
  std::int64_t b_slot, c_slot;    // elements of a slot of b (c); 0 if it has none
  std::int64_t height, width,
      depth;  // of c per expert, and of the sum; the one that is rows of tokens is unused
  const GroupTile* tiles;
  const std::int32_t* num_tiles;
  bool accumulate;
};

// kDepth x kSide elements into shared memory, zeros outside. kAlong: neighbours in memory are neighbours in the sum.
template <bool kAlong, class A, class T>
__device__ __forceinline__ void load_tile(A (&tile)[kDepth][kPitch],
                                          const T* p,
                                          std::int64_t width,
                                          std::int64_t side,
                                          std::int64_t depth) {
#pragma unroll
  for (int n = 0; n < kDepth * kSide / kThreads; ++n) {
    const int index = static_cast<int>(threadIdx.x) + n * kThreads;
    const int k = kAlong ? index % kDepth : index / kSide,
              i = kAlong ? index / kDepth : index % kSide;
    const bool inside = k < depth && i < side;
    tile[k][i] = inside ? widen<A>(kAlong ? p[i * width + k] : p[k * width + i]) : A(0);
  }
}

template <Product kProduct, class T, class C>
__global__ void __launch_bounds__(kThreads) plain_kernel(PlainArgs<T, C> args) {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  constexpr bool kWeight = kProduct == Product::backward_weight;
  constexpr bool kAlongB = kProduct == Product::forward;
  __shared__ alignas(16) A a_tile[kDepth][kPitch], b_tile[kDepth][kPitch];
  const int y = static_cast<int>(threadIdx.x) / kAcross * kOwn,
            x = static_cast<int>(threadIdx.x) % kAcross * kOwn;
  const std::int64_t across = (args.width + kSide - 1) / kSide,
                     down = kWeight ? (args.height + kSide - 1) / kSide : 1;
  const std::int64_t units = *args.num_tiles * across * down;
  for (std::int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const GroupTile tile = args.tiles[unit / (across * down)];
    const std::int64_t i0 = kWeight ? unit / across % down * kSide : 0, j0 = unit % across * kSide;
    const std::int64_t height = kWeight ? args.height - i0 : tile.rows, width = args.width - j0,
                       depth = kWeight ? tile.rows : args.depth;
    const T* a = args.a + tile.row * args.a_width + i0;
    const T* b = args.b + (kWeight ? tile.row * args.b_width + j0
                                   : tile.slot * args.b_slot + (kAlongB ? j0 * args.b_width : j0));
    C* c = args.c + tile.slot * args.c_slot + (kWeight ? i0 : tile.row) * args.width + j0;
    A sum[kOwn][kOwn] = {};
    for (std::int64_t p = 0; p < depth; p += kDepth) {
      load_tile<!kWeight>(
          a_tile, a + (kWeight ? p * args.a_width : p), args.a_width, height, depth - p);
      load_tile<kAlongB>(
          b_tile, b + (kAlongB ? p : p * args.b_width), args.b_width, width, depth - p);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        const auto u = load<kOwn>(&a_tile[k][y]), v = load<kOwn>(&b_tile[k][x]);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
          for (int j = 0; j < kOwn; ++j)
            sum[i][j] += u.v[i] * v.v[j];
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        if (y + i >= height || x + j >= width) continue;
        C* const p = c + (y + i) * args.width + x + j;
        *p = round_to<C>(args.accumulate ? widen<A>(*p) + sum[i][j] : sum[i][j]);
      }
    }
  }
}

template <Product kProduct, class T, class C>
void launch_plain(CudaContext& context, const GroupTiles& tiles, PlainArgs<T, C> args) {
  args.tiles = tiles.tiles;
  args.num_tiles = tiles.num_tiles;
  const auto pieces = [](std::int64_t n) { return (n + kSide - 1) / kSide; };
  const std::int64_t units =
      tiles.bound * pieces(args.width) *
      (kProduct == Product::backward_weight ? pieces(args.height) : std::int64_t{1});
  plain_kernel<kProduct><<<grid_for(context, units), kThreads, 0, native_stream(context)>>>(args);
  check_launch("grouped_gemm_plain");
}

// Runs f(TypeTag<T>, TypeTag<C>) with the device's names of the types.
template <class F>
void dispatch_types(DType operand, DType result, F&& f) {
  dispatch_float(operand, [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(
        result, [&]<class C>(TypeTag<C>) { f(TypeTag<device_t<T>>{}, TypeTag<device_t<C>>{}); });
  });
}

template <class T>
T* pointer(const TensorView& view) {
  return reinterpret_cast<T*>(view.data());
}
template <class T>
const T* pointer(const ConstTensorView& view) {
  return reinterpret_cast<const T*>(view.data());
}

void run_plain(CudaContext& context, const GroupedLinearForward& op, const GroupTiles& tiles) {
  dispatch_types(op.x.dtype(), op.y.dtype(), [&]<class T, class C>(TypeTag<T>, TypeTag<C>) {
    const std::int64_t n = op.w.dim(1), k = op.w.dim(2);
    launch_plain<Product::forward, T, C>(context,
                                         tiles,
                                         {.c = pointer<C>(op.y),
                                          .a = pointer<T>(op.x),
                                          .b = pointer<T>(op.w),
                                          .a_width = k,
                                          .b_width = k,
                                          .b_slot = n * k,
                                          .width = n,
                                          .depth = k,
                                          .accumulate = op.accumulate});
  });
}

void run_plain(CudaContext& context,
               const GroupedLinearBackwardInput& op,
               const GroupTiles& tiles) {
  dispatch_types(op.dy.dtype(), op.dx.dtype(), [&]<class T, class C>(TypeTag<T>, TypeTag<C>) {
    const std::int64_t n = op.w.dim(1), k = op.w.dim(2);
    launch_plain<Product::backward_input, T, C>(context,
                                                tiles,
                                                {.c = pointer<C>(op.dx),
                                                 .a = pointer<T>(op.dy),
                                                 .b = pointer<T>(op.w),
                                                 .a_width = n,
                                                 .b_width = k,
                                                 .b_slot = n * k,
                                                 .width = k,
                                                 .depth = n,
                                                 .accumulate = op.accumulate});
  });
}

void run_plain(CudaContext& context,
               const GroupedLinearBackwardWeight& op,
               const GroupTiles& tiles) {
  dispatch_types(op.x.dtype(), op.dw.dtype(), [&]<class T, class C>(TypeTag<T>, TypeTag<C>) {
    const std::int64_t n = op.dw.dim(1), k = op.dw.dim(2);
    launch_plain<Product::backward_weight, T, C>(context,
                                                 tiles,
                                                 {.c = pointer<C>(op.dw),
                                                  .a = pointer<T>(op.dy),
                                                  .b = pointer<T>(op.x),
                                                  .a_width = n,
                                                  .b_width = k,
                                                  .c_slot = n * k,
                                                  .height = n,
                                                  .width = k,
                                                  .accumulate = true});
  });
}

template <class Op>
void run_op(CudaContext& context,
            const Op& op,
            const ConstTensorView& result,
            std::int64_t rows_bound,
            std::int64_t num_slots,
            const TileRule& tiled,
            const TileRule& plain) {
  const bool tile = may_specialise(context) && can_tile(op);
  report_path(context, op, tile ? "tiled" : "plain");
  const Arena::Mark mark(context.scratch);
  // Room for the longest list: a dry run knows no addresses, so it cannot tell which it will be.
  const TensorView scratch =
      take_tile_scratch(context, op.slot_of_expert, rows_bound, kSmallestTiles);
  const bool empty = rows_bound == 0 || result.numel() == 0 || op.slot_of_expert.numel() == 0;
  if (is_dry(context) || empty) return;
  const GroupTiles tiles = make_tiles(
      context, scratch, op.offsets, op.slot_of_expert, rows_bound, num_slots, tile ? tiled : plain);
  if (tile) return launch_tiled(context, op, tiles);
  run_plain(context, op, tiles);
}

}  // namespace

void launch(CudaContext& context, const GroupedLinearForward& op) {
  run_op(context,
         op,
         op.y,
         op.x.dim(0),
         op.w.dim(0),
         row_tiles(op.x.dim(0), op.slot_of_expert.dim(0)),
         kPlainRows);
}
void launch(CudaContext& context, const GroupedLinearBackwardInput& op) {
  run_op(context,
         op,
         op.dx,
         op.dy.dim(0),
         op.w.dim(0),
         row_tiles(op.dy.dim(0), op.slot_of_expert.dim(0)),
         kPlainRows);
}
void launch(CudaContext& context, const GroupedLinearBackwardWeight& op) {
  run_op(context, op, op.dw, op.x.dim(0), op.dw.dim(0), kExpertTiles, kExpertTiles);
}

}  // namespace moesaic
