#include "kernels/ops/muon.h"

#include <algorithm>

#include <fmt/format.h>

#include "kernels/checks.h"

namespace moesaic {
namespace {

void check_matrices(const ConstTensorView& w, const char* what) {
  MOESAIC_CHECK(w.rank() == 2 || w.rank() == 3,
                fmt::format("{} must be [rows, cols] or [batch, rows, cols]", what));
  MOESAIC_CHECK(w.dtype() == DType::f64 || w.dtype() == DType::f32,
                fmt::format("{} must be f64 or f32", what));
}

void check_blocks(const std::vector<RowBlock>& blocks, std::int64_t rows) {
  if (blocks.empty()) return;
  std::int64_t at = 0;
  for (const RowBlock& b : blocks) {
    MOESAIC_CHECK(b.begin == at && b.end > b.begin,
                  fmt::format("row block [{}, {}) does not follow row {}", b.begin, b.end, at));
    at = b.end;
  }
  MOESAIC_CHECK(at == rows, fmt::format("row blocks end at {} of {} rows", at, rows));
}

void check_narrow(const ConstTensorView& v, const ConstTensorView& w, const char* what) {
  check_shape(v, w.shape(), what);
  MOESAIC_CHECK(
      v.dtype() == w.dtype() || (v.dtype() == DType::bf16 && w.dtype() == DType::f32),
      fmt::format("{} is {} next to a master of {}", what, name(v.dtype()), name(w.dtype())));
}

double iteration_flops(std::int64_t batch,
                       std::int64_t rows,
                       std::int64_t cols,
                       const std::vector<RowBlock>& blocks,
                       int iterations) {
  double flops = 0;
  const auto add = [&](std::int64_t r) {
    const auto m = static_cast<double>(std::min(r, cols)),
               n = static_cast<double>(std::max(r, cols));
    flops += iterations * (4 * m * m * n + 2 * m * m * m);
  };
  for (const RowBlock& b : blocks)
    add(b.end - b.begin);
  if (blocks.empty()) add(rows);
  return flops * static_cast<double>(batch);
}

}  // namespace

std::vector<RowBlock> head_row_blocks(std::int64_t num_heads,
                                      const std::vector<std::int64_t>& heights) {
  std::vector<RowBlock> blocks;
  std::int64_t at = 0;
  for (std::int64_t h = 0; h < num_heads; ++h) {
    for (const std::int64_t height : heights) {
      blocks.push_back({at, at + height});
      at += height;
    }
  }
  return blocks;
}

void MuonUpdate::check() const {
  check_matrices(momentum, "momentum");
  if (is_split()) {
    check_split_master(w, w_compute, remainder);
    check_dtype(momentum, DType::f32, "momentum");
  } else {
    check_like(w, momentum, "w");
  }
  check_narrow(dw, momentum, "dw");
  if (!w_compute.empty()) check_narrow(w_compute, momentum, "w_compute");
  check_step_scalars(scalars, master_dtype());
  check_blocks(blocks, rows());
  MOESAIC_CHECK(num_iterations >= 0, "negative number of iterations");
  MOESAIC_CHECK(!bf16_products || master_dtype() == DType::f32, "bf16 products need an f32 master");
}

OpCost MuonUpdate::cost() const {
  return {iteration_flops(batch(), rows(), cols(), blocks, num_iterations),
          2.0 * (total_bytes({momentum}) +
                 (is_split() ? total_bytes({w_compute, remainder}) : total_bytes({w}))) +
              total_bytes({dw})};
}

void NewtonSchulz::check() const {
  check_matrices(x, "x");
  check_blocks(blocks, rows());
  MOESAIC_CHECK(num_iterations >= 0, "negative number of iterations");
  MOESAIC_CHECK(!bf16_products || x.dtype() == DType::f32, "bf16 products need f32 matrices");
}

OpCost NewtonSchulz::cost() const {
  return {iteration_flops(batch(), rows(), cols(), blocks, num_iterations),
          2.0 * static_cast<double>(x.bytes())};
}

}  // namespace moesaic
