#include "tests/model/hybrid.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/base/random.h"
#include "core/nn/losses.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/step_scalars.h"
#include "tests/support/catch.h"

namespace moesaic::test {
namespace {

constexpr int kMicroBatches = 2;

std::vector<std::byte> bytes_of(ConstTensorView view) {
  return {view.data(), view.data() + view.bytes()};
}

/// A packed micro-batch with targets one and two tokens further.
struct Batch {
  Batch(std::uint64_t key, const std::vector<std::int32_t>& borders, std::int64_t vocabulary)
      : memory((7 * kTokens + 16) * 4, kCpu, "test batch") {
    std::size_t at = 0;
    const auto take = [&](std::int64_t n) {
      const TensorView view = memory.view({n}, DType::i32, at);
      at += static_cast<std::size_t>(n) * 4;
      return view;
    };
    const TensorView tokens = take(kTokens), positions = take(kTokens), targets = take(kTokens),
                     next = take(kTokens), second = take(kTokens),
                     cu = take(static_cast<std::int64_t>(borders.size()));
    auto* ids = tokens.as<std::int32_t>();
    for (std::int64_t t = 0; t < kTokens; ++t) {
      ids[t] = static_cast<std::int32_t>(uniform(key, static_cast<std::uint64_t>(t)) *
                                         static_cast<double>(vocabulary));
    }
    std::memcpy(cu.data(), borders.data(), borders.size() * 4);
    for (std::size_t d = 1; d < borders.size(); ++d) {
      const std::int32_t begin = borders[d - 1], end = borders[d];
      for (std::int32_t t = begin; t < end; ++t) {
        positions.as<std::int32_t>()[t] = t - begin;
        targets.as<std::int32_t>()[t] = t + 1 < end ? ids[t + 1] : -100;
        next.as<std::int32_t>()[t] = t + 1 < end ? ids[t + 1] : 0;
        second.as<std::int32_t>()[t] = t + 2 < end ? ids[t + 2] : -100;
      }
    }
    sequence.tokens = tokens;
    sequence.positions = positions;
    sequence.targets = targets;
    sequence.mtp_tokens = next;
    sequence.mtp_targets = second;
    sequence.cu = cu;
  }
  Buffer memory;
  Sequence sequence;
};

/// f(weight, gradient, direction) for every element of every parameter, in f64.
template <class F>
void along_direction(const ParameterStore& params, F f) {
  for (std::size_t i = 0; i < params.params().size(); ++i) {
    const ParamId id{static_cast<std::int32_t>(i)};
    for (std::int64_t m = 0; m < std::max<std::int64_t>(1, params.params()[i].members); ++m) {
      const std::uint64_t key = hash_name(params.member_name(id, m)) + 1;
      double* weight = params.weight(id, m).as<double>();
      const double* gradient = params.gradient(id, m).as<double>();
      for (std::int64_t k = 0; k < params.params()[i].shape.numel(); ++k) {
        f(weight[k], gradient[k], standard_normal(key, static_cast<std::uint64_t>(k)));
      }
    }
  }
}

void reset_step_buffers(const ParameterStore& params, Backend& backend) {
  for (std::size_t i = 0; i < params.buffers().size(); ++i) {
    if (params.buffers()[i].reduce != BufferReduce::max) continue;
    run(backend,
        Fill{.y = params.buffer({static_cast<std::int32_t>(i)}),
             .value = -std::numeric_limits<double>::infinity()});
  }
}

}  // namespace

void fill_zero_parameters(ParameterStore& params) {
  for (std::size_t i = 0; i < params.params().size(); ++i) {
    const ParameterSpec& spec = params.params()[i];
    if (spec.init.kind != Init::Kind::zeros) continue;
    const ParamId id{static_cast<std::int32_t>(i)};
    const std::uint64_t key = hash_name(spec.name);
    for (const TensorView view : {params.weight(id, 0), params.master(id, 0)}) {
      dispatch_float(view.dtype(), [&]<class T>(TypeTag<T>) {
        for (std::int64_t k = 0; k < view.numel(); ++k)
          view.as<T>()[k] = T(0.5 * standard_normal(key, static_cast<std::uint64_t>(k)));
      });
    }
  }
}

ModelOptions hybrid_options() {
  ModelOptions o;
  o.hidden = 32;
  o.vocabulary = 61;
  o.init_std = 0.2;
  o.layers = {{.is_kda = true, .is_moe = false},
              {.is_kda = true, .is_moe = true},
              {.is_kda = false, .is_moe = true},
              {.is_kda = true, .is_moe = true},
              {.is_kda = false, .is_moe = true}};
  o.kda = {.hidden = 32,
           .heads = 3,
           .head_dim = 8,
           .gate_lower_bound = -5.0,
           .a_log_entries = 3,
           .init_std = 0.2,
           .chunk_size = 16};
  o.mla = {.hidden = 32,
           .heads = 2,
           .q_lora_rank = 10,
           .kv_lora_rank = 12,
           .qk_nope_dim = 8,
           .qk_rope_dim = 4,
           .v_dim = 6};
  o.mla.output_gate = o.mla.rope = true;
  o.mla.init_std = 0.2;
  o.mla.indexer = IndexerOptions{.heads = 4, .head_dim = 8, .top_k = 5, .rope_dim = 4};
  o.dense = {.hidden = 32, .inner = 40, .activation = {.kind = GluKind::situ}, .init_std = 0.2};
  o.moe = {.hidden = 32,
           .experts = 8,
           .top_k = 3,
           .inner = 12,
           .latent = 16,
           .shared_inner = 24,
           .activation = {.kind = GluKind::situ}};
  o.moe.bias_rule = BiasRule::quantile;
  o.moe.histogram_bins = 31;
  o.moe.aux_loss = AuxLoss::sequence;
  o.moe.aux_weight = 1e-2;
  o.moe.z_weight = 1e-3;
  o.moe.init_std = 0.2;
  o.residual = ResidualKind::attention;
  o.attn_res_block = 2;
  o.mtp = true;
  o.head_chunk_rows = 16;
  return o;
}

StepResult run_step(const StepPlan& plan) {
  const ModelOptions& options = plan.options;
  const bool dry = plan.mode == Stream::Mode::dry;
  ParameterStore params(plan.precision);
  Model model(params, options);
  params.seal(kCpu);
  params.initialize(7);
  fill_zero_parameters(params);
  const bool is_f64 = plan.precision == kF64;
  if (plan.perturbation != 0)
    along_direction(params, [&](double& w, double, double v) { w += plan.perturbation * v; });
  model.plan({kTokens}, plan.policy);

  const Batch batches[kMicroBatches] = {Batch(1, {0, 5, 5, 20, kTokens}, options.vocabulary),
                                        Batch(2, {0, kTokens}, options.vocabulary)};
  BackendOwner owner(
      {.mode = plan.mode, .num_threads = plan.threads, .scratch_bytes = plan.scratch_bytes});
  Arena transient = plan.transient_bytes == 0 ? Arena::measuring(kCpu, "transient")
                                              : Arena(plan.transient_bytes, kCpu, "transient");
  const std::size_t slot_bytes = model.slot_bytes();
  const Buffer slots(slot_bytes * kMicroBatches, kCpu, "slots");
  if (plan.poisoned) {
    transient.poison();
    owner.scratch().poison();
    std::memset(slots.data(), 0xff, slots.bytes());
  }
  const Buffer small(static_cast<std::size_t>(kNumStepScalars + kNumLosses) * 8, kCpu, "scalars");
  const TensorView scalars = small.view({kNumStepScalars}, plan.precision.stats);
  const TensorView losses =
      small.view({kNumLosses}, plan.precision.stats, static_cast<std::size_t>(kNumStepScalars) * 8);
  StepScalars values;
  values.loss_divisor = values.mtp_divisor = values.tokens = kTokens * kMicroBatches;
  values.documents = 4;
  values.write(scalars);

  WeightGradients weight_gradients(plan.weight_gradients);
  std::vector<Model::MicroBatch> micro;
  for (int b = 0; b < kMicroBatches; ++b) {
    const auto size = static_cast<std::int64_t>(slot_bytes);
    micro.push_back(model.make_micro_batch(
        slots.view({size}, DType::u8, slot_bytes * static_cast<std::size_t>(b))));
  }
  Backend& backend = owner.backend();
  reset_step_buffers(params, backend);
  const auto pass = [&](int b, bool forward) {
    RunContext context{
        backend, params, transient, weight_gradients, batches[b].sequence, scalars, losses, true};
    auto& m = micro[static_cast<std::size_t>(b)];
    if (forward) {
      model.forward(context, m);
    } else {
      model.backward(context, m);
      weight_gradients.flush(backend);
    }
  };
  for (int b = 0; b < kMicroBatches; ++b) {
    pass(b, true);
    if (!plan.interleaved) pass(b, false);
  }
  for (int b = 0; plan.interleaved && b < kMicroBatches; ++b)
    pass(b, false);
  owner.stream().synchronize();

  StepResult result;
  result.transient_high_water = transient.high_water_bytes();
  result.scratch_high_water = owner.scratch().high_water_bytes();
  result.slot_bytes = slot_bytes;
  for (const auto& m : micro) {
    for (const Tape& tape : m.layers) {
      result.replays += tape.replays();
      for (const std::string& name : tape.saved_in_vain())
        result.saved_in_vain.push_back(name);
    }
  }
  if (dry) return result;
  if (is_f64) {
    along_direction(params, [&](double, double g, double v) { result.slope += g * v; });
    const double* sums = losses.as<double>();
    const auto sum = [&](Loss which) { return sums[static_cast<int>(which)]; };
    result.objective =
        (sum(Loss::cross_entropy) + options.mtp_weight * sum(Loss::mtp)) / values.loss_divisor +
        sum(Loss::balance) + sum(Loss::router_z);
  }
  result.gradients = bytes_of(params.all_grads());
  result.losses = bytes_of(losses);
  for (std::size_t i = 0; i < params.buffers().size(); ++i) {
    const auto one = bytes_of(params.buffer({static_cast<std::int32_t>(i)}));
    result.buffers.insert(result.buffers.end(), one.begin(), one.end());
  }
  for (auto& m : micro) {
    const auto one = bytes_of(model.final_hidden(m));
    result.hidden.insert(result.hidden.end(), one.begin(), one.end());
  }
  return result;
}

void require_same(const StepResult& a, const StepResult& b) {
  REQUIRE(!a.gradients.empty());
  CHECK(a.hidden == b.hidden);
  CHECK(a.losses == b.losses);
  CHECK(a.buffers == b.buffers);
  CHECK(a.gradients == b.gradients);
}

}  // namespace moesaic::test
