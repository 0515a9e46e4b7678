#include "core/config/config.h"

#include "core/config/fields.h"

namespace moesaic::config {

void Config::describe(Fields<Config>& f) {
  using S = Config;
  f("base",
    &S::base,
    "Configuration file(s) that this file builds on, relative to it; later ones and this file win. "
    "Only in a file.")
      .in(Unit::path)
      .one_or_list()
      .not_printed()
      .example("kimi_k3.yaml");
  f("run", &S::run, "The run: folder, seed, device, limits.");
  f("model", &S::model, "The model, with the names of the published config.json.");
  f("data", &S::data, "What is trained and evaluated on.");
  f("train", &S::train, "Length of the run, batch sizes, evaluation, phases.");
  f("optimizer", &S::optimizer, "Optimizer and learning-rate schedule.");
  f("parallel", &S::parallel, "How model and batch are split over ranks.");
  f("dispatch", &S::dispatch, "How tokens travel to experts on other ranks.");
  f("activations", &S::activations, "What is kept between forward and backward.");
  f("experts", &S::experts, "Where the experts' weights and optimizer states live.");
  f("memory", &S::memory, "Budgets of the memory tiers.");
  f("checkpoint", &S::checkpoint, "When the state is saved and what is kept.");
  f("comm", &S::comm, "Communication between ranks.");
  f("log", &S::log, "What is reported.");
  f("debug", &S::debug, "Switches for tests and for the search for errors.");
}

}  // namespace moesaic::config
