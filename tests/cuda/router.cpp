#include "kernels/ops/router.h"

#include <algorithm>
#include <limits>
#include <string>

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

double value_at(ConstTensorView v, std::int64_t i) {
  return v.dtype() == DType::f64 ? v.as<double>()[i] : static_cast<double>(v.as<float>()[i]);
}
void set(TensorView v, std::int64_t i, double x) {
  dispatch_float(v.dtype(), [&]<class T>(TypeTag<T>) { v.as<T>()[i] = T(x); });
}

// Softmax sums in another order than the CPU; the sigmoid has its operations (cpu_math.cuh), and
// f64 the toolkit's exponential.
double tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-14 : 2e-6;
}

// Every element within `limit` of the wanted one, relative to its size; NaN and infinities where the CPU
// has them.
double largest_difference(ConstTensorView got, ConstTensorView want) {
  double worst = 0;
  for (std::int64_t i = 0; i < want.numel(); ++i) {
    const double g = value_at(got, i), w = value_at(want, i);
    if (std::isnan(w) || std::isinf(w)) {
      const bool same = std::isnan(w) ? std::isnan(g) : g == w;
      worst = std::max(worst, same ? 0.0 : INFINITY);
    } else {
      const double d = std::abs(g - w) / std::max(std::abs(w), 1e-30);
      worst = std::max(worst, std::isnan(d) ? INFINITY : d);
    }
  }
  return worst;
}

enum class Logits { smooth, coarse, with_nan, all_equal };

void fill_logits(TensorView view, Logits kind) {
  for (std::int64_t i = 0; i < view.numel(); ++i) {
    const auto index = static_cast<std::uint64_t>(i);
    double x = 2 * standard_normal(31, index);
    if (kind != Logits::smooth) x = std::round(x * 4) / 4;  // ties everywhere
    if (kind == Logits::all_equal) x = 0.5;
    if (kind == Logits::with_nan) {
      const double u = uniform(32, index);
      if (u < 0.02) x = std::numeric_limits<double>::quiet_NaN();
      if (u > 0.98) x = -std::numeric_limits<double>::infinity();
      if (u > 0.5 && u < 0.505) x = 300;
      if (u > 0.6 && u < 0.605) x = -95;  // a subnormal f32 score
    }
    set(view, i, x);
  }
}

struct Case {
  std::int64_t tokens, experts, k;
  DType dtype = DType::f32;
  Logits logits = Logits::smooth;
  RouterScore score = RouterScore::sigmoid;
  bool bias = true, given = false, cutoff = true, renormalize = true;
  int num_groups = 1, topk_groups = 1;

  std::string text() const {
    return std::to_string(tokens) + " tokens, top " + std::to_string(k) + " of " +
           std::to_string(experts) + " " + name(dtype) + ", logits " +
           std::to_string(static_cast<int>(logits)) +
           (score == RouterScore::softmax ? ", softmax" : "") + (bias ? ", bias" : "") +
           (given ? ", given" : "") + (cutoff ? ", cutoff" : "") +
           (renormalize ? "" : ", not renormalised") + ", groups " + std::to_string(num_groups);
  }
};

struct Tensors {
  explicit Tensors(const Case& c)
      : logits({c.tokens, c.experts}, c.dtype),
        scores({c.tokens, c.experts}, c.dtype),
        bias({c.experts}, c.dtype),
        given({c.tokens, c.k}, DType::i32),
        topk({c.tokens, c.k}, DType::i32),
        weights({c.tokens, c.k}, c.dtype),
        cutoff({c.tokens}, c.dtype),
        counts({c.experts}, DType::i32) {
    fill_logits(logits.initial.view(), c.logits);
    for (std::int64_t e = 0; e < c.experts; ++e)  // coarse, so that s + bias has ties too
      set(bias.initial.view(),
          e,
          std::round(standard_normal(33, static_cast<std::uint64_t>(e)) * 2) / 16);
    for (std::int64_t a = 0; a < c.tokens * c.k; ++a)
      given.initial.data<std::int32_t>()[a] =
          static_cast<std::int32_t>((a / c.k * 7 + a % c.k * 3 + a % c.k) % c.experts);
    for (const Twin* t : all())
      if (t != &logits && t != &bias && t != &given)
        std::memset(t->initial.view().data(), 0xff, t->initial.view().bytes());
  }
  std::vector<const Twin*> all() const {
    return {&logits, &scores, &bias, &given, &topk, &weights, &cutoff, &counts};
  }
  template <class Side>
  RouterForward op(const Case& c, const Side& side, bool in_place) const {
    return {.scores = in_place ? side(logits) : side(scores),
            .topk = side(topk),
            .weights = side(weights),
            .cutoff = c.cutoff ? side(cutoff) : TensorView(),
            .counts = side(counts),
            .logits = side(logits),
            .bias = c.bias ? side(bias) : TensorView(),
            .given = c.given ? side(given) : TensorView(),
            .score = c.score,
            .num_groups = c.num_groups,
            .topk_groups = c.topk_groups,
            .renormalize = c.renormalize,
            .route_scale = 2.5};
  }
  Twin logits, scores, bias, given, topk, weights, cutoff, counts;
};

// As require_cuda_matches_cpu(), but element by element, and NaN where the CPU has NaN.
template <class MakeOp>
void require_same_elements(BothBackends& both,
                           const std::vector<const Twin*>& twins,
                           const std::vector<Output>& outputs,
                           const MakeOp& make_op) {
  const auto reset = [&] {
    for (const Twin* twin : twins)
      twin->reset(both.cuda.stream());
  };
  const auto run_on_device = [&] {
    reset();
    run(both.cuda.backend(), make_op([](const Twin& t) { return t.device.view(); }));
    std::vector<OwnedTensor> results;
    for (const auto& output : outputs)
      results.push_back(download(output.twin->device.view(), both.cuda.stream()));
    return results;
  };
  const auto first = run_on_device(), second = run_on_device();
  reset();
  run(both.cpu.backend(), make_op([](const Twin& t) { return t.host.view(); }));
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    INFO("output " << i);
    const ConstTensorView want = outputs[i].twin->host.view();
    CHECK(same_bits(first[i].view(), second[i].view()));
    if (outputs[i].tolerance == 0) {
      CHECK(same_bits(first[i].view(), want));
    } else {
      CHECK(largest_difference(first[i].view(), want) <= outputs[i].tolerance);
    }
  }
}

void check_forward(BothBackends& both,
                   const Case& c,
                   bool in_place = false,
                   KernelPath path = KernelPath::automatic) {
  INFO(c.text() << (in_place ? ", in place" : "")
                << (path == KernelPath::plain ? ", plain path" : ""));
  const Tensors t(c);
  const double close = tolerance(c.dtype);
  std::vector<Output> outputs{
      {in_place ? &t.logits : &t.scores, close}, {&t.topk, 0}, {&t.weights, close}, {&t.counts, 0}};
  if (c.cutoff) outputs.push_back({&t.cutoff, close});
  std::get<CudaContext>(both.cuda.backend()).path = path;
  require_same_elements(both, t.all(), outputs, [&](auto side) { return t.op(c, side, in_place); });
  std::get<CudaContext>(both.cuda.backend()).path = KernelPath::automatic;
}

struct Losses {
  double sequence = 0, switch_loss = 0, global = 0, z = 0;
};

// What the losses and the gradient read: a forward of the CPU, documents, frequencies.
struct Routed {
  Routed(BothBackends& both, const Case& c)
      : forward(c),
        dweights({c.tokens, c.k}, c.dtype),
        dlogits({c.tokens, c.experts}, c.dtype),
        frequency({c.experts}, c.dtype),
        cu({6}, DType::i32),
        tokens({1}, DType::i64),
        documents({1}, DType::f32),
        balance_loss({1}, c.dtype),
        z_loss({1}, c.dtype) {
    run(both.cpu.backend(),
        forward.op(
            c, [](const Twin& x) { return x.initial.view(); }, false));
    fill_normal(dweights.initial.view(), 41);
    fill_normal(frequency.initial.view(), 42, 0.1, 0.3);
    fill_normal(dlogits.initial.view(), 43);
    set(balance_loss.initial.view(), 0, 0.25);
    set(z_loss.initial.view(), 0, 0.125);
    const std::int64_t cuts[] = {0, c.tokens / 3, c.tokens / 3, c.tokens / 2, c.tokens, c.tokens};
    for (int i = 0; i < 6; ++i)  // two documents are empty
      cu.initial.data<std::int32_t>()[i] = static_cast<std::int32_t>(cuts[i]);
    *tokens.initial.data<std::int64_t>() = 3 * c.tokens + 1;
    *documents.initial.data<float>() = 7;
  }
  std::vector<const Twin*> all() const {
    std::vector<const Twin*> twins = forward.all();
    for (const Twin* t :
         {&dweights, &dlogits, &frequency, &cu, &tokens, &documents, &balance_loss, &z_loss})
      twins.push_back(t);
    return twins;
  }
  template <class Side>
  RouterLosses losses(const Losses& w, const Side& side) const {
    return {.sequence_weight = w.sequence,
            .switch_weight = w.switch_loss,
            .global_weight = w.global,
            .z_weight = w.z,
            .cu = side(cu),
            .frequency = side(frequency),
            .tokens = side(tokens),
            .documents = side(documents)};
  }
  Tensors forward;
  Twin dweights, dlogits, frequency, cu, tokens, documents, balance_loss, z_loss;
};

const Losses kLosses[] = {{},
                          {.sequence = 0.3},
                          {.switch_loss = 0.2},
                          {.global = 0.4},
                          {.z = 0.1},
                          {.sequence = 0.3, .switch_loss = 0.2, .global = 0.4, .z = 0.1}};

void check_losses(BothBackends& both, const Case& c) {
  const Routed r(both, c);
  for (const Losses& w : kLosses) {
    INFO(c.text() << ", losses " << w.sequence << " " << w.switch_loss << " " << w.global << " "
                  << w.z);
    require_cuda_matches_cpu(
        both,
        r.all(),
        {{&r.balance_loss, tolerance(c.dtype)}, {&r.z_loss, tolerance(c.dtype)}},
        [&](auto side) {
          return RouterLossForward{.balance_loss = side(r.balance_loss),
                                   .z_loss = side(r.z_loss),
                                   .logits = side(r.forward.logits),
                                   .scores = side(r.forward.scores),
                                   .topk = side(r.forward.topk),
                                   .losses = r.losses(w, side)};
        });
  }
}

enum class Into { own, scores, logits };

// Gradients are differences of sums; relative to the norm of the whole they keep the tolerance of a
// sum.
void check_backward(BothBackends& both, const Case& c) {
  const Routed r(both, c);
  for (const Losses& w : kLosses) {
    for (const Into into : {Into::own, Into::scores, Into::logits}) {
      INFO(c.text() << ", losses " << w.sequence << " " << w.switch_loss << " " << w.global << " "
                    << w.z << ", into " << static_cast<int>(into));
      const Twin& result = into == Into::own      ? r.dlogits
                           : into == Into::scores ? r.forward.scores
                                                  : r.forward.logits;
      require_cuda_matches_cpu(
          both, r.all(), {{&result, c.dtype == DType::f64 ? 1e-13 : 5e-6}}, [&](auto side) {
            return RouterBackward{.dlogits = side(result),
                                  .dweights = side(r.dweights),
                                  .logits = side(r.forward.logits),
                                  .scores = side(r.forward.scores),
                                  .weights = side(r.forward.weights),
                                  .topk = side(r.forward.topk),
                                  .score = c.score,
                                  .renormalize = c.renormalize,
                                  .route_scale = 2.5,
                                  .losses = r.losses(w, side)};
          });
    }
  }
}

void check_capacity(BothBackends& both,
                    std::int64_t tokens,
                    std::int64_t k,
                    std::int64_t experts,
                    std::int64_t capacity,
                    DType dtype,
                    double skew) {
  const Twin topk({tokens, k}, DType::i32), weights({tokens, k}, dtype),
      kept({tokens, k}, DType::u8);
  for (std::int64_t a = 0; a < tokens * k; ++a) {
    const auto index = static_cast<std::uint64_t>(a);
    topk.initial.data<std::int32_t>()[a] = static_cast<std::int32_t>(
        std::pow(uniform(51, index), skew) * static_cast<double>(experts));
    double w = std::round(standard_normal(52, index) * 8) / 8;
    if (uniform(53, index) < 0.03) w = std::numeric_limits<double>::quiet_NaN();
    set(weights.initial.view(), a, w);
  }
  for (const auto policy : {DropPolicy::prob, DropPolicy::position}) {
    INFO(tokens << " tokens, top " << k << " of " << experts << ", capacity " << capacity << " "
                << name(dtype) << ", skew " << skew << ", policy " << static_cast<int>(policy));
    require_cuda_matches_cpu(both, {&topk, &weights, &kept}, {{&kept, 0}}, [&](auto side) {
      return ExpertCapacity{.kept = side(kept),
                            .topk = side(topk),
                            .weights = side(weights),
                            .num_experts = experts,
                            .capacity = capacity,
                            .policy = policy};
    });
  }
}

}  // namespace

TEST_CASE("Router forward on CUDA chooses what the CPU chooses", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto logits : {Logits::smooth, Logits::coarse, Logits::with_nan, Logits::all_equal}) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      check_forward(both, {1, 2, 1, dtype, logits});
      check_forward(both, {5, 7, 3, dtype, logits});  // no access of four experts
      check_forward(both, {33, 64, 8, dtype, logits, RouterScore::sigmoid, false});
      check_forward(both, {70, 160, 6, dtype, logits});
      check_forward(both, {41, 516, 40, dtype, logits});  // more choices than lanes
      check_forward(both, {20, 1024, 128, dtype, logits});
      check_forward(both, {3, 1500, 5, dtype, logits});  // more experts than registers hold
    }
    check_forward(both, {300, 896, 16, DType::f32, logits});
    check_forward(both, {300, 896, 16, DType::f32, logits}, true);
    check_forward(both, {300, 896, 16, DType::f32, logits}, false, KernelPath::plain);
  }
  check_forward(both,
                {4, 8, 8, DType::f32, Logits::coarse, RouterScore::sigmoid, true, false, false});
  check_forward(both, {0, 12, 3});
  check_forward(both, {8192, 896, 16});
}

TEST_CASE("Router forward on CUDA: softmax, groups, given choices", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const auto path : {KernelPath::automatic, KernelPath::plain}) {
      // Coarse logits and no bias: the two sums of a softmax may differ in the last bit, and no choice
      // may hang on it.
      Case c{50, 128, 4, dtype, Logits::coarse, RouterScore::softmax, false};
      check_forward(both, c, false, path);
      check_forward(both, c, true, path);
      c.renormalize = false;
      check_forward(both, c, false, path);
      for (const auto logits :
           {Logits::smooth, Logits::coarse, Logits::with_nan, Logits::all_equal}) {
        Case g{60, 256, 8, dtype, logits};
        g.cutoff = false;
        g.num_groups = 8;
        g.topk_groups = 4;
        check_forward(both, g, false, path);
        g.experts = 64;  // groups of one expert
        g.num_groups = 64;
        g.topk_groups = 40;
        check_forward(both, g, false, path);
        g.experts = 21;  // groups of seven
        g.k = 5;
        g.num_groups = 3;
        g.topk_groups = 1;
        check_forward(both, g, false, path);
        Case r{90, 60, 7, dtype, logits};
        r.given = true;
        check_forward(both, r, false, path);
        r.cutoff = false;
        r.k = 1;
        check_forward(both, r, false, path);
      }
    }
  }
}

#if defined(__FMA__)
// Which expert a token goes to must not depend on the backend: the sigmoid has the same bits. (On a
// processor without fused multiply-add the CPU's last bit is another one.)
TEST_CASE("Sigmoid scores of the router have the same bits on CUDA and CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  Case c{500, 260, 6};
  const Tensors t(c);
  for (std::int64_t i = 0; i < t.logits.initial.view().numel(); ++i)
    set(t.logits.initial.view(), i, -110 + 220.0 * static_cast<double>(i) / (500 * 260));
  require_cuda_matches_cpu(both,
                           t.all(),
                           {{&t.scores, 0}, {&t.topk, 0}, {&t.weights, 0}, {&t.cutoff, 0}},
                           [&](auto side) { return t.op(c, side, false); });
}
#endif

TEST_CASE("Losses of the router on CUDA match the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType dtype : {DType::f32, DType::f64}) {
    check_losses(both, {1, 3, 1, dtype});
    check_losses(both, {65, 33, 4, dtype});
    check_losses(both, {200, 64, 8, dtype, Logits::smooth, RouterScore::softmax});
    check_losses(both, {0, 6, 2, dtype});
  }
  check_losses(both, {1000, 896, 16});
  check_losses(both, {35000, 8, 1});  // more blocks of tokens than the last kernel has threads
}

TEST_CASE("Gradient of the router on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const auto score : {RouterScore::sigmoid, RouterScore::softmax}) {
      check_backward(both, {1, 3, 1, dtype, Logits::smooth, score});
      check_backward(both, {65, 33, 4, dtype, Logits::smooth, score});
      check_backward(both, {9, 200, 50, dtype, Logits::smooth, score});
      Case c{40, 64, 8, dtype, Logits::smooth, score};
      c.renormalize = false;
      check_backward(both, c);
      Case twice{30, 20, 40, dtype, Logits::smooth, score};  // choices that name experts twice
      twice.k = 20;
      twice.cutoff = false;
      twice.given = true;
      check_backward(both, twice);
    }
    check_backward(both, {0, 6, 2, dtype});
  }
  check_backward(both, {1000, 896, 16});
}

TEST_CASE("Expert capacity on CUDA keeps what the CPU keeps", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const std::int64_t capacity : {0, 1, 5, 300}) {
      check_capacity(both, 1, 1, 1, capacity, dtype, 1);
      check_capacity(both, 100, 3, 7, capacity, dtype, 1);
      check_capacity(both, 700, 4, 50, capacity, dtype, 5);
      check_capacity(both, 900, 1, 1, capacity, dtype, 1);  // one expert, several rounds of ties
      check_capacity(both, 0, 2, 5, capacity, dtype, 1);
    }
  }
  check_capacity(both, 8192, 16, 896, 150, DType::f32, 1);
}

}  // namespace moesaic::test
