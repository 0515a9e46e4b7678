// quant__formats: codes, scales and values of the number formats.
#include <cmath>

#include "apps/verify/case_run.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/quant.h"

namespace moesaic::verify {
namespace {

// The inputs of this case are float32 and not on the bfloat16 grid, so that a bf16 run also starts from them.
DType input_type(CaseRun& run) {
  return run.precision().stats;
}

void tables(CaseRun& run) {
  std::vector<double> e2m1, e4m3;
  for (int code = 0; code < 16; ++code)
    e2m1.push_back(e2m1_decode(static_cast<std::uint8_t>(code)));
  for (int code = 0; code < 256; ++code) {
    const double v = e4m3_decode(static_cast<std::uint8_t>(code));
    e4m3.push_back(std::isnan(v) ? 0.0 : v);  // the stored table holds 0 for the two NaN codes
  }
  run.expect("out.e2m1_table", e2m1);
  run.expect("out.e4m3_table_finite", e4m3);
  const auto encode = [&](const std::string& format, std::uint8_t (*code_of)(double) noexcept) {
    std::vector<std::int64_t> codes;
    for (const double x : run.host_reals("in." + format + "_values"))
      codes.push_back(code_of(x));
    run.expect_exact("out." + format + "_codes", codes);
  };
  encode("e2m1", e2m1_encode);
  encode("e4m3", e4m3_encode);
}

void mx(CaseRun& run, MxFormat format, ScaleRule rule) {
  const TensorView w = run.load("in.w", input_type(run));
  const std::int64_t group = run.cfg_int("group"), rows = w.dim(0), cols = w.dim(1);
  const bool four_bit = format == MxFormat::mxfp4;
  const std::string name = std::string("out.") + (four_bit ? "mxfp4" : "mxfp8") +
                           (rule == ScaleRule::floor ? "_floor" : "_ceil");
  QuantizeMx op;
  op.scales = run.poisoned({rows, cols / group}, DType::u8);
  op.codes = run.poisoned({rows, cols}, DType::u8);
  if (four_bit) op.packed = run.poisoned({rows, cols / 2}, DType::u8);
  op.dequant = run.poisoned({rows, cols}, w.dtype());
  op.x = w;
  op.format = format;
  op.rule = rule;
  op.group = group;
  moesaic::run(run.backend(), op);
  run.expect_exact(name + "_code", op.codes);
  run.expect_exact(name + "_scale", op.scales);
  if (four_bit) run.expect_exact(name + "_packed", op.packed);
  run.expect(name + "_dequant", op.dequant);
  const TensorView again = run.poisoned({rows, cols}, w.dtype());
  DequantizeMx back{.y = again, .scales = op.scales, .format = format, .group = group};
  (four_bit ? back.packed : back.codes) = four_bit ? op.packed : op.codes;
  moesaic::run(run.backend(), back);
  if (run.download(again) != run.download(op.dequant))
    run.fail(name + ": decoding the codes gives other values");
}

struct Fp8Result {
  TensorView codes, scales, dequant;
};

Fp8Result fp8(CaseRun& run,
              const std::string& input,
              std::int64_t block_rows,
              std::int64_t block_cols,
              bool power_of_two) {
  const TensorView x = run.load(input, input_type(run));
  const Shape grid{(x.dim(0) + block_rows - 1) / block_rows,
                   (x.dim(1) + block_cols - 1) / block_cols};
  const Fp8Result r{run.poisoned(x.shape(), DType::u8),
                    run.poisoned(grid, x.dtype()),
                    run.poisoned(x.shape(), x.dtype())};
  moesaic::run(run.backend(),
               QuantizeFp8Block{.scales = r.scales,
                                .codes = r.codes,
                                .dequant = r.dequant,
                                .x = x,
                                .block_rows = block_rows,
                                .block_cols = block_cols,
                                .power_of_two = power_of_two});
  const TensorView again = run.poisoned(x.shape(), x.dtype());
  moesaic::run(run.backend(), DequantizeFp8Block{again, r.codes, r.scales, block_rows, block_cols});
  if (run.download(again) != run.download(r.dequant))
    run.fail(input + ": decoding the codes gives other values");
  return r;
}

void run_formats(CaseRun& run) {
  tables(run);
  for (const MxFormat format : {MxFormat::mxfp4, MxFormat::mxfp8}) {
    for (const ScaleRule rule : {ScaleRule::floor, ScaleRule::ceil})
      mx(run, format, rule);
  }
  for (const bool power_of_two : {false, true}) {
    const std::string name = power_of_two ? "out.act_pow2" : "out.act";
    const Fp8Result act = fp8(run, "in.act", 1, 128, power_of_two);
    run.expect_exact(name + "_code", act.codes);
    run.expect(name + "_scale", act.scales);
    run.expect(name + "_dequant", act.dequant);
  }
  const Fp8Result weight = fp8(run, "in.weight", 128, 128, false);
  run.expect_exact("out.weight_code", weight.codes);
  run.expect("out.weight_scale", weight.scales);
  // Straight-through: the gradient of the dequantised weight is added to that of the weight as it is.
  const TensorView dw = run.zeros(run.shape("in.upstream_grad"), run.precision().grad);
  moesaic::run(run.backend(), Accumulate{dw, run.load("in.upstream_grad", input_type(run))});
  run.expect("out.ste_grad", dw);
}

const RegisterFamily family{{"quant__formats", run_formats}};

}  // namespace
}  // namespace moesaic::verify
