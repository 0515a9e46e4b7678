#include "kernels/ops/initial_values.h"

// Promised by core/base/random_math.h.
#pragma GCC optimize("fp-contract=off")

#include "core/base/split_float.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/initial_value.h"

namespace moesaic {
namespace {

constexpr std::int64_t kGrain = 4096;

void store(const TensorView& to, std::int64_t i, double value) {
  switch (to.dtype()) {
    case DType::f64:
      to.as<double>()[i] = value;
      return;
    case DType::f32:
      to.as<float>()[i] = static_cast<float>(value);
      return;
    default:
      to.as<bf16>()[i] = bf16(static_cast<float>(value));
  }
}

}  // namespace

void launch(CpuContext& context, const InitialValues& op) {
  context.stream.enqueue([op, index = op.index(), &pool = context.pool] {
    pool.parallel_for(op.y.numel(), kGrain, [&op, &index](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const double value = random_math::initial_value(
            op.kind,
            op.a,
            op.b,
            op.key,
            random_math::whole_index(index, static_cast<std::uint64_t>(i)));
        if (op.remainder.empty()) {
          store(op.y, i, value);
        } else {
          split_float(
              static_cast<float>(value), op.y.as<bf16>()[i], op.remainder.as<std::uint16_t>()[i]);
        }
        if (!op.copy.empty()) store(op.copy, i, value);
      }
    });
  });
}

}  // namespace moesaic
