#include "core/model/pipeline_plan.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/config/phase_extent.h"
#include "core/model/from_config.h"
#include "core/model/model.h"

namespace moesaic {
namespace {

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

pipeline::Kind kind_of(const config::Config& config) {
  if (goes_by_layers(config)) return pipeline::Kind::vertical;
  switch (config.parallel.schedule) {
    case config::PipelineSchedule::one_f_one_b:
      return pipeline::Kind::one_f_one_b;
    case config::PipelineSchedule::interleaved:
      return pipeline::Kind::interleaved;
    case config::PipelineSchedule::zero_bubble:
      return pipeline::Kind::zero_bubble;
    case config::PipelineSchedule::gpipe:
      return pipeline::Kind::gpipe;
  }
  return pipeline::Kind::one_f_one_b;
}

std::int64_t micro_batches_of(const config::Config& config, const config::PhaseExtent& phase) {
  return std::max<std::int64_t>(
      1, phase.global_batch_size / (phase.micro_batch_size * config.parallel.dp.value_or(1)));
}

// (chunk, micro-batch) pairs of a step. Beyond this a plan takes gigabytes; no machine has such a pipeline.
constexpr std::int64_t kMaxPairs = 1 << 19;

int chunks_per_stage(const config::Config& config) {
  return static_cast<int>(goes_by_layers(config) ? config.model.num_hidden_layers + 1
                                                 : config.parallel.chunks_per_stage());
}

// Where the MTP module's experts are loaded from elsewhere, or its attention sees all pieces, its chunk too passes all
// micro-batches before it turns round.
bool turns_at_end(const config::Config& config, std::int64_t pieces) {
  return goes_by_layers(config) &&
         (config.model.mtp.num_nextn_predict_layers == 0 ||
          (config.experts.offload != config::ExpertOffload::full && pieces == 1));
}

pipeline::Sizes sizes_of(const config::Config& config,
                         std::int64_t micro_batches,
                         std::int64_t pieces) {
  const bool all_together = config.parallel.order == config::LayerOrder::vertical;
  return {.stages = static_cast<int>(config.parallel.pp),
          .chunks = chunks_per_stage(config),
          .micro_batches = static_cast<int>(micro_batches * pieces),
          .turns_at_end = turns_at_end(config, pieces),
          .pieces = static_cast<int>(pieces),
          .together = goes_by_layers(config) && !all_together ? static_cast<int>(pieces) : 0};
}
std::int64_t pieces_of(const config::Config& config, const config::PhaseExtent& phase) {
  const std::int64_t tokens = phase.micro_batch_size * phase.sequence_length;
  return goes_by_layers(config)
             ? std::max<std::int64_t>(1, config::pieces_of_micro_batch(config, tokens))
             : 1;
}
pipeline::Sizes sizes_of(const config::Config& config, const config::PhaseExtent& phase) {
  return sizes_of(config, micro_batches_of(config, phase), pieces_of(config, phase));
}

/// What one token costs: in all, and of it the products with parameters.
struct Operations {
  pipeline::ModelCosts all, products;
};

Operations operations(const ModelPlan& plan,
                      const ModelOptions& options,
                      std::int64_t tokens,
                      bool dense_warmup) {
  Operations o;
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    const double products = 2.0 * static_cast<double>(plan.layers[l].parameters.active);
    o.products.layers.push_back(products);
    o.all.layers.push_back(products +
                           static_cast<double>(layer_core_flops(options, l, tokens, dense_warmup)));
  }
  // The embedding is a lookup: it reads and writes a row.
  o.all.before = static_cast<double>(options.hidden);
  const double head =
      2.0 * static_cast<double>(options.vocabulary) * static_cast<double>(options.hidden);
  o.products.after = o.all.after = head;
  if (plan.mtp_flops) {
    o.all.after += static_cast<double>(plan.mtp_flops->flops);
    o.products.after += 2.0 * static_cast<double>(plan.mtp.active) + head;
  }
  return o;
}

pipeline::Costs costs_of(const Operations& o, const std::vector<pipeline::LayerRange>& chunks) {
  pipeline::Costs costs;
  costs.forward = pipeline::chunk_costs(o.all, chunks);
  costs.backward_weight = pipeline::chunk_costs(o.products, chunks);
  for (std::size_t c = 0; c < chunks.size(); ++c)
    costs.backward_input.push_back(2 * costs.forward[c] - costs.backward_weight[c]);
  return costs;
}

std::vector<pipeline::LayerRange> layers_of(const config::Config& config, const Operations& o) {
  const int chunks = static_cast<int>(config.parallel.pp) * chunks_per_stage(config);
  if (goes_by_layers(config)) {
    std::vector<pipeline::LayerRange> ranges;
    for (std::int64_t l = 0; l < chunks; ++l)
      ranges.push_back({l, std::min(l + 1, config.model.num_hidden_layers)});
    return ranges;
  }
  return config.parallel.layers.empty()
             ? pipeline::balance_layers(o.all, chunks)
             : pipeline::given_layers(
                   config.parallel.layers, chunks, config.model.num_hidden_layers);
}

std::int64_t parameters_beside_layers(const ModelPlan& plan, bool is_first, bool is_last) {
  std::int64_t first = 0, last = plan.mtp.all;
  for (const PartPlan& part : plan.parts) {
    if (part.part == Part::embedding) first += part.parameters.all;
    if (part.part == Part::head) last += part.parameters.all;
  }
  return (is_first ? first : 0) + (is_last ? last : 0);
}

void fill_chunks(PipelinePlan& result,
                 const ModelPlan& plan,
                 const std::vector<pipeline::LayerRange>& ranges,
                 const pipeline::BundlePlan& bundles) {
  const int n = static_cast<int>(ranges.size());
  double sum = 0;
  for (const double f : result.costs.forward)
    sum += f;
  for (int c = 0; c < n; ++c) {
    ChunkPlan chunk;
    chunk.rank = result.schedule.placement.rank_of(c);
    chunk.layers = ranges[at(c)];
    chunk.forward_flops = result.costs.forward[at(c)];
    chunk.share = chunk.forward_flops * n / sum;
    chunk.slots = result.slots.per_chunk[at(c)];
    chunk.parameters = parameters_beside_layers(plan, c == 0, c + 1 == n);
    const std::int64_t pieces = result.schedule.sizes.pieces;
    if (plan.activation_bytes) chunk.activation_bytes = 0;
    for (auto l = chunk.layers.begin; l < chunk.layers.end; ++l) {
      const LayerPlan& layer = plan.layers[static_cast<std::size_t>(l)];
      chunk.parameters += layer.parameters.all;
      if (chunk.activation_bytes)
        *chunk.activation_bytes += layer.activation_bytes.value_or(0) / pieces;
    }
    if (c + 1 < n) {
      chunk.sent_snapshots = bundles.carried(c);
      chunk.sent_bytes = bundles.message_bytes(c, pipeline::Payload::activation);
      chunk.returned_bytes = bundles.message_bytes(c, pipeline::Payload::gradient);
    }
    result.chunks.push_back(std::move(chunk));
  }
}

/// The phase with the most operations.
std::size_t main_phase(const ModelPlan& plan) {
  const auto all = [](const PhasePlan& p) {
    return static_cast<double>(p.end_token - p.first_token) * static_cast<double>(p.forward_flops);
  };
  const auto most = std::max_element(
      plan.phases.begin(), plan.phases.end(), [&](const PhasePlan& a, const PhasePlan& b) {
        return all(a) < all(b);
      });
  return static_cast<std::size_t>(most - plan.phases.begin());
}

/// The most that the layers of a rank keep at once.
std::int64_t peak_activations(const std::vector<pipeline::Action>& list,
                              const std::vector<ChunkPlan>& chunks) {
  std::int64_t now = 0, peak = 0;
  for (const pipeline::Action& a : list) {
    const std::int64_t bytes = a.is_exchange() ? 0 : *chunks[at(a.chunk)].activation_bytes;
    if (a.work == pipeline::Work::forward)
      peak = std::max(peak, now += bytes);
    else if (a.work != pipeline::Work::backward_input)
      now -= bytes;
  }
  return peak;
}

}  // namespace

std::vector<config::Finding> pipeline_findings(const config::Config& config) {
  const config::ParallelConfig& parallel = config.parallel;
  if (!has_schedule(config)) return {};
  const std::int64_t layers = config.model.num_hidden_layers,
                     chunks = parallel.pp * chunks_per_stage(config);
  const std::vector<std::string> sizes{
      "parallel.pp", "parallel.chunks", "parallel.schedule", "model.num_hidden_layers"};
  for (const config::PhaseExtent& phase : config::phase_extents(config)) {
    const std::int64_t micro_batches = micro_batches_of(config, phase) * pieces_of(config, phase);
    if (chunks * micro_batches > kMaxPairs)
      return {{sizes,
               fmt::format("{} chunks and {} micro-batches (or pieces of them) are too many to "
                           "plan; allowed: a product "
                           "of at most {}",
                           chunks,
                           micro_batches,
                           kMaxPairs)}};
  }
  if (goes_by_layers(config)) return {};
  const config::PhaseExtent first = config::phase_extents(config).front();
  if (const std::string problem = pipeline::size_problem(kind_of(config), sizes_of(config, first));
      !problem.empty())
    return {{{"parallel.chunks", "parallel.schedule", "parallel.pp"}, problem}};
  if (!parallel.layers.empty()) {
    try {
      pipeline::given_layers(parallel.layers, static_cast<int>(chunks), layers);
    } catch (const UsageError& e) {
      return {{{"parallel.layers", "parallel.pp", "parallel.chunks", "model.num_hidden_layers"},
               e.what()}};
    }
  } else if (chunks > layers) {
    const std::int64_t stages = layers / parallel.chunks_per_stage();
    return {{sizes,
             fmt::format("{} stages of {} chunks need {} layers or more, but the model has {}. "
                         "Nearest valid: {}",
                         parallel.pp,
                         parallel.chunks_per_stage(),
                         chunks,
                         layers,
                         stages > 1 ? fmt::format("pp {}", stages) : "pp 1")}};
  }
  return {};
}

StageShare PipelineLayout::share(int stage) const {
  if (placement.num_chunks() == 1) return {};
  StageShare share;
  share.is_vertical = placement.stages() == 1;
  for (const int c : placement.chunks_of(stage))
    share.chunks.push_back({chunks[at(c)], c == 0, c + 1 == placement.num_chunks()});
  return share;
}

pipeline::BundlePlan PipelineLayout::bundles(const ModelOptions& options,
                                             const Precision& precision,
                                             std::int64_t tokens) const {
  const std::vector<LayerResidual> residuals = plan_residuals(options);
  std::vector<int> origins;
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    for (auto l = chunks[c].begin; l < chunks[c].end; ++l) {
      const LayerResidual& r = residuals[static_cast<std::size_t>(l)];
      origins.insert(origins.end(),
                     static_cast<std::size_t>(r.bank_size_after() - r.bank_size),
                     static_cast<int>(c));
    }
  }
  const Shape shape{tokens, options.hidden};
  const DType compute = precision.compute;
  return {placement, {shape, compute, compute}, {shape, compute, precision.stats}, origins};
}

PipelineLayout pipeline_layout(const config::Config& config) {
  if (!has_schedule(config)) {
    return {.placement = {pipeline::Placement::Form::loop, 1, 1},
            .chunks = {{0, config.model.num_hidden_layers}}};
  }
  const ModelPlan plan = make_plan(config);
  const std::size_t phase = main_phase(plan);
  const Operations costs = operations(plan,
                                      model_options(config),
                                      config::phase_extents(config)[phase].sequence_length,
                                      plan.phases[phase].dense_warmup);
  return {.placement = pipeline_schedule(config, 1, 1).placement,
          .chunks = layers_of(config, costs)};
}

StageShare stage_share(const config::Config& config, const MeshPosition& position) {
  if (position.extent(Axis::pp) == 1 && !goes_by_layers(config)) return {};
  return pipeline_layout(config).share(position.coordinate(Axis::pp));
}

pipeline::Schedule pipeline_schedule(const config::Config& config,
                                     std::int64_t micro_batches,
                                     std::int64_t pieces) {
  return pipeline::make_schedule(
      kind_of(config), sizes_of(config, std::max<std::int64_t>(1, micro_batches), pieces));
}

std::optional<PipelinePlan> make_pipeline_plan(const config::Config& config,
                                               const ModelPlan& plan) {
  if (!has_schedule(config)) return std::nullopt;
  const ModelOptions options = model_options(config);
  const std::vector<config::PhaseExtent> extents = config::phase_extents(config);
  const pipeline::Kind kind = kind_of(config);
  const auto operations_of = [&](std::size_t phase) {
    return operations(
        plan, options, extents[phase].sequence_length, plan.phases[phase].dense_warmup);
  };
  PipelinePlan result;
  result.main_phase = main_phase(plan);
  const config::PhaseExtent& main = extents[result.main_phase];
  const Operations costs = operations_of(result.main_phase);
  const std::vector<pipeline::LayerRange> ranges = layers_of(config, costs);
  result.schedule = pipeline::make_schedule(kind, sizes_of(config, main));
  result.costs = costs_of(costs, ranges);
  result.times = pipeline::simulate(result.schedule, result.costs);
  result.unit_bubble =
      pipeline::simulate(result.schedule,
                         pipeline::Costs::unit(result.schedule.placement.num_chunks()))
          .bubble_fraction();
  result.slots = pipeline::count_slots(result.schedule);
  const PipelineLayout layout{.placement = result.schedule.placement, .chunks = ranges};
  fill_chunks(result,
              plan,
              ranges,
              layout.bundles(
                  options, plan.precision, plan.micro_batch_tokens / result.schedule.sizes.pieces));
  for (const auto& list : result.schedule.ranks) {
    result.activation_bytes.emplace_back();
    if (plan.activation_bytes)
      result.activation_bytes.back() = peak_activations(list, result.chunks);
  }
  for (std::size_t i = 0; i < extents.size(); ++i) {
    const pipeline::Sizes sizes = sizes_of(config, extents[i]);
    PipelinePhase phase{.begin = extents[i].begin,
                        .end = extents[i].until,
                        .micro_batches = sizes.micro_batches / sizes.pieces,
                        .bubble = result.times.bubble_fraction()};
    if (i != result.main_phase)
      phase.bubble = pipeline::simulate(pipeline::make_schedule(kind, sizes),
                                        costs_of(operations_of(i), ranges))
                         .bubble_fraction();
    result.phases.push_back(phase);
  }
  return result;
}

}  // namespace moesaic
