#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/model/kda_attention.h"
#include "core/model/mla_attention.h"
#include "core/model/moe.h"
#include "core/nn/module.h"

namespace moesaic {

/// Softmax mixing over depth before a sublayer (SPEC section 6): pseudo-query and norm weight.
struct DepthMix {
  StorageId query, norm;
  bool declared() const noexcept { return query.valid(); }
};

/// Where the gradients of a mix's weights go: query and norm, [hidden] each. The op makes both or neither; so the one that
/// is frozen next to a trained one gets a temporary of the tape.
struct MixGradients {
  TensorView query, norm;
};
MixGradients mix_gradients(Tape& tape, const DepthMix& mix, std::int64_t hidden);

/// How a layer takes part in the residual scheme. Plain: h = cur, cur += f(norm(h)). Attention residuals: h is a softmax
/// mix of the bank's snapshots and cur; a sublayer that starts a block first moves cur into the bank and begins a new
/// sum with its own output.
struct LayerResidual {
  ResidualKind kind = ResidualKind::plain;
  std::int64_t bank_size = 0;  ///< snapshots in the bank when the layer begins
  bool attn_starts_block = false;
  bool mlp_starts_block = false;  ///< only in the full form
  std::int64_t bank_size_for_mlp() const { return bank_size + (attn_starts_block ? 1 : 0); }
  std::int64_t bank_size_after() const { return bank_size_for_mlp() + (mlp_starts_block ? 1 : 0); }
};

struct DecoderLayerOptions {
  std::int64_t hidden = 0;
  double eps = 1e-5;
  bool is_kda = false, is_moe = false;
  KdaOptions kda;
  MlaOptions mla;
  MlpOptions dense;
  MoeOptions moe;
  LayerResidual residual;
  bool moe_under_own_name = true;  ///< "block_sparse_moe." against "mlp."
};

/// One layer: attention sublayer and channel mixer, each behind a depth mix (or none) and an RMSNorm.
class DecoderLayer {
 public:
  DecoderLayer(ParameterStore& params,
               const std::string& prefix,
               const DecoderLayerOptions& options);

  /// Which of the tensors that later layers read may leave the device in between.
  struct Leaving {
    bool mid = false;  ///< the sum between the sublayers, where it is a snapshot
    bool out = false;
  };
  /// Declares everything for micro-batches of `bounds` and decides what is saved.
  void plan(const Bounds& bounds, const RecomputePolicy& policy, Leaving leaving = {false, false});
  /// Numbers of the tape's offloaded parts; -1: there is none.
  struct Parts {
    int named = -1, mid = -1, out = -1;
  };
  Parts offloaded() const {
    const int named = spec_->named_part(), mid = spec_->part_of(mid_);
    return {named, mid == named ? -1 : mid, spec_->part_of(out_)};
  }
  const TapeSpec& tape_spec() const { return *spec_; }

  /// What a layer boundary carries: the running sum and the bank's snapshots.
  struct Bundle {
    ConstTensorView cur;
    std::vector<ConstTensorView> bank;
  };
  /// Runs the layer; the returned bundle's tensors live in `tape`'s slot and in those of earlier layers.
  Bundle forward(RunContext& context, Tape& tape, const Bundle& in);
  /// dcur [T, d] (compute type) holds the gradient of the outgoing sum and receives that of the incoming one. dbank: one
  /// accumulator [T, d] (statistics type) per snapshot that existed after the layer; those the layer itself created are
  /// consumed here.
  void backward(RunContext& context,
                Tape& tape,
                TensorView dcur,
                std::span<const TensorView> dbank);

  KdaAttention* kda() noexcept { return kda_.get(); }
  MlaAttention* mla() noexcept { return mla_.get(); }
  MoeLayer* moe() noexcept { return moe_.get(); }
  const DecoderLayerOptions& options() const noexcept { return options_; }

 private:
  struct Sublayer {
    Module* module = nullptr;
    StorageId norm;
    DepthMix mix;
    ActId h, p, n, inv_rms, y;
    ActId all_n, share;  // of all tokens, where they are cut and the module takes all
  };
  void declare_module(Sublayer& s, const std::string& name, const Bounds& bounds);
  void backward_module(Tape& tape, const Sublayer& s, ConstTensorView dy, TensorView dn) const;
  void declare_sublayer(
      Sublayer& s, const std::string& name, std::int64_t sources, ActId cur, const Bounds& bounds);
  /// From the gradient of the sublayer's output to that of its input h, which goes into dcur and dbank.
  void backward_sublayer(Tape& tape,
                         const Sublayer& s,
                         ConstTensorView dy,
                         TensorView dcur,
                         std::span<const TensorView> dbank,
                         ActId cur,
                         std::int64_t sources);

  DecoderLayerOptions options_;
  Precision precision_;
  std::unique_ptr<KdaAttention> kda_;
  std::unique_ptr<MlaAttention> mla_;
  std::unique_ptr<GatedMlp> mlp_;
  std::unique_ptr<MoeLayer> moe_;
  Sublayer attn_, channel_;
  std::unique_ptr<TapeSpec> spec_;
  const TokenSlices* slices_ = nullptr;  // of the micro-batches planned last
  std::vector<ActId> bank_;
  ActId cur_in_, mid_, out_;
};

/// Declares the parameters of a depth mix: query [1, d] zero, norm weight [d] one.
DepthMix declare_depth_mix(ParameterStore& params, const std::string& prefix, std::int64_t hidden);

}  // namespace moesaic
