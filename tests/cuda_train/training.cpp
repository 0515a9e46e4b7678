// The whole trainer on a GPU against the CPU: the same model, data and code, loss by loss.
#include <cmath>
#include <filesystem>
#include <memory>

#include <unistd.h>

#include "core/checkpoint/checkpoint.h"
#include "kernels/ops/op_list.h"
#include "tests/support/device_tensors.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

constexpr int kSteps = 6;

std::unique_ptr<Run> run_on(Device device, const std::vector<std::string>& overrides) {
  return std::make_unique<Run>(hybrid_config(overrides), nullptr, Stream::Mode::worker, device);
}

void check_close(double got, double want, double tolerance, const char* what) {
  INFO(what << ": " << got << " against " << want);
  CHECK(std::abs(got - want) <= tolerance * std::abs(want));
}

// Kinds of models and rules that meet different ops.
const std::vector<std::vector<std::string>>& variants() {
  static const std::vector<std::vector<std::string>> all{{"optimizer.ema_decay=0.9",
                                                          "model.balance.aux_loss=sequence",
                                                          "model.balance.aux_loss_weight=0.01"},
                                                         {"optimizer.name=muon",
                                                          "optimizer.qk_clip_tau=0.05",
                                                          "model.balance.bias_rule=quantile_exact",
                                                          "model.balance.aux_loss=global",
                                                          "model.balance.aux_loss_weight=0.01"},
                                                         {"model.balance.bias_rule=sign",
                                                          "optimizer.untouched=skip",
                                                          "model.mtp.mtp_hidden=post_norm",
                                                          "model.mla_use_nope=false",
                                                          "model.num_experts=32"},
                                                         {"model.balance.aux_loss=switch",
                                                          "model.balance.aux_loss_weight=0.01",
                                                          "model.capacity_factor=0.8",
                                                          "train.micro_batch_size=2"}};
  return all;
}

std::vector<std::string> with(std::vector<std::string> overrides, const std::string& more) {
  overrides.push_back(more);
  return overrides;
}

void check_curves(const std::vector<std::string>& overrides, double tolerance) {
  const auto cpu = run_on(kCpu, overrides)->steps(kSteps);
  const auto gpu = run_on(kCuda, overrides)->steps(kSteps);
  for (std::size_t i = 0; i < cpu.size(); ++i) {
    INFO("step " << i + 1);
    check_close(gpu[i].loss, cpu[i].loss, tolerance, "loss");
    check_close(gpu[i].mtp_loss, cpu[i].mtp_loss, tolerance, "MTP loss");
    // Sums of a few small terms: their rounding is larger beside their size.
    check_close(gpu[i].indexer_kl, cpu[i].indexer_kl, 30 * tolerance, "indexer KL");
    check_close(gpu[i].balance_loss, cpu[i].balance_loss, 30 * tolerance, "balance loss");
    check_close(gpu[i].router_z, cpu[i].router_z, 30 * tolerance, "router z");
    check_close(gpu[i].grad_norm, cpu[i].grad_norm, 30 * tolerance, "gradient norm");
    CHECK(gpu[i].learning_rate == cpu[i].learning_rate);
    CHECK(gpu[i].tokens == cpu[i].tokens);
    CHECK_FALSE(gpu[i].skipped);
  }
  CHECK(gpu.back().loss < gpu.front().loss);
}

}  // namespace

TEST_CASE("every op has a CUDA kernel", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (const std::string& op : missing_cuda_ops())
    FAIL_CHECK(op << " has none");
}

// In f64 the two differ by the order of sums and the last bit of exponentials only; AdamW divides by the root of squared
// gradients, which amplifies that where gradients are tiny.
TEST_CASE("f64: a GPU trains like the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (std::size_t v = 0; v < variants().size(); ++v) {
    INFO("variant " << v);
    check_curves(with(variants()[v], "run.precision=f64"), 1e-9);
  }
}

// The CPU takes micro-batches whole; gathered keys and masked ones.
TEST_CASE("f64: a GPU that works off micro-batches in pieces trains like the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (const char* form : {"model.indexer.gather_beyond=0", "model.indexer.gather_beyond=65536"}) {
    const std::vector<std::string> whole{
        "run.precision=f64", "activations.recompute=[full]", "train.micro_batch_size=2", form};
    const auto pieces =
        with(with(whole, "activations.piece_tokens=32"), "activations.residual_offload=true");
    INFO(form);
    const auto cpu = run_on(kCpu, whole)->steps(kSteps);
    const auto gpu = run_on(kCuda, pieces)->steps(kSteps);
    const auto again = run_on(kCuda, pieces)->steps(kSteps);
    for (std::size_t i = 0; i < cpu.size(); ++i) {
      INFO("step " << i + 1);
      check_close(gpu[i].loss, cpu[i].loss, 1e-9, "loss");
      check_close(gpu[i].indexer_kl, cpu[i].indexer_kl, 3e-8, "indexer KL");
      check_close(gpu[i].grad_norm, cpu[i].grad_norm, 3e-8, "gradient norm");
      CHECK(same_numbers(gpu[i], again[i]));
    }
  }
}

TEST_CASE("f32: a GPU's loss curve is the CPU's to 1e-4", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (std::size_t v = 0; v < variants().size(); ++v) {
    INFO("variant " << v);
    check_curves(with(variants()[v], "run.precision=f32"), 1e-4);
  }
}

// A choice of experts or keys that lies within the rounding of bf16 falls either way, and moves a loss of few tokens by
// about a per cent.
TEST_CASE("bf16: a GPU's loss curve is the CPU's within the error of bf16", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (std::size_t v = 0; v < variants().size(); ++v) {
    INFO("variant " << v);
    const auto overrides = with(variants()[v], "run.precision=bf16");
    const auto cpu = run_on(kCpu, overrides)->steps(kSteps);
    const auto gpu = run_on(kCuda, overrides)->steps(kSteps);
    for (std::size_t i = 0; i < cpu.size(); ++i) {
      INFO("step " << i + 1);
      check_close(gpu[i].loss, cpu[i].loss, 2e-2, "loss");
      check_close(gpu[i].mtp_loss, cpu[i].mtp_loss, 2e-2, "MTP loss");
    }
  }
}

TEST_CASE("two runs on a GPU give the same bits, and so does recomputation", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (const char* precision : {"run.precision=f32", "run.precision=bf16"}) {
    for (const auto& variant : variants()) {
      const auto overrides = with(variant, precision);
      const auto first = run_on(kCuda, overrides), second = run_on(kCuda, overrides),
                 recomputed = run_on(kCuda, with(overrides, "activations.recompute=[full]"));
      const auto want = first->steps(3);
      const Snapshot state = first->snapshot();
      for (Run* other : {second.get(), recomputed.get()}) {
        INFO(precision << (other == recomputed.get() ? ", recomputed" : ", again"));
        const auto got = other->steps(3);
        for (std::size_t i = 0; i < want.size(); ++i)
          CHECK(same_numbers(got[i], want[i]));
        CHECK(differences(other->snapshot(), state).empty());
      }
    }
  }
}

// Counts of routing, the gradient's norm and the decision to skip a step stay on the device.
TEST_CASE("a step on a GPU waits once for its stream", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (const auto& variant : variants()) {
    const auto run = run_on(kCuda, with(variant, "run.precision=bf16"));
    run->steps(2);
    const std::uint64_t before = host_waits();
    run->steps(3);
    CHECK(host_waits() - before == 3);
  }
}

TEST_CASE("checkpoints cross over between CPU and GPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("moesaic_cross_" + std::to_string(getpid()));
  const auto overrides =
      with({"optimizer.name=muon", "optimizer.ema_decay=0.9"}, "run.precision=f64");
  for (const bool to_gpu : {true, false}) {
    INFO((to_gpu ? "CPU to GPU" : "GPU to CPU"));
    const Device from_device = to_gpu ? kCpu : kCuda, to_device = to_gpu ? kCuda : kCpu;
    const auto from = run_on(from_device, overrides), to = run_on(to_device, overrides);
    from->steps(3);
    const auto saved = from->trainer->state();
    const std::int64_t step = to_gpu ? 3 : 4;  // the number of the folder only
    save_checkpoint(
        folder, step, saved, from->trainer->values(), "", 0, 0, from->trainer->stream());
    const auto tensors = to->trainer->state();
    const auto latest = latest_checkpoint(folder);
    REQUIRE(latest.has_value());
    to->trainer->load_values(load_checkpoint(latest->path, tensors, true, to->trainer->stream()));
    CHECK(differences(to->snapshot(), from->snapshot()).empty());
    const EvalStats here = from->trainer->evaluate(), there = to->trainer->evaluate();
    check_close(there.loss, here.loss, 1e-9, "evaluation");
    for (int i = 0; i < 3; ++i)
      check_close(to->step().loss, from->step().loss, 1e-9, "loss after the checkpoint");
  }
  std::filesystem::remove_all(folder);
}

TEST_CASE("split masters on a GPU: trained like f32 masters, and saved as such", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (std::size_t v = 0; v < variants().size(); ++v) {
    INFO("variant " << v);
    const auto overrides = with(variants()[v], "run.precision=bf16");
    const auto whole = run_on(kCuda, overrides),
               split = run_on(kCuda, with(overrides, "optimizer.master=split"));
    CHECK(differences(split->snapshot(), whole->snapshot()).empty());
    for (int k = 0; k < kSteps; ++k) {
      const StepStats a = whole->step(), b = split->step();
      INFO("step " << k + 1);
      check_close(b.loss, a.loss, 2e-2, "loss");
    }
    const std::filesystem::path folder =
        std::filesystem::temp_directory_path() / ("moesaic_split_" + std::to_string(getpid()));
    save_checkpoint(folder,
                    kSteps,
                    split->trainer->state(),
                    split->trainer->values(),
                    "",
                    0,
                    0,
                    split->trainer->stream());
    for (const Device device : {kCpu, kCuda}) {
      const auto other = run_on(device, overrides);
      other->trainer->load_values(load_checkpoint(latest_checkpoint(folder)->path,
                                                  other->trainer->state(),
                                                  true,
                                                  other->trainer->stream()));
      CHECK(differences(other->snapshot(), split->snapshot()).empty());
    }
    std::filesystem::remove_all(folder);
  }
}

TEST_CASE("a step that is not finite changes nothing on a GPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (const auto& variant : variants()) {
    const auto run =
        run_on(kCuda, with(with(variant, "run.precision=bf16"), "debug.inject_nan_step=3"));
    run->steps(2);
    const Snapshot before = run->snapshot();
    CHECK(run->step().skipped);
    CHECK(differences(run->snapshot(), before).empty());
    CHECK_FALSE(run->step().skipped);
  }
}

}  // namespace moesaic::test
