#include "core/config/load.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "core/config/check.h"
#include "core/config/fields.h"
#include "core/config/node.h"
#include "core/config/overrides.h"
#include "core/config/phase_extent.h"
#include "core/config/reader.h"

namespace moesaic::config {
namespace {

namespace fs = std::filesystem;

// Chains of base files are short; the bounds end a maze of files that name each other.
constexpr std::size_t kMaxBaseDepth = 16;
constexpr std::size_t kMaxFiles = 64;
constexpr std::size_t kManyProblems = 200;

/// Reads a file and its bases into one tree, checking each file by itself on the way.
class FileChain {
 public:
  explicit FileChain(std::vector<Problem>& problems) : problems_(problems) {}

  Node load(const std::string& path) {
    const std::size_t before = problems_.size();
    Node node = parse_yaml_file(path, problems_);
    return with_bases(path, std::move(node), problems_.size() == before);
  }

  /// `parsed`: the file's text was read to its end, so its values can be judged.
  Node with_bases(const std::string& path, Node node, bool parsed) {
    open_.push_back(identity(path));
    if (parsed) {
      Config scratch;
      Reader(problems_, nullptr, false).section(root_section(), node, "", &scratch);
    }
    Node merged;
    merged.at = node.at;
    if (const Node* base = node.find("base")) {
      if (base->kind == Node::Kind::list) {
        for (const Node& item : base->children)
          add_base(path, item, merged);
      } else {
        add_base(path, *base, merged);
      }
    }
    merge(merged, std::move(node));
    open_.pop_back();
    files_.push_back(path);
    return merged;
  }

  std::vector<std::string> take_files() { return std::move(files_); }

 private:
  static std::string identity(const std::string& path) {
    std::error_code error;
    const fs::path canonical = fs::weakly_canonical(path, error);
    return error ? path : canonical.string();
  }

  void add_base(const std::string& from, const Node& name, Node& merged) {
    if (name.kind != Node::Kind::scalar) return;  // the reader has complained
    const std::string path = (fs::path(from).parent_path() / name.text).lexically_normal().string();
    const auto refuse = [&](std::string message) {
      problems_.push_back({name.at.file, name.at.line, name.at.column, "base", std::move(message)});
    };
    if (std::find(open_.begin(), open_.end(), identity(path)) != open_.end())
      return refuse(fmt::format("{} builds on itself", path));
    if (open_.size() >= kMaxBaseDepth || ++opened_ > kMaxFiles)
      return refuse("too many base files");
    Node base = load(path);
    std::erase_if(base.children, [](const Node& entry) { return entry.key == "base"; });
    // A base that could not be read has complained already and sets nothing.
    if (base.kind == Node::Kind::map) merge(merged, std::move(base));
  }

  std::vector<Problem>& problems_;
  std::vector<std::string> open_;  ///< the chain of files being read
  std::vector<std::string> files_;
  std::size_t opened_ = 0;
};

/// Every problem once, in the order of files, lines and columns; the command line last.
void tidy(std::vector<Problem>& problems, const std::vector<std::string>& files) {
  const auto rank = [&](const Problem& problem) {
    return std::find(files.begin(), files.end(), problem.file) - files.begin();
  };
  std::vector<Problem> unique;
  std::set<std::string> seen;
  for (Problem& problem : problems) {
    if (seen.insert(to_string(problem)).second) unique.push_back(std::move(problem));
  }
  std::stable_sort(unique.begin(), unique.end(), [&](const Problem& a, const Problem& b) {
    return std::make_tuple(rank(a), a.line, a.column) < std::make_tuple(rank(b), b.line, b.column);
  });
  problems = std::move(unique);
}

/// "": else which of the other keys of a rule the command line set. Where all keys are of one file nobody has to search.
std::string set_by_hand(const Origins& origins, const Finding& finding) {
  const auto by_hand = [&](const std::string& key) {
    const auto it = origins.find(key);
    return it != origins.end() && it->second.source == Origin::Source::command_line;
  };
  if (by_hand(finding.keys.front())) return "";
  for (const std::string& key : finding.keys) {
    if (by_hand(key)) return fmt::format(" ({} is set on the command line)", key);
  }
  return "";
}

/// Position of a key: its own, or that of the nearest group around it that a file or argument sets.
Problem place(const std::string& main_file, const Origins& origins, const Finding& finding) {
  const std::string message = finding.message + set_by_hand(origins, finding);
  std::string key = finding.keys.front();
  while (true) {
    if (const auto it = origins.find(key); it != origins.end()) {
      return {it->second.file, it->second.line, it->second.column, finding.keys.front(), message};
    }
    const std::size_t end = key.find_last_of(".[");
    if (end == std::string::npos) return {main_file, 1, 1, finding.keys.front(), message};
    key.resize(end);
  }
}

/// A rule over several keys says nothing useful where one of them could not be read.
bool rests_on(const Finding& finding, const std::vector<Problem>& problems) {
  return std::any_of(finding.keys.begin(), finding.keys.end(), [&](const std::string& key) {
    return std::any_of(problems.begin(), problems.end(), [&](const Problem& problem) {
      return problem.key == key || key.starts_with(problem.key + ".") ||
             problem.key.starts_with(key + ".") || problem.key.starts_with(key + "[");
    });
  });
}

void cross_check(LoadedConfig& loaded, std::vector<Problem>& problems) {
  if (problems.size() > kManyProblems) return;  // not a configuration; rules would cost time only
  std::vector<Problem> more;
  std::vector<Finding> all = derive_steps(loaded.config, loaded.derived);
  for (Finding& finding : findings(loaded.config))
    all.push_back(std::move(finding));
  for (const Finding& finding : all) {
    if (!rests_on(finding, problems)) more.push_back(place(loaded.path, loaded.origins, finding));
  }
  problems.insert(problems.end(), more.begin(), more.end());
}

LoadedConfig finish(FileChain& chain,
                    Node root,
                    const std::string& path,
                    const std::vector<std::string>& overrides,
                    std::vector<Problem>& problems) {
  LoadedConfig loaded;
  loaded.path = path;
  loaded.files = chain.take_files();
  // Rules over the whole would only repeat in other words that a file could not be parsed.
  const bool parsed = std::none_of(
      problems.begin(), problems.end(), [](const Problem& problem) { return problem.key.empty(); });
  apply_overrides(root, overrides, problems);
  std::vector<Problem> whole;
  Reader(whole, &loaded.origins, parsed).section(root_section(), root, "", &loaded.config);
  problems.insert(problems.end(), whole.begin(), whole.end());
  if (parsed) cross_check(loaded, problems);
  tidy(problems, loaded.files);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  if (loaded.config.run.dir.empty())
    loaded.config.run.dir = (fs::path("runs") / fs::path(path).stem()).string();
  return loaded;
}

}  // namespace

Problem located(const LoadedConfig& loaded, const Finding& finding) {
  return place(loaded.path, loaded.origins, finding);
}

Origin LoadedConfig::origin(const std::string& key) const {
  const auto it = origins.find(key);
  return it == origins.end() ? Origin{} : it->second;
}

LoadedConfig load_config(const std::string& path, const std::vector<std::string>& overrides) {
  std::vector<Problem> problems;
  FileChain chain(problems);
  Node root = chain.load(path);
  return finish(chain, std::move(root), path, overrides, problems);
}

LoadedConfig load_config_text(std::string_view text,
                              const std::string& name,
                              const std::vector<std::string>& overrides) {
  std::vector<Problem> problems;
  FileChain chain(problems);
  Node node = parse_yaml(text, name, problems);
  const bool parsed = problems.empty();
  Node root = chain.with_bases(name, std::move(node), parsed);
  return finish(chain, std::move(root), name, overrides, problems);
}

}  // namespace moesaic::config
