// Schedules carried out by ranks of one process on a small model with the residuals of SPEC 6.1 in f64: y = base + h W^T over
// layers, h a sum of the running sum and snapshots, backward by hand. Gradients against a loop over the layers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "parallel/pipeline/executor.h"
#include "parallel/pipeline/partition.h"
#include "parallel/pipeline/simulate.h"
#include "tests/comm/forwarding.h"
#include "tests/support/catch.h"

namespace moesaic::pipeline {
namespace {

constexpr std::int64_t kTokens = 2, kWidth = 3, kBundle = kTokens * kWidth;
using Values = std::vector<double>;  // [kTokens, kWidth] or a weight [kWidth, kWidth]

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// Numbers of the model and of the data. Whole numbers make every sum exact, so that its order does not show.
struct Toy {
  int layers = 0;
  int block = 0;  ///< layers between snapshots; 0 = none
  bool is_whole = false;
  std::vector<Values> weights;  ///< per layer
  Values scale;                 ///< the embedding: x * scale, [kWidth]

  Toy(int n, int b, bool whole) : layers(n), block(b), is_whole(whole) {
    std::mt19937 random(5);
    for (int l = 0; l < n; ++l) {
      weights.emplace_back(at(kWidth * kWidth), 0.0);
      for (std::int64_t o = 0; o < kWidth; ++o) {
        for (std::int64_t i = 0; i < kWidth; ++i)
          weights.back()[at(o * kWidth + i)] =
              whole ? ((o + l) % kWidth == i ? 1.0 - 2.0 * (l % 2) : 0.0) : number(random) * 0.4;
      }
    }
    for (std::int64_t i = 0; i < kWidth; ++i)
      scale.push_back(whole ? 1.0 : 0.5 + number(random));
  }
  static double number(std::mt19937& random) {
    return static_cast<double>(random()) / 4294967296.0 - 0.25;
  }
  Values input(int micro_batch) const {
    std::mt19937 random(100U + static_cast<unsigned>(micro_batch));
    Values x(at(kBundle));
    for (double& v : x)
      v = is_whole ? static_cast<double>(random() % 3) - 1 : number(random);
    return x;
  }
  bool takes_snapshot(int layer) const { return block > 0 && layer % block == 0; }
  double mix(int layer, int snapshot) const {
    return is_whole ? ((layer + snapshot) % 3 == 0 ? 1.0 : 0.0) : 1.0 / (2.0 + layer + snapshot);
  }
};

struct Gradients {
  std::vector<Values> weights;
  Values scale;
  explicit Gradients(const Toy& toy)
      : weights(at(toy.layers), Values(at(kWidth * kWidth), 0.0)), scale(at(kWidth), 0.0) {}
};

// --- the model's pieces; used by the loop and by the chunks alike

struct LayerState {
  Values h, dy;
};

/// cur -> the layer's output; `bank` holds the snapshots, of which this layer's own is the last if it takes one.
Values layer_forward(const Toy& toy,
                     int layer,
                     const double* cur,
                     const std::vector<const double*>& bank,
                     LayerState& state) {
  const Values& w = toy.weights[at(layer)];
  const std::size_t before = bank.size() - (toy.takes_snapshot(layer) ? 1 : 0);
  state.h.assign(cur, cur + kBundle);
  for (std::size_t j = 0; j < before; ++j) {
    for (std::int64_t i = 0; i < kBundle; ++i)
      state.h[at(i)] += toy.mix(layer, static_cast<int>(j)) * bank[j][i];
  }
  Values y(at(kBundle), 0.0);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t o = 0; o < kWidth; ++o) {
      double sum = toy.takes_snapshot(layer) ? 0.0 : cur[t * kWidth + o];
      for (std::int64_t i = 0; i < kWidth; ++i)
        sum += w[at(o * kWidth + i)] * state.h[at(t * kWidth + i)];
      y[at(t * kWidth + o)] = sum;
    }
  }
  return y;
}

/// dcur of the output -> of the input, in place; adds to dbank. Keeps what the weight's gradient needs.
void layer_backward(
    const Toy& toy, int layer, double* dcur, const std::vector<double*>& dbank, LayerState& state) {
  const Values& w = toy.weights[at(layer)];
  const bool takes = toy.takes_snapshot(layer);
  const std::size_t before = dbank.size() - (takes ? 1 : 0);
  state.dy.assign(dcur, dcur + kBundle);
  Values dh(at(kBundle), 0.0);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t i = 0; i < kWidth; ++i) {
      for (std::int64_t o = 0; o < kWidth; ++o)
        dh[at(t * kWidth + i)] += state.dy[at(t * kWidth + o)] * w[at(o * kWidth + i)];
    }
  }
  for (std::int64_t i = 0; i < kBundle; ++i) {
    dcur[i] = (takes ? dbank[before][i] : dcur[i]) + dh[at(i)];
    for (std::size_t j = 0; j < before; ++j)
      dbank[j][i] += toy.mix(layer, static_cast<int>(j)) * dh[at(i)];
  }
}

void weight_backward(const LayerState& state, Values& gradient) {
  for (std::int64_t o = 0; o < kWidth; ++o) {
    for (std::int64_t i = 0; i < kWidth; ++i) {
      double sum = 0;
      for (std::int64_t t = 0; t < kTokens; ++t)
        sum += state.dy[at(t * kWidth + o)] * state.h[at(t * kWidth + i)];
      gradient[at(o * kWidth + i)] += sum;
    }
  }
}

Values embed(const Toy& toy, int micro_batch) {
  Values x = toy.input(micro_batch);
  for (std::int64_t i = 0; i < kBundle; ++i)
    x[at(i)] *= toy.scale[at(i % kWidth)];
  return x;
}

void embed_backward(const Toy& toy, int micro_batch, const double* dcur, Gradients& gradients) {
  const Values x = toy.input(micro_batch);
  for (std::int64_t i = 0; i < kBundle; ++i)
    gradients.scale[at(i % kWidth)] += x[at(i)] * dcur[i];
}

/// Loss: half the square of the last sum and all snapshots added.
void loss_backward(const double* cur,
                   const std::vector<const double*>& bank,
                   double* dcur,
                   const std::vector<double*>& dbank) {
  for (std::int64_t i = 0; i < kBundle; ++i) {
    double out = cur[i];
    for (const double* snapshot : bank)
      out += snapshot[i];
    dcur[i] = out;
    for (double* d : dbank)
      d[i] += out;
  }
}

constexpr int kSteps = 2;

/// The same without a pipeline: one micro-batch after the other, for two steps whose gradients are added.
Gradients loop(const Toy& toy, int micro_batches) {
  Gradients gradients(toy);
  for (int n = 0; n < kSteps * micro_batches; ++n) {
    const int m = n % micro_batches;
    std::vector<LayerState> states(at(toy.layers));
    std::vector<Values> bank, dbank;
    Values cur = embed(toy, m);
    const auto pointers = [](const std::vector<Values>& all) {
      std::vector<const double*> p;
      for (const Values& v : all)
        p.push_back(v.data());
      return p;
    };
    const auto writable = [](std::vector<Values>& all, std::size_t count) {
      std::vector<double*> p;
      for (std::size_t i = 0; i < count; ++i)
        p.push_back(all[i].data());
      return p;
    };
    std::vector<std::size_t> after;
    for (int l = 0; l < toy.layers; ++l) {
      if (toy.takes_snapshot(l)) bank.push_back(cur);
      after.push_back(bank.size());
      cur = layer_forward(toy, l, cur.data(), pointers(bank), states[at(l)]);
    }
    dbank.assign(bank.size(), Values(at(kBundle), 0.0));
    Values dcur(at(kBundle));
    loss_backward(cur.data(), pointers(bank), dcur.data(), writable(dbank, bank.size()));
    for (int l = toy.layers; l-- > 0;) {
      layer_backward(toy, l, dcur.data(), writable(dbank, after[at(l)]), states[at(l)]);
      weight_backward(states[at(l)], gradients.weights[at(l)]);
    }
    embed_backward(toy, m, dcur.data(), gradients);
  }
  return gradients;
}

// --- one rank's chunks

class ToyRunner final : public ChunkRunner {
 public:
  ToyRunner(const Toy& toy,
            std::vector<LayerRange> chunks,
            Stream& stream,
            unsigned seed,
            Gradients& gradients)
      : toy_(toy),
        chunks_(std::move(chunks)),
        stream_(stream),
        random_(seed),
        gradients_(gradients),
        slots_(chunks_.size()) {}

  void reserve(int chunk, int slots) {
    const LayerRange range = chunks_[at(chunk)];
    slots_[at(chunk)].resize(at(slots));
    for (Slot& slot : slots_[at(chunk)]) {
      slot.cur.resize(at(kBundle));
      for (auto l = range.begin; l < range.end; ++l) {
        if (toy_.takes_snapshot(static_cast<int>(l))) slot.taken.push_back(slot.cur);
      }
    }
  }

  ForwardResult forward(const ForwardCall& call) override {
    const LayerRange range = chunks_[at(call.chunk)];
    Slot& slot = slots_[at(call.chunk)].at(at(call.slot));
    run([this, call, range, &slot] {
      std::vector<const double*> bank;
      for (const ConstTensorView& v : call.bank)
        bank.push_back(v.as<double>());
      Values cur = call.chunk == 0 ? embed(toy_, call.micro_batch)
                                   : Values(call.cur.as<double>(), call.cur.as<double>() + kBundle);
      slot.layers.assign(at(range.size()), {});  // nothing of an earlier micro-batch may be of use
      std::size_t taken = 0;
      for (auto l = range.begin; l < range.end; ++l) {
        if (toy_.takes_snapshot(static_cast<int>(l))) {
          std::copy(cur.begin(), cur.end(), slot.taken[taken].begin());
          bank.push_back(slot.taken[taken++].data());
        }
        cur = layer_forward(
            toy_, static_cast<int>(l), cur.data(), bank, slot.layers[at(l - range.begin)]);
      }
      std::copy(cur.begin(), cur.end(), slot.cur.begin());
      slot.bank = bank;
    });
    ForwardResult result{.cur = view(slot.cur), .snapshots = {}};
    for (Values& v : slot.taken)
      result.snapshots.push_back(view(v));
    return result;
  }

  void backward(const BackwardCall& call) override {
    const LayerRange range = chunks_[at(call.chunk)];
    Slot& slot = slots_[at(call.chunk)].at(at(call.slot));
    run([this, call, range, &slot] {
      if (call.part != Work::backward_weight) inputs(call, range, slot);
      if (call.part == Work::backward_input) return;
      for (auto l = range.end; l-- > range.begin;)
        weight_backward(slot.layers[at(l - range.begin)], gradients_.weights[at(l)]);
    });
  }

  void add(TensorView sum, ConstTensorView value) override {
    run([sum, value] {
      for (std::int64_t i = 0; i < kBundle; ++i)
        sum.as<double>()[i] += value.as<double>()[i];
    });
  }

 private:
  struct Slot {
    std::vector<LayerState> layers;
    std::vector<Values> taken;
    Values cur;
    std::vector<const double*> bank;
  };

  static ConstTensorView view(const Values& v) {
    return {reinterpret_cast<const std::byte*>(v.data()), DType::f64, {kTokens, kWidth}};
  }

  void run(std::function<void()> task) {
    const auto pause = std::chrono::microseconds(random_() % 8 == 0 ? random_() % 200 : 0);
    stream_.enqueue([task = std::move(task), pause] {
      std::this_thread::sleep_for(pause);
      task();
    });
  }

  void inputs(const BackwardCall& call, const LayerRange& range, Slot& slot) {
    std::vector<double*> dbank;
    for (const TensorView& v : call.dbank)
      dbank.push_back(v.as<double>());
    double* dcur = call.dcur.as<double>();
    if (range.end == toy_.layers && call.chunk + 1 == static_cast<int>(chunks_.size()))
      loss_backward(slot.cur.data(), slot.bank, dcur, dbank);
    for (auto l = range.end; l-- > range.begin;) {
      LayerState& state = slot.layers[at(l - range.begin)];
      layer_backward(toy_, static_cast<int>(l), dcur, dbank, state);
      if (toy_.takes_snapshot(static_cast<int>(l))) dbank.pop_back();
    }
    if (call.chunk == 0) embed_backward(toy_, call.micro_batch, dcur, gradients_);
  }

  const Toy& toy_;
  std::vector<LayerRange> chunks_;
  Stream& stream_;
  std::mt19937 random_;
  Gradients& gradients_;
  std::vector<std::vector<Slot>> slots_;
};

BundlePlan bundles_of(const Schedule& s, const Toy& toy, const std::vector<LayerRange>& chunks) {
  std::vector<int> origins;
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    for (auto l = chunks[c].begin; l < chunks[c].end; ++l) {
      if (toy.takes_snapshot(static_cast<int>(l))) origins.push_back(static_cast<int>(c));
    }
  }
  const BundleTensor tensor{{kTokens, kWidth}, DType::f64, DType::f64};
  return BundlePlan(s.placement, tensor, tensor, origins);
}

/// Checks that each exchange has the messages of the schedule: a bundle is one message, however many tensors it has.
class AsScheduled final : public test::Forwarding {
 public:
  AsScheduled(Communicator& inner, const Schedule& s) : Forwarding(inner) {
    for (const Action& a : s.ranks[at(inner.rank())])
      if (a.is_exchange()) exchanges_.push_back(&a.messages);
  }
  void exchange(std::span<const OutgoingMessage> sends,
                std::span<const IncomingMessage> receives,
                Stream& stream) override {
    std::vector<std::pair<bool, int>> want, got;
    for (const Message& m : *exchanges_[next_++ % exchanges_.size()])
      want.emplace_back(m.is_send, m.peer);
    std::stable_partition(want.begin(), want.end(), [](const auto& m) { return m.first; });
    for (const auto& m : sends)
      got.emplace_back(true, m.peer);
    for (const auto& m : receives)
      got.emplace_back(false, m.peer);
    MOESAIC_CHECK(got == want, "an exchange has other messages than the schedule");
    Forwarding::exchange(sends, receives, stream);
  }

 private:
  std::vector<const std::vector<Message>*> exchanges_;
  std::size_t next_ = 0;
};

/// The steps over ranks of threads.
Gradients run(const Toy& toy, const Schedule& s, unsigned seed, Stream::Mode mode) {
  Gradients gradients(toy);  // each rank writes its own layers
  ModelCosts costs;
  costs.layers.assign(at(toy.layers), 1.0);
  costs.after = 0.5;
  const auto chunks = balance_layers(costs, s.placement.num_chunks());
  const BundlePlan bundles = bundles_of(s, toy, chunks);
  const Slots slots = count_slots(s);
  std::atomic<bool> slots_agree{true};
  run_local_ranks(s.sizes.stages, [&](Communicator& ranks) {
    AsScheduled comm(ranks, s);
    Stream computing(kCpu, "computing", mode), messages(kCpu, "messages", mode);
    Executor executor(s, bundles, s.sizes.stages == 1 ? nullptr : &comm, computing, messages);
    ToyRunner runner(
        toy, chunks, computing, seed * 100 + static_cast<unsigned>(comm.rank()), gradients);
    for (const int chunk : s.placement.chunks_of(comm.rank())) {
      if (executor.slots(chunk) != slots.per_chunk[at(chunk)]) slots_agree = false;
      runner.reserve(chunk, executor.slots(chunk));
    }
    for (int step = 0; step < kSteps; ++step)
      executor.run(runner);
    computing.synchronize();
    messages.synchronize();
  });
  CHECK(slots_agree);
  return gradients;
}

bool are_equal(const Gradients& a, const Gradients& b) {
  return a.weights == b.weights && a.scale == b.scale;
}

double largest(const Gradients& g) {
  double x = 0;
  for (const Values& w : g.weights) {
    for (const double v : w)
      x = std::max(x, std::abs(v));
  }
  return x;
}

double difference(const Gradients& a, const Gradients& b) {
  Gradients d = a;
  for (std::size_t l = 0; l < d.weights.size(); ++l) {
    for (std::size_t i = 0; i < d.weights[l].size(); ++i)
      d.weights[l][i] -= b.weights[l][i];
  }
  return largest(d) / largest(b);
}

struct Case {
  Kind kind;
  Sizes sizes;
};
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Kind kind : {Kind::gpipe, Kind::one_f_one_b, Kind::interleaved, Kind::zero_bubble}) {
    for (const int p : {1, 2, 3, 4}) {
      for (const int v : {1, 2, 3}) {
        for (const int m : {1, 3, 8}) {
          if (size_problem(kind, {p, v, m}).empty()) all.push_back({kind, {p, v, m}});
        }
      }
    }
  }
  return all;
}

TEST_CASE("pipeline: every schedule gives the gradients of one rank, to the bit") {
  // Whole numbers: every sum is exact, whatever its order. Snapshots every three layers.
  const Toy toy(12, 3, true);
  unsigned seed = 0;
  for (const Case& c : cases()) {
    CAPTURE(name(c.kind), c.sizes.stages, c.sizes.chunks, c.sizes.micro_batches);
    const Gradients expected = loop(toy, c.sizes.micro_batches);
    REQUIRE(largest(expected) > 1);
    REQUIRE(largest(expected) < 0x1p52);
    const Gradients found = run(toy, make_schedule(c.kind, c.sizes), ++seed, Stream::Mode::worker);
    REQUIRE(are_equal(found, expected));
  }
}

TEST_CASE("pipeline: with broken numbers too, where sums have one order") {
  for (const int block : {0, 2}) {
    const Toy toy(9, block, false);
    unsigned seed = 1000;
    for (const Case& c : cases()) {
      if (c.sizes.num_chunks() > toy.layers || c.sizes.micro_batches == 8) continue;
      CAPTURE(block, name(c.kind), c.sizes.stages, c.sizes.chunks, c.sizes.micro_batches);
      const Gradients found =
          run(toy, make_schedule(c.kind, c.sizes), ++seed, Stream::Mode::worker);
      const Gradients expected = loop(toy, c.sizes.micro_batches);
      // A rank that holds several chunks adds up what its own give a snapshot first.
      if (block == 0 || c.sizes.chunks == 1 || c.sizes.stages == 1)
        REQUIRE(are_equal(found, expected));
      else
        REQUIRE(difference(found, expected) < 1e-14);
    }
  }
}

TEST_CASE("pipeline: streams that run at once give the same") {
  const Toy toy(8, 2, false);
  for (const Kind kind : {Kind::interleaved, Kind::zero_bubble}) {
    const Schedule s = make_schedule(kind, {2, 2, 3});
    CHECK(are_equal(run(toy, s, 1, Stream::Mode::immediate), run(toy, s, 2, Stream::Mode::worker)));
  }
}

TEST_CASE("pipeline: a rank whose model fails ends the others") {
  class Failing final : public ChunkRunner {
   public:
    ForwardResult forward(const ForwardCall& call) override {
      if (call.micro_batch == 1) throw InputError("micro-batch 1 is broken");
      return {.cur = ConstTensorView(values_.data(), DType::f64, {kTokens, kWidth}),
              .snapshots = {}};
    }
    void backward(const BackwardCall&) override {}
    void add(TensorView, ConstTensorView) override {}

   private:
    std::vector<std::byte> values_ = std::vector<std::byte>(at(kBundle) * sizeof(double));
  };
  const Schedule s = make_schedule(Kind::one_f_one_b, {3, 1, 4});
  const BundleTensor tensor{{kTokens, kWidth}, DType::f64, DType::f64};
  const BundlePlan bundles(s.placement, tensor, tensor, {});
  // All this outlives the messages that are under way when a rank fails.
  struct Rank {
    Stream computing{kCpu, "computing"}, messages{kCpu, "messages"};
    Failing model;
    std::unique_ptr<Executor> executor;
  };
  std::vector<Rank> ranks(3);
  const auto body = [&](Communicator& comm) {
    Rank& rank = ranks[at(comm.rank())];
    rank.executor = std::make_unique<Executor>(s, bundles, &comm, rank.computing, rank.messages);
    rank.executor->run(rank.model);
    rank.messages.synchronize();
  };
  CHECK_THROWS_AS(run_local_ranks(3, body), InputError);
}

// --- what messages carry

std::vector<std::vector<int>> carried(const Placement& placement, const std::vector<int>& origins) {
  const BundleTensor cur{{4, 8}, DType::bf16, DType::bf16},
      snapshot{{4, 8}, DType::bf16, DType::f32};
  const BundlePlan plan(placement, cur, snapshot, origins);
  std::vector<std::vector<int>> all;
  for (int b = 0; b + 1 < placement.num_chunks(); ++b)
    all.push_back(plan.carried(b));
  return all;
}

TEST_CASE("pipeline: a snapshot reaches each rank once") {
  using All = std::vector<std::vector<int>>;
  // One chunk per rank: everything taken so far.
  CHECK(carried(Placement(Placement::Form::loop, 4, 1), {0, 0, 2}) ==
        All{{0, 1}, {0, 1}, {0, 1, 2}});
  // Two rounds over three ranks, a snapshot in every chunk: what the receiver has not seen, at most stages - 1 of them.
  CHECK(carried(Placement(Placement::Form::loop, 3, 2), {0, 1, 2, 3, 4, 5}) ==
        All{{0}, {0, 1}, {1, 2}, {2, 3}, {3, 4}});
  // Down and up again: on the way back only what was taken below; nothing at the turn.
  CHECK(carried(Placement(Placement::Form::vee, 3, 2), {0, 1, 2, 3, 4, 5}) ==
        All{{0}, {0, 1}, {}, {2, 3}, {1, 2, 3, 4}});
  const Placement vee(Placement::Form::vee, 2, 2);
  const BundleTensor cur{{4, 8}, DType::bf16, DType::bf16},
      snapshot{{4, 8}, DType::bf16, DType::f32};
  const BundlePlan plan(vee, cur, snapshot, {0, 0});
  CHECK(plan.message_bytes(0, Payload::activation) == 64 + 2 * 64);
  CHECK(plan.message_bytes(0, Payload::gradient) == 64 + 2 * 128);
  CHECK(plan.message_bytes(1, Payload::activation) == 0);
  CHECK(plan.message_bytes(2, Payload::activation) == 64);
  CHECK(plan.snapshots_before(0) == 0);
  CHECK(plan.snapshots_after(0) == 2);
  CHECK_THROWS_AS(BundlePlan(vee, cur, snapshot, {1, 0}), InternalError);
  CHECK_THROWS_AS(BundlePlan(vee, cur, snapshot, {4}), InternalError);
}

}  // namespace
}  // namespace moesaic::pipeline
