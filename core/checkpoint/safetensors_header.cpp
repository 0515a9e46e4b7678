#include "core/checkpoint/safetensors_header.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/base/json_text.h"

namespace moesaic::safetensors {
namespace {

struct StoredType {
  const char* name;
  DType dtype;
};
constexpr std::array<StoredType, 10> kTypes{{{"F64", DType::f64},
                                             {"F32", DType::f32},
                                             {"BF16", DType::bf16},
                                             {"F16", DType::f16},
                                             {"F8_E4M3", DType::e4m3},
                                             {"F8_E5M2", DType::e5m2},
                                             {"I64", DType::i64},
                                             {"I32", DType::i32},
                                             {"U8", DType::u8},
                                             {"BOOL", DType::u8}}};

// Follows the parser through the only structure the format has:
//   { "__metadata__": { text: text }, name: { "dtype": text, "shape": [int…], "data_offsets": [begin, end] } }
// Anything else ends the reading at once.
class HeaderReader final : public JsonEvents {
 public:
  HeaderReader(Header& header, const std::string& file) : header_(header), file_(file) {}

  void open_object() override {
    if (depth_ == 0) {
      depth_ = 1;
    } else if (depth_ == 1 && !in_array_) {
      depth_ = 2;
      entry_ = {};
    } else {
      fail("an object where none is allowed");
    }
  }
  void key(std::string& text) override { (depth_ == 1 ? name_ : field_) = std::move(text); }
  void close_object() override {
    if (depth_ == 2 && !in_metadata()) finish_entry();
    --depth_;
  }
  void open_list() override {
    const bool known =
        depth_ == 2 && !in_metadata() && (field_ == "shape" || field_ == "data_offsets");
    if (!known || in_array_) fail("an array where none is allowed");
    (field_ == "shape" ? entry_.shape : entry_.offsets).emplace();
    in_array_ = true;
  }
  void close_list() override { in_array_ = false; }
  void integer(std::int64_t value) override {
    if (!in_array_) fail("a number where none is allowed");
    if (value < 0) fail("negative numbers are not allowed");
    auto& list = field_ == "shape" ? *entry_.shape : *entry_.offsets;
    if (list.size() == 16) fail(fmt::format("'{}' has too many entries", field_));
    list.push_back(static_cast<std::uint64_t>(value));
  }
  void text(std::string& text) override {
    if (depth_ != 2 || in_array_) fail("a text where none is allowed");
    if (in_metadata()) {
      header_.metadata.emplace(field_, text);
    } else if (field_ == "dtype") {
      entry_.dtype = text;
    } else {
      fail(fmt::format("unknown field '{}'", field_));
    }
  }
  void null() override { fail("null is not allowed"); }
  void boolean(bool) override { fail("true and false are not allowed"); }
  void real(double, const std::string& digits) override {
    fail(fmt::format("the number {} is not allowed; only integers of 64 bits are",
                     std::string_view(digits).substr(0, 40)));
  }

 private:
  struct Entry {
    std::optional<std::string> dtype;
    std::optional<std::vector<std::uint64_t>> shape, offsets;
  };

  bool in_metadata() const { return name_ == "__metadata__"; }
  [[noreturn]] void fail(const std::string& why) const {
    throw InputError(fmt::format("{}: header entry '{}': {}", file_, name_.substr(0, 200), why));
  }

  void finish_entry() {
    if (!entry_.dtype || !entry_.shape || !entry_.offsets)
      fail("needs dtype, shape and data_offsets");
    const auto type = dtype_from_stored_name(*entry_.dtype);
    if (!type) {
      fail(fmt::format(
          "dtype '{}' is not supported (F64 F32 BF16 F16 F8_E4M3 F8_E5M2 I64 I32 U8 BOOL)",
          entry_.dtype->substr(0, 40)));
    }
    if (entry_.shape->size() > Shape::kMaxRank)
      fail(fmt::format("rank {} (at most {})", entry_.shape->size(), Shape::kMaxRank));
    if (entry_.offsets->size() != 2) fail("data_offsets must be [begin, end]");
    StoredTensor t;
    t.name = name_;
    t.dtype = *type;
    t.shape.rank = static_cast<int>(entry_.shape->size());
    std::uint64_t bytes = byte_size(t.dtype);
    for (std::size_t i = 0; i < entry_.shape->size(); ++i) {
      const std::uint64_t extent = (*entry_.shape)[i];
      if (extent > (std::uint64_t{1} << 62) || __builtin_mul_overflow(bytes, extent, &bytes))
        fail("the shape overflows");
      t.shape.dim[i] = static_cast<std::int64_t>(extent);
    }
    const auto [begin, end] = std::pair{(*entry_.offsets)[0], (*entry_.offsets)[1]};
    if (end < begin || end - begin != bytes) {
      fail(fmt::format("data_offsets [{}, {}] do not hold {} of shape {} ({} bytes)",
                       begin,
                       end,
                       *entry_.dtype,
                       to_string(t.shape),
                       bytes));
    }
    t.offset = begin;
    t.bytes = bytes;
    header_.tensors.emplace(name_, t);
  }

  Header& header_;
  const std::string& file_;
  int depth_ = 0;
  bool in_array_ = false;
  std::string name_, field_;
  Entry entry_;
};

// The spans, in order of their place, must touch each other and fill the data section.
void check_coverage(const Header& header, std::uint64_t data_bytes, const std::string& file) {
  std::vector<const StoredTensor*> by_place;
  for (const auto& [name, t] : header.tensors)
    by_place.push_back(&t);
  std::sort(by_place.begin(), by_place.end(), [](const auto* a, const auto* b) {
    return std::pair{a->offset, a->bytes} < std::pair{b->offset, b->bytes};
  });
  std::uint64_t at = 0;
  for (const auto* t : by_place) {
    if (t->offset != at) {
      throw InputError(fmt::format("{}: tensor '{}' starts at byte {} of the data, expected {}: {}",
                                   file,
                                   t->name,
                                   t->offset,
                                   at,
                                   t->offset < at ? "overlap" : "hole"));
    }
    at += t->bytes;
    if (at > data_bytes) {
      throw InputError(fmt::format(
          "{}: tensor '{}' ends at byte {} of the data, but the file has only {}: truncated?",
          file,
          t->name,
          at,
          data_bytes));
    }
  }
  if (at != data_bytes) {
    throw InputError(
        fmt::format("{}: {} bytes after the last tensor belong to none", file, data_bytes - at));
  }
}

}  // namespace

Header parse_header(std::string_view text, std::uint64_t data_bytes, const std::string& file) {
  Header header;
  HeaderReader reader(header, file);
  if (text.empty() || text.front() != '{')
    throw InputError(fmt::format("{}: header does not start with '{{' (file offset 8)", file));
  read_json(text, file, {.max_bytes = kMaxHeaderBytes, .max_depth = 3, .first_byte = 8}, reader);
  check_coverage(header, data_bytes, file);
  return header;
}

void place(std::vector<StoredTensor>& entries) {
  std::uint64_t at = 0;
  for (auto& t : entries) {
    t.offset = at;
    t.bytes = byte_size(t.dtype) * static_cast<std::uint64_t>(t.shape.numel());
    at += t.bytes;
  }
}

std::string header_text(const std::vector<StoredTensor>& placed,
                        const std::map<std::string, std::string>& metadata,
                        const std::string& file) {
  // Only a fresh name is added, so looking for it costs a search in a set, not in the ordered object.
  std::set<std::string_view> names;
  auto header = nlohmann::ordered_json::object();
  auto& items = header.get_ref<nlohmann::ordered_json::object_t&>();
  if (!metadata.empty()) items.emplace_back("__metadata__", metadata);
  for (const auto& t : placed) {
    MOESAIC_CHECK(names.insert(t.name).second, "two tensors named " + t.name);
    const std::vector<std::int64_t> shape(t.shape.dim.begin(), t.shape.dim.begin() + t.shape.rank);
    items.emplace_back(t.name,
                       nlohmann::ordered_json{{"dtype", stored_name(t.dtype)},
                                              {"shape", shape},
                                              {"data_offsets", {t.offset, t.offset + t.bytes}}});
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception& e) {
    throw InputError(fmt::format("{}: a name or metadata text is not UTF-8: {}", file, e.what()));
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the data starts aligned
  const std::uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

const char* stored_name(DType dtype) {
  for (const auto& t : kTypes) {
    if (t.dtype == dtype) return t.name;
  }
  check_failed(__FILE__, __LINE__, "known dtype", std::string("no stored name for ") + name(dtype));
}

std::optional<DType> dtype_from_stored_name(std::string_view text) {
  for (const auto& t : kTypes) {
    if (text == t.name) return t.dtype;
  }
  return std::nullopt;
}

}  // namespace moesaic::safetensors
