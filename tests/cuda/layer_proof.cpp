// One layer, recompute, two streams, two micro-batches in flight, run twice, equal bits: on a GPU,
// and against the CPU. tests/nn/streams.cpp asks the same of the CPU alone.
#include "tests/support/proof_checks.h"

namespace moesaic::test {
namespace {

struct Tolerance {
  DType compute;
  double first;  ///< relative error of a step from the same weights
  double later;  ///< after updates: AdamW turns the sign of a gradient near zero into a whole step
};
const Tolerance kTolerances[] = {
    {DType::f64, 1e-12, 1e-9}, {DType::f32, 1e-5, 1e-2}, {DType::bf16, 1e-2, 5e-2}};

double value_at(ConstTensorView view, std::int64_t i) {
  return view.dtype() == DType::f64 ? view.as<double>()[i]
                                    : static_cast<double>(view.as<float>()[i]);
}

double largest_difference(ConstTensorView a, ConstTensorView b) {
  double largest = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i)
    largest = std::max(largest, std::abs(value_at(a, i) - value_at(b, i)));
  return largest;
}

// The j-th best of two rows of scores that differ by at most d differ by at most d, so the entry
// that one side put in place j has a score within 2 d of the entry of the other side.
void check_choice(ConstTensorView got,
                  ConstTensorView want,
                  ConstTensorView scores,
                  double difference) {
  const std::int64_t rows = want.dim(0), k = want.dim(1), n = scores.dim(1);
  std::int64_t wrong = 0;
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t j = 0; j < k; ++j) {
      const std::int32_t a = got.as<std::int32_t>()[t * k + j],
                         b = want.as<std::int32_t>()[t * k + j];
      if (a == b) continue;
      const bool both_chosen = a >= 0 && a < n && b >= 0 && b < n;
      if (!both_chosen ||
          std::abs(value_at(scores, t * n + a) - value_at(scores, t * n + b)) > 2 * difference)
        ++wrong;
    }
  }
  CHECK(wrong == 0);
}

void check_choices(const ProofResult& cuda, const ProofResult& cpu, const std::string& step) {
  for (const std::string i : {"0", "1", "2"}) {
    INFO("choices of step " << step << ", micro-batch " << i);
    CHECK(same_bits(cuda.at(step + "counts" + i), cpu.at(step + "counts" + i)));
    const ConstTensorView scores = cpu.at(step + "scores" + i);
    const double difference = largest_difference(cuda.at(step + "scores" + i), scores);
    for (const char* what : {"indices", "best"})
      check_choice(cuda.at(step + what + i), cpu.at(step + what + i), scores, difference);
  }
}

// Results of the updates of the first step depend on the signs of gradients already.
bool is_updated(const std::string& name) {
  return name.find("master ") != std::string::npos || name.find("weight ") != std::string::npos;
}

void check_close(const ProofResult& cuda, const ProofResult& cpu, const Tolerance& tolerance) {
  REQUIRE(cuda.tensors.size() == cpu.tensors.size());
  for (std::size_t i = 0; i < cpu.tensors.size(); ++i) {
    const auto& [name, want] = cpu.tensors[i];
    if (!is_floating(want.view().dtype())) continue;
    const bool first = name.rfind("0/", 0) == 0 && !is_updated(name.substr(0, name.find('.')));
    INFO(name);
    CHECK(relative_error(cuda.tensors[i].second.view(), want.view()) <=
          (first ? tolerance.first : tolerance.later));
  }
}

ProofOptions on_cuda(DType compute) {
  ProofOptions options;
  options.device = kCuda;
  options.precision = proof_precision(compute);
  return options;
}

}  // namespace

TEST_CASE("A layer's steps on CUDA are those on the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (const auto& tolerance : kTolerances) {
    INFO(name(tolerance.compute));
    ProofOptions options = on_cuda(tolerance.compute);
    options.num_lanes = 2;
    options.recompute.all = true;
    const ProofResult cuda = prove(options);
    options.device = kCpu;
    const ProofResult cpu = prove(options);
    check_close(cuda, cpu, tolerance);
    for (int s = 0; s < options.steps; ++s)
      check_choices(cuda, cpu, std::to_string(s) + "/");
    if (tolerance.compute == DType::f64) {
      for (const char* choice : {"0/indices0", "0/indices1", "0/best0", "0/best1"})
        CHECK(same_bits(cuda.at(choice), cpu.at(choice)));
    }
  }
}

TEST_CASE("Recompute, two streams and deferred weight gradients on CUDA change no bit", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (const DType compute : {DType::f64, DType::f32, DType::bf16})
    check_all_variants(on_cuda(compute));
}

TEST_CASE("A dry run of a layer's steps measures the arenas that CUDA needs", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  check_dry_run(on_cuda(DType::bf16));
}

TEST_CASE("Fifty steps on two CUDA streams with poisoned memory give the bits of one stream",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (const DType compute : {DType::f32, DType::bf16}) {
    ProofOptions options = on_cuda(compute);
    options.steps = 50;
    options.size = {.tokens = 1024, .hidden = 256, .inner = 512, .experts = 64, .chosen = 8};
    check_stress(options, 3);
  }
}

}  // namespace moesaic::test
