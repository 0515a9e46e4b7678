#include <nlohmann/json.hpp>

#include "core/config/fields.h"
#include "core/config/nearest.h"
#include "core/config/overrides.h"
#include "core/config/reader.h"
#include "core/config/schema.h"
#include "tests/support/catch.h"
#include "tests/unit/config_support.h"

using namespace config_tests;
namespace config = moesaic::config;
using nlohmann::json;

namespace {

/// The part of the schema that describes an object, under "anyOf" and "items" if need be.
const json* object_of(const json& schema) {
  if (schema.contains("properties")) return &schema;
  if (schema.contains("items")) return object_of(schema["items"]);
  if (schema.contains("anyOf")) {
    for (const json& alternative : schema["anyOf"]) {
      if (const json* found = object_of(alternative)) return found;
    }
  }
  return nullptr;
}

/// Schema of a full key as `walk` writes it, nullptr if there is none.
const json* schema_of(const json& root, const std::string& key) {
  const json* at = &root;
  std::size_t i = 0;
  while (i <= key.size()) {
    const std::size_t end = std::min(key.find('.', i), key.size());
    std::string part = key.substr(i, end - i);
    if (part.ends_with("[]")) part.resize(part.size() - 2);
    const json* object = object_of(*at);
    if (!object || !(*object)["properties"].contains(part)) return nullptr;
    at = &(*object)["properties"][part];
    i = end + 1;
  }
  return at;
}

/// `train.phases[].until` -> `train.phases[0].until`.
std::string first_item(std::string key) {
  for (std::size_t i = key.find("[]"); i != std::string::npos; i = key.find("[]"))
    key.insert(i + 1, "0");
  return key;
}

}  // namespace

TEST_CASE("config: the schema covers every key and closes every object") {
  const json schema = json::parse(config::json_schema());
  CHECK(schema["$schema"] == "http://json-schema.org/draft-07/schema#");
  CHECK(schema["additionalProperties"] == false);
  int keys = 0;
  config::walk(config::root_section(), "", [&](const std::string& key, const config::Field& field) {
    CAPTURE(key);
    const json* found = schema_of(schema, key);
    REQUIRE(found);
    CHECK(contains((*found)["description"].get<std::string>(), field.doc));
    if (const json* object = object_of(*found)) CHECK((*object)["additionalProperties"] == false);
    ++keys;
  });
  CHECK(keys > 150);
}

TEST_CASE("config: the schema has types, choices, ranges and defaults") {
  const json schema = json::parse(config::json_schema());
  CHECK((*schema_of(schema, "model.hidden_act"))["enum"] == json::array({"silu", "situ"}));
  CHECK((*schema_of(schema, "model.hidden_act"))["default"] == "silu");
  CHECK((*schema_of(schema, "optimizer.untouched"))["enum"] ==
        json::array({"dense", "lazy", "skip", "decay"}));  // the last one is an earlier word
  CHECK((*schema_of(schema, "optimizer.beta1"))["exclusiveMaximum"] == 1);
  CHECK((*schema_of(schema, "optimizer.lr"))["exclusiveMinimum"] == 0);
  CHECK_FALSE(schema_of(schema, "optimizer.lr")->contains("default"));
  CHECK((*schema_of(schema, "train.micro_batch_size"))["minimum"] == 1);
  CHECK((*schema_of(schema, "run.max_minutes"))["anyOf"][1]["type"] == "null");
}

TEST_CASE("config: explain has a text with a working example for every key") {
  config::walk(config::root_section(), "", [&](const std::string& key, const config::Field& field) {
    CAPTURE(key);
    const std::string text = config::explain(key);
    CHECK(contains(text, field.doc));
    if (field.type.section() || key == "base") return;
    const std::string mark = "  example: ";
    const std::size_t start = text.find(mark);
    REQUIRE(start != std::string::npos);
    const std::string example =
        first_item(text.substr(start + mark.size(), text.find('\n', start) - start - mark.size()));
    CAPTURE(example);
    std::vector<Problem> problems;
    config::Node root;
    root.kind = config::Node::Kind::map;
    config::apply_overrides(root, {example}, problems);
    config::Config scratch;
    config::Reader(problems, nullptr, false).section(config::root_section(), root, "", &scratch);
    for (const Problem& problem : problems)
      UNSCOPED_INFO(to_string(problem));
    CHECK(problems.empty());
  });
}

TEST_CASE("config: explain finds keys and says what is near") {
  CHECK(contains(config::explain(""), "optimizer"));
  CHECK(contains(config::explain("model"), "num_experts"));
  CHECK(contains(config::explain("num_experts"), "model.num_experts\n"));
  CHECK(contains(config::explain("n_routed_experts"), "model.num_experts\n"));
  CHECK(contains(config::explain("train.phases[3].until"), "train.phases[].until\n"));
  CHECK_THROWS_WITH(config::explain("model.num_expert"),
                    "model.num_expert: unknown key; did you mean model.num_experts?");
  CHECK_THROWS_WITH(config::explain("sequence_length"),
                    "sequence_length: several keys have this name: data.sequence_length, "
                    "train.phases[].sequence_length");
  CHECK_THROWS_AS(config::explain("model.hidden_size.x"), moesaic::UsageError);
  CHECK_THROWS_AS(config::explain("a..b"), moesaic::UsageError);
}

TEST_CASE("config: edit distance") {
  CHECK(config::edit_distance("", "") == 0);
  CHECK(config::edit_distance("abc", "") == 3);
  CHECK(config::edit_distance("kitten", "sitting") == 3);
  CHECK(config::edit_distance("trian", "train") == 1);
  CHECK(config::nearest("hiden", {"hidden", "width"}) == "hidden");
  CHECK(config::nearest("zzz", {"hidden", "width"}).empty());
}
