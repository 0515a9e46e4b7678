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
  bool large = false;  ///< cases made at run time in place of `cases`
  bool json = false;   ///< one JSON object in place of the table
};

/// Runs one case file; a file that cannot be read, or a runner that throws, is a failed case with the text.
CaseResult run_case(const std::filesystem::path& path,
                    Backend& backend,
                    const Precision& precision);

/// Runs every case in name order, writes a row per case, which kernels ran where ops have several, and the closing line
/// `N passed, N failed, N skipped`, or JSON.
/// Returns 0, or 1 when a case failed. Throws UsageError for a wrong device, dtype or a folder without cases.
/// With `large`: run_large().
int run_verify(const VerifyOptions& options, std::ostream& out);

/// The same for cases that are made at run time at the sizes of the tiled kernels: seeded inputs, rounded to the dtype
/// under test, and results of the CPU backend in f64. On CUDA in bf16 with the path "auto", a case whose tiled kernels
/// did not run has failed. Rows say which kernels ran.
int run_large(const VerifyOptions& options, std::ostream& out);

/// auto | plain; throws UsageError for another text.
KernelPath path_from_name(const std::string& name);

}  // namespace moesaic::verify
