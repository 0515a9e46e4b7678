// loss__vocab: cross-entropy in three forms and three divergences, each with its own gradient; grad.in.logits is their sum.
#include <numeric>

#include "apps/verify/case_run.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/vocab_loss.h"

namespace moesaic::verify {
namespace {

constexpr double kZCoef = 1e-2;  // as the case's description says; its cfg is empty

struct VocabCase {
  CaseRun& run;
  TensorView logits, total;
  DType acc;

  TensorView scalar(double value) { return run.upload({value}, {1}, acc); }
  void report(const std::string& name, double value, const TensorView& dlogits) {
    run.expect("out." + name, std::vector<double>{value});
    run.expect("grad_" + name + ".in.logits", dlogits);
    moesaic::run(run.backend(), Accumulate{total, dlogits});
  }
};

void cross_entropy(VocabCase& c,
                   const std::string& name,
                   const ConstTensorView& weight,
                   double divisor,
                   double z_coef) {
  const TensorView loss = c.scalar(0), z = c.scalar(0),
                   d = c.run.poisoned(c.logits.shape(), c.logits.dtype());
  moesaic::run(c.run.backend(),
               CrossEntropy{.loss_sum = loss,
                            .z_sum = z,
                            .dlogits = d,
                            .logits = c.logits,
                            .targets = c.run.load_i32("in.target"),
                            .weight = weight,
                            .divisor = c.scalar(divisor),
                            .z_coef = z_coef});
  c.report(name, (c.run.download(loss)[0] + z_coef * c.run.download(z)[0]) / divisor, d);
}

void divergence(VocabCase& c, const std::string& name, DivergenceKind kind) {
  const std::vector<double> mask = c.run.host_reals("in.mask");
  const double divisor = std::accumulate(mask.begin(), mask.end(), 0.0);
  const TensorView loss = c.scalar(0), d = c.run.poisoned(c.logits.shape(), c.logits.dtype());
  moesaic::run(c.run.backend(),
               VocabDivergence{.loss_sum = loss,
                               .dlogits = d,
                               .logits = c.logits,
                               .teacher = c.run.load("in.teacher"),
                               .mask = c.run.load("in.mask", c.acc),
                               .divisor = c.scalar(divisor),
                               .kind = kind});
  c.report(name, c.run.download(loss)[0] / divisor, d);
}

void run_vocab(CaseRun& run) {
  const DType acc = run.precision().stats;
  VocabCase c{run, run.load("in.logits"), run.zeros(run.shape("in.logits"), acc), acc};
  const std::vector<std::int64_t> target = run.host_ints("in.target");
  const std::vector<double> weight = run.host_reals("in.weight");
  double valid = 0, weighted = 0;
  for (std::size_t i = 0; i < target.size(); ++i) {
    if (target[i] == kIgnoredTarget) continue;
    valid += 1;
    weighted += weight[i];
  }
  cross_entropy(c, "ce", {}, valid, 0.0);
  cross_entropy(c, "ce_weighted", run.load("in.weight", acc), weighted, 0.0);
  cross_entropy(c, "ce_z", {}, valid, kZCoef);
  divergence(c, "forward_kl", DivergenceKind::forward_kl);
  divergence(c, "reverse_kl", DivergenceKind::reverse_kl);
  divergence(c, "lk", DivergenceKind::lk);
  run.expect("grad.in.logits", c.total);
}

const RegisterFamily family{{"loss__vocab", run_vocab}};

}  // namespace
}  // namespace moesaic::verify
