#include "core/data/json_record.h"

#include <map>
#include <set>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/base/error.h"
#include "core/base/json_text.h"

namespace moesaic::data {
namespace {

using nlohmann::json;

class RecordParser {
 public:
  explicit RecordParser(const std::string& where) : where_(where) {}

  json parse(std::string_view line) {
    if (line.size() > kMaxJsonRecordBytes)
      refuse(fmt::format("a record of {} bytes, allowed {}", line.size(), kMaxJsonRecordBytes));
    if (const auto at = zero_byte_in(line))
      refuse(fmt::format("not JSON: a zero byte behind {} bytes of the line", *at));
    json record;
    try {
      record = json::parse(
          line.begin(), line.end(), [this](int depth, json::parse_event_t event, json& value) {
            return check(depth, event, value);
          });
    } catch (const json::exception& e) {
      refuse(fmt::format("not JSON: {}", e.what()));
    }
    if (!record.is_object()) refuse("not a JSON object");
    return record;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw InputError(fmt::format("{}: {}", where_, what));
  }

  bool check(int depth, json::parse_event_t event, const json& value) {
    if (depth > kMaxJsonRecordDepth)
      refuse(fmt::format("nested deeper than {} levels", kMaxJsonRecordDepth));
    if (event == json::parse_event_t::object_start) keys_[depth + 1].clear();
    if (event == json::parse_event_t::key && !keys_[depth].insert(value.get<std::string>()).second)
      refuse(fmt::format("the key \"{}\" is given twice", value.get<std::string>()));
    return true;
  }

  const std::string& where_;
  std::map<int, std::set<std::string>> keys_;  // of the object that is open at each depth
};

}  // namespace

json parse_json_record(std::string_view line, const std::string& where) {
  return RecordParser(where).parse(line);
}

std::string keys_for_message(const json& object) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : object.items())
    keys.push_back(key.size() > 30 ? key.substr(0, 30) + "…" : key);
  if (keys.empty()) return "none";
  if (keys.size() > 8) keys.resize(8);
  return fmt::format("{}", fmt::join(keys, ", "));
}

}  // namespace moesaic::data
