// The scan over the chunks of a document (kda_chunk_plain.cuh): W = R - N diag(beta) R with R = V - Kh S, O = Qh S + P U,
// S = diag(e^G_C) S + Kb^T U.
#include "kernels/cuda/kda_chunk_plain_scan.cuh"

namespace moesaic::cuda::kda {
namespace {

template <class A>
struct ForwardMemory {
  using W = Plain<A>;
  A *k_hat, *q_hat;  // [kChannels][kLd], channel by token
  A* k_end;          // [kMaxChunk][kLd], token by channel; in the place of k_hat
  A* square;         // [kMaxChunk][kLd]: N^T, then P^T
  A* rows;           // [kMaxChunk][kWidth]: diag(beta) R, then U
  A *totals, *total, *beta, *state;

  __device__ explicit ForwardMemory(A* base)
      : k_hat(base),
        q_hat(k_hat + kChannels * W::kLd),
        k_end(base),
        square(q_hat + kChannels * W::kLd),
        rows(square + kMaxChunk * W::kLd),
        totals(rows + kMaxChunk * W::kWidth),
        total(totals + kTiles * kChannels),
        beta(total + kChannels),
        state(beta + kMaxChunk) {}
  static std::size_t bytes(std::int64_t K) {
    const std::int64_t fixed =
        3 * kMaxChunk * W::kLd + kMaxChunk * W::kWidth + kTiles * kChannels + kChannels + kMaxChunk;
    return static_cast<std::size_t>(fixed +
                                    (state_is_shared<A>(K) ? state_rows<A>(K) * W::kWidth : 0)) *
           sizeof(A);
  }
};

/// One block of threads' walk along its document.
template <class T, class A>
class ForwardWalk {
  using W = Plain<A>;

 public:
  __device__ ForwardWalk(const ForwardScan<T, A>& scan, const ForwardMemory<A>& memory, A* state)
      : scan_(scan),
        in_(scan.in),
        m_(memory),
        at_(in_.heads, in_.V),
        state_(state),
        r_(static_cast<int>(threadIdx.x) / 8 * 2),
        column_(static_cast<int>(threadIdx.x) % 8 * W::kVec),
        warp_end_((static_cast<int>(threadIdx.x) / kWarp + 1) * 8) {}

  __device__ void run(const ChunkTable& chunks) {
    const auto state_of = [&](const auto& states) {
      return states.has(at_.document)
                 ? states.base + at_.state_at(states.index(at_.document), in_.heads, in_.K, in_.V)
                 : nullptr;
    };
    load_state(state_, state_of(scan_.s0), in_.K, in_.V, at_.columns);
    const std::int64_t first = chunks.first_slot(at_.document),
                       count = chunks.num_chunks(at_.document);
    for (std::int64_t i = 0; i < count; ++i)
      chunk(first + i, chunks.at(first + i));
    __syncthreads();
    if (scan_.s_final.has(at_.document))
      save_state(state_of(scan_.s_final), state_, in_.K, in_.V, at_.columns);
  }

 private:
  __device__ void chunk(std::int64_t slot, const KdaChunkSpan& span) {
    const int tokens = span.tokens, rows = rows_of(tokens);
    const std::int64_t row0 = span.first * in_.heads + at_.h, v_stride = in_.heads * in_.V;
    const bool active = r_ < rows;
    __syncthreads();  // the state, and all of the chunk before
    if (threadIdx.x < kMaxChunk) {
      const int r = static_cast<int>(threadIdx.x);
      m_.beta[r] = r < tokens ? in_.beta[row0 + r * in_.heads] : A(0);
    }
    if (scan_.records.full) {
      save_state(scan_.records.s(slot, at_.h) + at_.v0, state_, in_.K, in_.V, at_.columns);
    }
    Block<A> read, out, w, u;
    clear<A>(read);
    clear<A>(out);
    read_state(row0, tokens, active, read, out);
    read_rows<A>(w, in_.v + row0 * in_.V + at_.v0, v_stride, r_, column_, tokens, at_.columns);
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < W::kVec; ++j)
        w[i][j] -= read[i][j];
    }
    correct(slot, rows, active, w, u);
    if (scan_.records.full && active) {
      write_rows(scan_.records.w(slot, at_.h) + at_.v0, in_.V, w, r_, column_, rows, at_.columns);
    }
    if (scan_.o != nullptr) {
      load_square(scan_.records.p(slot, at_.h), rows);
      __syncthreads();
      if (active) {
        multiply_add<A>(out, m_.square + r_, W::kLd, m_.rows + column_, W::kWidth, 0, warp_end_);
        write_rows(
            scan_.o + row0 * in_.V + at_.v0, v_stride, out, r_, column_, tokens, at_.columns);
      }
    }
    advance(row0, tokens, rows);
  }

  /// read = Kh S; out = Qh S if the output is wanted.
  __device__ void read_state(
      std::int64_t row0, int tokens, bool active, Block<A>& read, Block<A>& out) {
    for (std::int64_t c0 = 0; c0 < in_.K; c0 += kChannels) {
      ChannelLoader<T, A> loader;
      loader.template begin<true>(m_.totals, in_, row0, c0, tokens);
      __syncthreads();
      loader.finish(m_.totals);
      A decay[kTile];
      loader.from_chunk_start(decay);
      scale_column(loader.column.k, decay);
      scale_column(loader.column.q, decay);
      const int at = loader.c * W::kLd + loader.t * kTile;
      store_column(m_.k_hat + at, loader.column.k);
      store_column(m_.q_hat + at, loader.column.q);
      __syncthreads();
      const A* s = state_ + c0 * W::kWidth + column_;
      const int depth = in_.K - c0 < kChannels ? static_cast<int>(in_.K - c0) : kChannels;
      if (active && scan_.o != nullptr) {
        multiply_add_two<A>(
            read, out, m_.k_hat + r_, m_.q_hat + r_, W::kLd, s, W::kWidth, 0, depth);
      } else if (active) {
        multiply_add<A>(read, m_.k_hat + r_, W::kLd, s, W::kWidth, 0, depth);
      }
      __syncthreads();
    }
  }

  /// w: R to W; leaves U in m_.rows.
  __device__ void correct(std::int64_t slot, int rows, bool active, Block<A>& w, Block<A>& u) {
    if (active) {
      scale_rows<A>(u, w, m_.beta + r_);
      store_block<A>(m_.rows + r_ * W::kWidth + column_, W::kWidth, u);
    }
    load_square(scan_.records.n(slot, at_.h), rows);
    __syncthreads();
    if (active) {
      Block<A> sum;
      clear<A>(sum);
      multiply_add<A>(sum, m_.square + r_, W::kLd, m_.rows + column_, W::kWidth, 0, warp_end_);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < W::kVec; ++j)
          w[i][j] -= sum[i][j];
      }
      scale_rows<A>(u, w, m_.beta + r_);
    }
    __syncthreads();
    if (active) store_block<A>(m_.rows + r_ * W::kWidth + column_, W::kWidth, u);
  }

  __device__ void advance(std::int64_t row0, int tokens, int rows) {
    for (std::int64_t c0 = 0; c0 < in_.K; c0 += kChannels) {
      ChannelLoader<T, A> loader;
      loader.template begin<false>(m_.totals, in_, row0, c0, tokens);
      __syncthreads();
      loader.finish(m_.totals);
      A decay[kTile];
      loader.to_chunk_end(decay);
      scale_column(loader.column.k, decay);
      store_strided(m_.k_end + loader.t * kTile * W::kLd + loader.c, W::kLd, loader.column.k);
      if (loader.t == 0) m_.total[loader.c] = loader.total;
      __syncthreads();
      Block<A> sum;
      clear<A>(sum);
      multiply_add<A>(sum, m_.k_end + r_, W::kLd, m_.rows + column_, W::kWidth, 0, rows);
      advance_state<A>(state_, c0, m_.total, r_, column_, sum);
      __syncthreads();
    }
  }

  /// m_.square[i][r] = in[r][i].
  __device__ void load_square(const A* in, int rows) {
    const int C = scan_.records.C;
    move_transposed<kMaxChunk, kMaxChunk, 8>(
        [&](int r, int i) { return r < rows && i < rows ? in[r * C + i] : A(0); },
        [&](int r, int i, A x) { m_.square[i * W::kLd + r] = x; });
  }

  const ForwardScan<T, A>& scan_;
  const Operands<T, A>& in_;
  const ForwardMemory<A>& m_;
  ScanPlace<A> at_;
  A* state_;
  int r_, column_;  // the thread's part of 64 x kWidth blocks
  int warp_end_;    // rows of the warp end here: a row needs no column beyond
};

template <class T, class A>
__global__ void __launch_bounds__(kThreads, sizeof(A) == 4 ? 2 : 1)
    forward_kernel(ChunkTable chunks, ForwardScan<T, A> scan) {
  extern __shared__ __align__(16) unsigned char shared[];
  const ForwardMemory<A> memory(reinterpret_cast<A*>(shared));
  A* state = memory.state;
  if (scan.state != nullptr)
    state = scan.state + blockIdx.x * state_rows<A>(scan.in.K) * Plain<A>::kWidth;
  ForwardWalk<T, A>(scan, memory, state).run(chunks);
}

}  // namespace

template <class T, class A>
void plain_forward(const CudaContext& context,
                   const ChunkTable& chunks,
                   const ForwardScan<T, A>& scan) {
  start(context,
        "kernel kda_chunk: forward scan",
        forward_kernel<T, A>,
        scan_blocks<A>(chunks, scan.in.heads, scan.in.V),
        kThreads,
        ForwardMemory<A>::bytes(scan.in.K),
        chunks,
        scan);
}

template void plain_forward(const CudaContext&,
                            const ChunkTable&,
                            const ForwardScan<double, double>&);
template void plain_forward(const CudaContext&,
                            const ChunkTable&,
                            const ForwardScan<float, float>&);
template void plain_forward(const CudaContext&,
                            const ChunkTable&,
                            const ForwardScan<__nv_bfloat16, float>&);

}  // namespace moesaic::cuda::kda
