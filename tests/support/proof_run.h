#pragma once
// Training steps of the proof layer two micro-batches in flight, on one stream or on two, and
// everything that they computed, step by step.
#include <deque>
#include <utility>

#include "core/nn/losses.h"
#include "kernels/ops/adamw.h"
#include "kernels/ops/gemm.h"
#include "tests/support/device_tensors.h"
#include "tests/support/proof_layer.h"

namespace moesaic::test {

struct ProofOptions {
  Device device = kCpu;
  Precision precision;
  ProofSize size;
  int num_lanes = 1;  ///< streams; with two, the micro-batches take turns
  RecomputePolicy recompute;
  WeightGradients::Mode weight_gradients = WeightGradients::Mode::at_once;
  int steps = 3;
  Stream::Mode mode = Stream::Mode::worker;
  int num_threads = 2;  ///< per CPU stream
  /// Adds `delta` to an element of a parameter, or of the first micro-batch's input ("x"); CPU,
  /// f64.
  struct Nudge {
    std::string target;
    std::int64_t index = 0;
    double delta = 0;
  } nudge;
};

/// What a lane's arenas hold at most.
struct ProofMemory {
  std::size_t scratch = 0, transient = 0;
  bool operator==(const ProofMemory&) const = default;
};

/// Host copies, named "<step>/<tensor>".
struct ProofResult {
  std::vector<std::pair<std::string, OwnedTensor>> tensors;
  std::size_t slot_bytes = 0;
  int replays = 0;  ///< of a micro-batch
  ConstTensorView at(const std::string& name) const {
    for (const auto& [n, tensor] : tensors) {
      if (n == name) return tensor.view();
    }
    throw InternalError("no result '" + name + "'");
  }
};

/// `later` starts what comes next after all that `earlier` has been given so far.
inline void order(Stream& earlier, Stream& later) {
  if (&earlier == &later) return;
  Event event(earlier.device());
  earlier.record(event);
  later.wait(event);
}

class ProofRun {
 public:
  static constexpr int kMicroBatches = 3;  ///< with two, a + b = b + a would hide a wrong order

  /// `memory`, one per lane, is what the arenas get; empty = a dry run that measures it.
  ProofRun(const ProofOptions& options, const std::vector<ProofMemory>& memory)
      : options_(options),
        params_(options.precision),
        layer_(params_, options.size, options.precision) {
    const ProofSize& size = options.size;
    const DType compute = options.precision.compute;
    x_ = spec_.input("x", {size.tokens, size.hidden}, compute);
    y_ = spec_.activation("y", {size.tokens, size.hidden}, compute);
    layer_.declare(spec_, {size.tokens}, x_, y_);
    spec_.always_save(y_);
    spec_.plan(options.recompute);
    params_.seal(options.device);
    losses_ = OwnedTensor({kNumLosses}, options.precision.stats, options.device);
    scalars_ = OwnedTensor({kNumStepScalars}, options.precision.master, options.device);
    for (int l = 0; l < options.num_lanes; ++l)
      lanes_.emplace_back(
          options, memory.empty() ? nullptr : &memory[static_cast<std::size_t>(l)], l);
    for (int i = 0; i < kMicroBatches; ++i)
      add_micro_batch(static_cast<std::uint64_t>(i));
    params_.initialize(17);
    for (std::size_t p = 0; p < params_.params().size(); ++p)
      add_moments(id_of(p));
    first().synchronize();
    apply_nudge();
    for (int s = 0; s < options.steps; ++s) {
      add_scalars(s);
      for (const auto& t : results_of_step())
        kept_.emplace_back(std::to_string(s) + "/" + t.name,
                           OwnedTensor(t.view.shape(), t.view.dtype(), options.device));
    }
  }

  /// Enqueues all steps, with no wait of the host in between.
  void enqueue_steps() {
    for (int s = 0; s < options_.steps; ++s)
      enqueue_step(s);
  }

  ProofResult results() {
    for (auto& lane : lanes_)
      lane.owner.stream().synchronize();
    ProofResult result;
    for (const auto& [name, tensor] : kept_)
      result.tensors.emplace_back(name, download(tensor.view(), first()));
    result.slot_bytes = spec_.slot_bytes();
    result.replays = micro_batches_[0].tape.replays();
    return result;
  }
  std::vector<ProofMemory> high_water() {
    std::vector<ProofMemory> memory;
    for (auto& lane : lanes_)
      memory.push_back(
          {lane.owner.scratch().high_water_bytes(), lane.transient.high_water_bytes()});
    return memory;
  }

 private:
  struct Lane {
    Lane(const ProofOptions& o, const ProofMemory* memory, int index)
        : transient(memory == nullptr ? Arena::measuring(o.device, "transient")
                                      : Arena(memory->transient, o.device, "transient")),
          weight_gradients(o.weight_gradients),
          owner({.device = o.device,
                 .mode = memory == nullptr ? Stream::Mode::dry : o.mode,
                 .num_threads = o.num_threads,
                 .scratch_bytes = memory == nullptr ? 0 : memory->scratch,
                 .name = "lane" + std::to_string(index)}) {}
    Arena transient;
    WeightGradients weight_gradients;
    BackendOwner owner;  // last: its stream works in the arena until it ends
  };
  struct MicroBatch {
    OwnedTensor x, dy, dscores, dscores_stats, visible, dx, slot;
    Sequence sequence;
    Tape tape;
  };
  struct Named {
    std::string name;
    ConstTensorView view;
    std::size_t lane;
  };

  static ParamId id_of(std::size_t p) { return {static_cast<std::int32_t>(p)}; }
  Stream& first() { return lanes_[0].owner.stream(); }
  std::size_t lane_of(std::size_t i) const { return i % lanes_.size(); }
  TensorView saved(const MicroBatch& m, ActId id) const {
    const auto& a = spec_.activations()[static_cast<std::size_t>(id.index)];
    return {m.slot.view().data() + a.offset, a.dtype, a.shape, m.slot.view().device()};
  }

  OwnedTensor normal(Shape shape, DType dtype, std::uint64_t key, DType rounded_to) {
    const OwnedTensor values(shape, rounded_to), host(shape, dtype);
    fill_normal(values.view(), key);
    dispatch_float(dtype, [&]<class T>(TypeTag<T>) {
      dispatch_float(rounded_to, [&]<class R>(TypeTag<R>) {
        for (std::int64_t i = 0; i < shape.numel(); ++i)
          host.data<T>()[i] = T(static_cast<acc_t<T>>(values.data<R>()[i]));
      });
    });
    return to_device(host);
  }
  OwnedTensor to_device(const OwnedTensor& host) {
    OwnedTensor tensor(host.view().shape(), host.view().dtype(), options_.device);
    copy_tensor(tensor.view(), host.view(), first());
    first().synchronize();
    return tensor;
  }

  void add_micro_batch(std::uint64_t i) {
    const ProofSize& s = options_.size;
    const DType compute = options_.precision.compute, stats = options_.precision.stats;
    const Shape rows{s.tokens, s.hidden}, scores{s.tokens, s.experts};
    const OwnedTensor visible({s.tokens}, DType::i32);  // from 0 to all
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      visible.data<std::int32_t>()[t] = static_cast<std::int32_t>(
          uniform(40 + i, static_cast<std::uint64_t>(t)) * static_cast<double>(s.experts + 1));
    }
    const OwnedTensor slot(
        {static_cast<std::int64_t>(spec_.slot_bytes())}, DType::u8, options_.device);
    MicroBatch m{.x = normal(rows, compute, 10 + i, compute),
                 .dy = normal(rows, compute, 20 + i, compute),
                 .dscores = normal(scores, compute, 30 + i, compute),
                 .dscores_stats = normal(scores, stats, 30 + i, compute),
                 .visible = to_device(visible),
                 .dx = OwnedTensor(rows, compute, options_.device),
                 .slot = slot,
                 .sequence = {},
                 .tape = Tape(spec_, slot.view())};
    m.tape.bind(x_, m.x.view());
    m.tape.bind(layer_.visible(), m.visible.view());
    m.tape.bind(layer_.dscores(), m.dscores.view());
    micro_batches_.push_back(std::move(m));
  }

  void add_moments(ParamId id) {
    const Shape shape = params_.master(id, 0).shape();
    for (int k = 0; k < 2; ++k) {
      moments_.emplace_back(shape, options_.precision.master, options_.device);
      zero_tensor(moments_.back().view(), first());
    }
  }

  void add_scalars(int step) {
    StepScalars s;
    s.step = step + 1;
    s.learning_rate = 1e-2;
    s.bias_correction1 = bias_correction(kBeta1, s.step);
    s.bias_correction2 = bias_correction(kBeta2, s.step);
    s.clip_factor = 0.5;
    step_scalars_.emplace_back(Shape{kNumStepScalars}, options_.precision.master);
    s.write(step_scalars_.back().view());
  }

  void apply_nudge() {
    const auto& n = options_.nudge;
    if (n.target.empty()) return;
    const TensorView target =
        n.target == "x" ? micro_batches_[0].x.view() : params_.master(params_.find(n.target), 0);
    target.as<double>()[n.index] += n.delta;
  }

  void enqueue_step(int step) {
    params_.zero_grads(first());
    zero_tensor(losses_.view(), first());
    copy_tensor(scalars_.view(), step_scalars_[static_cast<std::size_t>(step)].view(), first());
    for (auto& lane : lanes_)
      order(first(), lane.owner.stream());
    // F0 F1 B0 F2 B1 B2: the next forward is on its way when a backward starts.
    forward(0);
    for (std::size_t i = 0; i < micro_batches_.size(); ++i) {
      if (i + 1 < micro_batches_.size()) forward(i + 1);
      backward(i);
      // Gradients add up in the order of the micro-batches, whatever the streams: what a lane has
      // kept is added before what another lane keeps of the next micro-batch.
      if (i > 0 && lane_of(i - 1) != lane_of(i)) flush_weight_gradients(lane_of(i - 1));
    }
    flush_weight_gradients(lane_of(micro_batches_.size() - 1));
    for (auto& lane : lanes_)
      order(lane.owner.stream(), first());
    update();
    keep_results(step);
  }

  RunContext context_of(std::size_t i) {
    Lane& lane = lanes_[lane_of(i)];
    return {.backend = lane.owner.backend(),
            .params = params_,
            .transient = lane.transient,
            .weight_gradients = lane.weight_gradients,
            .sequence = micro_batches_[i].sequence,
            .step_scalars = scalars_.view(),
            .losses = losses_.view()};
  }
  // Memory that holds nothing now must not be read before it is written.
  void poison_free_memory(Lane& lane) {
    lane.owner.scratch().poison(lane.owner.stream());
    lane.transient.poison(lane.owner.stream());
  }
  void forward(std::size_t i) {
    Lane& lane = lanes_[lane_of(i)];
    poison_free_memory(lane);
    fill_bytes(micro_batches_[i].slot.view(), 0xff, lane.owner.stream());
    RunContext context = context_of(i);
    micro_batches_[i].tape.forward(context);
  }
  void backward(std::size_t i) {
    Lane& lane = lanes_[lane_of(i)];
    MicroBatch& m = micro_batches_[i];
    add_from(lane_of(i));
    poison_free_memory(lane);
    fill_bytes(m.dx.view(), 0xff, lane.owner.stream());
    add_loss(lane, saved(m, y_), m.dy.view());
    add_loss(lane, saved(m, layer_.scores()), m.dscores_stats.view());
    RunContext context = context_of(i);
    m.tape.backward(context, [&] { layer_.backward(m.tape, m.dy.view(), m.dx.view()); });
  }
  void flush_weight_gradients(std::size_t l) {
    add_from(l);
    lanes_[l].weight_gradients.flush(lanes_[l].owner.backend());
  }
  // Lane l is the next one that adds to gradients and losses.
  void add_from(std::size_t l) {
    order(lanes_[adding_lane_].owner.stream(), lanes_[l].owner.stream());
    adding_lane_ = l;
  }
  // The objective <dy, y> + <dscores, scores>, whose gradients are dy and dscores.
  void add_loss(Lane& lane, ConstTensorView value, ConstTensorView gradient) {
    const Shape row{1, value.numel()};
    run(lane.owner.backend(),
        Gemm{.c = loss_slot(losses_.view(), Loss::cross_entropy).reshaped({1, 1}),
             .a = value.reshaped(row),
             .b = gradient.reshaped(row),
             .transpose_b = true,
             .accumulate = true});
  }

  void update() {
    for (std::size_t p = 0; p < params_.params().size(); ++p) {
      const ParamId id = id_of(p);
      run(lanes_[0].owner.backend(),
          AdamW{.w = params_.master(id, 0),
                .m = moments_[2 * p].view(),
                .v = moments_[2 * p + 1].view(),
                .w_compute = params_.masters_are_weights(id) ? TensorView() : params_.weight(id, 0),
                .dw = params_.gradient(id, 0),
                .scalars = scalars_.view(),
                .weight_decay = 0.1,
                .beta1 = kBeta1,
                .beta2 = kBeta2});
    }
  }

  std::vector<Named> results_of_step() const {
    std::vector<Named> list;
    for (std::size_t i = 0; i < micro_batches_.size(); ++i) {
      const MicroBatch& m = micro_batches_[i];
      const auto add = [&](const char* name, ConstTensorView view) {
        list.push_back({name + std::to_string(i), view, lane_of(i)});
      };
      add("y", saved(m, y_));
      add("scores", saved(m, layer_.scores()));
      add("indices", saved(m, layer_.indices()));
      add("counts", saved(m, layer_.counts()));
      add("best", saved(m, layer_.best()));
      add("dx", m.dx.view());
    }
    list.push_back({"loss", loss_slot(losses_.view(), Loss::cross_entropy), 0});
    for (std::size_t p = 0; p < params_.params().size(); ++p) {
      const std::string& name = params_.params()[p].name;
      list.push_back({"grad " + name, params_.gradient(id_of(p), 0), 0});
      list.push_back({"master " + name, params_.master(id_of(p), 0), 0});
      list.push_back({"weight " + name, params_.weight(id_of(p), 0), 0});
      list.push_back({"m " + name, moments_[2 * p].view(), 0});
      list.push_back({"v " + name, moments_[2 * p + 1].view(), 0});
    }
    return list;
  }
  // A lane's copies are enqueued before the next step's order(), so nothing is overwritten under
  // them.
  void keep_results(int step) {
    const auto list = results_of_step();
    for (std::size_t i = 0; i < list.size(); ++i) {
      const auto& kept = kept_[static_cast<std::size_t>(step) * list.size() + i].second;
      copy_tensor(kept.view(), list[i].view, lanes_[list[i].lane].owner.stream());
    }
  }

  static constexpr double kBeta1 = 0.9, kBeta2 = 0.95;
  ProofOptions options_;
  ParameterStore params_;
  ProofLayer layer_;
  TapeSpec spec_;
  ActId x_, y_;
  std::size_t adding_lane_ = 0;
  OwnedTensor losses_, scalars_;
  std::vector<OwnedTensor> step_scalars_, moments_;
  std::vector<std::pair<std::string, OwnedTensor>> kept_;
  std::deque<MicroBatch> micro_batches_;
  std::deque<Lane> lanes_;  // last: their streams work on all of the above
};

/// The arenas that a run needs, by a run of its host code alone.
inline std::vector<ProofMemory> measure(const ProofOptions& options) {
  ProofRun dry(options, {});
  dry.enqueue_steps();
  return dry.high_water();
}
/// Runs with arenas of exactly the measured size.
inline ProofResult prove(const ProofOptions& options) {
  ProofRun run(options, measure(options));
  run.enqueue_steps();
  return run.results();
}

}  // namespace moesaic::test
