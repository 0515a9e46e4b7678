#pragma once
// Short convolutions with 4 taps, what all models have: a thread walks a run of tokens of N neighbouring channels and keeps
// the rows under the taps in registers. Every row is read once, but for the 3 rows before a run (and, backward, the 3 after
// it, whose gradients it computes a second time).
#include "kernels/cuda/short_conv_any.cuh"

namespace moesaic::cuda::conv {

constexpr int kTaps = 4;
constexpr int kColumns = 32;  // a block: this many groups of channels x kLanes runs
constexpr int kLanes = 8;
constexpr int kForwardRun = 32;  // tokens a thread walks
constexpr int kBackwardRun = 32;
constexpr int kBackwardBlock =
    kBackwardRun * kLanes;  // tokens of one partial sum of dw; part of its bits
constexpr int kAhead = 4;   // rows asked for at a time

/// The rows under the taps before the current one, oldest first, and the document they belong to.
template <class T, class A, int N>
struct Window {
  A row[kTaps - 1][N];
  std::int64_t document, begin, end;

  /// Position before token t, which is < T.
  __device__ __forceinline__ void seek(const ConvRows<T>& rows,
                                       const Documents& documents,
                                       std::int64_t t,
                                       std::int64_t c) {
    document = documents.of_token(t);
    begin = documents.begin(document);
    end = documents.end(document);
    fill(rows, t, c);
  }
  /// From the last token of a document to the first of the next one that has tokens; returns their number.
  __device__ __forceinline__ int next_document(const ConvRows<T>& rows,
                                               const Documents& documents,
                                               std::int64_t c) {
    begin = end;
    while (end == begin)
      end = documents.end(++document);
    fill(rows, begin, c);
    return static_cast<int>(end - begin);
  }
  __device__ __forceinline__ void push(const A (&current)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      row[0][i] = row[1][i];
      row[1][i] = row[2][i];
      row[2][i] = current[i];
    }
  }

 private:
  __device__ __forceinline__ void fill(const ConvRows<T>& rows, std::int64_t t, std::int64_t c) {
#pragma unroll
    for (int j = 0; j < kTaps - 1; ++j) {
      const T* p = rows.under_tap(document, begin, t, j);
      Vec<T, N> x{};
      if (p != nullptr) x = load<N>(p + c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        row[j][i] = p == nullptr ? A(0) : widen<A>(x.v[i]);
    }
  }
};

/// w[j][i] = tap j of channel c + i.
template <class A, class W, int N>
__device__ __forceinline__ void load_taps(A (&w)[kTaps][N], const W* weight, std::int64_t c) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    Vec<W, kTaps> taps;
    if constexpr (N > 1) {
      taps = load<kTaps>(weight + (c + i) * kTaps);
    } else {
#pragma unroll
      for (int j = 0; j < kTaps; ++j)
        taps.v[j] = weight[c * kTaps + j];
    }
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
      w[j][i] = widen<A>(taps.v[j]);
  }
}

/// The next kAhead rows of a thread's N channels: asked for before the rows at hand are used, so that enough bytes are on
/// their way.
template <class T, int N>
struct Ahead {
  Vec<T, N> v[kAhead];

  /// Rows from p on, `count` of them exist.
  __device__ __forceinline__ void ask(const T* p, std::int64_t stride, int count) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      v[u] = u < count ? load<N>(p + u * stride) : Vec<T, N>{};
  }
};

template <class A, int N>
__device__ __forceinline__ A
under_taps(const A (&w)[kTaps][N], const A (&rows)[kTaps - 1][N], A current, int i) {
  A pre = w[0][i] * rows[0][i];
  pre += w[1][i] * rows[1][i];
  pre += w[2][i] * rows[2][i];
  return pre + w[3][i] * current;
}

template <class T, class W, class A, int N>
__global__ void __launch_bounds__(kColumns* kLanes, sizeof(A) == 4 ? 3 : 1) forward_kernel(
    T* y, ConvRows<T> rows, const W* weight, Documents documents, std::int64_t tokens, bool silu) {
  const std::int64_t channels = rows.channels;
  const std::int64_t c = (std::int64_t{blockIdx.y} * kColumns + threadIdx.x) * N;
  const std::int64_t t0 = (std::int64_t{blockIdx.x} * kLanes + threadIdx.y) * kForwardRun;
  if (c >= channels || t0 >= tokens) return;
  int left = static_cast<int>(min(tokens - t0, std::int64_t{kForwardRun}));
  const T* in = rows.x + t0 * channels + c;
  T* out = y + t0 * channels + c;
  Ahead<T, N> now, next;
  now.ask(in, channels, left);
  A w[kTaps][N];
  load_taps(w, weight, c);
  Window<T, A, N> window;
  window.seek(rows, documents, t0, c);
  int to_end = static_cast<int>(window.end - t0);
  for (; left > 0; left -= kAhead) {
    in += kAhead * channels;
    next.ask(in, channels, left - kAhead);
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (u >= left) break;
      if (to_end == 0) to_end = window.next_document(rows, documents, c);
      A current[N];
      Vec<T, N> result;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        current[i] = widen<A>(now.v[u].v[i]);
        const A pre = under_taps(w, window.row, current[i], i);
        result.v[i] = round_to<T>(silu ? kda::silu<kda::kFastMath<T>>(pre) : pre);
      }
      store<N>(out, result);
      out += channels;
      window.push(current);
      --to_end;
    }
    now = next;
  }
}

/// Keeps the first rows of dy of every run: the run before reads them too, maybe after dx has overwritten them.
template <class T, int N>
__global__ void __launch_bounds__(kColumns* kLanes) keep_borders_kernel(
    T* borders, const T* dy, std::int64_t runs, std::int64_t tokens, std::int64_t channels) {
  const std::int64_t c = (std::int64_t{blockIdx.y} * kColumns + threadIdx.x) * N;
  const std::int64_t run = std::int64_t{blockIdx.x} * kLanes + threadIdx.y;
  if (c >= channels || run >= runs) return;
  Vec<T, N> rows[kTaps - 1];
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) {
    const std::int64_t t = run * kBackwardRun + i;
    if (t < tokens) rows[i] = load<N>(dy + t * channels + c);
  }
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) {
    if (run * kBackwardRun + i < tokens)
      store<N>(borders + (run * (kTaps - 1) + i) * channels + c, rows[i]);
  }
}

/// A thread's run, backward. pending[m] = what dx of token t - 3 + m has got from outputs before t.
template <class T, class W, class A, int N>
__global__ void __launch_bounds__(kColumns* kLanes, sizeof(A) == 4 ? 2 : 1)
    backward_kernel(T* dx,
                    A* partials,
                    const T* dy,
                    const T* borders,
                    ConvRows<T> rows,
                    const W* weight,
                    Documents documents,
                    std::int64_t tokens,
                    bool silu) {
  constexpr int kBefore = kTaps - 1;
  const std::int64_t channels = rows.channels;
  const std::int64_t c = (std::int64_t{blockIdx.y} * kColumns + threadIdx.x) * N;
  const std::int64_t run = std::int64_t{blockIdx.x} * kLanes + threadIdx.y, t0 = run * kBackwardRun;
  A dw[kTaps][N] = {};
  if (c < channels && t0 < tokens) {
    const int length = static_cast<int>(min(tokens - t0, std::int64_t{kBackwardRun}));
    // Outputs after the run reach back into it; those of the next document are cut off below.
    const int reach = static_cast<int>(min(tokens - t0, std::int64_t{kBackwardRun + kBefore}));
    const std::int64_t at = t0 * channels + c;
    Ahead<T, N> x_now, x_next, d_now, d_next;
    const auto ask = [&](Ahead<T, N>& xs, Ahead<T, N>& ds, int i) {
      xs.ask(rows.x + at + i * channels, channels, reach - i);
      if (borders == nullptr ||
          i < kBackwardRun) {  // a group of rows is before the border or after it
        ds.ask(dy + at + i * channels, channels, reach - i);
      } else {
        ds.ask(borders + (run + 1) * kBefore * channels + c, channels, reach - i);
      }
    };
    static_assert(kBackwardRun % kAhead == 0 && kBefore <= kAhead);
    ask(x_now, d_now, 0);
    A w[kTaps][N];
    load_taps(w, weight, c);
    Window<T, A, N> window;
    window.seek(rows, documents, t0, c);
    int end =
        static_cast<int>(min(window.end - t0, std::int64_t{reach}));  // of the document at hand
    int first = 0;  // token of the run and of that document
    A pending[kBefore][N] = {};
    const auto store_dx = [&](int s, const A(&sum)[N]) {
      if (s < first || s >= length) return;
      Vec<T, N> result;
#pragma unroll
      for (int i = 0; i < N; ++i)
        result.v[i] = round_to<T>(sum[i]);
      store<N>(dx + at + s * channels, result);
    };
    const auto flush = [&](int stop) {
#pragma unroll
      for (int m = 0; m < kBefore; ++m)
        store_dx(stop - kBefore + m, pending[m]);
    };
    int t = 0;
    for (bool more = true; more;) {
      ask(x_next, d_next, t + kAhead);
#pragma unroll
      for (int u = 0; u < kAhead; ++u, ++t) {
        if (t == end) {
          flush(t);
          if (t >= length) {
            more = false;
            break;
          }
          end = static_cast<int>(
              min(std::int64_t{t} + window.next_document(rows, documents, c), std::int64_t{reach}));
          first = t;
#pragma unroll
          for (int i = 0; i < N; ++i)
            pending[0][i] = pending[1][i] = pending[2][i] = A(0);
        }
        A current[N], done[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          current[i] = widen<A>(x_now.v[u].v[i]);
          A g = widen<A>(d_now.v[u].v[i]);
          if (silu) {
            const A pre = under_taps(w, window.row, current[i], i);
            A s, complement;
            kda::sigmoid_pair<kda::kFastMath<T>>(pre, s, complement);
            g = g * s * (A(1) + pre * complement);
          }
          done[i] = pending[0][i] + w[0][i] * g;
          pending[0][i] = pending[1][i] + w[1][i] * g;
          pending[1][i] = pending[2][i] + w[2][i] * g;
          pending[2][i] = w[3][i] * g;
          if (t < length) {
            dw[0][i] += g * window.row[0][i];
            dw[1][i] += g * window.row[1][i];
            dw[2][i] += g * window.row[2][i];
            dw[3][i] += g * current[i];
          }
        }
        store_dx(t - kBefore, done);
        window.push(current);
      }
      x_now = x_next;
      d_now = d_next;
    }
  }
  if (partials == nullptr) return;
  __shared__ A lanes[kLanes][kTaps * N][kColumns];
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
      lanes[threadIdx.y][i * kTaps + j][threadIdx.x] = dw[j][i];
  }
  __syncthreads();
  if (c >= channels) return;
  for (int e = threadIdx.y; e < kTaps * N; e += kLanes) {
    A sum = lanes[0][e][threadIdx.x];
#pragma unroll
    for (int y = 1; y < kLanes; ++y)
      sum += lanes[y][e][threadIdx.x];
    partials[(std::int64_t{blockIdx.x} * channels + c) * kTaps + e] = sum;
  }
}

}  // namespace moesaic::cuda::conv
