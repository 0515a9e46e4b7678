#include "core/model/mlp.h"

namespace moesaic {

GatedMlp::GatedMlp(ParameterStore& params,
                   const std::string& prefix,
                   const MlpOptions& options,
                   Part part)
    : options_(options), compute_(params.precision().compute) {
  const std::int64_t d = options.hidden, f = options.inner;
  options_.inner /= params.position().extent(Axis::tp);
  const auto matrix = [&](const char* name, std::int64_t rows, std::int64_t cols, int split) {
    return split_over_tp(matrix_spec(prefix + name, rows, cols, options.init_std, part), split);
  };
  gate_up_ =
      params.declare_storage(prefix + "gate_up", 0, 2 * options_.inner, d, StoredAs::compute);
  params.declare(matrix("gate_proj.weight", f, d, 0), gate_up_, 0);
  params.declare(matrix("up_proj.weight", f, d, 0), gate_up_, options_.inner);
  down_ = params.declare(matrix("down_proj.weight", d, f, 1));
}

void GatedMlp::declare_inner(TapeSpec& tape,
                             const Bounds& bounds,
                             ActId x,
                             const std::string& prefix) {
  const std::int64_t t = bounds.tokens, f = options_.inner;
  x_ = x;
  pre_ = tape.activation(prefix + "gate_up", {t, 2 * f}, compute_);
  h_ = tape.activation(prefix + "h", {t, f}, compute_);
  tape.step(prefix + "gate_up", {x}, {pre_}, [this](Tape& p) {
    linear(p, p.out(pre_), p.in(x_), gate_up_);
  });
  tape.step(
      prefix + "glu",
      {pre_},
      {h_},
      [this](Tape& p) {
        p.run(GluForward{.h = p.out(h_),
                         .gate_up = p.in(pre_),
                         .row_count = {},
                         .activation = options_.activation});
      },
      StepKind::cheap);
}

void GatedMlp::add_output(Tape& tape, TensorView y, bool accumulate) {
  linear(tape, y, tape.in(h_), down_, accumulate);
}

void GatedMlp::declare(TapeSpec& tape, const Bounds& bounds, ActId x, ActId y) {
  declare_inner(tape, bounds, x, "mlp.");
  tape.step("mlp.down", {h_}, {y}, [this, y](Tape& p) { add_output(p, p.out(y), false); });
}

void GatedMlp::backward_into(Tape& tape, ConstTensorView dy, TensorView dx, bool accumulate_dx) {
  const ConstTensorView pre = tape.in(pre_), h = tape.in(h_), x = tape.in(x_);
  const Tape::Scope scope(tape);
  const TensorView dh = tape.temp({pre.dim(0), options_.inner}, compute_, "d mlp.h");
  linear_backward(tape, dh, dy, h, down_, false);
  const TensorView dpre = tape.temp(pre.shape(), compute_, "d mlp.gate_up");
  tape.run(
      GluBackward{.dgate_up = dpre, .dh = dh, .gate_up = pre, .activation = options_.activation});
  linear_backward(tape, dx, dpre, x, gate_up_, accumulate_dx);
}

void GatedMlp::backward(Tape& tape, ConstTensorView dy, TensorView dx) {
  backward_into(tape, dy, dx, false);
}

}  // namespace moesaic
