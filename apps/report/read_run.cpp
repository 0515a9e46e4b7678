#include "apps/report/read_run.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/config_changes.h"
#include "core/base/error.h"
#include "core/base/json_text.h"

namespace moesaic::apps::report {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

// A number, or one of the texts that stand for numbers JSON does not have.
double to_number(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "inf") return std::numeric_limits<double>::infinity();
  if (value == "-inf") return -std::numeric_limits<double>::infinity();
  return kAbsent;
}

double number(const json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() ? kAbsent : to_number(*it);
}

std::optional<std::int64_t> integer(const json& object, const char* key) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_number_integer()) return std::nullopt;
  return it->get<std::int64_t>();
}

const json* list(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_array() ? &*it : nullptr;
}

template <class T>
void drop_after(std::map<std::int64_t, T>& values, std::int64_t step) {
  values.erase(values.upper_bound(step), values.end());
}

// A life is there even when its header was torn.
Life& this_life(RunData& run) {
  if (run.lives.empty()) run.lives.emplace_back();
  return run.lives.back();
}

void add_header(const json& record, RunData& run) {
  Life life;
  life.start_step = integer(record, "start_step").value_or(0);
  life.begin = number(record, "time");
  for (const auto& [key, value] : record.items()) {
    if (key == "type" || key == "time" || key == "start_step" || key == "lines") continue;
    if (value.is_primitive())
      life.facts[key] = value.is_string() ? value.get<std::string>() : value.dump();
  }
  if (const json* lines = list(record, "lines")) {
    for (const json& line : *lines)
      if (line.is_string()) life.lines.push_back(line.get<std::string>());
  }
  drop_after(run.steps, life.start_step);
  drop_after(run.evals, life.start_step);
  drop_after(run.saves, life.start_step);
  drop_after(run.bias, life.start_step);
  if (run.experts.step > life.start_step) run.experts = {};
  run.lives.push_back(std::move(life));
}

void add_step(const json& record, std::int64_t step, RunData& run) {
  StepLine line;
  line.step = step;
  line.loss = number(record, "loss");
  line.grad_norm = number(record, "grad_norm");
  line.lr = number(record, "lr");
  line.tokens = number(record, "tokens");
  line.total_tokens = number(record, "total_tokens");
  line.seconds = number(record, "seconds");
  line.time = number(record, "time");
  line.tokens_per_second = number(record, "tokens_per_second");
  if (std::isnan(line.tokens_per_second) && line.seconds > 0)
    line.tokens_per_second = line.tokens / line.seconds;
  line.tflops = number(record, "tflops_per_device");
  line.mfu = number(record, "mfu");
  line.memory_bytes = number(record, "memory_bytes");
  line.host_bytes = number(record, "host_bytes");
  if (const auto parts = record.find("seconds_by_part");
      parts != record.end() && parts->is_object()) {
    for (std::size_t i = 0; i < kParts.size(); ++i)
      line.parts[i] = number(*parts, kParts[i]);
  }
  line.skipped = record.contains("skipped") && record["skipped"] == true;
  if (const json* experts = list(record, "experts")) {
    for (const json& layer : *experts) {
      if (!layer.is_object()) continue;
      line.max_over_mean = std::fmax(line.max_over_mean, number(layer, "max_over_mean"));
      line.entropy = std::fmin(line.entropy, number(layer, "entropy"));
      const double dead = number(layer, "dead");
      if (!std::isnan(dead)) line.dead = (std::isnan(line.dead) ? 0 : line.dead) + dead;
    }
  }
  Life& life = this_life(run);
  line.warm_up = step == life.start_step + 1;
  if (line.seconds > 0) life.step_seconds += line.seconds;
  run.steps[step] = line;
}

void add_experts(const json& record, std::int64_t step, RunData& run) {
  const json *layers = list(record, "layers"), *tokens = list(record, "tokens");
  if (!layers || !tokens || layers->size() != tokens->size()) return;
  ExpertTable table;
  table.step = step;
  for (std::size_t l = 0; l < layers->size(); ++l) {
    const json& counts = (*tokens)[l];
    if (!(*layers)[l].is_number_integer() || !counts.is_array() || counts.empty()) continue;
    std::vector<std::int64_t> row;
    double sum = 0;
    for (const json& count : counts) {
      row.push_back(count.is_number_integer() ? count.get<std::int64_t>() : 0);
      sum += static_cast<double>(row.back());
    }
    std::vector<double> ratio(row.size(), 0.0);
    const double mean = sum / static_cast<double>(row.size());
    for (std::size_t e = 0; e < row.size() && mean > 0; ++e)
      ratio[e] = static_cast<double>(row[e]) / mean;
    table.layers.push_back((*layers)[l].get<std::int64_t>());
    table.tokens.push_back(std::move(row));
    table.ratio.push_back(std::move(ratio));
  }
  if (!table.layers.empty()) run.experts = std::move(table);
  BiasRange range;
  if (const json* low = list(record, "bias_min"))
    for (const json& value : *low)
      range.low = std::fmin(range.low, to_number(value));
  if (const json* high = list(record, "bias_max"))
    for (const json& value : *high)
      range.high = std::fmax(range.high, to_number(value));
  if (!std::isnan(range.low) && !std::isnan(range.high)) run.bias[step] = range;
}

void add_event(const std::string& type, const json& record, std::int64_t step, RunData& run) {
  Life& life = this_life(run);
  if (type == "eval") run.evals[step] = number(record, "loss");
  if (type == "save") {
    run.saves[step] = number(record, "bytes");
    const double stall = number(record, "stall_seconds");
    if (stall > 0) life.stall_seconds += stall;
  }
  if (type == "stop") {
    life.exit_code = integer(record, "exit_code");
    const auto reason = record.find("reason");
    life.end = reason != record.end() && reason->is_string() ? reason->get<std::string>() : "ended";
  }
}

// Everything in a sentence that a user needs who gave a wrong folder.
[[noreturn]] void not_a_run(const fs::path& dir) {
  std::string found = "there is no such folder";
  if (fs::is_directory(dir)) {
    found = "it holds no metrics.jsonl";
    std::vector<std::string> runs;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(dir, error))
      if (fs::exists(entry.path() / "metrics.jsonl")) runs.push_back(entry.path().string());
    std::sort(runs.begin(), runs.end());
    if (!runs.empty()) found += ", but " + runs.front() + " does";
  } else if (fs::exists(dir)) {
    found = "it is a file";
  }
  throw InputError(
      fmt::format("{} is not the folder of a run: {}. Give run.dir of a training run; it has a "
                  "metrics.jsonl unless log.metrics is false",
                  dir.string(),
                  found));
}

}  // namespace

bool add_line(const std::string& line, RunData& run) {
  try {
    check_json(line, "", {});
  } catch (const InputError&) {
    return false;
  }
  const json record = json::parse(line);
  if (!record.is_object()) return false;
  const auto it = record.find("type");
  if (it == record.end() || !it->is_string()) return false;
  const auto type = it->get<std::string>();
  if (type == "header") {
    add_header(record, run);
    return true;
  }
  const auto step = integer(record, "step");
  if (!step) return false;
  if (type == "step") {
    add_step(record, *step, run);
  } else if (type == "experts") {
    add_experts(record, *step, run);
  } else {
    add_event(type, record, *step, run);
  }
  const double time = number(record, "time");
  if (std::isfinite(time)) this_life(run).last = time;
  return true;
}

RunData read_run(const fs::path& dir) {
  const fs::path path = dir / "metrics.jsonl";
  if (!fs::is_regular_file(path)) not_a_run(dir);
  std::ifstream file(path, std::ios::binary);
  if (!file) throw InputError(path.string() + " cannot be opened for reading");
  RunData run;
  run.path = dir;
  std::int64_t n = 0, records = 0;
  for (std::string line; std::getline(file, line);) {
    ++n;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    if (add_line(line, run)) {
      ++records;
    } else if (run.torn_lines++ == 0) {
      run.first_torn_line = n;
    }
  }
  if (file.bad()) throw InputError(path.string() + " could not be read to its end");
  if (records == 0 && run.torn_lines > 0) {
    throw InputError(fmt::format(
        "{}:{}: no record of a run (a JSON object with \"type\" and \"step\"), nor is any other "
        "line. Give run.dir of a training run",
        path.string(),
        run.first_torn_line));
  }
  std::ifstream config(dir / "config.yaml", std::ios::binary);
  std::stringstream text;
  if (config) text << config.rdbuf();
  run.config = text.str();
  return run;
}

std::optional<std::string> config_value(const RunData& run, const std::string& key) {
  for (const auto& [name, value] : config_values(run.config))
    if (name == key) return value;
  return std::nullopt;
}

void name_runs(std::vector<RunData>& runs) {
  for (int parents = 0; parents < 64; ++parents) {
    std::set<std::string> names;
    for (RunData& run : runs) {
      std::vector<std::string> parts;
      const fs::path full = fs::absolute(run.path / "x").lexically_normal().parent_path();
      for (const auto& part : full.relative_path())
        parts.push_back(part.string());
      const std::size_t from =
          parts.size() - std::min(parts.size(), static_cast<std::size_t>(parents) + 1);
      run.name.clear();
      for (std::size_t i = from; i < parts.size(); ++i)
        run.name += (i == from ? "" : "/") + parts[i];
      if (run.name.empty()) run.name = "/";
      names.insert(run.name);
    }
    if (names.size() == runs.size()) return;
  }
  throw UsageError("the same folder was given twice; every run can be shown once");
}

}  // namespace moesaic::apps::report
