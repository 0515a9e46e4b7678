#include "kernels/ops/attn_res.h"

#include "kernels/checks.h"

namespace moesaic {
namespace {

constexpr std::size_t kMaxSources = 512;

void check_sources(const std::vector<ConstTensorView>& sources,
                   const ConstTensorView& like,
                   const ConstTensorView& p) {
  MOESAIC_CHECK(!sources.empty() && sources.size() <= kMaxSources, "a mix takes 1 to 512 sources");
  MOESAIC_CHECK(like.rank() == 2, "sources must be [tokens, d]");
  for (const auto& s : sources)
    check_like(s, like, "source");
  check_acc(p, {like.dim(0), static_cast<std::int64_t>(sources.size())}, like.dtype(), "p");
}

void check_weights(const ConstTensorView& query,
                   const ConstTensorView& norm,
                   const ConstTensorView& like) {
  check_shape(query, {like.dim(1)}, "query");
  check_like(norm, query, "norm");
}

double read_once(const std::vector<ConstTensorView>& sources) {
  return static_cast<double>(sources.size()) * static_cast<double>(sources.front().bytes());
}

}  // namespace

void AttnResForward::check() const {
  check_sources(sources, h, p);
  check_weights(query, norm, h);
}
OpCost AttnResForward::cost() const {
  return {6.0 * static_cast<double>(h.numel()) * static_cast<double>(sources.size()),
          read_once(sources) + total_bytes({h, p})};
}

void AttnResBackward::check() const {
  check_sources(sources, dh, p);
  check_weights(query, norm, dh);
  MOESAIC_CHECK(dsources.size() == sources.size(),
                "a gradient, or an empty view, for every source");
  for (const auto& d : dsources) {
    if (d.empty()) continue;
    check_shape(d, dh.shape(), "dsource");
    if (d.dtype() != dh.dtype()) check_dtype(d, acc_dtype(dh.dtype()), "dsource");
  }
  MOESAIC_CHECK(dquery.empty() == dnorm.empty(), "dquery and dnorm go together");
  if (!dquery.empty()) {
    check_acc(dquery, {dh.dim(1)}, dh.dtype(), "dquery");
    check_acc(dnorm, {dh.dim(1)}, dh.dtype(), "dnorm");
  }
}
OpCost AttnResBackward::cost() const {
  return {14.0 * static_cast<double>(dh.numel()) * static_cast<double>(sources.size()),
          4.0 * read_once(sources) + total_bytes({dh, p})};
}

}  // namespace moesaic
