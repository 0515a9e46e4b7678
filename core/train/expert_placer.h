#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/model/model.h"
#include "core/train/expert_move.h"
#include "parallel/dispatch/method.h"
#include "parallel/mesh.h"

namespace moesaic {

/// What a re-placement did to a layer.
struct ExpertsMoved {
  std::int64_t layer = 0;        ///< as in the tensor names
  double before = 0, after = 0;  ///< load of the busiest rank / mean over ranks, by the averages
  std::int64_t experts = 0;      ///< that changed their place
  std::int64_t bytes = 0;        ///< sent between ranks, of weights and state
  std::int64_t replicas = 0;     ///< copies inside nodes that there are now, with slots for them
};

/// Puts the experts of every layer where their load, averaged over steps, asks for: every `every` steps on all ranks of the
/// stage alike, by balanced_places() from the same numbers, which moves nothing where less than a hundredth is to be won.
/// Where the store has slots for copies they are then filled anew by balanced_copies(); their weights are the caller's affair
/// (ExpertCopier). Averages and places are buffers of the store (MoeOptions::place), so that a run that continues goes on with them;
/// copies follow from the averages at the time, which are kept, too.
class ExpertPlacer {
 public:
  struct Options {
    std::int64_t every = 0;  ///< steps
    double decay =
        0.99;        ///< average <- decay average + (1 - decay) share of the step's assignments
    NodeGrid nodes;  ///< of the ranks that share the experts
  };
  /// `stage`: all ranks of this one's pipeline stage; null for one. References must outlive this.
  ExpertPlacer(ParameterStore& params,
               const Optimizer& optimizer,
               std::span<const Model::NamedMoe> layers,
               Communicator* stage,
               const Options& options);

  /// Takes the counts of a step over all ranks in, i64 [experts] on the host, of the layer with this number among `layers`.
  void count(std::size_t layer, ConstTensorView tokens, Stream& stream);
  /// After step `step` (from 1); nothing unless its number is a multiple of `every`. All ranks of the stage call it.
  std::vector<ExpertsMoved> place(std::int64_t step, Stream& stream);
  /// After a checkpoint was loaded that was written with experts on `ranks` ranks (0: it says nothing of them): they go to its
  /// places when these are as many as now, else in order. Waits for the stream. Throws InputError for a table that is none.
  void restore(std::int64_t ranks, Stream& stream);

 private:
  struct Layer {
    std::int64_t layer = 0;
    PlacesId places;
    TensorView average, saved, copied_by;                 // on the device, as in checkpoints
    TensorView host_average, host_saved, host_copied_by;  // copies go both ways
    bool has_copies() const noexcept { return !copied_by.empty(); }
  };
  static std::vector<double> loads(const TensorView& host_average);
  std::vector<double> rank_loads_now(const Layer& layer, std::span<const double> load) const;
  void set_copies(const Layer& layer, Stream& stream);
  void write_saved(const Layer& layer, Stream& stream);

  ParameterStore& params_;
  Options options_;
  std::vector<Layer> layers_;
  Buffer host_;
  std::unique_ptr<ExpertMove> move_;  // with experts on several ranks
};

}  // namespace moesaic
