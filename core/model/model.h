#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/model/decoder_layer.h"
#include "core/model/embedding.h"
#include "core/model/head.h"
#include "core/model/mtp.h"
#include "core/model/options.h"

namespace moesaic {

/// The whole decoder: embedding, layers, output mix, final norm, head with loss, optional MTP module (SPEC 6.1, 8.1).
class Model {
 public:
  /// Declares all parameters and buffers in `params`. No memory is needed before plan().
  Model(ParameterStore& params, const ModelOptions& options);

  /// Declares activations for micro-batches of bounds.tokens tokens.
  void plan(const Bounds& bounds, const RecomputePolicy& policy);
  /// The names of all activations that a step writes, each once, in order; after plan().
  std::vector<std::string> activation_names() const;
  /// Bytes that one micro-batch in flight keeps between forward and backward.
  std::size_t slot_bytes() const;

  /// The saved activations of one micro-batch.
  struct MicroBatch {
    Tape embed;
    std::vector<Tape> layers;
    Tape tail;
    std::unique_ptr<MtpModule::Tapes> mtp;
  };
  /// `slot` [slot_bytes()] bytes (u8).
  MicroBatch make_micro_batch(TensorView slot) const;

  /// Adds to the losses; in training also the head's weight gradient, and leaves what backward needs in the slot.
  void forward(RunContext& context, MicroBatch& batch);
  /// Adds all parameter gradients, last layer first, and says through context.gradients_final how far it is. Deferred
  /// weight gradients are left for WeightGradients::flush().
  void backward(RunContext& context, MicroBatch& batch);

  /// The normalised hidden states [T, d] after forward, and the logits of rows of them.
  ConstTensorView final_hidden(MicroBatch& batch) const { return batch.tail.in(n_); }
  const VocabHead& head() const noexcept { return *head_; }

  const ModelOptions& options() const noexcept { return options_; }
  std::vector<std::unique_ptr<DecoderLayer>>& layers() noexcept { return layers_; }
  /// All mixtures with their layer; the MTP module comes last, as the layer after the others.
  struct NamedMoe {
    std::int64_t layer = 0;
    MoeLayer* moe = nullptr;
  };
  std::vector<NamedMoe> moe_layers();
  /// All latent attentions, that of the MTP module too.
  std::vector<MlaAttention*> mla_layers();
  void set_sparse_stage(bool sparse);

 private:
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
  std::vector<std::unique_ptr<DecoderLayer>> layers_;
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
