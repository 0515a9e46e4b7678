#include "apps/selftest/layouts.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <sstream>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/base/random.h"
#include "core/config/check.h"
#include "core/model/pipeline_plan.h"
#include "core/train/phases.h"

namespace moesaic::apps::selftest {
namespace {

int read_degree(const std::string& layout, const std::string& text) {
  int n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc() || end != text.data() + text.size() || n < 1)
    throw UsageError(fmt::format("--layouts: '{}' in '{}' is no degree: 1, 2, …", text, layout));
  return n;
}

Layout parse_layout(const std::string& text) {
  Layout layout;
  layout.mesh.dp = 1;
  const std::map<std::string, int*> axes{{"pp", &layout.mesh.pp},
                                         {"dp", &layout.mesh.dp},
                                         {"cp", &layout.mesh.cp},
                                         {"tp", &layout.mesh.tp},
                                         {"ep", &layout.mesh.ep},
                                         {"etp", &layout.mesh.etp}};
  std::set<std::string> given;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const auto equals = part.find('=');
    const auto axis = axes.find(part.substr(0, equals));
    if (equals == std::string::npos || axis == axes.end()) {
      throw UsageError(fmt::format(
          "--layouts: '{}' in '{}': expected AXIS=DEGREE with pp, dp, cp, tp, ep or etp, as in "
          "\"dp=2,ep=2;dp=4\"",
          part,
          text));
    }
    if (!given.insert(axis->first).second)
      throw UsageError(fmt::format(
          "--layouts: {} is given twice in '{}'; layouts stand behind semicolons, as in "
          "\"dp=2;dp=4\"",
          axis->first,
          text));
    *axis->second = read_degree(text, part.substr(equals + 1));
  }
  if (given.empty())
    throw UsageError("--layouts: a layout without a degree; expected as in \"dp=2,ep=2;dp=4\"");
  const MeshLayout checked(layout.mesh, layout.ranks());  // throws with the nearest legal degrees
  return layout;
}

}  // namespace

std::string Layout::name() const {
  std::string text;
  const std::pair<const char*, int> axes[] = {{"pp", mesh.pp},
                                              {"dp", mesh.dp},
                                              {"cp", mesh.cp},
                                              {"tp", mesh.tp},
                                              {"ep", mesh.ep},
                                              {"etp", mesh.etp}};
  for (const auto& [axis, degree] : axes) {
    if (degree > 1) text += fmt::format("{}{}{}", text.empty() ? "" : " ", axis, degree);
  }
  return text.empty() ? "one rank" : text;
}

std::vector<Layout> parse_layouts(const std::string& text) {
  std::vector<Layout> all;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ';');)
    all.push_back(parse_layout(part));
  if (all.empty()) throw UsageError("--layouts names no layout");
  return all;
}

config::Config in_layout(config::Config config, const Layout& layout) {
  config.parallel.pp = layout.mesh.pp;
  config.parallel.dp = layout.mesh.dp;
  config.parallel.cp = layout.mesh.cp;
  config.parallel.tp = layout.mesh.tp;
  config.parallel.ep = layout.mesh.ep;
  config.parallel.etp = layout.mesh.etp;
  return config;
}

std::string problem(const config::Config& config, const Layout& layout) {
  const config::Config laid = in_layout(config, layout);
  const auto findings = config::findings(laid);
  if (!findings.empty()) return findings.front().message;
  const auto pipeline = pipeline_findings(laid);
  if (!pipeline.empty()) return pipeline.front().message;
  const auto untrainable = config::untrainable(laid);
  if (!untrainable.empty()) return untrainable.front().message;
  for (const Phase& phase : make_phases(laid)) {
    if (phase.global_batch_size % (phase.micro_batch_size * layout.mesh.dp) != 0)
      return fmt::format(
          "a global batch of {} in micro-batches of {} does not divide among {} ranks",
          phase.global_batch_size,
          phase.micro_batch_size,
          layout.mesh.dp);
  }
  return "";
}

std::vector<Layout> all_layouts(const config::Config& config, int max_ranks) {
  std::vector<Layout> all;
  const auto divisors = [](int n, auto&& f) {
    for (int d = 1; d <= n; ++d) {
      if (n % d == 0) f(d);
    }
  };
  for (int ranks = 2; ranks <= max_ranks; ++ranks) {
    divisors(ranks, [&](int pp) {
      divisors(ranks / pp, [&](int cp) {
        divisors(ranks / pp / cp, [&](int tp) {
          const int dp = ranks / pp / cp / tp;
          divisors(ranks / pp, [&](int ep) {
            divisors(ranks / pp / ep, [&](int etp) {
              const Layout layout{{.pp = pp, .dp = dp, .cp = cp, .tp = tp, .ep = ep, .etp = etp}};
              if (problem(config, layout).empty()) all.push_back(layout);
            });
          });
        });
      });
    });
  }
  return all;
}

std::vector<Layout> sample(const std::vector<Layout>& layouts,
                           std::size_t count,
                           std::uint64_t seed) {
  std::vector<std::pair<double, std::size_t>> order;
  for (std::size_t i = 0; i < layouts.size(); ++i)
    order.emplace_back(uniform(seed, i), i);
  std::sort(order.begin(), order.end());
  order.resize(std::min(count, order.size()));
  std::sort(order.begin(), order.end(), [](auto& a, auto& b) { return a.second < b.second; });
  std::vector<Layout> chosen;
  for (const auto& [draw, i] : order)
    chosen.push_back(layouts[i]);
  return chosen;
}

}  // namespace moesaic::apps::selftest
