#pragma once
#include <array>
#include <cstddef>
#include <string_view>

// Choices of the configuration. `names_of(E)` lists the words of the YAML file in enumerator order.
namespace moesaic::config {

enum class DeviceChoice { automatic, cpu, cuda };
constexpr std::array<std::string_view, 3> names_of(DeviceChoice) {
  return {"auto", "cpu", "cuda"};
}

enum class PrecisionChoice { automatic, f64, f32, bf16 };
constexpr std::array<std::string_view, 4> names_of(PrecisionChoice) {
  return {"auto", "f64", "f32", "bf16"};
}

enum class HiddenAct { silu, situ };
constexpr std::array<std::string_view, 2> names_of(HiddenAct) {
  return {"silu", "situ"};
}

enum class RouterFunc { sigmoid, softmax };
constexpr std::array<std::string_view, 2> names_of(RouterFunc) {
  return {"sigmoid", "softmax"};
}

enum class CapacityPolicy { prob, position };
constexpr std::array<std::string_view, 2> names_of(CapacityPolicy) {
  return {"prob", "position"};
}

enum class BiasRule { none, sign, quantile, quantile_exact };
constexpr std::array<std::string_view, 4> names_of(BiasRule) {
  return {"none", "sign", "quantile", "quantile_exact"};
}

enum class AuxLoss { none, switch_loss, sequence, global };
constexpr std::array<std::string_view, 4> names_of(AuxLoss) {
  return {"none", "switch", "sequence", "global"};
}

enum class ResidualType { plain, attention };
constexpr std::array<std::string_view, 2> names_of(ResidualType) {
  return {"plain", "attention"};
}

enum class MtpHidden { pre_norm, post_norm };
constexpr std::array<std::string_view, 2> names_of(MtpHidden) {
  return {"pre_norm", "post_norm"};
}

enum class RopeScalingType { yarn };
constexpr std::array<std::string_view, 1> names_of(RopeScalingType) {
  return {"yarn"};
}

/// How data files are read; automatic = by extension and first bytes.
enum class DataFormat { automatic, bytes_text, megatron, llmc, nanogpt, chat_jsonl };
constexpr std::array<std::string_view, 6> names_of(DataFormat) {
  return {"auto", "bytes_text", "megatron", "llmc", "nanogpt", "chat_jsonl"};
}

/// Type of the tokens in files without a header.
enum class TokenDtype { u16, u32 };
constexpr std::array<std::string_view, 2> names_of(TokenDtype) {
  return {"u16", "u32"};
}

/// How attention over selected keys is computed.
enum class AttentionForm { automatic, masked, gather };
constexpr std::array<std::string_view, 3> names_of(AttentionForm) {
  return {"auto", "masked", "gather"};
}

/// How many queries' contributions to a key's gradient are added.
enum class KeySumsChoice { integer, float_atomics };
constexpr std::array<std::string_view, 2> names_of(KeySumsChoice) {
  return {"integer", "float_atomics"};
}

enum class SparseStage { warmup, sparse };
constexpr std::array<std::string_view, 2> names_of(SparseStage) {
  return {"warmup", "sparse"};
}

/// How the products of Muon's iteration are formed: automatic = bf16 where the model computes in bf16.
enum class MuonProducts { automatic, f32, bf16 };
constexpr std::array<std::string_view, 3> names_of(MuonProducts) {
  return {"auto", "f32", "bf16"};
}
enum class OptimizerName { adamw, muon };
constexpr std::array<std::string_view, 2> names_of(OptimizerName) {
  return {"adamw", "muon"};
}

enum class LrSchedule { constant, cosine, wsd };
constexpr std::array<std::string_view, 3> names_of(LrSchedule) {
  return {"constant", "cosine", "wsd"};
}

enum class DecayShape { linear, cosine, one_minus_sqrt };
constexpr std::array<std::string_view, 3> names_of(DecayShape) {
  return {"linear", "cosine", "1-sqrt"};
}

/// What becomes of experts without a token in a step: lazy has the values of dense.
enum class Untouched { dense, lazy, skip };
constexpr std::array<std::string_view, 3> names_of(Untouched) {
  return {"dense", "lazy", "skip"};
}

/// How masters of bf16 weights are kept.
enum class MasterWeights { f32, split };
constexpr std::array<std::string_view, 2> names_of(MasterWeights) {
  return {"f32", "split"};
}

enum class PipelineSchedule { one_f_one_b, interleaved, zero_bubble, gpipe };
constexpr std::array<std::string_view, 4> names_of(PipelineSchedule) {
  return {"1f1b", "interleaved", "zero_bubble", "gpipe"};
}

enum class LayerOrder { horizontal, vertical };
constexpr std::array<std::string_view, 2> names_of(LayerOrder) {
  return {"horizontal", "vertical"};
}

enum class Exchange { automatic, dense, hdense, flat, hierarchical, pair };
constexpr std::array<std::string_view, 6> names_of(Exchange) {
  return {"auto", "dense", "hdense", "flat", "hierarchical", "pair"};
}

enum class Hierarchy { inter_first, intra_first };
constexpr std::array<std::string_view, 2> names_of(Hierarchy) {
  return {"inter_first", "intra_first"};
}

enum class DispatchDtype { activation, fp8 };
constexpr std::array<std::string_view, 2> names_of(DispatchDtype) {
  return {"activation", "fp8"};
}

enum class OnSaveError { stop, go_on };
constexpr std::array<std::string_view, 2> names_of(OnSaveError) {
  return {"stop", "continue"};
}

enum class ReductionOrder { ordered, library };
constexpr std::array<std::string_view, 2> names_of(ReductionOrder) {
  return {"ordered", "library"};
}

enum class ExpertOffload { none, states, full };
constexpr std::array<std::string_view, 3> names_of(ExpertOffload) {
  return {"none", "states", "full"};
}

/// What a cache of experts keeps; `fixed` is static in the file.
enum class ExpertPolicy { sched, lru, fixed, random };
constexpr std::array<std::string_view, 4> names_of(ExpertPolicy) {
  return {"sched", "lru", "static", "random"};
}

/// When experts are updated.
enum class ExpertUpdateTime { after_step, in_backward };
constexpr std::array<std::string_view, 2> names_of(ExpertUpdateTime) {
  return {"after_step", "in_backward"};
}

/// The word of the YAML file for a choice.
template <class E>
constexpr std::string_view name_of(E value) {
  return names_of(value)[static_cast<std::size_t>(value)];
}

}  // namespace moesaic::config
