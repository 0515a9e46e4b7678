#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/verify/case_data.h"
#include "kernels/backend.h"

namespace moesaic::verify {

/// The verdict on one golden case.
struct CaseResult {
  enum class Status { passed, failed, skipped };
  std::string name;
  Status status = Status::passed;
  double worst_error = 0;  ///< largest relative error over results
  double limit = 0;
  std::string worst_tensor;
  std::string note;   ///< why it failed or was skipped
  int compared = 0;   ///< results compared
  std::string paths;  ///< which kernels ran, where ops have several
};

/// One golden case on its way through the product's own ops: hands out inputs in the run's precision, takes results and
/// compares them with the stored ones. A stored result (out., aux., grad., …) that the runner never reported is a
/// failure, so that nothing is left out silently.
///
/// A case that was made at run time passes twice through the same runner: first recording, on the CPU in f64, where
/// results are stored in place of compared, then as any other.
class CaseRun {
 public:
  /// `data` outlives the run.
  CaseRun(const CaseData& data, Backend& backend, const Precision& precision);
  /// Results go into `data`; so do inputs that the runner gives by store().
  static CaseRun recording(CaseData& data, Backend& backend, const Precision& precision);
  CaseRun(CaseRun&&) noexcept;
  ~CaseRun();

  Backend& backend();
  const Precision& precision() const;
  Stream& stream();

  bool is_recording() const;
  /// The runner reports all results once more, computed in another way, which `form` names for messages. Recording: false,
  /// nothing is to be reported again.
  bool report_again(const std::string& form);
  bool is_generated() const;  ///< made at run time, not golden
  /// True where the recorded choices (top-k, routing) are to be given to the module: they lie anywhere near ties, nearer
  /// than the run's type can tell.
  bool replays_choices() const;
  /// Recording: adds an input, rounded to the type in which the case's inputs are (`stays_f32`: to f32 there).
  void store(const std::string& name, Shape shape, std::vector<double> values, bool stays_f32);

  // --- cfg: the JSON object of sizes and constants; `path` may be dotted ("moe.top_k"); throws InputError when absent
  std::int64_t cfg_int(const std::string& path) const;
  double cfg_real(const std::string& path) const;
  std::string cfg_text(const std::string& path) const;
  bool cfg_bool(const std::string& path) const;
  bool cfg_has(const std::string& path) const;  ///< present and not null
  std::vector<std::int64_t> cfg_ints(const std::string& path) const;
  std::vector<double> cfg_reals(const std::string& path) const;

  // --- stored tensors
  bool has(const std::string& name) const;
  Shape shape(const std::string& name) const;
  std::vector<std::string> names_with_prefix(const std::string& prefix) const;
  /// "in.x", "w.q_proj.weight", "cot.y", … converted to `dtype` (floats) on the run's device. Kept until the run ends.
  TensorView load(const std::string& name, DType dtype);
  TensorView load(const std::string& name) { return load(name, precision().compute); }
  /// An integer tensor as stored, converted to i32 on the device, and on the host.
  TensorView load_i32(const std::string& name);
  std::vector<std::int64_t> host_ints(const std::string& name) const;
  std::vector<double> host_reals(const std::string& name) const;

  /// Zeroed device memory that lives until the run ends. Poisoned memory (NaN pattern) for what must be overwritten.
  TensorView zeros(Shape shape, DType dtype);
  TensorView poisoned(Shape shape, DType dtype);
  /// Copies host values to the device in the given dtype.
  TensorView upload(const std::vector<double>& values, Shape shape, DType dtype);
  TensorView upload_i32(const std::vector<std::int64_t>& values, Shape shape);
  /// Waits for the stream and reads back.
  std::vector<double> download(ConstTensorView view);

  // --- results: each waits for the stream
  /// Compares with the stored tensor `name` ("out.o", "grad.w.A_log", "aux.lse", …) by relative L2 error; shapes must
  /// hold the same number of elements.
  void expect(const std::string& name, ConstTensorView got);
  void expect(const std::string& name, const std::vector<double>& got);
  /// Integers, counts, codes: equal or failed.
  void expect_exact(const std::string& name, const std::vector<std::int64_t>& got);
  void expect_exact(const std::string& name, ConstTensorView got_ints);
  /// A stored result that this precision cannot judge, or that is judged through another one; the reason is required.
  void waive(const std::string& name, const std::string& reason);
  /// Fails the case with a message.
  void fail(const std::string& why);
  /// Multiplies the limit of all comparisons of this case in f32 / bf16 (state why where it is called).
  void scale_limit(double factor_f32, double factor_bf16);
  void note(const std::string& text);

  /// Errors and verdict; called once after the runner.
  CaseResult finish();

 private:
  struct Impl;
  explicit CaseRun(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// A family of cases: all files whose name starts with `prefix` go to `run`. Longest prefix wins.
struct CaseFamily {
  const char* prefix;
  void (*run)(CaseRun&);
};
/// Registers a family at program start: `const RegisterFamily r{{"kda_core__", run_kda_core}};` in one source file per family.
struct RegisterFamily {
  explicit RegisterFamily(CaseFamily family);
};
/// The family of a case, or nullptr.
const CaseFamily* find_family(const std::string& case_name);

}  // namespace moesaic::verify
