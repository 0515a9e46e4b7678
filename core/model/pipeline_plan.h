#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "core/config/check.h"
#include "core/config/config.h"
#include "core/model/options.h"
#include "core/model/plan.h"
#include "core/model/stage_share.h"
#include "parallel/mesh.h"
#include "parallel/pipeline/bundle.h"
#include "parallel/pipeline/partition.h"
#include "parallel/pipeline/schedule.h"
#include "parallel/pipeline/simulate.h"

namespace moesaic {

/// A contiguous range of layers that one pipeline stage holds; the first chunk also holds the embedding, the last one
/// output mix, final norm, head and MTP module.
struct ChunkPlan {
  int rank = 0;  ///< of the pipeline
  pipeline::LayerRange layers;
  std::int64_t parameters = 0;      ///< what stands beside the layers included
  double forward_flops = 0;         ///< of one token, MTP included
  double share = 0;                 ///< of the mean over the chunks
  int slots = 0;                    ///< micro-batches between forward and the end of backward
  std::vector<int> sent_snapshots;  ///< of the attention residuals, sent on beside the running sum
  std::int64_t sent_bytes =
      0;  ///< forward, of a micro-batch; 0 when the next chunk is on the same rank
  std::int64_t returned_bytes = 0;  ///< gradients that come back for them
  /// Of the layers, for one micro-batch; empty when the sizes do not fit 64 bits.
  std::optional<std::int64_t> activation_bytes;
};

/// The stretch of a run that a phase is, in the pipeline.
struct PipelinePhase {
  std::int64_t begin = 0, end = 0;  ///< steps [begin, end)
  std::int64_t micro_batches = 0;   ///< of a step, per pipeline
  double bubble = 0;                ///< share of idle time, by the costs of the phase
};

/// How a pipeline, or the vertical order, would run: layers, schedule, idle time, memory. All but `phases` is about the phase with the most
/// operations, for which the layers are balanced; weights do not move between stages from phase to phase.
struct PipelinePlan {
  pipeline::Schedule schedule;
  std::vector<ChunkPlan> chunks;
  pipeline::Costs costs;  ///< in operations of one token; messages take no time
  pipeline::Simulation times;
  double unit_bubble = 0;  ///< idle share if every action took one unit
  pipeline::Slots slots;
  /// Peak per rank of what layers keep for backward.
  std::vector<std::optional<std::int64_t>> activation_bytes;
  std::vector<PipelinePhase> phases;
  std::size_t main_phase = 0;
};

/// Whether a rank passes its layers one by one, each over several micro-batches or their pieces, before the next.
inline bool goes_by_layers(const config::Config& config) {
  return config.parallel.order == config::LayerOrder::vertical ||
         (config.activations.piece_tokens > 0 && config.parallel.pp == 1);
}
/// Whether a rank's step follows a schedule over chunks: a pipeline's, or that of layers one by one, over chunks of one layer
/// each; the last of them holds what follows the layers.
inline bool has_schedule(const config::Config& config) {
  return config.parallel.pp > 1 || goes_by_layers(config);
}

/// What is wrong with the schedule of a configuration: sizes that it does not have, chunks without layers, a list of layers
/// that does not fit. Empty without a schedule.
std::vector<config::Finding> pipeline_findings(const config::Config& config);

/// Where the chunks of a model lie; the same on all ranks and in all phases.
struct PipelineLayout {
  pipeline::Placement placement{pipeline::Placement::Form::loop, 1, 1};
  std::vector<pipeline::LayerRange> chunks;  ///< of the whole model, in order

  /// What a stage holds; without a schedule the whole model.
  StageShare share(int stage) const;
  /// What crosses the boundaries for micro-batches of `tokens` tokens.
  pipeline::BundlePlan bundles(const ModelOptions& options,
                               const Precision& precision,
                               std::int64_t tokens) const;
};
/// For a configuration without pipeline_findings().
PipelineLayout pipeline_layout(const config::Config& config);
/// What a rank holds of the model, in chunks.
StageShare stage_share(const config::Config& config, const MeshPosition& position);
/// The schedule of a step of `micro_batches` micro-batches, which layers work off in `pieces` pieces each: those are what it
/// counts as micro-batches, piece p of micro-batch m as m * pieces + p.
pipeline::Schedule pipeline_schedule(const config::Config& config,
                                     std::int64_t micro_batches,
                                     std::int64_t pieces);

/// Plans the pipeline of a configuration without pipeline_findings(); `plan` is its make_plan(). Nothing without a schedule.
/// An empty parallel.dp counts as 1.
///
/// Costs: forward of a layer is 2 x its active parameters and the core of its attention; backward is twice that, of which
/// gradients of weights are 2 x the active parameters.
std::optional<PipelinePlan> make_pipeline_plan(const config::Config& config, const ModelPlan& plan);

}  // namespace moesaic
