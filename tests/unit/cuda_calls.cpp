// Rules of the CUDA sources: the status of every call of the toolkit and of every launch is looked at, and nothing but the
// functions of streams and buffers waits for a device or allocates.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/catch.h"

namespace moesaic {
namespace {

namespace fs = std::filesystem;
using Problems = std::vector<std::string>;

// Comments and string literals become blanks; lines stay.
std::string code_of(const std::string& text) {
  std::string code = text;
  enum class In { product, line, block, string } in = In::product;
  for (std::size_t i = 0; i < code.size(); ++i) {
    const char c = text[i], next = i + 1 < text.size() ? text[i + 1] : '\0';
    const In before = in;
    if (in == In::product) {
      in = c == '/' && next == '/'                       ? In::line
           : c == '/' && next == '*'                     ? In::block
           : c == '"' && (i == 0 || text[i - 1] != '\'') ? In::string
                                                         : In::product;
    } else if (in == In::line) {
      in = c == '\n' ? In::product : In::line;
    } else if (in == In::block) {
      in = i > 0 && text[i - 1] == '*' && c == '/' ? In::product : In::block;
    } else if (c == '\\') {
      code[i++] = ' ';
    } else if (c == '"') {
      in = In::product;
    }
    if ((before != In::product || in != In::product) && code[i] != '\n') code[i] = ' ';
  }
  return code;
}

std::string place(const std::string& path, const std::string& code, std::size_t at) {
  return path + ":" +
         std::to_string(
             1 + std::count(code.begin(), code.begin() + static_cast<std::ptrdiff_t>(at), '\n')) +
         ": ";
}

void check_calls(const std::string& path, const std::string& code, Problems& problems) {
  static const std::regex call(R"(\b((?:cuda|cublasLt|nccl|cu)[A-Z]\w*)\s*\()");
  // Texts of a status, and the status of the thread, which is read to look at it or to forget it.
  static const std::regex harmless(R"((Get(Last)?Error(String|Name)?|GetStatus(String|Name))$)");
  static const std::regex looked_at(
      R"(MOESAIC_\w+\(|check_\w+\(|(const )?\w+(Error|Result|Status)_t \w+ = $|[!=]= *$)");
  for (std::sregex_iterator it(code.begin(), code.end(), call), end; it != end; ++it) {
    const std::string name = (*it)[1];
    if (std::regex_search(name, harmless)) continue;
    const auto at = static_cast<std::size_t>(it->position());
    const std::size_t from = code.find_last_of(";{}", at);
    const std::string statement = code.substr(from + 1, at - from - 1);
    if (std::regex_search(statement, looked_at)) continue;
    // if (call(...) != cudaSuccess)
    const std::string rest = code.substr(at, code.find(';', at) - at);
    if (std::regex_search(rest, std::regex(R"([!=]= \w+(Success|SUCCESS))"))) continue;
    problems.push_back(place(path, code, at) + name + ": nobody looks at its status");
  }
}

// After a launch, before its function ends, comes check_launch(), or what it does.
void check_launches(const std::string& path, const std::string& code, Problems& problems) {
  for (std::size_t at = code.find("<<<"); at != std::string::npos; at = code.find("<<<", at + 3)) {
    const std::size_t check = std::min(code.find("check_launch(", at),
                                       code.find("cudaGetLastError()", at)),
                      function_end = code.find("\n}", at);
    if (check > function_end)
      problems.push_back(place(path, code, at) + "a launch that no check_launch() follows");
  }
}

// Streams and buffers (memory/) may, and what NCCL's communicator does to a stream of its own.
void check_waits(const std::string& path, const std::string& code, Problems& problems) {
  static const std::regex waits(
      R"(\bcuda(DeviceSynchronize|StreamSynchronize|EventSynchronize|Memcpy|Memset|Malloc\w*|Free\w*|HostAlloc)\s*\()");
  for (std::sregex_iterator it(code.begin(), code.end(), waits), end; it != end; ++it)
    problems.push_back(place(path, code, static_cast<std::size_t>(it->position())) + it->str() +
                       "…) waits for the device or allocates");
}

std::string read(const fs::path& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

Problems problems_of(const std::string& path, const std::string& text) {
  Problems problems;
  const std::string code = code_of(text);
  check_calls(path, code, problems);
  check_launches(path, code, problems);
  if (path.rfind("kernels/", 0) == 0) check_waits(path, code, problems);
  return problems;
}

}  // namespace

TEST_CASE("every CUDA call and launch is checked, and no kernel's host code waits or allocates") {
  const fs::path root = MOESAIC_SOURCE_DIR;
  int files = 0;
  for (const char* folder : {"kernels/cuda", "memory/cuda", "comm/cuda"}) {
    for (const auto& entry : fs::directory_iterator(root / folder)) {
      ++files;
      const std::string path = fs::relative(entry.path(), root).string();
      for (const auto& problem : problems_of(path, read(entry.path())))
        FAIL_CHECK(problem);
    }
  }
  CHECK(files > 80);
}

// The names of the kernels' files stand in the script's head, by what runs them there.
TEST_CASE("every kernel with shared memory is among those that the race checker sees") {
  const fs::path root = MOESAIC_SOURCE_DIR;
  const std::string script = read(root / "scripts/gpu_sanitize.sh");
  std::string shared =
      R"(__shared__|\brow_sum<)";  // or a header that has some; device.cuh has row_sum() alone
  for (const auto& entry : fs::directory_iterator(root / "kernels/cuda")) {
    const std::string name = entry.path().filename().string();
    if (entry.path().extension() == ".cuh" && name != "device.cuh" &&
        read(entry.path()).find("__shared__") != std::string::npos)
      shared += "|cuda/" + std::regex_replace(name, std::regex(R"(\.)"), R"(\.)") + "\"";
  }
  int kernels = 0;
  for (const auto& entry : fs::directory_iterator(root / "kernels/cuda")) {
    if (entry.path().extension() != ".cu" ||
        !std::regex_search(read(entry.path()), std::regex(shared)))
      continue;
    ++kernels;
    const std::string name = entry.path().stem().string();
    INFO("kernels/cuda/" << name << ".cu: name what runs it in scripts/gpu_sanitize.sh");
    CHECK(std::regex_search(script, std::regex("\\b" + name + "\\b")));
  }
  CHECK(kernels > 40);
}

// A pattern that fits no test any more runs nothing, and passes.
TEST_CASE("the tests that the GPU scripts name exist") {
  const fs::path root = MOESAIC_SOURCE_DIR;
  std::string sources;
  for (const auto& entry : fs::directory_iterator(root / "tests/cuda"))
    if (entry.path().extension() == ".cpp") sources += read(entry.path());
  std::vector<std::string> tests;
  static const std::regex test_case(R"re(TEST_CASE\(\s*"((?:[^"\\]|\\.)*)"((?:\s*"[^"]*")*))re");
  static const std::regex more(R"re("([^"]*)")re");
  for (std::sregex_iterator it(sources.begin(), sources.end(), test_case), end; it != end; ++it) {
    std::string name = (*it)[1];
    const std::string rest = (*it)[2];
    for (std::sregex_iterator part(rest.begin(), rest.end(), more); part != end; ++part)
      name += (*part)[1];
    tests.push_back(name);
  }
  CHECK(tests.size() > 100);
  int patterns = 0;
  static const std::regex filter(R"re(test_cuda"? '([^']*)')re"), one(R"re([^,]+)re");
  for (const char* file : {"scripts/gpu_sanitize.sh", "scripts/gpu_check.sh"}) {
    const std::string script = read(root / file);
    for (std::sregex_iterator it(script.begin(), script.end(), filter), end; it != end; ++it) {
      const std::string filters = (*it)[1];
      for (std::sregex_iterator at(filters.begin(), filters.end(), one); at != end; ++at) {
        std::string pattern = at->str();
        if (pattern.find('[') != std::string::npos || pattern[0] == '~') continue;  // tags
        ++patterns;
        INFO(file << ": '" << pattern << "' names no test of tests/cuda");
        if (pattern.back() == '*') pattern.pop_back();
        CHECK(std::any_of(tests.begin(), tests.end(), [&](const std::string& name) {
          return name.starts_with(pattern);
        }));
      }
    }
  }
  CHECK(patterns > 10);
}

TEST_CASE("an unchecked CUDA call or launch is found") {
  const auto count = [](const std::string& text) {
    return problems_of("kernels/cuda/x.cu", text).size();
  };
  CHECK(count("void f() {\n  cudaEventRecord(a, b);\n}\n") == 1);
  CHECK(count("void f() {\n  MOESAIC_CUDA_CALL(cudaEventRecord(a, b));\n}\n") == 0);
  CHECK(count("void f() {\n  // cudaEventRecord(a, b);\n  g(\"cudaFree(x)\");\n}\n") == 0);
  CHECK(count("void f() {\n  if (cudaGetDevice(&d) != cudaSuccess) d = 0;\n}\n") == 0);
  CHECK(count("void f() {\n  k<<<1, 2>>>(x);\n}\nvoid g() {\n  check_launch(x);\n}\n") == 1);
  CHECK(count("void f() {\n  k<<<1, 2>>>(x);\n  check_launch(x);\n}\n") == 0);
  CHECK(count("void f() {\n  MOESAIC_CUDA_CALL(cudaStreamSynchronize(s));\n}\n") == 1);
  CHECK(count("void f() {\n  MOESAIC_CUDA_CALL(cudaMemsetAsync(p, 0, n, s));\n}\n") == 0);
}

}  // namespace moesaic
