#include "kernels/ops/short_conv.h"

#include <array>

#include "kernels/cpu/documents.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

constexpr std::int64_t kChannels = 64;  // channels of one block
constexpr std::int64_t kTokens = 64;    // tokens of one block; part of the bits of dw
constexpr std::int64_t kMaxTaps = 32;

/// What the convolution reads: rows of the document, before them rows of its history, before those
/// (or without one) none.
template <class T>
struct Rows {
  const T* x;
  const T* history;
  std::int64_t histories;  // the first so many documents have one
  std::int64_t channels, taps;

  /// The row under tap j of output t of document n starting at `begin`; nullptr stands for zeros.
  const T* under_tap(std::int64_t n, std::int64_t begin, std::int64_t t, std::int64_t j) const {
    const std::int64_t row = t - begin + j;  // counted from the oldest row of the history
    if (row >= taps - 1) return x + (begin + row - (taps - 1)) * channels;
    return n < histories ? history + (n * (taps - 1) + row) * channels : nullptr;
  }
};

/// The taps of channels [c0, c0 + count), tap by tap.
template <class A>
struct Taps {
  A w[kMaxTaps][kChannels];

  template <class W>
  Taps(const W* weight, std::int64_t taps, std::int64_t c0, std::int64_t count) {
    for (std::int64_t c = 0; c < count; ++c) {
      for (std::int64_t j = 0; j < taps; ++j)
        w[j][c] = static_cast<A>(weight[(c0 + c) * taps + j]);
    }
  }
};

template <class T, class Op>
Rows<T> rows_of(const Op& op) {
  return {op.x.template as<T>(),
          op.history.template as<T>(),
          op.history.empty() ? 0 : op.history.dim(0),
          op.x.dim(1),
          op.w.dim(1)};
}

template <class T, class A>
void pre_activation(A* pre,
                    const Rows<T>& rows,
                    const Taps<A>& taps,
                    std::int64_t n,
                    std::int64_t begin,
                    std::int64_t t,
                    std::int64_t c0,
                    std::int64_t count) {
  std::fill_n(pre, count, A(0));
  for (std::int64_t j = 0; j < rows.taps; ++j) {
    const T* row = rows.under_tap(n, begin, t, j);
    if (row == nullptr) continue;
    const A* w = taps.w[j];
#pragma omp simd
    for (std::int64_t c = 0; c < count; ++c)
      pre[c] += w[c] * static_cast<A>(row[c0 + c]);
  }
}

template <class T, class W>
void forward(ThreadPool& pool, const ShortConvForward& op) {
  using A = acc_t<T>;
  const std::int64_t tokens = op.x.dim(0), channels = op.x.dim(1), num_taps = op.w.dim(1);
  const cpu::Documents documents(op.cu_seqlens, tokens);
  const Rows<T> rows = rows_of<T>(op);
  T* y = op.y.as<T>();
  pool.parallel_for(tokens, kTokens, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t c0 = 0; c0 < channels; c0 += kChannels) {
      const std::int64_t count = std::min(kChannels, channels - c0);
      const Taps<A> taps(op.w.as<W>(), num_taps, c0, count);
      std::int64_t n = documents.of_token(first);
      for (std::int64_t t = first; t < last; ++t) {
        while (t >= documents.end(n))
          ++n;
        A pre[kChannels];
        pre_activation(pre, rows, taps, n, documents.begin(n), t, c0, count);
        T* out = y + t * channels + c0;
        if (op.silu) {
#pragma omp simd
          for (std::int64_t c = 0; c < count; ++c)
            out[c] = T(cpu::silu(pre[c]));
        } else {
          for (std::int64_t c = 0; c < count; ++c)
            out[c] = T(pre[c]);
        }
      }
    }
  });
}

/// Backward of one block of channels over all documents; it owns these channels of dx, dw and
/// dhistory.
template <class T, class W>
class ChannelBlock {
  using A = acc_t<T>;

 public:
  ChannelBlock(const ShortConvBackward& op,
               const cpu::Documents& documents,
               std::int64_t c0,
               std::int64_t count)
      : op_(op),
        documents_(documents),
        rows_(rows_of<T>(op)),
        taps_(op.w.as<W>(), op.w.dim(1), c0, count),
        c0_(c0),
        count_(count) {}

  void run() {
    for (std::int64_t n = 0; n < documents_.count; ++n) {
      const std::int64_t begin = documents_.begin(n), end = documents_.end(n);
      if (has_history_gradient(n) && begin == end) history_gradient(n, 0);
      for (std::int64_t t0 = begin; t0 < end; t0 += kTokens)
        block(n, begin, end, t0);
    }
    if (op_.dw.empty()) return;
    A* dw = op_.dw.as<A>();
    for (std::int64_t c = 0; c < count_; ++c) {
      for (std::int64_t j = 0; j < rows_.taps; ++j)
        dw[(c0_ + c) * rows_.taps + j] += dw_[j][c];
    }
  }

 private:
  bool has_history_gradient(std::int64_t n) const {
    return !op_.dhistory.empty() && n < op_.dhistory.dim(0);
  }

  void block(std::int64_t n, std::int64_t begin, std::int64_t end, std::int64_t t0) {
    const std::int64_t t1 = std::min(end, t0 + kTokens), reach = std::min(end, t1 + rows_.taps - 1);
    for (std::int64_t t = t0; t < reach; ++t)
      pre_gradient(n, begin, t, dpre_[t - t0]);
    T* dx = op_.dx.template as<T>();
    for (std::int64_t s = t0; s < t1; ++s) {
      A sum[kChannels] = {};
      for (std::int64_t j = 0; j < rows_.taps; ++j) {
        const std::int64_t t = s + rows_.taps - 1 - j;
        if (t < reach) add_product(sum, taps_.w[j], dpre_[t - t0]);
      }
      for (std::int64_t c = 0; c < count_; ++c)
        dx[s * rows_.channels + c0_ + c] = T(sum[c]);
    }
    if (t0 == begin && has_history_gradient(n)) history_gradient(n, reach - begin);
    if (!op_.dw.empty()) weight_gradient(n, begin, t0, t1);
  }

  void pre_gradient(std::int64_t n, std::int64_t begin, std::int64_t t, A* dpre) const {
    const T* dy = op_.dy.template as<T>() + t * rows_.channels + c0_;
    if (!op_.silu) {
      for (std::int64_t c = 0; c < count_; ++c)
        dpre[c] = static_cast<A>(dy[c]);
      return;
    }
    A pre[kChannels];
    pre_activation(pre, rows_, taps_, n, begin, t, c0_, count_);
#pragma omp simd
    for (std::int64_t c = 0; c < count_; ++c) {
      A s, complement;
      cpu::sigmoid_pair(pre[c], s, complement);
      dpre[c] = static_cast<A>(dy[c]) * s * (A(1) + pre[c] * complement);
    }
  }

  void add_product(A* sum, const A* a, const A* b) const {
#pragma omp simd
    for (std::int64_t c = 0; c < count_; ++c)
      sum[c] += a[c] * b[c];
  }

  // dpre_ holds the document's first `ready` rows (at least as many as the history reaches, if the
  // document has them).
  void history_gradient(std::int64_t n, std::int64_t ready) {
    T* dh = op_.dhistory.template as<T>();
    for (std::int64_t i = 0; i < rows_.taps - 1; ++i) {
      A sum[kChannels] = {};
      for (std::int64_t j = 0; j <= i; ++j) {
        if (i - j < ready) add_product(sum, taps_.w[j], dpre_[i - j]);
      }
      for (std::int64_t c = 0; c < count_; ++c)
        dh[(n * (rows_.taps - 1) + i) * rows_.channels + c0_ + c] = T(sum[c]);
    }
  }

  void weight_gradient(std::int64_t n, std::int64_t begin, std::int64_t t0, std::int64_t t1) {
    for (std::int64_t j = 0; j < rows_.taps; ++j) {
      A sum[kChannels] = {};
      for (std::int64_t t = t0; t < t1; ++t) {
        const T* row = rows_.under_tap(n, begin, t, j);
        if (row == nullptr) continue;
        const A* dpre = dpre_[t - t0];
#pragma omp simd
        for (std::int64_t c = 0; c < count_; ++c)
          sum[c] += dpre[c] * static_cast<A>(row[c0_ + c]);
      }
      for (std::int64_t c = 0; c < count_; ++c)
        dw_[j][c] += sum[c];
    }
  }

  const ShortConvBackward& op_;
  const cpu::Documents& documents_;
  Rows<T> rows_;
  Taps<A> taps_;
  std::int64_t c0_, count_;
  A dpre_[kTokens + kMaxTaps][kChannels];
  A dw_[kMaxTaps][kChannels] = {};
};

template <class T>
void tail(const ShortConvTail& op) {
  const std::int64_t rows = op.next.dim(1), channels = op.x.dim(1);
  const cpu::Documents documents(op.cu_seqlens, op.x.dim(0));
  T* next = op.next.as<T>();
  const T* history = op.history.as<T>();
  for (std::int64_t n = 0; n < documents.count; ++n) {
    const std::int64_t begin = documents.begin(n), end = documents.end(n), length = end - begin;
    // Oldest first: a row moves from a later place to an earlier one, so `next` may be the history
    // itself.
    for (std::int64_t i = 0; i < rows; ++i) {
      T* out = next + (n * rows + i) * channels;
      const std::int64_t from = length + i;  // counted from the oldest row of the history
      if (from >= rows) {
        std::copy_n(op.x.as<T>() + (begin + from - rows) * channels, channels, out);
      } else if (history == nullptr) {
        std::fill_n(out, channels, T(0.0F));
      } else if (out != history + (n * rows + from) * channels) {
        std::copy_n(history + (n * rows + from) * channels, channels, out);
      }
    }
  }
}

}  // namespace

void launch(CpuContext& context, const ShortConvForward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
      dispatch_weight<T>(op.w.dtype(), [&]<class W>(TypeTag<W>) { forward<T, W>(pool, op); });
    });
  });
}

void launch(CpuContext& context, const ShortConvBackward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    const cpu::Documents documents(op.cu_seqlens, op.x.dim(0));
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
      dispatch_weight<T>(op.w.dtype(), [&]<class W>(TypeTag<W>) {
        pool.parallel_for(op.x.dim(1), kChannels, [&](std::int64_t c0, std::int64_t c1) {
          ChannelBlock<T, W>(op, documents, c0, c1 - c0).run();
        });
      });
    });
  });
}

void launch(CpuContext& context, const ShortConvTail& op) {
  context.stream.enqueue(
      [op] { dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) { tail<T>(op); }); });
}

}  // namespace moesaic
