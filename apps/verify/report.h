#pragma once
#include <iosfwd>
#include <map>
#include <memory>

#include "apps/path_log.h"
#include "apps/verify/case_run.h"

namespace moesaic::verify {

struct VerifyOptions;

CaseResult without_run(const std::string& name, CaseResult::Status status, const std::string& note);

/// A row per case as it ends, or one JSON object in the end; and the sums.
class Report {
 public:
  Report(const VerifyOptions& options, std::ostream& out);
  ~Report();
  /// `paths`: which kernels the case took.
  void add(CaseResult result, const apps::PathLog& paths);
  /// Which kernels ran in all, and `N passed, N failed, N skipped`. Returns the exit code: 1 when a case failed.
  int close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::verify
