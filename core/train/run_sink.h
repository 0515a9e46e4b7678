#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/train/step_record.h"

namespace moesaic {

/// Unix time, seconds.
double unix_time();

/// What a life of a run (from one start to its end) says about itself before its first step.
struct RunHeader {
  std::string config_hash;
  std::string version;
  int ranks = 1;
  std::int64_t start_step = 0;  ///< the last step that is already done
  std::map<std::string, std::string>
      texts;  ///< anything else: layout, device, formula of the FLOPs
  std::string run_dir;
  std::string config;              ///< the effective configuration, YAML
  std::vector<std::string> lines;  ///< the same and more for a reader: what the console prints
};

/// Something that happened between steps: start, resume, save, eval, skip, data, ….
struct RunEvent {
  std::string type;
  std::int64_t step = 0;  ///< steps done by then
  std::map<std::string, double> values;
  std::map<std::string, std::string> texts;
  std::string line;  ///< for the console, which puts "step N | " in front; empty: no line
};

/// How a life ended.
struct RunEnd {
  std::int64_t step = 0;  ///< steps done
  int exit_code = 0;
  std::string reason;  ///< "finished", "run.max_minutes is over", the text of an error
  std::string line;    ///< for the console, as it stands; empty: no line
};

/// A long piece of work, counted by whoever does it, from any thread.
class Progress {
 public:
  Progress(std::string name, std::int64_t total, std::string unit)
      : name_(std::move(name)), unit_(std::move(unit)), total_(total) {}
  void add(std::int64_t n) noexcept { done_ += n; }
  void set_total(std::int64_t n) noexcept { total_ = n; }
  const std::string& name() const noexcept { return name_; }
  const std::string& unit() const noexcept { return unit_; }  ///< "bytes", or what is counted
  std::int64_t done() const noexcept { return done_; }
  std::int64_t total() const noexcept { return total_; }  ///< 0: not known

 private:
  std::string name_, unit_;
  std::atomic<std::int64_t> done_{0}, total_;
};

/// One output of a run. All outputs are shown the same records, so their values agree; rank 0 alone has any.
class RunSink {
 public:
  virtual ~RunSink() = default;
  virtual void on_header(const RunHeader&) {}
  virtual void on_step(const StepRecord&) {}
  virtual void on_event(const RunEvent&) {}
  virtual void on_end(const RunEnd&) {}
  /// A line for a reader; no record of the run.
  virtual void on_line(const std::string&) {}
  /// A long piece of work begins; on_progress_end() comes before `progress` dies.
  virtual void on_progress(const Progress& /*progress*/) {}
  virtual void on_progress_end(const Progress& /*progress*/) {}
};

/// Hands everything to all outputs in the order in which they were added; with none (ranks other than 0) it does nothing.
/// Calls may come from several threads.
class RunSinks final : public RunSink {
 public:
  void add(std::unique_ptr<RunSink> sink);
  void on_header(const RunHeader& header) override;
  void on_step(const StepRecord& record) override;
  void on_event(const RunEvent& event) override;
  /// All of them, also when one throws.
  void on_end(const RunEnd& end) override;
  void on_line(const std::string& line) override;
  void on_progress(const Progress& progress) override;
  void on_progress_end(const Progress& progress) override;

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<RunSink>> sinks_;
};

/// A long piece of work, shown while this object lives.
class ShownProgress {
 public:
  ShownProgress(RunSink& sink, std::string name, std::int64_t total = 0, std::string unit = "")
      : sink_(sink), progress_(std::move(name), total, std::move(unit)) {
    sink_.on_progress(progress_);
  }
  ~ShownProgress() { sink_.on_progress_end(progress_); }
  ShownProgress(const ShownProgress&) = delete;
  ShownProgress& operator=(const ShownProgress&) = delete;
  Progress& operator*() noexcept { return progress_; }
  Progress* operator->() noexcept { return &progress_; }

 private:
  RunSink& sink_;
  Progress progress_;
};

}  // namespace moesaic
