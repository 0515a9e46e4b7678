// The gradients of one chunk and head (SPEC 1.7), from what the scans kept. First dP, dA and dbeta, then, some channels at
// a time: the parts of dq, dk that come through the state, the sums over pairs of tokens of the chunk by Horner's rule in
// the decays, and the decays' own gradients as a sum from each token to the chunk's end.
#include "kernels/cuda/kda_chunk_plain.cuh"

namespace moesaic::cuda::kda {
namespace {

template <class A>
struct GradientMemory {
  using W = Plain<A>;
  static constexpr int kPairs = kMaxChunk * W::kLd;
  static constexpr int kGradient = kMaxChunk * W::kLdWidth;
  static constexpr int kTokens = W::kWidth * W::kLd;       // [value column][token]
  static constexpr int kStates = W::kWidth * W::kLdWidth;  // [value column][channel]
  static constexpr int kOperand = kMaxChunk * W::kWidth;   // [token][channel]
  static constexpr int kShared =
      3 * kTokens + 2 * kStates > 3 * kOperand ? 3 * kTokens + 2 * kStates : 3 * kOperand;
  static constexpr int kParts = kThreads / W::kWidth;

  A *dp, *da;                // [token r][token i]
  A *dq, *krow, *kcol;       // [token][channel]
  A *d_o, *dr, *u, *s, *ds;  // value columns at hand
  A *q, *k, *alpha;          // channels at hand; in the same place, afterwards
  A* totals;                 // [kTiles][kWidth] decays of tiles
  A* sums;                   // [kParts][kWidth], kParts >= kTiles
  A* d_total;                // [kWidth]
  A* beta;                   // [kMaxChunk]

  __device__ explicit GradientMemory(A* base)
      : dp(base),
        da(dp + kPairs),
        dq(da + kPairs),
        krow(dq + kGradient),
        kcol(krow + kGradient),
        d_o(kcol + kGradient),
        dr(d_o + kTokens),
        u(dr + kTokens),
        s(u + kTokens),
        ds(s + kStates),
        q(d_o),
        k(q + kOperand),
        alpha(k + kOperand),
        totals(d_o + kShared),
        sums(totals + kTiles * W::kWidth),
        d_total(sums + kThreads),
        beta(d_total + W::kWidth) {}
  static constexpr std::size_t kBytes = (2 * kPairs + 3 * kGradient + kShared + kTiles * W::kWidth +
                                         kThreads + W::kWidth + kMaxChunk) *
                                        sizeof(A);
};

template <class T, class A>
class ChunkGradients {
  using W = Plain<A>;
  static constexpr int kGroups = kThreads / W::kWidth;  // of rows, in sums over pairs
  static constexpr int kGroupRows = kMaxChunk / kGroups;

 public:
  __device__ ChunkGradients(const Gradients<T, A>& io,
                            const GradientMemory<A>& memory,
                            std::int64_t slot,
                            std::int64_t h,
                            const KdaChunkSpan& span)
      : io_(io),
        in_(io.in),
        m_(memory),
        tokens_(span.tokens),
        rows_(rows_of(span.tokens)),
        row0_(span.first * in_.heads + h),
        k_stride_(in_.heads * in_.K),
        v_stride_(in_.heads * in_.V),
        s_(io.records.s(slot, h)),
        w_(io.records.w(slot, h)),
        ds_(io.ds_exit + (slot * in_.heads + h) * in_.K * in_.V),
        r_(static_cast<int>(threadIdx.x) / 8 * 2),
        column_(static_cast<int>(threadIdx.x) % 8 * W::kVec),
        c_(static_cast<int>(threadIdx.x) % W::kWidth),
        part_(static_cast<int>(threadIdx.x) / W::kWidth) {}

  __device__ void run() {
    for (int r = static_cast<int>(threadIdx.x); r < kMaxChunk; r += kThreads)
      m_.beta[r] = r < tokens_ ? in_.beta[row0_ + r * in_.heads] : A(0);
    beta_gradient();
    __syncthreads();
    pair_gradients();
    for (std::int64_t c0 = 0; c0 < in_.K; c0 += W::kWidth) {
      through_the_state(c0);
      scale_to_tokens(c0);
      add_pairs();
      __syncthreads();
      decay_gradient(c0);
      __syncthreads();
    }
    value_gradient();
  }

 private:
  /// dbeta_r = <Y_r, W_r>, a warp per row.
  __device__ void beta_gradient() {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    for (int r = static_cast<int>(threadIdx.x) / kWarp; r < tokens_; r += kThreads / kWarp) {
      const A* y = io_.y + row0_ * in_.V + r * v_stride_;
      A dot = 0;
      for (std::int64_t j = lane; j < in_.V; j += kWarp)
        dot += y[j] * w_[r * in_.V + j];
      dot = warp_sum(dot);
      if (lane == 0) io_.dbeta[row0_ + r * in_.heads] = dot;
    }
  }

  /// dO, dR and U of value columns from v0 on; zeros beyond the chunk's tokens and the head's columns.
  __device__ void load_values(std::int64_t v0) {
    const std::int64_t at = row0_ * in_.V + v0;
    const int columns = static_cast<int>(min(in_.V - v0, std::int64_t{W::kWidth}));
    struct Values {
      A d_o, dr, u;
    };
    move_transposed<kMaxChunk, W::kWidth, 4>(
        [&](int r, int j) {
          if (r >= tokens_ || j >= columns) return Values{};
          return Values{widen<A>(io_.d_o[at + r * v_stride_ + j]),
                        m_.beta[r] * io_.y[at + r * v_stride_ + j],
                        m_.beta[r] * w_[r * in_.V + v0 + j]};
        },
        [&](int r, int j, const Values& x) {
          const int to = j * W::kLd + r;
          m_.d_o[to] = x.d_o;
          m_.dr[to] = x.dr;
          m_.u[to] = x.u;
        });
  }

  /// dP = lower(dO U^T), dA = -strictlower(dR U^T); zeros elsewhere.
  __device__ void pair_gradients() {
    constexpr int kBlocks = kMaxChunk / W::kWidth;
    Block<A> dp[kBlocks], da[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      clear<A>(dp[b]);
      clear<A>(da[b]);
    }
    const int last_row = r_ / 8 * 8 + 7;  // of the warp
    for (std::int64_t v0 = 0; v0 < in_.V; v0 += W::kWidth) {
      load_values(v0);
      __syncthreads();
      const int depth = static_cast<int>(min(in_.V - v0, std::int64_t{W::kWidth}));
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (r_ >= rows_ || b * W::kWidth > last_row) continue;
        const A* u = m_.u + b * W::kWidth + column_;
        multiply_add_two<A>(dp[b], da[b], m_.d_o + r_, m_.dr + r_, W::kLd, u, W::kLd, 0, depth);
      }
      __syncthreads();
    }
    if (r_ >= rows_) return;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
#pragma unroll
        for (int y = 0; y < W::kVec; ++y) {
          const int r = r_ + x, i = b * W::kWidth + column_ + y;
          dp[b][x][y] = i <= r ? dp[b][x][y] : A(0);
          da[b][x][y] = i < r ? -da[b][x][y] : A(0);
        }
      }
      const int at = r_ * W::kLd + b * W::kWidth + column_;
      store_block<A>(m_.dp + at, W::kLd, dp[b]);
      store_block<A>(m_.da + at, W::kLd, da[b]);
    }
  }

  /// dQh = dO S^T, dKh = -dR S^T, dKb = U dS'^T into dq, krow, kcol; partial sums of <S_c, dS'_c> into sums; then the
  /// channels' operands.
  __device__ void through_the_state(std::int64_t c0) {
    Block<A> dq, krow, kcol;
    clear<A>(dq);
    clear<A>(krow);
    clear<A>(kcol);
    A dot = 0;
    for (std::int64_t v0 = 0; v0 < in_.V; v0 += W::kWidth) {
      load_values(v0);
      struct States {
        A s, ds;
      };
      move_transposed<W::kWidth, W::kWidth, W::kWidth * W::kWidth / kThreads>(
          [&](int c, int j) {
            if (c0 + c >= in_.K || v0 + j >= in_.V) return States{};
            const std::int64_t at = (c0 + c) * in_.V + v0 + j;
            return States{s_[at], ds_[at]};
          },
          [&](int c, int j, const States& x) {
            m_.s[j * W::kLdWidth + c] = x.s;
            m_.ds[j * W::kLdWidth + c] = x.ds;
          });
      __syncthreads();
      const int depth = static_cast<int>(min(in_.V - v0, std::int64_t{W::kWidth}));
      if (r_ < rows_) {
        multiply_add_two<A>(
            dq, krow, m_.d_o + r_, m_.dr + r_, W::kLd, m_.s + column_, W::kLdWidth, 0, depth);
        multiply_add<A>(kcol, m_.u + r_, W::kLd, m_.ds + column_, W::kLdWidth, 0, depth);
      }
      for (int j = part_; j < depth; j += GradientMemory<A>::kParts)
        dot += m_.s[j * W::kLdWidth + c_] * m_.ds[j * W::kLdWidth + c_];
      __syncthreads();
    }
#pragma unroll
    for (int x = 0; x < 2; ++x) {
#pragma unroll
      for (int y = 0; y < W::kVec; ++y)
        krow[x][y] = -krow[x][y];
    }
    const int at = r_ * W::kLdWidth + column_;
    if (r_ < rows_) {
      store_block<A>(m_.dq + at, W::kLdWidth, dq);
      store_block<A>(m_.krow + at, W::kLdWidth, krow);
      store_block<A>(m_.kcol + at, W::kLdWidth, kcol);
    }
    m_.sums[part_ * W::kWidth + c_] = dot;
  }

  /// Loads q, k and the decays; dq, krow *= decay from the chunk's start, kcol *= decay to its end; d_total = the gradient
  /// of the log of the whole chunk's decay.
  __device__ void scale_to_tokens(std::int64_t c0) {
    const bool mine = part_ * kTile < rows_;  // a tile of one channel
    TileColumn<T, A> column;
    if (mine) {
      column.template read<true>(
          in_, row0_ + part_ * kTile * in_.heads, c0 + c_, tokens_ - part_ * kTile);
      const int at = part_ * kTile * W::kWidth + c_;
      store_strided(m_.q + at, W::kWidth, column.q);
      store_strided(m_.k + at, W::kWidth, column.k);
      store_strided(m_.alpha + at, W::kWidth, column.alpha);
      m_.totals[part_ * W::kWidth + c_] = column.total();
    }
    __syncthreads();
    const int tiles = rows_ / kTile;
    A sum = 0;
    if (part_ == 0) {
      for (int i = 0; i < GradientMemory<A>::kParts; ++i)
        sum += m_.sums[i * W::kWidth + c_];
      m_.d_total[c_] = sum * decay_between(m_.totals, W::kWidth, c_, 0, tiles);
    }
    A kept = 0;
    if (mine) {
      const A before = decay_between(m_.totals, W::kWidth, c_, 0, part_);
      const A after = decay_between(m_.totals, W::kWidth, c_, part_ + 1, tiles);
      A first[kTile], rest[kTile];
      column.from_start(first);
      column.to_end(rest);
#pragma unroll
      for (int j = 0; j < kTile; ++j) {
        const int at = (part_ * kTile + j) * W::kLdWidth + c_;
        m_.dq[at] *= first[j] * before;
        m_.krow[at] *= first[j] * before;
        const A end = m_.kcol[at] * (rest[j] * after);
        m_.kcol[at] = end;
        kept += column.k[j] * end;
      }
    }
    __syncthreads();
    if (mine) m_.sums[part_ * W::kWidth + c_] = kept;
    __syncthreads();
    if (part_ == 0) {
      for (int t = 0; t < tiles; ++t)
        m_.d_total[c_] += m_.sums[t * W::kWidth + c_];
    }
  }

  /// dq_r += sum_{i<r} dP_ri k_i w_ri, krow_r += sum_{i<r} dA_ri k_i w_ri,
  /// kcol_i += sum_{r>i} (dP_ri q_r + dA_ri k_r) w_ri, for kGroupRows neighbouring tokens of one channel.
  __device__ void add_pairs() {
    constexpr int kVec = W::kVec;
    const int own = part_ * kGroupRows;
    if (own >= rows_) return;
    A sum_q[kGroupRows] = {}, sum_k[kGroupRows] = {};
    for (int i0 = 0; i0 < own + kGroupRows; i0 += kVec) {
      A alpha[kVec], k[kVec];
#pragma unroll
      for (int x = 0; x < kVec; ++x) {
        alpha[x] = m_.alpha[(i0 + x) * W::kWidth + c_];
        k[x] = m_.k[(i0 + x) * W::kWidth + c_];
      }
#pragma unroll
      for (int m = 0; m < kGroupRows; ++m) {
        const auto dp = load<kVec>(m_.dp + (own + m) * W::kLd + i0);
        const auto da = load<kVec>(m_.da + (own + m) * W::kLd + i0);
#pragma unroll
        for (int x = 0; x < kVec; ++x) {
          if (i0 + x >= own + m) continue;
          sum_q[m] = sum_q[m] * alpha[x] + dp.v[x] * k[x];
          sum_k[m] = sum_k[m] * alpha[x] + da.v[x] * k[x];
        }
      }
    }
    A sum_c[kGroupRows] = {};
    for (int r = rows_ - 1; r > own; --r) {
      const A alpha = m_.alpha[r * W::kWidth + c_], q = m_.q[r * W::kWidth + c_],
              k = m_.k[r * W::kWidth + c_];
#pragma unroll
      for (int m0 = 0; m0 < kGroupRows; m0 += kVec) {
        const auto dp = load<kVec>(m_.dp + r * W::kLd + own + m0);
        const auto da = load<kVec>(m_.da + r * W::kLd + own + m0);
#pragma unroll
        for (int x = 0; x < kVec; ++x) {
          if (r > own + m0 + x) sum_c[m0 + x] = (sum_c[m0 + x] + dp.v[x] * q + da.v[x] * k) * alpha;
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kGroupRows; ++m) {
      const int at = (own + m) * W::kLdWidth + c_;
      const A alpha = m_.alpha[(own + m) * W::kWidth + c_];
      m_.dq[at] += sum_q[m] * alpha;
      m_.krow[at] += sum_k[m] * alpha;
      m_.kcol[at] += sum_c[m];
    }
  }

  /// dg by a sum from each token to the chunk's end, with the whole chunk's decay at its end. The pair of a token with
  /// itself has no decay, so it joins dq and dk here: under a strong decay it would drown the rest of the sum.
  __device__ void decay_gradient(std::int64_t c0) {
    const bool mine = part_ * kTile < rows_;
    A terms[kTile], sum = 0;
    if (mine) {
#pragma unroll
      for (int j = 0; j < kTile; ++j) {
        const int r = part_ * kTile + j, at = r * W::kLdWidth + c_;
        terms[j] = m_.q[r * W::kWidth + c_] * m_.dq[at] +
                   m_.k[r * W::kWidth + c_] * (m_.krow[at] - m_.kcol[at]);
      }
#pragma unroll
      for (int j = kTile - 1; j >= 0; --j)
        sum += terms[j];
      m_.sums[part_ * W::kWidth + c_] = sum;
    }
    __syncthreads();
    if (!mine || c0 + c_ >= in_.K) return;
    A running = m_.d_total[c_];
    for (int t = rows_ / kTile - 1; t > part_; --t)
      running += m_.sums[t * W::kWidth + c_];
#pragma unroll
    for (int j = kTile - 1; j >= 0; --j) {
      const int r = part_ * kTile + j;
      running += terms[j];
      if (r >= tokens_) continue;
      const std::int64_t to = row0_ * in_.K + r * k_stride_ + c0 + c_;
      const int at = r * W::kLdWidth + c_;
      const A own = m_.dp[r * W::kLd + r], q = m_.q[r * W::kWidth + c_],
              k = m_.k[r * W::kWidth + c_];
      io_.dg[to] = in_.g[to] < kGradientFloor<A> ? A(0) : running;
      io_.dq[to] = round_to<T>(m_.dq[at] + own * k);
      io_.dk[to] = round_to<T>(m_.krow[at] + m_.kcol[at] + own * q);
    }
  }

  /// dV = dR. Last: it may overwrite d_o.
  __device__ void value_gradient() {
    const std::int64_t at = row0_ * in_.V;
    for (std::int64_t e = threadIdx.x; e < tokens_ * in_.V; e += kThreads) {
      const std::int64_t r = e / in_.V, to = at + r * v_stride_ + e % in_.V;
      io_.dv[to] = round_to<T>(m_.beta[r] * io_.y[to]);
    }
  }

  const Gradients<T, A>& io_;
  const Operands<T, A>& in_;
  const GradientMemory<A>& m_;
  int tokens_, rows_;
  std::int64_t row0_, k_stride_, v_stride_;
  const A *s_, *w_, *ds_;
  int r_, column_;  // the thread's part of 64 x kWidth blocks
  int c_, part_;    // its channel, and its tile, rows or share of a sum
};

template <class T, class A>
__global__ void __launch_bounds__(kThreads, sizeof(A) == 4 ? 2 : 1)
    gradients_kernel(ChunkTable chunks, Gradients<T, A> io) {
  extern __shared__ __align__(16) unsigned char shared[];
  const std::int64_t slot = blockIdx.x / io.in.heads, h = blockIdx.x % io.in.heads;
  const auto span = chunks.at(slot);
  if (span.tokens == 0) return;
  const GradientMemory<A> memory(reinterpret_cast<A*>(shared));
  ChunkGradients<T, A>(io, memory, slot, h, span).run();
}

}  // namespace

template <class T, class A>
void plain_gradients(const CudaContext& context,
                     const ChunkTable& chunks,
                     const Gradients<T, A>& gradients) {
  start(context,
        "kernel kda_chunk: gradients",
        gradients_kernel<T, A>,
        chunks.num_slots * gradients.in.heads,
        kThreads,
        GradientMemory<A>::kBytes,
        chunks,
        gradients);
}

template void plain_gradients(const CudaContext&,
                              const ChunkTable&,
                              const Gradients<double, double>&);
template void plain_gradients(const CudaContext&,
                              const ChunkTable&,
                              const Gradients<float, float>&);
template void plain_gradients(const CudaContext&,
                              const ChunkTable&,
                              const Gradients<__nv_bfloat16, float>&);

}  // namespace moesaic::cuda::kda
