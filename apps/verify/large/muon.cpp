// Muon on matrices for the tensor cores: 128 x 256 and its relatives, a batch, blocks per head.
#include "kernels/ops/muon.h"

#include <algorithm>

#include <fmt/format.h>

#include "apps/verify/case_run.h"
#include "apps/verify/large/case_builder.h"

namespace moesaic::verify {
namespace {

void run_muon(CaseRun& run) {
  const DType master = run.precision().master;
  // Products of f32 numbers there are products of two bf16 halves each: 17 bits of 24, and bf16_products leave 8.
  const bool low = run.cfg_bool("bf16_products");
  run.scale_limit(low ? 4096 : 64, low ? 8 : 1);
  const Shape shape = run.shape("in.w");
  const TensorView w = run.upload(run.host_reals("in.w"), shape, master),
                   momentum = run.upload(run.host_reals("in.momentum"), shape, master);
  std::vector<double> host(kNumStepScalars);
  StepScalars scalars;
  scalars.learning_rate = 0.1;
  scalars.clip_factor = 0.5;
  scalars.write(
      TensorView(reinterpret_cast<std::byte*>(host.data()), DType::f64, {kNumStepScalars}));
  std::vector<RowBlock> blocks;
  const std::int64_t rows = shape[shape.rank - 2], height = run.cfg_int("block");
  for (std::int64_t begin = 0; begin < rows; begin += height)
    blocks.push_back({begin, begin + height});
  moesaic::run(run.backend(),
               MuonUpdate{.w = w,
                          .momentum = momentum,
                          .w_compute = {},
                          .dw = run.load("in.dw", master),
                          .scalars = run.upload(host, {kNumStepScalars}, master),
                          .blocks = blocks,
                          .weight_decay = 0.1,
                          .bf16_products = low && master == DType::f32});
  run.expect("out.w", w);
  run.expect("aux.momentum", momentum);
}

const RegisterFamily family{{"muon__", run_muon}};

void muon(CaseBuilder& b, const Shape& shape, std::int64_t block, bool bf16_products) {
  b.cfg(fmt::format(R"({{"block": {}, "bf16_products": {}}})", block, bf16_products));
  b.normal("in.w", shape, 0.02);
  b.normal("in.momentum", shape, 0.1);
  b.normal("in.dw", shape, 0.1);
  b.accuracy(shape[shape.rank - 1], 4);
  const bool halved = std::min(block, shape[shape.rank - 1]) >= 256;
  b.expect_path("muon_update", !bf16_products ? "split" : halved ? "bf16_halved" : "bf16");
}

}  // namespace

void add_muon_cases(LargeCases& cases) {
  const auto add = [&](const std::string& name, Shape shape, std::int64_t block, bool low = false) {
    cases.push_back({"muon__" + name, [=](CaseBuilder& b) { muon(b, shape, block, low); }});
  };
  add("large_128x256", {128, 256}, 128);
  add("large_tall", {264, 136}, 264);
  add("large_batch", {3, 128, 192}, 128);
  add("large_heads", {256, 192}, 128);
  add("large_bf16_products", {128, 256}, 128, true);
  add("large_bf16_halved", {2, 520, 328}, 520, true);
}

}  // namespace moesaic::verify
