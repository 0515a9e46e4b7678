#include "core/train/gradient_reduction.h"

namespace moesaic {
namespace {
// Smaller pieces wait for more: every piece costs the latency of two exchanges.
constexpr std::int64_t kLeastBytes = std::int64_t{32} << 20;
}  // namespace

GradientReduction::GradientReduction(const ParameterStore& params,
                                     const Mesh& mesh,
                                     Stream::Mode mode)
    : params_(params),
      stream_(params.device(), "gradient reduction", mode),
      ready_(params.device()),
      reduced_(params.device()) {
  const auto all = params.gradient_groups();
  for (std::size_t g = 0; g < all.size(); ++g)
    groups_.push_back({g, mesh.group(all[g].axes).comm(), 0});
}

void GradientReduction::begin() {
  for (Group& group : groups_)
    group.end = params_.gradient_groups()[group.index].end;
}

void GradientReduction::reduce(Group& group, std::int64_t begin, Stream& main) {
  if (begin == group.end) return;
  if (group.comm != nullptr) {
    main.record(ready_);
    stream_.wait(ready_);
    group.comm->all_reduce(params_.all_grads().rows(begin, group.end), ReduceOp::sum, stream_);
  }
  group.end = begin;
}

void GradientReduction::final_from(StorageId first, Stream& main) {
  const auto element = static_cast<std::int64_t>(byte_size(params_.all_grads().dtype()));
  for (Group& group : groups_) {
    const std::int64_t begin = params_.gradients_begin(group.index, first);
    if ((group.end - begin) * element >= kLeastBytes) reduce(group, begin, main);
  }
}

void GradientReduction::finish(Stream& main) {
  for (Group& group : groups_)
    reduce(group, params_.gradient_groups()[group.index].begin, main);
  stream_.record(reduced_);
  main.wait(reduced_);
}

}  // namespace moesaic
