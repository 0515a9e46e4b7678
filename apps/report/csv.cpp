#include "apps/report/csv.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <system_error>

#include <fmt/format.h>

#include "core/base/durable_file.h"
#include "core/base/error.h"

namespace moesaic::apps::report {
namespace {

struct Column {
  const char* name;
  double StepLine::*value;
};
constexpr Column kColumns[] = {
    {"loss", &StepLine::loss},
    {"grad_norm", &StepLine::grad_norm},
    {"lr", &StepLine::lr},
    {"tokens", &StepLine::tokens},
    {"total_tokens", &StepLine::total_tokens},
    {"seconds", &StepLine::seconds},
    {"time", &StepLine::time},
    {"tokens_per_second", &StepLine::tokens_per_second},
    {"tflops_per_device", &StepLine::tflops},
    {"mfu", &StepLine::mfu},
    {"memory_bytes", &StepLine::memory_bytes},
    {"host_bytes", &StepLine::host_bytes},
    {"max_over_mean", &StepLine::max_over_mean},
    {"dead", &StepLine::dead},
    {"entropy", &StepLine::entropy},
};

std::string cell(double value) {
  if (std::isnan(value)) return "";
  // Whole numbers (tokens, bytes) without an exponent; others so that they read back the same.
  if (value == std::floor(value) && std::abs(value) < 9e15) return fmt::format("{:.0f}", value);
  return fmt::format("{}", value);
}

std::string file_name(std::string name) {
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return c <= ' ' || c == '/'; }, '_');
  return name;
}

}  // namespace

std::string steps_csv(const RunData& run) {
  std::string out = "step,skipped";
  for (const Column& column : kColumns)
    out += fmt::format(",{}", column.name);
  for (const char* part : kParts)
    out += fmt::format(",seconds_{}", part);
  out += "\n";
  for (const auto& [step, line] : run.steps) {
    out += fmt::format("{},{}", step, line.skipped ? 1 : 0);
    for (const Column& column : kColumns)
      out += "," + cell(line.*column.value);
    for (const double seconds : line.parts)
      out += "," + cell(seconds);
    out += "\n";
  }
  return out;
}

std::string evals_csv(const RunData& run) {
  std::string out = "step,loss\n";
  for (const auto& [step, loss] : run.evals)
    out += fmt::format("{},{}\n", step, cell(loss));
  return out;
}

std::string experts_csv(const RunData& run) {
  std::string out = "step,layer,expert,tokens,load\n";
  const ExpertTable& table = run.experts;
  for (std::size_t l = 0; l < table.layers.size(); ++l) {
    for (std::size_t e = 0; e < table.tokens[l].size(); ++e) {
      fmt::format_to(std::back_inserter(out),
                     "{},{},{},{},{}\n",
                     table.step,
                     table.layers[l],
                     e,
                     table.tokens[l][e],
                     cell(table.ratio[l][e]));
    }
  }
  return out;
}

std::vector<std::filesystem::path> write_csv(const std::vector<RunData>& runs,
                                             const std::filesystem::path& dir) {
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  if (error)
    throw ResourceError(
        fmt::format("{}: folder cannot be made: {}", dir.string(), error.message()));
  std::vector<std::filesystem::path> written;
  for (const RunData& run : runs) {
    const std::string name = file_name(run.name);
    const auto write = [&](const char* what, const std::string& text) {
      written.push_back(dir / fmt::format("{}_{}.csv", name, what));
      replace_file(written.back(), text);
    };
    write("steps", steps_csv(run));
    if (!run.evals.empty()) write("evals", evals_csv(run));
    if (!run.experts.layers.empty()) write("experts", experts_csv(run));
  }
  return written;
}

}  // namespace moesaic::apps::report
