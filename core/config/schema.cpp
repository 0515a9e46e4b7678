#include "core/config/schema.h"

#include <cmath>

#include <nlohmann/json.hpp>

#include "core/config/fields.h"

namespace moesaic::config {
namespace {

using Json = nlohmann::ordered_json;

Json section_schema(const Section& section);

/// YAML readers of editors take `1_000` and sizes for strings.
constexpr const char* kGroupedDigits = "^[-+]?[0-9]+(_[0-9]+)*([eE][0-9]+)?$";
constexpr const char* kBytes = "^[0-9_.]+(e[0-9]+)? ?([KMGT]i?B|kB|B)$";
constexpr const char* kTime = "^[0-9_.]+ ?(ms|s|m|h|d)$";

void add_range(const Field& field, Json& json) {
  const auto bound = [](double x) {
    return x == std::floor(x) && std::abs(x) < 9e15 ? Json(static_cast<std::int64_t>(x)) : Json(x);
  };
  if (std::isfinite(field.minimum))
    json[field.minimum_excluded ? "exclusiveMinimum" : "minimum"] = bound(field.minimum);
  if (std::isfinite(field.maximum))
    json[field.maximum_excluded ? "exclusiveMaximum" : "maximum"] = bound(field.maximum);
}

Json number_schema(const Field& field, const char* type, const char* pattern) {
  Json json = {{"type", {type, "string"}}, {"pattern", pattern}};
  add_range(field, json);
  return json;
}

Json type_schema(const Field& field, const Type& type) {
  switch (type.kind) {
    case Kind::boolean:
      return {{"type", "boolean"}};
    case Kind::integer:
      if (field.unit == Unit::bytes)
        return {{"anyOf", {{{"const", 0}}, {{"type", "string"}, {"pattern", kBytes}}}}};
      return number_schema(field, "integer", kGroupedDigits);
    case Kind::number:
      if (field.unit == Unit::minutes || field.unit == Unit::seconds)
        return number_schema(field, "number", kTime);
      return number_schema(field, "number", "^[-+]?[0-9_]+(\\.[0-9_]+)?([eE][-+]?[0-9]+)?$");
    // A path or name may look like a number to YAML and is a text to us all the same.
    case Kind::text:
      return {{"type", {"string", "number", "boolean"}}};
    case Kind::choice: {
      Json words = type.choices;
      for (const auto& [older, now] : field.older_words)
        words.push_back(older);
      return {{"enum", words}};
    }
    case Kind::optional:
      return {{"anyOf", Json::array({type_schema(field, *type.item), Json{{"type", "null"}}})}};
    case Kind::list: {
      Json list = {{"type", "array"}, {"items", type_schema(field, *type.item)}};
      if (!field.accepts_one) return list;
      return {{"anyOf", Json::array({type_schema(field, *type.item), list})}};
    }
    case Kind::group: {
      if (type.group->shorthand.empty()) return section_schema(*type.group);
      const Field& member = *type.group->find(type.group->shorthand);
      return {
          {"anyOf", Json::array({type_schema(member, member.type), section_schema(*type.group)})}};
    }
  }
  return {};
}

/// The default as JSON, for values that have one.
void add_default(const Section& section, const Field& field, Json& json) {
  if (field.is_required || !field.default_note.empty() || field.type.kind == Kind::group) return;
  const void* value = field.address(section.defaults.get());
  switch (field.type.kind) {
    case Kind::boolean:
      json["default"] = *static_cast<const bool*>(value);
      break;
    case Kind::integer:
      json["default"] = *static_cast<const std::int64_t*>(value);
      break;
    case Kind::number:
      json["default"] = *static_cast<const double*>(value);
      break;
    case Kind::text:
      json["default"] = *static_cast<const std::string*>(value);
      break;
    case Kind::choice:
      json["default"] = value_text(field, field.type, value);
      break;
    case Kind::optional:
      json["default"] = nullptr;
      break;
    default:
      json["default"] = Json::array();
      break;
  }
}

Json field_schema(const Section& section, const Field& field) {
  Json json;
  json["description"] = field.doc + (field.is_required ? " Required." : "");
  json.update(
      field.accepts_null
          ? Json{{"anyOf", Json::array({type_schema(field, field.type), Json{{"type", "null"}}})}}
          : type_schema(field, field.type));
  add_default(section, field, json);
  return json;
}

Json section_schema(const Section& section) {
  Json properties = Json::object();
  for (const Field& field : section.fields)
    properties[field.key] = field_schema(section, field);
  return {{"type", "object"}, {"additionalProperties", false}, {"properties", properties}};
}

}  // namespace

std::string json_schema() {
  Json json = {{"$schema", "http://json-schema.org/draft-07/schema#"},
               {"title", "moesaic configuration"}};
  json.update(section_schema(root_section()));
  return json.dump(2) + "\n";
}

}  // namespace moesaic::config
