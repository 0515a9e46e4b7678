#include "core/train/sinks/console.h"

#include <algorithm>
#include <ostream>

#include <fmt/format.h>

namespace moesaic {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kYellow = "\033[33m";
constexpr const char* kRed = "\033[31m";
constexpr const char* kGreen = "\033[32m";
constexpr const char* kPlain = "\033[0m";
constexpr const char* kEraseLine = "\r\033[K";

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

const char* color_of(const std::string& event) {
  if (event == "skip" || event == "warning") return kYellow;
  return event == "save" || event == "eval" ? kGreen : nullptr;
}

std::string filled(std::int64_t done, std::int64_t total, int width) {
  const double share =
      total > 0 ? std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0) : 0;
  const auto full = static_cast<std::size_t>(share * width);
  std::string bar(full, '#');
  bar.resize(static_cast<std::size_t>(width), '.');
  return fmt::format("[{}] {:3.0f}%", bar, 100 * share);
}

}  // namespace

std::string progress_text(const Progress& progress, double seconds) {
  const auto done = static_cast<double>(progress.done()),
             total = static_cast<double>(progress.total());
  const bool bytes = progress.unit() == "bytes";
  const double scale = bytes ? 1.0 / (1 << 30) : 1;
  const std::string unit = bytes ? " GiB" : progress.unit().empty() ? "" : " " + progress.unit();
  const auto amount = [&](double n) {
    return bytes ? fmt::format("{:.2f}", n * scale) : fmt::format("{:.0f}", n);
  };
  std::string text = progress.name();
  if (total > 0) {
    text += fmt::format(
        ": {} of {}{} ({:.0f}%)", amount(done), amount(total), unit, 100 * done / total);
  } else if (done > 0) {
    text += fmt::format(": {}{}", amount(done), unit);
  }
  const double rate = seconds > 0 ? done / seconds : 0;
  if (rate > 0) text += fmt::format(" | {:.2f}{}/s", rate * scale, unit);
  text += fmt::format(" | {} so far", format_duration(seconds));
  if (rate > 0 && total > done)
    text += fmt::format(", {} left", format_duration((total - done) / rate));
  return text;
}

Console::Console(const Options& options) : options_(options) {}

void Console::set_hardware(const StepLines::Hardware& hardware) {
  const std::lock_guard lock(mutex_);
  steps_ = StepLines(hardware);
}

Console::~Console() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    erase_bar();
  }
  woken_.notify_all();
  if (watcher_.joinable()) watcher_.join();
}

// A line goes above the bar.
void Console::print(const std::string& line, const char* color) {
  erase_bar();
  if (options_.color && color != nullptr) {
    *options_.lines << color << line << kPlain << std::endl;
  } else {
    *options_.lines << line << std::endl;
  }
}

void Console::erase_bar() {
  if (!bar_shown_) return;
  *options_.bar << kEraseLine << std::flush;
  bar_shown_ = false;
}

std::string Console::bar_text() const {
  if (!work_.empty()) {
    const Work& work = work_.back();
    return progress_text(*work.progress, seconds_since(work.since));
  }
  if (last_step_ == 0) return {};
  return fmt::format(
      "{} step {}/{}{}", filled(step_, last_step_, 20), step_, last_step_, bar_fields_);
}

void Console::draw_bar() {
  if (options_.bar == nullptr || ended_) return;
  std::string text = bar_text();
  if (text.empty()) return;
  if (text.size() >= static_cast<std::size_t>(options_.columns))
    text.resize(static_cast<std::size_t>(options_.columns) - 1);
  *options_.bar << kEraseLine << text << std::flush;
  bar_shown_ = true;
  drawn_ = Clock::now();
}

void Console::on_header(const RunHeader& header) {
  const std::lock_guard lock(mutex_);
  for (const auto& line : header.lines)
    print(line);
}

void Console::on_step(const StepRecord& record) {
  const std::lock_guard lock(mutex_);
  steps_.add(record);
  step_ = record.step;
  last_step_ = record.steps;
  if (options_.step_lines && (step_ % options_.interval == 0 || step_ == last_step_))
    print(steps_.line(), record.skipped ? kYellow : nullptr);
  if (options_.step_lines && options_.detail_every > 0 && step_ % options_.detail_every == 0) {
    for (const auto& line : steps_.detail_lines())
      print(fmt::format("step {} | {}", step_, line));
  }
  if (options_.bar != nullptr) {
    bar_fields_ = fmt::format(" | loss {:.4f}", record.loss);
    if (const auto rate = record.tokens_per_second())
      bar_fields_ += fmt::format(" | {} tok/s", format_count(*rate));
    if (!bar_shown_ || Clock::now() - drawn_ >= options_.redraw) draw_bar();
  }
}

void Console::on_event(const RunEvent& event) {
  if (event.line.empty()) return;
  const std::lock_guard lock(mutex_);
  print(fmt::format("step {} | {}", event.step, event.line), color_of(event.type));
}

void Console::on_end(const RunEnd& end) {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  erase_bar();
  if (!end.line.empty()) print(end.line, end.exit_code == 0 ? kGreen : kRed);
}

void Console::on_line(const std::string& line) {
  const std::lock_guard lock(mutex_);
  print(line);
}

void Console::on_progress(const Progress& progress) {
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    work_.push_back({&progress, now, now});
    if (!watcher_.joinable()) watcher_ = std::thread([this] { watch(); });
  }
  woken_.notify_all();
}

void Console::on_progress_end(const Progress& progress) {
  const std::lock_guard lock(mutex_);
  std::erase_if(work_, [&](const Work& work) { return work.progress == &progress; });
  if (work_.empty()) erase_bar();
}

// The thread behind long work: whoever does the work may be inside one call for minutes.
void Console::watch() {
  std::unique_lock lock(mutex_);
  const auto pause = options_.bar != nullptr ? options_.redraw : options_.alive;
  while (!ended_) {
    if (work_.empty()) {
      woken_.wait(lock);
      continue;
    }
    woken_.wait_for(lock, pause);
    if (ended_) return;
    const auto now = Clock::now();
    for (Work& work : work_) {
      if (now - work.last_line < options_.alive || options_.bar != nullptr) continue;
      work.last_line = now;
      print("alive      " + progress_text(*work.progress, seconds_since(work.since)));
    }
    if (!work_.empty()) draw_bar();
  }
}

}  // namespace moesaic
