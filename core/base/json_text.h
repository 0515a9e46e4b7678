#pragma once
// The one reader of JSON that others wrote: configurations of tokenizers, headers and manifests of checkpoints, records of data.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace moesaic {

/// Gets the parts of a JSON text in their order. An exception of a handler ends the reading.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;
  virtual void null() {}
  virtual void boolean(bool) {}
  virtual void integer(std::int64_t) {}
  /// Numbers with a fraction or an exponent, and integers beyond 64 bits with sign; `digits` as far as known as the text spells them.
  virtual void real(double, const std::string& /*digits*/) {}
  virtual void text(std::string&) {}  ///< may be moved from, like that of key()
  virtual void key(std::string&) {}
  virtual void open_object() {}
  virtual void close_object() {}
  virtual void open_list() {}
  virtual void close_list() {}
};

struct JsonLimits {
  std::size_t max_bytes = std::size_t{256} << 20;
  std::size_t max_depth = 64;  ///< objects and lists inside each other
  std::size_t first_byte =
      0;  ///< what errors call the first byte of the text: 1 for columns of a line
};

/// Reads all of `text`, which must be one JSON value in UTF-8. Throws InputError "where:offset: …" for anything else, for a key that
/// occurs twice in an object (which of the two would count differs from reader to reader), for a zero byte (nlohmann's parser
/// takes it for the end, and what stands behind it would be lost), and beyond the limits. Memory: the keys of the open objects.
void read_json(std::string_view text,
               const std::string& where,
               const JsonLimits& limits,
               JsonEvents& events);

/// The same for a text that is then given to another parser.
void check_json(std::string_view text, const std::string& where, const JsonLimits& limits);

}  // namespace moesaic
