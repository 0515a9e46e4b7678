// replay NAME FOLDER: runs a fuzz target over every file of its corpus, in any build. Names the file before it is run, so that one
// that ends the process is known.
#include <algorithm>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/fuzz/fuzz.h"

namespace {

namespace fs = std::filesystem;

std::string content_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

int replay(const moesaic::fuzz::Target& target, const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder))
    files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  if (files.empty()) {
    std::cerr << folder << " holds no input: the replay would test nothing\n";
    return 1;
  }
  for (const auto& path : files) {
    std::cout << path.filename().string() << std::endl;
    const std::string content = content_of(path);
    const std::vector<char> exact(content.begin(), content.end());
    try {
      target.run({exact.data(), exact.size()});
    } catch (const std::exception& error) {
      std::cerr << "fuzz: an exception that no input may cause: " << error.what() << '\n';
      return 1;
    }
  }
  std::cout << target.name << ": " << files.size() << " inputs\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) {
    for (const auto& target : moesaic::fuzz::targets()) {
      if (target.name == std::string_view(argv[1])) return replay(target, argv[2]);
    }
  }
  std::cerr << "usage: replay NAME FOLDER, with a NAME of:";
  for (const auto& target : moesaic::fuzz::targets())
    std::cerr << ' ' << target.name;
  std::cerr << '\n';
  return 2;
}
