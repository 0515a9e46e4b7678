#include "core/checkpoint/safetensors.h"

#include <filesystem>
#include <fstream>

#include <unistd.h>

#include "tests/ops/op_test.h"

namespace moesaic::test {
namespace {

// A file of its own for each test process; removed at the end.
struct TempFile {
  std::filesystem::path path = std::filesystem::temp_directory_path() /
                               ("moesaic_safetensors_" + std::to_string(::getpid()));
  ~TempFile() { std::filesystem::remove(path); }
  void write(const std::string& bytes) const { std::ofstream(path, std::ios::binary) << bytes; }
  std::string read() const {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
};

std::string file_bytes(const std::string& header, std::size_t data) {
  std::uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(data, '\1');
}

}  // namespace

TEST_CASE("safetensors: what is written is read back") {
  Rig rig;
  const TempFile file;
  const TensorView a = rig.random({3, 5}, DType::bf16, 1), b = rig.random({2}, DType::f64, 2),
                   c = rig.ints({1, -2, 3}), e = rig.zeros({0, 4}, DType::f32),
                   s = rig.values({2.5}, {}, DType::f32);
  const std::vector<NamedTensor> tensors{
      {"a", a}, {"b", b}, {"c \"quoted\"\n", c}, {"empty", e}, {"scalar", s}};
  write_safetensors(file.path, tensors, {{"format", "pt"}, {"note", "x"}});
  const SafetensorsFile in(file.path);
  CHECK(in.tensors().size() == 5);
  CHECK(in.metadata().at("format") == "pt");
  for (const auto& t : tensors) {
    CHECK(in.view(t.name).shape() == t.view.shape());
    CHECK(in.view(t.name).dtype() == t.view.dtype());
    CHECK(same_bits(in.view(t.name), t.view));
  }
  CHECK(in.tensors().at("b").offset ==
        0);  // the largest element type first, so that all data is aligned
  CHECK_THROWS_AS(in.view("none"), InputError);
  CHECK_THROWS_AS(write_safetensors("/nonexistent/x", tensors, {}), ResourceError);
}

TEST_CASE("safetensors: a file cut anywhere, or with a byte too many, is refused") {
  Rig rig;
  const TempFile file;
  write_safetensors(file.path, std::vector<NamedTensor>{{"a", rig.random({4}, DType::f32, 1)}}, {});
  const std::string whole = file.read();
  for (std::size_t n = 0; n < whole.size(); ++n) {
    file.write(whole.substr(0, n));
    CHECK_THROWS_AS(SafetensorsFile(file.path), InputError);
  }
  file.write(whole + "x");
  CHECK_THROWS_AS(SafetensorsFile(file.path), InputError);
  file.write(whole);
  CHECK_NOTHROW(SafetensorsFile(file.path));
}

TEST_CASE("safetensors: hostile headers are refused with the file's name") {
  const TempFile file;
  const auto refused = [&](const std::string& header, std::size_t data) {
    file.write(file_bytes(header, data));
    INFO(header.substr(0, 100));
    try {
      const SafetensorsFile in(file.path);
      FAIL_CHECK("accepted");
    } catch (const InputError& e) {
      CHECK(std::string(e.what()).find(file.path.string()) != std::string::npos);
    }
  };
  const std::string good = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  file.write(file_bytes("{" + good + "}  ", 8));
  CHECK_NOTHROW(SafetensorsFile(file.path));
  refused("", 0);
  refused("[]", 0);
  refused("{" + good + "} x", 8);
  refused("{" + good, 8);
  refused("{" + good + "," + good + "}", 8);  // twice
  refused(R"({"__metadata__":{},"__metadata__":{}})", 0);
  refused(R"({"__metadata__":{"a":"1","a":"2"}})", 0);
  refused(R"({"__metadata__":{"a":1}})", 0);
  refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":"x"}})", 8);
  refused(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8);
  refused(R"({"a":{"dtype":"F32","shape":[2]}})", 8);
  refused(R"({"a":{"dtype":"Q7","shape":[2],"data_offsets":[0,8]}})", 8);
  refused(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8);
  refused(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8);
  refused(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8);  // wrong size
  refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8);
  refused(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})",
          0);  // overflows to 0
  refused(R"({"a":{"dtype":"F32","shape":[18446744073709551615,0],"data_offsets":[0,0]}})", 0);
  refused(R"({"a":{"dtype":"F32","shape":[1,1,1,1,1,1],"data_offsets":[0,4]}})", 4);
  refused("{" + good + R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
          12);  // overlap
  refused("{" + good + R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})", 16);  // hole
  refused(R"({"a":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})", 8);
  refused(R"({"a":)" + std::string(100000, '['), 0);  // nesting
  refused(R"({"a":)" + std::string(100000, '{'), 0);
  refused("{" + good + "}" + std::string(1, '\0'), 8);
  std::uint64_t huge = ~std::uint64_t{0};
  file.write(std::string(reinterpret_cast<const char*>(&huge), 8) + "{}");
  CHECK_THROWS_AS(SafetensorsFile(file.path), InputError);
  CHECK_THROWS_AS(SafetensorsFile("/"), InputError);
  CHECK_THROWS_AS(SafetensorsFile("/nonexistent"), InputError);
}

}  // namespace moesaic::test
