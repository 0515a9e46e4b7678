#include "apps/generator.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/random.h"
#include "core/checkpoint/checkpoint.h"
#include "core/model/from_config.h"

namespace moesaic::apps {
namespace {
constexpr std::int64_t kSmallestWindow = 32;
}

Generator::Generator(const config::Config& config,
                     const std::filesystem::path& checkpoint,
                     bool average)
    : assembly_(assemble(config, false, resolve_device(config))),
      context_(config.data.sequence_length) {
  const int threads = static_cast<int>(config.run.threads);
  StepMemory
      memory;  // kernels are chosen by sizes, so that a short window may need more than a long one
  for (std::int64_t window = std::min(kSmallestWindow, context_);;
       window = std::min(2 * window, context_)) {
    const StepMemory m =
        measure_step(*assembly_.model,
                     *assembly_.params,
                     nullptr,
                     assembly_.device,
                     threads,
                     {.tokens = window, .step_tokens = window, .most_documents = 2, .mtp = false},
                     RecomputePolicy{.all = true, .patterns = {}});
    memory.scratch = std::max(memory.scratch, m.scratch);
    memory.transient = std::max(memory.transient, m.transient);
    memory.slot = std::max(memory.slot, m.slot);
    if (window == context_) break;
  }
  backend_ = std::make_unique<BackendOwner>(BackendOwner::Options{.device = assembly_.device,
                                                                  .num_threads = threads,
                                                                  .scratch_bytes = memory.scratch,
                                                                  .name = "generate"});
  transient_ = std::make_unique<Arena>(memory.transient, assembly_.device, "transient");
  slot_ = Buffer(memory.slot, assembly_.device, "activations");
  small_ = Buffer(static_cast<std::size_t>(2 * context_ + 3) * 4 +
                      static_cast<std::size_t>(config.model.vocab_size + 64) * 8,
                  assembly_.device,
                  "context");
  load(checkpoint, average);
}

Generator::~Generator() = default;

void Generator::load(const std::filesystem::path& checkpoint, bool average) {
  auto tensors = weight_tensors(*assembly_.params);
  if (average) {
    for (StateTensor& t : tensors) {
      if (assembly_.params->find(t.name).valid() || t.name.find("experts.") != std::string::npos)
        t.name = "ema/" + t.name;
    }
  }
  load_checkpoint(checkpoint, tensors, false, backend_->stream());
  refresh_weights(*assembly_.params, backend_->backend());
  backend_->stream().synchronize();
}

// Short contexts run in short windows: powers of two up to the training length.
void Generator::use_window(std::int64_t tokens) {
  std::int64_t window = kSmallestWindow;
  while (window < tokens)
    window *= 2;
  window = std::min(window, context_);
  if (window == window_) return;
  window_ = window;
  assembly_.model->plan({window}, RecomputePolicy{.all = true, .patterns = {}});
  activations_ = std::make_unique<Model::MicroBatch>(assembly_.model->make_micro_batch(
      slot_.view({static_cast<std::int64_t>(assembly_.model->slot_bytes())}, DType::u8)));
}

std::vector<double> Generator::next_logits(const std::vector<std::int32_t>& tokens) {
  MOESAIC_CHECK(!tokens.empty(), "a context holds at least one token");
  const std::int64_t used =
      std::min<std::int64_t>(context_, static_cast<std::int64_t>(tokens.size()));
  use_window(used);
  // The rest of the window is a document of its own, which the context cannot see.
  std::vector<std::int32_t> host(static_cast<std::size_t>(2 * window_) + 3, 0);
  std::copy(tokens.end() - used, tokens.end(), host.begin());
  for (std::int64_t t = 0; t < window_; ++t)
    host[static_cast<std::size_t>(window_ + t)] =
        static_cast<std::int32_t>(t < used ? t : t - used);
  const auto cu = static_cast<std::size_t>(2 * window_);
  host[cu + 1] = static_cast<std::int32_t>(used);
  host[cu + 2] = static_cast<std::int32_t>(window_);
  const auto n = static_cast<std::int64_t>(host.size());
  const TensorView device = small_.view({n}, DType::i32);
  copy_tensor(device,
              ConstTensorView(reinterpret_cast<const std::byte*>(host.data()), DType::i32, {n}),
              backend_->stream());
  Sequence sequence;
  sequence.tokens = device.rows(0, window_);
  sequence.positions = device.rows(window_, 2 * window_);
  sequence.cu = device.rows(2 * window_, 2 * window_ + (used < window_ ? 3 : 2));
  WeightGradients none;
  RunContext context{
      backend_->backend(), *assembly_.params, *transient_, none, sequence, {}, {}, false};
  assembly_.model->forward(context, *activations_);

  const std::int64_t vocabulary = assembly_.model->head().vocabulary();
  const DType stats = assembly_.params->precision().stats;
  const std::size_t offset = (static_cast<std::size_t>(2 * context_ + 3) * 4 + 63) / 64 * 64;
  const TensorView logits = small_.view({1, vocabulary}, stats, offset);
  assembly_.model->head().logits(
      context, assembly_.model->final_hidden(*activations_).rows(used - 1, used), logits);
  const Buffer host_memory(logits.bytes(), kCpu, "logits, host");
  const TensorView back = host_memory.view(logits.shape(), stats);
  copy_tensor(back, logits, backend_->stream());
  backend_->stream().synchronize();
  std::vector<double> out(static_cast<std::size_t>(vocabulary));
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = stats == DType::f64 ? back.as<double>()[i] : static_cast<double>(back.as<float>()[i]);
  return out;
}

std::int32_t sample_token(const std::vector<double>& logits,
                          const SamplingOptions& options,
                          std::uint64_t position) {
  for (const double logit : logits) {
    if (!std::isfinite(logit))
      throw NumericsError(
          "the model's logits are not finite: this checkpoint holds broken weights; take an "
          "earlier one with --step");
  }
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto better = [&](std::int32_t a, std::int32_t b) {
    const double x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x > y || (x == y && a < b);
  };
  const auto keep = options.top_k > 0 ? std::min<std::size_t>(
                                            order.size(), static_cast<std::size_t>(options.top_k))
                                      : order.size();
  std::partial_sort(
      order.begin(), order.begin() + static_cast<std::ptrdiff_t>(keep), order.end(), better);
  if (options.temperature <= 0) return order[0];
  order.resize(keep);
  const double top = logits[static_cast<std::size_t>(order[0])];
  double total = 0;
  for (const auto i : order)
    total += std::exp((logits[static_cast<std::size_t>(i)] - top) / options.temperature);
  double at = uniform(mix64(options.seed), position) * total;
  for (const auto i : order) {
    at -= std::exp((logits[static_cast<std::size_t>(i)] - top) / options.temperature);
    if (at < 0) return i;
  }
  return order.back();
}

void Generator::generate(std::vector<std::int32_t> tokens,
                         std::int64_t max_new_tokens,
                         const SamplingOptions& options,
                         const std::function<bool(std::int32_t)>& on_token) {
  for (std::int64_t i = 0; i < max_new_tokens; ++i) {
    auto logits = next_logits(tokens);
    if (options.vocabulary > 0)
      logits.resize(std::min(logits.size(), static_cast<std::size_t>(options.vocabulary)));
    const std::int32_t next = sample_token(logits, options, static_cast<std::uint64_t>(i));
    tokens.push_back(next);
    if (!on_token(next)) return;
  }
}

}  // namespace moesaic::apps
