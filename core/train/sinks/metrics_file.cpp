#include "core/train/sinks/metrics_file.h"

#include <cmath>
#include <fstream>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/base/durable_file.h"
#include "core/base/error.h"

namespace moesaic {
namespace {

using nlohmann::ordered_json;

// A JSON object that remembers whether a number in it was not finite.
class Object {
 public:
  explicit Object(const std::string& type) { json_["type"] = type; }
  void put(const std::string& key, double value) { json_[key] = number(value); }
  void put(const std::string& key, std::int64_t value) { json_[key] = value; }
  void put(const std::string& key, const std::string& value) { json_[key] = value; }
  void put(const std::string& key, bool value) { json_[key] = value; }
  void put(const std::string& key, ordered_json value) { json_[key] = std::move(value); }
  template <class T>
  void put(const std::string& key, const std::optional<T>& value) {
    if (value) put(key, *value);
  }
  ordered_json number(double value) {
    if (std::isfinite(value)) return value;
    non_finite_ = true;
    return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  }
  // Texts come from paths and messages; a byte that is not UTF-8 must not cost the line.
  std::string line() {
    if (non_finite_) json_["non_finite"] = true;
    return json_.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  }

 private:
  ordered_json json_ = ordered_json::object();
  bool non_finite_ = false;
};

ordered_json experts_to_json(const std::vector<ExpertLoad>& experts, Object& object) {
  auto list = ordered_json::array();
  for (const auto& e : experts) {
    list.push_back({{"layer", e.layer},
                    {"max_over_mean", object.number(e.max_over_mean)},
                    {"dead", e.dead_experts},
                    {"entropy", object.number(e.entropy)}});
    if (e.rank_max_over_mean)
      list.back()["rank_max_over_mean"] = object.number(*e.rank_max_over_mean);
    if (e.further_passes) list.back()["further_passes"] = *e.further_passes;
  }
  return list;
}

bool ends_in_the_middle_of_a_line(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file || file.tellg() <= 0) return false;
  file.seekg(-1, std::ios::end);
  return file.get() != '\n';
}

}  // namespace

std::string to_json(const StepRecord& r) {
  Object o("step");
  o.put("step", r.step);
  o.put("loss", r.loss);
  if (!r.loss_parts.empty()) {
    auto parts = ordered_json::object();
    for (const auto& [name, value] : r.loss_parts)
      parts[name] = o.number(value);
    o.put("loss_parts", std::move(parts));
  }
  o.put("grad_norm", r.grad_norm);
  o.put("lr", r.learning_rate);
  o.put("tokens", r.tokens);
  o.put("total_tokens", r.total_tokens);
  o.put("seconds", r.seconds);
  if (r.parts) {
    auto parts = ordered_json::object();
    for (std::size_t i = 0; i < kStepParts; ++i)
      parts[name(static_cast<StepPart>(i))] = o.number(r.parts->of[i]);
    o.put("seconds_by_part", std::move(parts));
  }
  o.put("time", r.time);
  o.put("skipped", r.skipped);
  if (!r.experts.empty()) o.put("experts", experts_to_json(r.experts, o));
  o.put("tokens_per_second", r.tokens_per_second());
  o.put("flops", r.flops);
  o.put("tflops_per_device", r.tflops_per_device);
  o.put("mfu", r.mfu);
  o.put("memory_bytes", r.memory_bytes);
  o.put("host_bytes", r.host_bytes);
  o.put("activations_out_bytes", r.activations_out);
  o.put("activations_in_bytes", r.activations_in);
  return o.line();
}

std::string experts_to_json(const StepRecord& record) {
  Object o("experts");
  o.put("step", record.step);
  auto layers = ordered_json::array(), tokens = ordered_json::array(),
       rank_tokens = ordered_json::array(), least = ordered_json::array(),
       most = ordered_json::array();
  for (const auto& e : record.experts) {
    if (e.tokens.empty()) continue;
    layers.push_back(e.layer);
    tokens.push_back(e.tokens);
    if (!e.rank_tokens.empty()) rank_tokens.push_back(e.rank_tokens);
    least.push_back(e.bias_min ? o.number(*e.bias_min) : ordered_json());
    most.push_back(e.bias_max ? o.number(*e.bias_max) : ordered_json());
  }
  if (layers.empty()) return {};
  o.put("layers", std::move(layers));
  o.put("bias_min", std::move(least));
  o.put("bias_max", std::move(most));
  o.put("tokens", std::move(tokens));
  if (!rank_tokens.empty()) o.put("rank_tokens", std::move(rank_tokens));
  return o.line();
}

std::string exchange_to_json(const StepRecord& record) {
  if (record.exchange.empty()) return {};
  Object o("exchange");
  o.put("step", record.step);
  auto layers = ordered_json::array();
  for (const auto& e : record.exchange)
    layers.push_back(e.layer);
  o.put("layers", std::move(layers));
  const auto put = [&](const std::string& key, const auto& value) {
    auto list = ordered_json::array();
    for (const auto& e : record.exchange)
      list.push_back(value(e));
    o.put(key.c_str(), std::move(list));
  };
  for (const auto way : {&LayerExchange::dispatch, &LayerExchange::combine}) {
    const std::string name = way == &LayerExchange::dispatch ? "dispatch_" : "combine_";
    put(name + "seconds", [&](const auto& e) { return o.number((e.*way).seconds); });
    put(name + "exposed_seconds", [&](const auto& e) { return o.number((e.*way).exposed); });
    put(name + "overlapped_seconds",
        [&](const auto& e) { return o.number((e.*way).overlapped()); });
    put(name + "bytes", [&](const auto& e) { return ordered_json((e.*way).bytes); });
    put(name + "network_bytes",
        [&](const auto& e) { return ordered_json((e.*way).network_bytes); });
  }
  return o.line();
}

std::string offload_to_json(const StepRecord& record) {
  if (record.tiers.empty()) return {};
  struct Figure {
    const char* name;
    std::int64_t TierTraffic::*value;
  };
  constexpr Figure kFigures[] = {{"uses", &TierTraffic::uses},
                                 {"hits", &TierTraffic::hits},
                                 {"bytes_up", &TierTraffic::bytes_up},
                                 {"bytes_down", &TierTraffic::bytes_down},
                                 {"file_bytes_read", &TierTraffic::file_read},
                                 {"file_bytes_written", &TierTraffic::file_written},
                                 {"host_waits", &TierTraffic::host_waits}};
  Object o("offload");
  o.put("step", record.step);
  for (const auto& [kind, traffic] : record.tiers) {
    auto figures = ordered_json::object();
    for (const Figure& f : kFigures)
      figures[f.name] = traffic.*f.value;
    figures["host_wait_seconds"] = o.number(traffic.host_wait_seconds);
    o.put(kind.c_str(), std::move(figures));
  }
  if (record.replays) {
    o.put("replays", record.replays->members);
    o.put("steps_replayed", record.replays->steps);
  }
  if (record.tier_layers.empty()) return o.line();
  const auto list = [&](const std::string& key, const auto& value) {
    auto values = ordered_json::array();
    for (const LayerTierTraffic& l : record.tier_layers)
      values.push_back(value(l));
    o.put(key.c_str(), std::move(values));
  };
  list("layers", [](const auto& l) { return l.layer; });
  for (const Figure& f : kFigures)
    list(fmt::format("layer_{}", f.name), [&](const auto& l) { return l.traffic.*f.value; });
  list("layer_host_wait_seconds",
       [&](const auto& l) { return o.number(l.traffic.host_wait_seconds); });
  return o.line();
}

struct MetricsFile::Impl {
  explicit Impl(const std::filesystem::path& path) : file(path, DurableFile::Mode::append) {}
  // The newline goes with the object in one write, so that a kill tears at most this line.
  void write(std::string text) {
    text += '\n';
    if (std::exchange(torn, true)) text.insert(0, 1, '\n');
    file.write(text);
    torn = false;
  }
  DurableFile file;
  bool torn = false;  // a write has failed
};

MetricsFile::MetricsFile(const std::filesystem::path& path) {
  const bool torn = ends_in_the_middle_of_a_line(path);
  impl_ = std::make_unique<Impl>(path);
  impl_->torn = torn;
}
MetricsFile::~MetricsFile() = default;

void MetricsFile::on_header(const RunHeader& header) {
  Object o("header");
  o.put("time", unix_time());
  o.put("config_hash", header.config_hash);
  o.put("version", header.version);
  o.put("ranks", std::int64_t{header.ranks});
  o.put("start_step", header.start_step);
  for (const auto& [key, value] : header.texts)
    o.put(key, value);
  if (!header.lines.empty()) o.put("lines", ordered_json(header.lines));
  impl_->write(o.line());
}

void MetricsFile::on_step(const StepRecord& record) {
  impl_->write(to_json(record));
  if (std::string experts = experts_to_json(record); !experts.empty())
    impl_->write(std::move(experts));
  if (std::string exchange = exchange_to_json(record); !exchange.empty())
    impl_->write(std::move(exchange));
  if (std::string offload = offload_to_json(record); !offload.empty())
    impl_->write(std::move(offload));
}

void MetricsFile::on_event(const RunEvent& event) {
  Object o(event.type);
  o.put("step", event.step);
  for (const auto& [key, value] : event.values)
    o.put(key, value);
  for (const auto& [key, value] : event.texts)
    o.put(key, value);
  o.put("time", unix_time());
  impl_->write(o.line());
}

void MetricsFile::on_end(const RunEnd& end) {
  Object o("stop");
  o.put("step", end.step);
  o.put("exit_code", std::int64_t{end.exit_code});
  o.put("reason", end.reason);
  o.put("time", unix_time());
  impl_->write(o.line());
  impl_->file.finish();
}

}  // namespace moesaic
