#pragma once
#include <exception>
#include <string>

#include "core/base/error.h"

namespace moesaic::apps {

/// What an exception means to the user.
struct Failure {
  int code = static_cast<int>(ExitCode::internal);
  std::string what;
  bool is_list =
      false;  ///< a list of problems that says by itself where they are: file:line:column

  /// As it is printed: lists as they are, so that editors and terminals turn them into links, else behind the program's name.
  std::string text() const { return (is_list ? "" : "moesaic: ") + what; }
};

Failure describe_failure(const std::exception_ptr& error);

}  // namespace moesaic::apps
