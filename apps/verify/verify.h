#pragma once
#include <filesystem>
#include <iosfwd>
#include <string>

#include "apps/verify/case_run.h"

namespace moesaic::verify {

struct VerifyOptions {
  std::filesystem::path cases;  ///< a folder of .safetensors files, or one such file
  std::string device = "cpu";   ///< cpu | cuda
  std::string dtype = "f64";    ///< f64 | f32 | bf16
  std::string path = "auto";    ///< auto | plain: which kernels the CUDA ops may take
  int num_threads = 1;
  bool json = false;  ///< one JSON object in place of the table
};

/// Runs one case file; a file that cannot be read, or a runner that throws, is a failed case with the text.
CaseResult run_case(const std::filesystem::path& path,
                    Backend& backend,
                    const Precision& precision);

/// Runs every case in name order, writes a row per case, which kernels ran where ops have several, and the closing line
/// `N passed, N failed, N skipped`, or JSON.
/// Returns 0, or 1 when a case failed. Throws UsageError for a wrong device, dtype or a folder without cases.
int run_verify(const VerifyOptions& options, std::ostream& out);

}  // namespace moesaic::verify
