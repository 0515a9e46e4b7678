#pragma once
#include <map>
#include <string>
#include <vector>

#include "apps/path_log.h"
#include "apps/selftest/choices.h"
#include "comm/communicator.h"
#include "core/base/dtype.h"
#include "core/config/config.h"

namespace moesaic::apps::selftest {

using WholeTensors = std::map<std::string, std::vector<double>>;

/// What a few steps did, put together from all ranks; on every rank alike.
struct RunResult {
  struct Step {
    double loss = 0, mtp_loss = 0, indexer_kl = 0, balance_loss = 0, router_z = 0, grad_norm = 0;
  };
  std::vector<Step> steps;
  WholeTensors gradients;  ///< of the first step, by checkpoint name
  WholeTensors weights;    ///< masters after the last step, router biases with them
  WholeTensors start;      ///< before the first; of a run that records its choices
  std::int64_t choices = 0,
               differing = 0;  ///< made while others were replayed, and not among those
  PathLog kernels;             ///< of this rank, where ops have several
  std::int64_t moved = 0;      ///< experts that changed places on the way (experts.place_every)
  std::int64_t replicas = 0;   ///< the most copies that experts had at a time (experts.replicas)
};

/// What becomes of the choices of layers. Both null: they are left alone.
struct ChoiceUse {
  ChoiceRecord* record = nullptr;        ///< one rank: written down here
  const ChoiceRecord* replay = nullptr;  ///< replaced by these
};

/// Trains `steps` steps of the configuration in its layout on the ranks of `world`, all of which call it, each on `device`,
/// whose memory `world` exchanges.
RunResult run_steps(const config::Config& config,
                    Communicator& world,
                    Device device,
                    int steps,
                    const ChoiceUse& choices = {});
/// The compute type in which such a run trains.
DType compute_type(const config::Config& config);

}  // namespace moesaic::apps::selftest
