#include "parallel/pipeline/executor.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "parallel/pipeline/bundle_pool.h"

namespace moesaic::pipeline {
namespace {

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

using Place = std::pair<int, int>;  // chunk or boundary, micro-batch

}  // namespace

/// One pass over the list. The dry one calls nobody and takes memory that is not there yet.
struct Executor::Walk {
  Walk(const Schedule& s, const BundlePlan& b, Communicator* c, int r, Stream& w, Stream& m)
      : schedule(s),
        bundles(b),
        comm(c),
        rank(r),
        computing(w),
        messages(m),
        pool(w.device()),
        slots_in_use(at(s.placement.num_chunks())) {
    for (int boundary = 0; boundary + 1 < s.placement.num_chunks(); ++boundary) {
      if (bundles.carried(boundary).empty()) continue;
      for (const Payload payload : {Payload::activation, Payload::gradient})
        largest_parcel = std::max(largest_parcel, bundles.message_bytes(boundary, payload));
    }
    step();
  }

  void step() {
    slot_of_action.clear();
    for (const Action& a : schedule.ranks[at(rank)]) {
      slot_of_action.push_back(-1);
      switch (a.work) {
        case Work::exchange:
          exchange(a);
          break;
        case Work::forward:
          forward(a.chunk, a.micro_batch);
          break;
        default:
          backward(a);
      }
    }
    MOESAIC_CHECK(pool.is_all_free() && passes.empty() && values.empty() && sums.empty(),
                  "a step of the pipeline left bundles behind");
  }

  // --- activations
  void forward(int chunk, int micro_batch) {
    ForwardCall call{.chunk = chunk, .micro_batch = micro_batch, .slot = take_slot(chunk)};
    Pass& pass = passes[{chunk, micro_batch}];
    pass.slot = slot_of_action.back() = call.slot;
    if (chunk > 0) {
      if (schedule.placement.is_crossed(chunk - 1)) {
        wait(computing, pass.arrived);
        call.cur = pool.view(pass.received.front());
      } else {
        call.cur = passes.at({chunk - 1, micro_batch}).out;
      }
    }
    const int before = bundles.snapshots_before(chunk), after = bundles.snapshots_after(chunk);
    for (int j = 0; j < before; ++j)
      call.bank.push_back(values.at({j, micro_batch}));
    ForwardResult result;
    if (model != nullptr)
      result = model->forward(call);
    else
      result.snapshots.resize(at(after - before));
    MOESAIC_CHECK(static_cast<int>(result.snapshots.size()) == after - before,
                  "the chunk took another number of snapshots than planned");
    pass.out = result.cur;
    for (int j = before; j < after; ++j)
      values[{j, micro_batch}] = result.snapshots[at(j - before)];
    pass.made = mark(computing);
  }

  int take_slot(int chunk) {
    auto& slots = slots_in_use[at(chunk)];
    const auto free = std::find(slots.begin(), slots.end(), false);
    const auto slot = free - slots.begin();
    if (free == slots.end())
      slots.push_back(true);
    else
      *free = true;
    return static_cast<int>(slot);
  }

  // A chunk's values are read by the rank's later chunks too: they stay until all of those are through.
  void finish(int chunk, int micro_batch, const Event& end) {
    passes.at({chunk, micro_batch}).is_finished = true;
    const auto& chunks = schedule.placement.chunks_of(rank);
    for (auto c = chunks.rbegin(); c != chunks.rend(); ++c) {
      const auto it = passes.find({*c, micro_batch});
      if (it == passes.end()) continue;
      if (!it->second.is_finished) return;
      for (const int tensor : it->second.received)
        pool.release(tensor, end);
      slots_in_use[at(*c)][at(it->second.slot)] = false;
      passes.erase(it);
    }
    for (int j = 0; j < bundles.num_snapshots(); ++j)
      values.erase({j, micro_batch});
  }

  // --- gradients
  void backward(const Action& a) {
    const Pass& pass = passes.at({a.chunk, a.micro_batch});
    slot_of_action.back() = pass.slot;
    BackwardCall call{
        .part = a.work, .chunk = a.chunk, .micro_batch = a.micro_batch, .slot = pass.slot};
    if (a.work == Work::backward_weight) {
      if (model != nullptr) model->backward(call);
      return finish(a.chunk, a.micro_batch, mark(computing));
    }
    Gradient gradient = incoming_gradient(a.chunk, a.micro_batch);
    call.dcur = pool.view(gradient.cur);
    for (int j = 0; j < bundles.snapshots_after(a.chunk); ++j)
      call.dbank.push_back(pool.view(sums.at({j, a.micro_batch})));
    if (model != nullptr) model->backward(call);
    const Event made = mark(computing);
    for (const int tensor : gradient.to_add)
      pool.release(tensor, made);
    hand_on(a.chunk, a.micro_batch, gradient.cur, made);
    if (a.work == Work::backward) finish(a.chunk, a.micro_batch, made);
  }

  /// The gradient of a bundle.
  struct Gradient {
    int cur = 0;
    std::vector<int> to_add;    ///< what came for snapshots; part of the rank's sums in the end
    std::optional<Event> made;  ///< by an exchange, or by the backward of a chunk of this rank
  };

  // Makes the gradient of what the chunk put out ready to be read on the computing stream.
  Gradient incoming_gradient(int chunk, int micro_batch) {
    const bool is_last = chunk + 1 == schedule.placement.num_chunks();
    Gradient gradient;
    if (is_last) {
      gradient.cur = pool.take(bundles.cur().shape, bundles.cur().gradient_dtype, user(computing));
    } else {
      Gradient& there = gradients.at({chunk, micro_batch});
      wait(computing, there.made);
      gradient.cur = there.cur;
      const auto& carried = schedule.placement.is_crossed(chunk) ? bundles.carried(chunk) : kNone;
      for (std::size_t i = 0; i < carried.size(); ++i) {
        const int received = there.to_add[i];
        const auto [sum, is_new] = sums.emplace(Place{carried[i], micro_batch}, received);
        if (is_new) continue;
        if (model != nullptr) model->add(pool.view(sum->second), pool.view(received));
        gradient.to_add.push_back(received);
      }
      gradients.erase({chunk, micro_batch});
    }
    for (int j = 0; j < bundles.snapshots_after(chunk); ++j) {
      if (sums.count({j, micro_batch}) > 0) continue;
      const int sum = take_gradient_of_snapshot(computing);
      if (model != nullptr) zero_tensor(pool.view(sum), computing);
      sums[{j, micro_batch}] = sum;
    }
    return gradient;
  }

  int take_gradient_of_snapshot(Stream& stream) {
    return pool.take(bundles.snapshot().shape, bundles.snapshot().gradient_dtype, user(stream));
  }

  void hand_on(int chunk, int micro_batch, int cur, const Event& made) {
    for (int j = bundles.snapshots_before(chunk); j < bundles.snapshots_after(chunk); ++j)
      release_sum(j, micro_batch, made);
    if (chunk == 0)
      pool.release(cur, made);
    else
      gradients[{chunk - 1, micro_batch}] = {.cur = cur, .to_add = {}, .made = made};
  }

  void release_sum(int snapshot, int micro_batch, const Event& last_use) {
    const auto sum = sums.find({snapshot, micro_batch});
    pool.release(sum->second, last_use);
    sums.erase(sum);
  }

  // --- messages
  /// A bundle of several tensors on its way: one message, since a message may wait for those before it (Communicator::exchange()).
  struct Parcel {
    int tensor = 0;
    std::vector<TensorView> received;  ///< where its parts go in the end
  };

  void exchange(const Action& a) {
    std::vector<OutgoingMessage> sends;
    std::vector<IncomingMessage> receives;
    std::vector<Parcel> parcels;
    for (const Message& m : a.messages) {
      if (m.is_send)
        send(m, sends, parcels);
      else
        receive(m, receives, parcels);
    }
    if (model != nullptr) comm->exchange(sends, receives, messages);
    for (const Parcel& parcel : parcels)
      unpack(parcel);
    const Event end = mark(messages);
    for (const Parcel& parcel : parcels)
      pool.release(parcel.tensor, end);
    for (const Message& m : a.messages) {
      if (!m.is_send)
        (m.payload == Payload::activation ? passes.at({m.boundary + 1, m.micro_batch}).arrived
                                          : gradients.at({m.boundary, m.micro_batch}).made) = end;
      else if (m.payload == Payload::gradient)
        sent(m, end);
    }
  }

  void send(const Message& m, std::vector<OutgoingMessage>& sends, std::vector<Parcel>& parcels) {
    std::vector<ConstTensorView> parts;
    if (model != nullptr) {
      const bool is_activation = m.payload == Payload::activation;
      wait(messages,
           is_activation ? passes.at({m.boundary, m.micro_batch}).made
                         : gradients.at({m.boundary, m.micro_batch}).made);
      parts = is_activation ? outgoing_values(m) : outgoing_gradients(m);
    }
    if (bundles.carried(m.boundary).empty()) {
      if (model != nullptr) sends.push_back({parts.front(), m.peer});
      return;
    }
    const Parcel& parcel = parcels.emplace_back(Parcel{.tensor = take_parcel(), .received = {}});
    if (model == nullptr) return;
    const std::vector<TensorView> packed = parts_of(parcel.tensor, parts);
    for (std::size_t i = 0; i < parts.size(); ++i)
      copy_tensor(packed[i], parts[i], messages);
    sends.push_back({contents(parcel.tensor, m), m.peer});
  }

  std::vector<ConstTensorView> outgoing_values(const Message& m) const {
    std::vector<ConstTensorView> parts{passes.at({m.boundary, m.micro_batch}).out};
    for (const int j : bundles.carried(m.boundary))
      parts.push_back(values.at({j, m.micro_batch}));
    return parts;
  }
  std::vector<ConstTensorView> outgoing_gradients(const Message& m) const {
    std::vector<ConstTensorView> parts{pool.view(gradients.at({m.boundary, m.micro_batch}).cur)};
    for (const int j : bundles.carried(m.boundary))
      parts.emplace_back(pool.view(sums.at({j, m.micro_batch})));
    return parts;
  }

  void sent(const Message& m, const Event& end) {
    const auto gradient = gradients.find({m.boundary, m.micro_batch});
    pool.release(gradient->second.cur, end);
    gradients.erase(gradient);
    for (const int j : bundles.carried(m.boundary))
      release_sum(j, m.micro_batch, end);
  }

  void receive(const Message& m,
               std::vector<IncomingMessage>& receives,
               std::vector<Parcel>& parcels) {
    const bool is_activation = m.payload == Payload::activation;
    std::vector<TensorView> parts;
    const auto take = [&](const BundleTensor& t) {
      const int tensor =
          pool.take(t.shape, is_activation ? t.dtype : t.gradient_dtype, user(messages));
      parts.push_back(pool.view(tensor));
      return tensor;
    };
    const auto& carried = bundles.carried(m.boundary);
    const int cur = take(bundles.cur());
    if (is_activation) {
      Pass& pass = passes[{m.boundary + 1, m.micro_batch}];
      pass.received = {cur};
      for (const int j : carried) {
        pass.received.push_back(take(bundles.snapshot()));
        values[{j, m.micro_batch}] = pool.view(pass.received.back());
      }
    } else {
      Gradient& gradient = gradients[{m.boundary, m.micro_batch}] = {.cur = cur};
      for (std::size_t i = 0; i < carried.size(); ++i)
        gradient.to_add.push_back(take(bundles.snapshot()));
    }
    if (carried.empty()) {
      receives.push_back({parts.front(), m.peer});
      return;
    }
    const int tensor = take_parcel();
    parcels.push_back({.tensor = tensor, .received = std::move(parts)});
    if (model != nullptr) receives.push_back({contents(tensor, m), m.peer});
  }

  int take_parcel() { return pool.take({largest_parcel}, DType::u8, user(messages)); }
  TensorView contents(int parcel, const Message& m) const {
    return pool.view(parcel).rows(0, bundles.message_bytes(m.boundary, m.payload));
  }
  /// One behind the other in the parcel, with the types and shapes of `like`.
  template <class Views>
  std::vector<TensorView> parts_of(int parcel, const Views& like) const {
    const TensorView all = pool.view(parcel);
    std::vector<TensorView> parts;
    std::size_t begin = 0;
    for (const auto& part : like) {
      parts.emplace_back(all.data() + begin, part.dtype(), part.shape(), all.device());
      begin += part.bytes();
    }
    return parts;
  }
  void unpack(const Parcel& parcel) {
    if (model == nullptr || parcel.received.empty()) return;
    const std::vector<TensorView> packed = parts_of(parcel.tensor, parcel.received);
    for (std::size_t i = 0; i < packed.size(); ++i)
      copy_tensor(parcel.received[i], packed[i], messages);
  }

  // --- streams
  Stream* user(Stream& stream) const { return model == nullptr ? nullptr : &stream; }
  Event mark(Stream& stream) const {
    Event event(stream.device());
    if (model != nullptr) stream.record(event);
    return event;
  }
  void wait(Stream& stream, const std::optional<Event>& event) const {
    MOESAIC_CHECK(event.has_value(), "a bundle is used before it is there");
    if (model != nullptr) stream.wait(*event);
  }

  /// A chunk's pass of a micro-batch, from the arrival of its input to the end of its backward.
  struct Pass {
    std::vector<int> received;           ///< sum and snapshots, when they came in a message
    std::optional<Event> arrived, made;  ///< its input, its output
    int slot = 0;
    ConstTensorView out;
    bool is_finished = false;
  };

  static inline const std::vector<int> kNone;
  const Schedule& schedule;
  const BundlePlan& bundles;
  Communicator* comm;
  int rank;
  Stream& computing;
  Stream& messages;
  ChunkRunner* model = nullptr;  ///< null on the dry walk
  BundlePool pool;
  std::int64_t largest_parcel = 0;              ///< bytes
  std::vector<std::vector<bool>> slots_in_use;  ///< per chunk; grows on the dry walk
  std::vector<int> slot_of_action;              ///< of this step so far
  std::map<Place, Pass> passes;                 ///< by chunk
  std::map<Place, ConstTensorView> values;      ///< by snapshot
  std::map<Place, Gradient> gradients;  ///< by boundary: received or to be sent or handed on
  std::map<Place, int> sums;            ///< by snapshot: this rank's sum of its gradient
};

Executor::Executor(const Schedule& schedule,
                   const BundlePlan& bundles,
                   Communicator* comm,
                   Stream& computing,
                   Stream& messages)
    : walk_(std::make_unique<Walk>(
          schedule, bundles, comm, comm == nullptr ? 0 : comm->rank(), computing, messages)) {
  MOESAIC_CHECK((comm == nullptr ? 1 : comm->size()) == schedule.placement.stages(),
                "the communicator has another size than the pipeline");
  walk_->pool.allocate();
}

Executor::Needs Executor::needs(const Schedule& schedule, const BundlePlan& bundles, int rank) {
  Stream nothing(kCpu, "dry run", Stream::Mode::dry);
  const Walk walk(schedule, bundles, nullptr, rank, nothing, nothing);
  Needs needs;
  for (const auto& slots : walk.slots_in_use)
    needs.slots.push_back(static_cast<int>(slots.size()));
  needs.slot_of_action = walk.slot_of_action;
  needs.bytes = walk.pool.bytes();
  return needs;
}

Executor::~Executor() = default;

int Executor::slots(int chunk) const {
  return static_cast<int>(walk_->slots_in_use[at(chunk)].size());
}

std::size_t Executor::bytes() const noexcept {
  return walk_->pool.bytes();
}

void Executor::run(ChunkRunner& model) {
  walk_->model = &model;
  walk_->step();
}

}  // namespace moesaic::pipeline
