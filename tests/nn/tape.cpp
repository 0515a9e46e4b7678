// Tapes and parameter stores without a model.
#include "core/nn/tape.h"

#include <cstring>
#include <string>

#include "core/base/error.h"
#include "core/nn/module.h"
#include "kernels/backend.h"
#include "kernels/ops/elementwise.h"
#include "tests/support/catch.h"

namespace moesaic {
namespace {

/// y = x + x, a choice c of y, z = y + c, out = z + y.
struct Chain {
  Chain() {
    x = spec.input("x", {4}, DType::f64);
    y = spec.activation("y", {4}, DType::f64);
    c = spec.activation("c", {4}, DType::f64);
    z = spec.activation("z", {4}, DType::f64);
    out = spec.activation("out", {4}, DType::f64);
    const auto add = [this](const char* name, ActId a, ActId b, ActId to, StepKind kind) {
      spec.step(
          name,
          {a, b},
          {to},
          [this, a, b, to](Tape& t) {
            ++runs;
            t.run(Add{.y = t.out(to), .a = t.in(a), .b = t.in(b)});
          },
          kind);
    };
    add("y", x, x, y, StepKind::compute);
    add("c", y, y, c, StepKind::chooses);
    add("z", y, c, z, StepKind::compute);
    add("out", z, y, out, StepKind::compute);
    spec.always_save(out);
  }
  TapeSpec spec;
  ActId x, y, c, z, out;
  int runs = 0;
};

struct Fixture {
  BackendOwner owner{{.mode = Stream::Mode::immediate, .scratch_bytes = 4096}};
  ParameterStore params{kF64};
  Arena transient{1 << 16, kCpu, "transient"};
  WeightGradients weight_gradients;
  Sequence sequence;
  RunContext context{owner.backend(), params, transient, weight_gradients, sequence, {}, {}, true};
};

}  // namespace

TEST_CASE("glob patterns") {
  CHECK(glob_match("*", ""));
  CHECK(glob_match("attn.*", "attn.q"));
  CHECK(glob_match("a*b*c", "aXbYbZc"));
  CHECK_FALSE(glob_match("attn.*", "moe.q"));
  CHECK_FALSE(glob_match("a*b", "ab1"));
}

TEST_CASE("backward replays what was not saved, once, and never a choice") {
  Chain chain;
  chain.spec.plan({.all = true});
  Fixture f;
  const Buffer slot(chain.spec.slot_bytes(), kCpu, "slot"), x(32, kCpu, "x");
  for (int i = 0; i < 4; ++i)
    x.view({4}, DType::f64).as<double>()[i] = i + 1;
  Tape tape(chain.spec, slot.view({static_cast<std::int64_t>(slot.bytes())}, DType::u8));
  tape.bind(chain.x, x.view({4}, DType::f64));
  tape.forward(f.context);
  CHECK(chain.runs == 4);
  CHECK(tape.in(chain.out).as<double>()[3] == 32.0);  // z + y = (8 + 16) + 8
  CHECK(f.transient.high_water_bytes() > 0);
  f.transient.poison();
  tape.backward(f.context, [&] {
    CHECK(tape.in(chain.z).as<double>()[0] == 6.0);
    CHECK(tape.in(chain.y).as<double>()[0] == 2.0);
    CHECK(tape.in(chain.c).as<double>()[0] == 4.0);
    CHECK(tape.in(chain.z).as<double>()[1] == 12.0);
  });
  CHECK(tape.replays() == 2);
  CHECK(chain.runs == 6);
}

TEST_CASE("the tape of a piece finds what those before it kept, and leaves gradients there") {
  TapeSpec spec;
  const ActId x = spec.input("x", {2, 1}, DType::f64);
  const ActId key = spec.activation("key", {2, 1}, DType::f64),
              all = spec.activation("all", {6, 1}, DType::f64);
  std::int64_t pieces = 0;
  spec.step(
      "key", {x}, {key}, [&](Tape& t) { t.run(Add{.y = t.out(key), .a = t.in(x), .b = t.in(x)}); });
  spec.step("all", {key}, {all}, [&](Tape& t) { t.gather_pieces(t.out(all), key, pieces); });
  spec.always_save(key);
  spec.never_save(all);
  spec.plan({});
  Fixture f;
  const auto bytes = static_cast<std::int64_t>(spec.slot_bytes());
  const Buffer slots(3 * spec.slot_bytes(), kCpu, "slots"), input(48, kCpu, "x");
  const TensorView xs = input.view({6, 1}, DType::f64);
  std::vector<Tape> tapes;
  for (std::int64_t p = 0; p < 3; ++p) {
    tapes.emplace_back(spec, slots.view({3 * bytes}, DType::u8).rows(p * bytes, (p + 1) * bytes));
    for (int i = 0; i < 2; ++i)
      xs.as<double>()[2 * p + i] = static_cast<double>(2 * p + i);
  }
  for (std::size_t p = 0; p < 3; ++p) {
    if (p > 0) tapes[p].follow(&tapes[p - 1]);
    const auto begin = static_cast<std::int64_t>(2 * p);
    tapes[p].bind(x, xs.rows(begin, begin + 2));
    pieces = static_cast<std::int64_t>(p) + 1;
    tapes[p].forward(f.context);
  }
  tapes[2].backward(f.context, [&] {
    const ConstTensorView gathered = tapes[2].in(all);
    for (int i = 0; i < 6; ++i)
      CHECK(gathered.as<double>()[i] == 2.0 * i);
    CHECK(tapes[2].of_piece_before(key).as<double>()[1] == 6.0);
    tapes[2].of_piece_before(key).as<double>()[1] = -1;
  });
  CHECK(tapes[1].own(key).as<double>()[1] == -1);
  CHECK_THROWS_AS(tapes[0].of_piece_before(key), InternalError);
  CHECK_THROWS_AS(tapes[0].own(all), InternalError);
  pieces = 3;
  tapes[1].backward(f.context, [&] { CHECK_THROWS_AS(tapes[1].in(all), InternalError); });
}

TEST_CASE(
    "a step leaves out what nobody wants of it: in forward, and in a replay for another result") {
  for (const bool keep : {true, false}) {
    TapeSpec spec;
    const ActId x = spec.input("x", {4}, DType::f64);
    // `part` is for backward alone, `whole` is read by the next step.
    const ActId part = spec.activation("part", {4}, DType::f64),
                whole = spec.activation("whole", {4}, DType::f64),
                out = spec.activation("out", {4}, DType::f64);
    std::string wanted;
    spec.step("both", {x}, {part, whole}, [&](Tape& t) {
      for (const ActId id : {part, whole}) {
        if (!t.is_wanted(id)) continue;
        wanted += id.index == part.index ? 'p' : 'w';
        t.run(Add{.y = t.out(id), .a = t.in(x), .b = t.in(x)});
      }
    });
    spec.step("out", {whole}, {out}, [&](Tape& t) {
      t.run(Add{.y = t.out(out), .a = t.in(whole), .b = t.in(whole)});
    });
    spec.always_save(out);
    spec.plan({.all = !keep});
    Fixture f;
    const Buffer slot(spec.slot_bytes(), kCpu, "slot"), ones(32, kCpu, "x");
    for (int i = 0; i < 4; ++i)
      ones.view({4}, DType::f64).as<double>()[i] = 1;
    Tape tape(spec, slot.view({static_cast<std::int64_t>(slot.bytes())}, DType::u8));
    tape.bind(x, ones.view({4}, DType::f64));
    tape.forward(f.context);
    CHECK(wanted == (keep ? "pw" : "w"));
    CHECK(tape.in(out).as<double>()[0] == 4.0);
    f.transient.poison();
    wanted.clear();
    tape.backward(f.context, [&] {
      CHECK(tape.in(part).as<double>()[0] == 2.0);
      CHECK(wanted == (keep ? "" : "p"));
      CHECK(tape.in(whole).as<double>()[0] == 2.0);
      CHECK(tape.in(part).as<double>()[0] == 2.0);
    });
    CHECK(wanted == (keep ? "" : "pw"));
  }
}

TEST_CASE("a stage of backward gives back what it replayed, unless weight gradients wait") {
  for (const auto mode : {WeightGradients::Mode::at_once, WeightGradients::Mode::deferred}) {
    const bool waits = mode == WeightGradients::Mode::deferred;
    CAPTURE(waits);
    Fixture f;
    f.weight_gradients = WeightGradients(mode);
    Chain chain;
    chain.spec.plan({.all = true});
    Buffer slot(chain.spec.slot_bytes(), kCpu, "slot"), x(4 * 8, kCpu, "x");
    std::fill_n(x.view({4}, DType::f64).as<double>(), 4, 1.5);
    Tape tape(chain.spec, slot.view({static_cast<std::int64_t>(slot.bytes())}, DType::u8));
    tape.bind(chain.x, x.view({4}, DType::f64));
    tape.forward(f.context);
    f.transient.poison();
    tape.backward(f.context, [&] {
      const int before = chain.runs;
      CHECK(tape.in(chain.y).as<double>()[0] == 3.0);
      const std::byte* freed = nullptr;
      {
        const Tape::Stage stage(tape);
        CHECK(tape.in(chain.z).as<double>()[0] == 9.0);
        CHECK(chain.runs == before + 2);
        freed = tape.in(chain.z).data();
      }
      f.transient.poison();
      CHECK(tape.in(chain.y).as<double>()[0] == 3.0);
      CHECK(chain.runs == before + 2);
      const bool is_reused = tape.temp({4}, DType::f64, "next").data() == freed;
      CHECK(is_reused == !waits);
      CHECK(tape.in(chain.z).as<double>()[0] == 9.0);
      CHECK(chain.runs == before + (waits ? 2 : 3));
      {
        const Tape::Scope scope(tape);
        CHECK_THROWS_AS(Tape::Stage(tape), InternalError);
      }
    });
    f.weight_gradients.flush(f.owner.backend());
  }
}

TEST_CASE("a plan saves what no pattern names and what is pinned or chosen") {
  Chain chain;
  chain.spec.plan({.all = false, .patterns = {"z", "out"}});
  const auto keep = [&](ActId id) {
    return chain.spec.activations()[static_cast<std::size_t>(id.index)].keep;
  };
  CHECK(keep(chain.y) == Keep::save);
  CHECK(keep(chain.c) == Keep::save);
  CHECK(keep(chain.z) == Keep::recompute);
  CHECK(keep(chain.out) == Keep::save);
  CHECK(chain.spec.slot_bytes() == 3 * 256);
}

// a (cheap) -> b -> c, of which backward reads c alone.
TEST_CASE("what backward does not read is saved where a replay needs it, as near as can be") {
  const auto saved = [](const RecomputePolicy& policy) {
    TapeSpec spec;
    const ActId x = spec.input("x", {1}, DType::f64), a = spec.activation("a", {1}, DType::f64),
                b = spec.activation("b", {1}, DType::f64),
                c = spec.activation("c", {1}, DType::f64);
    spec.step(
        "a", {x}, {a}, [](Tape&) {}, StepKind::cheap);
    spec.step("b", {a}, {b}, [](Tape&) {});
    spec.step(
        "c", {b}, {c}, [](Tape&) {}, StepKind::cheap);
    spec.forward_only(a);
    spec.forward_only(b);
    spec.plan(policy);
    std::string names;
    for (const auto& activation : spec.activations()) {
      if (!activation.is_input && activation.keep == Keep::save) names += activation.name;
    }
    return names;
  };
  CHECK(saved({}) == "c");
  CHECK(saved({.patterns = {"c"}}) == "b");
  CHECK(saved({.patterns = {"b", "c"}}) == "a");
  CHECK(saved({.cheap = true}) == "b");
  CHECK(saved({.patterns = {"a", "b"}}) == "c");
  CHECK(saved({.cheap = true, .patterns = {"b"}}).empty());
  CHECK(saved({.all = true}).empty());
  CHECK(saved({.all = true, .kept = {"c"}}) == "c");
  CHECK(saved({.all = true, .kept = {"a", "b"}}) == "b");
  CHECK(saved({.cheap = true, .kept = {"c"}}) == "c");
  CHECK(saved({.patterns = {"*"}, .kept = {"c"}}) == "c");
}

TEST_CASE("a pattern that names a choice is refused with its name") {
  Chain chain;
  std::string message;
  try {
    chain.spec.plan({.all = false, .patterns = {"c"}});
  } catch (const UsageError& error) {
    message = error.what();
  }
  CHECK(message.find("'c'") != std::string::npos);
}

TEST_CASE("a step that reads too early or writes twice is refused") {
  TapeSpec spec;
  const ActId a = spec.activation("a", {1}, DType::f64), b = spec.activation("b", {1}, DType::f64);
  CHECK_THROWS_AS(spec.step("early", {a}, {b}, [](Tape&) {}), InternalError);
  spec.step("first", {}, {a}, [](Tape&) {});
  CHECK_THROWS_AS(spec.step("again", {}, {a}, [](Tape&) {}), InternalError);
  CHECK_THROWS_AS(spec.plan({}), InternalError);  // b is never written
}

TEST_CASE("logical parameters are boxes of their storage") {
  ParameterStore store(kBf16);
  const StorageId gate_up = store.declare_storage("gate_up", 3, 4, 5, StoredAs::compute);
  auto gate = matrix_spec("e.{}.w1", 2, 5, 0.02, Part::routed_expert), up = gate;
  gate.members = up.members = 3;
  up.name = "e.{}.w3";
  const ParamId g = store.declare(gate, gate_up, 0), u = store.declare(up, gate_up, 2);
  const StorageId norm = store.declare(vector_spec("norm", 5, Init::Kind::ones, Part::norm));
  CHECK_THROWS_AS(store.declare(vector_spec("norm", 5, Init::Kind::ones, Part::norm)),
                  InternalError);
  const char trained[] = {1, 1, 0};
  store.seal(kCpu, trained);
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  store.initialize(3);

  const ConstTensorView whole = store.acquire(gate_up, stream).view();
  CHECK(store.weight(u, 1).data() == whole.data() + (1 * 4 + 2) * 5 * 2);
  CHECK(store.weight(g, 2).data() == whole.data() + 2 * 4 * 5 * 2);
  CHECK(store.member_name(u, 2) == "e.2.w3");
  CHECK_FALSE(store.masters_are_weights(g));
  for (int i = 0; i < 10; ++i) {
    CHECK(static_cast<float>(store.weight(g, 1).as<bf16>()[i]) ==
          static_cast<float>(bf16(store.master(g, 1).as<float>()[i])));
  }
  for (int e = 0; e < 3; ++e)
    CHECK(store.slot_of_member(gate_up).as<std::int32_t>()[e] == e);
  CHECK(store.grad(norm).empty());
  CHECK(store.gradient(g, 0).data() == store.all_grads().data());
  store.set_frozen(g, true);
  CHECK(store.gradient(g, 0).empty());
  CHECK(store.find("e.{}.w3").index == u.index);
  CHECK_FALSE(store.find("e.0.w3").valid());
}

}  // namespace moesaic
