#include "apps/selftest/layout_run.h"

#include <cstring>
#include <optional>

#include <fmt/format.h>

#include "apps/assembly.h"
#include "core/checkpoint/boxes.h"
#include "core/model/from_config.h"
#include "core/nn/expert_tiers.h"

namespace moesaic::apps::selftest {
namespace {

/// A block of a whole tensor, as it travels between ranks: a header of shapes, then the elements in f64.
struct Piece {
  std::string name;
  Shape whole, begin, extent;
  std::vector<double> values;
};

void put(std::string& bytes, const void* data, std::size_t n) {
  bytes.append(static_cast<const char*>(data), n);
}
void get(const std::string& bytes, std::size_t& at, void* data, std::size_t n) {
  MOESAIC_CHECK(at + n <= bytes.size(), "a piece of a tensor is cut off");
  std::memcpy(data, bytes.data() + at, n);
  at += n;
}

void write(std::string& bytes, const Piece& piece) {
  const std::size_t name = piece.name.size(), n = piece.values.size();
  put(bytes, &name, sizeof name);
  put(bytes, piece.name.data(), name);
  for (const Shape* shape : {&piece.whole, &piece.begin, &piece.extent})
    put(bytes, shape, sizeof *shape);
  put(bytes, &n, sizeof n);
  put(bytes, piece.values.data(), n * sizeof(double));
}

Piece read(const std::string& bytes, std::size_t& at) {
  Piece piece;
  std::size_t name = 0, n = 0;
  get(bytes, at, &name, sizeof name);
  piece.name.resize(name);
  get(bytes, at, piece.name.data(), name);
  for (Shape* shape : {&piece.whole, &piece.begin, &piece.extent})
    get(bytes, at, shape, sizeof *shape);
  get(bytes, at, &n, sizeof n);
  piece.values.resize(n);
  get(bytes, at, piece.values.data(), n * sizeof(double));
  return piece;
}

std::vector<double> values_of(const ConstTensorView& host) {
  std::vector<double> values(static_cast<std::size_t>(host.numel()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    switch (host.dtype()) {
      case DType::f64:
        values[i] = host.as<double>()[i];
        break;
      case DType::f32:
        values[i] = static_cast<double>(host.as<float>()[i]);
        break;
      default:
        values[i] = static_cast<double>(static_cast<float>(host.as<bf16>()[i]));
    }
  }
  return values;
}

std::vector<double> on_host(const TensorView& view, Stream& stream) {
  const Buffer memory(std::max<std::size_t>(1, view.bytes()), kCpu, "layout self-test");
  const TensorView host = memory.view(view.shape(), view.dtype());
  copy_tensor(host, view, stream);
  stream.synchronize();
  return values_of(host);
}

// Every block comes from the rank that speaks for it; together they are the whole of each tensor, each element once.
WholeTensors put_together(const std::vector<Piece>& own, Communicator& world) {
  std::string bytes;
  for (const Piece& piece : own)
    write(bytes, piece);
  WholeTensors all;
  std::map<std::string, std::int64_t> filled;
  for (const std::string& from : world.all_gather_host(bytes)) {
    for (std::size_t at = 0; at < from.size();) {
      const Piece piece = read(from, at);
      std::vector<double>& whole = all[piece.name];
      whole.resize(static_cast<std::size_t>(piece.whole.numel()));
      const Box box{piece.begin, piece.extent};
      copy_box(reinterpret_cast<std::byte*>(whole.data()),
               whole_box(piece.whole),
               reinterpret_cast<const std::byte*>(piece.values.data()),
               box,
               box,
               sizeof(double));
      filled[piece.name] += piece.extent.numel();
    }
  }
  for (const auto& [name, whole] : all)
    MOESAIC_CHECK(
        filled[name] == static_cast<std::int64_t>(whole.size()),
        fmt::format(
            "the ranks hold {} of the {} elements of {}", filled[name], whole.size(), name));
  return all;
}

// Of this rank's own piece; nothing when there is none.
std::optional<std::vector<double>> gradient_of(const ParameterStore& params,
                                               ParamId id,
                                               std::int64_t member,
                                               Stream& stream) {
  const StorageId storage = params.storage_of(id);
  if (!params.has_tiered_weights(storage)) {
    const TensorView gradient = params.own_gradient(id, member);
    if (gradient.empty()) return std::nullopt;
    return on_host(gradient, stream);
  }
  if (params.frozen(id) || params.own_piece(id, member).is_empty()) return std::nullopt;
  std::vector<double> values;
  params.tiers()->with_members(storage,
                               {&member, 1},
                               {.gradient = MemberAccess::read},
                               stream,
                               [&](std::span<const MemberTensors> members) {
                                 values =
                                     on_host(params.box_of_member(members[0].gradient, id), stream);
                               });
  return values;
}

std::vector<Piece> own_gradients(const ParameterStore& params, Stream& stream) {
  std::vector<Piece> own;
  for (std::size_t i = 0; i < params.params().size(); ++i) {
    const ParamId id{static_cast<std::int32_t>(i)};
    // Of sharded state each owner has the sums of its pieces.
    if (!params.is_sharded(id) && !params.speaks_for(id)) continue;
    for (std::int64_t e = 0; e < params.members_here(id); ++e) {
      const auto gradient = gradient_of(params, id, e, stream);
      if (!gradient) continue;
      const LocalBlock block = params.own_piece(id, e).block;
      own.push_back({params.member_name(id, e),
                     params.spec(id).shape,
                     block.offset,
                     block.extent,
                     *gradient});
    }
  }
  return own;
}

std::vector<Piece> own_weights(const Trainer& trainer,
                               const ParameterStore& params,
                               Stream& stream) {
  std::map<std::string, bool> spoken;
  for (std::size_t i = 0; i < params.params().size(); ++i) {
    const ParamId id{static_cast<std::int32_t>(i)};
    for (std::int64_t e = 0; e < params.members_here(id); ++e)
      spoken[params.member_name(id, e)] = params.is_sharded(id) || params.speaks_for(id);
  }
  std::vector<Piece> own;
  for (const StateTensor& t : trainer.weights()) {
    const auto parameter = spoken.find(t.name);
    // Buffers are the same on all ranks of a stage.
    const bool speaks =
        parameter == spoken.end() ? params.position().is_first_of_stage() : parameter->second;
    if (!speaks) continue;
    Shape begin;
    begin.rank = t.shape().rank;
    const std::vector<std::byte> bytes = bytes_of_state(t, stream);
    own.push_back({t.name,
                   t.whole(),
                   t.place ? t.place->begin : begin,
                   t.shape(),
                   values_of(ConstTensorView(bytes.data(), t.dtype(), t.shape()))});
  }
  return own;
}

}  // namespace

DType compute_type(const config::Config& config) {
  return precision_of(config, false).compute;
}

RunResult run_steps(const config::Config& config,
                    Communicator& world,
                    Device device,
                    int steps,
                    const ChoiceUse& choices) {
  const Mesh mesh(mesh_config(config.parallel), world);
  RunResult result;
  // They outlive the trainer, whose stream reads what they gave last.
  std::optional<ChoiceRecorder> recorder;
  std::optional<ChoiceReplay> replay;
  if (choices.record != nullptr) recorder.emplace(*choices.record);
  if (choices.replay != nullptr)
    replay.emplace(*choices.replay, device, mesh.coordinate(Axis::tp) == 0);
  Assembly assembly = assemble(config, true, device, mesh.position());
  Trainer trainer({.config = &config,
                   .mesh = &mesh,
                   .ranks_per_node = static_cast<int>(config.comm.ranks_per_node.value_or(0)),
                   .params = assembly.params.get(),
                   .model = assembly.model.get(),
                   .optimizer = assembly.optimizer.get(),
                   .train = open_training_data(config),
                   .valid = nullptr,
                   .device = device,
                   .recompute = recompute_policy(config.activations),
                   .stream_mode = Stream::Mode::worker});
  if (recorder) trainer.set_choices(&*recorder);
  if (replay) trainer.set_choices(&*replay);
  trainer.observe_paths(&result.kernels);
  if (recorder)
    result.start = put_together(own_weights(trainer, *assembly.params, trainer.stream()), world);
  for (int i = 0; i < steps; ++i) {
    if (recorder) recorder->begin_step(i);
    if (replay) replay->begin_step(i);
    trainer.accumulate_gradients();
    if (i == 0)
      result.gradients = put_together(own_gradients(*assembly.params, trainer.stream()), world);
    const StepStats stats = trainer.finish_step();
    for (const ExpertsMoved& moved : stats.moved)
      result.moved += moved.experts;
    result.replicas = std::max(result.replicas, trainer.expert_replicas());
    result.steps.push_back({stats.loss,
                            stats.mtp_loss,
                            stats.indexer_kl,
                            stats.balance_loss,
                            stats.router_z,
                            stats.grad_norm});
  }
  result.weights = put_together(own_weights(trainer, *assembly.params, trainer.stream()), world);
  if (replay) {
    result.choices = world.all_reduce_host(replay->choices(), ReduceOp::sum);
    result.differing = world.all_reduce_host(replay->differing(), ReduceOp::sum);
  }
  trainer.observe_paths(nullptr);
  return result;
}

}  // namespace moesaic::apps::selftest
