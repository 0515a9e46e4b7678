#include "core/checkpoint/manifest.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/base/crc32c.h"
#include "core/base/durable_file.h"
#include "core/base/json_value.h"
#include "core/checkpoint/safetensors_header.h"

namespace moesaic {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr const char* kFormat = "moesaic checkpoint";
constexpr JsonLimits kLimits{.max_bytes = kMaxManifestBytes,
                             .max_depth = 4};  // {"tensors": [{"shape": [..]}]}
constexpr std::size_t kMaxFileName = 200;

std::string hex(std::uint32_t crc) {
  return fmt::format("{:08x}", crc);
}

// The end of the file. It holds the checksum of all bytes before it, so that no byte of the file is
// unchecked.
std::string seal(std::uint32_t crc) {
  return fmt::format(",\n\"manifest_crc32c\": \"{:08x}\"}}\n", crc);
}

// JSON has no numbers for these.
ordered_json real_to_json(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

ordered_json values_to_json(const StateValues& values) {
  auto reals = ordered_json::object();
  for (const auto& [name, value] : values.reals)
    reals[name] = real_to_json(value);
  return {{"integers", values.integers}, {"reals", reals}, {"texts", values.texts}};
}

std::vector<std::int64_t> extents(const Shape& shape) {
  return {shape.dim.begin(), shape.dim.begin() + shape.rank};
}

ordered_json tensor_to_json(const ManifestTensor& t, const Manifest& manifest) {
  ordered_json entry{
      {"name", t.name}, {"dtype", safetensors::stored_name(t.dtype)}, {"shape", extents(t.shape)}};
  if (t.place) {
    entry["whole"] = extents(t.place->whole);
    entry["begin"] = extents(t.place->begin);
  }
  entry["file"] = manifest.files.at(t.file).name;
  entry["offset"] = t.offset;
  entry["bytes"] = t.bytes;
  entry["crc32c"] = hex(t.crc);
  return entry;
}

bool has_pieces(const Manifest& manifest) {
  return std::any_of(
      manifest.tensors.begin(), manifest.tensors.end(), [](const auto& t) { return t.place; });
}

// One object a line: the file stays readable and diffable.
template <class List, class ToJson>
void append_list(std::string& text, const char* name, const List& list, const ToJson& to_json) {
  text += fmt::format(",\n\"{}\": [", name);
  for (std::size_t i = 0; i < list.size(); ++i)
    text += (i == 0 ? "\n" : ",\n") + to_json(list[i]).dump();
  text += "]";
}

// --- reading

using Kind = JsonValue::Kind;

class Reader {
 public:
  explicit Reader(const std::string& file) : file_(file) {}

  [[noreturn]] void fail(const std::string& why) const {
    throw InputError(fmt::format("{}: {}", file_, why));
  }

  const JsonValue& member(const JsonValue& object,
                          const char* key,
                          Kind kind,
                          const std::string& where) const {
    if (!object.is(Kind::object)) fail(fmt::format("{} is not an object", where));
    const JsonValue* found = object.find(key);
    if (found == nullptr) fail(fmt::format("{} has no '{}'", where, key));
    if (!found->is(kind))
      fail(fmt::format(
          "'{}' of {} is {}, must be {}", key, where, kind_name(found->kind), kind_name(kind)));
    return *found;
  }
  const std::string& text(const JsonValue& object,
                          const char* key,
                          const std::string& where) const {
    return member(object, key, Kind::text, where).text;
  }
  std::uint64_t count(const JsonValue& object, const char* key, const std::string& where) const {
    const auto n = member(object, key, Kind::integer, where).integer;
    if (n < 0) fail(fmt::format("'{}' of {} is {}, must not be negative", key, where, n));
    return static_cast<std::uint64_t>(n);
  }
  const JsonValue& list(const JsonValue& object, const char* key, const std::string& where) const {
    return member(object, key, Kind::list, where);
  }
  std::uint32_t crc(const JsonValue& object, const std::string& where) const {
    const auto& digits = text(object, "crc32c", where);
    std::uint32_t value = 0;
    const auto* end = digits.data() + digits.size();
    const auto parsed = std::from_chars(digits.data(), end, value, 16);
    if (digits.size() != 8 || parsed.ec != std::errc() || parsed.ptr != end) {
      fail(fmt::format("'crc32c' of {} is not eight hexadecimal digits", where));
    }
    return value;
  }

  StateValues values(const JsonValue& root) const {
    const JsonValue& group = member(root, "values", Kind::object, "the manifest");
    StateValues values;
    each(group, "integers", [&](const std::string& name, const JsonValue& v) {
      if (!v.is(Kind::integer)) fail(fmt::format("value '{}' is not a 64-bit integer", name));
      values.integers[name] = v.integer;
    });
    each(group, "reals", [&](const std::string& name, const JsonValue& v) {
      values.reals[name] = real(name, v);
    });
    each(group, "texts", [&](const std::string& name, const JsonValue& v) {
      if (!v.is(Kind::text)) fail(fmt::format("value '{}' is not a text", name));
      values.texts[name] = v.text;
    });
    return values;
  }

  ManifestFile file_entry(const JsonValue& entry) const {
    ManifestFile f;
    f.name = text(entry, "name", "an entry of 'files'");
    const bool plain = std::all_of(f.name.begin(), f.name.end(), [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
             c == '.' || c == '_' || c == '-';
    });
    if (!plain || f.name.empty() || f.name.front() == '.' || f.name.size() > kMaxFileName ||
        f.name == kManifestName) {
      fail(
          fmt::format("file name '{}' is not allowed (letters, digits, . _ - only, no leading dot)",
                      f.name.substr(0, 200)));
    }
    f.bytes = count(entry, "bytes", fmt::format("file '{}'", f.name));
    f.crc = crc(entry, fmt::format("file '{}'", f.name));
    return f;
  }

  ManifestTensor tensor_entry(const JsonValue& entry,
                              const std::map<std::string, std::size_t>& files) const {
    ManifestTensor t;
    t.name = text(entry, "name", "an entry of 'tensors'");
    const std::string where = fmt::format("tensor '{}'", t.name.substr(0, 200));
    const auto dtype = safetensors::dtype_from_stored_name(text(entry, "dtype", where));
    if (!dtype) fail(fmt::format("{} has an unknown dtype", where));
    t.dtype = *dtype;
    t.offset = count(entry, "offset", where);
    t.bytes = count(entry, "bytes", where);
    t.crc = crc(entry, where);
    t.shape = shape(list(entry, "shape", where), where);
    std::uint64_t bytes = byte_size(t.dtype);
    for (int i = 0; i < t.shape.rank; ++i) {
      if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(t.shape[i]), &bytes))
        fail(where + ": the shape overflows");
    }
    if (bytes != t.bytes) {
      fail(fmt::format("{}: shape {} of {} has {} bytes, the manifest says {}",
                       where,
                       to_string(t.shape),
                       moesaic::name(t.dtype),
                       bytes,
                       t.bytes));
    }
    const auto found = files.find(text(entry, "file", where));
    if (found == files.end())
      fail(fmt::format("{} lies in a file that is not in the table of files", where));
    t.file = found->second;
    t.place = place(entry, t.shape, where);
    return t;
  }

 private:
  template <class Visit>
  void each(const JsonValue& group, const char* key, const Visit& visit) const {
    const JsonValue& object = member(group, key, Kind::object, "'values'");
    for (std::size_t i = 0; i < object.items.size(); ++i)
      visit(object.keys[i], object.items[i]);
  }
  double real(const std::string& name, const JsonValue& v) const {
    if (v.is(Kind::real)) return v.real;
    if (v.is(Kind::integer)) return static_cast<double>(v.integer);
    if (v.text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (v.text == "inf") return std::numeric_limits<double>::infinity();
    if (v.text == "-inf") return -std::numeric_limits<double>::infinity();
    fail(fmt::format("value '{}' is not a number", name));
  }
  std::optional<StateTensor::Place> place(const JsonValue& entry,
                                          const Shape& piece,
                                          const std::string& where) const {
    if (entry.find("whole") == nullptr && entry.find("begin") == nullptr) return std::nullopt;
    StateTensor::Place p{shape(list(entry, "whole", where), where),
                         shape(list(entry, "begin", where), where)};
    const Box box{p.begin, piece};
    std::uint64_t elements = 1;
    for (int i = 0; i < p.whole.rank; ++i) {
      if (__builtin_mul_overflow(elements, static_cast<std::uint64_t>(p.whole[i]), &elements) ||
          elements > (std::uint64_t{1} << 60))
        fail(where + ": the shape overflows");
    }
    if (p.begin.rank != piece.rank || !is_inside(box, p.whole))
      fail(fmt::format("{}: a piece of shape {} at {} does not lie in the whole, {}",
                       where,
                       to_string(piece),
                       to_string(p.begin),
                       to_string(p.whole)));
    return p;
  }
  Shape shape(const JsonValue& extents, const std::string& where) const {
    if (extents.items.size() > Shape::kMaxRank)
      fail(fmt::format("{} has rank {}, at most {}", where, extents.items.size(), Shape::kMaxRank));
    Shape s;
    for (const JsonValue& e : extents.items) {
      if (!e.is(Kind::integer) || e.integer < 0) fail(where + " has an extent that is no size");
      s.dim[static_cast<std::size_t>(s.rank++)] = e.integer;
    }
    return s;
  }

  const std::string& file_;
};

void check_seal(std::string_view text, const Reader& reader) {
  const std::size_t length = seal(0).size();
  if (text.size() <= length)
    reader.fail(fmt::format("{} bytes are too few for a manifest", text.size()));
  const auto body = text.substr(0, text.size() - length);
  const auto found = text.substr(body.size());
  const std::string expected = seal(crc32c(body.data(), body.size()));
  if (found == expected) return;
  if (!found.starts_with(expected.substr(0, length - 12))) {
    reader.fail("does not end with its checksum: truncated or changed");
  }
  reader.fail(fmt::format("checksum of the manifest is {}, computed {}: the file was changed",
                          found.substr(length - 11, 8),
                          expected.substr(length - 11, 8)));
}

void check_schema(const JsonValue& root, const Reader& reader) {
  if (reader.text(root, "format", "the manifest") != kFormat)
    reader.fail("not the manifest of a moesaic checkpoint");
  const auto schema = reader.count(root, "schema", "the manifest");
  if (schema != kManifestSchema && schema != kManifestSchemaOfPieces) {
    reader.fail(fmt::format("has schema version {}; this program reads versions {} and {}",
                            schema,
                            kManifestSchema,
                            kManifestSchemaOfPieces));
  }
}

// The pieces of each tensor must be of one kind, must not overlap and must fill it.
void check_pieces(const Manifest& manifest, const Reader& reader) {
  std::map<std::string_view, std::vector<const ManifestTensor*>> by_name;
  for (const auto& t : manifest.tensors)
    by_name[t.name].push_back(&t);
  for (const auto& [name, pieces] : by_name) {
    const ManifestTensor& first = *pieces.front();
    if (!first.place && pieces.size() == 1) continue;
    const std::string where = fmt::format("tensor '{}'", name.substr(0, 200));
    if (pieces.size() > kMaxPieces)
      reader.fail(
          fmt::format("{} lies in {} pieces, at most {}", where, pieces.size(), kMaxPieces));
    std::int64_t elements = 0;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const ManifestTensor& piece = *pieces[i];
      if (!piece.place) reader.fail(where + " is listed twice");
      if (piece.dtype != first.dtype || piece.place->whole != first.place->whole)
        reader.fail(where + ": its pieces belong to different tensors");
      for (std::size_t j = 0; j < i; ++j) {
        if (intersection(piece.box(), pieces[j]->box()))
          reader.fail(fmt::format("{}: the pieces {} and {} overlap",
                                  where,
                                  to_string(pieces[j]->box()),
                                  to_string(piece.box())));
      }
      elements += piece.shape.numel();
    }
    if (elements != first.place->whole.numel())
      reader.fail(fmt::format(
          "{}: its pieces hold {} of {} elements", where, elements, first.place->whole.numel()));
  }
}

// Tensors of a file must lie in it and must not overlap.
void check_places(const Manifest& manifest, const Reader& reader) {
  std::vector<const ManifestTensor*> order;
  for (const auto& t : manifest.tensors)
    order.push_back(&t);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::tuple{a->file, a->offset, a->bytes} < std::tuple{b->file, b->offset, b->bytes};
  });
  const ManifestTensor* last = nullptr;
  for (const auto* t : order) {
    const auto& file = manifest.files[t->file];
    if (t->offset > file.bytes || t->bytes > file.bytes - t->offset) {
      reader.fail(fmt::format(
          "tensor '{}' ends beyond the {} bytes of '{}'", t->name, file.bytes, file.name));
    }
    if (last != nullptr && last->file == t->file && last->offset + last->bytes > t->offset) {
      reader.fail(fmt::format("tensors '{}' and '{}' overlap", last->name, t->name));
    }
    last = t;
  }
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
  try {
    std::string text = fmt::format("{{\"format\": \"{}\",\n\"schema\": {},\n\"step\": {}",
                                   kFormat,
                                   has_pieces(manifest) ? kManifestSchemaOfPieces : kManifestSchema,
                                   manifest.step);
    text += ",\n\"values\": " + values_to_json(manifest.values).dump();
    text += ",\n\"config\": " + ordered_json(manifest.config).dump();
    append_list(text, "files", manifest.files, [](const ManifestFile& f) {
      return ordered_json{{"name", f.name}, {"bytes", f.bytes}, {"crc32c", hex(f.crc)}};
    });
    append_list(text, "tensors", manifest.tensors, [&](const ManifestTensor& t) {
      return tensor_to_json(t, manifest);
    });
    return text + seal(crc32c(text.data(), text.size()));
  } catch (const nlohmann::json::exception& e) {
    throw InputError(fmt::format("a name, value or the configuration is not UTF-8: {}", e.what()));
  }
}

namespace {

Manifest parse(std::string_view text, const std::string& file, bool is_whole) {
  const Reader reader(file);
  check_seal(text, reader);
  const JsonValue root = parse_json(text, file, kLimits);
  check_schema(root, reader);
  Manifest manifest;
  manifest.step = static_cast<std::int64_t>(reader.count(root, "step", "the manifest"));
  manifest.values = reader.values(root);
  manifest.config = reader.text(root, "config", "the manifest");
  std::map<std::string, std::size_t> files;
  for (const auto& entry : reader.list(root, "files", "the manifest").items) {
    manifest.files.push_back(reader.file_entry(entry));
    const auto& name = manifest.files.back().name;
    if (!files.emplace(name, files.size()).second)
      reader.fail(fmt::format("file '{}' is listed twice", name));
  }
  for (const auto& entry : reader.list(root, "tensors", "the manifest").items)
    manifest.tensors.push_back(reader.tensor_entry(entry, files));
  if (has_pieces(manifest) && root.find("schema")->integer == kManifestSchema)
    reader.fail("has tensors in pieces, which schema version 1 does not know");
  if (is_whole) check_pieces(manifest, reader);
  check_places(manifest, reader);
  return manifest;
}

}  // namespace

Manifest parse_manifest(std::string_view text, const std::string& file) {
  return parse(text, file, true);
}

Manifest parse_manifest_part(std::string_view text) {
  return parse(text, "a part of the checkpoint", false);
}

Manifest read_manifest(const fs::path& checkpoint) {
  std::error_code error;
  const fs::path path = checkpoint / kManifestName;
  if (!fs::is_directory(checkpoint, error)) {
    throw InputError(fmt::format("{}: not a checkpoint: no such folder", checkpoint.string()));
  }
  if (!fs::exists(fs::symlink_status(path, error))) {
    throw InputError(
        fmt::format("{}: not a checkpoint: it has no {}", checkpoint.string(), kManifestName));
  }
  const MappedFile mapped(path, MappedFile::Links::refuse);
  if (mapped.size() > kMaxManifestBytes) {
    throw InputError(
        fmt::format("{}: {} bytes, at most {}", path.string(), mapped.size(), kMaxManifestBytes));
  }
  Manifest manifest = parse_manifest(mapped.text(), path.string());
  const fs::path folder =
      checkpoint.has_filename() ? checkpoint.filename() : checkpoint.parent_path().filename();
  if (const auto step = step_of_folder(folder.string()); step >= 0 && step != manifest.step) {
    throw InputError(fmt::format("{}: is the manifest of step {}, but lies in folder {}",
                                 path.string(),
                                 manifest.step,
                                 folder.string()));
  }
  for (const auto& f : manifest.files) {
    const fs::path file = checkpoint / f.name;
    const auto kind = fs::symlink_status(file, error).type();
    if (kind == fs::file_type::not_found)
      throw InputError(
          fmt::format("{}: missing; the manifest lists it with {} bytes", file.string(), f.bytes));
    if (kind != fs::file_type::regular)
      throw InputError(fmt::format("{}: not a regular file", file.string()));
    if (const auto size = fs::file_size(file, error); error || size != f.bytes) {
      throw InputError(fmt::format("{}: has {} bytes, the manifest says {}: truncated or changed",
                                   file.string(),
                                   error ? 0 : size,
                                   f.bytes));
    }
  }
  return manifest;
}

std::string folder_name(std::int64_t step) {
  return fmt::format("step-{:08d}", step);
}

std::int64_t step_of_folder(const std::string& name) {
  if (!name.starts_with("step-")) return -1;
  std::int64_t step = -1;
  const auto* end = name.data() + name.size();
  const auto parsed = std::from_chars(name.data() + 5, end, step);
  // Only the one spelling that we write: "step-100" beside "step-00000100" would be two folders of
  // one step.
  if (parsed.ec != std::errc() || parsed.ptr != end || step < 0 || folder_name(step) != name)
    return -1;
  return step;
}

}  // namespace moesaic
