// What a run says of itself and writes beside its steps.
#include <filesystem>

#include <fmt/format.h>

#include "apps/data_lines.h"
#include "apps/train_run.h"
#include "core/config/without_effect.h"
#include "kernels/cuda_handles.h"
#include "memory/device_hooks.h"

namespace moesaic::apps {

void TrainRun::begin_report() {
  report_.begin(
      {.loaded = loaded_,
       .assembly = assembly_,
       .host = host_,
       .train = train_,
       .valid = valid_.get(),
       .memory = memory_plan_ ? &*memory_plan_ : nullptr,
       .device_line = memory_text(),
       .uses_nccl = device_world_ != nullptr,
       .ranks_per_node = ranks_per_node(config(), place_),
       .mpi_version = place_.mpi_version,
       .peak = device_peak(
           config().log.peak_tflops,
           assembly_.device.kind == Device::Kind::cuda ? cuda::device_name(assembly_.device) : "",
           assembly_.precision.compute),
       .steps_done = trainer_->steps_done(),
       .continues = continues_,
       .checkpoint = continued_from_});
}

bool TrainRun::updates_run_beside() const {
  return ExpertUpdates::can_run_beside(*assembly_.params, *assembly_.optimizer);
}

bool TrainRun::is_lazy() const {
  return assembly_.optimizer->options().lazy_untouched && updates_run_beside();
}

void TrainRun::note_idle_keys() {
  for (const config::Finding& note : config::without_effect(config()))
    report_.line(fmt::format("note       {}: {}", note.keys.front(), note.message));
}

// Of no harm, but not what was meant.
void TrainRun::warn_of_dense_updates() {
  const bool has_experts = assembly_.params->tiers() != nullptr;  // of this stage
  if (!is_root() || config().optimizer.untouched != config::Untouched::lazy ||
      config().experts.offload != config::ExpertOffload::full || !has_experts || is_lazy())
    return;
  report_.line(
      "warning    optimizer.untouched: lazy does what dense does here: ranks that hold the same "
      "experts, or slices of them for Muon, update them together");
}

// Of this life, on rank 0.
void TrainRun::log_touches() {
  ExpertTiers* tiers = assembly_.params->tiers();
  if (!config().experts.touch_log || !is_root()) return;
  if (tiers == nullptr)
    return report_.line(
        "warning    experts.touch_log: rank 0's stage of the pipeline has no experts, so nothing "
        "is written");
  const bool all = !assembly_.optimizer->options().skip_untouched && !is_lazy();
  touches_.emplace(*tiers,
                   std::filesystem::path(config().run.dir) / *config().experts.touch_log,
                   all ? tiers::Updates::dense : tiers::Updates::touched,
                   updates_run_beside());
}

void TrainRun::mark_ranges() {
  if (!config().debug.nvtx) return;
  if (trainer_->stream().device().kind != Device::Kind::cuda)
    throw UsageError("debug.nvtx: ranges for a profiler need run.device=cuda");
  nvtx_ = cuda::create_nvtx_observer();
  trainer_->observe(nvtx_.get());
}

// On a disk that takes no more this fails as well; what ended the run is the error to show.
void TrainRun::report_failure(const Error& error) {
  try {
    report_.end({trainer_->steps_done(), static_cast<int>(error.exit_code()), error.what(), ""});
  } catch (const Error&) {  // nothing more can be done for the records
  }
}

void TrainRun::report_data_use() {
  if (!is_root()) return;
  for (const RunEvent& event : data_use_events(trainer_->data_use(), trainer_->steps_done()))
    report_.event(event);
}

}  // namespace moesaic::apps
