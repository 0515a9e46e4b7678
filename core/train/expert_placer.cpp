#include "core/train/expert_placer.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "core/base/error.h"
#include "parallel/expert_replicas.h"

namespace moesaic {
namespace {

std::size_t padded(std::size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

bool is_permutation(const PlacesOfExperts& places) {
  std::vector<char> taken(places.size(), 0);
  return std::all_of(places.begin(), places.end(), [&](std::int32_t p) {
    return p >= 0 && p < static_cast<std::int32_t>(places.size()) &&
           taken[static_cast<std::size_t>(p)]++ == 0;
  });
}

}  // namespace

ExpertPlacer::ExpertPlacer(ParameterStore& params,
                           const Optimizer& optimizer,
                           std::span<const Model::NamedMoe> layers,
                           Communicator* stage,
                           const Options& options)
    : params_(params), options_(options) {
  std::size_t bytes = 0;
  for (const auto& named : layers) {
    const MoeLayer& moe = *named.moe;
    layers_.push_back({named.layer,
                       moe.places(),
                       params.buffer(moe.average_load()),
                       params.buffer(moe.saved_places()),
                       {},
                       {},
                       {},
                       {}});
    Layer& layer = layers_.back();
    if (params.copies(layer.places).slots > 0) layer.copied_by = params.buffer(moe.copied_by());
    bytes += padded(layer.average.bytes()) + padded(layer.saved.bytes()) +
             padded(layer.copied_by.bytes());
  }
  if (layers_.empty()) return;  // a pipeline stage without experts
  host_ = make_host_buffer(bytes, params.device(), "expert loads, host");
  std::size_t at = 0;
  for (Layer& layer : layers_) {
    layer.host_average = host_.view(layer.average.shape(), layer.average.dtype(), at);
    at += padded(layer.average.bytes());
    layer.host_saved = host_.view(layer.saved.shape(), layer.saved.dtype(), at);
    at += padded(layer.saved.bytes());
    if (!layer.has_copies()) continue;
    layer.host_copied_by = host_.view(layer.copied_by.shape(), layer.copied_by.dtype(), at);
    at += padded(layer.copied_by.bytes());
  }
  Stream stream(params.device(), "expert places", Stream::Mode::immediate);
  for (const Layer& layer : layers_) {
    copy_tensor(layer.host_average, layer.average, stream);
    write_saved(layer, stream);
  }
  stream.synchronize();
  if (params.position().extent(Axis::ep) > 1)
    move_ = std::make_unique<ExpertMove>(params, optimizer, *stage);
}

void ExpertPlacer::write_saved(const Layer& layer, Stream& stream) {
  const auto places = params_.places(layer.places);
  std::copy(places.begin(), places.end(), layer.host_saved.as<std::int32_t>());
  copy_tensor(layer.saved, layer.host_saved, stream);
}

// In the type of the buffer, so that an average that was saved and loaded is the same one.
void ExpertPlacer::count(std::size_t layer, ConstTensorView tokens, Stream& stream) {
  const Layer& to = layers_.at(layer);
  const auto* counts = tokens.as<std::int64_t>();
  double sum = 0;
  for (std::int64_t e = 0; e < tokens.numel(); ++e)
    sum += static_cast<double>(counts[e]);
  if (sum == 0) return;
  const auto moved_on = [&](double average, std::int64_t e) {
    return options_.decay * average + (1 - options_.decay) * (static_cast<double>(counts[e]) / sum);
  };
  for (std::int64_t e = 0; e < tokens.numel(); ++e) {
    if (to.average.dtype() == DType::f64) {
      double& a = to.host_average.as<double>()[e];
      a = moved_on(a, e);
    } else {
      float& a = to.host_average.as<float>()[e];
      a = static_cast<float>(moved_on(static_cast<double>(a), e));
    }
  }
  copy_tensor(to.average, to.host_average, stream);
}

std::vector<double> ExpertPlacer::loads(const TensorView& host_average) {
  std::vector<double> loads;
  for (std::int64_t e = 0; e < host_average.numel(); ++e)
    loads.push_back(host_average.dtype() == DType::f64
                        ? host_average.as<double>()[e]
                        : static_cast<double>(host_average.as<float>()[e]));
  return loads;
}

std::vector<double> ExpertPlacer::rank_loads_now(const Layer& layer,
                                                 std::span<const double> load) const {
  if (layer.has_copies()) return rank_loads(load, params_.copies(layer.places));
  const auto places = params_.places(layer.places);
  return rank_loads(load, {places.begin(), places.end()}, options_.nodes.ranks());
}

// By the averages in host_copied_by, so that a run that continues has the same ones.
void ExpertPlacer::set_copies(const Layer& layer, Stream& stream) {
  if (!layer.has_copies()) return;
  const auto places = params_.places(layer.places);
  params_.set_copies(layer.places,
                     balanced_copies(loads(layer.host_copied_by),
                                     options_.nodes,
                                     {places.begin(), places.end()},
                                     params_.copies(layer.places).slots),
                     stream);
}

std::vector<ExpertsMoved> ExpertPlacer::place(std::int64_t step, Stream& stream) {
  std::vector<ExpertsMoved> all;
  if (move_ == nullptr || step % options_.every != 0) return all;
  for (const Layer& layer : layers_) {
    const auto places = params_.places(layer.places);
    const PlacesOfExperts before(places.begin(), places.end());
    const std::vector<double> load = loads(layer.host_average);
    const PlacesOfExperts after = balanced_places(load, options_.nodes, before);
    const std::vector<std::int32_t> copied_before = params_.copies(layer.places).expert_of_slot;
    ExpertsMoved moved{.layer = layer.layer, .before = max_over_mean(rank_loads_now(layer, load))};
    for (std::size_t e = 0; e < after.size(); ++e)
      moved.experts += after[e] != before[e] ? 1 : 0;
    if (moved.experts > 0) {
      moved.bytes = move_->move(layer.places, after, stream);
      write_saved(layer, stream);
    }
    if (layer.has_copies()) {
      copy_tensor(layer.copied_by, layer.host_average, stream);
      std::memcpy(layer.host_copied_by.data(), layer.host_average.data(), layer.average.bytes());
      set_copies(layer, stream);
    }
    moved.after = max_over_mean(rank_loads_now(layer, load));
    moved.replicas = params_.copies(layer.places).num_copies();
    if (moved.experts > 0 || params_.copies(layer.places).expert_of_slot != copied_before)
      all.push_back(moved);
  }
  return all;
}

void ExpertPlacer::restore(std::int64_t ranks, Stream& stream) {
  for (const Layer& layer : layers_) {
    copy_tensor(layer.host_average, layer.average, stream);
    copy_tensor(layer.host_saved, layer.saved, stream);
    if (layer.has_copies()) copy_tensor(layer.host_copied_by, layer.copied_by, stream);
  }
  stream.synchronize();
  for (const Layer& layer : layers_) {
    if (move_ != nullptr) {
      const auto* saved = layer.host_saved.as<std::int32_t>();
      PlacesOfExperts places(saved, saved + layer.host_saved.numel());
      if (ranks != params_.position().extent(Axis::ep))
        places = places_in_order(layer.host_saved.numel());
      if (!is_permutation(places))
        throw InputError(fmt::format(
            "the checkpoint's places of the experts of layer {} give two of them one place",
            layer.layer));
      const auto now = params_.places(layer.places);
      if (!std::equal(now.begin(), now.end(), places.begin()))
        move_->move(layer.places, places, stream);
      set_copies(layer, stream);
    }
    write_saved(layer, stream);
  }
  stream.synchronize();
}

}  // namespace moesaic
