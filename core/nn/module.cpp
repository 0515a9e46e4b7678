#include "core/nn/module.h"

#include "kernels/ops/elementwise.h"
#include "kernels/ops/gemm.h"

namespace moesaic {

void linear(Tape& tape, TensorView y, ConstTensorView x, StorageId weight, bool accumulate) {
  const WeightLease w = tape.weight(weight);
  tape.run(linear_forward(y, x, w.view(), accumulate));
}

void linear_backward(Tape& tape,
                     TensorView dx,
                     ConstTensorView dy,
                     ConstTensorView x,
                     StorageId weight,
                     bool accumulate_dx) {
  if (!dx.empty()) {
    const WeightLease w = tape.weight(weight);
    tape.run(linear_backward_input(dx, dy, w.view(), accumulate_dx));
  }
  if (const TensorView dw = tape.grad(weight); !dw.empty())
    tape.run_weight_gradient(linear_backward_weight(dw, dy, x));
}

void linear_rows(Tape& tape, TensorView y, ConstTensorView x, StorageId weight, RowRange rows) {
  const WeightLease w = tape.weight(weight);
  tape.run(linear_forward(y, x, w.view().rows(rows.begin, rows.end)));
}

void linear_rows_backward(Tape& tape,
                          TensorView dx,
                          ConstTensorView dy,
                          ConstTensorView x,
                          StorageId weight,
                          RowRange rows,
                          bool accumulate_dx) {
  const WeightLease w = tape.weight(weight);
  tape.run(linear_backward_input(dx, dy, w.view().rows(rows.begin, rows.end), accumulate_dx));
  if (const TensorView dw = tape.grad(weight); !dw.empty()) {
    tape.run_weight_gradient(linear_backward_weight(dw.rows(rows.begin, rows.end), dy, x));
  }
}

ConstTensorView cast_to(Tape& tape, ConstTensorView x, DType dtype, const char* tag) {
  if (x.dtype() == dtype) return x;
  const TensorView y = tape.temp(x.shape(), dtype, tag);
  tape.run(Cast{.y = y, .x = x});
  return y;
}

ParameterSpec matrix_spec(
    std::string name, std::int64_t rows, std::int64_t cols, double std, Part part) {
  ParameterSpec s;
  s.name = std::move(name);
  s.shape = {rows, cols};
  s.init = {Init::Kind::normal, std, 0};
  s.part = part;
  s.decay = s.matrix = rows > 1 && cols > 1;
  return s;
}

ParameterSpec vector_spec(
    std::string name, std::int64_t n, Init::Kind init, Part part, StoredAs stored_as) {
  ParameterSpec s;
  s.name = std::move(name);
  s.shape = {n};
  s.init = {init, 0, 0};
  s.part = part;
  s.stored_as = stored_as;
  return s;
}

ParameterSpec split_over_tp(ParameterSpec spec, int dim) {
  spec.placement.splits.push_back({Axis::tp, dim});
  return spec;
}

std::vector<RowRange> head_blocks(std::int64_t heads, std::initializer_list<std::int64_t> parts) {
  std::vector<RowRange> blocks;
  std::int64_t row = 0;
  for (std::int64_t h = 0; h < heads; ++h) {
    for (const std::int64_t part : parts) {
      if (part == 0) continue;
      blocks.push_back({row, row + part});
      row += part;
    }
  }
  return blocks;
}

}  // namespace moesaic
