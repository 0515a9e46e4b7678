// The router over 896 experts, top 16, its losses, and the way of rows to their experts and back.
#include <fmt/format.h>

#include "apps/verify/case_run.h"
#include "apps/verify/large/case_builder.h"
#include "kernels/ops/permute.h"
#include "kernels/ops/router.h"

namespace moesaic::verify {
namespace {

class Routing {
 public:
  explicit Routing(CaseRun& run)
      : run_(run),
        logits_(run.load("in.logits", run.precision().stats)),
        tokens_(logits_.dim(0)),
        experts_(logits_.dim(1)),
        k_(run.cfg_int("top_k")),
        stats_(run.precision().stats),
        score_(run.cfg_bool("softmax") ? RouterScore::softmax : RouterScore::sigmoid) {}

  void choose() {
    scores_ = run_.poisoned(logits_.shape(), stats_);
    topk_ = run_.poisoned({tokens_, k_}, DType::i32);
    weights_ = run_.poisoned({tokens_, k_}, stats_);
    const TensorView cutoff = run_.poisoned({tokens_}, stats_),
                     counts = run_.poisoned({experts_}, DType::i32);
    RouterForward op{.scores = scores_,
                     .topk = topk_,
                     .weights = weights_,
                     .cutoff = cutoff,
                     .counts = counts,
                     .logits = logits_,
                     .bias = run_.load("in.bias", stats_),
                     .given = run_.replays_choices() ? run_.load_i32("aux.topk") : TensorView(),
                     .score = score_,
                     .route_scale = kRouteScale};
    moesaic::run(run_.backend(), op);
    run_.expect("out.scores", scores_);
    run_.expect_exact("aux.topk", topk_);
    run_.expect("out.weights", weights_);
    run_.expect("aux.cutoff", cutoff);
    run_.expect_exact("aux.counts", counts);
  }

  void losses_and_gradient() {
    const TensorView balance = run_.zeros({1}, stats_), z = run_.zeros({1}, stats_),
                     dlogits = run_.poisoned(logits_.shape(), stats_);
    const RouterLosses losses{.sequence_weight = 1e-2,
                              .switch_weight = score_ == RouterScore::softmax ? 1e-2 : 0.0,
                              .z_weight = 1e-3,
                              .cu = run_.load_i32("in.cu"),
                              .frequency = {},
                              .tokens = run_.upload({static_cast<double>(tokens_)}, {1}, stats_),
                              .documents = run_.upload({2}, {1}, stats_)};
    moesaic::run(run_.backend(), RouterLossForward{balance, z, logits_, scores_, topk_, losses});
    run_.expect("out.balance", balance);
    run_.expect("out.z", z);
    moesaic::run(run_.backend(),
                 RouterBackward{.dlogits = dlogits,
                                .dweights = run_.load("cot.weights", stats_),
                                .logits = logits_,
                                .scores = scores_,
                                .weights = weights_,
                                .topk = topk_,
                                .score = score_,
                                .route_scale = kRouteScale,
                                .losses = losses});
    run_.expect("grad.in.logits", dlogits);
  }

  void move_rows() {
    const std::int64_t rows = tokens_ * k_;
    const TensorView offsets = run_.poisoned({experts_ + 1}, DType::i32),
                     row_of = run_.poisoned({tokens_, k_}, DType::i32),
                     token_of = run_.poisoned({rows}, DType::i32);
    moesaic::run(run_.backend(), DispatchPlan{offsets, row_of, token_of, topk_, {}});
    run_.expect_exact("aux.offsets", offsets);
    run_.expect_exact("aux.row_of_assignment", row_of);
    run_.expect_exact("aux.token_of_row", token_of);
    const TensorView x = run_.load("in.x"), u = run_.poisoned(x.shape(), x.dtype()),
                     dx = run_.poisoned(x.shape(), x.dtype()),
                     xs = run_.poisoned({rows, x.dim(1)}, x.dtype());
    moesaic::run(run_.backend(), dispatch_rows(xs, x, token_of, offsets));
    run_.expect("out.rows", xs);
    // Rows stand for what experts make of them: the way back is the weighted sum.
    moesaic::run(run_.backend(), combine_rows(u, xs, weights_, row_of));
    run_.expect("out.combined", u);
    moesaic::run(run_.backend(), dispatch_rows_backward(dx, xs, row_of));
    run_.expect("grad.in.x", dx);
    const TensorView row_weight = run_.poisoned({rows}, stats_),
                     back = run_.poisoned({tokens_, k_}, stats_);
    moesaic::run(run_.backend(), RowWeightForward{row_weight, weights_, row_of});
    moesaic::run(run_.backend(), RowWeightBackward{back, row_weight, row_of});
    run_.expect("out.row_weight", row_weight);
    run_.expect("grad.row_weight", back);
  }

 private:
  static constexpr double kRouteScale = 2.5;
  CaseRun& run_;
  TensorView logits_;
  std::int64_t tokens_, experts_, k_;
  DType stats_;
  RouterScore score_;
  TensorView scores_, topk_, weights_;
};

void run_routing(CaseRun& run) {
  Routing routing(run);
  routing.choose();
  routing.losses_and_gradient();
  routing.move_rows();
}

const RegisterFamily family{{"routing__", run_routing}};

struct RoutingSize {
  std::int64_t tokens, experts, top_k, width;
  bool softmax = false;
};

void routing(CaseBuilder& b, const RoutingSize& s) {
  b.cfg(fmt::format(R"({{"top_k": {}, "softmax": {}}})", s.top_k, s.softmax));
  b.ints("in.cu", {3}, {0, s.tokens / 3, s.tokens});
  b.normal("in.logits", {s.tokens, s.experts}, 2.0);
  b.normal("in.bias", {s.experts}, 0.05);
  b.normal("cot.weights", {s.tokens, s.top_k});
  b.normal("in.x", {s.tokens, s.width});
  b.accuracy(s.experts, 4);
  b.expect_path("router_forward", "registers");
}

}  // namespace

void add_routing_cases(LargeCases& cases) {
  const auto add = [&](const std::string& name, const RoutingSize& size) {
    cases.push_back({"routing__" + name, [size](CaseBuilder& b) { routing(b, size); }});
  };
  add("large_896_top16", {131, 896, 16, 256});
  add("large_256_top8_softmax", {193, 256, 8, 136, true});
  add("large_64_top6", {257, 64, 6, 512});
}

}  // namespace moesaic::verify
