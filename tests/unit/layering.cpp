// The rules of the source tree: who may include what, how long a file may be, nothing left over.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/catch.h"

namespace moesaic {
namespace {

namespace fs = std::filesystem;

struct Layer {
  std::string folder;
  std::set<std::string> uses;  // names of layers
};

// The layers of the design, from the bottom up. CMakeLists.txt must not allow more (tested below).
const std::map<std::string, Layer>& layers() {
  static const std::map<std::string, Layer> table{
      {"base", {"core/base", {}}},
      {"config", {"core/config", {"base"}}},
      {"tokenizer", {"core/tokenizer", {"base"}}},
      {"memory", {"memory", {"base"}}},
      {"kernels", {"kernels", {"base", "memory"}}},
      {"comm", {"comm", {"base", "memory"}}},
      {"parallel", {"parallel", {"base", "memory", "kernels", "comm"}}},
      {"nn", {"core/nn", {"base", "memory", "kernels", "parallel"}}},
      {"checkpoint",
       {"core/checkpoint", {"base", "config", "memory", "kernels", "parallel", "nn"}}},
      {"data",
       {"core/data", {"base", "config", "tokenizer", "memory", "kernels", "parallel", "nn"}}},
      {"model", {"core/model", {"base", "config", "memory", "kernels", "parallel", "nn"}}},
      {"train",
       {"core/train",
        {"base",
         "config",
         "memory",
         "kernels",
         "comm",
         "parallel",
         "nn",
         "model",
         "data",
         "checkpoint"}}},
      {"apps",
       {"apps",
        {"base",
         "config",
         "tokenizer",
         "memory",
         "kernels",
         "comm",
         "parallel",
         "nn",
         "model",
         "data",
         "checkpoint",
         "train"}}},
  };
  return table;
}

bool starts_with(const std::string& s, const std::string& prefix) {
  return s.rfind(prefix, 0) == 0;
}
bool contains(const std::string& s, const std::string& part) {
  return s.find(part) != std::string::npos;
}
bool is_header(const std::string& path) {
  const auto extension = fs::path(path).extension();
  return extension == ".h" || extension == ".cuh";
}
bool is_source(const std::string& path) {
  const auto extension = fs::path(path).extension();
  return is_header(path) || extension == ".cpp" || extension == ".cu";
}

// The layer whose folder holds `path`, "tests", or nothing.
std::optional<std::string> layer_of(const std::string& path) {
  if (starts_with(path, "tests/")) return "tests";
  for (const auto& [name, layer] : layers()) {
    if (starts_with(path, layer.folder + "/")) return name;
  }
  return std::nullopt;
}

struct Include {
  std::string name;
  bool quoted = false;
  int line = 0;
};

std::vector<Include> includes_of(const std::string& text) {
  std::vector<Include> result;
  std::istringstream lines(text);
  std::string line;
  for (int n = 1; std::getline(lines, line); ++n) {
    std::size_t at = line.find_first_not_of(" \t");
    if (at == std::string::npos || line[at] != '#') continue;
    at = line.find_first_not_of(" \t", at + 1);
    if (at == std::string::npos || line.compare(at, 7, "include") != 0) continue;
    at = line.find_first_of("<\"", at);
    if (at == std::string::npos) continue;
    const bool quoted = line[at] == '"';
    const std::size_t end = line.find(quoted ? '"' : '>', at + 1);
    if (end != std::string::npos) result.push_back({line.substr(at + 1, end - at - 1), quoted, n});
  }
  return result;
}

// A header from outside the standard library: what its name begins with, and where it may appear.
struct ThirdParty {
  const char* prefix;
  std::vector<std::string> layers;
  bool only_cuda_folders = false;
};

const std::vector<ThirdParty>& third_party() {
  static const std::vector<std::string> all{"base",
                                            "config",
                                            "tokenizer",
                                            "memory",
                                            "kernels",
                                            "comm",
                                            "parallel",
                                            "nn",
                                            "model",
                                            "data",
                                            "checkpoint",
                                            "train",
                                            "apps"};
  static const std::vector<ThirdParty> list{
      {"mpi.h", {"comm"}},
      {"nccl.h", {"comm"}},
      {"cuda", {"memory", "kernels", "comm", "parallel"}, true},
      {"cublas", {"kernels"}, true},
      {"cub/", {"kernels"}, true},
      {"cooperative_groups", {"kernels"}, true},
      {"mma.h", {"kernels"}, true},
      {"nvtx3/", {"memory", "kernels"}, true},
      {"yaml-cpp/", {"config"}},
      {"CLI/", {"apps"}},
      {"nlohmann/", {"base", "config", "checkpoint", "data", "train", "apps"}},
      {"pcre2.h", {"tokenizer"}},
      {"utf8proc.h", {"tokenizer"}},
      {"liburing.h", {"memory"}},
      {"cblas.h", {"kernels"}},
      {"openblas", {"kernels"}},
      {"zstd.h", {"checkpoint"}},
      {"zlib.h", {"train"}},
      {"spdlog/", all},
      {"fmt/", all},
  };
  return list;
}

bool is_standard(const std::string& name) {
  return name.find_first_of("./") == std::string::npos;
}
bool is_system(const std::string& name) {
  static const std::set<std::string> headers{"unistd.h",
                                             "semaphore.h",
                                             "elf.h",
                                             "link.h",
                                             "fcntl.h",
                                             "sched.h",
                                             "signal.h",
                                             "dirent.h",
                                             "poll.h",
                                             "pthread.h",
                                             "dlfcn.h",
                                             "netdb.h",
                                             "errno.h",
                                             "cpuid.h",
                                             "immintrin.h",
                                             "execinfo.h",
                                             "termios.h",
                                             "getopt.h",
                                             "glob.h"};
  return headers.count(name) > 0 || starts_with(name, "sys/") || starts_with(name, "linux/") ||
         contains(name, "mmintrin.h");
}

using Problems = std::vector<std::string>;

void check_own_include(const std::string& path,
                       const std::string& layer,
                       const Include& include,
                       Problems& problems) {
  const std::string where = path + ":" + std::to_string(include.line) + ": ";
  const auto target = layer_of(include.name);
  if (!target) {
    problems.push_back(where + "\"" + include.name +
                       "\" is not a path from the root of the repository");
  } else if (*target == "tests" && layer != "tests") {
    problems.push_back(where + "product code includes test code");
  } else if (layer != "tests" && layer != *target && layers().at(layer).uses.count(*target) == 0) {
    problems.push_back(where + "layer '" + layer + "' must not use layer '" + *target + "'");
  } else if (contains(include.name, "/cuda/") && !contains(path, "/cuda/") && layer != "tests") {
    problems.push_back(where + "headers of a cuda folder are for cuda folders");
  }
}

void check_outside_include(const std::string& path,
                           const std::string& layer,
                           const Include& include,
                           Problems& problems) {
  const std::string where = path + ":" + std::to_string(include.line) + ": <" + include.name + "> ";
  if (layer == "tests") {
    if (starts_with(include.name, "catch2/") && !starts_with(path, "tests/support/")) {
      problems.push_back(where + "is included through tests/support/catch.h only");
    }
    return;
  }
  if (is_standard(include.name)) return;
  const bool private_folder = contains(path, "/cuda/");
  for (const auto& t : third_party()) {
    if (!starts_with(include.name, t.prefix)) continue;
    if (t.only_cuda_folders && !private_folder)
      problems.push_back(where + "belongs in a cuda folder");
    if (std::find(t.layers.begin(), t.layers.end(), layer) == t.layers.end()) {
      problems.push_back(where + "is not for layer '" + layer + "'");
    }
    if (is_header(path) && !private_folder)
      problems.push_back(where + "must not be seen in a header");
    return;
  }
  if (!is_system(include.name)) {
    problems.push_back(where + "is not in the list of third-party headers");
  } else if (is_header(path) && !contains(path, "/cpu/") && !private_folder) {
    problems.push_back(where + "must not be seen in a header");
  }
}

Problems check_includes(const std::string& path, const std::string& text) {
  Problems problems;
  const auto layer = layer_of(path);
  if (!layer) return {path + ": in no layer"};
  for (const auto& include : includes_of(text)) {
    if (contains(include.name, "..")) {
      problems.push_back(path + ":" + std::to_string(include.line) + ": relative include " +
                         include.name);
    } else if (include.quoted) {
      check_own_include(path, *layer, include, problems);
    } else {
      check_outside_include(path, *layer, include, problems);
    }
  }
  return problems;
}

// Notes to oneself; spelled in halves, since this file is checked too.
Problems check_leftovers(const std::string& path, const std::string& text) {
  static const std::vector<std::string> marks{std::string("TO") + "DO",
                                              std::string("FIX") + "ME",
                                              std::string("XX") + "X:",
                                              std::string("HA") + "CK"};
  Problems problems;
  std::istringstream lines(text);
  std::string line;
  for (int n = 1; std::getline(lines, line); ++n) {
    for (const auto& mark : marks) {
      if (contains(line, mark))
        problems.push_back(path + ":" + std::to_string(n) + ": leftover " + mark);
    }
  }
  return problems;
}

constexpr std::ptrdiff_t kMaxLines = 700;
Problems check_length(const std::string& path, const std::string& text) {
  const auto lines = std::count(text.begin(), text.end(), '\n');
  if (lines <= kMaxLines) return {};
  return {path + ": " + std::to_string(lines) + " lines, at most " + std::to_string(kMaxLines)};
}

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Paths relative to the root of the repository.
std::vector<std::string> files_below(const std::vector<std::string>& folders) {
  const fs::path root(MOESAIC_SOURCE_DIR);
  std::vector<std::string> files;
  for (const auto& folder : folders) {
    if (!fs::exists(root / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      if (entry.is_regular_file())
        files.push_back(entry.path().lexically_relative(root).generic_string());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::string joined(const Problems& problems) {
  std::string text;
  for (const auto& p : problems)
    text += "\n  " + p;
  return text;
}

TEST_CASE("sources follow the layers, and third-party headers stay in their places") {
  Problems problems;
  int checked = 0;
  for (const auto& path :
       files_below({"apps", "core", "parallel", "kernels", "comm", "memory", "tests"})) {
    if (!is_source(path)) continue;
    ++checked;
    const auto text = read(fs::path(MOESAIC_SOURCE_DIR) / path);
    for (const auto& check : {check_includes, check_length}) {
      const auto found = check(path, text);
      problems.insert(problems.end(), found.begin(), found.end());
    }
    for (const auto& include : includes_of(text)) {
      if (include.quoted && !fs::exists(fs::path(MOESAIC_SOURCE_DIR) / include.name)) {
        problems.push_back(path + ": includes \"" + include.name + "\", which does not exist");
      }
    }
  }
  INFO(joined(problems));
  REQUIRE(problems.empty());
  REQUIRE(checked > 20);
}

TEST_CASE("nothing is left over") {
  static const std::set<std::string> texts{
      ".cpp", ".h", ".cu", ".cuh", ".cmake", ".txt", ".sh", ".pl", ".py", ".md", ".yaml"};
  Problems problems;
  for (const auto& path : files_below({"apps",
                                       "core",
                                       "parallel",
                                       "kernels",
                                       "comm",
                                       "memory",
                                       "tests",
                                       "cmake",
                                       "scripts",
                                       "configs",
                                       "docs"})) {
    if (texts.count(fs::path(path).extension().string()) == 0) continue;
    const auto found = check_leftovers(path, read(fs::path(MOESAIC_SOURCE_DIR) / path));
    problems.insert(problems.end(), found.begin(), found.end());
  }
  INFO(joined(problems));
  REQUIRE(problems.empty());
}

TEST_CASE("the build allows no more than the table of layers") {
  std::istringstream lines(read(fs::path(MOESAIC_SOURCE_DIR) / "CMakeLists.txt"));
  std::string line;
  std::set<std::string> found;
  while (std::getline(lines, line)) {
    if (!starts_with(line, "add_layer(")) continue;
    std::istringstream words(line.substr(10));
    std::string name, word, section, folder;
    std::set<std::string> uses;
    words >> name;
    while (words >> word) {
      while (!word.empty() && word.back() == ')')
        word.pop_back();
      if (word == "FOLDER" || word == "USES" || word == "LIBS") {
        section = word;
      } else if (section == "FOLDER") {
        folder = word;
      } else if (section == "USES") {
        uses.insert(word);
      }
    }
    INFO(line);
    REQUIRE(layers().count(name) == 1);
    const auto& layer = layers().at(name);
    REQUIRE(folder == layer.folder);
    REQUIRE(std::includes(layer.uses.begin(), layer.uses.end(), uses.begin(), uses.end()));
    found.insert(name);
  }
  REQUIRE(found.size() == layers().size() - 1);  // apps is not made by add_layer()
}

TEST_CASE("the checks find what they are for") {
  const auto problems = [](const std::string& path, const std::string& text) {
    return check_includes(path, text).size();
  };
  REQUIRE(problems("kernels/a.cpp",
                   "#include \"memory/stream.h\"\n#include <vector>\n#include <fmt/format.h>\n") ==
          0);
  REQUIRE(problems("kernels/a.cpp", "#include \"comm/communicator.h\"\n") == 1);
  REQUIRE(problems("comm/a.cpp", "#include \"kernels/ops/op.h\"\n") == 1);
  REQUIRE(problems("core/base/a.h", "  #  include \"memory/stream.h\"\n") == 1);
  REQUIRE(problems("core/nn/a.h", "#include \"core/model/model.h\"\n") == 1);
  REQUIRE(problems("core/train/a.h", "#include \"core/model/model.h\"\n") == 0);
  REQUIRE(problems("comm/a.cpp", "#include \"../memory/stream.h\"\n") == 1);
  REQUIRE(problems("comm/a.cpp", "#include \"communicator.h\"\n") == 1);
  REQUIRE(problems("comm/a.cpp", "#include \"tests/support/catch.h\"\n") == 1);
  REQUIRE(problems("comm/mpi.cpp", "#include <mpi.h>\n") == 0);
  REQUIRE(problems("comm/mpi.h", "#include <mpi.h>\n") == 1);
  REQUIRE(problems("core/train/a.cpp", "#include <mpi.h>\n") == 1);
  REQUIRE(problems("kernels/cuda/a.h", "#include <cuda_runtime.h>\n") == 0);
  REQUIRE(problems("kernels/a.cpp", "#include <cuda_runtime.h>\n") == 1);
  REQUIRE(problems("core/nn/a.cpp", "#include \"kernels/cuda/check.h\"\n") == 1);
  REQUIRE(problems("core/config/a.cpp", "#include <yaml-cpp/yaml.h>\n") == 0);
  REQUIRE(problems("core/config/a.h", "#include <yaml-cpp/yaml.h>\n") == 1);
  REQUIRE(problems(
              "core/model/a.cpp",
              "#include <CLI/CLI.hpp>\n#include <nlohmann/json.hpp>\n#include <boost/any.hpp>\n") ==
          3);
  REQUIRE(problems("memory/a.h", "#include <fmt/format.h>\n#include <sys/mman.h>\n") == 2);
  REQUIRE(problems("tests/ops/a.cpp", "#include <catch2/catch.hpp>\n") == 1);
  REQUIRE(problems("elsewhere/a.cpp", "") == 1);
  REQUIRE(check_leftovers("a.cpp", std::string("int x;  // TO") + "DO later\n").size() == 1);
  REQUIRE(check_length("a.cpp", std::string(701, '\n')).size() == 1);
  REQUIRE(check_length("a.cpp", std::string(700, '\n')).empty());
}

}  // namespace
}  // namespace moesaic
