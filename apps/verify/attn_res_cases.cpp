// attnres__mix_*: the mix op alone. attnres__full, attnres__block*: its schedule over toy sublayers f(h) = tanh(h W^T).
#include <cmath>

#include "apps/verify/case_run.h"
#include "kernels/ops/attn_res.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/gemm.h"

namespace moesaic::verify {
namespace {

void run_mix(CaseRun& run) {
  const DType compute = run.precision().compute, stats = run.precision().stats;
  const std::int64_t n = run.cfg_int("N");
  const TensorView query = run.load("w.query"), norm = run.load("w.norm"), dh = run.load("cot.h");
  std::vector<ConstTensorView> sources;
  std::vector<TensorView> dsources;
  for (std::int64_t i = 0; i < n; ++i) {
    sources.push_back(run.load("in.source." + std::to_string(i)));
    dsources.push_back(run.zeros(sources.back().shape(), stats));
  }
  const TensorView h = run.poisoned(dh.shape(), compute), p = run.poisoned({dh.dim(0), n}, stats);
  const TensorView dquery = run.zeros(query.shape(), run.precision().grad),
                   dnorm = run.zeros(norm.shape(), run.precision().grad);
  const double eps = run.cfg_real("eps");
  moesaic::run(run.backend(), AttnResForward{h, p, sources, query, norm, eps});
  moesaic::run(run.backend(),
               AttnResBackward{dsources, dquery, dnorm, dh, p, sources, query, norm, eps});
  run.expect("out.h", h);
  run.expect("aux.p", p);
  for (std::int64_t i = 0; i < n; ++i)
    run.expect("grad.in.source." + std::to_string(i), dsources[static_cast<std::size_t>(i)]);
  run.expect("grad.w.query", dquery);
  run.expect("grad.w.norm", dnorm);
}

/// The block schedule; the full form is blocks of one sublayer. Gradients of snapshots and of the running sum are
/// collected in one accumulator per block, which backward fills from the last sublayer to the first.
class ToyNetwork {
 public:
  explicit ToyNetwork(CaseRun& run)
      : run_(run),
        layers_(run.cfg_int("L")),
        block_(run.cfg_has("S") ? run.cfg_int("S") : 1),
        eps_(run.cfg_real("eps")) {}

  void forward() {
    sums_.push_back(run_.load("in.h1"));
    for (std::int64_t l = 0; l < layers_; ++l) {
      const bool opens = l % block_ == 0;
      mixes_.push_back(mix(l));
      const TensorView y = sublayer(l, mixes_.back().h);
      const TensorView sum = run_.poisoned(y.shape(), y.dtype());
      if (opens) {
        moesaic::run(run_.backend(), Cast{sum, y});
        sums_.push_back(sum);
      } else {
        moesaic::run(run_.backend(), Add{sum, sums_.back(), y});
        sums_.back() = sum;
      }
      outputs_.push_back(y);
    }
    mixes_.push_back(mix(layers_));
    run_.expect("out.y", mixes_.back().h);
  }

  void backward() {
    for (const auto& sum : sums_)
      dsums_.push_back(run_.zeros(sum.shape(), run_.precision().stats));
    mix_backward(layers_, run_.load("cot.y"));
    for (std::int64_t l = layers_ - 1; l >= 0; --l) {
      const TensorView dy = run_.poisoned(outputs_[at(l)].shape(), run_.precision().compute);
      moesaic::run(run_.backend(), Cast{dy, dsums_[at(1 + l / block_)]});
      mix_backward(l, sublayer_backward(l, dy));
    }
    run_.expect("grad.in.h1", dsums_[0]);
  }

 private:
  struct Mix {
    TensorView h, p;
    std::vector<ConstTensorView> sources;
  };
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  // Sources of mix l: all finished blocks, and the running sum unless the sublayer opens a block.
  Mix mix(std::int64_t l) {
    Mix m;
    for (const auto& s : sums_)
      m.sources.push_back(s);
    const auto n = static_cast<std::int64_t>(m.sources.size());
    m.h = run_.poisoned(sums_[0].shape(), run_.precision().compute);
    m.p = run_.poisoned({m.h.dim(0), n}, run_.precision().stats);
    const std::string i = std::to_string(l);
    moesaic::run(
        run_.backend(),
        AttnResForward{
            m.h, m.p, m.sources, run_.load("w.query." + i), run_.load("w.norm." + i), eps_});
    return m;
  }

  void mix_backward(std::int64_t l, const ConstTensorView& dh) {
    const Mix& m = mixes_[at(l)];
    const std::string i = std::to_string(l);
    const TensorView query = run_.load("w.query." + i), norm = run_.load("w.norm." + i);
    const TensorView dquery = run_.zeros(query.shape(), run_.precision().grad),
                     dnorm = run_.zeros(norm.shape(), run_.precision().grad);
    const std::vector<TensorView> targets(
        dsums_.begin(), dsums_.begin() + static_cast<std::ptrdiff_t>(m.sources.size()));
    moesaic::run(run_.backend(),
                 AttnResBackward{targets, dquery, dnorm, dh, m.p, m.sources, query, norm, eps_});
    run_.expect("grad.w.query." + i, dquery);
    run_.expect("grad.w.norm." + i, dnorm);
  }

  // The toy sublayer's tanh has no op; it belongs to the case and not to the product.
  TensorView sublayer(std::int64_t l, const TensorView& h) {
    const TensorView z = run_.poisoned(h.shape(), run_.precision().stats);
    moesaic::run(run_.backend(), linear_forward(z, h, run_.load("w.f." + std::to_string(l))));
    std::vector<double> y = run_.download(z);
    for (double& v : y)
      v = std::tanh(v);
    return run_.upload(y, h.shape(), run_.precision().compute);
  }
  TensorView sublayer_backward(std::int64_t l, const TensorView& dy) {
    const std::string name = "w.f." + std::to_string(l);
    const std::vector<double> y = run_.download(outputs_[at(l)]);
    std::vector<double> dz = run_.download(dy);
    for (std::size_t i = 0; i < dz.size(); ++i)
      dz[i] *= 1 - y[i] * y[i];
    const TensorView d = run_.upload(dz, dy.shape(), run_.precision().compute);
    const TensorView w = run_.load(name), dw = run_.zeros(w.shape(), run_.precision().grad);
    const TensorView dh = run_.poisoned(dy.shape(), run_.precision().compute);
    moesaic::run(run_.backend(), linear_backward_weight(dw, d, mixes_[at(l)].h));
    moesaic::run(run_.backend(), linear_backward_input(dh, d, w));
    run_.expect("grad." + name, dw);
    return dh;
  }

  CaseRun& run_;
  std::int64_t layers_, block_;
  double eps_;
  std::vector<TensorView> sums_, dsums_, outputs_;  // first the input, then one sum per block
  std::vector<Mix> mixes_;
};

void run_schedule(CaseRun& run) {
  // The sublayers follow each other, and so do their rounding errors; the limit is meant for one op.
  const auto depth = static_cast<double>(run.cfg_int("L"));
  run.scale_limit(depth, depth);
  ToyNetwork network(run);
  network.forward();
  network.backward();
}

const RegisterFamily mixes{{"attnres__mix_", run_mix}};
const RegisterFamily full{{"attnres__full", run_schedule}};
const RegisterFamily blocks{{"attnres__block", run_schedule}};

}  // namespace
}  // namespace moesaic::verify
