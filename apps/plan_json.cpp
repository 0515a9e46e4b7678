#include <string>

#include <nlohmann/json.hpp>

#include "apps/plan_report.h"
#include "core/config/check.h"

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

Json rank_memory(const std::optional<MemoryPlan>& rank) {
  if (!rank) return nullptr;
  Json parts;
  for (const MemoryUse& use : rank->parts)
    parts[use.tag] = use.bytes;
  return {{"backend", rank->device.kind == Device::Kind::cuda ? "cuda" : "cpu"},
          {"parts", parts},
          {"communication", rank->communication},
          {"runtime_estimate", rank->runtime},
          {"total", rank->total()}};
}

}  // namespace

std::string plan_json(const config::LoadedConfig& loaded,
                      const ModelPlan& plan,
                      const std::optional<MemoryPlan>& rank) {
  Json notes = Json::array();
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
                 {"rank_memory", rank_memory(rank)},
                 {"notes", std::move(notes)}};
  return all.dump(2) + "\n";
}

}  // namespace moesaic::apps
