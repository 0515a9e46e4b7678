#pragma once
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include "core/train/run_sink.h"

namespace moesaic {

/// A text file that Prometheus reads through node_exporter's textfile collector: the last value of everything, in base
/// units. The file is replaced as a whole (written beside it, then renamed), so that no reader sees half of it, at most
/// once per `interval`, and at once for events and the end. A file that cannot be written is reported through `warn`, once,
/// and does not stop the run; its age tells the reader.
class PrometheusFile final : public RunSink {
 public:
  struct Options {
    std::filesystem::path path;         ///< ends in .prom
    std::string run;                    ///< value of the label `run`
    std::int64_t checkpoint_every = 0;  ///< steps; 0: none
    std::filesystem::path disk;         ///< whose free space is watched
    std::chrono::milliseconds interval{1000};
    std::function<void(const std::string&)> warn;
  };
  /// Throws ResourceError (path, cause) when the folder of the file does not exist.
  explicit PrometheusFile(const Options& options);
  void on_header(const RunHeader& header) override;
  void on_step(const StepRecord& record) override;
  void on_event(const RunEvent& event) override;
  void on_end(const RunEnd& end) override;

 private:
  void set(const char* name, double value, const std::string& labels = {});
  void set_experts(const StepRecord& record);
  void set_exchange(const StepRecord& record);
  void set_tiers(const StepRecord& record);
  void write();
  std::string text() const;

  Options options_;
  std::map<std::string, std::map<std::string, double>> values_;  // by name, then by further labels
  std::chrono::steady_clock::time_point written_;
  std::int64_t skipped_ = 0;
  bool warned_ = false;
};

/// Path of the file that log.prometheus asks for; empty: none. "true": metrics.prom in the run's folder; what ends in
/// .prom: that file; else a folder, where the file is named after the run's folder.
std::filesystem::path prometheus_path(const std::string& setting,
                                      const std::filesystem::path& run_dir);

}  // namespace moesaic
