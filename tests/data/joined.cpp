#include <vector>

#include "core/data/joined_source.h"
#include "tests/support/catch.h"

namespace moesaic::data {
namespace {

class Fixed : public TokenSource {
 public:
  Fixed(std::string name, std::vector<std::vector<std::int32_t>> documents)
      : name_(std::move(name)), documents_(std::move(documents)) {}
  std::int64_t num_documents() const noexcept override {
    return static_cast<std::int64_t>(documents_.size());
  }
  std::int64_t document_length(std::int64_t d) const override {
    return static_cast<std::int64_t>(documents_[static_cast<std::size_t>(d)].size());
  }
  void read(std::int64_t d, std::int64_t begin, std::span<std::int32_t> out) const override {
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = documents_[static_cast<std::size_t>(d)][static_cast<std::size_t>(begin) + i];
  }
  const std::string& name() const noexcept override { return name_; }

 private:
  std::string name_;
  std::vector<std::vector<std::int32_t>> documents_;
};

TEST_CASE("joined sources hold all documents in order", "[data]") {
  const auto joined = join_sources(
      {std::make_shared<Fixed>("a", std::vector<std::vector<std::int32_t>>{{1, 0}, {2, 3, 0}}),
       std::make_shared<Fixed>("empty", std::vector<std::vector<std::int32_t>>{}),
       std::make_shared<Fixed>("b", std::vector<std::vector<std::int32_t>>{{4, 5, 6, 0}})});
  REQUIRE(joined->num_documents() == 3);
  CHECK(joined->num_tokens() == 9);
  CHECK(joined->document_length(1) == 3);
  std::vector<std::int32_t> out(2);
  joined->read(2, 1, out);
  CHECK(out == std::vector<std::int32_t>{5, 6});
  joined->read(0, 0, out);
  CHECK(out == std::vector<std::int32_t>{1, 0});
  CHECK(joined->name() == "a, empty, b");
}

}  // namespace
}  // namespace moesaic::data
