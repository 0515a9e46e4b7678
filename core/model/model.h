#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/model/decoder_layer.h"
#include "core/model/embedding.h"
#include "core/model/head.h"
#include "core/model/mtp.h"
#include "core/model/options.h"
#include "core/model/stage_share.h"

namespace moesaic {

/// The decoder: embedding, layers, output mix, final norm, head with loss, optional MTP module (SPEC 6.1, 8.1); or what one
/// pipeline stage holds of it. The first chunk has the embedding, the last one all that follows the layers. The embedding's
/// table is on the last stage too where something there reads it: the MTP module, or a head tied to it.
class Model {
 public:
  /// Declares the parameters and buffers of `share` in `params`, under the names that they have in the whole model. No memory
  /// is needed before plan().
  Model(ParameterStore& params, const ModelOptions& options, const StageShare& share = {});

  /// Declares activations for micro-batches of bounds.tokens tokens.
  void plan(const Bounds& bounds, const RecomputePolicy& policy);
  /// The names of all activations that a step writes, each once, in order; after plan().
  std::vector<std::string> activation_names() const;
  /// Of these, those that a choosing step writes: they are saved whatever the policy.
  std::vector<std::string> chosen_names() const;
  /// Chunks of this stage, numbered from 0 in the order of the model; 1 for a whole model.
  int num_chunks() const noexcept { return static_cast<int>(chunks_.size()); }
  /// Bytes that one micro-batch in flight keeps between forward and backward of a chunk.
  std::size_t slot_bytes(int chunk = 0) const;

  /// Bytes of RunContext::piece_sums for the micro-batches planned last.
  std::size_t piece_sum_bytes() const;

  /// Rows of RunContext::losses where layers have their own: this stage's layers, and what follows them.
  std::int64_t loss_rows() const noexcept { return static_cast<std::int64_t>(layers_.size()) + 1; }

  /// The saved activations of one micro-batch in one chunk.
  struct MicroBatch {
    int chunk = 0;
    /// Where the MTP module leaves its gradient of the embedding [T, d] until the first chunk's backward adds it, in the
    /// order of the micro-batches. The first chunk's place for it is lent to the last chunk; empty: added at once.
    TensorView mtp_gradient;
    std::optional<Tape> embed;  // of the first chunk
    std::vector<Tape> layers;
    std::optional<Tape> tail;  // of the last chunk
    std::unique_ptr<MtpModule::Tapes> mtp;
  };
  /// Bytes of each tensor of a micro-batch in a chunk that waits in host memory between its uses: the embedding's parts, then
  /// those of the layers. What follows the layers stays.
  std::vector<std::size_t> offloaded_parts(int chunk) const;
  /// `slot` [slot_bytes(chunk)] bytes (u8); `offloaded`: memory for each of the offloaded_parts().
  MicroBatch make_micro_batch(TensorView slot,
                              int chunk = 0,
                              std::span<const TensorView> offloaded = {}) const;

  /// Says that `piece` is the piece of a micro-batch behind `before` (Bounds::pieces), both of one chunk. Before its forward;
  /// holds until the backwards of both are over.
  void follow(MicroBatch& piece, MicroBatch& before) const;

  // --- a chunk at a time
  using Bundle = DecoderLayer::Bundle;
  /// From the bundle before the chunk (empty for the first one) to the one after it, which holds all snapshots taken so far.
  /// Its tensors live in the slots and in `in`. The last chunk adds to the losses, as forward() does.
  Bundle forward_chunk(RunContext& context, MicroBatch& batch, const Bundle& in);
  /// dcur [T, d] (compute type) holds the gradient of the outgoing sum (undefined for the last chunk) and receives that of
  /// the incoming one. dbank: an accumulator [T, d] (statistics type) for each snapshot that exists after the chunk.
  void backward_chunk(RunContext& context,
                      MicroBatch& batch,
                      TensorView dcur,
                      std::span<const TensorView> dbank);
  /// Snapshots that exist before and after a chunk.
  std::int64_t snapshots_before(int chunk) const;
  std::int64_t snapshots_after(int chunk) const;

  // --- a model that is one chunk

  /// Adds to the losses; in training also the head's weight gradient, and leaves what backward needs in the slot.
  void forward(RunContext& context, MicroBatch& batch);
  /// Adds all parameter gradients, last layer first, and says through context.gradients_final how far it is. Deferred
  /// weight gradients are left for WeightGradients::flush().
  void backward(RunContext& context, MicroBatch& batch);

  /// The normalised hidden states [T, d] after forward, and the logits of rows of them.
  ConstTensorView final_hidden(MicroBatch& batch) const { return batch.tail->in(n_); }
  const VocabHead& head() const noexcept { return *head_; }

  /// Rows of this rank in what passes between chunks, of the micro-batches planned last.
  std::int64_t own_tokens() const noexcept { return own_tokens_; }
  const ModelOptions& options() const noexcept { return options_; }
  /// Those of this stage.
  std::vector<std::unique_ptr<DecoderLayer>>& layers() noexcept { return layers_; }
  /// The embedding's table, where it is here; invalid elsewhere.
  StorageId embedding() const noexcept { return embedding_ ? embedding_->table() : StorageId(); }
  /// All mixtures with their layer; the MTP module comes last, as the layer after the others.
  struct NamedMoe {
    std::int64_t layer = 0;
    MoeLayer* moe = nullptr;
  };
  std::vector<NamedMoe> moe_layers();
  /// All latent attentions, that of the MTP module too.
  std::vector<MlaAttention*> mla_layers();
  void set_sparse_stage(bool sparse);

  /// A chunk with its layers among those of this stage.
  struct Chunk {
    std::size_t begin = 0, end = 0;
    bool is_first = false, is_last = false;
  };
  const Chunk& chunk(int i) const { return chunks_[static_cast<std::size_t>(i)]; }
  /// The embedding's offloaded part; -1: there is none.
  int embedding_part() const { return embed_spec_ ? embed_spec_->part_of(x_) : -1; }
  const DecoderLayer& layer(std::size_t l) const { return *layers_[l]; }

 private:
  std::vector<const TapeSpec*> tape_specs() const;
  void declare_embedding(ParameterStore& params, bool is_read_again, const StageShare& share);
  void declare_layers(ParameterStore& params, const StageShare& share);
  void declare_tail(ParameterStore& params);
  void plan_embedding(const Bounds& bounds, const RecomputePolicy& policy);
  void plan_tail(const Bounds& bounds, const RecomputePolicy& policy);
  void backward_tail(RunContext& context,
                     MicroBatch& batch,
                     TensorView dcur,
                     std::span<const TensorView> dbank);

  ModelOptions options_;
  Precision precision_;
  const TokenSlices* slices_ = nullptr;  // of the micro-batches planned last
  StorageId norm_;
  DepthMix output_mix_;
  std::int64_t final_bank_ = 0;
  std::vector<LayerResidual> residuals_;  // of the whole model
  std::vector<Chunk> chunks_;
  std::vector<std::unique_ptr<DecoderLayer>> layers_;
  std::vector<std::int64_t> numbers_;  // of the layers, in the whole model
  std::int64_t own_tokens_ = 0;
  bool is_whole_ = false;  // on one rank, without messages
  DecoderLayer::Leaving may_leave(std::size_t layer) const;
  bool keeps_mtp_gradient_ = false;  // for the first chunk's backward
  std::size_t mtp_gradient_bytes() const;
  std::vector<StorageId> first_storage_;  // of each layer; last, of what follows the layers
  std::unique_ptr<TokenEmbedding> embedding_;
  std::unique_ptr<VocabHead> head_;
  std::unique_ptr<MtpModule> mtp_;
  std::unique_ptr<TapeSpec> embed_spec_, tail_spec_;
  ActId x_;
  std::vector<ActId> tail_bank_;
  ActId tail_cur_, h_, p_, n_, inv_rms_, dn_;
};

/// The residual scheme of every layer, from the options.
std::vector<LayerResidual> plan_residuals(const ModelOptions& options);

}  // namespace moesaic
