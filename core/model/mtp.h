#pragma once
#include <memory>

#include "core/model/decoder_layer.h"
#include "core/model/embedding.h"
#include "core/model/head.h"
#include "core/model/options.h"

namespace moesaic {

/// One extra prediction depth in DeepSeek-V3's form (SPEC 8.1): u_i = W [RMSNorm_e(emb(x_{i+1})); RMSNorm_h(h_i)], one
/// decoder layer with plain residuals, an own final norm, the shared embedding and head, target x_{i+2}.
class MtpModule {
 public:
  MtpModule(ParameterStore& params,
            const std::string& prefix,
            const ModelOptions& options,
            const TokenEmbedding& embedding,
            const VocabHead& head);
  void plan(const Bounds& bounds, const RecomputePolicy& policy);
  std::size_t slot_bytes() const;
  /// Appends the tapes' declarations; after plan().
  void add_specs(std::vector<const TapeSpec*>& specs) const {
    specs.insert(specs.end(), {front_.get(), &layer_->tape_spec(), back_.get()});
  }

  struct Tapes {
    Tape front, layer, back;
  };
  Tapes make_tapes(TensorView slot) const;
  /// Adds the loss; in training leaves the gradient of its own output in the slot.
  void forward(RunContext& context, Tapes& tapes, ConstTensorView hidden);
  /// Adds the gradient of `hidden` into dhidden [T, d] (compute type). The gradient of the embedded tokens is added to the
  /// table's, or, where `dembedded` [T, d] (compute type) is not empty, left there.
  void backward(RunContext& context,
                Tapes& tapes,
                TensorView dhidden,
                TensorView dembedded = TensorView());
  MoeLayer* moe() noexcept { return layer_->moe(); }
  MlaAttention* mla() noexcept { return layer_->mla(); }

 private:
  const ModelOptions options_;
  Precision precision_;
  const TokenSlices* slices_ = nullptr;  // of the micro-batches planned last
  StorageId eh_proj_, enorm_, hnorm_, norm_;
  const TokenEmbedding& embedding_;
  const VocabHead& head_;
  std::unique_ptr<DecoderLayer> layer_;
  std::unique_ptr<TapeSpec> front_, back_;
  ActId hidden_, e_, en_, e_inv_rms_, hn_, h_inv_rms_, u_, x_;
  ActId back_in_, n_, n_inv_rms_, dn_;
};

}  // namespace moesaic
