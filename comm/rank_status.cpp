#include "comm/rank_status.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

namespace moesaic {
namespace {

constexpr const char* kEnd = "end";  // of a status that is whole

std::string in_units(std::int64_t bytes) {
  const auto b = static_cast<double>(bytes);
  if (bytes < 1000) return fmt::format("{} B", bytes);
  if (bytes < 1000000) return fmt::format("{:.1f} kB", b / 1e3);
  return bytes < 1000000000 ? fmt::format("{:.1f} MB", b / 1e6) : fmt::format("{:.2f} GB", b / 1e9);
}

std::string text_of(std::int64_t step, const Place& place) {
  std::string text = step > 0 ? fmt::format("step {}", step) : "";
  for (std::size_t i = 0; i < 2 && static_cast<std::int64_t>(i) < place.depth; ++i) {
    const Place::Part& part = place.parts[i];
    text += fmt::format("{}{}", text.empty() ? "" : ", ", part.name);
    if (part.index >= 0) text += fmt::format(" {}", part.index);
  }
  return text;
}

RankStatus::Operation operation_of(const Exchange& e, const char* device) {
  RankStatus::Operation o;
  if (e.state == Exchange::State::none || e.state == Exchange::State::done) return o;
  o.operation = e.operation;
  if (o.operation.empty()) o.operation = "call";
  o.group = e.group.data();
  o.place = text_of(e.step, e.place);
  o.device = device;
  o.number = e.number;
  o.number_in_group = e.number_in_group;
  o.bytes = e.bytes;
  o.ranks = e.ranks;
  o.is_moving = e.state == Exchange::State::moving;
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  o.seconds = static_cast<double>(now - e.since_ns) * 1e-9;
  o.awaited = e.awaited;
  const auto shown = std::min<std::size_t>(static_cast<std::size_t>(std::max(e.awaited, 0)),
                                           e.awaited_ranks.size());
  o.awaited_ranks.assign(e.awaited_ranks.begin(),
                         e.awaited_ranks.begin() + static_cast<std::ptrdiff_t>(shown));
  return o;
}

std::string this_host() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

template <class T>
void read_number(const std::string& text, T& value) {
  std::istringstream in(text);
  in >> value;
}

}  // namespace

RankStatus status_of(const Activity& activity) {
  RankStatus s;
  s.host = this_host();
  s.pid = ::getpid();
  const Period period = activity.period.read();
  s.period = period.name;
  Place place = activity.running.read();  // on the CPU what is computed, else what is enqueued
  if (place.depth <= 0) place = activity.issued.read();
  s.place = text_of(period.step, place);
  const auto device = operation_of(activity.device_exchange.read(), "gpu");
  const auto host = operation_of(activity.exchange.read(), "cpu");
  s.exchange = !host.operation.empty() ? host : device;
  return s;
}

std::string RankStatus::text() const {
  const Operation& e = exchange;
  std::string text = fmt::format(
      "rank {}\nlife {}\nhost {}\npid {}\nbeat {}\nidle {:.3f}\nlimit {:.3f}\nexpired {}\nperiod "
      "{}\nplace {}\n",
      rank,
      life,
      host,
      pid,
      beat,
      idle_s,
      limit_s,
      expired ? 1 : 0,
      period,
      place);
  if (!e.operation.empty()) {
    text += fmt::format(
        "operation {}\ngroup {}\nissued {}\ndevice {}\nnumber {}\nnumber_in_group {}\nbytes {}\n"
        "ranks {}\nmoving {}\nseconds {:.3f}\nawaited {}\nawaited_ranks {}\n",
        e.operation,
        e.group,
        e.place,
        e.device,
        e.number,
        e.number_in_group,
        e.bytes,
        e.ranks,
        e.is_moving ? 1 : 0,
        e.seconds,
        e.awaited,
        fmt::join(e.awaited_ranks, " "));
  }
  return text + kEnd + "\n";
}

std::optional<RankStatus> RankStatus::parse(const std::string& text) {
  std::map<std::string, std::string> values;
  std::istringstream lines(text);
  bool is_whole = false;
  for (std::string line; std::getline(lines, line);) {
    is_whole = line == kEnd;
    const auto space = line.find(' ');
    if (space != std::string::npos) values[line.substr(0, space)] = line.substr(space + 1);
  }
  if (!is_whole || !values.contains("rank") || !values.contains("beat")) return std::nullopt;
  RankStatus s;
  read_number(values["rank"], s.rank);
  s.life = values["life"];
  s.host = values["host"];
  read_number(values["pid"], s.pid);
  read_number(values["beat"], s.beat);
  read_number(values["idle"], s.idle_s);
  read_number(values["limit"], s.limit_s);
  s.expired = values["expired"] == "1";
  s.period = values["period"];
  s.place = values["place"];
  Operation& e = s.exchange;
  e.operation = values["operation"];
  e.group = values["group"];
  e.place = values["issued"];
  e.device = values["device"];
  read_number(values["number"], e.number);
  read_number(values["number_in_group"], e.number_in_group);
  read_number(values["bytes"], e.bytes);
  read_number(values["ranks"], e.ranks);
  e.is_moving = values["moving"] == "1";
  read_number(values["seconds"], e.seconds);
  read_number(values["awaited"], e.awaited);
  std::istringstream ranks(values["awaited_ranks"]);
  for (int rank = 0; ranks >> rank;)
    e.awaited_ranks.push_back(rank);
  return s;
}

std::string to_string(const RankStatus::Operation& o) {
  std::string text = o.operation;
  if (o.ranks > 0) {
    text += fmt::format(" #{} of group {} ({} ranks", o.number_in_group, o.group, o.ranks);
    text += o.bytes > 0 ? fmt::format(", {})", in_units(o.bytes)) : ")";
  }
  if (!o.place.empty()) text += fmt::format(", issued in {}", o.place);
  return text;
}

std::string describe(const RankStatus& s) {
  std::string text = s.period;
  if (!s.place.empty()) text += ", " + s.place;
  const auto& o = s.exchange;
  if (o.operation.empty()) return text + "; in no exchange";
  if (!o.is_moving) return text + fmt::format("; its own work comes before {}", to_string(o));
  text += fmt::format("; {:.1f} s in {}", o.seconds, to_string(o));
  if (o.awaited > 0) {
    text += fmt::format(
        "; waits for rank{} {}", o.awaited == 1 ? "" : "s", fmt::join(o.awaited_ranks, ", "));
    const auto more = o.awaited - static_cast<int>(o.awaited_ranks.size());
    if (more > 0) text += fmt::format(" and {} more", more);
  }
  return text;
}

}  // namespace moesaic
