// One layer, recompute, two streams, two micro-batches in flight, run twice, equal bits: on the
// CPU. tests/cuda/layer_proof.cpp asks the same of a GPU.
#include "tests/support/proof_checks.h"

namespace moesaic::test {
namespace {

double loss_at_first_step(ProofOptions options,
                          const std::string& target,
                          std::int64_t index,
                          double delta) {
  options.nudge = {target, index, delta};
  return prove(options).at("0/loss").as<double>()[0];
}

void check_derivative(const ProofOptions& options,
                      const std::string& target,
                      ConstTensorView gradient,
                      std::int64_t index) {
  constexpr double kDelta = 1e-5;
  const double numeric = (loss_at_first_step(options, target, index, kDelta) -
                          loss_at_first_step(options, target, index, -kDelta)) /
                         (2 * kDelta);
  INFO(target << " " << index);
  CHECK(gradient.as<double>()[index] == Approx(numeric).epsilon(1e-6).margin(1e-6));
}

}  // namespace

TEST_CASE("The proof layer's gradients are the derivatives of its objective") {
  ProofOptions options;
  options.precision = proof_precision(DType::f64);
  options.steps = 1;
  options.num_lanes = 2;
  options.recompute.all = true;
  const ProofResult result = prove(options);
  for (const auto* name :
       {"norm_in.weight", "up.weight", "router.weight", "down.weight", "norm_out.weight"}) {
    const ConstTensorView gradient = result.at(std::string("0/grad ") + name);
    for (const std::int64_t i : {std::int64_t{0}, gradient.numel() / 2, gradient.numel() - 1})
      check_derivative(options, name, gradient, i);
  }
  for (const std::int64_t i : {0, 4321})
    check_derivative(options, "x", result.at("0/dx0"), i);
}

TEST_CASE("Recompute, two streams and deferred weight gradients on the CPU change no bit") {
  for (const DType compute : {DType::f64, DType::f32, DType::bf16}) {
    ProofOptions options;
    options.precision = proof_precision(compute);
    check_all_variants(options);
  }
}

TEST_CASE("Streams at work in the caller, or with another number of threads, give the same bits") {
  ProofOptions options;
  options.recompute.all = true;
  const ProofResult want = prove(options);
  for (const int lanes : {1, 2}) {
    options.num_lanes = lanes;
    options.mode = Stream::Mode::immediate;
    options.num_threads = 1;
    check_same_bits(prove(options), want);
    options.mode = Stream::Mode::worker;
    options.num_threads = 3;
    check_same_bits(prove(options), want);
  }
}

TEST_CASE("A dry run of a layer's steps measures the arenas that the CPU needs") {
  for (const DType compute : {DType::f32, DType::bf16}) {
    ProofOptions options;
    options.precision = proof_precision(compute);
    check_dry_run(options);
  }
}

TEST_CASE("Fifty steps on two CPU streams with poisoned memory give the bits of one stream") {
  ProofOptions options;
  options.steps = 50;
  options.num_threads = 1;
  options.size = {.tokens = 48, .hidden = 32, .inner = 40, .experts = 16, .chosen = 4};
  check_stress(options, 5);
}

TEST_CASE("A recompute policy may not name what a step chooses") {
  ProofOptions options;
  options.recompute.patterns = {"choice.*"};
  CHECK_THROWS_AS(measure(options), UsageError);
}

}  // namespace moesaic::test
