#include <string>

#include <nlohmann/json.hpp>

#include "apps/plan_offload.h"
#include "apps/plan_report.h"
#include "core/config/check.h"
#include "core/model/context_plan.h"
#include "parallel/pipeline/grid.h"

namespace moesaic::apps {
namespace {

using Json = nlohmann::ordered_json;

Json json(const ParameterCount& n) {
  return {{"total", n.all}, {"active", n.active}};
}
Json json(const std::optional<std::int64_t>& n) {
  return n ? Json(*n) : Json();
}
Json json(const FlopsPlan& f) {
  return {{"part", f.part}, {"forward", f.flops}, {"formula", f.formula}};
}

Json layers(const ModelPlan& plan) {
  Json all = Json::array();
  for (std::size_t i = 0; i < plan.layers.size(); ++i) {
    const LayerPlan& l = plan.layers[i];
    all.push_back({{"layer", i},
                   {"attention", l.attention},
                   {"mixer", l.mixer},
                   {"total", l.parameters.all},
                   {"active", l.parameters.active}});
  }
  return all;
}

Json parts(const ModelPlan& plan) {
  Json all = Json::object();
  for (const PartPlan& part : plan.parts)
    all[name(part.part)] = json(part.parameters);
  return all;
}

Json flops(const ModelPlan& plan) {
  Json parts = Json::array();
  for (const FlopsPlan& part : plan.flops)
    parts.push_back(json(part));
  return {{"sequence_length", plan.sequence_length},
          {"parts", std::move(parts)},
          {"forward", plan.forward_flops},
          {"training", plan.training_flops},
          {"mtp", plan.mtp_flops ? json(*plan.mtp_flops) : Json()}};
}

Json memory(const ModelPlan& plan) {
  Json classes = Json::array();
  for (const ByteClass& c : plan.byte_classes) {
    classes.push_back({{"optimizer", c.optimizer},
                       {"stored_as", name(c.stored_as)},
                       {"parameters", c.parameters},
                       {"weight", c.weight},
                       {"master", c.master},
                       {"gradient", c.gradient},
                       {"state", c.state},
                       {"average", c.average},
                       {"bytes_per_parameter", c.per_parameter()}});
  }
  const BytesPlan& b = plan.bytes;
  return {{"per_parameter", std::move(classes)},
          {"weights", b.weights},
          {"masters", b.masters},
          {"gradients", b.gradients},
          {"optimizer", b.optimizer},
          {"average", b.average},
          {"buffers", b.buffers},
          {"total", b.total},
          {"micro_batch_tokens", plan.micro_batch_tokens},
          {"activations_per_micro_batch", json(plan.activation_bytes)}};
}

Json phases(const ModelPlan& plan) {
  Json all = Json::array();
  for (const PhasePlan& p : plan.phases) {
    all.push_back({{"begin", p.begin},
                   {"end", p.end},
                   {"sequence_length", p.sequence_length},
                   {"global_batch_size", p.global_batch_size},
                   {"micro_batch_size", p.micro_batch_size},
                   {"first_token", p.first_token},
                   {"end_token", p.end_token},
                   {"dense_warmup", p.dense_warmup},
                   {"trained", p.trained},
                   {"frozen", p.frozen},
                   {"gradient_bytes", p.gradient_bytes},
                   {"optimizer_bytes", p.optimizer_bytes},
                   {"forward_flops", p.forward_flops},
                   {"activations_per_micro_batch", json(p.activation_bytes)}});
  }
  return all;
}

Json by_tag(const std::vector<MemoryUse>& uses) {
  Json parts = Json::object();
  for (const MemoryUse& use : uses)
    parts[use.tag] = use.bytes;
  return parts;
}

// Where offloaded experts are; null without.
Json tiers_json(const MemoryPlan& plan) {
  if (plan.tier_parts.empty()) return nullptr;
  Json all = Json::array();
  for (const TierPart& p : plan.tier_parts)
    all.push_back({{"group", p.group},
                   {"kind", name(p.kind)},
                   {"blocks", p.blocks},
                   {"block_bytes", p.block_bytes},
                   {"slots", p.slots},
                   {"on_device", p.on_device},
                   {"in_file", p.in_file},
                   {"staging_slots", p.staging_slots},
                   {"device", p.device},
                   {"host", p.host},
                   {"file", p.file}});
  return all;
}

Json rank_memory(const MemoryPlan& rank) {
  return {{"ranks", rank.ranks},
          {"backend", rank.device.kind == Device::Kind::cuda ? "cuda" : "cpu"},
          {"parts", by_tag(rank.parts)},
          {"communication", rank.communication},
          {"runtime_estimate", rank.runtime},
          {"total", rank.total()},
          {"host_parts", by_tag(rank.host)},
          {"file_parts", by_tag(rank.file)},
          {"experts", tiers_json(rank)},
          {"activations_out_per_step", rank.activations_out},
          {"activations_in_per_step", rank.activations_in}};
}

// The stage that needs most on the device; null for what cannot be trained.
Json largest_rank(const std::vector<MemoryPlan>& stages) {
  return stages.empty() ? Json() : rank_memory(stages[largest_on_device(stages)]);
}

Json all_stages(const std::vector<MemoryPlan>& stages) {
  Json all = Json::array();
  for (const MemoryPlan& stage : stages)
    all.push_back(rank_memory(stage));
  return all;
}

// What offloaded experts move in a step, of the stage with most of them; null without.
Json traffic_json(const config::Config& config,
                  const ModelPlan& plan,
                  const std::vector<MemoryPlan>& stages) {
  const auto stage = largest_offload(stages);
  if (!stage) return nullptr;
  const OffloadTraffic t = offload_traffic(config, plan, stages[*stage]);
  return {{"stage", *stage},
          {"bytes_up", static_cast<std::int64_t>(t.bytes.up)},
          {"bytes_down", static_cast<std::int64_t>(t.bytes.down)},
          {"link_seconds", t.seconds},
          {"hidden_from_tokens", static_cast<std::int64_t>(t.tokens)}};
}

Json context_json(const ContextPlan& plan) {
  Json all = Json::array();
  for (const ContextPlan::Phase& p : plan.phases) {
    Json work = Json::array();
    for (const double flops : p.work)
      work.push_back(static_cast<std::int64_t>(flops));
    all.push_back({{"piece_tokens", p.piece_tokens},
                   {"forward_flops", std::move(work)},
                   {"busiest_over_mean", p.busiest_over_mean()}});
  }
  return all;
}

Json pipeline_json(const PipelinePlan& plan) {
  Json chunks = Json::array(), ranks = Json::array(), phases = Json::array();
  for (const ChunkPlan& c : plan.chunks)
    chunks.push_back({{"rank", c.rank},
                      {"first_layer", c.layers.begin},
                      {"layers", c.layers.size()},
                      {"parameters", c.parameters},
                      {"forward_flops", static_cast<std::int64_t>(c.forward_flops)},
                      {"slots", c.slots},
                      {"activation_bytes", json(c.activation_bytes)},
                      {"sent_snapshots", c.sent_snapshots},
                      {"sent_bytes", c.sent_bytes},
                      {"returned_bytes", c.returned_bytes}});
  for (std::size_t r = 0; r < plan.schedule.ranks.size(); ++r) {
    ranks.push_back({{"busy", plan.times.busy[r] / plan.times.makespan},
                     {"kept", plan.slots.per_rank[r]},
                     {"deferred_weight_gradients", plan.slots.deferred[r]},
                     {"activation_bytes", json(plan.activation_bytes[r])}});
  }
  for (const PipelinePhase& p : plan.phases)
    phases.push_back({{"begin", p.begin},
                      {"end", p.end},
                      {"micro_batches", p.micro_batches},
                      {"bubble", p.bubble}});
  const pipeline::Sizes& s = plan.schedule.sizes;
  return {{"schedule", name(plan.schedule.kind)},
          {"stages", s.stages},
          {"chunks_per_stage", s.chunks},
          {"micro_batches", s.micro_batches / s.pieces},
          {"pieces", s.pieces},
          {"bubble", plan.times.bubble_fraction()},
          {"bubble_of_equal_chunks", plan.unit_bubble},
          {"chunks", std::move(chunks)},
          {"ranks", std::move(ranks)},
          {"phases", std::move(phases)}};
}

Json action_json(const pipeline::Action& a, const pipeline::Span& span) {
  Json json{{"work", name(a.work)}, {"start", span.start}, {"end", span.end}};
  if (!a.is_exchange()) {
    json["chunk"] = a.chunk;
    json["micro_batch"] = a.micro_batch;
    return json;
  }
  json["messages"] = Json::array();
  for (const pipeline::Message& m : a.messages)
    json["messages"].push_back({{"direction", direction(m)},
                                {"payload", name(m.payload)},
                                {"boundary", m.boundary},
                                {"micro_batch", m.micro_batch},
                                {"peer", m.peer}});
  return json;
}

}  // namespace

Json recompute_json(const std::vector<RecomputeChoice>& choices) {
  Json all = Json::array();
  for (const RecomputeChoice& c : choices) {
    Json kinds = Json::array();
    for (const RecomputeChoice::LayerKind& k : c.kinds)
      kinds.push_back({{"layer", k.name}, {"saved", json(k.saved)}});
    all.push_back({{"policy", c.policy},
                   {"is_set", c.is_set},
                   {"layers", std::move(kinds)},
                   {"rank_memory", rank_memory(c.memory)}});
  }
  return all;
}

std::string plan_json(const config::LoadedConfig& loaded,
                      const ModelPlan& plan,
                      const std::vector<MemoryPlan>& stages,
                      const std::vector<RecomputeChoice>& recompute,
                      const std::optional<PipelinePlan>& pipeline) {
  Json notes = Json::array();
  const auto context = plan_context(loaded.config, plan);
  for (const config::Problem& note : config::untrainable(loaded.config))
    notes.push_back({{"key", note.key}, {"message", note.message}});
  const Json all{{"config", loaded.path},
                 {"model_type", loaded.config.model.model_type},
                 {"precision", name(plan.precision.compute)},
                 {"parameters",
                  {{"total", plan.model.all},
                   {"active", plan.model.active},
                   {"mtp", json(plan.mtp)},
                   {"parts", parts(plan)}}},
                 {"layers", layers(plan)},
                 {"flops_per_token", flops(plan)},
                 {"bytes", memory(plan)},
                 {"phases", phases(plan)},
                 {"rank_memory", largest_rank(stages)},
                 {"stage_memory", all_stages(stages)},
                 {"offload_per_step", traffic_json(loaded.config, plan, stages)},
                 {"recompute", recompute_json(recompute)},
                 {"context", context ? context_json(*context) : Json()},
                 {"pipeline", pipeline ? pipeline_json(*pipeline) : Json()},
                 {"notes", std::move(notes)}};
  return all.dump(2) + "\n";
}

std::string schedule_json(const PipelinePlan& plan) {
  const pipeline::Schedule& schedule = plan.schedule;
  Json ranks = Json::array();
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r) {
    Json actions = Json::array();
    for (std::size_t i = 0; i < schedule.ranks[r].size(); ++i)
      actions.push_back(action_json(schedule.ranks[r][i], plan.times.spans[r][i]));
    ranks.push_back(std::move(actions));
  }
  Json all = pipeline_json(plan);
  all["actions"] = std::move(ranks);
  return all.dump(1) + "\n";
}

}  // namespace moesaic::apps
