// balance__losses, balance__quantile: auxiliary losses and the rules of the selection bias.
#include <fmt/format.h>

#include "apps/verify/case_run.h"
#include "kernels/ops/balance.h"
#include "kernels/ops/router.h"

namespace moesaic::verify {
namespace {

/// What RouterForward wrote for one set of logits.
struct Routed {
  TensorView scores, topk, weights, cutoff, counts;
};

Routed route(
    CaseRun& run, ConstTensorView logits, ConstTensorView bias, std::int64_t k, RouterScore score) {
  const std::int64_t tokens = logits.dim(0), experts = logits.dim(1);
  const DType stats = run.precision().stats;
  Routed r{
      run.poisoned(logits.shape(), stats),
      run.upload_i32(std::vector<std::int64_t>(static_cast<std::size_t>(tokens * k), -1),
                     {tokens, k}),
      run.poisoned({tokens, k}, stats),
      k < experts ? run.poisoned({tokens}, stats) : TensorView(),
      run.upload_i32(std::vector<std::int64_t>(static_cast<std::size_t>(experts), -1), {experts})};
  moesaic::run(run.backend(),
               RouterForward{.scores = r.scores,
                             .topk = r.topk,
                             .weights = r.weights,
                             .cutoff = r.cutoff,
                             .counts = r.counts,
                             .logits = logits,
                             .bias = bias,
                             .given = {},
                             .score = score});
  return r;
}

struct Loss {
  double value = 0;
  std::vector<double> gradient;
};

/// Value and gradient of `losses` alone: the weights get no gradient.
Loss evaluate(CaseRun& run,
              ConstTensorView logits,
              const Routed& r,
              RouterScore score,
              const RouterLosses& losses) {
  const DType stats = run.precision().stats;
  const TensorView balance = run.zeros({}, stats), z = run.zeros({}, stats);
  moesaic::run(run.backend(),
               RouterLossForward{.balance_loss = balance,
                                 .z_loss = z,
                                 .logits = logits,
                                 .scores = r.scores,
                                 .topk = r.topk,
                                 .losses = losses});
  const TensorView dlogits = run.poisoned(logits.shape(), stats);
  moesaic::run(run.backend(),
               RouterBackward{.dlogits = dlogits,
                              .dweights = run.zeros(r.weights.shape(), stats),
                              .logits = logits,
                              .scores = r.scores,
                              .weights = r.weights,
                              .topk = r.topk,
                              .score = score,
                              .losses = losses});
  return {run.download(balance)[0] + run.download(z)[0], run.download(dlogits)};
}

void expect_loss(CaseRun& run,
                 const std::string& name,
                 const Loss& loss,
                 std::vector<double>& total) {
  run.expect("out." + name, {loss.value});
  run.expect("grad_" + name + ".in.logit", loss.gradient);
  total.resize(loss.gradient.size(), 0.0);
  for (std::size_t i = 0; i < total.size(); ++i)
    total[i] += loss.gradient[i];
}

TensorView sum_of_counts(CaseRun& run, const std::vector<ConstTensorView>& parts) {
  const TensorView total = run.zeros(parts.front().shape(), DType::i64);
  for (const auto& part : parts)
    moesaic::run(run.backend(), AccumulateCounts{.total = total, .counts = part});
  return total;
}

void losses_case(CaseRun& run) {
  const DType stats = run.precision().stats;
  const auto logits = run.load("in.logit", stats);
  const std::int64_t tokens = logits.dim(0), k = run.cfg_int("k"), experts = run.cfg_int("E");
  const Routed r = route(run, logits, run.load("in.bias", stats), k, RouterScore::sigmoid);
  run.expect_exact("aux.topk", r.topk);
  run.expect_exact("aux.counts", r.counts);

  const auto token_count = run.upload_i32({tokens}, {1});
  const auto cu = run.load_i32("in.cu");
  std::int64_t documents = 0;
  const auto bounds = run.host_ints("in.cu");
  for (std::size_t i = 1; i < bounds.size(); ++i)
    documents += bounds[i] > bounds[i - 1] ? 1 : 0;
  const TensorView frequency = run.poisoned({experts}, stats);
  const auto other = run.load_i32("in.other_rank_counts");
  moesaic::run(
      run.backend(),
      BalanceFrequency{
          .frequency = frequency, .counts = sum_of_counts(run, {r.counts, other}), .skip = {}});

  RouterLosses sequence, global, own, z;
  sequence.sequence_weight = global.global_weight = own.switch_weight = z.z_weight = 1.0;
  sequence.cu = cu;
  sequence.documents = run.upload_i32({documents}, {1});
  global.frequency = frequency;
  global.tokens = own.tokens = z.tokens = token_count;
  // Switch routes by the softmax, without bias, to one expert.
  const Routed top1 = route(run, logits, {}, 1, RouterScore::softmax);
  std::vector<double> total;
  expect_loss(run, "seq_aux", evaluate(run, logits, r, RouterScore::sigmoid, sequence), total);
  expect_loss(run, "global_aux", evaluate(run, logits, r, RouterScore::sigmoid, global), total);
  expect_loss(run, "switch_aux", evaluate(run, logits, top1, RouterScore::softmax, own), total);
  expect_loss(run, "z", evaluate(run, logits, r, RouterScore::sigmoid, z), total);
  run.expect("grad.in.logit", total);

  const TensorView bias = run.upload(run.host_reals("in.bias"), {experts}, stats);
  moesaic::run(run.backend(),
               BalanceBiasSign{
                   .bias = bias, .counts = r.counts, .skip = {}, .gamma = run.cfg_real("gamma")});
  run.expect("aux.sign_bias", bias);
}

/// One step: the histogram is gathered over micro-batches, each of which is routed on its own.
void quantile_step(CaseRun& run, std::int64_t step, TensorView bias) {
  const auto name = [step](const char* prefix) { return fmt::format("{}.{}", prefix, step); };
  const DType stats = run.precision().stats;
  const auto logits = run.load(name("in.logit"), stats);
  const std::int64_t tokens = logits.dim(0), experts = logits.dim(1), k = run.cfg_int("k");
  run.expect(name("aux.bias_before"), bias);

  const TensorView histogram = run.zeros({experts, run.cfg_int("bins")}, DType::i32);
  const TensorView margins = run.poisoned({tokens, experts}, stats);
  const auto sizes = run.host_ints("in.sizes");
  const std::int64_t parts = run.shape("in.sizes")[1];
  std::vector<double> cutoff;
  std::vector<ConstTensorView> counts;
  std::int64_t at = 0;
  for (std::int64_t p = 0; p < parts; ++p) {
    const std::int64_t end = at + sizes[static_cast<std::size_t>(step * parts + p)];
    const Routed r = route(run, logits.rows(at, end), bias, k, RouterScore::sigmoid);
    moesaic::run(run.backend(),
                 BalanceHistogram{
                     .histogram = histogram, .scores = r.scores, .cutoff = r.cutoff, .bias = bias});
    moesaic::run(
        run.backend(),
        BalanceMargins{.margins = margins.rows(at, end), .scores = r.scores, .cutoff = r.cutoff});
    const auto part = run.download(r.cutoff);
    cutoff.insert(cutoff.end(), part.begin(), part.end());
    counts.emplace_back(r.counts);
    at = end;
  }
  run.expect(name("aux.cutoff"), cutoff);
  run.expect_exact(name("aux.load"), sum_of_counts(run, counts));
  run.expect_exact(name("aux.hist"), histogram);

  const TensorView exact = run.poisoned({experts}, stats);
  moesaic::run(run.backend(),
               BalanceBiasExact{.bias = exact, .margins = margins, .skip = {}, .top_k = k});
  run.expect(name("out.bias_exact"), exact);
  moesaic::run(run.backend(),
               BalanceBiasFromHistogram{.bias = bias,
                                        .histogram = histogram,
                                        .tokens = run.upload_i32({tokens}, {1}),
                                        .skip = {},
                                        .top_k = k});
  run.expect(name("out.bias_hist"), bias);
}

void quantile_case(CaseRun& run) {
  const TensorView bias = run.zeros({run.cfg_int("E")}, run.precision().stats);
  for (std::int64_t step = 0; step < run.shape("in.sizes")[0]; ++step)
    quantile_step(run, step, bias);
}

const RegisterFamily losses_family{{"balance__losses", losses_case}};
const RegisterFamily quantile_family{{"balance__quantile", quantile_case}};

}  // namespace
}  // namespace moesaic::verify
