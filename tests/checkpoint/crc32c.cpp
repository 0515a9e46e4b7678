#include "core/base/crc32c.h"

#include <string>
#include <vector>

#include "tests/support/catch.h"

namespace moesaic {
namespace {

TEST_CASE("CRC-32C of the published vectors") {
  const std::string digits = "123456789";
  std::vector<unsigned char> zeros(32, 0), ones(32, 0xff), up(32), down(32);
  for (unsigned i = 0; i < 32; ++i) {
    up[i] = static_cast<unsigned char>(i);
    down[i] = static_cast<unsigned char>(31 - i);
  }
  for (auto* f : {&crc32c, &crc32c_by_table}) {
    REQUIRE(f(nullptr, 0, 0) == 0U);
    REQUIRE(f(digits.data(), 9, 0) == 0xe3069283U);  // the check value of the algorithm
    // RFC 3720, appendix B.4 (bytes there in order of transmission)
    REQUIRE(f(zeros.data(), 32, 0) == 0x8a9136aaU);
    REQUIRE(f(ones.data(), 32, 0) == 0x62a8ab43U);
    REQUIRE(f(up.data(), 32, 0) == 0x46dd794eU);
    REQUIRE(f(down.data(), 32, 0) == 0x113fdb5cU);
  }
}

TEST_CASE("CRC-32C continues over cuts, at any alignment") {
  std::vector<unsigned char> data(301);
  for (std::size_t i = 0; i < data.size(); ++i)
    data[i] = static_cast<unsigned char>(i * i * 7 + i);
  for (std::size_t begin = 0; begin < 9; ++begin) {
    const std::size_t n = data.size() - begin;
    const auto whole = crc32c_by_table(data.data() + begin, n);
    for (std::size_t cut = 0; cut <= n; cut += 3) {
      const auto first = crc32c(data.data() + begin, cut);
      REQUIRE(crc32c(data.data() + begin + cut, n - cut, first) == whole);
    }
  }
}

}  // namespace
}  // namespace moesaic
