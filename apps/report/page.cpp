#include "apps/report/page.h"

#include <fmt/format.h>

#include "apps/report/facts.h"
#include "apps/report/heat_map.h"
#include "apps/report/page_style.h"
#include "apps/report/plots.h"
#include "apps/report/svg_plot.h"

namespace moesaic::apps::report {
namespace {

std::string title_of(const std::vector<RunData>& runs) {
  std::string title;
  for (std::size_t i = 0; i < runs.size() && i < 3; ++i)
    title += (i == 0 ? "" : ", ") + runs[i].name;
  if (runs.size() > 3) title += fmt::format(" and {} more", runs.size() - 3);
  return title;
}

// h0 … h12 and dead: strokes of the map, fills of its key.
std::string load_classes() {
  std::string css;
  for (int kind = 0; kind < kHeatClasses; ++kind)
    css += fmt::format(".h{0} {{ stroke: var(--h{0}); }} .f{0} {{ fill: var(--h{0}); }}\n", kind);
  return css + ".dead { stroke: var(--dead); } .fdead { fill: var(--dead); }\n";
}

std::string legend(const std::vector<RunData>& runs) {
  std::string out = "<ul class=\"runs\">\n";
  for (std::size_t i = 0; i < runs.size(); ++i) {
    out += fmt::format("<li class=\"r{}{}\"><i></i>{}</li>\n",
                       i % kRunColours,
                       i >= kRunColours ? " again" : "",
                       escaped(runs[i].name));
  }
  return out + "</ul>\n";
}

std::string html_table(const Table& table) {
  std::string out = "<div class=\"scroll\"><table>\n<thead><tr>";
  for (const std::string& cell : table.head)
    out += fmt::format("<th scope=\"col\">{}</th>", escaped(cell));
  out += "</tr></thead>\n<tbody>\n";
  for (const auto& row : table.rows) {
    out += "<tr>";
    for (std::size_t i = 0; i < row.size(); ++i)
      out += (i == 0 ? "<th scope=\"row\">" : "<td>") + escaped(row[i]) +
             (i == 0 ? "</th>" : "</td>");
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

std::string plot_section(const char* title, const std::vector<Plot>& plots) {
  if (plots.empty()) return "";
  std::string out = fmt::format("<h2>{}</h2>\n<div class=\"plots\">\n", title);
  for (const Plot& plot : plots)
    out += plot_figure(plot);
  return out + "</div>\n";
}

std::string load_figures(const std::vector<RunData>& runs) {
  std::string out;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const ExpertTable& table = runs[r].experts;
    if (table.layers.empty()) continue;
    const std::string where = fmt::format("{}, step {}", runs[r].name, table.step);
    out += heat_map_figure(table, "Load of every expert: " + where);
    out += sorted_load_figure(table, "Sorted loads: " + where, r);
  }
  return out;
}

std::string config_section(const std::vector<RunData>& runs) {
  std::string out;
  if (runs.size() > 1) {
    const Table table = config_table(runs);
    out += "<h2>Configuration: what differs</h2>\n";
    out += table.rows.empty() ? "<p>Nothing but the folder.</p>\n" : html_table(table);
  }
  out += "<h2>Starts</h2>\n" + html_table(lives_table(runs));
  for (const RunData& run : runs) {
    if (!run.lives.empty() && !run.lives.back().lines.empty()) {
      out += fmt::format("<details><summary>Header of {}</summary><pre>", escaped(run.name));
      for (const std::string& line : run.lives.back().lines)
        out += escaped(line) + "\n";
      out += "</pre></details>\n";
    }
    if (!run.config.empty()) {
      out += fmt::format("<details><summary>config.yaml of {}</summary><pre>{}</pre></details>\n",
                         escaped(run.name),
                         escaped(run.config));
    }
  }
  return out;
}

}  // namespace

std::string html_page(const std::vector<RunData>& runs) {
  const std::string title = escaped(title_of(runs));
  std::string out = fmt::format(
      "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\">\n<head>\n"
      "<meta charset=\"utf-8\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
      "<title>{} · moesaic "
      "report</title>\n<style>{}{}</style>\n</head>\n<body>\n<main>\n<h1>{}</h1>\n",
      title,
      kPageStyle,
      load_classes(),
      title);
  out += legend(runs);
  out += "<h2>Results</h2>\n" + html_table(facts_table(runs));
  out += plot_section("Training", training_plots(runs));
  out += plot_section("Speed and memory", speed_plots(runs));
  out += plot_section("Experts", expert_plots(runs));
  out += load_figures(runs);
  out += config_section(runs);
  return out + "</main>\n</body>\n</html>\n";
}

}  // namespace moesaic::apps::report
