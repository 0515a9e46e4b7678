#include "kernels/ops/muon.h"

#include <algorithm>
#include <cmath>

#include "core/base/split_float.h"
#include "kernels/cpu/newton_schulz.h"
#include "kernels/cpu/stats.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

using cpu::MatrixLoop;

constexpr std::int64_t kGroup = 8;  // matrices in scratch at a time

/// One row block of one matrix. In its wide orientation it is [m, n] with m <= n; `flip` when that
/// is the transpose.
struct Block {
  std::int64_t first = 0;  // element of the tensor where the block starts
  std::int64_t rows = 0, cols = 0;
  bool flip() const { return rows > cols; }
  std::int64_t m() const { return std::min(rows, cols); }
  std::int64_t n() const { return std::max(rows, cols); }
};

std::vector<Block> list_blocks(std::int64_t batch,
                               std::int64_t rows,
                               std::int64_t cols,
                               const std::vector<RowBlock>& cuts) {
  std::vector<Block> out;
  for (std::int64_t i = 0; i < batch; ++i) {
    const std::int64_t base = i * rows * cols;
    if (cuts.empty()) out.push_back({base, rows, cols});
    for (const RowBlock& b : cuts)
      out.push_back({base + b.begin * cols, b.end - b.begin, cols});
  }
  return out;
}

/// Scratch of kGroup blocks at a time, each as large as the largest needs.
struct Workspace {
  TensorView x, other;  // [group, m n]
  TensorView y, z;      // [group, m m]
  TensorView packed;    // [group, right operand of a product]
  TensorView sums;      // [group, tiles] f64
};

Workspace take_workspace(Arena& arena, const std::vector<Block>& blocks, DType dtype) {
  std::int64_t wide = 1, square = 1, packed = 1, tiles = 1;
  for (const Block& b : blocks) {
    wide = std::max(wide, b.m() * b.n());
    square = std::max(square, b.m() * b.m());
    packed = std::max(packed, cpu::NewtonSchulzIteration<float>::packed_elements(b.m(), b.n()));
    const std::int64_t tile = cpu::small_matrix_loop().tile;  // the smaller one
    tiles = std::max(tiles, (b.m() + tile - 1) / tile);
  }
  const std::int64_t group =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(blocks.size()), 1, kGroup);
  return {arena.take({group, wide}, dtype, "muon.x"),
          arena.take({group, wide}, dtype, "muon.x_next"),
          arena.take({group, square}, dtype, "muon.gram"),
          arena.take({group, square}, dtype, "muon.polynomial"),
          arena.take({group, packed}, dtype, "muon.packed"),
          arena.take({group, tiles}, DType::f64, "muon.sums")};
}

/// Calls f(block, loop, slot) for all blocks in groups; f may use slot `slot` of the workspace.
template <class F>
void for_each_block(ThreadPool& pool, const std::vector<Block>& blocks, F&& f) {
  const auto total = static_cast<std::int64_t>(blocks.size());
  const MatrixLoop small = cpu::small_matrix_loop(), large = cpu::large_matrix_loop(pool);
  for (std::int64_t first = 0; first < total; first += kGroup) {
    const std::int64_t count = std::min(kGroup, total - first);
    const auto at = [&](std::int64_t i) -> const Block& {
      return blocks[static_cast<std::size_t>(first + i)];
    };
    for (std::int64_t i = 0; i < count; ++i) {
      if (cpu::is_large_matrix(at(i).m())) f(at(i), large, i);
    }
    pool.parallel_for(count, 1, [&](std::int64_t i, std::int64_t) {
      if (!cpu::is_large_matrix(at(i).m())) f(at(i), small, i);
    });
  }
}

template <class A>
A* iterate(const Block& b,
           const MatrixLoop& loop,
           const Workspace& ws,
           std::int64_t slot,
           int iterations) {
  const auto part = [slot](const TensorView& v) { return v.as<A>() + slot * v.dim(1); };
  cpu::NewtonSchulzIteration<A> it{loop,
                                   b.m(),
                                   b.n(),
                                   part(ws.x),
                                   part(ws.other),
                                   part(ws.y),
                                   part(ws.z),
                                   part(ws.packed),
                                   ws.sums.as<double>() + slot * ws.sums.dim(1)};
  return it.run(iterations);
}

/// Calls f(element of the tensor, element of the wide matrix) for the rows [begin, end) of the
/// block.
template <class F>
void for_rows(const Block& b, std::int64_t begin, std::int64_t end, F&& f) {
  for (std::int64_t r = begin; r < end; ++r) {
    const std::int64_t at = b.first + r * b.cols;
    if (b.flip()) {
      for (std::int64_t c = 0; c < b.cols; ++c)
        f(at + c, r + c * b.rows);
      continue;
    }
#pragma omp simd
    for (std::int64_t c = 0; c < b.cols; ++c)
      f(at + c, r * b.cols + c);
  }
}

template <class A>
struct WholeMaster {
  A* w;
  explicit WholeMaster(const MuonUpdate& op) : w(op.w.as<A>()) {}
  A get(std::int64_t i) const { return w[i]; }
  void set(std::int64_t i, A value) const { w[i] = value; }
};
struct SplitMaster {
  bf16* weight;
  std::uint16_t* remainder;
  explicit SplitMaster(const MuonUpdate& op)
      : weight(op.w_compute.as<bf16>()), remainder(op.remainder.as<std::uint16_t>()) {}
  float get(std::int64_t i) const { return join_float(weight[i], remainder[i]); }
  void set(std::int64_t i, float value) const { split_float(value, weight[i], remainder[i]); }
};

// The fused multiply-add of the weight is written out: both forms of a master get the same bits.
template <class A, class G, class C, class Master = WholeMaster<A>>
struct Update {
  const MuonUpdate& op;
  Master master{op};
  A* momentum = op.momentum.as<A>();
  C* compute = op.is_split() ? nullptr : op.w_compute.as<C>();
  const G* dw = op.dw.as<G>();
  double lr = 0, decay = 0;
  A clip = 1;

  explicit Update(const MuonUpdate& o) : op(o) {
    const A* s = op.scalars.as<A>();
    const auto slot = [s](StepScalar i) { return static_cast<double>(s[index_of(i)]); };
    lr = slot(StepScalar::learning_rate) * op.lr_scale;
    decay = 1.0 - lr * op.weight_decay * slot(StepScalar::weight_decay_scale);
    clip = s[index_of(StepScalar::clip_factor)];
  }

  void run(const Block& b, const MatrixLoop& loop, const Workspace& ws, std::int64_t slot) const {
    const auto mu = static_cast<A>(op.mu);
    A* x = ws.x.as<A>() + slot * ws.x.dim(1);
    loop(b.rows, [&](std::int64_t begin, std::int64_t end) {
      for_rows(b, begin, end, [&](std::int64_t i, std::int64_t wide) {
        const A g = clip * static_cast<A>(dw[i]);
        const A m = mu * momentum[i] + g;
        momentum[i] = m;
        x[wide] = op.nesterov ? g + mu * m : m;
      });
    });
    const A* direction = iterate<A>(b, loop, ws, slot, op.num_iterations);
    const auto step = static_cast<A>(lr * 0.2 * std::sqrt(static_cast<double>(b.n())));
    const auto keep = static_cast<A>(decay);
    loop(b.rows, [&](std::int64_t begin, std::int64_t end) {
      for_rows(b, begin, end, [&](std::int64_t i, std::int64_t wide) {
        master.set(i, std::fma(-step, direction[wide], keep * master.get(i)));
      });
      if (compute == nullptr) return;
      const std::int64_t from = b.first + begin * b.cols, to = b.first + end * b.cols;
#pragma omp simd
      for (std::int64_t i = from; i < to; ++i)
        compute[i] = C(master.get(i));
    });
  }
};

template <class A>
void update(ThreadPool& pool,
            const MuonUpdate& op,
            const std::vector<Block>& blocks,
            const Workspace& ws) {
  if (op.scalars.as<A>()[index_of(StepScalar::skip)] != A(0)) return;
  const auto run_all = [&](const auto& u) {
    for_each_block(pool, blocks, [&](const Block& b, const MatrixLoop& loop, std::int64_t slot) {
      u.run(b, loop, ws, slot);
    });
  };
  const auto with_types = [&]<class G, class C>(TypeTag<G>, TypeTag<C>) {
    run_all(Update<A, G, C>(op));
  };
  const auto with_gradient = [&]<class G>(TypeTag<G> g) {
    if constexpr (std::is_same_v<A, float>) {
      if (op.is_split()) return run_all(Update<float, G, bf16, SplitMaster>(op));
    }
    if (!op.w_compute.empty() && op.w_compute.dtype() == DType::bf16)
      return with_types(g, TypeTag<bf16>{});
    with_types(g, TypeTag<A>{});
  };
  if (op.dw.dtype() == DType::bf16) return with_gradient(TypeTag<bf16>{});
  with_gradient(TypeTag<A>{});
}

template <class A>
void orthogonalise(ThreadPool& pool,
                   const NewtonSchulz& op,
                   const std::vector<Block>& blocks,
                   const Workspace& ws) {
  A* x = op.x.as<A>();
  for_each_block(pool, blocks, [&](const Block& b, const MatrixLoop& loop, std::int64_t slot) {
    A* wide_x = ws.x.as<A>() + slot * ws.x.dim(1);
    loop(b.rows, [&](std::int64_t begin, std::int64_t end) {
      for_rows(b, begin, end, [&](std::int64_t i, std::int64_t wide) { wide_x[wide] = x[i]; });
    });
    const A* result = iterate<A>(b, loop, ws, slot, op.num_iterations);
    loop(b.rows, [&](std::int64_t begin, std::int64_t end) {
      for_rows(b, begin, end, [&](std::int64_t i, std::int64_t wide) { x[i] = result[wide]; });
    });
  });
}

}  // namespace

void launch(CpuContext& context, const MuonUpdate& op) {
  const Arena::Mark mark(context.scratch);
  const auto blocks = list_blocks(op.batch(), op.rows(), op.cols(), op.blocks);
  const Workspace ws = take_workspace(context.scratch, blocks, op.master_dtype());
  context.stream.enqueue([op, blocks, ws, &pool = context.pool] {
    cpu::dispatch_stats(op.master_dtype(),
                        [&]<class A>(TypeTag<A>) { update<A>(pool, op, blocks, ws); });
  });
}

void launch(CpuContext& context, const NewtonSchulz& op) {
  const Arena::Mark mark(context.scratch);
  const auto blocks = list_blocks(op.batch(), op.rows(), op.cols(), op.blocks);
  const Workspace ws = take_workspace(context.scratch, blocks, op.x.dtype());
  context.stream.enqueue([op, blocks, ws, &pool = context.pool] {
    cpu::dispatch_stats(op.x.dtype(),
                        [&]<class A>(TypeTag<A>) { orthogonalise<A>(pool, op, blocks, ws); });
  });
}

}  // namespace moesaic
