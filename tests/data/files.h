#pragma once
// Data files of every shape in a temporary folder.
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include <unistd.h>

#include "core/base/error.h"
#include "core/data/token_source.h"

namespace moesaic::data {

/// A folder that lives as long as the object.
class Folder {
 public:
  explicit Folder(const std::string& name)
      : path_(std::filesystem::temp_directory_path() /
              ("moesaic_" + std::to_string(::getpid()) + "_" + name)) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }
  /// Writes a file of the folder; returns its path.
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return *this / name;
  }

 private:
  std::filesystem::path path_;
};

inline std::string file_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Little-endian values, one after the other.
class Bytes {
 public:
  template <class T>
  Bytes& put(T value) {
    char raw[sizeof(T)];
    std::memcpy(raw, &value, sizeof(T));
    text_.append(raw, sizeof(T));
    return *this;
  }
  template <class T, class U>
  Bytes& all(const std::vector<U>& values) {
    for (const U v : values)
      put(static_cast<T>(v));
    return *this;
  }
  Bytes& text(std::string_view t) { return text_ += t, *this; }
  const std::string& str() const { return text_; }
  operator std::string() const { return text_; }

 private:
  std::string text_;
};

/// The parts of a Megatron index, valid unless they are changed.
struct IndexParts {
  std::string magic = std::string("MMIDIDX\0\0", 9);
  std::uint64_t version = 1;
  std::uint8_t code = 8;
  std::vector<std::int32_t> lengths{3, 0, 2, 4};
  std::vector<std::int64_t> offsets{0, 6, 6, 10};
  std::vector<std::int64_t> documents{0, 1, 3, 4};  // lengths 3, 2, 4
  std::uint64_t sequences = 4, entries = 4;         // in the header
  std::string tail;
  std::string bytes() const {
    return Bytes()
        .text(magic)
        .put(version)
        .put(code)
        .put(sequences)
        .put(entries)
        .all<std::int32_t>(lengths)
        .all<std::int64_t>(offsets)
        .all<std::int64_t>(documents)
        .text(tail);
  }
};

inline std::string input_error(const std::function<void()>& f) {
  try {
    f();
  } catch (const InputError& e) {
    return e.what();
  }
  return "no InputError";
}
inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline std::vector<std::int32_t> tokens_of(const TokenSource& source, std::int64_t document) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(source.document_length(document)));
  source.read(document, 0, tokens);
  return tokens;
}

}  // namespace moesaic::data
