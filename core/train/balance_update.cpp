#include "core/train/balance_update.h"

#include "kernels/ops/balance.h"
#include "kernels/ops/step_scalars.h"

namespace moesaic {

void update_balance(Backend& backend,
                    const ParameterStore& params,
                    std::span<const Model::NamedMoe> layers,
                    ConstTensorView scalars,
                    Communicator* world) {
  const ConstTensorView skip = step_scalar(scalars, StepScalar::skip);
  for (const auto& named : layers) {
    const MoeLayer& moe = *named.moe;
    const TensorView bias = params.buffer(moe.bias());
    const ConstTensorView counts = params.buffer(moe.counts());
    switch (moe.options().bias_rule) {
      case BiasRule::none:
        break;
      case BiasRule::sign:
        run(backend,
            BalanceBiasSign{
                .bias = bias, .counts = counts, .skip = skip, .gamma = moe.options().sign_gamma});
        break;
      case BiasRule::quantile:
        run(backend,
            BalanceBiasFromHistogram{.bias = bias,
                                     .histogram = params.buffer(moe.histogram()),
                                     .tokens = step_scalar(scalars, StepScalar::tokens),
                                     .skip = skip,
                                     .top_k = moe.options().top_k});
        break;
      case BiasRule::quantile_exact:
        if (world != nullptr && world->size() > 1)
          world->all_gather(moe.all_margins(), moe.margins(), stream_of(backend));
        run(backend,
            BalanceBiasExact{.bias = bias,
                             .margins = moe.all_margins(),
                             .skip = skip,
                             .top_k = moe.options().top_k});
        break;
    }
    if (moe.frequency().valid())
      run(backend,
          BalanceFrequency{
              .frequency = params.buffer(moe.frequency()), .counts = counts, .skip = skip});
  }
}

}  // namespace moesaic
