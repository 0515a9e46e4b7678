#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace moesaic::pipeline {

/// What the parts of a model cost, in any one unit.
struct ModelCosts {
  std::vector<double> layers;
  double before = 0;  ///< beside the layers of the first chunk: the embedding
  double after = 0;   ///< beside those of the last chunk: final norm, head, MTP module
};

/// The layers [begin, end) of a chunk.
struct LayerRange {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const noexcept { return end - begin; }
  bool operator==(const LayerRange&) const = default;
};

/// Cuts the layers into `num_chunks` ranges of at least one layer each, so that the dearest chunk is as cheap as possible
/// and, among such cuts, the sum of the squares of the costs is smallest; at a tie earlier chunks have fewer layers. Throws UsageError, with the
/// nearest valid value, when there are fewer layers than chunks.
std::vector<LayerRange> balance_layers(const ModelCosts& costs, int num_chunks);

/// The ranges of a list of layers per chunk that the user wrote. The first and the last chunk may have none, since they
/// hold embedding and head. Throws UsageError when the list has another length than `num_chunks`, a wrong entry, or a
/// sum other than `num_layers`.
std::vector<LayerRange> given_layers(std::span<const std::int64_t> layers,
                                     int num_chunks,
                                     std::int64_t num_layers);

/// The cost of each chunk.
std::vector<double> chunk_costs(const ModelCosts& costs, std::span<const LayerRange> chunks);

}  // namespace moesaic::pipeline
