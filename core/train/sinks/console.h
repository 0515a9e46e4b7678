#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <iosfwd>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/train/run_sink.h"
#include "core/train/sinks/step_line.h"

namespace moesaic {

/// What a run prints: the header, a line per log.interval steps, events as lines of their own that begin with "step N | ",
/// and for long work a line at least once a minute, or a bar.
class Console final : public RunSink {
 public:
  struct Options {
    std::ostream* lines = nullptr;  ///< stdout; nothing but whole lines
    std::ostream* bar = nullptr;    ///< stderr; null: no bar
    int columns = 80;               ///< of the terminal that shows the bar
    bool color = false;
    bool step_lines = true;
    std::int64_t interval = 1;      ///< steps between lines
    std::int64_t detail_every = 0;  ///< steps between lines about experts and memory; 0: none
    std::chrono::milliseconds alive{30000};  ///< between lines of long work
    std::chrono::milliseconds redraw{200};   ///< between drawings of the bar
  };
  explicit Console(const Options& options);
  ~Console() override;
  /// What rates are counted against; known only when the devices are.
  void set_hardware(const StepLines::Hardware& hardware);

  void on_header(const RunHeader& header) override;
  void on_step(const StepRecord& record) override;
  void on_event(const RunEvent& event) override;
  void on_end(const RunEnd& end) override;
  void on_line(const std::string& line) override;
  void on_progress(const Progress& progress) override;
  void on_progress_end(const Progress& progress) override;

 private:
  struct Work {
    const Progress* progress = nullptr;
    std::chrono::steady_clock::time_point since, last_line;
  };
  void print(const std::string& line, const char* color = nullptr);
  void erase_bar();
  void draw_bar();
  void watch();
  std::string bar_text() const;

  Options options_;
  StepLines steps_;
  std::mutex mutex_;  // of everything below, and of the streams
  std::condition_variable woken_;
  std::vector<Work> work_;
  std::int64_t step_ = 0, last_step_ = 0;
  std::string bar_fields_;
  bool bar_shown_ = false, ended_ = false;
  std::chrono::steady_clock::time_point drawn_;
  std::thread watcher_;  // while there is work, or a bar
};

/// "load: 1.20 of 3.40 GiB (35%) | 0.41 GiB/s | 0:00:03 so far, 0:00:05 left"; what is not known is left out.
std::string progress_text(const Progress& progress, double seconds);

}  // namespace moesaic
