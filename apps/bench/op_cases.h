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
  /// Cases whose op name contains `only`, with activations and weights of `dtype`, on the device of `backend`, which
  /// draws the random values and must outlive this.
  OpCases(Backend& backend, DType dtype, std::string only)
      : backend_(backend),
        dtype_(dtype),
        stats_(dtype == DType::f64 ? DType::f64 : DType::f32),
        only_(std::move(only)) {}
  const std::vector<OpCase>& cases() const noexcept { return cases_; }

  void add_products();
  void add_elementwise();
  void add_kda();
  void add_attention();
  void add_routing();
  void add_optimizer();

  // --- sizes of large models, for GPUs; one group is in memory at a time
  using Group = void (OpCases::*)();
  static const std::vector<Group>& large_groups();

 private:
  /// Whether tensors are to be made for `op`, a name or what several names have in common.
  bool wanted(const char* op) const {
    return std::string(op).find(only_) != std::string::npos || only_.find(op) != std::string::npos;
  }
  template <class Op>
  void add(const Op& op, std::string shape) {
    if (std::string(Op::kName).find(only_) == std::string::npos) return;
    op.check();
    cases_.push_back(
        {Op::kName, std::move(shape), op.cost(), [op](Backend& b) { moesaic::run(b, op); }});
  }
  Device device() { return stream_of(backend_).device(); }
  TensorView memory(Shape shape, DType dtype);
  TensorView upload(const std::vector<std::int32_t>& values, Shape shape);
  void products(std::int64_t m, std::int64_t n, std::int64_t k);
  struct KdaSizes {
    std::int64_t tokens = 0, heads = 0, width = 0;
  };
  void kda(const KdaSizes& s);
  struct AttentionSizes {
    std::int64_t tokens = 0, documents = 1, heads = 0, nope = 0, rope = 0, value = 0;
    std::int64_t index_heads = 0, index_width = 0, selected = 0;  // 0 selected: dense
  };
  void attention(const AttentionSizes& s);
  struct SparseMlaSizes {
    std::int64_t tokens = 0, heads = 0, latent = 0, rope = 0, selected = 0;
    bool float_atomics = false;  ///< also the backward with them
  };
  void sparse_mla(const SparseMlaSizes& s);
  /// Per token `selected` keys: all of its document's while there are few, then every so-manyth one, ascending.
  TensorView selection(std::int64_t tokens, std::int64_t documents, std::int64_t selected);
  struct RoutingSizes {
    std::int64_t tokens = 0, experts = 0, choices = 0, latent = 0, inner = 0;
  };
  void routing(const RoutingSizes& s);
  void grouped(std::int64_t experts, std::int64_t rows, std::int64_t k, std::int64_t n);
  /// An expert's first layer with its activation, and the way back through its second layer.
  void grouped_glu(
      std::int64_t experts, std::int64_t rows, std::int64_t k, std::int64_t width, bool situ);
  /// `rows` for each of `experts`, which lie in slots of the same number.
  struct Groups {
    TensorView offsets, slots;
  };
  Groups even_groups(std::int64_t experts, std::int64_t rows);
  struct ModelSizes {
    std::int64_t tokens = 0, hidden = 0, width = 0, heads = 0, head = 0, vocabulary = 0,
                 loss_rows = 0;
  };
  void elementwise(const ModelSizes& s);
  void updates(std::int64_t elements);
  void muon(std::int64_t batch, std::int64_t rows, std::int64_t cols);
  TensorView step_scalars();
  void large_products();
  void large_kda();
  void large_attention();
  void large_sparse_attention();
  void large_long_attention(std::int64_t tokens, std::int64_t heads);
  template <std::int64_t Tokens, std::int64_t Heads>
  void large_long() {
    large_long_attention(Tokens, Heads);
  }
  void large_routing();
  void large_experts_a();
  void large_experts_b();
  void large_experts_c();
  void large_experts_d();
  void large_experts_e();
  void large_experts_f();
  void large_experts_g();
  void large_elementwise();
  void large_optimizer();
  /// scale * standard normal + offset.
  TensorView random(Shape shape, DType dtype, double scale = 1, double offset = 0);
  TensorView activation(Shape shape) { return random(shape, dtype_); }
  TensorView statistic(Shape shape) { return random(shape, stats_); }
  /// Uniform in [0, limit).
  TensorView integers(Shape shape, std::int64_t limit);
  TensorView documents(std::int64_t tokens, std::int64_t count);

  Backend& backend_;
  DType dtype_, stats_;
  std::string only_;
  std::uint64_t seed_ = 0;
  std::vector<Buffer> memory_;
  std::vector<OpCase> cases_;
};

}  // namespace moesaic::bench
