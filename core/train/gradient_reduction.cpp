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
    groups_.push_back({g, mesh.group(all[g].axes).comm(), 0, {}});
  const auto buckets = params.buckets();
  for (std::size_t b = 0; b < buckets.size(); ++b)
    groups_[buckets[b].group].buckets.push_back(b);
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

// Those that lie in [begin, end of what is not reduced) as a whole; buckets come from the end. False when the group has none.
bool GradientReduction::reduce_buckets(Group& group, std::int64_t begin, Stream& main) {
  if (group.buckets.empty()) return false;
  bool is_first = true;
  for (const std::size_t b : group.buckets) {
    const ParameterStore::Bucket& bucket = params_.buckets()[b];
    if (bucket.begin >= group.end) continue;
    if (bucket.begin < begin) break;
    if (is_first) {
      main.record(ready_);
      stream_.wait(ready_);
      is_first = false;
    }
    group.comm->reduce_to_owners(
        params_.all_grads().rows(bucket.begin, bucket.end), bucket.bounds, ReduceOp::sum, stream_);
    group.end = bucket.begin;
  }
  return true;
}

void GradientReduction::gather_weights(Stream& main) {
  for (const Group& group : groups_) {
    for (const std::size_t b : group.buckets)
      group.comm->gather_from_owners(
          params_.buckets()[b].weights, params_.buckets()[b].bounds, main);
  }
}

void GradientReduction::final_from(StorageId first, Stream& main) {
  const auto element = static_cast<std::int64_t>(byte_size(params_.all_grads().dtype()));
  for (Group& group : groups_) {
    const std::int64_t begin = params_.gradients_begin(group.index, first);
    if (reduce_buckets(group, begin, main)) continue;
    if ((group.end - begin) * element >= kLeastBytes) reduce(group, begin, main);
  }
}

void GradientReduction::finish(Stream& main) {
  for (Group& group : groups_) {
    const std::int64_t begin = params_.gradient_groups()[group.index].begin;
    if (!reduce_buckets(group, begin, main)) reduce(group, begin, main);
  }
  stream_.record(reduced_);
  main.wait(reduced_);
}

}  // namespace moesaic
