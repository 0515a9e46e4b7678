#include "kernels/ops/short_conv.h"

namespace moesaic {
namespace {

constexpr std::int64_t kMaxTaps =
    32;  // the CPU kernels keep the taps of a block of channels on the stack

DType wide(DType t) {
  return t == DType::f64 ? DType::f64 : DType::f32;
}

std::int64_t check_documents(const ConstTensorView& cu_seqlens) {
  MOESAIC_CHECK(cu_seqlens.rank() == 1 && cu_seqlens.dim(0) >= 1,
                "cu_seqlens must be [documents + 1]");
  check_dtype(cu_seqlens, DType::i32, "cu_seqlens");
  return cu_seqlens.dim(0) - 1;
}

void check_like(const ConstTensorView& view, const ConstTensorView& like, const char* what) {
  check_shape(view, like.shape(), what);
  check_dtype(view, like.dtype(), what);
}

void check_weight(const ConstTensorView& x, const ConstTensorView& w) {
  MOESAIC_CHECK(x.rank() == 2, "x must be [tokens, channels]");
  MOESAIC_CHECK(w.rank() == 2 && w.dim(0) == x.dim(1), "w must be [channels, taps]");
  MOESAIC_CHECK(w.dim(1) >= 1 && w.dim(1) <= kMaxTaps, "a short convolution has 1 to 32 taps");
}

void check_history(const ConstTensorView& history,
                   const ConstTensorView& x,
                   std::int64_t documents,
                   std::int64_t taps,
                   const char* what) {
  if (history.empty()) return;
  const bool of_first = history.rank() == 3 && history.dim(0) == 1 && documents > 0;
  check_shape(history, {of_first ? 1 : documents, taps - 1, x.dim(1)}, what);
  check_dtype(history, x.dtype(), what);
}

}  // namespace

void ShortConvForward::check() const {
  check_weight(x, w);
  check_like(y, x, "y");
  MOESAIC_CHECK(y.data() != x.data() || x.numel() == 0, "y must not alias x");
  check_history(history, x, check_documents(cu_seqlens), w.dim(1), "history");
}

OpCost ShortConvForward::cost() const {
  return {2.0 * static_cast<double>(x.numel() * w.dim(1)),
          static_cast<double>(x.bytes() + y.bytes() + w.bytes())};
}

void ShortConvBackward::check() const {
  check_weight(x, w);
  check_like(dx, x, "dx");
  check_like(dy, x, "dy");
  MOESAIC_CHECK(dx.data() != x.data() || x.numel() == 0, "dx must not alias x");
  if (!dw.empty()) {
    check_shape(dw, w.shape(), "dw");
    check_dtype(dw, wide(x.dtype()), "dw");
  }
  const auto documents = check_documents(cu_seqlens);
  check_history(history, x, documents, w.dim(1), "history");
  check_history(dhistory, x, documents, w.dim(1), "dhistory");
}

OpCost ShortConvBackward::cost() const {
  return {6.0 * static_cast<double>(x.numel() * w.dim(1)),
          static_cast<double>(x.bytes() + dy.bytes() + dx.bytes() + w.bytes())};
}

void ShortConvTail::check() const {
  MOESAIC_CHECK(x.rank() == 2, "x must be [tokens, channels]");
  MOESAIC_CHECK(next.rank() == 3, "next must be [documents, taps - 1, channels]");
  const auto documents = check_documents(cu_seqlens);
  check_shape(next, {documents, next.dim(1), x.dim(1)}, "next");
  check_dtype(next, x.dtype(), "next");
  if (history.empty()) return;
  check_shape(history, next.shape(), "history");
  check_dtype(history, x.dtype(), "history");
}

OpCost ShortConvTail::cost() const {
  return {0.0, 2.0 * static_cast<double>(next.bytes())};
}

}  // namespace moesaic
