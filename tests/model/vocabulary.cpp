// The embedding and the head split over ranks by words, against one rank: lookups, losses and gradients.
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include <fmt/format.h>

#include "core/base/random.h"
#include "core/model/embedding.h"
#include "core/model/head.h"
#include "kernels/backend.h"
#include "kernels/ops/vocab_loss.h"
#include "tests/support/catch.h"

namespace moesaic {
namespace {

constexpr std::int64_t kWords = 12, kWidth = 5, kTokens = 24;

// Ranks are threads: no assertions of the test inside them.
void fail_unless(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

// Numbers of the whole tensor, of which `view` holds the rows from `first` on.
void fill(const TensorView& view, std::uint64_t seed, std::int64_t first = 0) {
  dispatch_float(view.dtype(), [&]<class T>(TypeTag<T>) {
    for (std::int64_t i = 0; i < view.numel(); ++i) {
      const auto element = static_cast<std::uint64_t>(first * kWidth + i);
      view.as<T>()[i] = T(static_cast<acc_t<T>>(standard_normal(seed, element)));
    }
  });
}

// First and last words of blocks, and none.
std::vector<std::int32_t> words(bool as_targets) {
  std::vector<std::int32_t> all(kTokens);
  for (std::size_t i = 0; i < all.size(); ++i)
    all[i] = as_targets && i % 5 == 2 ? kIgnoredTarget : static_cast<std::int32_t>(i * 7 % kWords);
  return all;
}

/// Rank of `size` that run embedding and head on one table (tied), and what they compute.
struct Rank {
  Rank(Communicator& world, const Precision& precision, std::int64_t chunk_rows)
      : mesh({.dp = 1, .tp = world.size()}, world),
        params(precision, mesh.position()),
        table(params.declare(
            split_over_tp(matrix_spec("w", kWords, kWidth, 1.0, Part::embedding), 0))),
        embedding(table, params.position()),
        head(table, kWords, chunk_rows, params.position()),
        slices(world.rank(), world.size(), &world),
        own(kTokens / world.size()) {
    params.seal(kCpu);
    const TensorView w = params.storage_weight(table);
    fill(w, 1, world.rank() * w.dim(0));
    fill(memory.view({own, kWidth}, precision.compute), 2, world.rank() * own);
    stats = precision.stats;
    compute = precision.compute;
  }
  const TokenSlices* cut() const { return slices.size() > 1 ? &slices : nullptr; }

  /// Lookup, loss and both gradients; all accumulators start at 0.
  void run(bool training) {
    params.zero_grads(owner.stream());
    const std::vector<std::int32_t> ids = words(false), wanted = words(true);
    const auto ints = [&](const std::vector<std::int32_t>& v) {
      return ConstTensorView(reinterpret_cast<const std::byte*>(v.data()), DType::i32, {kTokens});
    };
    dispatch_float(stats, [&]<class T>(TypeTag<T>) {
      loss().as<T>()[0] = T(acc_t<T>(0));
      divisor().as<T>()[0] = T(acc_t<T>(19));
    });
    TapeSpec spec;
    const ActId n = spec.input("n", {own, kWidth}, compute),
                y = spec.activation("y", {own, kWidth}, compute),
                dn = spec.activation("dn", {own, kWidth}, compute);
    spec.step(
        "embedding", {}, {y}, [&](Tape& t) { embedding.forward(t, cut(), ints(ids), t.out(y)); });
    spec.step(
        "loss",
        {n},
        {dn},
        [&](Tape& t) {
          head.loss(
              t,
              cut(),
              t.in(n),
              {.targets = ints(wanted), .divisor = divisor(), .loss_sum = loss(), .scale = 2.0},
              training ? t.out(dn) : TensorView());
        },
        StepKind::chooses);
    spec.plan({});
    Tape tape(spec, slot.view({static_cast<std::int64_t>(spec.slot_bytes())}, DType::u8));
    tape.bind(n, memory.view({own, kWidth}, compute));
    transient.poison();
    tape.forward(context);
    owner.stream().synchronize();
    looked_up = tape.in(y);
    gradient = tape.in(dn);
    if (!training) return;
    transient.poison();
    tape.backward(context, [&] { embedding.backward(tape, cut(), ints(ids), tape.in(y)); });
    owner.stream().synchronize();
  }
  TensorView loss() const { return scalars.view({1}, stats); }
  TensorView divisor() const { return scalars.view({1}, stats, 64); }

  Mesh mesh;
  ParameterStore params;
  StorageId table;
  TokenEmbedding embedding;
  VocabHead head;
  TokenSlices slices;
  std::int64_t own;
  DType stats = DType::f64, compute = DType::f64;
  BackendOwner owner{{.mode = Stream::Mode::worker, .scratch_bytes = 1 << 16}};
  Arena transient{1 << 20, kCpu, "transient"};
  Buffer memory{kTokens * kWidth * 8, kCpu, "n"}, slot{1 << 16, kCpu, "slot"},
      scalars{128, kCpu, "scalars"};
  WeightGradients weight_gradients;
  Sequence sequence;
  RunContext context{owner.backend(), params, transient, weight_gradients, sequence, {}, {}, true};
  ConstTensorView looked_up, gradient;
};

double at(const ConstTensorView& view, std::int64_t i) {
  double value = 0;
  dispatch_float(view.dtype(), [&]<class T>(TypeTag<T>) {
    value = static_cast<double>(static_cast<acc_t<T>>(view.as<T>()[i]));
  });
  return value;
}

// Row r of `part` is row first + r of `whole`.
void compare(const ConstTensorView& part,
             const ConstTensorView& whole,
             std::int64_t first,
             double tolerance,
             const std::string& what) {
  for (std::int64_t i = 0; i < part.numel(); ++i) {
    const double got = at(part, i), want = at(whole, first * kWidth + i);
    fail_unless(std::abs(got - want) <= tolerance * (1 + std::abs(want)),
                fmt::format("{}, element {}: {} instead of {}", what, i, got, want));
  }
}

void check_against_one(int ranks, const Precision& precision, std::int64_t chunk_rows) {
  const double tolerance = precision.compute == DType::f64    ? 1e-14
                           : precision.compute == DType::bf16 ? 0.02
                                                              : 1e-5;
  run_local_ranks(1, [&](Communicator& alone) {
    Rank one(alone, precision, 5);
    one.run(true);
    run_local_ranks(ranks, [&](Communicator& world) {
      Rank rank(world, precision, chunk_rows);
      rank.run(false);
      const double loss_only = world.all_reduce_host(at(rank.loss(), 0), ReduceOp::sum);
      rank.run(true);
      const std::int64_t words_here = kWords / ranks, first_word = world.rank() * words_here,
                         first_token = world.rank() * rank.own;
      compare(rank.looked_up, one.looked_up, first_token, 0, "embedding");
      compare(rank.gradient, one.gradient, first_token, tolerance, "dn");
      compare(rank.params.grad(rank.table),
              one.params.grad(one.table),
              first_word,
              tolerance,
              "gradient of the table");
      const double loss = world.all_reduce_host(at(rank.loss(), 0), ReduceOp::sum);
      fail_unless(std::abs(loss - at(one.loss(), 0)) <= tolerance * loss, "another loss");
      fail_unless(loss == loss_only, "the loss depends on whether gradients are wanted");
    });
  });
}

}  // namespace

TEST_CASE("Embedding and head by blocks of words compute what one rank does") {
  for (const int ranks : {1, 2, 3, 4}) {
    // Fewer rows than ranks, runs that do not divide into chunks, one chunk, the choice of the head.
    for (const std::int64_t chunk_rows : {1, 7, 13, 24, 1000, 0}) {
      INFO(ranks << " ranks, chunks of " << chunk_rows);
      CHECK_NOTHROW(check_against_one(ranks, kF64, chunk_rows));
    }
    CHECK_NOTHROW(check_against_one(ranks, kF32, 7));
    CHECK_NOTHROW(check_against_one(ranks, kBf16, 7));
  }
}

TEST_CASE("A head that is split gives no logits") {
  CHECK_NOTHROW(run_local_ranks(2, [&](Communicator& world) {
    Rank rank(world, kF64, 0);
    const Buffer out(kWords * 8, kCpu, "logits");
    bool refused = false;
    try {
      rank.head.logits(rank.context,
                       rank.memory.view({1, kWidth}, DType::f64),
                       out.view({1, kWords}, DType::f64));
    } catch (const InternalError&) {
      refused = true;
    }
    fail_unless(refused, "logits of a part of the words");
  }));
}

}  // namespace moesaic
