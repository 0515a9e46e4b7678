// Manifests made by somebody who knows the checksum.
#include "core/checkpoint/manifest.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/base/crc32c.h"
#include "tests/checkpoint/support.h"

namespace moesaic {
namespace {

using nlohmann::json;
using test::input_error;
using test::mentions;

// Puts the right checksum behind a JSON object without its closing brace.
std::string sealed_text(const std::string& body) {
  return body +
         fmt::format(",\n\"manifest_crc32c\": \"{:08x}\"}}\n", crc32c(body.data(), body.size()));
}
std::string sealed(const json& root) {
  std::string body = root.dump();
  body.pop_back();
  return sealed_text(body);
}

json good() {
  return json::parse(R"({
    "format": "moesaic checkpoint", "schema": 1, "step": 100, "config": "",
    "values": {"integers": {"n": -3}, "reals": {"x": 0.5, "y": "-inf"}, "texts": {"t": "u"}},
    "files": [{"name": "model.safetensors", "bytes": 80, "crc32c": "0123abcd"}],
    "tensors": [
      {"name": "a", "dtype": "F32", "shape": [2, 2], "file": "model.safetensors", "offset": 64, "bytes": 16,
       "crc32c": "00000001"}]})");
}

std::string refusal(const std::string& text) {
  return input_error([&] { parse_manifest(text, "M"); });
}

TEST_CASE("a manifest by hand is read") {
  const auto m = parse_manifest(sealed(good()), "M");
  REQUIRE(m.step == 100);
  REQUIRE(m.values.integers.at("n") == -3);
  REQUIRE(m.values.reals.at("y") < -1e308);
  REQUIRE(m.files.at(0).crc == 0x0123abcdU);
  REQUIRE(m.tensors.at(0).shape == Shape{2, 2});
  const std::string again = manifest_text(m);
  REQUIRE(manifest_text(parse_manifest(again, "M")) == again);
  REQUIRE(json::parse(again).at("tensors").at(0).at("name") == "a");  // it is plain JSON
}

TEST_CASE("hostile file names are refused") {
  for (const char* name : {"../x",
                           "/etc/passwd",
                           "a/b",
                           "..",
                           ".",
                           "",
                           ".hidden",
                           "a\\b",
                           "a b",
                           "manifest.json",
                           "\xc3\xa4"}) {
    INFO(name);
    json root = good();
    root["files"][0]["name"] = name;
    root["tensors"][0]["file"] = name;
    REQUIRE(mentions(refusal(sealed(root)), "is not allowed"));
  }
  json root = good();
  root["files"][0]["name"] = std::string(5000, 'a');
  REQUIRE(refusal(sealed(root)).size() < 500);
}

TEST_CASE("hostile numbers, types and structures are refused") {
  struct Change {
    const char* pointer;
    const char* value;  // JSON
    const char* expected;
  };
  const std::vector<Change> changes{
      {"/format", "\"zip\"", "not the manifest of a moesaic checkpoint"},
      {"/schema", "3", "reads versions 1 and 2"},
      {"/schema", "\"1\"", ", must be "},
      {"/step", "-1", "must not be negative"},
      {"/step", "1.5", ", must be "},
      {"/step", "1e300", ", must be "},
      {"/step", "18446744073709551615", "no integer of 64 bits, must be an integer"},
      {"/config", "null", ", must be "},
      {"/values", "[]", ", must be "},
      {"/values/integers/n", "18446744073709551615", "64-bit"},
      {"/values/integers/n", "1.5", "64-bit"},
      {"/values/reals/x", "\"seven\"", "not a number"},
      {"/values/reals/x", "null", "not a number"},
      {"/values/texts/t", "{}", "not a text"},
      {"/files", "{}", ", must be "},
      {"/files/0", "7", "not an object"},
      {"/files/0/bytes", "79", "beyond the 79 bytes"},
      {"/files/0/crc32c", "\"0123abcg\"", "hexadecimal"},
      {"/files/0/crc32c", "\"123\"", "hexadecimal"},
      {"/tensors/0/dtype", "\"F33\"", "dtype"},
      {"/tensors/0/shape", "[4294967296, 4294967296]", "overflows"},
      {"/tensors/0/shape", "[9223372036854775808]", "no size"},
      {"/tensors/0/shape", "[-2, -2]", "no size"},
      {"/tensors/0/shape", "[2, 3]", "24 bytes, the manifest says 16"},
      {"/tensors/0/shape", "[1, 1, 1, 1, 2, 2]", "rank 6"},
      {"/tensors/0/file", "\"other\"", "not in the table"},
      {"/tensors/0/offset", "65", "ends beyond"},
      {"/tensors/0/offset", "9223372036854775807", "ends beyond"},
      {"/tensors/0/bytes", "9223372036854775807", "the manifest says 9223372036854775807"},
  };
  for (const auto& c : changes) {
    json root = good();
    root[json::json_pointer(c.pointer)] = json::parse(c.value);
    const auto text = refusal(sealed(root));
    INFO(c.pointer << " = " << c.value << ": " << text);
    REQUIRE(mentions(text, c.expected));
  }
  const json whole = good();
  for (const auto& item : whole.items()) {
    json root = good();
    root.erase(item.key());
    REQUIRE(mentions(refusal(sealed(root)), "has no '" + item.key() + "'"));
  }
}

TEST_CASE("entries that appear twice or overlap are refused") {
  json root = good();
  root["files"].push_back(root["files"][0]);
  REQUIRE(mentions(refusal(sealed(root)), "listed twice"));
  root = good();
  root["tensors"].push_back(root["tensors"][0]);
  REQUIRE(mentions(refusal(sealed(root)), "'a' is listed twice"));
  root["tensors"][1]["name"] = "b";
  root["tensors"][1]["offset"] = 60;
  REQUIRE(mentions(refusal(sealed(root)), "overlap"));
  std::string body = good().dump();
  body.pop_back();
  REQUIRE(
      mentions(refusal(sealed_text(body + ",\"step\": 100")), "the key \"step\" is given twice"));
}

TEST_CASE("deep, broken and short texts are refused quickly") {
  const std::string deep(1000000, '[');
  REQUIRE(mentions(refusal(sealed_text("{\"a\": " + deep)), "nested more than 4 deep"));
  REQUIRE(mentions(refusal(sealed_text("{\"a\": [{\"b\": [[")), "nested more than 4 deep"));
  REQUIRE(mentions(refusal(sealed_text("{\"a\": nope")), "not valid JSON"));
  REQUIRE(mentions(refusal(sealed_text("[1")), "not valid JSON"));
  std::string zero = good().dump();
  REQUIRE(mentions(refusal(sealed_text(zero + std::string(1, '\0'))), "a zero byte"));
  REQUIRE(mentions(refusal(""), "too few"));
  REQUIRE(mentions(refusal(sealed(good()) + " "), "does not end with its checksum"));
  std::string changed = sealed(good());
  changed[5] = 'x';
  REQUIRE(mentions(refusal(changed), "checksum of the manifest"));
}

TEST_CASE("names of checkpoint folders") {
  REQUIRE(folder_name(100) == "step-00000100");
  REQUIRE(folder_name(1234567890123) == "step-1234567890123");
  REQUIRE(step_of_folder("step-00000100") == 100);
  REQUIRE(step_of_folder("step-1234567890123") == 1234567890123);
  for (const char* name : {"step-100",
                           "step-000000100",
                           "step-",
                           "step--0000001",
                           "step-0000010x",
                           "step-99999999999999999999",
                           "100",
                           ".tmp-step-00000100"}) {
    INFO(name);
    REQUIRE(step_of_folder(name) == -1);
  }
}

}  // namespace
}  // namespace moesaic
