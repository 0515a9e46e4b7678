#include "apps/verify/report.h"

#include <ostream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/verify/verify.h"

namespace moesaic::verify {
namespace {

const char* text(CaseResult::Status status) {
  switch (status) {
    case CaseResult::Status::passed:
      return "passed";
    case CaseResult::Status::failed:
      return "failed";
    case CaseResult::Status::skipped:
      return "skipped";
  }
  return "";
}

void write_row(std::ostream& out, const CaseResult& r, bool with_paths) {
  if (r.compared > 0) {
    out << fmt::format("{:<7} {:<38} {:9.2e} (limit {:.1e}) {:3} results, worst {}",
                       text(r.status),
                       r.name,
                       r.worst_error,
                       r.limit,
                       r.compared,
                       r.worst_tensor.empty() ? "-" : r.worst_tensor);
  } else {
    out << fmt::format("{:<7} {:<38}", text(r.status), r.name);
  }
  if (with_paths && !r.paths.empty()) out << "  [" << r.paths << "]";
  if (!r.note.empty()) out << "  " << r.note;
  out << '\n' << std::flush;
}

nlohmann::ordered_json to_json(const CaseResult& r) {
  nlohmann::ordered_json j{{"case", r.name}, {"status", text(r.status)}, {"compared", r.compared}};
  if (r.compared > 0) {
    // JSON has no infinity: a result that is not finite is null.
    j["worst_error"] = r.worst_error;
    j["limit"] = r.limit;
    j["worst_tensor"] = r.worst_tensor;
  }
  if (!r.note.empty()) j["note"] = r.note;
  if (!r.paths.empty()) j["paths"] = r.paths;
  return j;
}

}  // namespace

CaseResult without_run(const std::string& name,
                       CaseResult::Status status,
                       const std::string& note) {
  CaseResult result;
  result.name = name;
  result.status = status;
  result.note = note;
  return result;
}

struct Report::Impl {
  const VerifyOptions& options;
  std::ostream& out;
  apps::PathLog all_paths;
  std::map<CaseResult::Status, int> count;
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
};

Report::Report(const VerifyOptions& options, std::ostream& out)
    : impl_(new Impl{.options = options, .out = out}) {}
Report::~Report() = default;

void Report::add(CaseResult result, const apps::PathLog& paths) {
  result.paths = paths.text();
  impl_->all_paths.add(paths);
  ++impl_->count[result.status];
  if (impl_->options.json) {
    impl_->rows.push_back(to_json(result));
  } else {
    write_row(impl_->out, result, impl_->options.large);
  }
}

int Report::close() {
  const VerifyOptions& options = impl_->options;
  auto& count = impl_->count;
  const int passed = count[CaseResult::Status::passed], failed = count[CaseResult::Status::failed];
  const int skipped = count[CaseResult::Status::skipped];
  if (options.json) {
    const nlohmann::ordered_json all{{"device", options.device},
                                     {"dtype", options.dtype},
                                     {"path", options.path},
                                     {"cases", impl_->rows},
                                     {"passed", passed},
                                     {"failed", failed},
                                     {"skipped", skipped}};
    impl_->out << all.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
  } else {
    for (const auto& [what, times] : impl_->all_paths.counts())
      impl_->out << fmt::format(
          "path    {:<38} {:<10} {} time(s)\n", what.first, what.second, times);
    impl_->out << fmt::format("{} passed, {} failed, {} skipped\n", passed, failed, skipped);
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace moesaic::verify
