// What tells whether two machines have the same data.
#include "core/data/fingerprint.h"

#include <set>

#include "tests/data/files.h"
#include "tests/support/catch.h"

namespace moesaic::data {

TEST_CASE("fingerprints tell sources apart and are those of equal ones") {
  const Folder folder("fingerprint");
  const auto of = [&](const std::string& name, const std::string& text) {
    return fingerprint(*open_text(folder.write(name, text)));
  };
  std::string many;
  for (int i = 0; i < 1000; ++i)
    many += std::string(static_cast<std::size_t>(i % 90 + 1), static_cast<char>('a' + i % 26)) +
            "\n\f\n";
  std::set<std::uint32_t> all{of("a", "x"), of("b", "y"), of("c", "xx"), of("d", "x\n\f\nx")};
  CHECK(all.size() == 4);
  CHECK(of("e", many) == of("f", many));
  CHECK(of("e", many) != of("f", many + "z"));
  CHECK(of("e", many) != of("f", "A" + many.substr(1)));
  std::string last = many;
  last[last.size() - 4] = 'Z';
  CHECK(of("e", many) != of("f", last));
}

}  // namespace moesaic::data
