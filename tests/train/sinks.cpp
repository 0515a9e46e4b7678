// The outputs of a run, each read back by a reader that shares no code with the writer.
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <thread>

#include <nlohmann/json.hpp>
#include <unistd.h>
#include <zlib.h>

#include "core/base/crc32c.h"
#include "core/base/error.h"
#include "core/train/sinks/console.h"
#include "core/train/sinks/event_file.h"
#include "core/train/sinks/heat_map.h"
#include "core/train/sinks/metrics_file.h"
#include "core/train/sinks/prometheus.h"
#include "core/train/sinks/tensorboard.h"
#include "tests/support/catch.h"

namespace moesaic {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("moesaic_sinks_" + std::to_string(::getpid()))) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Fields of a protocol-buffer message: number and content (varints and fixed widths as 8 bytes).
struct Field {
  std::uint64_t number = 0;
  std::uint64_t bits = 0;
  std::string bytes;
  double as_double() const {
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
  float as_float() const {
    const auto low = static_cast<std::uint32_t>(bits);
    float x;
    std::memcpy(&x, &low, sizeof x);
    return x;
  }
};

std::vector<Field> fields_of(const std::string& message) {
  std::vector<Field> fields;
  std::size_t at = 0;
  const auto varint = [&] {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(message.at(at++));
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
  };
  while (at < message.size()) {
    const std::uint64_t key = varint();
    Field field{key >> 3};
    const std::uint64_t kind = key & 7;
    if (kind == 0) {
      field.bits = varint();
    } else if (kind == 2) {
      const std::uint64_t size = varint();
      field.bytes = message.substr(at, size);
      REQUIRE(field.bytes.size() == size);
      at += size;
    } else {
      const std::size_t size = kind == 1 ? 8 : 4;
      REQUIRE((kind == 1 || kind == 5));
      REQUIRE(at + size <= message.size());
      std::memcpy(&field.bits, message.data() + at, size);
      at += size;
    }
    fields.push_back(field);
  }
  return fields;
}

const Field* find(const std::vector<Field>& fields, std::uint64_t number) {
  for (const auto& f : fields) {
    if (f.number == number) return &f;
  }
  return nullptr;
}

struct Event {
  std::int64_t step = 0;
  std::string version;
  bool session_start = false;
  std::map<std::string, std::vector<Field>> values;  // by tag
  std::optional<double> scalar(const std::string& tag) const {
    const auto it = values.find(tag);
    if (it == values.end()) return std::nullopt;
    const Field* f = find(it->second, 2);
    return f != nullptr ? std::optional<double>(f->as_float()) : std::nullopt;
  }
};

std::uint32_t unmasked(std::uint32_t masked) {
  const std::uint32_t rotated = masked - 0xa282ead8U;
  return rotated >> 17 | rotated << 15;
}

// Whole records of an event file; a torn tail is left out.
std::vector<Event> events_of(const std::string& file) {
  std::vector<Event> events;
  std::size_t at = 0;
  while (at + 12 <= file.size()) {
    std::uint64_t size;
    std::uint32_t crc;
    std::memcpy(&size, file.data() + at, 8);
    std::memcpy(&crc, file.data() + at + 8, 4);
    REQUIRE(unmasked(crc) == crc32c_by_table(file.data() + at, 8));
    if (at + 16 + size > file.size()) break;
    const std::string message = file.substr(at + 12, size);
    std::memcpy(&crc, file.data() + at + 12 + size, 4);
    REQUIRE(unmasked(crc) == crc32c_by_table(message.data(), message.size()));
    at += 16 + size;
    Event event;
    for (const Field& f : fields_of(message)) {
      if (f.number == 2) event.step = static_cast<std::int64_t>(f.bits);
      if (f.number == 3) event.version = f.bytes;
      if (f.number == 7) event.session_start = find(fields_of(f.bytes), 1)->bits == 1;
      if (f.number != 5) continue;
      for (const Field& value : fields_of(f.bytes)) {
        const auto parts = fields_of(value.bytes);
        event.values[find(parts, 1)->bytes] = parts;
      }
    }
    events.push_back(std::move(event));
  }
  return events;
}

ExpertLoad layer(std::int64_t index, std::vector<std::int64_t> tokens) {
  ExpertLoad load = expert_load(std::move(tokens));
  load.layer = index;
  load.bias_min = -0.25;
  load.bias_max = 0.5;
  return load;
}

StepRecord record(std::int64_t step) {
  StepRecord r;
  r.step = step;
  r.steps = 20;
  r.time = 1.75e9;
  r.loss = 5.0 / 3.0 + static_cast<double>(step);
  r.loss_parts["mtp"] = 0.1;
  r.grad_norm = 1.25;
  r.learning_rate = 3e-4;
  r.tokens = 1001;
  r.seconds = 0.3;
  r.parts = StepSeconds{{0.025, 0.05, 0.075, 0.1, 0.125, 0.05, 0.075}};
  r.total_tokens = INT64_C(15500000000001);
  r.flops = 6e11;
  r.tflops_per_device = 2;
  r.mfu = 0.4;
  r.memory_bytes = INT64_C(80) << 30;
  r.host_bytes = INT64_C(3) << 30;
  r.experts = {layer(1, {4, 0, 8, 4}), layer(7, {4, 4, 4, 4})};
  return r;
}

TEST_CASE("figures of the ranks that share the experts") {
  ExpertLoad load = expert_load({8, 4, 4, 0});
  add_ranks(load, no_copies({0, 1, 2, 3}, 2, 0));
  CHECK(load.rank_tokens == std::vector<std::int64_t>{12, 4});
  CHECK(load.rank_max_over_mean == 1.5);
  // Experts 1 and 3 change places.
  add_ranks(load, no_copies({0, 3, 2, 1}, 2, 0));
  CHECK(load.rank_tokens == std::vector<std::int64_t>{8, 8});
  CHECK(load.rank_max_over_mean == 1.0);
  std::string bytes;
  write_expert_load(bytes, load);
  write_expert_load(bytes, expert_load({3, 1}));
  std::size_t at = 0;
  const ExpertLoad with = read_expert_load(bytes, at), without = read_expert_load(bytes, at);
  CHECK(at == bytes.size());
  CHECK(with.rank_tokens == load.rank_tokens);
  CHECK(with.rank_max_over_mean == 1.0);
  CHECK(with.tokens == load.tokens);
  CHECK(without.tokens == std::vector<std::int64_t>{3, 1});
  CHECK_FALSE(without.rank_max_over_mean);

  StepRecord record;
  record.step = 1;
  record.experts = {load};
  const json step = json::parse(to_json(record)), experts = json::parse(experts_to_json(record));
  CHECK(step.at("experts").at(0).at("rank_max_over_mean") == 1.0);
  CHECK(experts.at("rank_tokens") == json({{8, 8}}));
}

TEST_CASE("figures of a layer from its counts") {
  const ExpertLoad uneven = expert_load({4, 0, 8, 4});
  CHECK(uneven.max_over_mean == 2);
  CHECK(uneven.dead_experts == 1);
  CHECK(uneven.entropy == Approx(1.5 * std::log(2.0) / std::log(4.0)));
  CHECK(uneven.tokens == std::vector<std::int64_t>{4, 0, 8, 4});
  const ExpertLoad even = expert_load({5, 5, 5});
  CHECK(even.max_over_mean == 1);
  CHECK(even.entropy == Approx(1));
  CHECK(expert_load({0, 0}).dead_experts == 2);
  CHECK(expert_load({0, 0}).max_over_mean == 0);
  CHECK(expert_load({3}).entropy == 1);
  // Counts are exact where neighbouring floats of half the width are equal.
  CHECK(expert_load({INT64_C(1) << 53, 1}).tokens[0] == INT64_C(1) << 53);
}

TEST_CASE("metrics.jsonl, TensorBoard and Prometheus hold the same values") {
  const Folder folder;
  const StepRecord r = record(3);
  {
    RunSinks sinks;
    sinks.add(std::make_unique<MetricsFile>(folder.path() / "metrics.jsonl"));
    sinks.add(std::make_unique<TensorBoard>(folder.path() / "tensorboard"));
    sinks.add(std::make_unique<PrometheusFile>(
        PrometheusFile::Options{.path = folder.path() / "m.prom",
                                .run = "a \"b\"\\",
                                .disk = folder.path(),
                                .interval = std::chrono::milliseconds(0)}));
    RunHeader header{"abc", "0.1", 4, 2};
    header.config = "a: 1\n";
    sinks.on_header(header);
    sinks.on_step(r);
    sinks.on_event({"eval", 3, {{"loss", 2.5}}});
    sinks.on_event({"data", 3, {{"web \"x\"", 0.75}}});
    sinks.on_end({3, 0, "finished"});
  }
  std::map<std::string, json> lines;
  std::istringstream text(read(folder.path() / "metrics.jsonl"));
  for (std::string line; std::getline(text, line);)
    lines[json::parse(line).at("type")] = json::parse(line);
  const json& step = lines.at("step");
  const auto files = fs::directory_iterator(folder.path() / "tensorboard");
  const auto events = events_of(read(files->path()));
  REQUIRE(events.size() == 6);
  CHECK(events[0].version == "brain.Event:2");
  CHECK(events[1].session_start);
  CHECK(events[1].step == 3);  // steps 1 and 2 of earlier lives stay
  CHECK(events[2].values.count("config") == 1);
  const Event& event = events[3];
  CHECK(event.step == 3);

  const std::string prom = read(folder.path() / "m.prom");
  REQUIRE(prom.back() == '\n');
  const auto metric = [&](const std::string& name, const std::string& more = "") {
    const std::string start = "\n" + name + "{run=\"a \\\"b\\\"\\\\\"" + more + "} ";
    const auto at = prom.find(start);
    INFO(start << " in\n" << prom);
    REQUIRE(at != std::string::npos);
    return std::stod(prom.substr(at + start.size()));
  };
  const struct {
    const char *json_key, *tag, *metric;
    double scale;
  } same[] = {{"loss", "train/loss", "moesaic_loss", 1},
              {"grad_norm", "train/grad_norm", "moesaic_grad_norm", 1},
              {"lr", "train/lr", "moesaic_learning_rate", 1},
              {"total_tokens", "train/total_tokens", "moesaic_tokens_total", 1},
              {"seconds", "perf/step_seconds", "moesaic_step_duration_seconds", 1},
              {"tokens_per_second", "perf/tokens_per_second", "moesaic_tokens_per_second", 1},
              {"tflops_per_device", "perf/tflops_per_device", "moesaic_flops_per_second", 1e12},
              {"mfu", "perf/mfu", "moesaic_flops_utilization_ratio", 1},
              {"memory_bytes", "perf/device_memory_bytes", "moesaic_device_memory_bytes", 1},
              {"host_bytes", "perf/host_memory_bytes", "moesaic_host_memory_bytes", 1}};
  for (const auto& s : same) {
    INFO(s.json_key);
    const double value = step.at(s.json_key);
    REQUIRE(event.scalar(s.tag));
    CHECK(static_cast<float>(*event.scalar(s.tag)) == static_cast<float>(value));
    CHECK(metric(s.metric) == value * s.scale);
  }
  CHECK(step.at("seconds_by_part").size() == kStepParts);
  for (const auto& [part, seconds] : step.at("seconds_by_part").items()) {
    INFO(part);
    CHECK(seconds.get<double>() > 0);
    CHECK(static_cast<float>(*event.scalar("perf/seconds_" + part)) == seconds.get<float>());
    CHECK(metric("moesaic_step_part_seconds", ",part=\"" + part + "\"") == seconds.get<double>());
  }
  CHECK(step.at("tokens_per_second").get<double>() * step.at("seconds").get<double>() ==
        Approx(1001));
  CHECK(metric("moesaic_loss_part", ",part=\"mtp\"") == 0.1);
  CHECK(metric("moesaic_eval_loss") == 2.5);
  CHECK(metric("moesaic_last_step_timestamp_seconds") == step.at("time").get<double>());
  CHECK(metric("moesaic_data_ratio", ",source=\"web \\\"x\\\"\"") == 0.75);
  CHECK(metric("moesaic_running") == 0);
  CHECK(metric("moesaic_dead_experts") == 1);
  CHECK(metric("moesaic_expert_load_max_ratio") == 2);
  CHECK(metric("moesaic_disk_free_bytes") > 0);
  CHECK(*events[4].scalar("eval/loss") == 2.5);
  CHECK(lines.at("stop").at("reason") == "finished");

  const json& experts = lines.at("experts");
  CHECK(experts.at("layers") == json({1, 7}));
  CHECK(experts.at("tokens") == json({{4, 0, 8, 4}, {4, 4, 4, 4}}));
  CHECK(experts.at("bias_max") == json({0.5, 0.5}));
  CHECK(*event.scalar("moe/L01/load_max") == 2);
  CHECK(*event.scalar("moe/L07/bias_min") == -0.25);
  const auto histogram = fields_of(find(event.values.at("moe/L01/tokens"), 5)->bytes);
  CHECK(find(histogram, 1)->as_double() == 0);
  CHECK(find(histogram, 2)->as_double() == 8);
  CHECK(find(histogram, 3)->as_double() == 4);
  CHECK(find(histogram, 4)->as_double() == 16);
  CHECK(find(histogram, 6)->bytes.size() == find(histogram, 7)->bytes.size());
  for (const auto& entry : fs::directory_iterator(folder.path()))
    CHECK(entry.path().filename().string().find(".prom.") == std::string::npos);
}

TEST_CASE("the number of tags does not grow with the experts") {
  const Folder folder;
  StepRecord r = record(1);
  r.experts.clear();
  for (std::int64_t l = 0; l < 48; ++l)
    r.experts.push_back(layer(l, std::vector<std::int64_t>(256, l + 1)));
  {
    TensorBoard board(folder.path());
    board.on_step(r);
  }
  const auto events = events_of(read(fs::directory_iterator(folder.path())->path()));
  CHECK(events.at(1).values.size() <= 48 * 6 + 16 + kStepParts);
  CHECK(events.at(1).values.size() > 48 * 6);
  // 256 experts x 48 layers fit a line of less than 7 bytes each.
  CHECK(experts_to_json(r).size() < 256 * 48 * 7);
}

TEST_CASE("event files: later lives sort later, a torn tail costs one event") {
  const Folder folder;
  std::vector<fs::path> paths;
  for (int life = 0; life < 3; ++life) {
    EventFile file(folder.path());
    EventSummary s;
    s.scalar("x", life);
    file.write(life, s);
    s.scalar("y", kNan);
    file.write(life, s);
    paths.push_back(file.path());
  }
  CHECK(std::is_sorted(paths.begin(), paths.end()));
  CHECK(std::adjacent_find(paths.begin(), paths.end()) == paths.end());
  const std::string whole = read(paths[0]);
  REQUIRE(events_of(whole).size() == 3);
  CHECK(std::isnan(*events_of(whole)[2].scalar("y")));
  for (std::size_t cut = 1; cut < 30; ++cut) {
    const auto events = events_of(whole.substr(0, whole.size() - cut));
    CHECK(events.size() == 2);
  }
  std::ofstream(folder.path() / "file") << "x";
  CHECK_THROWS_AS(EventFile(folder.path() / "file"), ResourceError);
}

TEST_CASE("the heat map is a PNG of layers and experts") {
  CHECK(expert_heat_map({}).png.empty());
  StepRecord r = record(1);
  const Image image = expert_heat_map(r.experts);
  CHECK(image.width % 4 == 0);
  CHECK(image.height % 2 == 0);
  REQUIRE(image.png.substr(0, 8) == "\x89PNG\r\n\x1a\n");
  std::map<std::string, std::string> chunks;
  for (std::size_t at = 8; at < image.png.size();) {
    const auto number = [&](std::size_t from) {
      std::uint32_t n = 0;
      for (std::size_t i = 0; i < 4; ++i)
        n = n << 8 | static_cast<unsigned char>(image.png.at(from + i));
      return n;
    };
    const std::uint32_t size = number(at);
    const auto* body = reinterpret_cast<const Bytef*>(image.png.data()) + at + 4;
    CHECK(number(at + 8 + size) == crc32(0, body, size + 4));
    chunks[image.png.substr(at + 4, 4)] = image.png.substr(at + 8, size);
    at += 12 + size;
  }
  CHECK(chunks.count("IEND") == 1);
  CHECK(chunks.at("PLTE").size() == 3 * 256);
  std::string rows(static_cast<std::size_t>((image.width + 1) * image.height), '\0');
  uLongf size = rows.size();
  REQUIRE(uncompress(reinterpret_cast<Bytef*>(rows.data()),
                     &size,
                     reinterpret_cast<const Bytef*>(chunks.at("IDAT").data()),
                     chunks.at("IDAT").size()) == Z_OK);
  REQUIRE(size == rows.size());
  const auto cell = [&](int row, int column) {
    const int x = column * image.width / 4 + 1, y = row * image.height / 2;
    return static_cast<int>(
        static_cast<unsigned char>(rows[static_cast<std::size_t>(y * (image.width + 1) + 1 + x)]));
  };
  CHECK(cell(0, 0) == 127);  // the mean
  CHECK(cell(0, 1) == 255);  // no token
  CHECK(cell(0, 2) > 127);
  CHECK(cell(1, 3) == 127);
}

TEST_CASE("where the Prometheus file goes, and what happens when it cannot be written") {
  CHECK(prometheus_path("", "runs/a").empty());
  CHECK(prometheus_path("false", "runs/a").empty());
  CHECK(prometheus_path("true", "runs/a") == "runs/a/metrics.prom");
  CHECK(prometheus_path("/x/y.prom", "runs/a") == "/x/y.prom");
  CHECK(prometheus_path("/x", "runs/a") == "/x/moesaic_a.prom");
  const Folder folder;
  CHECK_THROWS_AS(PrometheusFile({.path = folder.path() / "none" / "m.prom"}), ResourceError);
  int warnings = 0;
  PrometheusFile file({.path = folder.path() / "m.prom",
                       .run = "r",
                       .disk = folder.path(),
                       .interval = std::chrono::milliseconds(0),
                       .warn = [&](const std::string&) { ++warnings; }});
  file.on_header({});
  fs::remove_all(folder.path());
  for (int step = 1; step < 4; ++step)
    file.on_step(record(step));
  CHECK(warnings == 1);  // and the run goes on
}

TEST_CASE("console: lines, events, details, progress; no escape codes unless asked for") {
  std::ostringstream lines;
  {
    Console console({.lines = &lines,
                     .interval = 2,
                     .detail_every = 2,
                     .alive = std::chrono::milliseconds(20)});
    RunHeader header;
    header.lines = {"moesaic", "run x"};
    console.on_header(header);
    for (int step = 1; step <= 2; ++step)
      console.on_step(record(step));
    console.on_event({"save", 2, {}, {}, "save x"});
    console.on_event({"start", 0});
    ShownProgress progress(console, "load", std::int64_t{4} << 30, "bytes");
    progress->add(std::int64_t{1} << 30);
    for (int i = 0; i < 200 && lines.str().find("alive") == std::string::npos; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    console.on_line("free text");
  }
  const std::string text = lines.str();
  INFO(text);
  CHECK(text.rfind("moesaic\nrun x\nstep 2/20 | loss 3.6667", 0) == 0);
  CHECK(text.find("\nstep 2 | moe 2 layer(s) | max/mean 2.00 in layer 1 | dead 1 in 1 layer(s)") !=
        std::string::npos);
  CHECK(text.find("router bias -0.2500 (layer 1) to 0.5000 (layer 1)\n") != std::string::npos);
  CHECK(text.find("\nstep 2 | mem device 80.00 GiB | host 3.00 GiB") != std::string::npos);
  CHECK(text.find("\nstep 2 | time 0.50 s a step | data 5.0% | forward 10.0% | backward 15.0% | "
                  "communication 20.0% | optimizer 25.0% | checkpoint 10.0% | other 15.0%\n") !=
        std::string::npos);
  CHECK(text.find("\nstep 2 | save x\n") != std::string::npos);
  CHECK(text.find("alive      load: 1.00 of 4.00 GiB (25%) | ") != std::string::npos);
  CHECK(text.find('\033') == std::string::npos);
  CHECK(text.find("step 0") == std::string::npos);
}

TEST_CASE("console: the bar stands below the lines and fits the terminal") {
  std::ostringstream lines, bar;
  {
    Console console({.lines = &lines,
                     .bar = &bar,
                     .columns = 61,
                     .color = true,
                     .interval = 1,
                     .redraw = std::chrono::milliseconds(0)});
    StepRecord r = record(10);
    r.skipped = true;
    console.on_step(r);
    console.on_end({10, 0, "finished", "finished x"});
  }
  CHECK(lines.str().find("\033[33mstep 10/20") == 0);
  CHECK(lines.str().find("\033[32mfinished x\033[0m\n") != std::string::npos);
  const std::string drawn = bar.str();
  INFO(drawn);
  CHECK(drawn.find("[##########..........]  50% step 10/20 | loss 11.6667") != std::string::npos);
  CHECK(drawn.substr(drawn.size() - 4) == "\r\033[K");  // nothing is left of it
  std::size_t longest = 0, length = 0;
  for (const char c : drawn) {
    length = c == '\r' ? 0 : length + 1;
    longest = std::max(longest, length);
  }
  CHECK(longest <= 60 + 3);  // and the code that erases the line
}

TEST_CASE("the remaining time right after a continuation counts the steps that are left") {
  StepLines log;
  StepRecord r = record(11);  // the first step of this life
  r.seconds = 100;
  log.add(r);
  CHECK(log.line().find("eta") == std::string::npos);
  r.step = 12;
  r.seconds = 2;
  log.add(r);
  const std::string line = log.line();
  INFO(line);
  CHECK(line.ends_with("| eta 0:00:16"));  // 8 steps of 2 s
}

}  // namespace
}  // namespace moesaic
