// Properties of whole models that need no reference values: documents do not see each other, the past does not see the
// future, the order of experts has no meaning.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "core/base/random.h"
#include "core/nn/losses.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/step_scalars.h"
#include "tests/model/hybrid.h"
#include "tests/support/catch.h"

namespace moesaic::test {
namespace {

using Ids = std::vector<std::int32_t>;

Ids random_ids(std::int64_t n, std::int64_t vocabulary, std::uint64_t key = 21) {
  Ids ids;
  for (std::int64_t t = 0; t < n; ++t) {
    ids.push_back(static_cast<std::int32_t>(uniform(key, static_cast<std::uint64_t>(t)) *
                                            static_cast<double>(vocabulary)));
  }
  return ids;
}

/// A model with initial values, and one micro-batch through it.
class Probe {
 public:
  explicit Probe(const ModelOptions& options, const Precision& precision = kF32, int threads = 1)
      : options_(options), threads_(threads), params(precision), model(params, options) {
    params.seal(kCpu);
    params.initialize(7);
    fill_zero_parameters(params);
  }

  /// The normalised hidden states, one entry per token. With `backward`, gradients are in the store afterwards.
  std::vector<std::vector<std::byte>> hidden(const Ids& ids,
                                             const Ids& borders,
                                             bool backward = false) {
    const auto tokens = static_cast<std::int64_t>(ids.size());
    model.plan({tokens}, {});
    const Buffer slot(model.slot_bytes(), kCpu, "slot");
    const Buffer integers((3 * ids.size() + borders.size()) * 4, kCpu, "batch");
    const auto place = [&](const Ids& values, std::size_t at) {
      const TensorView view =
          integers.view({static_cast<std::int64_t>(values.size())}, DType::i32, at * 4);
      std::memcpy(view.data(), values.data(), values.size() * 4);
      return view;
    };
    Ids positions, targets;
    for (std::size_t d = 1; d < borders.size(); ++d) {
      for (std::int32_t t = borders[d - 1]; t < borders[d]; ++t) {
        positions.push_back(t - borders[d - 1]);
        targets.push_back(t + 1 < borders[d] ? ids[static_cast<std::size_t>(t) + 1] : -100);
      }
    }
    Sequence sequence;
    sequence.tokens = place(ids, 0);
    sequence.positions = place(positions, ids.size());
    sequence.targets = place(targets, 2 * ids.size());
    sequence.cu = place(borders, 3 * ids.size());
    const DType stats = params.precision().stats;
    const Buffer small(static_cast<std::size_t>(kNumStepScalars + kNumLosses) * 8, kCpu, "scalars");
    const TensorView scalars = small.view({kNumStepScalars}, stats);
    StepScalars values;
    values.loss_divisor = values.tokens = static_cast<double>(tokens);
    values.write(scalars);
    BackendOwner owner({.device = kCpu,
                        .mode = Stream::Mode::immediate,
                        .num_threads = threads_,
                        .scratch_bytes = std::size_t{16} << 20,
                        .name = "test"});
    Arena transient(std::size_t{16} << 20, kCpu, "transient");
    WeightGradients at_once;
    RunContext context{owner.backend(),
                       params,
                       transient,
                       at_once,
                       sequence,
                       scalars,
                       small.view({kNumLosses}, stats, kNumStepScalars * 8),
                       backward};
    Model::MicroBatch batch =
        model.make_micro_batch(slot.view({static_cast<std::int64_t>(slot.bytes())}, DType::u8));
    model.forward(context, batch);
    if (backward) model.backward(context, batch);
    const ConstTensorView n = model.final_hidden(batch);
    std::vector<std::vector<std::byte>> rows;
    for (std::int64_t t = 0; t < tokens; ++t)
      rows.emplace_back(n.rows(t, t + 1).data(),
                        n.rows(t, t + 1).data() + n.rows(t, t + 1).bytes());
    return rows;
  }

 private:
  ModelOptions options_;
  int threads_;

 public:
  ParameterStore params;
  Model model;
};

ModelOptions trunk(const std::function<void(ModelOptions&)>& change = [](ModelOptions&) {}) {
  ModelOptions o = hybrid_options();
  o.mtp = false;
  change(o);
  return o;
}

/// Every kind of layer by itself, and all of them.
std::vector<std::pair<const char*, ModelOptions>> stacks() {
  return {{"all kinds", trunk()},
          {"KDA", trunk([](auto& o) {
             o.layers = {{true, false}, {true, false}, {true, false}};
           })},
          {"KDA with the softplus gate of low rank", trunk([](auto& o) {
             o.layers = {{true, false}, {true, true}};
             o.kda.gate_lower_bound.reset();
             o.kda.full_rank_gate = false;
           })},
          {"dense MLA", trunk([](auto& o) {
             o.layers = {{false, false}, {false, true}};
             o.mla.indexer.reset();
           })},
          {"sparse MLA", trunk([](auto& o) {
             o.layers = {{false, false}, {false, true}};
           })},
          {"plain residuals, plain mixtures", trunk([](auto& o) {
             o.residual = ResidualKind::plain;
             o.moe.latent = 0;
             o.moe.aux_loss = AuxLoss::none;
           })}};
}

double as_real(const std::vector<std::byte>& row, std::size_t i, DType type) {
  const auto at = [&]<class T>(TypeTag<T>) {
    T x{};
    std::memcpy(&x, row.data() + i * sizeof(T), sizeof(T));
    return static_cast<double>(x);
  };
  double value = 0;
  dispatch_float(type, [&]<class T>(TypeTag<T> tag) { value = at(tag); });
  return value;
}

double relative_error(const std::vector<std::vector<std::byte>>& got,
                      DType got_type,
                      const std::vector<std::vector<std::byte>>& want,
                      DType want_type) {
  REQUIRE(got.size() == want.size());
  double difference = 0, norm = 0;
  for (std::size_t t = 0; t < got.size(); ++t) {
    for (std::size_t i = 0; i < want[t].size() / byte_size(want_type); ++i) {
      const double w = as_real(want[t], i, want_type), d = as_real(got[t], i, got_type) - w;
      difference += d * d;
      norm += w * w;
    }
  }
  return std::sqrt(difference / norm);
}

/// Copies member `from` of every tensor of the experts of `source` to member `to` of those of `target`.
void copy_expert(const ParameterStore& source,
                 std::int64_t from,
                 const ParameterStore& target,
                 std::int64_t to) {
  for (std::size_t i = 0; i < source.params().size(); ++i) {
    if (source.params()[i].members == 0) continue;
    const ParamId id{static_cast<std::int32_t>(i)};
    const TensorView a = source.weight(id, from),
                     b = target.weight(target.find(source.params()[i].name), to);
    REQUIRE(a.bytes() == b.bytes());
    std::memcpy(b.data(), a.data(), a.bytes());
  }
}

bool all_zero(ConstTensorView view) {
  return std::all_of(
      view.data(), view.data() + view.bytes(), [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace

TEST_CASE("packed documents have the bits of separate ones through whole models") {
  const Ids borders{
      0, 5, 5, 6, 38, 75, 92};  // one empty, one of a single token, several longer than a chunk
  for (const auto& [what, options] : stacks()) {
    for (const Precision& precision : {kF32, kBf16}) {
      for (const int threads : {1, 3}) {
        INFO(what << ", " << name(precision.compute) << ", " << threads << " threads");
        Probe probe(options, precision, threads);
        const Ids ids = random_ids(borders.back(), options.vocabulary);
        const auto packed = probe.hidden(ids, borders);
        for (std::size_t d = 1; d < borders.size(); ++d) {
          const std::int32_t begin = borders[d - 1], end = borders[d];
          if (begin == end) continue;
          INFO("document " << d);
          const auto alone =
              probe.hidden({ids.begin() + begin, ids.begin() + end}, {0, end - begin});
          int wrong = 0;
          for (std::int32_t t = begin; t < end; ++t)
            wrong +=
                packed[static_cast<std::size_t>(t)] == alone[static_cast<std::size_t>(t - begin)]
                    ? 0
                    : 1;
          CHECK(wrong == 0);
        }
      }
    }
  }
}

TEST_CASE("later tokens change no bit of earlier hidden states") {
  constexpr std::int64_t kLength = 50;
  for (const auto& [what, options] : stacks()) {
    Probe probe(options);
    const Ids ids = random_ids(kLength, options.vocabulary),
              other = random_ids(kLength, options.vocabulary, 22);
    const auto before = probe.hidden(ids, {0, kLength});
    for (const std::size_t p : {1U, 7U, 16U, 17U, 33U, 49U}) {
      INFO(what << ", tokens from " << p << " on are others");
      Ids changed = ids;
      for (std::size_t t = p; t < kLength; ++t)
        changed[t] = other[t] == ids[t] ? (ids[t] + 1) % 61 : other[t];
      const auto after = probe.hidden(changed, {0, kLength});
      CHECK(std::equal(
          before.begin(), before.begin() + static_cast<std::ptrdiff_t>(p), after.begin()));
      CHECK(before[p] != after[p]);
      CHECK(before.back() != after.back());
    }
  }
}

TEST_CASE("the last token sees the first: nothing is cut off") {
  for (const auto& [what, options] : stacks()) {
    INFO(what);
    Probe probe(options);
    Ids ids = random_ids(20, options.vocabulary);
    const auto before = probe.hidden(ids, {0, 20});
    ids[0] = (ids[0] + 1) % 61;
    const auto after = probe.hidden(ids, {0, 20});
    CHECK(
        std::count_if(after.begin(), after.end(), [&, t = std::size_t{0}](const auto& row) mutable {
          return row != before[t++];
        }) > 15);
  }
}

TEST_CASE("experts in another order, with their router rows, give the same model") {
  const ModelOptions options = trunk();
  const std::int64_t experts = options.moe.experts, d = options.hidden;
  Probe plain(options, kF64), permuted(options, kF64);
  std::vector<std::int64_t> order(static_cast<std::size_t>(experts));
  std::iota(order.begin(), order.end(), 0);
  std::rotate(order.begin(), order.begin() + 3, order.end());
  std::swap(order[0], order[5]);
  for (std::int64_t e = 0; e < experts; ++e)
    copy_expert(plain.params, order[static_cast<std::size_t>(e)], permuted.params, e);
  const auto mixtures = plain.model.moe_layers(), permuted_mixtures = permuted.model.moe_layers();
  for (std::size_t i = 0; i < mixtures.size(); ++i) {
    const auto* from = plain.params.buffer(mixtures[i].moe->bias()).as<double>();
    for (std::int64_t e = 0; e < experts; ++e)
      plain.params.buffer(mixtures[i].moe->bias()).as<double>()[e] = 0.02 * static_cast<double>(e);
    auto* to = permuted.params.buffer(permuted_mixtures[i].moe->bias()).as<double>();
    for (std::int64_t e = 0; e < experts; ++e)
      to[e] = from[order[static_cast<std::size_t>(e)]];
  }
  int routers = 0;
  for (std::size_t i = 0; i < plain.params.params().size(); ++i) {
    if (plain.params.params()[i].part != Part::router) continue;
    const ParamId id{static_cast<std::int32_t>(i)};
    for (std::int64_t e = 0; e < experts; ++e) {
      std::memcpy(permuted.params.weight(id, 0).as<double>() + e * d,
                  plain.params.weight(id, 0).as<double>() + order[static_cast<std::size_t>(e)] * d,
                  static_cast<std::size_t>(d) * sizeof(double));
    }
    ++routers;
  }
  CHECK(routers == 4);
  const Ids ids = random_ids(40, options.vocabulary);
  const auto a = plain.hidden(ids, {0, 11, 40}, true), b = permuted.hidden(ids, {0, 11, 40}, true);
  CHECK(relative_error(b, DType::f64, a, DType::f64) < 1e-12);
  // The gradients move with the experts.
  for (std::size_t i = 0; i < plain.params.params().size(); ++i) {
    const ParameterSpec& spec = plain.params.params()[i];
    if (spec.members == 0) continue;
    const ParamId id{static_cast<std::int32_t>(i)};
    for (std::int64_t e = 0; e < experts; ++e) {
      const TensorView x = permuted.params.gradient(id, e),
                       y = plain.params.gradient(id, order[static_cast<std::size_t>(e)]);
      double difference = 0, norm = 0;
      for (std::int64_t k = 0; k < x.numel(); ++k) {
        const double w = y.as<double>()[k], delta = x.as<double>()[k] - w;
        difference += delta * delta;
        norm += w * w;
      }
      INFO(spec.name << " of expert " << e);
      CHECK(difference <= 1e-16 * norm);
    }
  }
}

TEST_CASE(
    "all tokens to one expert: the model is that of one expert, the others have exactly no "
    "gradient") {
  const auto options = [](std::int64_t experts) {
    return trunk([&](ModelOptions& o) {
      o.moe.experts = experts;
      o.moe.top_k = 1;
      o.moe.bias_rule = BiasRule::none;
      o.moe.aux_loss = AuxLoss::none;
      o.moe.z_weight = 0;
    });
  };
  constexpr std::int64_t kChosen = 3, kExperts = 8;
  Probe many(options(kExperts), kF64), one(options(1), kF64);
  for (const auto& named : many.model.moe_layers())
    many.params.buffer(named.moe->bias()).as<double>()[kChosen] = 10;
  copy_expert(many.params, kChosen, one.params, 0);
  for (std::size_t i = 0; i < many.params.params().size(); ++i) {
    if (many.params.params()[i].part != Part::router) continue;
    const ParamId id{static_cast<std::int32_t>(i)};
    std::copy_n(many.params.weight(id, 0).as<double>() + kChosen * 32,
                32,
                one.params.weight(one.params.find(many.params.params()[i].name), 0).as<double>());
  }
  const Ids ids = random_ids(45, 61);
  const auto a = many.hidden(ids, {0, 20, 45}, true), b = one.hidden(ids, {0, 20, 45}, true);
  CHECK(relative_error(a, DType::f64, b, DType::f64) < 1e-12);
  for (const auto& named : many.model.moe_layers()) {
    const auto* counts = many.params.buffer(named.moe->counts()).as<std::int64_t>();
    for (std::int64_t e = 0; e < kExperts; ++e)
      CHECK(counts[e] == (e == kChosen ? 45 : 0));
  }
  for (std::size_t i = 0; i < many.params.params().size(); ++i) {
    if (many.params.params()[i].members == 0) continue;
    const ParamId id{static_cast<std::int32_t>(i)};
    for (std::int64_t e = 0; e < kExperts; ++e) {
      INFO(many.params.params()[i].name << " of expert " << e);
      CHECK(all_zero(many.params.gradient(id, e)) == (e != kChosen));
    }
  }
}

TEST_CASE("a micro-batch without tokens passes forward and backward") {
  for (const Ids& borders : {Ids{0}, Ids{0, 0}}) {
    Probe probe(trunk());
    CHECK(probe.hidden({}, borders, true).empty());
    const TensorView grads = probe.params.all_grads();
    const auto* g = grads.as<float>();
    CHECK(std::all_of(g, g + grads.numel(), [](float x) { return x == 0.0F; }));
  }
}

TEST_CASE("an expert without tokens has exactly no gradient") {
  ModelOptions options = trunk();
  Probe probe(options);
  for (const auto& named : probe.model.moe_layers())
    probe.params.buffer(named.moe->bias()).as<float>()[2] = -10;
  probe.hidden(random_ids(60, options.vocabulary), {0, 60}, true);
  for (const auto& named : probe.model.moe_layers()) {
    const auto* counts = probe.params.buffer(named.moe->counts()).as<std::int64_t>();
    CHECK(counts[2] == 0);
    CHECK(std::accumulate(counts, counts + options.moe.experts, std::int64_t{0}) ==
          60 * options.moe.top_k);
  }
  for (std::size_t i = 0; i < probe.params.params().size(); ++i) {
    if (probe.params.params()[i].members == 0) continue;
    INFO(probe.params.params()[i].name);
    CHECK(all_zero(probe.params.gradient({static_cast<std::int32_t>(i)}, 2)));
  }
}

TEST_CASE("bf16 hidden states stay close to those of f32") {
  // Nothing is chosen, so that rounding cannot choose otherwise.
  const ModelOptions options = trunk([](ModelOptions& o) {
    o.eps = o.kda.eps = o.moe.eps = 0.1;
    o.moe.top_k = o.moe.experts;
    o.moe.bias_rule = BiasRule::none;
    o.mla.indexer->top_k = 64;
  });
  Probe narrow(options, kBf16), wide(options, kF32), exact(options, kF64);
  const Ids ids = random_ids(64, options.vocabulary);
  const auto reference = exact.hidden(ids, {0, 30, 64});
  CHECK(relative_error(wide.hidden(ids, {0, 30, 64}), DType::f32, reference, DType::f64) < 1e-5);
  const double error =
      relative_error(narrow.hidden(ids, {0, 30, 64}), DType::bf16, reference, DType::f64);
  CHECK(error < 0.03);
  CHECK(error > 1e-4);  // it is another arithmetic
}

}  // namespace moesaic::test
