#pragma once
#include <string>
#include <vector>

#include "apps/report/read_run.h"

namespace moesaic::apps::report {

/// The whole report as one HTML file that is also well-formed XML: styles and pictures inside, no scripts, nothing loaded
/// from elsewhere. Light or dark as the reader's system says.
std::string html_page(const std::vector<RunData>& runs);

}  // namespace moesaic::apps::report
