#include "tests/train/run.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <unistd.h>

#include "core/base/random.h"
#include "core/checkpoint/boxes.h"
#include "core/config/load.h"
#include "core/data/open_data.h"
#include "core/model/from_config.h"
#include "core/model/pipeline_plan.h"
#include "core/train/optimizer_config.h"
#include "tests/support/catch.h"

namespace moesaic::test {
namespace {

constexpr const char* kConfig = R"(
run: {device: cpu, precision: f64, seed: 3, threads: 1}
model:
  hidden_size: 32
  num_hidden_layers: 3
  vocab_size: 256
  intermediate_size: 48
  hidden_act: situ
  initializer_range: 0.1
  linear_attn_config:
    kda_layers: [1, 2]
    full_attn_layers: [3]
    num_heads: 2
    head_dim: 16
    gate_lower_bound: -5.0
    use_full_rank_gate: true
  num_attention_heads: 2
  q_lora_rank: 16
  kv_lora_rank: 16
  qk_nope_head_dim: 12
  qk_rope_head_dim: 4
  v_head_dim: 12
  mla_use_nope: true
  mla_use_output_gate: true
  indexer: {index_n_heads: 2, index_head_dim: 8, index_topk: 12}
  num_experts: 8
  num_experts_per_token: 2
  num_shared_experts: 1
  moe_intermediate_size: 16
  routed_expert_hidden_size: 16
  first_k_dense_replace: 1
  balance: {bias_rule: quantile, histogram_bins: 101, z_loss_weight: 0.001}
  residual: {type: attention, attn_res_block_size: 2}
  mtp: {num_nextn_predict_layers: 1}
data: {train: TEXT, sequence_length: 64}
train: {steps: 20, global_batch_size: 4, micro_batch_size: 1}
optimizer: {name: adamw, lr: 3e-3, lr_schedule: constant, warmup_steps: 3}
)";

/// Words with some structure, in documents of 1 to 150 bytes: several fit into one sequence.
std::string generated_text() {
  static const char* const words[] = {
      "one ", "two ", "three ", "red ", "green ", "blue ", "and ", "then "};
  std::string text;
  std::uint64_t n = 0;
  for (int document = 0; document < 120; ++document) {
    const auto length =
        static_cast<std::size_t>(1 + uniform(11, static_cast<std::uint64_t>(document)) * 150);
    std::string body;
    while (body.size() < length)
      body += words[static_cast<std::size_t>(uniform(12, n++) * 8)];
    text += body.substr(0, length) + "\n\f\n";
  }
  return text;
}

class TextFile {
 public:
  TextFile()
      : folder_(std::filesystem::temp_directory_path() /
                ("moesaic_train_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_);
    std::ofstream(path()) << generated_text();
  }
  ~TextFile() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::string path() const { return (folder_ / "text.txt").string(); }

 private:
  std::filesystem::path folder_;
};

template <class T>
double relative_error(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size() / sizeof(T); ++i) {
    T x{}, y{};
    std::memcpy(&x, a.data() + i * sizeof(T), sizeof(T));
    std::memcpy(&y, b.data() + i * sizeof(T), sizeof(T));
    difference = std::max(difference, std::abs(static_cast<double>(x - y)));
    size = std::max(size, std::abs(static_cast<double>(y)));
  }
  return difference == 0 ? 0 : difference / size;
}

}  // namespace

config::Config hybrid_config(const std::vector<std::string>& overrides) {
  static const TextFile text;
  std::string yaml = kConfig;
  yaml.replace(yaml.find("TEXT"), 4, text.path());
  return config::load_config_text(yaml, "hybrid.yaml", overrides).config;
}

namespace {

// Several of this small model.
std::optional<StateSharding> small_buckets(const config::Config& config, Model& model) {
  auto sharding = state_sharding(config, model);
  if (sharding) sharding->bucket_bytes = std::int64_t{32} << 10;
  return sharding;
}

// Slots for the share that is to be on the device.
TierGroupOptions room(const TierGroup& group, const Offload& offload, bool in_ring) {
  const auto share = [](double part, std::int64_t of) {
    return static_cast<std::int64_t>(std::ceil(part * static_cast<double>(of)));
  };
  const auto slots = [&](std::int64_t of) {
    return std::max(share(offload.on_device, of), tiers::DeviceCache::kMinSlots);
  };
  const std::int64_t least_ring = std::min(group.members + 1, group.blocks()),
                     gradients = slots(group.blocks());
  return {.weight_slots = offload.weights ? slots(group.blocks()) : 0,
          .gradient_slots = !offload.weights || !group.trained ? 0
                            : in_ring                          ? std::max(least_ring, gradients)
                                                               : gradients,
          .state_slots = slots(group.owned),
          .weights_in_file = offload.weights ? share(offload.in_file, group.blocks()) : 0,
          .states_in_file = share(offload.in_file, group.owned),
          .staging_slots = offload.in_file > 0 ? 3 : 0};
}

ExpertTierOptions tier_options(const config::Config& config,
                               const MeshPosition& position,
                               Device device,
                               const Offload& offload) {
  static std::atomic<int> count{0};
  ExpertTierOptions options;
  options.weights = offload.weights;
  options.gradients_in_ring = config.experts.update == config::ExpertUpdateTime::in_backward;
  options.policy = offload.policy;
  options.seed = 5;
  options.state_kinds = expert_state_kinds(optimizer_options(config.optimizer));
  options.folder = std::filesystem::temp_directory_path() /
                   fmt::format("moesaic_train_{}", getpid()) / fmt::format("tiers{}", count++);
  options.io = tiers::IoKind::threads;
  options.poison = device == kCpu;
  ParameterStore declared(precision_of(config, device != kCpu), position);
  Model model(declared, model_options(config), stage_share(config, position));
  if (const auto sharding = small_buckets(config, model)) declared.shard_state(*sharding);
  declared.offload_experts(options);
  declared.seal_pretend(device, ever_trained(make_phases(config), declared));
  for (const TierGroup& group : declared.tier_groups(options.state_kinds))
    options.groups.push_back(room(group, offload, options.gradients_in_ring));
  return options;
}

}  // namespace

Run::Run(const config::Config& c,
         Communicator* world,
         Stream::Mode mode,
         Device device,
         std::int64_t run_limit,
         const std::optional<Offload>& offload,
         const offload::Disturbance& disturbance)
    : config(c) {
  if (world != nullptr) mesh = std::make_unique<Mesh>(mesh_config(config.parallel), *world);
  const MeshPosition position = mesh ? mesh->position() : MeshPosition();
  const Precision precision = precision_of(config, device != kCpu);
  params = std::make_unique<ParameterStore>(precision, position);
  params->limit_runs(run_limit);
  model = std::make_unique<Model>(*params, model_options(config), stage_share(config, position));
  if (const auto sharding = small_buckets(config, *model)) params->shard_state(*sharding);
  if (offload) {
    ExpertTierOptions options = tier_options(config, position, device, *offload);
    options.stream_mode = mode;
    params->offload_experts(std::move(options));
  }
  params->seal(device, ever_trained(make_phases(config), *params));
  params->initialize(static_cast<std::uint64_t>(config.run.seed));
  // Patterns of names are about the whole model, of which a stage of a pipeline holds a part.
  ParameterStore whole(precision, position);
  const bool is_part = position.extent(Axis::pp) > 1;
  if (is_part) {
    Model(whole, model_options(config));
    whole.seal_pretend(device, ever_trained(make_phases(config), whole));
  }
  optimizer = std::make_unique<Optimizer>(
      *params, optimizer_options(config.optimizer), is_part ? &whole : nullptr);
  trainer = std::make_unique<Trainer>(
      Trainer::Parts{.config = &config,
                     .mesh = mesh.get(),
                     .ranks_per_node = static_cast<int>(config.comm.ranks_per_node.value_or(0)),
                     .params = params.get(),
                     .model = model.get(),
                     .optimizer = optimizer.get(),
                     .train = data::open_training_data(config),
                     .valid = data::open_tokens(config.data.train, config),
                     .device = device,
                     .recompute = recompute_policy(config.activations),
                     .stream_mode = mode,
                     .offload_disturbance = disturbance});
}

std::vector<StepStats> Run::steps(int n) {
  std::vector<StepStats> all;
  for (int i = 0; i < n; ++i)
    all.push_back(step());
  return all;
}

Snapshot Run::snapshot() {
  trainer->stream().synchronize();
  Snapshot all;
  for (const StateTensor& t : trainer->state()) {
    MOESAIC_CHECK(all.count(t.name) == 0,
                  t.name + " appears twice");  // ranks are threads: no assertions of the test here
    all[t.name] = bytes_of_state(t, trainer->stream());
  }
  return all;
}

Snapshot Run::weights_of_kernels() {
  Snapshot all;
  for (std::size_t i = 0; i < params->params().size(); ++i) {
    const ParamId id{static_cast<std::int32_t>(i)};
    const StorageId storage = params->storage_of(id);
    for (std::int64_t e = 0; e < params->members_here(id); ++e) {
      std::vector<std::byte>& bytes = all[params->member_name(id, e)];
      if (params->has_tiered_weights(storage)) {
        params->tiers()->with_host(storage, e, {}, MemberAccess::read, [&](const TensorView& m) {
          const TensorView weight = params->box_of_member(m, id);
          bytes.assign(weight.data(), weight.data() + weight.bytes());
        });
        continue;
      }
      const TensorView weight = params->weight(id, e);
      bytes.resize(weight.bytes());
      copy_tensor(
          TensorView(bytes.data(), weight.dtype(), weight.shape()), weight, trainer->stream());
    }
  }
  trainer->stream().synchronize();
  return all;
}

void Run::add_to(Snapshot& whole, std::mutex& mutex) {
  const Snapshot own = snapshot();
  const std::lock_guard lock(mutex);
  for (const StateTensor& t : trainer->state()) {
    std::vector<std::byte>& bytes = whole[t.name];
    const std::size_t element = byte_size(t.dtype());
    bytes.resize(static_cast<std::size_t>(t.whole().numel()) * element);
    Shape begin;
    begin.rank = t.shape().rank;
    const Box piece{t.place ? t.place->begin : begin, t.shape()};
    copy_box(bytes.data(), whole_box(t.whole()), own.at(t.name).data(), piece, piece, element);
  }
}

void Run::restore(const Snapshot& tensors, const StateValues& values) {
  for (const StateTensor& t : trainer->state()) {
    const std::size_t element = byte_size(t.dtype());
    std::vector<std::byte> own(t.bytes());
    Shape begin;
    begin.rank = t.shape().rank;
    const Box piece{t.place ? t.place->begin : begin, t.shape()};
    copy_box(own.data(), piece, tensors.at(t.name).data(), whole_box(t.whole()), piece, element);
    fill_state(t, own.data(), trainer->stream());
  }
  trainer->stream().synchronize();
  trainer->load_values(values);
}

void save_together(Run& run, Communicator& world, const std::filesystem::path& folder) {
  const auto own = run.trainer->owned_state();
  std::string to;
  if (world.rank() == 0)
    to = begin_checkpoint(folder, run.trainer->steps_done(), std::uint64_t{1} << 20).string();
  world.broadcast_host(to, 0);
  const auto parts = world.all_gather_host(write_checkpoint_part(
      to, fmt::format("rank{:05}", world.rank()), own, run.trainer->stream()));
  if (world.rank() == 0)
    commit_checkpoint(to, run.trainer->steps_done(), run.trainer->values(), "", parts, 0, 0);
  world.barrier();
}

void load_newest(Run& run, const std::filesystem::path& folder) {
  const auto checkpoint = latest_checkpoint(folder);
  MOESAIC_CHECK(checkpoint.has_value(), "no checkpoint");
  run.trainer->load_values(load_checkpoint(
      checkpoint->path, run.trainer->state(), !run.trainer->is_split(), run.trainer->stream()));
}

JobResult run_job(const config::Config& config,
                  int ranks,
                  int steps,
                  Stream::Mode mode,
                  const std::optional<Offload>& offload) {
  JobResult result;
  result.states.resize(static_cast<std::size_t>(ranks));
  result.weights.resize(result.states.size());
  Snapshot gathered;
  std::mutex mutex;
  run_local_ranks(ranks, [&](Communicator& world) {
    Run run(config, &world, mode, kCpu, 0, offload);
    const auto stats = run.steps(steps);
    const auto rank = static_cast<std::size_t>(world.rank());
    if (world.rank() == 0) result.stats = stats;
    result.weights[rank] = run.weights_of_kernels();
    if (run.params->buckets().empty()) {
      result.states[rank] = run.snapshot();
    } else {
      run.add_to(gathered, mutex);
    }
  });
  for (Snapshot& state : result.states) {
    if (state.empty()) state = gathered;  // every rank keeps its pieces of one state
  }
  return result;
}

std::string differences(const Snapshot& a, const Snapshot& b, const std::string& only_prefix) {
  std::string names;
  const auto wanted = [&](const std::string& name) {
    return name.compare(0, only_prefix.size(), only_prefix) == 0;
  };
  for (const auto& [name, bytes] : a) {
    const auto other = b.find(name);
    if (wanted(name) && (other == b.end() || other->second != bytes)) names += name + " ";
  }
  for (const auto& [name, bytes] : b) {
    if (wanted(name) && a.count(name) == 0) names += name + " ";
  }
  return names;
}

double largest_relative_error(const Snapshot& a, const Snapshot& b, std::string& worst) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (const auto& [name, bytes] : b) {
    const double error = relative_error<double>(a.at(name), bytes);
    if (!(error > largest)) continue;
    largest = error;
    worst = name;
  }
  return largest;
}

bool same_numbers(const StepStats& a, const StepStats& b) {
  const auto reals = [](const StepStats& s) {
    return std::array<double, 7>{
        s.loss, s.mtp_loss, s.indexer_kl, s.balance_loss, s.router_z, s.grad_norm, s.learning_rate};
  };
  const auto x = reals(a), y = reals(b);  // bits, because a skipped step's norm is not a number
  return std::memcmp(x.data(), y.data(), sizeof(x)) == 0 && a.step == b.step &&
         a.tokens == b.tokens && a.skipped == b.skipped &&
         std::equal(a.experts.begin(),
                    a.experts.end(),
                    b.experts.begin(),
                    b.experts.end(),
                    [](const ExpertLoad& m, const ExpertLoad& n) {
                      return m.layer == n.layer && m.tokens == n.tokens &&
                             m.bias_min == n.bias_min && m.bias_max == n.bias_max;
                    });
}

}  // namespace moesaic::test
