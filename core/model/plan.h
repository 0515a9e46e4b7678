#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/config/check.h"
#include "core/config/config.h"
#include "core/model/options.h"
#include "core/nn/parameter_store.h"

namespace moesaic {

/// Elements of tensors: all, and those that one token meets (of a family of experts the chosen
/// ones; the lookup in the input embedding is not counted, SPEC 11).
struct ParameterCount {
  std::int64_t all = 0;
  std::int64_t active = 0;
};

struct LayerPlan {
  std::string attention;  ///< "KDA", "MLA", "sparse MLA"
  std::string mixer;      ///< "dense MLP", "MoE"
  ParameterCount parameters;
  /// Kept from forward to backward for one micro-batch; empty when the sizes do not fit 64 bits.
  std::optional<std::int64_t> activation_bytes;
};

struct PartPlan {
  Part part = Part::norm;
  ParameterCount parameters;
};

/// Operations (2 per multiply-add) of a part for one token in forward, and the formula behind the
/// number.
struct FlopsPlan {
  std::string part;
  std::string formula;
  std::int64_t flops = 0;
};

/// Parameters that are stored and optimised alike: bytes of each of them.
struct ByteClass {
  std::string optimizer;  ///< "Muon", "AdamW", or "frozen" (in every phase)
  DType stored_as = DType::f32;
  std::int64_t parameters = 0;
  std::int64_t weight = 0, master = 0, gradient = 0, state = 0, average = 0;
  std::int64_t per_parameter() const { return weight + master + gradient + state + average; }
};

/// Bytes of the whole model, before it is split over ranks.
struct BytesPlan {
  std::int64_t weights = 0, masters = 0, gradients = 0, optimizer = 0, average = 0;
  std::int64_t buffers = 0;  ///< routing bias and statistics of the step
  std::int64_t total = 0;
};

/// A stretch of the run with its own context length or set of trained parameters (MTP included in
/// all its numbers).
struct PhasePlan {
  std::int64_t begin = 0, end = 0;  ///< steps [begin, end)
  std::int64_t sequence_length = 0;
  std::int64_t global_batch_size = 0, micro_batch_size = 0;  ///< sequences
  std::int64_t first_token = 0, end_token = 0;               ///< of the run's tokens
  bool dense_warmup = false;  ///< the indexer learns beside dense attention
  std::int64_t trained = 0, frozen = 0;
  std::int64_t gradient_bytes =
      0;  ///< of trained parameters: what a step reduces over data-parallel ranks
  std::int64_t optimizer_bytes = 0;
  std::int64_t forward_flops = 0;  ///< per token, without MTP
  std::optional<std::int64_t> activation_bytes;
};

/// What a configuration costs, counted from the declarations that training uses; no memory of the
/// model's size is touched. MTP is listed apart and in no total of the model.
struct ModelPlan {
  Precision precision;
  std::vector<LayerPlan> layers;  ///< from 0, as in tensor names
  std::vector<PartPlan> parts;    ///< in the order of Part, those that exist
  ParameterCount model;
  ParameterCount mtp;
  std::int64_t sequence_length = 0;
  std::vector<FlopsPlan> flops;  ///< at sequence_length
  std::int64_t forward_flops = 0;
  std::int64_t training_flops = 0;  ///< 3 x forward
  std::optional<FlopsPlan> mtp_flops;
  std::vector<ByteClass> byte_classes;
  BytesPlan bytes;
  std::int64_t micro_batch_tokens = 0;
  /// Kept from forward to backward for one micro-batch; empty when the sizes do not fit 64 bits.
  std::optional<std::int64_t> activation_bytes;
  std::vector<PhasePlan> phases;  ///< at least one
  /// What is wrong with the configuration and shows only with the parameters at hand.
  std::vector<config::Finding> findings;
};

/// Plans a configuration that passed its checks. run.device `auto` counts as a GPU. Throws
/// UsageError when a count does not fit 64 bits.
ModelPlan make_plan(const config::Config& config);

/// Operations of one token in forward that are not products with parameters, in a layer that stands alone in `options`:
/// the core of its attention, and the scores of its indexer.
std::int64_t layer_core_flops(const ModelOptions& options,
                              std::size_t layer,
                              std::int64_t tokens,
                              bool dense_warmup);

}  // namespace moesaic
