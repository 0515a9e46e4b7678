#include "parallel/pipeline/grid.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <fmt/format.h>

namespace moesaic::pipeline {
namespace {

using Rows = std::vector<std::vector<std::string>>;

std::string cell(const Schedule& schedule, std::size_t rank, const Action& a) {
  std::string text = fmt::format("{}{}", letter(a.work), a.micro_batch);
  if (schedule.sizes.chunks == 1) return text;
  const auto& chunks = schedule.placement.chunks_of(static_cast<int>(rank));
  const auto place = std::find(chunks.begin(), chunks.end(), a.chunk) - chunks.begin();
  // a … z, then by number.
  return text +
         (place < 26 ? std::string(1, static_cast<char>('a' + place)) : fmt::format("/{}", place));
}

Rows cells(const Schedule& schedule) {
  const Simulation times = simulate(schedule, Costs::unit(schedule.placement.num_chunks()));
  const auto columns = static_cast<std::size_t>(std::llround(times.makespan));
  Rows rows(schedule.ranks.size(), std::vector<std::string>(columns, "."));
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t i = 0; i < schedule.ranks[r].size(); ++i) {
      const Action& a = schedule.ranks[r][i];
      if (a.is_exchange()) continue;
      const Span span = times.spans[r][i];
      for (auto t = std::llround(span.start); t < std::llround(span.end); ++t)
        rows[r][static_cast<std::size_t>(t)] = cell(schedule, r, a);
    }
  }
  return rows;
}

std::size_t widest(const Rows& rows) {
  std::size_t width = 1;
  for (const auto& row : rows) {
    for (const std::string& text : row)
      width = std::max(width, text.size());
  }
  return width;
}

}  // namespace

std::string grid_text(const Schedule& schedule, int max_width) {
  const Rows rows = cells(schedule);
  const std::size_t width = widest(rows) + 1, columns = rows.front().size();
  const std::size_t label = fmt::format("rank {}", rows.size() - 1).size() + 1;
  std::size_t head = columns, tail = 0;
  constexpr const char* kCut = "  … ";
  constexpr std::size_t kCutWidth = 4, kFewest = 4;
  if (max_width > 0 && label + columns * width > static_cast<std::size_t>(max_width)) {
    const std::size_t room = static_cast<std::size_t>(max_width);
    std::size_t shown = room > label + kCutWidth ? (room - label - kCutWidth) / width : 0;
    shown = std::min(std::max(shown, kFewest), columns);
    tail = shown / 2;
    head = shown - tail;
  }
  std::string text;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::string line = fmt::format("{:<{}}", fmt::format("rank {}", r), label);
    for (std::size_t c = 0; c < head; ++c)
      line += fmt::format("{:<{}}", rows[r][c], width);
    if (head + tail < columns) line += kCut;
    for (std::size_t c = columns - tail; c < columns; ++c)
      line += fmt::format("{:<{}}", rows[r][c], width);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  if (head + tail < columns)
    text += fmt::format("{} of {} columns are left out\n", columns - head - tail, columns);
  return text;
}

const char* name(Work work) noexcept {
  constexpr const char* kNames[] = {
      "forward", "backward", "backward_input", "backward_weight", "exchange"};
  return kNames[static_cast<std::size_t>(work)];
}
const char* direction(const Message& message) noexcept {
  return message.is_send ? "send" : "receive";
}
const char* name(Payload payload) noexcept {
  return payload == Payload::activation ? "activation" : "gradient";
}

std::string schedule_csv(const Schedule& schedule, const Simulation& times) {
  std::string text =
      "rank,action,start,end,work,chunk,micro_batch,direction,payload,boundary,peer\n";
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r) {
    for (std::size_t i = 0; i < schedule.ranks[r].size(); ++i) {
      const Action& a = schedule.ranks[r][i];
      const Span span = times.spans[r][i];
      const std::string place =
          fmt::format("{},{},{:g},{:g},{}", r, i, span.start, span.end, name(a.work));
      if (!a.is_exchange()) text += fmt::format("{},{},{},,,,\n", place, a.chunk, a.micro_batch);
      for (const Message& m : a.messages)
        text += fmt::format("{},,{},{},{},{},{}\n",
                            place,
                            m.micro_batch,
                            direction(m),
                            name(m.payload),
                            m.boundary,
                            m.peer);
    }
  }
  return text;
}

}  // namespace moesaic::pipeline
