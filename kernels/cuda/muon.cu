// Muon: row blocks of one height that lie evenly go through the iteration (newton_schulz.h) in
// groups. A kernel lays them out as wide matrices, updating the momentum; another applies the
// result. Paths: "bf16_halved" (bf16, symmetric products by half), "bf16" and "split" (f32 products from
// bf16 halves), or "plain" in the master dtype; with blocks of several heights, that of the last kind that
// is not plain.
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/newton_schulz.h"
#include "kernels/cuda/split_master.cuh"
#include "kernels/ops/muon.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kTile = 32;     // of the kernels between the tensor and the wide matrices
constexpr int kTileRows = 8;  // threads in y

// Blocks of `rows` rows, `step` rows apart, `per_matrix` of them in each matrix [.., cols].
struct Run {
  std::int64_t first = 0, step = 0, rows = 0;  // in rows
  std::int64_t per_matrix = 0;
  std::int64_t matrix_rows = 0, cols = 0;

  __host__ __device__ bool flip() const { return rows > cols; }
  std::int64_t m() const { return std::min(rows, cols); }
  std::int64_t n() const { return std::max(rows, cols); }
  // The first element of block i of all blocks of all matrices.
  __device__ std::int64_t start(std::int64_t i) const {
    const std::int64_t matrix = i / per_matrix, block = i - matrix * per_matrix;
    return (matrix * matrix_rows + first + block * step) * cols;
  }
};

// Cuts the blocks into evenly spaced runs of one height.
std::vector<Run> runs_of(std::int64_t rows, std::int64_t cols, std::vector<RowBlock> blocks) {
  if (blocks.empty()) blocks.push_back({0, rows});
  std::vector<Run> runs;
  std::vector<bool> taken(blocks.size(), false);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (taken[i]) continue;
    Run run{.first = blocks[i].begin,
            .rows = blocks[i].end - blocks[i].begin,
            .per_matrix = 1,
            .matrix_rows = rows,
            .cols = cols};
    std::int64_t next = -1;
    for (std::size_t j = i + 1; j < blocks.size(); ++j) {
      if (taken[j] || blocks[j].end - blocks[j].begin != run.rows) continue;
      if (next < 0) run.step = blocks[j].begin - run.first;
      if (next >= 0 && blocks[j].begin != next) continue;
      taken[j] = true;
      ++run.per_matrix;
      next = blocks[j].begin + run.step;
    }
    runs.push_back(run);
  }
  return runs;
}

// Calls get(element of the tensor) for every element of block i and writes what it returns to the
// wide matrix blockIdx.z.
template <class A, class Get>
__device__ __forceinline__ void to_wide(A* x, const Run& run, std::int64_t i, Get&& get) {
  __shared__ A tile[kTile][kTile + 1];
  A* wide = x + std::int64_t{blockIdx.z} * run.rows * run.cols;
  const std::int64_t start = run.start(i);
  const std::int64_t r0 = std::int64_t{blockIdx.y} * kTile, c = std::int64_t{blockIdx.x} * kTile;
#pragma unroll
  for (int k = threadIdx.y; k < kTile; k += kTileRows) {
    const std::int64_t r = r0 + k, column = c + threadIdx.x;
    if (r >= run.rows || column >= run.cols) continue;
    const A v = get(start + r * run.cols + column);
    if (run.flip()) {
      tile[k][threadIdx.x] = v;
    } else {
      wide[r * run.cols + column] = v;
    }
  }
  if (!run.flip()) return;
  __syncthreads();
#pragma unroll
  for (int k = threadIdx.y; k < kTile; k += kTileRows) {
    const std::int64_t column = c + k, r = r0 + threadIdx.x;
    if (r < run.rows && column < run.cols) wide[column * run.rows + r] = tile[threadIdx.x][k];
  }
}

// Calls put(element of the tensor, value of the wide matrix blockIdx.z) for every element of block i.
template <class X, class Put>
__device__ __forceinline__ void from_wide(const X* x, const Run& run, std::int64_t i, Put&& put) {
  __shared__ X tile[kTile][kTile + 1];
  const X* wide = x + std::int64_t{blockIdx.z} * run.rows * run.cols;
  const std::int64_t start = run.start(i);
  const std::int64_t r0 = std::int64_t{blockIdx.y} * kTile, c = std::int64_t{blockIdx.x} * kTile;
  if (run.flip()) {
#pragma unroll
    for (int k = threadIdx.y; k < kTile; k += kTileRows) {
      const std::int64_t column = c + k, r = r0 + threadIdx.x;
      if (r < run.rows && column < run.cols) tile[threadIdx.x][k] = wide[column * run.rows + r];
    }
    __syncthreads();
  }
#pragma unroll
  for (int k = threadIdx.y; k < kTile; k += kTileRows) {
    const std::int64_t r = r0 + k, column = c + threadIdx.x;
    if (r >= run.rows || column >= run.cols) continue;
    put(start + r * run.cols + column,
        run.flip() ? tile[k][threadIdx.x] : wide[r * run.cols + column]);
  }
}

template <class A>
__global__ void __launch_bounds__(kTile* kTileRows)
    load_kernel(A* x, const A* from, Run run, std::int64_t first) {
  to_wide(x, run, first + blockIdx.z, [&](std::int64_t at) { return from[at]; });
}
template <class A, class X>
__global__ void __launch_bounds__(kTile* kTileRows)
    store_kernel(A* to, const X* x, Run run, std::int64_t first) {
  from_wide(x, run, first + blockIdx.z, [&](std::int64_t at, X v) { to[at] = widen<A>(v); });
}

// Calls f(pointer to the results of an iteration), which may be narrower than A.
template <class A, class F>
void with_result(const TensorView& x, F&& f) {
  if constexpr (std::is_same_v<A, float>) {
    if (x.dtype() == DType::bf16) return f(reinterpret_cast<const __nv_bfloat16*>(x.as<bf16>()));
  }
  f(static_cast<const A*>(x.as<A>()));
}

template <class A>
struct Step {
  const A* scalars;
  double lr_scale, weight_decay;
  A mu;
  bool nesterov;

  __device__ double slot(StepScalar i) const { return static_cast<double>(scalars[index_of(i)]); }
  __device__ bool skips() const { return scalars[index_of(StepScalar::skip)] != A(0); }
};

// With skip the momentum stays; what then goes through the iteration is not used.
template <class A, class G>
__global__ void __launch_bounds__(kTile* kTileRows)
    momentum_kernel(A* x, A* momentum, const G* dw, Run run, std::int64_t first, Step<A> step) {
  const A clip = step.scalars[index_of(StepScalar::clip_factor)];
  const bool skips = step.skips();
  to_wide(x, run, first + blockIdx.z, [&](std::int64_t at) {
    const A g = clip * widen<A>(dw[at]);
    const A m = step.mu * momentum[at] + g;
    if (!skips) momentum[at] = m;
    return step.nesterov ? g + step.mu * m : m;
  });
}

// An f32 or f64 master with or without a compute copy, and one that is split.
template <class A, class C>
struct WholeMaster {
  A* w;
  C* compute;
  __device__ A get(std::int64_t at) const { return w[at]; }
  __device__ void set(std::int64_t at, A v) const {
    w[at] = v;
    if (compute != nullptr) compute[at] = round_to<C>(v);
  }
};
struct SplitMaster {
  __nv_bfloat16* weight;
  std::uint16_t* remainder;
  __device__ float get(std::int64_t at) const { return join_master(weight[at], remainder[at]); }
  __device__ void set(std::int64_t at, float v) const {
    split_master(v, weight[at], remainder[at]);
  }
};

// The fused multiply-add is written out: both forms of a master get the same bits.
template <class A, class X, class Master>
__global__ void __launch_bounds__(kTile* kTileRows)
    apply_kernel(Master master, const X* x, Run run, std::int64_t first, Step<A> step) {
  if (step.skips()) return;
  const double lr = step.slot(StepScalar::learning_rate) * step.lr_scale;
  const auto keep =
      static_cast<A>(1.0 - lr * step.weight_decay * step.slot(StepScalar::weight_decay_scale));
  const auto length = static_cast<A>(lr * 0.2 * sqrt(static_cast<double>(max(run.rows, run.cols))));
  from_wide(x, run, first + blockIdx.z, [&](std::int64_t at, X direction) {
    master.set(at, fma(-length, widen<A>(direction), keep * master.get(at)));
  });
}

struct Grid {
  dim3 blocks, threads{kTile, kTileRows};
  Grid(const Run& run, std::int64_t count)
      : blocks(static_cast<unsigned>((run.cols + kTile - 1) / kTile),
               static_cast<unsigned>((run.rows + kTile - 1) / kTile),
               static_cast<unsigned>(count)) {}
};

// For every group of every run: load(run, first, count, x), the iteration, store(run, first, count,
// result).
template <class Op, class Load, class Store>
void for_each_group(
    CudaContext& context, const Op& op, DType dtype, Load&& load_blocks, Store&& store_blocks) {
  const char* path = "plain";
  for (const Run& run : runs_of(op.rows(), op.cols(), op.blocks)) {
    NewtonSchulzShape shape{.rows = run.m(), .cols = run.n(), .dtype = dtype};
    if (may_specialise(context) && shape.suits_tensor_cores()) {
      shape.products = op.bf16_products ? SchulzProducts::bf16 : SchulzProducts::split;
      path = shape.halves_products() ? "bf16_halved" : op.bf16_products ? "bf16" : "split";
    }
    const std::int64_t total = op.batch() * run.per_matrix, group = shape.group(context, total);
    const Arena::Mark mark(context.scratch);
    const auto ws = NewtonSchulzWorkspace::take(context.scratch, shape, group);
    if (is_dry(context)) continue;
    for (std::int64_t first = 0; first < total; first += group) {
      const std::int64_t count = std::min(group, total - first);
      load_blocks(run, first, count, ws.x);
      const TensorView result = newton_schulz(context, ws, count, op.num_iterations);
      store_blocks(run, first, count, result);
    }
  }
  report_path(context, op, path);
}

template <class A, class G, class Master>
void update(CudaContext& context, const MuonUpdate& op, const Master& master) {
  const Step<A> step{.scalars = op.scalars.as<A>(),
                     .lr_scale = op.lr_scale,
                     .weight_decay = op.weight_decay,
                     .mu = static_cast<A>(op.mu),
                     .nesterov = op.nesterov};
  for_each_group(
      context,
      op,
      op.master_dtype(),
      [&](const Run& run, std::int64_t first, std::int64_t count, const TensorView& x) {
        const Grid grid(run, count);
        momentum_kernel<A, device_t<G>><<<grid.blocks, grid.threads, 0, native_stream(context)>>>(
            x.as<A>(),
            op.momentum.as<A>(),
            reinterpret_cast<const device_t<G>*>(op.dw.as<G>()),
            run,
            first,
            step);
        check_launch("kernel muon_update: momentum");
      },
      [&](const Run& run, std::int64_t first, std::int64_t count, const TensorView& x) {
        const Grid grid(run, count);
        with_result<A>(x, [&](const auto* result) {
          apply_kernel<<<grid.blocks, grid.threads, 0, native_stream(context)>>>(
              master, result, run, first, step);
          check_launch("kernel muon_update: apply");
        });
      });
}

template <class A, class G, class C>
void update_whole(CudaContext& context, const MuonUpdate& op) {
  update<A, G>(context,
               op,
               WholeMaster<A, device_t<C>>{op.w.as<A>(),
                                           reinterpret_cast<device_t<C>*>(op.w_compute.as<C>())});
}
template <class G>
void update_split(CudaContext& context, const MuonUpdate& op) {
  update<float, G>(context,
                   op,
                   SplitMaster{reinterpret_cast<__nv_bfloat16*>(op.w_compute.as<bf16>()),
                               op.remainder.as<std::uint16_t>()});
}

template <class A>
void orthogonalise(CudaContext& context, const NewtonSchulz& op) {
  for_each_group(
      context,
      op,
      op.x.dtype(),
      [&](const Run& run, std::int64_t first, std::int64_t count, const TensorView& x) {
        const Grid grid(run, count);
        load_kernel<A><<<grid.blocks, grid.threads, 0, native_stream(context)>>>(
            x.as<A>(), op.x.as<A>(), run, first);
        check_launch("kernel newton_schulz: load");
      },
      [&](const Run& run, std::int64_t first, std::int64_t count, const TensorView& x) {
        const Grid grid(run, count);
        with_result<A>(x, [&](const auto* result) {
          store_kernel<<<grid.blocks, grid.threads, 0, native_stream(context)>>>(
              op.x.as<A>(), result, run, first);
          check_launch("kernel newton_schulz: store");
        });
      });
}

}  // namespace

void launch(CudaContext& context, const MuonUpdate& op) {
  if (op.momentum.numel() == 0) return;
  if (op.is_split()) {
    return op.dw.dtype() == DType::bf16 ? update_split<bf16>(context, op)
                                        : update_split<float>(context, op);
  }
  if (op.w.dtype() == DType::f64) return update_whole<double, double, double>(context, op);
  const bool narrow = !op.w_compute.empty() && op.w_compute.dtype() == DType::bf16;
  if (op.dw.dtype() == DType::bf16)
    return narrow ? update_whole<float, bf16, bf16>(context, op)
                  : update_whole<float, bf16, float>(context, op);
  return narrow ? update_whole<float, float, bf16>(context, op)
                : update_whole<float, float, float>(context, op);
}

void launch(CudaContext& context, const NewtonSchulz& op) {
  if (op.x.numel() == 0) return;
  if (op.x.dtype() == DType::f64) return orthogonalise<double>(context, op);
  orthogonalise<float>(context, op);
}

}  // namespace moesaic
