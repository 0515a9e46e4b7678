#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <numeric>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/bench/bench.h"
#include "apps/text_table.h"
#include "core/base/error.h"
#include "core/config/scalar.h"
#include "memory/tiers/cache_simulation.h"

namespace moesaic::bench {
namespace {

using namespace tiers;

// A budget as given, and the blocks that it holds.
struct Budget {
  std::string text;
  std::int64_t slots = 0;
};

std::uint64_t bytes_from(const std::string& option, const std::string& text) {
  const auto parsed = config::parse_bytes(text);
  if (!parsed.value)
    throw UsageError(
        fmt::format("{} {}: {}",
                    option,
                    text,
                    parsed.error.empty() ? "is no size; write for example 80GiB" : parsed.error));
  if (*parsed.value < 0) throw UsageError(fmt::format("{} {}: is negative", option, text));
  return static_cast<std::uint64_t>(*parsed.value);
}

// "25%", or a size.
Budget budget_from(const std::string& option, const std::string& text, const TouchLog& log) {
  if (!text.empty() && text.back() == '%') {
    const auto percent = config::parse_number(text.substr(0, text.size() - 1));
    if (!percent.value || *percent.value < 0 || *percent.value > 100)
      throw UsageError(fmt::format("{} {}: a share of all experts is 0% to 100%", option, text));
    return {
        text,
        std::llround(std::floor(*percent.value / 100 * static_cast<double>(log.blocks()) + 1e-9))};
  }
  const std::uint64_t bytes = bytes_from(option, text);
  if (log.expert_bytes == 0)
    throw UsageError(
        fmt::format("{} {}: the log does not say how large an expert is; give --expert-bytes, or "
                    "the budget as a share (25%)",
                    option,
                    text));
  const auto slots = static_cast<std::int64_t>(
      std::min<std::uint64_t>(bytes / log.expert_bytes, static_cast<std::uint64_t>(log.blocks())));
  return {text, slots};
}

TouchLog log_from(const CacheSimOptions& o) {
  const std::uint64_t expert = bytes_from("--expert-bytes", o.expert_bytes);
  const std::uint64_t state = bytes_from("--state-bytes", o.state_bytes);
  if (!o.log.empty()) {
    TouchLog log = read_touch_log(o.log);
    if (expert > 0) log.expert_bytes = expert;
    if (state > 0) log.state_bytes = state;
    return log;
  }
  if (o.top_k > o.experts)
    throw UsageError(fmt::format(
        "--top-k {}: a token chooses among --experts {} different ones", o.top_k, o.experts));
  // About what is kept at a time; beyond, the numbers were mistyped.
  if (static_cast<double>(o.layers) * static_cast<double>(o.experts) *
          static_cast<double>(o.micro_batches) * static_cast<double>(o.steps) >
      4e8)
    throw UsageError(
        "--layers x --experts x --micro-batches x --steps is more than 400 million; simulate fewer "
        "--steps");
  return draw_touch_log({.layers = static_cast<std::int32_t>(o.layers),
                         .experts = static_cast<std::int32_t>(o.experts),
                         .top_k = o.top_k,
                         .tokens = o.tokens,
                         .micro_batches = static_cast<std::int32_t>(o.micro_batches),
                         .steps = o.steps,
                         .zipf = o.zipf,
                         .drift = o.drift,
                         .seed = o.seed,
                         .order = o.vertical ? VisitOrder::vertical : VisitOrder::horizontal,
                         .updates = o.updates == "none"      ? Updates::none
                                    : o.updates == "touched" ? Updates::touched
                                                             : Updates::dense,
                         .expert_bytes = expert,
                         .state_bytes = state});
}

/// Per step, of one policy under one budget.
struct Row {
  std::string policy;
  CacheCounts counts;
  double up = 0, down = 0, file_read = 0, file_written = 0;  ///< bytes
  double link_seconds = 0, file_seconds = 0;
};

class CacheSim {
 public:
  explicit CacheSim(const CacheSimOptions& options) : o_(options), log_(log_from(options)) {
    link_ = static_cast<double>(bytes_from("--link", o_.link));
    file_ = static_cast<double>(bytes_from("--file-rate", o_.file_rate));
    if (link_ == 0 || file_ == 0) throw UsageError("--link and --file-rate are above 0");
    const std::int64_t steps = log_.steps();
    const std::int64_t warm_up = o_.warm_up.value_or(steps / 3);
    if (warm_up >= steps)
      throw UsageError(
          fmt::format("--warm-up {}: of {} steps at least one must count", warm_up, steps));
    counted_ = steps - warm_up;
    first_counted_ = step_number(warm_up);
    for (const std::string& text : o_.budgets) {
      budgets_.push_back(budget_from("--budget", text, log_));
      if (budgets_.back().slots == 0) refuse_empty(text);
    }
    place();
  }

  void run() {
    for (const Budget& budget : budgets_) {
      std::vector<Row> rows;
      for (const std::string& name : o_.policies) {
        const auto policy = make(name);
        rows.push_back(row(name,
                           simulate(log_,
                                    *policy,
                                    {.slots = budget.slots,
                                     .first_counted_step = first_counted_,
                                     .in_file = in_file_})));
      }
      rows.push_back(row("belady", belady(log_, budget.slots, first_counted_)));
      results_.push_back(std::move(rows));
    }
  }

  void print(std::ostream& out) const {
    out << head();
    const bool has_bytes = log_.expert_bytes > 0, has_file = !in_file_.empty();
    std::vector<std::string> heading{"budget", "experts", "policy", "hit %", "loads"};
    if (has_bytes) heading.insert(heading.end(), {"up", "down", "link s"});
    if (has_file) heading.insert(heading.end(), {"file loads", "file s"});
    TextTable table("lrlrrrrrrr", heading);
    for (std::size_t b = 0; b < budgets_.size(); ++b) {
      for (const Row& r : results_[b]) {
        const bool first = &r == &results_[b].front(), bound = r.policy == "belady";
        std::vector<std::string> cells{first ? budgets_[b].text : "",
                                       first ? grouped(budgets_[b].slots) : "",
                                       r.policy,
                                       fmt::format("{:.1f}", 100 * r.counts.hit_rate()),
                                       grouped(std::llround(per_step(r.counts.loads())))};
        if (has_bytes)
          cells.insert(cells.end(),
                       {size(r.up), size(r.down), fmt::format("{:.3f}", r.link_seconds)});
        if (has_file && bound) cells.insert(cells.end(), {"", ""});
        if (has_file && !bound)
          cells.insert(cells.end(),
                       {grouped(std::llround(per_step(r.counts.file_loads))),
                        has_bytes ? fmt::format("{:.3f}", r.file_seconds) : "-"});
        table.row(std::move(cells));
      }
    }
    out << table.text();
    out << foresight();
  }

  nlohmann::ordered_json json() const {
    nlohmann::ordered_json j{
        {"log", o_.log.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(o_.log)},
        {"layers", log_.layers},
        {"experts", log_.experts},
        {"steps", log_.steps()},
        {"counted_steps", counted_},
        {"visits_per_step", log_.schedule().size()},
        {"uses_per_step", uses_per_step()},
        {"expert_bytes", log_.expert_bytes},
        {"state_bytes", log_.state_bytes},
        {"link_bytes_per_second", link_},
        {"file_bytes_per_second", file_},
        {"experts_in_file", std::count(in_file_.begin(), in_file_.end(), 1)}};
    j["budgets"] = nlohmann::ordered_json::array();
    for (std::size_t b = 0; b < budgets_.size(); ++b) {
      nlohmann::ordered_json one{
          {"budget", budgets_[b].text},
          {"slots", budgets_[b].slots},
          {"bytes", static_cast<std::uint64_t>(budgets_[b].slots) * log_.expert_bytes}};
      for (const Row& r : results_[b]) {
        nlohmann::ordered_json p{{"policy", r.policy},
                                 {"uses", r.counts.uses},
                                 {"hits", r.counts.hits},
                                 {"hit_rate", r.counts.hit_rate()},
                                 {"loads_per_step", per_step(r.counts.loads())},
                                 {"up_bytes_per_step", r.up},
                                 {"down_bytes_per_step", r.down},
                                 {"link_seconds_per_step", r.link_seconds}};
        if (r.policy != "belady") {
          p["passed_per_step"] = per_step(r.counts.passed);
          p["file_read_bytes_per_step"] = r.file_read;
          p["file_written_bytes_per_step"] = r.file_written;
          p["file_seconds_per_step"] = r.file_seconds;
          p["foreseen_uses"] = r.counts.foreseen;
          p["foreseen_in_vain"] = r.counts.unneeded;
        }
        one["policies"].push_back(p);
      }
      j["budgets"].push_back(one);
    }
    return j;
  }

  const TouchLog& log() const { return log_; }

 private:
  // Of the step with this index.
  std::int64_t step_number(std::int64_t index) const {
    return log_.entries[static_cast<std::size_t>(index) * log_.schedule().size()].step;
  }

  // A cache without room for one expert runs nothing.
  [[noreturn]] void refuse_empty(const std::string& budget) const {
    const double share = 100 / static_cast<double>(log_.blocks());
    const std::string bytes =
        log_.expert_bytes > 0
            ? " or " + config::print_bytes(static_cast<std::int64_t>(log_.expert_bytes))
            : "";
    throw UsageError(
        fmt::format("--budget {}: holds not a single one of {} experts; write at least {}%{}",
                    budget,
                    grouped(log_.blocks()),
                    std::ceil(share * 1000) / 1000,
                    bytes));
  }

  // Which blocks live in the file: those that were used least before the counted steps.
  void place() {
    if (o_.host_budget.empty()) return;
    Budget host = budget_from("--host-budget", o_.host_budget, log_);
    if (o_.host_budget.back() != '%')
      host.slots = static_cast<std::int64_t>(std::min<std::uint64_t>(
          bytes_from("--host-budget", o_.host_budget) / (log_.expert_bytes + log_.state_bytes),
          static_cast<std::uint64_t>(log_.blocks())));
    const std::vector<double> counts = weights();
    std::vector<std::size_t> order(counts.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return counts[a] > counts[b];
    });
    in_file_.assign(counts.size(), 1);
    for (std::int64_t i = 0; i < host.slots; ++i)
      in_file_[order[static_cast<std::size_t>(i)]] = 0;
  }

  // Uses of the steps that do not count: a policy may know the past.
  std::vector<double> weights() const {
    return counted_ == log_.steps() ? even_weights(log_.layers, log_.experts)
                                    : use_counts(log_, first_counted_);
  }

  std::unique_ptr<CachePolicy> make(const std::string& name) const {
    if (name == "lru") return make_lru_policy();
    if (name == "static") return make_static_policy(weights());
    if (name == "random") return make_random_policy(o_.seed);
    return make_sched_policy(
        std::make_unique<ScheduleForecast>(ScheduleForecast::Options{.step = log_.schedule(),
                                                                     .layers = log_.layers,
                                                                     .experts = log_.experts,
                                                                     .updates = log_.updates}));
  }

  double per_step(std::int64_t n) const {
    return static_cast<double>(n) / static_cast<double>(counted_);
  }
  double uses_per_step() const { return per_step(results_.front().front().counts.uses); }

  Row row(const std::string& name, const CacheCounts& counts) const {
    std::int64_t updates = 0, file_updates = 0;
    for (const TouchLog::Entry& e : log_.entries) {
      if (e.visit.kind != VisitKind::update || e.step < first_counted_) continue;
      updates += static_cast<std::int64_t>(e.blocks.size());
      if (!in_file_.empty())
        for (const Block b : e.blocks)
          file_updates += in_file_[static_cast<std::size_t>(b)];
    }
    const auto expert = static_cast<double>(log_.expert_bytes);
    const auto state = static_cast<double>(log_.state_bytes);
    Row r{.policy = name, .counts = counts};
    r.up = per_step(counts.loads()) * expert + per_step(updates) * state;
    r.down = per_step(updates) * (expert + state);
    r.file_read = per_step(counts.file_loads) * expert + per_step(file_updates) * state;
    r.file_written = per_step(file_updates) * (expert + state);
    r.link_seconds = std::max(r.up, r.down) / link_;  // both directions at once
    r.file_seconds = (r.file_read + r.file_written) / file_;
    return r;
  }

  static std::string size(double bytes) { return apps::binary(std::llround(bytes)); }

  std::string head() const {
    const bool has_bytes = log_.expert_bytes > 0;
    std::string text = fmt::format(
        "{}: {} layers of {} experts{}, {} visits and {:.0f} uses of experts a step; {} of {} "
        "steps "
        "count\nper step: experts that are loaded",
        o_.log.empty() ? "made-up log" : o_.log,
        log_.layers,
        log_.experts,
        has_bytes ? " of " + size(static_cast<double>(log_.expert_bytes)) : "",
        log_.schedule().size(),
        uses_per_step(),
        counted_,
        log_.steps());
    const auto rate = [](double r) { return config::print_bytes(static_cast<std::int64_t>(r)); };
    text += has_bytes ? fmt::format(
                            ", bytes up to and down from the device, time of the link at "
                            "{}/s each way",
                            rate(link_))
                      : " (with --expert-bytes also bytes and times)";
    if (!in_file_.empty())
      text += fmt::format(", of the file at {}/s ({} experts live there)",
                          rate(file_),
                          grouped(std::count(in_file_.begin(), in_file_.end(), 1)));
    return text + "\n\n";
  }

  // What sched names before a visit; the same under every budget.
  std::string foresight() const {
    for (const Row& r : results_.front()) {
      if (r.policy != "sched") continue;
      const std::int64_t named = r.counts.foreseen + r.counts.unneeded;
      return fmt::format(
          "sched names {:.1f} % of a visit's experts before it; {:.1f} % of those it names are "
          "not used. belady: the bound of any policy\n",
          100.0 * static_cast<double>(r.counts.foreseen) /
              static_cast<double>(std::max<std::int64_t>(1, r.counts.uses)),
          100.0 * static_cast<double>(r.counts.unneeded) /
              static_cast<double>(std::max<std::int64_t>(1, named)));
    }
    return "belady: the bound of any policy\n";
  }

  static std::string grouped(std::int64_t n) { return apps::grouped(n); }
  using TextTable = apps::TextTable;

  const CacheSimOptions& o_;
  TouchLog log_;
  double link_ = 0, file_ = 0;
  std::int64_t first_counted_ = 0, counted_ = 0;
  std::vector<Budget> budgets_;
  std::vector<std::uint8_t> in_file_;
  std::vector<std::vector<Row>> results_;
};

}  // namespace

int bench_cache_sim(const CacheSimOptions& options, std::ostream& out) {
  CacheSim sim(options);
  if (!options.write_log.empty()) write_touch_log(options.write_log, sim.log());
  sim.run();
  if (options.json) {
    out << sim.json().dump(2) << std::endl;
  } else {
    sim.print(out);
  }
  if (sim.log().last_step_was_cut)
    std::cerr << "moesaic: " << options.log << " ends within a step, which was left out"
              << std::endl;
  return 0;
}

}  // namespace moesaic::bench
