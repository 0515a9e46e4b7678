#include "apps/failure.h"

#include <new>
#include <system_error>

#include "core/config/problem.h"

namespace moesaic::apps {

Failure describe_failure(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const config::ConfigError& e) {
    return {static_cast<int>(e.exit_code()), e.what(), true};
  } catch (const Error& e) {
    return {static_cast<int>(e.exit_code()), e.what()};
  } catch (const std::bad_alloc&) {
    return {static_cast<int>(ExitCode::resource), "out of host memory"};
  } catch (const std::system_error& e) {
    // std::thread has no other words for it.
    if (e.code() == std::errc::resource_unavailable_try_again)
      return {static_cast<int>(ExitCode::resource),
              "a thread could not be started: the limit of processes and threads is reached "
              "(ulimit -u, "
              "pids.max of the container's control group, kernel.threads-max); raise it, or start "
              "fewer "
              "ranks or run.threads"};
    return {static_cast<int>(ExitCode::internal), std::string("internal error: ") + e.what()};
  } catch (const std::exception& e) {
    return {static_cast<int>(ExitCode::internal), std::string("internal error: ") + e.what()};
  }
}

}  // namespace moesaic::apps
