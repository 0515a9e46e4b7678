#pragma once
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/config/load.h"

namespace moesaic::bench {

/// A configuration whose steps are made of random tokens: it needs no data and is not evaluated, whatever it says.
config::LoadedConfig load_without_data(const std::string& path, std::vector<std::string> overrides);

struct StepOptions {
  int steps = 10;
  bool separate = false;  ///< CUDA: what several ops can do in one kernel runs as those
  bool json = false;
};
/// Trains on random tokens in this process alone: a few steps to warm up, `steps` timed ones, then as many with every op
/// timed. Prints rates and where the time goes.
int bench_step(const config::LoadedConfig& loaded, const StepOptions& options, std::ostream& out);

struct OpsOptions {
  std::string only;            ///< part of an op's name; empty = all
  std::string device = "cpu";  ///< cpu: sizes of small models; cuda: sizes of large ones
  DType dtype = DType::f32;
  bool plain = false;     ///< CUDA ops take the kernels for any size
  bool separate = false;  ///< as in StepOptions
  int num_threads = 1;
  bool json = false;
};
/// Times every op on random data. On a GPU, rates are compared with a copy and a product measured in the same run, and
/// the kernel that ran is named where an op has several.
int bench_ops(const OpsOptions& options, std::ostream& out);

struct A2aOptions {
  std::int64_t tokens = 96, width = 3584, experts = 64, choices = 16;
  double zipf = 0;
  bool placed = false;               ///< experts where their load asks for, else in order
  int replicas = 0;                  ///< slots of a rank for copies of placed experts
  int ranks_per_node = 0;            ///< 0: by host names
  std::vector<std::string> methods;  ///< empty = all
  std::vector<std::int64_t> raw;     ///< MiB to each peer of bare exchanges
  DType dtype = DType::bf16;
  bool fp8 = false;  ///< dispatch sends E4M3 with a scale per 128 elements
  double buffer_factor = 1.5;
  int repeats = 5;
  std::uint64_t seed = 1;
  std::string device = "cpu";
  bool share_gpu = false;
  int num_threads = 1;
  bool json = false;
};
/// Dispatches and combines random tokens between all ranks of the job, by every method in turn, and compares counted with
/// expected rows. Checks every result. Returns an exit code: 1 when the rows of a plan are not those of the routing.
int bench_a2a(const A2aOptions& options);

struct CacheSimOptions {
  std::string log;  ///< a touch log; empty: one is made up from the next members
  std::int64_t layers = 24, experts = 64, top_k = 8, tokens = 8192, micro_batches = 4, steps = 12;
  double zipf = 0, drift = 0.02;
  std::uint64_t seed = 1;
  bool vertical = false;
  std::string updates = "none";
  std::vector<std::string> budgets{
      "10%", "25%", "50%", "75%"};  ///< sizes, or shares of all experts
  std::vector<std::string> policies{"sched", "lru", "static", "random"};
  std::string expert_bytes = "0", state_bytes = "0";  ///< 0: as the log says
  std::string host_budget;                            ///< empty: no file tier
  std::string link = "50GB", file_rate = "1500MB";    ///< per second
  std::optional<std::int64_t> warm_up;                ///< steps; empty: a third
  std::string write_log;
  bool json = false;
};
/// Plays the log through the cache policies of a run, under every budget, and prints hits, bytes and times beside the
/// bound of any policy.
int bench_cache_sim(const CacheSimOptions& options, std::ostream& out);

struct OffloadOptions {
  std::string config;
  std::vector<std::string> overrides;
  std::vector<std::int64_t> tokens{16384, 65536};  ///< of a step
  std::vector<double> zipf{0};  ///< routings: exponents of the experts' popularity
  std::vector<std::string> budgets{
      "100%", "75%", "50%", "25%", "10%"};  ///< shares of the bytes of all experts
  int steps = 5;
  bool json = false;
};
/// Trains the same steps without offload and with every budget of the experts' caches, and prints speeds beside what the
/// links and the products allow. Tokens go to drawn experts. Throws InternalError when a loss differs.
int bench_offload(const OffloadOptions& options, std::ostream& out);

}  // namespace moesaic::bench
