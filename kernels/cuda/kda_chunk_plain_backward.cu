// The scan from the last chunk of a document to the first (kda_chunk_plain.cuh): dU = P^T dO + Kb dS', Y = dU - N^T diag(beta) dU,
// dR = diag(beta) Y, dS = diag(e^G_C) dS' + Qh^T dO - Kh^T dR. Keeps Y and the state's gradient after every chunk.
#include "kernels/cuda/kda_chunk_plain_scan.cuh"

namespace moesaic::cuda::kda {
namespace {

template <class A>
struct BackwardMemory {
  using W = Plain<A>;
  A* k_end;          // [kChannels][kLd], channel by token
  A *q_hat, *k_hat;  // [kMaxChunk][kLd], token by channel; q_hat in the place of k_end
  A* square;         // [kMaxChunk][kLd]: P, then N
  A* d_o;            // [kMaxChunk][kWidth]
  A* rows;           // [kMaxChunk][kWidth]: diag(beta) dU, then dR
  A *totals, *total, *beta, *state;

  __device__ explicit BackwardMemory(A* base)
      : k_end(base),
        q_hat(base),
        k_hat(q_hat + kMaxChunk * W::kLd),
        square(k_hat + kMaxChunk * W::kLd),
        d_o(square + kMaxChunk * W::kLd),
        rows(d_o + kMaxChunk * W::kWidth),
        totals(rows + kMaxChunk * W::kWidth),
        total(totals + kTiles * kChannels),
        beta(total + kChannels),
        state(beta + kMaxChunk) {}
  static std::size_t bytes(std::int64_t K) {
    const std::int64_t fixed = 3 * kMaxChunk * W::kLd + 2 * kMaxChunk * W::kWidth +
                               kTiles * kChannels + kChannels + kMaxChunk;
    return static_cast<std::size_t>(fixed +
                                    (state_is_shared<A>(K) ? state_rows<A>(K) * W::kWidth : 0)) *
           sizeof(A);
  }
};

/// One block of threads' walk along its document.
template <class T, class A>
class BackwardWalk {
  using W = Plain<A>;

 public:
  __device__ BackwardWalk(const BackwardScan<T, A>& scan, const BackwardMemory<A>& memory, A* state)
      : scan_(scan),
        in_(scan.in),
        m_(memory),
        at_(in_.heads, in_.V),
        state_(state),
        r_(static_cast<int>(threadIdx.x) / 8 * 2),
        column_(static_cast<int>(threadIdx.x) % 8 * W::kVec),
        warp_begin_(static_cast<int>(threadIdx.x) / kWarp * 8) {}

  __device__ void run(const ChunkTable& chunks) {
    const auto state_of = [&](const auto& states) {
      return states.has(at_.document)
                 ? states.base + at_.state_at(states.index(at_.document), in_.heads, in_.K, in_.V)
                 : nullptr;
    };
    load_state(state_, state_of(scan_.ds_final), in_.K, in_.V, at_.columns);
    const std::int64_t first = chunks.first_slot(at_.document);
    for (std::int64_t i = chunks.num_chunks(at_.document) - 1; i >= 0; --i)
      chunk(first + i, chunks.at(first + i));
    __syncthreads();
    if (scan_.ds0.has(at_.document))
      save_state(state_of(scan_.ds0), state_, in_.K, in_.V, at_.columns);
  }

 private:
  __device__ void chunk(std::int64_t slot, const KdaChunkSpan& span) {
    const int tokens = span.tokens, rows = rows_of(tokens);
    const std::int64_t row0 = span.first * in_.heads + at_.h, v_stride = in_.heads * in_.V;
    const bool active = r_ < rows;
    __syncthreads();  // the state, and all of the chunk after
    if (threadIdx.x < kMaxChunk) {
      const int r = static_cast<int>(threadIdx.x);
      m_.beta[r] = r < tokens ? in_.beta[row0 + r * in_.heads] : A(0);
    }
    save_state(scan_.ds_exit + at_.state_at(slot, in_.heads, in_.K, in_.V),
               state_,
               in_.K,
               in_.V,
               at_.columns);
    Block<A> du, y;
    read_rows<A>(du, scan_.d_o + row0 * in_.V + at_.v0, v_stride, r_, column_, tokens, at_.columns);
    store_block<A>(m_.d_o + r_ * W::kWidth + column_, W::kWidth, du);
    load_square(scan_.records.p(slot, at_.h), rows);
    __syncthreads();
    clear<A>(du);
    if (active)
      multiply_add<A>(du, m_.square + r_, W::kLd, m_.d_o + column_, W::kWidth, warp_begin_, rows);
    add_state(row0, tokens, active, du);
    correct(slot, rows, active, du, y);
    if (active)
      write_rows(scan_.y + row0 * in_.V + at_.v0, v_stride, y, r_, column_, tokens, at_.columns);
    advance(row0, tokens, rows);
  }

  /// du += Kb dS'.
  __device__ void add_state(std::int64_t row0, int tokens, bool active, Block<A>& du) {
    for (std::int64_t c0 = 0; c0 < in_.K; c0 += kChannels) {
      ChannelLoader<T, A> loader;
      loader.template begin<false>(m_.totals, in_, row0, c0, tokens);
      __syncthreads();
      loader.finish(m_.totals);
      A decay[kTile];
      loader.to_chunk_end(decay);
      scale_column(loader.column.k, decay);
      store_column(m_.k_end + loader.c * W::kLd + loader.t * kTile, loader.column.k);
      __syncthreads();
      const int depth = in_.K - c0 < kChannels ? static_cast<int>(in_.K - c0) : kChannels;
      if (active) {
        multiply_add<A>(
            du, m_.k_end + r_, W::kLd, state_ + c0 * W::kWidth + column_, W::kWidth, 0, depth);
      }
      __syncthreads();
    }
  }

  /// Y from dU; leaves dR in m_.rows.
  __device__ void correct(
      std::int64_t slot, int rows, bool active, const Block<A>& du, Block<A>& y) {
    Block<A> scaled;
    if (active) {
      scale_rows<A>(scaled, du, m_.beta + r_);
      store_block<A>(m_.rows + r_ * W::kWidth + column_, W::kWidth, scaled);
    }
    load_square(scan_.records.n(slot, at_.h), rows);
    __syncthreads();
    if (active) {
      Block<A> sum;
      clear<A>(sum);
      multiply_add<A>(sum, m_.square + r_, W::kLd, m_.rows + column_, W::kWidth, warp_begin_, rows);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < W::kVec; ++j)
          y[i][j] = du[i][j] - sum[i][j];
      }
      scale_rows<A>(scaled, y, m_.beta + r_);
    }
    __syncthreads();
    if (active) store_block<A>(m_.rows + r_ * W::kWidth + column_, W::kWidth, scaled);
  }

  __device__ void advance(std::int64_t row0, int tokens, int rows) {
    for (std::int64_t c0 = 0; c0 < in_.K; c0 += kChannels) {
      ChannelLoader<T, A> loader;
      loader.template begin<true>(m_.totals, in_, row0, c0, tokens);
      __syncthreads();
      loader.finish(m_.totals);
      A decay[kTile];
      loader.from_chunk_start(decay);
      scale_column(loader.column.q, decay);
      scale_column(loader.column.k, decay);
#pragma unroll
      for (int j = 0; j < kTile; ++j)
        loader.column.k[j] = -loader.column.k[j];
      const int at = loader.t * kTile * W::kLd + loader.c;
      store_strided(m_.q_hat + at, W::kLd, loader.column.q);
      store_strided(m_.k_hat + at, W::kLd, loader.column.k);
      if (loader.t == 0) m_.total[loader.c] = loader.total;
      __syncthreads();
      Block<A> sum;
      clear<A>(sum);
      multiply_add<A>(sum, m_.q_hat + r_, W::kLd, m_.d_o + column_, W::kWidth, 0, rows);
      multiply_add<A>(sum, m_.k_hat + r_, W::kLd, m_.rows + column_, W::kWidth, 0, rows);
      advance_state<A>(state_, c0, m_.total, r_, column_, sum);
      __syncthreads();
    }
  }

  __device__ void load_square(const A* in, int rows) {
    const int C = scan_.records.C;
    move_transposed<kMaxChunk, kMaxChunk, 8>(
        [&](int r, int i) { return r < rows && i < rows ? in[r * C + i] : A(0); },
        [&](int r, int i, A x) { m_.square[r * W::kLd + i] = x; });
  }

  const BackwardScan<T, A>& scan_;
  const Operands<T, A>& in_;
  const BackwardMemory<A>& m_;
  ScanPlace<A> at_;
  A* state_;
  int r_, column_;  // the thread's part of 64 x kWidth blocks
  int warp_begin_;  // rows of the warp begin here: a row needs no later token's column before
};

template <class T, class A>
__global__ void __launch_bounds__(kThreads, sizeof(A) == 4 ? 2 : 1)
    backward_kernel(ChunkTable chunks, BackwardScan<T, A> scan) {
  extern __shared__ __align__(16) unsigned char shared[];
  const BackwardMemory<A> memory(reinterpret_cast<A*>(shared));
  A* state = memory.state;
  if (scan.state != nullptr)
    state = scan.state + blockIdx.x * state_rows<A>(scan.in.K) * Plain<A>::kWidth;
  BackwardWalk<T, A>(scan, memory, state).run(chunks);
}

}  // namespace

template <class T, class A>
void plain_backward(const CudaContext& context,
                    const ChunkTable& chunks,
                    const BackwardScan<T, A>& scan) {
  start(context,
        "kernel kda_chunk: backward scan",
        backward_kernel<T, A>,
        scan_blocks<A>(chunks, scan.in.heads, scan.in.V),
        kThreads,
        BackwardMemory<A>::bytes(scan.in.K),
        chunks,
        scan);
}

template void plain_backward(const CudaContext&,
                             const ChunkTable&,
                             const BackwardScan<double, double>&);
template void plain_backward(const CudaContext&,
                             const ChunkTable&,
                             const BackwardScan<float, float>&);
template void plain_backward(const CudaContext&,
                             const ChunkTable&,
                             const BackwardScan<__nv_bfloat16, float>&);

}  // namespace moesaic::cuda::kda
