#include "core/train/gradient_reduction.h"

namespace moesaic {
namespace {
// Smaller pieces wait for more: every piece costs the latency of two exchanges.
constexpr std::int64_t kLeastBytes = std::int64_t{32} << 20;
}  // namespace

GradientReduction::GradientReduction(const ParameterStore& params,
                                     Communicator& world,
                                     Stream::Mode mode)
    : params_(params),
      world_(world),
      stream_(params.device(), "gradient reduction", mode),
      ready_(params.device()),
      reduced_(params.device()) {}

void GradientReduction::begin() {
  end_ = params_.all_grads().numel();
}

void GradientReduction::reduce(std::int64_t begin, Stream& main) {
  if (begin == end_) return;
  main.record(ready_);
  stream_.wait(ready_);
  world_.all_reduce(params_.all_grads().rows(begin, end_), ReduceOp::sum, stream_);
  end_ = begin;
}

void GradientReduction::final_from(StorageId first, Stream& main) {
  const std::int64_t begin = params_.gradients_begin(first);
  const auto bytes =
      (end_ - begin) * static_cast<std::int64_t>(byte_size(params_.all_grads().dtype()));
  if (bytes >= kLeastBytes) reduce(begin, main);
}

void GradientReduction::finish(Stream& main) {
  reduce(0, main);
  stream_.record(reduced_);
  main.wait(reduced_);
}

}  // namespace moesaic
