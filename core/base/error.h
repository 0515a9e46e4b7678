#pragma once
#include <stdexcept>
#include <string>
#include <string_view>

namespace moesaic {

/// Process exit codes; the same on all ranks (docs/exit_codes.md).
enum class ExitCode : int {
  ok = 0,
  internal = 1,    ///< a bug in moesaic, or a failed check
  usage = 2,       ///< command line, configuration, launch
  bad_input = 3,   ///< data or checkpoint invalid
  resource = 4,    ///< memory, disk, limits
  numerics = 5,    ///< too many non-finite steps in a row
  replicas = 16,   ///< replicas disagree
  requeue = 75,    ///< saved, please start again
  watchdog = 124,  ///< no progress
};

/// Base of all errors that a user should read. The text says what is wrong, where, what was found, what is allowed and
/// what to do; `exit_code()` is what the process ends with.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& what) : std::runtime_error(what), code_(code) {}
  ExitCode exit_code() const noexcept { return code_; }

 private:
  ExitCode code_;
};

/// Wrong command line, configuration or launch: exit 2.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& what) : Error(ExitCode::usage, what) {}
};
/// A file we read is not what it should be: exit 3. The text names file and offset or tensor.
class InputError : public Error {
 public:
  explicit InputError(const std::string& what) : Error(ExitCode::bad_input, what) {}
};
/// Memory, disk or another limit: exit 4.
class ResourceError : public Error {
 public:
  explicit ResourceError(const std::string& what) : Error(ExitCode::resource, what) {}
};
/// Too many non-finite steps: exit 5.
class NumericsError : public Error {
 public:
  explicit NumericsError(const std::string& what) : Error(ExitCode::numerics, what) {}
};
/// A call into MPI, CUDA, NCCL or the system failed, or a precondition of our own code: exit 1.
class InternalError : public Error {
 public:
  explicit InternalError(const std::string& what) : Error(ExitCode::internal, what) {}
};

/// Throws InternalError with file:line, the text of the condition and `what`.
[[noreturn]] void check_failed(const char* file,
                               int line,
                               const char* condition,
                               const std::string& what);

}  // namespace moesaic

/// A precondition of our own code; always on. `MOESAIC_CHECK(cond, "why")`; the second argument is a std::string (it is
/// only evaluated when the condition is false).
#define MOESAIC_CHECK(condition, what)                                               \
  do {                                                                               \
    if (!(condition)) ::moesaic::check_failed(__FILE__, __LINE__, #condition, what); \
  } while (false)
