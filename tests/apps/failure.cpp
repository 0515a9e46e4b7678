#include "apps/failure.h"

#include <stdexcept>
#include <system_error>

#include "tests/support/catch.h"

namespace moesaic::apps {

TEST_CASE("exceptions become exit codes and words for the user") {
  const auto of = [](const auto& e) { return describe_failure(std::make_exception_ptr(e)); };
  const Failure threads =
      of(std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again)));
  CHECK(threads.code == static_cast<int>(ExitCode::resource));
  CHECK(threads.what.find("ulimit -u") != std::string::npos);
  CHECK(of(std::bad_alloc()).code == static_cast<int>(ExitCode::resource));
  const Failure usage = of(UsageError("no such thing"));
  CHECK(usage.code == static_cast<int>(ExitCode::usage));
  CHECK(usage.text() == "moesaic: no such thing");
  CHECK(of(std::runtime_error("odd")).text() == "moesaic: internal error: odd");
  CHECK(of(std::system_error(std::make_error_code(std::errc::io_error))).code ==
        static_cast<int>(ExitCode::internal));
}

}  // namespace moesaic::apps
