#include "core/train/run_sink.h"

#include <chrono>
#include <exception>

namespace moesaic {

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void RunSinks::add(std::unique_ptr<RunSink> sink) {
  const std::lock_guard lock(mutex_);
  sinks_.push_back(std::move(sink));
}

void RunSinks::on_header(const RunHeader& header) {
  const std::lock_guard lock(mutex_);
  for (const auto& sink : sinks_)
    sink->on_header(header);
}

void RunSinks::on_step(const StepRecord& record) {
  const std::lock_guard lock(mutex_);
  for (const auto& sink : sinks_)
    sink->on_step(record);
}

void RunSinks::on_event(const RunEvent& event) {
  const std::lock_guard lock(mutex_);
  for (const auto& sink : sinks_)
    sink->on_event(event);
}

void RunSinks::on_end(const RunEnd& end) {
  const std::lock_guard lock(mutex_);
  std::exception_ptr first;
  for (const auto& sink : sinks_) {
    try {
      sink->on_end(end);
    } catch (...) {
      if (first == nullptr) first = std::current_exception();
    }
  }
  if (first != nullptr) std::rethrow_exception(first);
}

void RunSinks::on_line(const std::string& line) {
  const std::lock_guard lock(mutex_);
  for (const auto& sink : sinks_)
    sink->on_line(line);
}

void RunSinks::on_progress(const Progress& progress) {
  const std::lock_guard lock(mutex_);
  for (const auto& sink : sinks_)
    sink->on_progress(progress);
}

void RunSinks::on_progress_end(const Progress& progress) {
  const std::lock_guard lock(mutex_);
  for (const auto& sink : sinks_)
    sink->on_progress_end(progress);
}

}  // namespace moesaic
