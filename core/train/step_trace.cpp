#include "core/train/step_trace.h"

#include <filesystem>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/base/durable_file.h"
#include "core/base/error.h"

namespace moesaic {

StepTrace::StepTrace(Stream& stream) : stream_(stream), origin_(now()) {}

StepTrace::Point StepTrace::now() {
  Point point;
  if (stream_.device().kind == Device::Kind::cuda) {
    point.on_gpu = std::make_unique<Timestamp>(stream_.device());
    stream_.record(*point.on_gpu);
  } else {
    point.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  return point;
}

double StepTrace::since_start(const Point& point) const {
  return point.on_gpu ? seconds_between(*origin_.on_gpu, *point.on_gpu) : point.seconds;
}

void StepTrace::begin(const char* op) {
  open_.push_back(events_.size());
  events_.push_back({op, {}, true, {}, now(), {}});
}
void StepTrace::end(const char*, const OpCost& cost) {
  Event& event = events_[open_.back()];
  open_.pop_back();
  event.cost = cost;
  event.to = now();
}
void StepTrace::push(const std::string& part) {
  open_.push_back(events_.size());
  events_.push_back({part, {}, false, {}, now(), {}});
}
void StepTrace::pop() {
  events_[open_.back()].to = now();
  open_.pop_back();
}
void StepTrace::ran(const char*, const char* path) {
  if (!open_.empty() && events_[open_.back()].is_op) events_[open_.back()].path = path;
}

void StepTrace::write(const std::string& path, int rank) const {
  MOESAIC_CHECK(open_.empty(), "a trace is written after its step");
  auto list = nlohmann::json::array();
  for (const Event& e : events_) {
    constexpr double kMicro = 1e6;
    const double from = since_start(e.from);
    nlohmann::json event = {{"name", e.name},
                            {"cat", e.is_op ? "op" : "part"},
                            {"ph", "X"},
                            {"ts", from * kMicro},
                            {"dur", (since_start(e.to) - from) * kMicro},
                            {"pid", rank},
                            {"tid", 0}};
    if (e.is_op) event["args"] = {{"flops", e.cost.flops}, {"bytes", e.cost.bytes}};
    if (!e.path.empty()) event["args"]["path"] = e.path;
    list.push_back(std::move(event));
  }
  const std::filesystem::path file(path);
  create_folder(file.parent_path());
  const nlohmann::json trace{{"traceEvents", std::move(list)}, {"displayTimeUnit", "ms"}};
  replace_file(file, trace.dump() + "\n", Sync::no);
}

}  // namespace moesaic
