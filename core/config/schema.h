#pragma once
#include <string>

namespace moesaic::config {

/// JSON Schema (draft-07) of the configuration file for editors: types, ranges, choices, defaults
/// and descriptions of every key; unknown keys are errors. No key is `required`, because it can
/// come from a base file.
std::string json_schema();

/// What a key means: description, default, allowed values, an example; for a section its keys.
/// `key` is the full key
/// (`model.num_experts`), or its last part where that is unique; empty = the sections. Throws
/// UsageError with the nearest key if there is none.
std::string explain(const std::string& key);

}  // namespace moesaic::config
