#pragma once
#include <vector>

#include "core/model/model.h"
#include "memory/offload/plan.h"

namespace moesaic {

/// A micro-batch's way through a chunk of a stage's model.
struct ChunkPass {
  bool is_backward = false;
  int chunk = 0;  ///< among those of this stage
  int slot = 0;   ///< where its activations are
  int micro_batch = 0;
};

/// Which offloaded tensors every visit of a layer writes and reads, in the order in which Model::forward_chunk() and
/// backward_chunk() tell of the visits. A layer reads the sum before it and the snapshots taken up to then, forward and backward,
/// and backward its own tensors.
class OffloadVisits {
 public:
  /// `model` is planned; slots_of_chunk: how many micro-batches each of its chunks keeps.
  OffloadVisits(const Model& model, const std::vector<int>& slots_of_chunk);
  void add(const ChunkPass& pass);

  const std::vector<std::size_t>& sizes() const noexcept { return sizes_; }
  const std::vector<offload::Visit>& visits() const noexcept { return visits_; }
  /// The tensors of Model::offloaded_parts(chunk) in one of its slots.
  std::vector<int> tensors(int chunk, int slot) const;

 private:
  /// What a micro-batch has at hand where it is, of what may leave.
  struct Position {
    int cur = -1;
    std::vector<int> bank;
    std::vector<offload::Visit> to_read_again;  // by layer of the stage; last, what follows them
  };
  void forward(const ChunkPass& pass, Position& at);
  void backward(const ChunkPass& pass, const Position& at);
  offload::Visit reads_at(const Position& at) const;

  const Model* model_;
  std::vector<std::vector<int>> first_;  // tensor, by chunk and slot
  std::vector<int> parts_;               // by chunk
  std::vector<std::size_t> sizes_;
  std::vector<offload::Visit> visits_;
  std::vector<Position> positions_;  // by micro-batch
};

}  // namespace moesaic
