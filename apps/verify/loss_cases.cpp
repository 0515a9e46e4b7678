// loss__vocab: cross-entropy in three forms and three divergences, each with its own gradient; grad.in.logits is their sum.
// Once more with the cross-entropies computed as ranks do that share the vocabulary.
#include <limits>
#include <numeric>

#include "apps/verify/case_run.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/vocab_block.h"
#include "kernels/ops/vocab_loss.h"

namespace moesaic::verify {
namespace {

constexpr double kZCoef = 1e-2;  // as the case's description says; its cfg is empty

constexpr std::int64_t kBlocks = 4;

struct VocabCase {
  CaseRun& run;
  TensorView logits, total;
  DType acc;
  bool in_blocks = false;

  TensorView scalar(double value) { return run.upload({value}, {1}, acc); }
  void report(const std::string& name, double value, const TensorView& dlogits) {
    run.expect("out." + name, std::vector<double>{value});
    run.expect("grad_" + name + ".in.logits", dlogits);
    moesaic::run(run.backend(), Accumulate{total, dlogits});
  }
};

void compute_in_blocks(VocabCase& c, const CrossEntropy& whole) {
  const std::int64_t rows = c.logits.dim(0), vocabulary = c.logits.dim(1),
                     words = (vocabulary + kBlocks - 1) / kBlocks;
  const std::vector<double> all = c.run.host_reals("in.logits");
  const TensorView sums = c.run.poisoned({kBlocks, rows, 2}, c.acc);
  // Element v of row r is word block * words + v; the last block has words that are none.
  const auto of_block = [&](std::int64_t block, auto&& take) {
    for (std::int64_t i = 0; i < rows * words; ++i) {
      const std::int64_t word = block * words + i % words;
      if (word < vocabulary) take(i, i / words * vocabulary + word);
    }
  };
  std::vector<TensorView> logits;
  for (std::int64_t b = 0; b < kBlocks; ++b) {
    std::vector<double> part(static_cast<std::size_t>(rows * words),
                             -std::numeric_limits<double>::infinity());
    of_block(b, [&](std::int64_t i, std::int64_t at) {
      part[static_cast<std::size_t>(i)] = all[static_cast<std::size_t>(at)];
    });
    logits.push_back(c.run.upload(part, {rows, words}, c.logits.dtype()));
    moesaic::run(
        c.run.backend(),
        VocabBlockSums{.sums = sums.rows(b, b + 1).reshaped({rows, 2}), .logits = logits.back()});
  }
  std::vector<double> gradient(all.size());
  for (std::int64_t b = 0; b < kBlocks; ++b) {
    const TensorView& own = logits[static_cast<std::size_t>(b)];
    moesaic::run(c.run.backend(),
                 VocabBlockCrossEntropy{.loss_sum = whole.loss_sum,
                                        .z_sum = whole.z_sum,
                                        .dlogits = own,
                                        .logits = own,
                                        .sums = sums,
                                        .targets = whole.targets,
                                        .weight = whole.weight,
                                        .divisor = whole.divisor,
                                        .block = b,
                                        .z_coef = whole.z_coef});
    const std::vector<double> part = c.run.download(own);
    of_block(b, [&](std::int64_t i, std::int64_t at) {
      gradient[static_cast<std::size_t>(at)] = part[static_cast<std::size_t>(i)];
    });
  }
  copy_tensor(whole.dlogits,
              c.run.upload(gradient, c.logits.shape(), c.logits.dtype()),
              stream_of(c.run.backend()));
}

void cross_entropy(VocabCase& c,
                   const std::string& name,
                   const ConstTensorView& weight,
                   double divisor,
                   double z_coef) {
  const TensorView loss = c.scalar(0), z = c.scalar(0),
                   d = c.run.poisoned(c.logits.shape(), c.logits.dtype());
  const CrossEntropy whole{.loss_sum = loss,
                           .z_sum = z,
                           .dlogits = d,
                           .logits = c.logits,
                           .targets = c.run.load_i32("in.target"),
                           .weight = weight,
                           .divisor = c.scalar(divisor),
                           .z_coef = z_coef};
  if (c.in_blocks) {
    compute_in_blocks(c, whole);
  } else {
    moesaic::run(c.run.backend(), whole);
  }
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

void report_losses(CaseRun& run, bool in_blocks) {
  const DType acc = run.precision().stats;
  VocabCase c{run, run.load("in.logits"), run.zeros(run.shape("in.logits"), acc), acc, in_blocks};
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

void run_vocab(CaseRun& run) {
  report_losses(run, false);
  if (run.report_again("vocabulary in blocks")) report_losses(run, true);
}

const RegisterFamily family{{"loss__vocab", run_vocab}};

}  // namespace
}  // namespace moesaic::verify
