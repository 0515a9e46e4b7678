#include "apps/selftest/table.h"

#include <ostream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/base/error.h"

namespace moesaic::apps::selftest {

void Table::begin(std::size_t layouts) {
  if (options_.json) return;
  out_ << fmt::format(
      "{} steps in {} on {}, {} layouts against one rank; bounds: {:.1e} for the first step, "
      "{:.1e} for the losses and norms that follow, {:.1e} for the last weights\n",
      options_.steps,
      moesaic::name(options_.compute),
      options_.where,
      layouts,
      options_.bounds.first,
      options_.bounds.later,
      options_.bounds.weights);
  if (replays())
    out_ << "every layout takes the choices of one rank; differ: so many of its own would have "
            "been others\n";
  out_ << fmt::format("{:<28}{:>6}{:>10}{:>10}{:>10}{:>10}{:>10}",
                      "layout",
                      "ranks",
                      "loss",
                      "norm",
                      "gradient",
                      "later",
                      "weights");
  if (replays()) out_ << fmt::format("{:>16}", "differ");
  out_ << fmt::format("{:>8}\n", "s") << std::flush;
}

void Table::add(const Row& row) {
  rows_.push_back(row);
  failed_ += row.agrees ? 0 : 1;
  if (options_.json) return;
  const Difference& d = row.difference;
  out_ << fmt::format("{:<28}{:>6}{:>10.1e}{:>10.1e}{:>10.1e}{:>10.1e}{:>10.1e}",
                      row.layout.name(),
                      row.layout.ranks(),
                      d.loss,
                      d.grad_norm,
                      d.gradient,
                      d.later,
                      d.weights);
  if (replays()) out_ << fmt::format("{:>16}", fmt::format("{}/{}", row.differing, row.choices));
  out_ << fmt::format("{:>8.1f}{}{}{}\n",
                      row.seconds,
                      row.moved > 0 ? fmt::format("  {} experts moved", row.moved) : "",
                      row.replicas > 0 ? fmt::format("  {} replicas", row.replicas) : "",
                      row.agrees ? ""
                                 : fmt::format("  DIFFERS: gradient of {}; later {}; weights {}",
                                               d.gradient_name,
                                               d.later_name,
                                               d.weights_name))
       << std::flush;
}

int Table::finish() {
  if (options_.json) {
    print_json();
  } else {
    print_kernels();
    out_ << fmt::format(
        "{} of {} layouts agree with one rank\n", rows_.size() - failed_, rows_.size());
  }
  return failed_ == 0 ? 0 : static_cast<int>(ExitCode::internal);
}

void Table::print_json() {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const Row& r : rows_) {
    all.push_back({{"layout", r.layout.name()},
                   {"ranks", r.layout.ranks()},
                   {"loss", r.difference.loss},
                   {"grad_norm", r.difference.grad_norm},
                   {"gradient", r.difference.gradient},
                   {"gradient_name", r.difference.gradient_name},
                   {"later", r.difference.later},
                   {"later_name", r.difference.later_name},
                   {"weights", r.difference.weights},
                   {"weights_name", r.difference.weights_name},
                   {"choices_replayed", r.choices},
                   {"choices_differing", r.differing},
                   {"experts_moved", r.moved},
                   {"experts_replicas", r.replicas},
                   {"seconds", r.seconds},
                   {"agrees", r.agrees},
                   {"device", options_.where},
                   {"kernels", r.kernels.text()}});
  }
  out_ << all.dump(1) << "\n";
}

void Table::print_kernels() {
  PathLog others;
  for (const Row& r : rows_) {
    for (const auto& [kernel, times] : r.kernels.counts()) {
      if (!of_one_rank_.counts().contains(kernel))
        others.ran(kernel.first.c_str(), kernel.second.c_str());
    }
  }
  if (!of_one_rank_.empty()) out_ << fmt::format("kernels of one rank: {}\n", of_one_rank_.text());
  if (!others.empty()) out_ << fmt::format("and in layouts: {}\n", others.text());
}

}  // namespace moesaic::apps::selftest
