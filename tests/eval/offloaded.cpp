// Models that only run forward with experts outside of the device: the bits of those with everything there, memory as it was
// planned, and what is refused.
#include <algorithm>
#include <cstdint>
#include <map>

#include "core/base/memory_shortage.h"
#include "memory/tiers/scratch_file.h"
#include "tests/eval/saved_run.h"
#include "tests/support/catch.h"

namespace moesaic::apps {
namespace {

using test::Held;
using test::same_bits;
using test::Saved;

// Three layers of experts with the MTP module's, 24 blocks of 3 KiB in f32, of which a batch visits two layers.
const std::vector<std::string> kModel{"run.precision=f32", "train.micro_batch_size=2"};

std::vector<std::string> with(std::vector<std::string> all, const std::vector<std::string>& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

// What a model makes of some batches.
struct Outputs {
  std::vector<double> losses, logp, logits;
  std::vector<TierCounters> counters;
  bool operator==(const Outputs& o) const {
    return same_bits(losses, o.losses) && same_bits(logp, o.logp) && same_bits(logits, o.logits);
  }
};

class Checkpoint {
 public:
  explicit Checkpoint(const std::vector<std::string>& overrides)
      : saved_(overrides), held_(saved_.run.config), path_(saved_.save()), overrides_(overrides) {}

  config::Config config(const std::vector<std::string>& overrides) const {
    config::Config changed = moesaic::test::hybrid_config(with(overrides_, overrides));
    changed.data = saved_.run.config.data;
    return changed;
  }
  LoadedModel::Options options(bool average = false) const {
    return {.checkpoint = path_, .average = average, .device = kCpu, .windows = {held_.window}};
  }
  ForwardPlan plan(const std::vector<std::string>& overrides) const {
    return LoadedModel::plan(config(overrides), options());
  }
  Outputs outputs(const std::vector<std::string>& overrides, bool average = false) const {
    LoadedModel model(config(overrides), options(average));
    Outputs out;
    for (std::int64_t b = 0; b < 4; ++b) {
      const data::Batch batch = held_.windows.batch({b * held_.micro, held_.micro});
      out.losses.push_back(model.loss(batch));
      const auto logp = model.log_probabilities(batch), logits = model.logits(batch, 3 * b);
      out.logp.insert(out.logp.end(), logp.begin(), logp.end());
      out.logits.insert(out.logits.end(), logits.begin(), logits.end());
    }
    out.counters = model.counters();
    return out;
  }
  std::filesystem::path folder() const { return path_.parent_path() / "tier"; }
  std::vector<std::string> in_file(const std::string& host, const std::string& file) const {
    return {"memory.host_budget=" + host,
            "memory.file_budget=" + file,
            "memory.file_path=" + folder().string()};
  }

 private:
  Saved saved_;
  Held held_;
  std::filesystem::path path_;
  std::vector<std::string> overrides_;
};

TierCounters sum(const std::vector<TierCounters>& all) {
  TierCounters total;
  for (const TierCounters& c : all)
    total += c;
  return total;
}

std::string shortage(const Checkpoint& checkpoint,
                     const std::vector<std::string>& overrides,
                     MemoryShortage::Where where) {
  try {
    checkpoint.plan(overrides);
  } catch (const MemoryShortage& e) {
    CHECK(e.where() == where);
    CHECK(e.exit_code() == ExitCode::resource);
    return e.what();
  }
  return "nothing is lacking";
}

bool says(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

std::size_t bytes_of(const std::vector<MemoryUse>& parts, const std::string& tag) {
  std::size_t bytes = 0;
  for (const MemoryUse& use : parts)
    bytes += use.tag == tag ? use.bytes : 0;
  return bytes;
}

const std::vector<std::string> kFull{"experts.offload=full"};

}  // namespace

TEST_CASE("experts outside of the device: every policy and home gives the bits of those there") {
  const Checkpoint checkpoint(kModel);
  const Outputs resident = checkpoint.outputs({});
  CHECK(resident.counters.empty());
  REQUIRE(resident.losses.size() == 4);
  CHECK(resident.losses[0] != resident.losses[1]);
  for (const std::string policy : {"sched", "lru", "static", "random"}) {
    for (const bool is_in_file : {false, true}) {
      INFO(policy << (is_in_file ? " in the file" : ""));
      auto overrides = with(kFull, {"experts.policy=" + policy, "experts.device_cache=40KiB"});
      if (is_in_file) overrides = with(overrides, checkpoint.in_file("96KiB", "1MiB"));
      const Outputs offloaded = checkpoint.outputs(overrides);
      CHECK(offloaded == resident);
      const TierCounters all = sum(offloaded.counters);
      CHECK(offloaded.counters.size() == 2);
      CHECK(all.cache.loads > 20);
      CHECK(all.cache.bytes_up > 0);
      // Nothing changes, so nothing goes home.
      CHECK(all.cache.write_backs == 0);
      CHECK((all.file_bytes_read > 0) == is_in_file);
      CHECK((!is_in_file || std::filesystem::is_empty(checkpoint.folder())));
    }
  }
}

TEST_CASE("experts outside of the device: every kind of masters, and averages") {
  const std::vector<std::vector<std::string>> types{
      {"run.precision=f64"},
      {"run.precision=bf16", "optimizer.master=split"},
      {"run.precision=bf16", "optimizer.master=f32", "optimizer.ema_decay=0.9"}};
  for (const auto& type : types) {
    INFO(type.back());
    const Checkpoint checkpoint(with({"train.micro_batch_size=2"}, type));
    const std::string cache = type[0] == "run.precision=f64" ? "80KiB" : "20KiB";
    const auto overrides = with(kFull, {"experts.device_cache=" + cache});
    const Outputs resident = checkpoint.outputs({}), offloaded = checkpoint.outputs(overrides);
    CHECK(offloaded == resident);
    CHECK(sum(offloaded.counters).cache.loads > 20);
    if (type.size() < 3) continue;
    const Outputs averaged = checkpoint.outputs({}, true);
    CHECK_FALSE(averaged == resident);
    CHECK(checkpoint.outputs(overrides, true) == averaged);
  }
}

TEST_CASE("experts outside of the device: in the folder that a training run uses") {
  const Checkpoint checkpoint(kModel);
  const Outputs resident = checkpoint.outputs({});
  const auto overrides =
      with(with(kFull, {"experts.device_cache=40KiB"}), checkpoint.in_file("96KiB", "1MiB"));
  const tiers::ScratchFile of_training(
      {.folder = checkpoint.folder(), .rank = 0, .name = "gate_up-weights", .records = 1},
      tiers::RecordLayout({{"weight", 64}}));
  const Outputs offloaded = checkpoint.outputs(overrides);
  CHECK(offloaded == resident);
  CHECK(sum(offloaded.counters).file_bytes_read > 0);
  CHECK(std::filesystem::exists(of_training.path()));
}

TEST_CASE("experts outside of the device: the schedule of forwards finds what it kept") {
  const Checkpoint checkpoint(kModel);
  const auto hits = [&](const std::string& policy) {
    const Outputs out =
        checkpoint.outputs(with(kFull, {"experts.policy=" + policy, "experts.device_cache=30KiB"}));
    const TierCounters all = sum(out.counters);
    return static_cast<double>(all.cache.hits) / static_cast<double>(all.cache.uses);
  };
  // Layer after layer, again and again: what was used last is used last again.
  const double sched = hits("sched"), lru = hits("lru");
  INFO("sched " << sched << ", lru " << lru);
  CHECK(sched > 0.3);
  CHECK(sched > lru + 0.1);
}

TEST_CASE("models that only run forward: with room for everything nothing is offloaded") {
  const Checkpoint checkpoint(kModel);
  CHECK(checkpoint.outputs(kFull).counters.empty());
  CHECK(checkpoint.outputs(with(kFull, {"memory.device_budget=64MiB"})).counters.empty());
  const ForwardPlan plan = checkpoint.plan({});
  const auto bytes = [](std::size_t n) { return std::to_string(n) + "B"; };
  const std::size_t all = plan.memory.total();
  CHECK_FALSE(checkpoint.plan(with(kFull, {"memory.device_budget=" + bytes(all)})).memory.tiers);
  CHECK(checkpoint.plan(with(kFull, {"memory.device_budget=" + bytes(all - 1)})).memory.tiers);
}

TEST_CASE("models that only run forward: weights alone, as much memory as was planned") {
  const Checkpoint split({"run.precision=bf16", "optimizer.master=split"});
  const std::vector<std::vector<std::string>> cases{
      {},
      with(kFull, {"experts.device_cache=20KiB"}),
      with(with(kFull, {"experts.device_cache=20KiB"}), split.in_file("40KiB", "1MiB"))};
  for (const auto& overrides : cases) {
    INFO(overrides.size());
    const ForwardPlan plan = split.plan(overrides);
    CHECK(bytes_of(plan.memory.parts, "weights") > 0);
    for (const char* tag :
         {"master weights", "gradients", "experts' gate_up gradients", "experts' gate_up states"})
      CHECK(bytes_of(plan.memory.parts, tag) + bytes_of(plan.memory.host, tag) == 0);
    std::map<std::string, std::size_t> before;
    for (const MemoryUse& use : memory_in_use())
      before[use.tag] = use.bytes;
    const LoadedModel model(split.config(overrides), split.options(), plan);
    std::size_t used = 0;
    for (const MemoryUse& use : memory_in_use()) {
      // Small, and on the host with any model.
      if (use.tag == "batch, host" || use.tag == "results, host" ||
          use.tag == "experts' staging, host")
        continue;
      used += use.bytes - before[use.tag];
    }
    std::size_t planned = plan.memory.total();
    for (const MemoryUse& use : plan.memory.host)
      planned += use.bytes;
    CHECK(used == planned);
    if (overrides.empty()) continue;
    const std::size_t budget = overrides.size() == 2 ? std::size_t{1} << 20 : 40 << 10;
    std::size_t host = 0;
    for (const MemoryUse& use : plan.memory.host)
      host += use.bytes;
    CHECK(host <= budget);
    CHECK(plan.memory.file.empty() == (overrides.size() == 2));
  }
}

TEST_CASE("models that only run forward: what is lacking is told with numbers and keys") {
  const Checkpoint checkpoint(kModel);
  using Where = MemoryShortage::Where;
  const std::string without = shortage(checkpoint, {"memory.device_budget=100KiB"}, Where::device);
  CHECK(says(without, "memory.device_budget is 102400 bytes, and this model needs "));
  CHECK(says(without, "Set experts.offload=full"));
  CHECK(says(without, "or raise memory.device_budget"));
  const std::string caches =
      shortage(checkpoint, with(kFull, {"experts.device_cache=1KiB"}), Where::device);
  CHECK(says(caches, "Raise experts.device_cache to at least"));
  const std::string rest =
      shortage(checkpoint, with(kFull, {"memory.device_budget=100KiB"}), Where::device);
  CHECK(says(rest, "and the rest of the run needs"));
  CHECK(says(rest, "Raise memory.device_budget to at least"));
  CHECK(says(rest, "data.sequence_length"));
  CHECK_FALSE(says(rest, "activations.recompute"));
  const auto cached = with(kFull, {"experts.device_cache=40KiB"});
  const std::string host =
      shortage(checkpoint, with(cached, {"memory.host_budget=10KiB"}), Where::host);
  CHECK(says(host, "memory.host_budget is 10KiB"));
  CHECK(says(host, "However large a file is, at least "));
  CHECK(says(shortage(checkpoint, with(cached, {"memory.host_budget=30KiB"}), Where::host),
             "memory.file_path and memory.file_budget"));
  const std::string file =
      shortage(checkpoint, with(cached, checkpoint.in_file("30KiB", "12KiB")), Where::host);
  CHECK(says(file, "memory.file_budget (12KiB) does not hold the rest"));
  // What the message asks for is enough.
  const std::size_t at = rest.find("to at least ") + 12;
  const std::string enough = rest.substr(at, rest.find_first_not_of("0123456789", at) - at) + "KiB";
  CHECK(checkpoint.plan(with(kFull, {"memory.device_budget=" + enough})).memory.tiers);
}

}  // namespace moesaic::apps
