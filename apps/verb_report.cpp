#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "apps/report/csv.h"
#include "apps/report/facts.h"
#include "apps/report/page.h"
#include "apps/report/read_run.h"
#include "apps/verb.h"
#include "core/base/durable_file.h"

namespace moesaic::apps {
namespace {

struct ReportArguments {
  std::vector<std::string> runs;
  std::string out, csv;
};

int write_report(const ReportArguments& arguments) {
  std::vector<report::RunData> runs;
  for (const std::string& dir : arguments.runs)
    runs.push_back(report::read_run(dir));
  report::name_runs(runs);
  const std::filesystem::path out = arguments.out.empty() ? runs.front().path / "report.html"
                                                          : std::filesystem::path(arguments.out);
  replace_file(out, report::html_page(runs));
  std::cout << report::text_summary(runs);
  if (!arguments.csv.empty()) {
    for (const auto& path : report::write_csv(runs, arguments.csv))
      std::cout << "written " << path.string() << "\n";
  }
  std::cout << "written " << out.string() << "\n";
  return 0;
}

}  // namespace

void add_report(CLI::App& app, Action& action) {
  CLI::App* verb = app.add_subcommand(
      "report", "Show runs in one HTML file: losses, speed, load of the experts; compare them");
  const auto a = std::make_shared<ReportArguments>();
  verb->add_option(
          "RUN", a->runs, "run.dir of training runs; the first is what others are compared with")
      ->required();
  verb->add_option("--out", a->out, "HTML file to write; default: report.html in the first RUN");
  verb->add_option("--csv", a->csv, "Folder for the same numbers as CSV files, every step");
  verb->footer(
      "Example:\n  moesaic report runs/base runs/high_lr --out compare.html --csv numbers\n");
  verb->callback([&action, a] { action = [a] { return write_report(*a); }; });
}

}  // namespace moesaic::apps
