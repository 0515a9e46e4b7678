#pragma once
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/ops/op.h"
#include "memory/buffer.h"

namespace moesaic::bench {

/// One op on tensors that live as long as the case list.
struct OpCase {
  std::string op;
  std::string shape;
  OpCost cost;
  std::function<void(Backend&)> run;
};

/// Owns the tensors of the cases; all of them hold random values, never zeros.
class OpCases {
 public:
  /// Cases whose op name contains `only`, with activations and weights of `dtype`.
  OpCases(DType dtype, std::string only)
      : dtype_(dtype),
        stats_(dtype == DType::f64 ? DType::f64 : DType::f32),
        only_(std::move(only)) {}
  const std::vector<OpCase>& cases() const noexcept { return cases_; }

  void add_products();
  void add_elementwise();
  void add_kda();
  void add_attention();
  void add_routing();
  void add_optimizer();

 private:
  bool wanted(const char* op) const { return std::string(op).find(only_) != std::string::npos; }
  template <class Op>
  void add(const Op& op, std::string shape) {
    op.check();
    cases_.push_back(
        {Op::kName, std::move(shape), op.cost(), [op](Backend& b) { moesaic::run(b, op); }});
  }
  TensorView memory(Shape shape, DType dtype);
  /// scale * standard normal + offset.
  TensorView random(Shape shape, DType dtype, double scale = 1, double offset = 0);
  TensorView activation(Shape shape) { return random(shape, dtype_); }
  TensorView statistic(Shape shape) { return random(shape, stats_); }
  /// Uniform in [0, limit).
  TensorView integers(Shape shape, std::int64_t limit);
  TensorView documents(std::int64_t tokens, std::int64_t count);

  DType dtype_, stats_;
  std::string only_;
  std::uint64_t seed_ = 0;
  std::vector<Buffer> memory_;
  std::vector<OpCase> cases_;
};

}  // namespace moesaic::bench
