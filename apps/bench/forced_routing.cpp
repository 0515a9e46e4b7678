#include "apps/bench/forced_routing.h"

#include "apps/bench/a2a_routing.h"
#include "core/base/random.h"

namespace moesaic::bench {

ForcedRouting::ForcedRouting(Model& model, std::int64_t tokens, double zipf, Device device)
    : tokens_(tokens) {
  Stream stream(device, "drawn choices");
  for (const auto& named : model.moe_layers()) {
    const MoeOptions& o = named.moe->options();
    const std::string prefix = named.moe->name() + ".";  // as Choice::layer has it
    const RoutingOptions draw{.experts = o.experts,
                              .choices = o.top_k,
                              .tokens = tokens,
                              .zipf = zipf,
                              .seed = hash_name(prefix)};
    const Shape shape{kTables, tokens, o.top_k};
    const Buffer host =
        make_host_buffer(4 * static_cast<std::size_t>(shape.numel()), device, "drawn choices");
    const TensorView drawn = host.view(shape, DType::i32);
    auto* to = drawn.as<std::int32_t>();
    for (int table = 0; table < kTables; ++table) {
      const TokenChoices choices = draw_choices(draw, table);
      to = std::copy(choices.places.begin(), choices.places.end(), to);
    }
    const Buffer& table =
        tables_.emplace(prefix, Buffer(drawn.bytes(), device, "drawn choices")).first->second;
    copy_tensor(table.view(shape, DType::i32), drawn, stream);
    stream.synchronize();
  }
}

ConstTensorView ForcedRouting::replace(const Choice& choice, Stream&) {
  const auto found = tables_.find(choice.layer);
  if (found == tables_.end()) return {};
  const Shape chosen = choice.chosen.shape();
  MOESAIC_CHECK(choice.first_token + chosen[0] <= tokens_, "tokens of one micro-batch");
  const TensorView all = found->second.view({kTables * tokens_, chosen[1]}, DType::i32);
  const std::int64_t first = choice.micro_batch % kTables * tokens_ + choice.first_token;
  return all.rows(first, first + chosen[0]);
}

}  // namespace moesaic::bench
