#include "core/data/blend.h"

#include <cmath>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/base/random.h"

namespace moesaic::data {
namespace {

constexpr int kShareBits = 63;

double sum(const std::vector<double>& weights, std::size_t first, std::size_t last) {
  return std::accumulate(weights.begin() + static_cast<std::ptrdiff_t>(first),
                         weights.begin() + static_cast<std::ptrdiff_t>(last),
                         0.0);
}

std::uint64_t set_seed(std::uint64_t seed, std::size_t set) {
  return set == 0 ? seed : mix64(seed ^ mix64(hash_name("data set") + set));
}

}  // namespace

BlendOrder::BlendOrder(std::vector<double> weights, std::uint64_t seed, int phase)
    : weights_(std::move(weights)) {
  MOESAIC_CHECK(!weights_.empty(), "a blend of nothing");
  const double all = sum(weights_, 0, weights_.size());
  for (const double w : weights_) {
    MOESAIC_CHECK(std::isfinite(w) && w > 0, "a weight that is not above 0");
    if (!std::isfinite(all) || w / all < std::ldexp(1.0, -60)) {
      throw UsageError(fmt::format(
          "data.train: weight {} of a sum of {} would never be drawn; remove the entry", w, all));
    }
  }
  const std::uint64_t key =
      mix64(mix64(hash_name("blend") ^ seed) + static_cast<std::uint64_t>(phase));
  if (weights_.size() > 1) root_ = build(0, weights_.size(), key);
}

std::size_t BlendOrder::build(std::size_t first, std::size_t last, std::uint64_t key) {
  Node node;
  node.first = first;
  node.middle = first + (last - first) / 2;
  node.last = last;
  const double left = sum(weights_, first, node.middle), right = sum(weights_, node.middle, last);
  // Shares of an f64 have 53 bits, so the product with 2^63 is exact.
  node.left_share = static_cast<std::uint64_t>(std::ldexp(left / (left + right), kShareBits));
  node.offset = mix64(key ^ mix64(first * 0x10001 + last)) >> 1;
  if (node.middle - first > 1) node.left = build(first, node.middle, key);
  if (last - node.middle > 1) node.right = build(node.middle, last, key);
  nodes_.push_back(node);
  return nodes_.size() - 1;
}

std::int64_t BlendOrder::going_left(const Node& node, std::int64_t samples) {
  __extension__ using Wide = unsigned __int128;
  const Wide share = static_cast<Wide>(static_cast<std::uint64_t>(samples)) * node.left_share;
  return static_cast<std::int64_t>((share + node.offset) >> kShareBits);
}

BlendOrder::Place BlendOrder::operator()(std::int64_t sample) const {
  MOESAIC_CHECK(0 <= sample && sample < std::int64_t{1} << 62, "no such sample");
  if (nodes_.empty()) return {0, sample};
  for (std::size_t at = root_;;) {
    const Node& node = nodes_[at];
    const std::int64_t left = going_left(node, sample);
    const bool goes_left = going_left(node, sample + 1) > left;
    sample = goes_left ? left : sample - left;
    const std::size_t first = goes_left ? node.first : node.middle,
                      last = goes_left ? node.middle : node.last;
    if (last - first == 1) return {first, sample};
    at = goes_left ? node.left : node.right;
  }
}

void BlendOrder::count(std::size_t first,
                       std::size_t last,
                       std::size_t at,
                       std::int64_t samples,
                       std::vector<std::int64_t>& counts) const {
  if (last - first == 1) {
    counts[first] = samples;
    return;
  }
  const Node& node = nodes_[at];
  const std::int64_t left = going_left(node, samples);
  count(first, node.middle, node.left, left, counts);
  count(node.middle, last, node.right, samples - left, counts);
}

std::vector<std::int64_t> BlendOrder::counts(std::int64_t samples) const {
  std::vector<std::int64_t> counts(weights_.size());
  count(0, weights_.size(), root_, samples, counts);
  return counts;
}

std::int64_t Blend::num_documents() const {
  std::int64_t n = 0;
  for (const auto& set : sets)
    n += set.source->num_documents();
  return n;
}
std::int64_t Blend::num_tokens() const {
  std::int64_t n = 0;
  for (const auto& set : sets)
    n += set.source->num_tokens();
  return n;
}
std::vector<const TokenSource*> Blend::sources() const {
  std::vector<const TokenSource*> all;
  for (const auto& set : sets)
    all.push_back(set.source.get());
  return all;
}
DocumentBound Blend::document_bound() const {
  return DocumentBound(sources());
}
std::string Blend::name() const {
  if (sets.size() == 1) return sets[0].source->name();
  return fmt::format("blend of {} data sets", sets.size());
}
std::vector<double> Blend::weights() const {
  std::vector<double> all;
  for (const auto& set : sets)
    all.push_back(set.weight);
  return all;
}

BlendedDataset::BlendedDataset(const Blend& blend,
                               std::uint64_t seed,
                               int phase,
                               std::int64_t sequence_length)
    : sequence_length_(sequence_length), order_(blend.weights(), seed, phase) {
  for (std::size_t i = 0; i < blend.sets.size(); ++i) {
    sets_.push_back(std::make_unique<PackedDataset>(
        blend.sets[i].source, set_seed(seed, i), phase, sequence_length));
  }
}
BlendedDataset::~BlendedDataset() = default;

Batch BlendedDataset::batch(SampleRange range) const {
  MOESAIC_CHECK(range.first >= 0, "negative sample index");
  Batch batch = make_batch(sequence_length_, range.count);
  for (std::int64_t g = range.first; g < range.first + range.count; ++g) {
    const auto place = order_(g);
    sets_[place.set]->append(place.index, batch);
  }
  return batch;
}

std::vector<BlendedDataset::Use> BlendedDataset::use(std::int64_t samples) const {
  std::vector<Use> all;
  for (const std::int64_t n : order_.counts(samples)) {
    const auto per_epoch = sets_[all.size()]->samples_per_epoch();
    all.push_back({n, static_cast<double>(n) / static_cast<double>(per_epoch)});
  }
  return all;
}

}  // namespace moesaic::data
