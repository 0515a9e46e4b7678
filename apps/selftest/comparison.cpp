#include "apps/selftest/comparison.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic::apps::selftest {
namespace {

constexpr double kSmallTensor = 1e-3, kSmallMovement = 1e-2;

// NaN differs from everything.
double relative(double a, double b) {
  if (a == b) return 0;
  const double difference = std::abs(a - b) / std::max(std::abs(b), 1e-30);
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
}

double largest(const std::vector<double>& values) {
  double most = 0;
  for (const double v : values)
    most = std::max(most, std::abs(v));
  return most;
}

void compare_tensors(const WholeTensors& a,
                     const WholeTensors& b,
                     double& worst,
                     std::string& name) {
  MOESAIC_CHECK(a.size() == b.size(),
                fmt::format("one run has {} tensors, the other {}", a.size(), b.size()));
  double most = 0;
  for (const auto& [key, values] : b)
    most = std::max(most, largest(values));
  for (const auto& [key, wanted] : b) {
    const auto found = a.find(key);
    MOESAIC_CHECK(found != a.end() && found->second.size() == wanted.size(),
                  key + " is not the same tensor in both runs");
    const double scale = std::max({largest(wanted), kSmallTensor * most, 1e-300});
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (found->second[i] == wanted[i]) continue;
      double difference = std::abs(found->second[i] - wanted[i]) / scale;
      if (std::isnan(difference)) difference = std::numeric_limits<double>::infinity();
      if (difference > worst) {
        worst = difference;
        name = key;
      }
    }
  }
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum / static_cast<double>(std::max<std::size_t>(1, a.size())));
}

void compare_movement(const WholeTensors& a,
                      const WholeTensors& b,
                      const WholeTensors& start,
                      double& worst,
                      std::string& name) {
  double farthest = 0;
  for (const auto& [key, values] : b)
    farthest = std::max(farthest, distance(values, start.at(key)));
  for (const auto& [key, wanted] : b) {
    const double scale =
        std::max({distance(wanted, start.at(key)), kSmallMovement * farthest, 1e-300});
    double difference = distance(a.at(key), wanted) / scale;
    if (std::isnan(difference)) difference = std::numeric_limits<double>::infinity();
    if (difference > worst) {
      worst = difference;
      name = key;
    }
  }
}

// The divergence is a small difference of logarithms: in narrow types rounding is seen against a nat, not against it.
double worst_loss(const RunResult::Step& a, const RunResult::Step& b, bool narrow) {
  const double kl = narrow && std::abs(b.indexer_kl) < 1
                        ? relative(1 + (a.indexer_kl - b.indexer_kl), 1)
                        : relative(a.indexer_kl, b.indexer_kl);
  return std::max({relative(a.loss, b.loss),
                   relative(a.mtp_loss, b.mtp_loss),
                   kl,
                   relative(a.balance_loss, b.balance_loss),
                   relative(a.router_z, b.router_z)});
}

}  // namespace

Difference compare(const RunResult& run, const RunResult& one_rank) {
  MOESAIC_CHECK(run.steps.size() == one_rank.steps.size() && !run.steps.empty(),
                "the runs did not make the same steps");
  Difference d;
  const bool narrow = !one_rank.start.empty();
  d.loss = worst_loss(run.steps[0], one_rank.steps[0], narrow);
  d.grad_norm = relative(run.steps[0].grad_norm, one_rank.steps[0].grad_norm);
  compare_tensors(run.gradients, one_rank.gradients, d.gradient, d.gradient_name);
  for (std::size_t i = 1; i < run.steps.size(); ++i) {
    const double step = std::max(worst_loss(run.steps[i], one_rank.steps[i], narrow),
                                 relative(run.steps[i].grad_norm, one_rank.steps[i].grad_norm));
    if (step > d.later) {
      d.later = step;
      d.later_name = fmt::format("step {}", i + 1);
    }
  }
  if (narrow) {
    compare_movement(run.weights, one_rank.weights, one_rank.start, d.weights, d.weights_name);
  } else {
    compare_tensors(run.weights, one_rank.weights, d.weights, d.weights_name);
  }
  return d;
}

bool Difference::within(const DifferenceBounds& bounds) const {
  return loss <= bounds.first && grad_norm <= bounds.first && gradient <= bounds.first &&
         later <= bounds.later && weights <= bounds.weights;
}

}  // namespace moesaic::apps::selftest
