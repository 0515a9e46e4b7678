#pragma once
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/check.h"
#include "core/config/config.h"
#include "core/config/origin.h"
#include "core/config/problem.h"

namespace moesaic::config {

/// A configuration that passed every check, and where each value came from.
struct LoadedConfig {
  Config config;
  std::string path;                ///< of the main file, as given
  std::vector<std::string> files;  ///< all files read, bases first
  Origins origins;
  std::set<std::string> derived;  ///< keys that were computed from others (phase_extent.h)

  /// Origin of a full key; that of a key which nothing sets is the default.
  Origin origin(const std::string& key) const;
};

/// Reads a configuration: defaults < files named by `base:` (in order) < the file < `overrides`
/// ("a.b=c"). Throws one ConfigError (exit 2) with every problem of all files and overrides.
LoadedConfig load_config(const std::string& path, const std::vector<std::string>& overrides = {});

/// The same for a text; `name` stands for the file in messages, and `base:` is relative to its
/// folder.
LoadedConfig load_config_text(std::string_view text,
                              const std::string& name,
                              const std::vector<std::string>& overrides = {});

/// A broken rule as a problem, at the position of its first key or of the nearest group around it
/// that is set.
Problem located(const LoadedConfig& loaded, const Finding& finding);

/// Every key with its value and, as a comment, its origin. Loading this text gives the same
/// configuration.
std::string effective_yaml(const LoadedConfig& loaded);

}  // namespace moesaic::config
