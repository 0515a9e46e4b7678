#pragma once
// The smallest layer that uses every interface of core/nn: saved, replayed and chosen activations,
// an output beside the main one, weight gradients through the tape. All its ops exist on both
// backends.
#include "core/nn/module.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/topk.h"

namespace moesaic::test {

struct ProofSize {
  std::int64_t tokens = 160, hidden = 96, inner = 136, experts = 48, chosen = 6;
};

/// h = norm_in(x);  y = norm_out(down(up(h)));  scores = router(h), of which each token chooses the
/// `chosen` best among its first `visible`, and then the best among its first `counts`: the second
/// choice reads a count that the first one left on the device.
///
///   x, y [T, hidden] compute;  scores [T, experts] stats;  visible [T] i32
///   indices [T, chosen], counts [T], best [T, 1] i32;  dscores [T, experts] compute, the gradient
///   of scores from outside
class ProofLayer final : public Module {
 public:
  ProofLayer(ParameterStore& params, const ProofSize& size, const Precision& precision)
      : size_(size),
        precision_(precision),
        norm_in_(params.declare(norm("norm_in.weight", size.hidden))),
        up_(params.declare(matrix("up.weight", size.inner, size.hidden))),
        router_(params.declare(matrix("router.weight", size.experts, size.hidden))),
        down_(params.declare(matrix("down.weight", size.hidden, size.inner))),
        norm_out_(params.declare(norm("norm_out.weight", size.hidden))) {}

  void declare(TapeSpec& tape, const Bounds& bounds, ActId x, ActId y) override {
    const std::int64_t rows = bounds.tokens;
    const DType compute = precision_.compute;
    x_ = x;
    y_ = y;
    visible_ = tape.input("choice.visible", {rows}, DType::i32);
    dscores_ = tape.input("router.dscores", {rows, size_.experts}, compute);
    normed_ = tape.activation("norm_in.y", {rows, size_.hidden}, compute);
    normed_rms_ = tape.activation("norm_in.inv_rms", {rows}, precision_.stats);
    inner_ = tape.activation("up.y", {rows, size_.inner}, compute);
    scores_ = tape.activation("router.scores", {rows, size_.experts}, precision_.stats);
    indices_ = tape.activation("choice.indices", {rows, size_.chosen}, DType::i32);
    counts_ = tape.activation("choice.counts", {rows}, DType::i32);
    best_ = tape.activation("choice.best", {rows, 1}, DType::i32);
    mixed_ = tape.activation("down.y", {rows, size_.hidden}, compute);
    mixed_rms_ = tape.activation("norm_out.inv_rms", {rows}, precision_.stats);
    tape.always_save(scores_);
    declare_steps(tape);
  }

  void backward(Tape& tape, ConstTensorView dy, TensorView dx) override {
    const DType compute = precision_.compute;
    const TensorView dmixed = tape.temp(dy.shape(), compute, "dmixed");
    norm_backward(tape, dmixed, dy, mixed_, mixed_rms_, norm_out_);
    const TensorView dinner = tape.temp({dy.dim(0), size_.inner}, compute, "dinner");
    linear_backward(tape, dinner, dmixed, tape.in(inner_), down_, false);
    const TensorView dnormed = tape.temp(dy.shape(), compute, "dnormed");
    linear_backward(tape, dnormed, dinner, tape.in(normed_), up_, false);
    linear_backward(tape, dnormed, tape.in(dscores_), tape.in(normed_), router_, true);
    norm_backward(tape, dx, dnormed, x_, normed_rms_, norm_in_);
  }

  ActId visible() const { return visible_; }
  ActId dscores() const { return dscores_; }
  ActId scores() const { return scores_; }
  ActId indices() const { return indices_; }
  ActId counts() const { return counts_; }
  ActId best() const { return best_; }

 private:
  static ParameterSpec norm(const char* name, std::int64_t n) {
    return vector_spec(name, n, Init::Kind::ones, Part::norm);
  }
  static ParameterSpec matrix(const char* name, std::int64_t rows, std::int64_t cols) {
    return matrix_spec(name, rows, cols, 0.1, Part::dense_mlp);
  }

  void declare_steps(TapeSpec& tape) {
    tape.step("norm_in", {x_}, {normed_, normed_rms_}, [this](Tape& t) {
      norm_forward(t, normed_, normed_rms_, x_, norm_in_);
    });
    tape.step("up", {normed_}, {inner_}, [this](Tape& t) {
      linear(t, t.out(inner_), t.in(normed_), up_);
    });
    tape.step("router", {normed_}, {scores_}, [this](Tape& t) {
      linear(t, t.out(scores_), t.in(normed_), router_);
    });
    const auto choose = [this](Tape& t) {
      t.run(TopK{.indices = t.out(indices_),
                 .counts = t.out(counts_),
                 .scores = t.in(scores_),
                 .valid_count = t.in(visible_)});
    };
    tape.step("choose", {scores_, visible_}, {indices_, counts_}, choose, StepKind::chooses);
    const auto choose_best = [this](Tape& t) {
      t.run(TopK{.indices = t.out(best_), .scores = t.in(scores_), .valid_count = t.in(counts_)});
    };
    tape.step("choose_best", {scores_, counts_}, {best_}, choose_best, StepKind::chooses);
    tape.step("down", {inner_}, {mixed_}, [this](Tape& t) {
      linear(t, t.out(mixed_), t.in(inner_), down_);
    });
    tape.step("norm_out", {mixed_}, {y_, mixed_rms_}, [this](Tape& t) {
      norm_forward(t, y_, mixed_rms_, mixed_, norm_out_);
    });
  }

  static void norm_forward(Tape& tape, ActId y, ActId inv_rms, ActId x, StorageId weight) {
    const WeightLease w = tape.weight(weight);
    tape.run(RmsNormForward{
        .y = tape.out(y), .inv_rms = tape.out(inv_rms), .x = tape.in(x), .weight = w.view()});
  }
  static void norm_backward(
      Tape& tape, TensorView dx, ConstTensorView dy, ActId x, ActId inv_rms, StorageId weight) {
    const WeightLease w = tape.weight(weight);
    tape.run(RmsNormBackward{.dx = dx,
                             .dweight = tape.grad(weight),
                             .dy = dy,
                             .x = tape.in(x),
                             .weight = w.view(),
                             .inv_rms = tape.in(inv_rms)});
  }

  ProofSize size_;
  Precision precision_;
  StorageId norm_in_, up_, router_, down_, norm_out_;
  ActId x_, y_, visible_, dscores_, normed_, normed_rms_, inner_, scores_, indices_, counts_, best_,
      mixed_, mixed_rms_;
};

}  // namespace moesaic::test
