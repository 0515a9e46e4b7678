#pragma once
#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/data/dataset.h"
#include "core/data/document_bound.h"

namespace moesaic::data {

/// Which of several data sets each sample comes from: an even, seeded interleaving in which every data set has its share
/// of every stretch of samples, computed for any sample without those before it.
///
/// The data sets are the leaves of a balanced binary tree. Of the first n samples that reach an inner node, L(n) = floor(n p
/// + phi) go left, p = weight of the left half / weight of both, 0 <= phi < 1 keyed by (seed, phase, node); p and phi are
/// fractions of 2^63 and L is computed exactly in 128-bit integers. Sample n goes left if L(n + 1) > L(n), as sample L(n)
/// of that half, else right as sample n - L(n). So the number of samples of a data set among the first n differs from its
/// share by less than the depth of the tree, ceil(log2 K), for every n. Derivation: each split is a Sturmian (error
/// diffusion) sequence in closed form.
class BlendOrder {
 public:
  /// Weights above 0, in any unit. Throws UsageError for a share below 2^-60, which would never be drawn.
  BlendOrder(std::vector<double> weights, std::uint64_t seed, int phase);

  struct Place {
    std::size_t set = 0;
    std::int64_t index = 0;  ///< how many samples of the set came before
  };
  /// Sample g in [0, 2^62) of the phase.
  Place operator()(std::int64_t sample) const;
  /// How many of the first `samples` come from each data set.
  std::vector<std::int64_t> counts(std::int64_t samples) const;

 private:
  struct Node {
    std::size_t first = 0, middle = 0,
                last = 0;  // data sets [first, middle) are left, [middle, last) right
    std::uint64_t left_share = 0, offset = 0;  // p and phi, times 2^63
    std::size_t left = 0, right = 0;           // nodes, where a half has more than one data set
  };
  std::size_t build(std::size_t first, std::size_t last, std::uint64_t key);
  static std::int64_t going_left(const Node& node, std::int64_t samples);
  void count(std::size_t first,
             std::size_t last,
             std::size_t node,
             std::int64_t samples,
             std::vector<std::int64_t>& counts) const;

  std::vector<double> weights_;
  std::vector<Node> nodes_;
  std::size_t root_ = 0;
};

/// A data set of a blend.
struct WeightedSource {
  std::shared_ptr<const TokenSource> source;
  double weight = 1;
};

/// What a run trains on: one source, or several with weights.
struct Blend {
  Blend() = default;
  /// One source is a blend.
  template <std::derived_from<TokenSource> S>
  Blend(std::shared_ptr<S> source) : sets{{std::move(source), 1}} {}
  explicit Blend(std::vector<WeightedSource> weighted) : sets(std::move(weighted)) {}
  std::vector<WeightedSource> sets;

  std::int64_t num_documents() const;
  std::int64_t num_tokens() const;
  std::vector<double> weights() const;
  std::vector<const TokenSource*> sources() const;
  DocumentBound document_bound() const;
  std::string name() const;
};

/// Training samples without end from a blend: sample g is sample `index` of data set `set` of BlendOrder, each data set in
/// epochs of its own (PackedDataset). A pure function of (blend, seed, phase, T, g); a blend of one is its PackedDataset.
class BlendedDataset {
 public:
  /// Throws InputError when a source is shorter than one window.
  BlendedDataset(const Blend& blend, std::uint64_t seed, int phase, std::int64_t sequence_length);
  ~BlendedDataset();

  std::int64_t sequence_length() const noexcept { return sequence_length_; }
  Batch batch(SampleRange range) const;

  /// How much of a data set the first samples of the phase are.
  struct Use {
    std::int64_t samples = 0;
    double epochs = 0;
  };
  std::vector<Use> use(std::int64_t samples) const;

 private:
  std::int64_t sequence_length_;
  BlendOrder order_;
  std::vector<std::unique_ptr<PackedDataset>> sets_;
};

}  // namespace moesaic::data
