#pragma once
// Short convolutions with any number of taps, and what is small: gradients of histories, tails.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/documents.cuh"
#include "kernels/cuda/kda_gate.cuh"
#include "kernels/cuda/launch.h"

namespace moesaic::cuda {

constexpr int kConvThreads = 256;
constexpr int kConvMaxTaps = 32;  // as ShortConvForward::check() has it

/// What the convolution reads: rows of the document, before them rows of its history, before those (or without one) none.
template <class T>
struct ConvRows {
  const T* x;
  const T* history;
  std::int64_t histories;  ///< the first so many documents have one
  std::int64_t channels, taps;

  /// The row under tap j of output t of document n that starts at `begin`; nullptr stands for zeros.
  __device__ __forceinline__ const T* under_tap(std::int64_t n,
                                                std::int64_t begin,
                                                std::int64_t t,
                                                std::int64_t j) const {
    const std::int64_t row = t - begin + j;  // counted from the oldest row of the history
    if (row >= taps - 1) return x + (begin + row - (taps - 1)) * channels;
    return n < histories ? history + (n * (taps - 1) + row) * channels : nullptr;
  }
};

template <class A, class T, class W>
__device__ A conv_pre(const ConvRows<T>& rows,
                      const W* weight,
                      std::int64_t n,
                      std::int64_t begin,
                      std::int64_t t,
                      std::int64_t c) {
  A pre = 0;
  for (std::int64_t j = 0; j < rows.taps; ++j) {
    const T* row = rows.under_tap(n, begin, t, j);
    if (row != nullptr) pre += widen<A>(weight[c * rows.taps + j]) * widen<A>(row[c]);
  }
  return pre;
}
/// dy silu'(pre), or dy.
template <class A, class T, class W>
__device__ A conv_pre_gradient(const ConvRows<T>& rows,
                               const W* weight,
                               const T* dy,
                               std::int64_t n,
                               std::int64_t begin,
                               std::int64_t t,
                               std::int64_t c,
                               bool silu) {
  const A d = widen<A>(dy[t * rows.channels + c]);
  if (!silu) return d;
  const A pre = conv_pre<A>(rows, weight, n, begin, t, c);
  A s, complement;
  kda::sigmoid_pair<kda::kFastMath<T>>(pre, s, complement);
  return d * s * (A(1) + pre * complement);
}

template <class A, class T, class W>
__global__ void __launch_bounds__(kConvThreads) conv_any_forward_kernel(
    T* y, ConvRows<T> rows, const W* weight, Documents documents, std::int64_t tokens, bool silu) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < tokens * rows.channels;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::int64_t t = i / rows.channels, c = i % rows.channels, n = documents.of_token(t);
    const A pre = conv_pre<A>(rows, weight, n, documents.begin(n), t, c);
    y[i] = round_to<T>(silu ? kda::silu<kda::kFastMath<T>>(pre) : pre);
  }
}

template <class A, class T, class W>
__global__ void __launch_bounds__(kConvThreads) conv_any_pre_kernel(A* dpre,
                                                                    const T* dy,
                                                                    ConvRows<T> rows,
                                                                    const W* weight,
                                                                    Documents documents,
                                                                    std::int64_t tokens,
                                                                    bool silu) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < tokens * rows.channels;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::int64_t t = i / rows.channels, n = documents.of_token(t);
    dpre[i] =
        conv_pre_gradient<A>(rows, weight, dy, n, documents.begin(n), t, i % rows.channels, silu);
  }
}

template <class A, class T, class W>
__global__ void __launch_bounds__(kConvThreads) conv_any_dx_kernel(T* dx,
                                                                   const A* dpre,
                                                                   ConvRows<T> rows,
                                                                   const W* weight,
                                                                   Documents documents,
                                                                   std::int64_t tokens) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < tokens * rows.channels;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::int64_t s = i / rows.channels, c = i % rows.channels;
    const std::int64_t end = documents.end(documents.of_token(s));
    A sum = 0;
    for (std::int64_t j = 0; j < rows.taps; ++j) {
      const std::int64_t t = s + rows.taps - 1 - j;
      if (t < end) sum += widen<A>(weight[c * rows.taps + j]) * dpre[t * rows.channels + c];
    }
    dx[i] = round_to<T>(sum);
  }
}

/// partials[b, c, j] = sum of dpre_t row_{t, j} over tokens of block b. blockDim = (channels, taps).
template <class A, class T>
__global__ void __launch_bounds__(kConvThreads) conv_any_dw_kernel(A* partials,
                                                                   const A* dpre,
                                                                   ConvRows<T> rows,
                                                                   Documents documents,
                                                                   std::int64_t tokens,
                                                                   int tokens_per_block) {
  const std::int64_t c = std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (c >= rows.channels) return;
  const std::int64_t t0 = std::int64_t{blockIdx.x} * tokens_per_block;
  const std::int64_t t1 = min(tokens, t0 + tokens_per_block);
  for (std::int64_t j = threadIdx.y; j < rows.taps; j += blockDim.y) {
    std::int64_t n = documents.of_token(t0);
    A sum = 0;
    for (std::int64_t t = t0; t < t1; ++t) {
      while (t >= documents.end(n))
        ++n;
      const T* row = rows.under_tap(n, documents.begin(n), t, j);
      if (row != nullptr) sum += dpre[t * rows.channels + c] * widen<A>(row[c]);
    }
    partials[(std::int64_t{blockIdx.x} * rows.channels + c) * rows.taps + j] = sum;
  }
}

/// dhistory_i = sum_{j <= i} w_j dpre_{i - j}, over the first outputs of each of the first `histories` documents.
template <class A, class T, class W>
__global__ void __launch_bounds__(kConvThreads) conv_history_gradient_kernel(T* dhistory,
                                                                             std::int64_t histories,
                                                                             const T* dy,
                                                                             ConvRows<T> rows,
                                                                             const W* weight,
                                                                             Documents documents,
                                                                             bool silu) {
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= rows.channels) return;
  for (std::int64_t n = blockIdx.y; n < histories; n += gridDim.y) {
    const std::int64_t begin = documents.begin(n),
                       ready = min(documents.end(n) - begin, rows.taps - 1);
    A dpre[kConvMaxTaps];
    for (std::int64_t t = 0; t < ready; ++t)
      dpre[t] = conv_pre_gradient<A>(rows, weight, dy, n, begin, begin + t, c, silu);
    for (std::int64_t i = 0; i < rows.taps - 1; ++i) {
      A sum = 0;
      for (std::int64_t j = 0; j <= i; ++j) {
        if (i - j < ready) sum += widen<A>(weight[c * rows.taps + j]) * dpre[i - j];
      }
      dhistory[(n * (rows.taps - 1) + i) * rows.channels + c] = round_to<T>(sum);
    }
  }
}

/// Oldest first: a row moves from a later place to an earlier one, so `next` may be the history itself.
template <class T>
__global__ void __launch_bounds__(kConvThreads)
    conv_tail_kernel(T* next, ConvRows<T> rows, Documents documents) {
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= rows.channels) return;
  for (std::int64_t n = blockIdx.y; n < documents.count; n += gridDim.y) {
    const std::int64_t begin = documents.begin(n), length = documents.end(n) - begin;
    for (std::int64_t i = 0; i < rows.taps - 1; ++i) {
      const T* from = rows.under_tap(n, begin, begin + length, i);
      next[(n * (rows.taps - 1) + i) * rows.channels + c] =
          from == nullptr ? round_to<T>(0.0F) : from[c];
    }
  }
}

inline dim3 conv_document_grid(std::int64_t channels, std::int64_t documents) {
  return {static_cast<unsigned>((channels + kConvThreads - 1) / kConvThreads),
          static_cast<unsigned>(std::clamp<std::int64_t>(documents, 1, 65535))};
}
inline unsigned conv_element_grid(const CudaContext& context, std::int64_t elements) {
  return grid_for(context, (elements + kConvThreads - 1) / kConvThreads);
}

template <class A, class T, class W>
void conv_any_forward(const CudaContext& context,
                      cudaStream_t stream,
                      T* y,
                      const ConvRows<T>& rows,
                      const W* weight,
                      Documents documents,
                      std::int64_t tokens,
                      bool silu) {
  conv_any_forward_kernel<A>
      <<<conv_element_grid(context, tokens * rows.channels), kConvThreads, 0, stream>>>(
          y, rows, weight, documents, tokens, silu);
  check_launch("kernel short_conv_forward: any taps");
}

/// `partials` null: dw is not wanted.
template <class A, class T, class W>
void conv_any_backward(const CudaContext& context,
                       cudaStream_t stream,
                       T* dx,
                       A* partials,
                       A* dpre,
                       const T* dy,
                       const ConvRows<T>& rows,
                       const W* weight,
                       Documents documents,
                       std::int64_t tokens,
                       int tokens_per_block,
                       bool silu) {
  const unsigned grid = conv_element_grid(context, tokens * rows.channels);
  conv_any_pre_kernel<A>
      <<<grid, kConvThreads, 0, stream>>>(dpre, dy, rows, weight, documents, tokens, silu);
  check_launch("kernel short_conv_backward: any taps, activation");
  conv_any_dx_kernel<A>
      <<<grid, kConvThreads, 0, stream>>>(dx, dpre, rows, weight, documents, tokens);
  check_launch("kernel short_conv_backward: any taps, rows");
  if (partials == nullptr) return;
  const dim3 blocks(static_cast<unsigned>((tokens + tokens_per_block - 1) / tokens_per_block),
                    static_cast<unsigned>((rows.channels + kWarp - 1) / kWarp));
  conv_any_dw_kernel<A><<<blocks, dim3(kWarp, kConvThreads / kWarp), 0, stream>>>(
      partials, dpre, rows, documents, tokens, tokens_per_block);
  check_launch("kernel short_conv_backward: any taps, weights");
}

template <class A, class T, class W>
void conv_history_gradient(cudaStream_t stream,
                           T* dhistory,
                           std::int64_t histories,
                           const T* dy,
                           const ConvRows<T>& rows,
                           const W* weight,
                           Documents documents,
                           bool silu) {
  if (histories == 0 || rows.taps == 1) return;
  conv_history_gradient_kernel<A>
      <<<conv_document_grid(rows.channels, histories), kConvThreads, 0, stream>>>(
          dhistory, histories, dy, rows, weight, documents, silu);
  check_launch("kernel short_conv_backward: histories");
}

template <class T>
void conv_tail(cudaStream_t stream, T* next, const ConvRows<T>& rows, Documents documents) {
  conv_tail_kernel<<<conv_document_grid(rows.channels, documents.count), kConvThreads, 0, stream>>>(
      next, rows, documents);
  check_launch("kernel short_conv_tail");
}

}  // namespace moesaic::cuda
