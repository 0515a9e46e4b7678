// `moesaic report`: reading metrics.jsonl, and what is drawn of it.
#include <cmath>
#include <filesystem>
#include <fstream>

#include "apps/report/csv.h"
#include "apps/report/facts.h"
#include "apps/report/heat_map.h"
#include "apps/report/page.h"
#include "apps/report/plots.h"
#include "apps/report/read_run.h"
#include "core/base/error.h"
#include "tests/support/catch.h"

namespace moesaic::apps::report {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size())
    ++n;
  return n;
}

RunData run_of(const std::vector<std::string>& lines) {
  RunData run;
  run.name = "run";
  for (const std::string& line : lines)
    REQUIRE(add_line(line, run));
  return run;
}

TEST_CASE("Report: decimation keeps extremes, ends, gaps and the bound") {
  Series series;
  for (int i = 0; i < 100000; ++i)
    series.push_back({double(i), std::sin(i * 0.001)});
  series[54321].y = 1e6;
  series[12345].y = -1e6;
  series[77777].y = kAbsent;
  const Series few = decimate(series, kMostPoints);
  CHECK(few.size() <= kMostPoints);
  CHECK(few.size() > kMostPoints / 2);
  Range range;
  bool gap = false;
  for (std::size_t i = 0; i < few.size(); ++i) {
    range.add(few[i].y);
    gap = gap || std::isnan(few[i].y);
    if (i > 0) CHECK(few[i].x > few[i - 1].x);
  }
  CHECK(range.low == -1e6);
  CHECK(range.high == 1e6);
  CHECK(gap);
  CHECK(few.front().x == 0);
  CHECK(few.back().x == 99999);
  CHECK(decimate(Series(7, {1, 1}), 7).size() == 7);
  CHECK(decimate({}, 5).empty());
}

TEST_CASE("Report: the moving average has no bias to its first point and passes gaps") {
  const Series flat = smoothed({{1, 2}, {2, 2}, {3, kAbsent}, {4, 2}}, 10);
  REQUIRE(flat.size() == 4);
  CHECK(flat[0].y == Approx(2));
  CHECK(flat[3].y == Approx(2));
  CHECK(std::isnan(flat[2].y));
  // span 3: each point weighs half of the one after it
  CHECK(smoothed({{1, 0}, {2, 3}}, 3)[1].y == Approx(2));
  CHECK(smoothed({{1, 5}, {2, 3}}, 1)[1].y == Approx(3));
}

TEST_CASE("Report: ticks and labels") {
  CHECK(ticks(0, 10, 5) == std::vector<double>{0, 2, 4, 6, 8, 10});
  CHECK(ticks(3, 3, 5) == std::vector<double>{3});
  for (const double high : {1e-9, 0.0031, 1.0, 37.0, 1e6, 3e12}) {
    const auto all = ticks(0, high, 5);
    INFO(high);
    CHECK(all.size() >= 2);
    CHECK(all.size() <= 11);
    for (std::size_t i = 1; i < all.size(); ++i)
      CHECK(short_number(all[i]) != short_number(all[i - 1]));
  }
  CHECK(log_ticks(0.09, 11) == std::vector<double>{0.1, 0.2, 0.5, 1, 2, 5, 10});
  CHECK(log_ticks(1e-8, 1e8).size() <= 10);
  CHECK(log_ticks(1.1, 1.9).size() >= 2);
  CHECK(short_number(0.1 + 0.2) == "0.3");
  CHECK(short_number(25000) == "25k");
  CHECK(short_number(9000) == "9000");
  CHECK(short_number(3.2e6) == "3.2M");
  CHECK(short_number(kAbsent) == "-");
  const Range same = widened({5, 5, true});
  CHECK(same.low < 5);
  CHECK(same.high > 5);
  CHECK(median({3, kAbsent, 1, 2}) == 2);
  CHECK(median({1, 2}) == 1.5);
  CHECK(std::isnan(median({})));
}

TEST_CASE("Report: gaps lift the pen, lone points are dots, nothing is written as nan") {
  Plot plot;
  plot.title = "a <b> & \"c\"";
  plot.lines.push_back({{{1, 1}, {2, kAbsent}, {3, 2}, {4, 3}}, 0, Line::Style::smooth, "x"});
  const std::string svg = plot_figure(plot);
  CHECK(contains(svg, "h0M"));
  CHECK(contains(svg, "a &lt;b&gt; &amp; &quot;c&quot;"));
  CHECK_FALSE(contains(svg, "nan"));
  for (const bool log_y : {false, true}) {
    Plot odd;
    odd.log_y = log_y;
    CHECK(contains(plot_figure(odd), "no values"));
    odd.lines.push_back({{{7, 0}}, 0, Line::Style::dots, "zero"});
    CHECK(has_values(odd) == !log_y);
    odd.lines.push_back({{{7, 3}}, 0, Line::Style::raw, "one"});
    odd.lines.push_back({{{7, INFINITY}}, 0, Line::Style::raw, "none"});
    const std::string text = plot_figure(odd);
    CHECK_FALSE(contains(text, "nan"));
    CHECK_FALSE(contains(text, "inf"));
  }
}

TEST_CASE("Report: a later life replaces what came after the step it began with") {
  const RunData run = run_of({
      R"({"type":"header","time":100,"version":"v","ranks":2,"start_step":0,"lines":["a","b"]})",
      R"({"type":"step","step":1,"loss":3.0,"tokens":10,"total_tokens":10,"seconds":2,"time":102})",
      R"({"type":"step","step":2,"loss":2.0,"tokens":10,"total_tokens":20,"seconds":1,"time":103})",
      R"({"type":"step","step":3,"loss":9.0,"tokens":10,"total_tokens":30,"seconds":1,"time":104})",
      R"({"type":"eval","step":3,"loss":9.5,"time":105})",
      R"({"type":"header","time":200,"version":"w","ranks":2,"start_step":1})",
      R"({"type":"step","step":2,"loss":"nan","grad_norm":"inf","skipped":true,"non_finite":true})",
      R"({"type":"skip","step":2,"in_a_row":1})",
      R"({"type":"stop","step":2,"exit_code":75,"reason":"asked","time":210})",
  });
  REQUIRE(run.steps.size() == 2);
  CHECK(run.steps.at(2).skipped);
  CHECK(std::isnan(run.steps.at(2).loss));
  CHECK(std::isinf(run.steps.at(2).grad_norm));
  CHECK(run.steps.at(1).tokens_per_second == 5);  // made of tokens and seconds
  CHECK(run.steps.at(2).warm_up);
  CHECK(run.evals.empty());
  REQUIRE(run.lives.size() == 2);
  CHECK(run.lives[0].end.empty());
  CHECK(run.lives[1].exit_code == 75);
  CHECK(run.lives[0].last == 105);
  CHECK(run.lives[0].step_seconds == 4);
  const RunNumbers n = numbers_of(run);
  CHECK(n.last_step == 2);
  CHECK(n.skipped == 1);
  CHECK(n.wall_seconds == 15);
  CHECK(contains(text_summary({run}), "step 2, 1 skipped"));
  CHECK(contains(steps_csv(run), "\n1,0,3,,,10,10,2,102,5,"));
}

TEST_CASE("Report: lines that are no records") {
  RunData run;
  for (const char* line : {"",
                           "{",
                           "[]",
                           "7",
                           "{}",
                           R"({"type":3})",
                           R"({"type":"step"})",
                           R"({"type":"step","step":"1"})",
                           R"({"type":"step","step":1,"step":2})",
                           R"({"type":"step","st)"})
    CHECK_FALSE(add_line(line, run));
  // What a loss of power leaves: zero bytes where the rest of a block was to come.
  CHECK_FALSE(add_line(R"({"type":"step","step":1,"loss":2})" + std::string(3, '\0'), run));
  // Records of other shapes are taken for what they have.
  CHECK(add_line(R"({"type":"experts","step":1,"layers":[1,2],"tokens":[[1]]})", run));
  CHECK(add_line(R"({"type":"experts","step":1,"layers":["a"],"tokens":[[1]]})", run));
  CHECK(add_line(R"({"type":"step","step":1,"loss":{},"experts":[1,{}]})", run));
  CHECK(run.experts.layers.empty());
  CHECK(std::isnan(run.steps.at(1).loss));
}

TEST_CASE("Report: a run without a step still makes a page") {
  const std::string page = html_page({run_of({R"({"type":"header","start_step":0})"})});
  CHECK(contains(page, "</html>"));
  CHECK_FALSE(contains(page, "<figure"));
  CHECK(contains(text_summary({RunData{}}), "no step was recorded"));
}

TEST_CASE("Report: colours are centred at the mean") {
  CHECK(heat_class(1) == 6);
  CHECK(heat_class(2) == 9);
  CHECK(heat_class(0.5) == 3);
  CHECK(heat_class(1e9) == 12);
  CHECK(heat_class(1e-9) == 0);
  CHECK(heat_class(0) == kDead);
}

TEST_CASE("Report: 93 layers of 896 experts stay below 1 MB") {
  ExpertTable table;
  std::uint32_t random = 1;
  for (int l = 0; l < 93; ++l) {
    table.layers.push_back(l);
    auto& row = table.ratio.emplace_back();
    for (int e = 0; e < 896; ++e) {
      random = random * 1664525u + 1013904223u;
      row.push_back((random >> 16) % 200 / 100.0);
    }
  }
  const std::string map = heat_map_figure(table, "all");
  CHECK(map.size() < 1'000'000);
  CHECK(map.size() > 93 * 896);
  const std::string loads = sorted_load_figure(table, "all", 0);
  CHECK(count(loads, "<svg") == 93);
  CHECK(loads.size() < 1'000'000);
}

TEST_CASE("Report: a folder that is no run says what is there") {
  namespace fs = std::filesystem;
  const fs::path dir = fs::temp_directory_path() / "moesaic_report_test";
  fs::remove_all(dir);
  fs::create_directories(dir / "a");
  std::ofstream(dir / "a" / "metrics.jsonl") << "rubbish\n";
  const auto message = [](const fs::path& path) -> std::string {
    try {
      read_run(path);
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  };
  CHECK(contains(message(dir / "absent"), "there is no such folder"));
  CHECK(contains(message(dir), "but " + (dir / "a").string() + " does"));
  CHECK(contains(message(dir / "a" / "metrics.jsonl"), "it is a file"));
  CHECK(contains(message(dir / "a"), "metrics.jsonl:1: no record of a run"));
  std::ofstream(dir / "a" / "metrics.jsonl") << R"({"type":"step","step":1,"loss":2})"
                                             << "\n{\"ty";
  const RunData torn = read_run(dir / "a");
  CHECK(torn.torn_lines == 1);
  CHECK(torn.first_torn_line == 2);
  CHECK(torn.steps.size() == 1);
  fs::remove_all(dir);
}

TEST_CASE("Report: names and configurations tell runs apart") {
  std::vector<RunData> runs(2);
  runs[0].path = "/x/one/run";
  runs[1].path = "/x/two/run/";
  name_runs(runs);
  CHECK(runs[0].name == "one/run");
  CHECK(runs[1].name == "two/run");
  runs[1].path = "/x/one/run";
  CHECK_THROWS_AS(name_runs(runs), UsageError);
  runs[0].config = "run:\n  dir: a\noptimizer:\n  lr: 0.1  # default\n  ema: null\n";
  runs[1].config = "run:\n  dir: b\noptimizer:\n  lr: 0.2\n  beta: 1\n";
  const Table table = config_table(runs);
  REQUIRE(table.rows.size() == 2);
  CHECK(table.rows[0] == std::vector<std::string>{"optimizer.lr", "0.1", "0.2"});
  CHECK(table.rows[1] == std::vector<std::string>{"optimizer.beta", "absent", "1"});
  CHECK(config_value(runs[0], "optimizer.lr") == "0.1");
}

}  // namespace
}  // namespace moesaic::apps::report
