#include "parallel/pipeline/partition.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/base/error.h"

namespace moesaic::pipeline {
namespace {

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// Sums over ranges of layers, with what the first and the last chunk hold beside them.
class RangeCosts {
 public:
  RangeCosts(const ModelCosts& costs, int num_chunks)
      : costs_(costs), last_(num_chunks - 1), sums_{0} {
    for (const double layer : costs.layers)
      sums_.push_back(sums_.back() + layer);
  }
  double of(int chunk, const LayerRange& range) const {
    return sums_[at(range.end)] - sums_[at(range.begin)] + (chunk == 0 ? costs_.before : 0) +
           (chunk == last_ ? costs_.after : 0);
  }

 private:
  const ModelCosts& costs_;
  int last_;
  std::vector<double> sums_;
};

// Sums in another order must not look like another cost.
constexpr double kSame = 1 + 1e-12;

/// The smallest ceiling that some cut keeps.
double lowest_ceiling(const RangeCosts& range, int num_chunks, std::int64_t layers) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  // best[n]: ceiling for the first n layers in the chunks so far.
  std::vector<double> best(at(layers + 1), kNever);
  for (std::int64_t n = 1; n <= layers; ++n)
    best[at(n)] = range.of(0, {0, n});
  for (int chunk = 1; chunk < num_chunks; ++chunk) {
    std::vector<double> next(best.size(), kNever);
    // Moving the begin of the last chunk up makes it cheaper and what is before it dearer; the best place is where the
    // two meet, and moves up with n.
    std::int64_t begin = chunk;
    for (std::int64_t n = chunk + 1; n <= layers; ++n) {
      const auto ceiling = [&](std::int64_t b) {
        return std::max(best[at(b)], range.of(chunk, {b, n}));
      };
      while (begin + 1 < n && ceiling(begin + 1) <= ceiling(begin))
        ++begin;
      next[at(n)] = ceiling(begin);
    }
    best = std::move(next);
  }
  return best[at(layers)];
}

}  // namespace

std::vector<LayerRange> balance_layers(const ModelCosts& costs, int num_chunks) {
  MOESAIC_CHECK(num_chunks >= 1, "no chunks");
  const auto is_negative = [](double cost) { return !(cost >= 0); };
  MOESAIC_CHECK(std::none_of(costs.layers.begin(), costs.layers.end(), is_negative) &&
                    costs.before >= 0 && costs.after >= 0,
                "a negative cost");
  const auto layers = static_cast<std::int64_t>(costs.layers.size());
  if (layers < num_chunks)
    throw UsageError(fmt::format(
        "{} layers cannot fill {} chunks (stages x chunks per rank), since each needs a layer. "
        "Nearest valid: {} chunks",
        layers,
        num_chunks,
        layers));
  const RangeCosts range(costs, num_chunks);
  const double ceiling = lowest_ceiling(range, num_chunks, layers) * kSame;
  constexpr double kNever = std::numeric_limits<double>::infinity();
  // squares[c][n]: smallest sum of squares of chunks c … last over the layers from n on, none above the ceiling.
  std::vector<std::vector<double>> squares(at(num_chunks + 1),
                                           std::vector<double>(at(layers + 1), kNever));
  std::vector<std::vector<std::int64_t>> ends(at(num_chunks),
                                              std::vector<std::int64_t>(at(layers + 1), 0));
  squares[at(num_chunks)][at(layers)] = 0;
  for (int chunk = num_chunks - 1; chunk >= 0; --chunk) {
    for (std::int64_t begin = chunk; begin < layers; ++begin) {
      for (std::int64_t end = begin + 1; end <= layers; ++end) {
        const double cost = range.of(chunk, {begin, end});
        if (cost > ceiling) break;
        const double sum = cost * cost + squares[at(chunk + 1)][at(end)];
        double& best = squares[at(chunk)][at(begin)];
        if (sum * kSame >= best) continue;
        best = sum;
        ends[at(chunk)][at(begin)] = end;
      }
    }
  }
  std::vector<LayerRange> chunks;
  for (std::int64_t begin = 0; begin < layers; begin = chunks.back().end)
    chunks.push_back({begin, ends[chunks.size()][at(begin)]});
  return chunks;
}

std::vector<LayerRange> given_layers(std::span<const std::int64_t> layers,
                                     int num_chunks,
                                     std::int64_t num_layers) {
  if (static_cast<int>(layers.size()) != num_chunks)
    throw UsageError(
        fmt::format("{} entries; allowed: one for each of the {} chunks (stages x "
                    "chunks per rank), in the order of the model",
                    layers.size(),
                    num_chunks));
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const bool is_outer = i == 0 || i + 1 == layers.size();
    if (layers[i] < (is_outer ? 0 : 1))
      throw UsageError(fmt::format(
          "found {} layers for chunk {}; allowed: at least {}", layers[i], i, is_outer ? 0 : 1));
  }
  // In halves of the range, so that a sum of absurd entries does not wrap.
  std::int64_t sum = 0;
  for (const std::int64_t n : layers)
    sum = std::min(sum, std::numeric_limits<std::int64_t>::max() / 2) +
          std::min(n, std::numeric_limits<std::int64_t>::max() / 2);
  if (sum != num_layers)
    throw UsageError(fmt::format(
        "[{}] are {} layers, but the model has {}", fmt::join(layers, ", "), sum, num_layers));
  std::vector<LayerRange> chunks;
  std::int64_t begin = 0;
  for (const std::int64_t n : layers) {
    chunks.push_back({begin, begin + n});
    begin += n;
  }
  return chunks;
}

std::vector<double> chunk_costs(const ModelCosts& costs, std::span<const LayerRange> chunks) {
  const RangeCosts range(costs, static_cast<int>(chunks.size()));
  std::vector<double> all;
  for (std::size_t i = 0; i < chunks.size(); ++i)
    all.push_back(range.of(static_cast<int>(i), chunks[i]));
  return all;
}

}  // namespace moesaic::pipeline
