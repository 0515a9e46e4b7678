#pragma once

namespace moesaic::apps::report {

/// The style sheet of the report. It holds neither '<' nor '&', so that it can stand in XML.
extern const char* const kPageStyle;

}  // namespace moesaic::apps::report
