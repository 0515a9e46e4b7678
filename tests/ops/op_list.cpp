#include "kernels/ops/op_list.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>

#include "tests/support/catch.h"

namespace moesaic {
namespace {

// Every kName in the headers of kernels/ops.
std::vector<std::string> names_in_headers() {
  std::vector<std::string> names;
  const std::regex pattern("kName = \"([a-z0-9_]+)\"");
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(MOESAIC_SOURCE_DIR) + "/kernels/ops")) {
    std::stringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    const std::string s = text.str();
    for (std::sregex_iterator i(s.begin(), s.end(), pattern), end; i != end; ++i)
      names.push_back((*i)[1]);
  }
  std::sort(names.begin(), names.end());
  return names;
}

struct WithoutCuda {
  static constexpr const char* kName = "without_cuda";
};

}  // namespace

TEST_CASE("The op list has every op of the headers, each name once") {
  auto listed = op_names();
  std::sort(listed.begin(), listed.end());
  CHECK(std::adjacent_find(listed.begin(), listed.end()) == listed.end());
  CHECK(listed == names_in_headers());
}

TEST_CASE("Ops without a CUDA kernel are found, those with one are not") {
  const auto missing = missing_cuda_ops();
  const auto is_missing = [&](const char* op) {
    return std::find(missing.begin(), missing.end(), op) != missing.end();
  };
  CHECK_FALSE(is_missing(AdamW::kName));
  CHECK_FALSE(is_missing(Gemm::kName));
  CHECK_FALSE(is_missing(RmsNormForward::kName));
  CHECK_FALSE(is_missing(RmsNormBackward::kName));
  CHECK_FALSE(is_missing(TopK::kName));
  static_assert(!HasCuda<WithoutCuda>);
}

}  // namespace moesaic
