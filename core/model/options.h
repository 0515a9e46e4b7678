#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/ops/glu.h"
#include "kernels/ops/router.h"
#include "kernels/ops/sparse_mla.h"
#include "parallel/dispatch/exchange.h"

namespace moesaic {

// Sizes and choices of the modules, resolved: no defaults to look up, no cross-checks left. core/model/from_config.h
// makes them from the configuration.

struct KdaOptions {
  std::int64_t hidden = 0, heads = 0, head_dim = 0, conv_kernel = 4;
  std::optional<double> gate_lower_bound;  ///< e.g. -5; none = the softplus gate
  bool full_rank_gate = true;
  std::int64_t a_log_entries =
      0;  ///< stored entries of A_log (>= heads); 0 = shape [1, 1, heads, 1] as Kimi-Linear
  double eps = 1e-5;
  double init_std = 0.02;
  std::int64_t chunk_size = 64;
};

/// How attention over selected keys is computed. The results differ by rounding.
///   masked     keys and values of every head, all of a document's, with a mask (AttentionForward)
///   gather     the selected rows of the latent alone, which all heads share (SparseMlaForward)
///   automatic  gather when sequences have more than `gather_beyond` tokens
enum class SparseForm : std::uint8_t { automatic, masked, gather };

struct IndexerOptions {
  std::int64_t heads = 0, head_dim = 0, top_k = 0;
  std::int64_t rope_dim = 0;  ///< rotated columns (the first ones); 0 = none
  double norm_eps = 1e-6;
  double kl_weight = 1.0;
  SparseForm form = SparseForm::automatic;
  std::int64_t gather_beyond = 65536;
  KeySums key_sums = KeySums::integer;  ///< of the gather form's backward
};

struct MlaOptions {
  std::int64_t hidden = 0, heads = 0;
  std::int64_t q_lora_rank = 0;  ///< 0 = direct query projection
  std::int64_t kv_lora_rank = 0, qk_nope_dim = 0, qk_rope_dim = 0, v_dim = 0;
  bool output_gate = false;
  bool rope = false;
  double rope_theta = 10000.0;
  bool rope_interleaved = true;
  double latent_eps = 1e-6;
  double init_std = 0.02;
  std::optional<IndexerOptions> indexer;
};

struct MlpOptions {
  std::int64_t hidden = 0, inner = 0;
  GluActivation activation;
  double init_std = 0.02;
};

enum class BiasRule : std::uint8_t { none, sign, quantile, quantile_exact };
enum class AuxLoss : std::uint8_t { none, switch_, sequence, global };

struct MoeOptions {
  std::int64_t hidden = 0, experts = 0, top_k = 0, inner = 0;
  std::int64_t latent = 0;  ///< 0 = the plain form
  bool latent_norm = true;
  std::int64_t shared_inner = 0;  ///< inner width of all shared experts together; 0 = none
  GluActivation activation;
  RouterScore score = RouterScore::sigmoid;
  int num_groups = 1, topk_groups = 1;
  bool renormalize = true;
  double route_scale = 1.0;
  /// Rows that an expert keeps of a micro-batch of T tokens: `capacity`, or ceil(capacity_factor T k / E), whichever is
  /// set; dropless when both are 0.
  std::int64_t capacity = 0;
  double capacity_factor = 0;
  DropPolicy drop_policy = DropPolicy::prob;
  BiasRule bias_rule = BiasRule::none;
  double sign_gamma = 1e-3;
  std::int64_t histogram_bins = 1001;
  AuxLoss aux_loss = AuxLoss::none;
  double aux_weight = 0, z_weight = 0;
  /// How z and the gradients of u go to the experts. Rows are rounded so even where they stay on their rank: every layout
  /// computes the same.
  RowFormat rows = RowFormat::plain, gradient_rows = RowFormat::plain;
  double eps = 1e-5;
  double init_std = 0.02;
  bool place = false;         ///< keeps averages of the load, and the places that they led to
  std::int64_t replicas = 0;  ///< slots of a rank for copies of other ranks' experts; needs place
};

enum class ResidualKind : std::uint8_t { plain, attention };

struct LayerOptions {
  bool is_kda = false;
  bool is_moe = false;
};

struct ModelOptions {
  std::int64_t hidden = 0, vocabulary = 0;
  std::vector<LayerOptions> layers;
  KdaOptions kda;
  MlaOptions mla;
  MlpOptions dense;
  MoeOptions moe;
  ResidualKind residual = ResidualKind::plain;
  std::int64_t attn_res_block = 0;  ///< layers per block
  bool attn_res_full = false;       ///< every sublayer's output is a source
  double eps = 1e-5;
  double init_std = 0.02;
  bool tie_embeddings = false;
  bool mtp = false;
  bool mtp_post_norm = false;
  double mtp_weight = 0.3;
  std::string name_prefix;           ///< of checkpoint names, e.g. "language_model."
  std::int64_t head_chunk_rows = 0;  ///< rows of logits held at a time; 0 = chosen
};

}  // namespace moesaic
