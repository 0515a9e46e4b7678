// activations.piece_tokens: layers that work off a micro-batch in pieces, one after the other. The same gradients as of whole
// micro-batches, but for the order of sums, and less memory.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/config/load.h"
#include "core/data/document_bound.h"
#include "core/nn/choices.h"
#include "core/train/memory_plan.h"
#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

using Overrides = std::vector<std::string>;

Overrides with(Overrides all, const Overrides& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}
Overrides with_pieces(const Overrides& all, int tokens) {
  return with(all, {fmt::format("activations.piece_tokens={}", tokens)});
}
std::string shown(const Overrides& overrides) {
  return fmt::format("{} ", fmt::join(overrides, " "));
}

/// What one forward and backward of a global batch leave, before any update.
struct Accumulated {
  std::map<std::string, std::vector<double>> gradients;
  double held_out = 0;
};

Accumulated accumulate(const Overrides& overrides) {
  Run run(hybrid_config(overrides));
  Accumulated result;
  result.held_out = run.trainer->evaluate().loss;
  run.trainer->accumulate_gradients();
  run.trainer->stream().synchronize();
  for (std::size_t i = 0; i < run.params->params().size(); ++i) {
    const ParamId id{static_cast<std::int32_t>(i)};
    for (std::int64_t e = 0; e < run.params->members_here(id); ++e) {
      const TensorView g = run.params->gradient(id, e);
      if (g.empty()) continue;
      const std::int64_t width = g.dim(g.rank() - 1);
      const TensorView rows = g.reshaped({g.numel() / width, width});
      result.gradients[run.params->member_name(id, e)].assign(rows.as<double>(),
                                                              rows.as<double>() + rows.numel());
    }
  }
  return result;
}

void check_near(const Accumulated& whole, const Accumulated& pieces) {
  CHECK(std::abs(whole.held_out - pieces.held_out) < 1e-12 * whole.held_out);
  REQUIRE(whole.gradients.size() == pieces.gradients.size());
  for (const auto& [name, expected] : whole.gradients) {
    const std::vector<double>& found = pieces.gradients.at(name);
    double error = 0, size = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      error = std::max(error, std::abs(found[i] - expected[i]));
      size = std::max(size, std::abs(expected[i]));
    }
    INFO(name << ": " << error << " of " << size);
    CHECK(error <= 1e-11 * size);
  }
}

void check_pieces(const Overrides& base, const std::vector<int>& lengths) {
  const Accumulated whole = accumulate(base);
  CHECK(whole.gradients.size() >= 5);  // those of the indexer, in its warm-up
  for (const int tokens : lengths) {
    const Overrides all = with_pieces(base, tokens);
    INFO(shown(all));
    check_near(whole, accumulate(all));
  }
}

struct Trained {
  std::vector<StepStats> stats;
  Snapshot state;
  double held_out = 0;
};

Trained train(const Overrides& overrides, const offload::Disturbance& disturbance = {}) {
  Run run(hybrid_config(overrides), nullptr, Stream::Mode::worker, kCpu, 0, {}, disturbance);
  Trained result;
  result.stats.push_back(run.step());
  result.held_out = run.trainer->evaluate().loss;  // in the middle: leaves what the next step needs
  result.stats.push_back(run.step());
  result.state = run.snapshot();
  return result;
}

void check_equal(const Trained& a, const Trained& b) {
  REQUIRE(a.stats.size() == b.stats.size());
  for (std::size_t i = 0; i < a.stats.size(); ++i)
    CHECK(same_numbers(a.stats[i], b.stats[i]));
  CHECK(differences(a.state, b.state).empty());
  CHECK(a.held_out == b.held_out);
}

std::size_t bytes_of(const std::vector<MemoryUse>& parts, const std::string& tag) {
  for (const MemoryUse& use : parts) {
    if (use.tag == tag) return use.bytes;
  }
  return 0;
}

}  // namespace

// Sequences of 64 tokens of documents of 1 to 150: some end in a piece, some fill several.
TEST_CASE("train: gradients of pieces are those of whole micro-batches") {
  for (const char* recompute : {"none", "selective", "full"})
    check_pieces({fmt::format("activations.recompute={}", recompute)}, {4, 16, 32, 40});
  check_pieces({"activations.recompute=[full, \"!cur.mid\"]", "train.micro_batch_size=2"},
               {32, 64, 100});
}

TEST_CASE("train: gradients of pieces with other attention, residuals and phases") {
  const Overrides full{"activations.recompute=full"};
  check_pieces(with(full, {"model.indexer.gather_beyond=0"}), {8, 32});
  check_pieces(with(full,
                    {"model.indexer.gather_beyond=0",
                     "model.qk_rope_head_dim=0",
                     "model.qk_nope_head_dim=16"}),
               {16});
  check_pieces(with(full, {"model.indexer=null", "model.mla_use_nope=false"}), {16});
  check_pieces(with(full,
                    {"model.mla_use_nope=false",
                     "model.q_lora_rank=null",
                     "model.mla_use_output_gate=false"}),
               {16});
  check_pieces(with(full,
                    {"model.residual.type=plain",
                     "model.residual.attn_res_block_size=null",
                     "model.mtp.num_nextn_predict_layers=0"}),
               {16});
  check_pieces({"train.phases=[{until: 20, sparse_stage: warmup}]"}, {16});
  check_pieces({"model.linear_attn_config.short_conv_kernel_size=1"}, {16});
}

TEST_CASE("train: a micro-batch that is one piece has the bits of a whole one") {
  const Overrides base{"run.precision=bf16", "activations.recompute=full"};
  const Trained whole = train(base);
  for (const int tokens : {64, 1000})
    check_equal(whole, train(with_pieces(base, tokens)));
}

TEST_CASE(
    "train: pieces have the same bits in every order of micro-batches, kept or computed again, "
    "here or away") {
  const Overrides base = with_pieces({"run.precision=bf16", "optimizer.name=muon"}, 16);
  const Trained reference = train(base);
  for (const Overrides& more :
       {Overrides{"parallel.order=vertical"},
        Overrides{"activations.recompute=full"},
        Overrides{"activations.recompute=[full, \"!cur.mid\"]",
                  "activations.residual_offload=true",
                  "activations.offload=[cur.mid, indexer.selected, \"moe.*\"]"},
        Overrides{"activations.residual_offload=true", "parallel.order=vertical"}}) {
    INFO(shown(more));
    check_equal(reference, train(with(base, more), {.poison = true, .before = {}}));
  }
}

TEST_CASE("train: steps in pieces follow those of whole micro-batches") {
  for (const Overrides& rules : {Overrides{"optimizer.name=muon", "optimizer.clip_grad_norm=0.1"},
                                 Overrides{"model.balance.bias_rule=quantile_exact"},
                                 Overrides{"model.balance.aux_loss=global"}}) {
    INFO(shown(rules));
    const Trained whole = train(rules), pieces = train(with_pieces(rules, 16));
    for (std::size_t i = 0; i < whole.stats.size(); ++i) {
      CHECK(std::abs(whole.stats[i].loss - pieces.stats[i].loss) < 1e-11);
      CHECK(std::abs(whole.stats[i].grad_norm - pieces.stats[i].grad_norm) < 1e-10);
    }
    std::string worst;
    CHECK(largest_relative_error(whole.state, pieces.state, worst) < 1e-7);
    INFO(worst);
  }
}

TEST_CASE("train: pieces on several ranks") {
  for (const Overrides& layout :
       {Overrides{},
        Overrides{"parallel.ep=2"},
        Overrides{"parallel.ep=2", "dispatch.overlap=true", "dispatch.chunks=2"},
        Overrides{"parallel.tp=2"},
        Overrides{"parallel.tp=2", "parallel.ep=2", "parallel.order=vertical"}}) {
    const Overrides all = with({"train.global_batch_size=8", "activations.recompute=full"}, layout);
    INFO(shown(all));
    const JobResult whole = run_job(hybrid_config(all), 2, 2),
                    pieces = run_job(hybrid_config(with_pieces(all, 16)), 2, 2);
    for (std::size_t i = 0; i < whole.stats.size(); ++i) {
      CHECK(std::abs(whole.stats[i].loss - pieces.stats[i].loss) < 1e-11);
      CHECK(std::abs(whole.stats[i].grad_norm - pieces.stats[i].grad_norm) < 1e-10);
      CHECK(whole.stats[i].tokens == pieces.stats[i].tokens);
    }
    std::string worst;
    for (std::size_t rank = 0; rank < 2; ++rank)
      CHECK(largest_relative_error(whole.states[rank], pieces.states[rank], worst) < 1e-7);
  }
}

TEST_CASE("train: pieces with experts that are not on the device") {
  for (const bool weights : {true, false}) {
    for (const char* order : {"horizontal", "vertical"}) {
      const Overrides base = with_pieces({"run.precision=bf16",
                                          "activations.recompute=full",
                                          fmt::format("parallel.order={}", order)},
                                         16);
      INFO(shown(base) << weights);
      const config::Config config = hybrid_config(base);
      Run here(config), away(config,
                             nullptr,
                             Stream::Mode::worker,
                             kCpu,
                             0,
                             Offload{.weights = weights, .on_device = 0.3});
      const auto a = here.steps(2), b = away.steps(2);
      for (std::size_t i = 0; i < a.size(); ++i)
        CHECK(same_numbers(a[i], b[i]));
      CHECK(differences(here.snapshot(), away.snapshot()).empty());
    }
  }
}

TEST_CASE("train: pieces over phases with other lengths") {
  const Overrides base{
      "activations.recompute=full",
      "train.phases=[{until: 1}, {until: 2, sequence_length: 32, micro_batch_size: 2}, "
      "{until: 3, sequence_length: 16}, {until: 20, micro_batch_size: 2}]"};
  Run whole(hybrid_config(base)), pieces(hybrid_config(with_pieces(base, 16)));
  for (int i = 0; i < 4; ++i) {
    const StepStats a = whole.step(), b = pieces.step();
    CHECK(std::abs(a.loss - b.loss) < 1e-10);
    CHECK(a.tokens == b.tokens);
  }
}

namespace {
// Where in which micro-batch each layer chose.
class Places final : public ChoiceObserver {
 public:
  ConstTensorView replace(const Choice& choice, Stream&) override {
    seen[choice.layer].emplace_back(choice.micro_batch, choice.first_token);
    return {};
  }
  std::map<std::string, std::vector<std::pair<std::int64_t, std::int64_t>>> seen;
};
}  // namespace

TEST_CASE("train: an observer of choices sees every piece once, where it lies in its micro-batch") {
  Places places;  // outlives the run
  Run run(
      hybrid_config(with_pieces({"activations.recompute=full", "train.global_batch_size=2"}, 16)));
  run.trainer->set_choices(&places);
  run.step();
  CHECK(places.seen.size() == 4);  // two mixtures, that of the MTP module, the indexer
  for (const auto& [layer, seen] : places.seen) {
    INFO(layer);
    CHECK(seen == std::vector<std::pair<std::int64_t, std::int64_t>>{
                      {0, 0}, {0, 16}, {0, 32}, {0, 48}, {1, 0}, {1, 16}, {1, 32}, {1, 48}});
  }
}

TEST_CASE("train: pieces take less memory, as planned") {
  const Overrides base{"run.precision=bf16",
                       "train.global_batch_size=1",
                       "data.sequence_length=4096",
                       "model.max_position_embeddings=4096",
                       "model.mtp.num_nextn_predict_layers=0",
                       "activations.recompute=full",
                       "activations.residual_offload=true"};
  const auto plan = [](const Overrides& overrides) {
    return plan_memory(hybrid_config(overrides), kCpu, kBf16, {}, 1);
  };
  const auto at_work = [](const MemoryPlan& p) {
    std::size_t sum = 0;
    for (const char* tag : {"transient",
                            "scratch",
                            "saved activations",
                            "offloaded activations",
                            "bundles between chunks",
                            "key gradients of pieces"})
      sum += bytes_of(p.parts, tag);
    return sum;
  };
  const MemoryPlan whole = plan(base), large = plan(with_pieces(base, 1024)),
                   small = plan(with_pieces(base, 256));
  CHECK(3 * bytes_of(large.parts, "transient") < 2 * bytes_of(whole.parts, "transient"));
  CHECK(2 * bytes_of(small.parts, "transient") < bytes_of(whole.parts, "transient"));
  CHECK(2 * bytes_of(small.parts, "offloaded activations") <
        bytes_of(whole.parts, "offloaded activations"));
  CHECK(at_work(large) < at_work(whole));
  CHECK(2 * at_work(small) < at_work(whole));
  // What is planned is what is allocated.
  for (const char* order : {"horizontal", "vertical"}) {
    const config::Config config = hybrid_config(
        with_pieces({"run.precision=bf16", fmt::format("parallel.order={}", order)}, 16));
    Run run(config);
    const MemoryPlan planned = plan_memory(config, kCpu, run.params->precision(), {}, 1);
    const StepMemory& memory = run.trainer->memory();
    CHECK(bytes_of(planned.parts, "saved activations") == memory.slot);
    CHECK(bytes_of(planned.parts, "transient") == memory.transient);
    CHECK(bytes_of(planned.parts, "bundles between chunks") == memory.bundles);
    CHECK(memory.piece_sums > 0);
    CHECK(bytes_of(planned.parts, "key gradients of pieces") == memory.piece_sums);
    run.step();
  }
}

TEST_CASE(
    "train: a sequence of a million tokens fits on one GPU of 139 GiB with 128 GiB of host "
    "memory") {
  const config::Config config =
      config::load_config(std::string(MOESAIC_SOURCE_DIR) + "/configs/bench/hybrid_5b_million.yaml",
                          {"run.device=cpu", "run.precision=bf16"})
          .config;
  const data::DocumentBound documents(config.data.sequence_length);
  const auto plan = [&](const config::Config& c) {
    return plan_memory(c, kCpu, kBf16, {&documents, 1}, 1, 0, {.least_caches = true});
  };
  constexpr std::size_t kGiB = std::size_t{1} << 30;
  const MemoryPlan pieces = plan(config);
  std::size_t host = 0;
  for (const MemoryUse& use : pieces.host)
    host += use.bytes;
  CHECK(pieces.total() < 110 * kGiB);  // beside the context and what kernels of a GPU take more
  CHECK(host < 100 * kGiB);
  config::Config at_once = config;
  at_once.activations.piece_tokens = 0;
  CHECK(plan(at_once).total() > 300 * kGiB);
}

}  // namespace moesaic::test
