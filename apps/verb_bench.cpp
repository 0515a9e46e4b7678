#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "apps/bench/bench.h"
#include "apps/number_range.h"
#include "apps/verb.h"

namespace moesaic::apps {
namespace {

DType dtype_from_name(const std::string& name) {
  if (name == "f64") return DType::f64;
  return name == "bf16" ? DType::bf16 : DType::f32;
}

void add_ops(CLI::App& bench, Action& action) {
  CLI::App* verb = bench.add_subcommand(
      "ops",
      "Time every op with random data: shapes of small models on the CPU, of large ones on a GPU");
  const auto options = std::make_shared<bench::OpsOptions>();
  const auto dtype = std::make_shared<std::string>();
  verb->add_option("--only", options->only, "Only cases whose name contains this text");
  verb->add_option("--device", options->device, "cpu or cuda")->capture_default_str();
  CLI::Option* plain =
      verb->add_flag("--plain", options->plain, "CUDA ops take the kernels for any size");
  verb->add_flag("--separate",
                 options->separate,
                 "CUDA: a product and the activation behind it run as two ops, never as one")
      ->excludes(plain);
  verb->add_option("--dtype",
                   *dtype,
                   "Type of activations and weights; without it f32 on the CPU, bf16 on a GPU")
      ->check(CLI::IsMember({"f32", "bf16", "f64"}));
  verb->add_option("--threads", options->num_threads, "Threads of the CPU backend")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  verb->add_flag("--json", options->json, "One JSON object in place of the table");
  verb->footer("Example:\n  moesaic bench ops --only kda\n");
  verb->callback([&action, options, dtype] {
    action = [options, dtype] {
      options->dtype =
          dtype->empty() && options->device == "cuda" ? DType::bf16 : dtype_from_name(*dtype);
      return bench::bench_ops(*options, std::cout);
    };
  });
}

void add_step(CLI::App& bench, Action& action) {
  CLI::App* verb = bench.add_subcommand(
      "step", "Time training steps of a configuration on random tokens, and each op in them");
  const auto options = std::make_shared<bench::StepOptions>();
  const auto arguments = std::make_shared<ConfigArguments>();
  add_config_arguments(*verb, *arguments);
  verb->add_option("--steps", options->steps, "Timed steps")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  verb->add_flag("--separate",
                 options->separate,
                 "CUDA: a product and the activation behind it run as two ops, never as one");
  verb->add_flag("--json", options->json, "One JSON object in place of the table");
  verb->footer("Example:\n  moesaic bench step configs/bench_h512.yaml --steps 5\n");
  verb->callback([&action, options, arguments] {
    action = [options, arguments] {
      return bench::bench_step(
          bench::load_without_data(arguments->path, arguments->overrides), *options, std::cout);
    };
  });
}

void add_a2a(CLI::App& bench, Action& action) {
  CLI::App* verb = bench.add_subcommand("a2a",
                                        "Time the exchange of tokens between the ranks of a job, "
                                        "by every method, and count its bytes");
  const auto o = std::make_shared<bench::A2aOptions>();
  const auto dtype = std::make_shared<std::string>("bf16");
  verb->add_option("--tokens", o->tokens, "Tokens per rank")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  verb->add_option("--width", o->width, "Elements per token")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  verb->add_option("--experts", o->experts, "Experts of all ranks")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  verb->add_option("--choices", o->choices, "Experts per token")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  verb->add_option("--zipf",
                   o->zipf,
                   "Exponent of the experts' popularity; 0 = all alike, with expected rows")
      ->check(number_in(0.0, 10.0), "in [0 - 10]")
      ->capture_default_str();
  verb->add_flag("--placed",
                 o->placed,
                 "Experts lie where experts.place_every would put them for what earlier tokens "
                 "chose, not in order");
  verb->add_option("--replicas",
                   o->replicas,
                   "With --placed: slots of every rank for copies of experts inside its node, as "
                   "experts.replicas would fill them")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  verb->add_option("--ranks-per-node",
                   o->ranks_per_node,
                   "Ranks pose as nodes of so many; 0 = nodes by host names")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  verb->add_option(
          "--methods",
          o->methods,
          "pair, flat, inter_first, intra_first, intra_first_3, dense, hdense (default: all)")
      ->delimiter(',');
  verb->add_option("--dtype", *dtype, "Type of the rows")
      ->check(CLI::IsMember({"f32", "bf16", "f64"}))
      ->capture_default_str();
  verb->add_flag("--fp8", o->fp8, "Dispatch sends E4M3 with a scale per 128 elements");
  verb->add_option("--buffer-factor",
                   o->buffer_factor,
                   "Rows that buffers hold, as a multiple of even routing's; 0 = for any routing")
      ->check(number_in(0.0, 1000.0), "in [0 - 1000]")
      ->capture_default_str();
  verb->add_option(
          "--raw", o->raw, "Time bare exchanges, too, of so many MiB with every peer, as in 64,512")
      ->delimiter(',')
      ->check(CLI::Range(1, 65536));
  verb->add_option(
          "--repeats", o->repeats, "Timed rounds, methods taking turns; medians are printed")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  verb->add_option("--seed", o->seed, "Of routing")->capture_default_str();
  verb->add_option("--device", o->device, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  verb->add_flag(
      "--share-gpu",
      o->share_gpu,
      "Ranks may share a GPU (they take turns); posed nodes then meet through the network");
  verb->add_option("--threads", o->num_threads, "Threads of the CPU backend, per rank")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  verb->add_flag("--json", o->json, "One JSON object in place of the table");
  verb->footer(
      "Example:\n  mpirun -np 8 --oversubscribe moesaic bench a2a --ranks-per-node 2 --experts "
      "896\n  mpirun -np 4 moesaic bench a2a --device cuda --share-gpu --ranks-per-node 2   # on "
      "two "
      "GPUs, as two nodes of two\n");
  verb->callback([&action, o, dtype] {
    action = [o, dtype] {
      o->dtype = dtype_from_name(*dtype);
      return bench::bench_a2a(*o);
    };
  });
}

// What is played: a log of a run, or one that is made up.
void add_touches(CLI::App& verb, bench::CacheSimOptions& o) {
  CLI::Option* log = verb.add_option("--log", o.log, "Touch log of a run (docs/memory.md)");
  const auto number =
      [&](const char* name, std::int64_t& value, std::int64_t most, const char* text) {
        verb.add_option(name, value, text)
            ->check(CLI::Range(std::int64_t{1}, most))
            ->capture_default_str()
            ->excludes(log);
      };
  number("--layers", o.layers, 1 << 16, "Layers with experts");
  number("--experts", o.experts, 1 << 16, "Experts of a layer that this rank holds");
  number("--top-k", o.top_k, 1 << 16, "Experts per token");
  number("--tokens",
         o.tokens,
         std::int64_t{1} << 40,
         "Tokens of a micro-batch that reach these experts");
  number("--micro-batches", o.micro_batches, 1 << 16, "Micro-batches of a step");
  number("--steps", o.steps, 1 << 20, "Steps");
  verb.add_option("--zipf", o.zipf, "Exponent of the experts' popularity; 0 = all alike")
      ->check(number_in(0.0, 10.0), "in [0 - 10]")
      ->capture_default_str()
      ->excludes(log);
  verb.add_option("--drift", o.drift, "Share of the ranks of popularity that change every step")
      ->check(number_in(0.0, 1.0), "in [0 - 1]")
      ->capture_default_str()
      ->excludes(log);
  verb.add_flag("--vertical",
                o.vertical,
                "A layer is visited once for all micro-batches (parallel.order: vertical)")
      ->excludes(log);
  verb.add_option("--updates",
                  o.updates,
                  "Whose optimizer states are loaded and written in a step: none, touched, dense")
      ->check(CLI::IsMember({"none", "touched", "dense"}))
      ->capture_default_str()
      ->excludes(log);
}

void add_cache_sim(CLI::App& bench, Action& action) {
  CLI::App* verb = bench.add_subcommand("cache-sim",
                                        "Play a log of used experts, or a made-up one, through the "
                                        "cache policies, to size memory.device_budget");
  const auto o = std::make_shared<bench::CacheSimOptions>();
  add_touches(*verb, *o);
  verb->add_option("--seed", o->seed, "Of the made-up log and of random")->capture_default_str();
  verb->add_option("--budget",
                   o->budgets,
                   "Device memory for experts: sizes (24GiB) or shares of all experts (25%)")
      ->delimiter(',')
      ->capture_default_str();
  verb->add_option("--policy", o->policies, "sched, lru, static, random")
      ->delimiter(',')
      ->check(CLI::IsMember({"sched", "lru", "static", "random"}))
      ->capture_default_str();
  verb->add_option(
          "--expert-bytes", o->expert_bytes, "Weights of an expert (33MiB); 0 = as the log says")
      ->capture_default_str();
  verb->add_option("--state-bytes",
                   o->state_bytes,
                   "What the update of an expert loads and writes besides; 0 = as the log says")
      ->capture_default_str();
  verb->add_option(
      "--host-budget",
      o->host_budget,
      "Host memory for experts and states, a size or a share; the rest lives in the file "
      "tier. Without it all fits");
  verb->add_option("--link", o->link, "Rate between host and device, each way, per second")
      ->capture_default_str();
  verb->add_option("--file-rate",
                   o->file_rate,
                   "Rate of the file tier, reads and writes together, per second")
      ->capture_default_str();
  verb->add_option(
          "--warm-up", o->warm_up, "Steps that fill the cache and do not count (default: a third)")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40));
  verb->add_option("--write-log", o->write_log, "Also write what was played as a touch log");
  verb->add_flag("--json", o->json, "One JSON object in place of the table");
  verb->footer(
      "Example:\n  moesaic bench cache-sim --layers 26 --experts 256 --tokens 16384 --zipf 1 "
      "--expert-bytes 14MB --budget 12GiB,24GiB\n");
  verb->callback([&action, o] { action = [o] { return bench::bench_cache_sim(*o, std::cout); }; });
}

void add_offload(CLI::App& bench, Action& action) {
  CLI::App* verb = bench.add_subcommand(
      "offload", "Time training steps with experts outside of device memory, budget by budget");
  const auto o = std::make_shared<bench::OffloadOptions>();
  const auto arguments = std::make_shared<ConfigArguments>();
  add_config_arguments(*verb, *arguments);
  verb->add_option("--tokens", o->tokens, "Tokens of a step, several in turn")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
      ->capture_default_str();
  verb->add_option(
          "--zipf", o->zipf, "Exponents of the experts' popularity, several in turn; 0 = all alike")
      ->delimiter(',')
      ->check(number_in(0.0, 10.0), "in [0 - 10]")
      ->capture_default_str();
  verb->add_option("--budget,--budgets",
                   o->budgets,
                   "Device memory for experts, as shares of their weights, gradients and states, "
                   "several in turn; steps without offload come first, to compare")
      ->delimiter(',')
      ->capture_default_str();
  verb->add_option("--steps", o->steps, "Timed steps")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  verb->add_flag("--json", o->json, "One JSON object in place of the table");
  verb->footer(
      "Example:\n"
      "  moesaic bench offload configs/bench/mla_moe_5b.yaml parallel.order=vertical "
      "--tokens 65536 --budget 50%,25%\n"
      "  moesaic bench offload configs/quickstart.yaml --tokens 2048 --budget 50%   # on a CPU\n");
  verb->callback([&action, o, arguments] {
    action = [o, arguments] {
      o->config = arguments->path;
      o->overrides = arguments->overrides;
      return bench::bench_offload(*o, std::cout);
    };
  });
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  CLI::App* verb =
      app.add_subcommand("bench",
                         "Measure the speed of ops, of training steps, of the "
                         "exchange of tokens, or of offloaded experts; simulate caches of "
                         "experts");
  verb->require_subcommand(1);
  verb->footer("Example:\n  moesaic bench step configs/quickstart.yaml\n");
  add_ops(*verb, action);
  add_step(*verb, action);
  add_a2a(*verb, action);
  add_cache_sim(*verb, action);
  add_offload(*verb, action);
}

}  // namespace moesaic::apps
