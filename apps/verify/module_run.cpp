#include "apps/verify/module_run.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "core/base/random.h"
#include "kernels/ops/elementwise.h"

namespace moesaic::verify {
namespace {
// Far more than any golden case takes; running out is an error that names the tensor.
constexpr std::size_t kTransientBytes = std::size_t{64} << 20;
ParamId param(std::size_t i) {
  return {static_cast<std::int32_t>(i)};
}
BufferId buffer(std::size_t i) {
  return {static_cast<std::int32_t>(i)};
}
}  // namespace

ModuleRun::ModuleRun(CaseRun& run)
    : run_(run),
      params_(run.precision()),
      transient_(kTransientBytes, run.stream().device(), "verify") {
  transient_.poison(run.stream());
  set_scalars(StepScalars{});
  losses_ = run.zeros({kNumLosses}, run.precision().stats);
}

ModuleRun::~ModuleRun() {
  try {
    run_.stream().synchronize();
  } catch (...) {  // reported by whoever waits for a result
  }
}

template <class F>
void ModuleRun::for_each_parameter(F f) {
  for (std::size_t i = 0; i < params_.params().size(); ++i) {
    for (std::int64_t m = 0; m < params_.members_here(param(i)); ++m) {
      f(param(i), m, params_.member_name(param(i), m));
    }
  }
}

void ModuleRun::load_one(const std::string& name, TensorView to, TensorView also) {
  if (!run_.has(name)) {
    run_.fail(fmt::format("'{}' is not stored", name));
    return;
  }
  copy_tensor(to, run_.load(name, to.dtype()).reshaped(to.shape()), run_.stream());
  if (also.data() != to.data())
    copy_tensor(also, run_.load(name, also.dtype()).reshaped(also.shape()), run_.stream());
}

void ModuleRun::draw_weight(const ParameterSpec& spec,
                            const std::string& name,
                            TensorView initial) {
  const std::uint64_t key = hash_name(name);
  std::vector<double> values = run_.download(initial);
  const double fan_in = static_cast<double>(spec.shape[spec.shape.rank - 1]);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double x = standard_normal(key, i);
    switch (spec.init.kind) {
      case InitialKind::normal:
        values[i] = spec.init.b + x / std::sqrt(fan_in);
        break;
      case InitialKind::zeros:
        values[i] = (spec.shape.rank > 1 ? 1.0 / std::sqrt(fan_in) : 0.1) * x;
        break;
      case InitialKind::ones:
        values[i] = 1.0 + 0.1 * x;
        break;
      default:
        break;  // gates' A and bias: the model's own range
    }
  }
  run_.store(name, initial.shape(), std::move(values), spec.stored_as == StoredAs::stats);
}

void ModuleRun::draw_weights() {
  for_each_parameter([&](ParamId id, std::int64_t m, const std::string& name) {
    draw_weight(
        params_.params()[static_cast<std::size_t>(id.index)], "w." + name, params_.weight(id, m));
  });
  for (std::size_t i = 0; i < params_.buffers().size(); ++i) {
    const BufferSpec& spec = params_.buffers()[i];
    if (!spec.is_parameter_in_checkpoint) continue;
    std::vector<double> values(static_cast<std::size_t>(spec.shape.numel()));
    for (std::size_t j = 0; j < values.size(); ++j)
      values[j] = 0.05 * standard_normal(hash_name(spec.name), j);
    run_.store("w." + spec.name, spec.shape, std::move(values), true);
  }
}

void ModuleRun::load_weights() {
  params_.seal(run_.stream().device());
  params_.initialize(0);
  if (run_.is_recording()) draw_weights();
  std::vector<std::string> unused = run_.names_with_prefix("w.");
  const auto load = [&](const std::string& name, TensorView to, TensorView also) {
    load_one(name, to, also);
    unused.erase(std::remove(unused.begin(), unused.end(), name), unused.end());
  };
  for_each_parameter([&](ParamId id, std::int64_t m, const std::string& name) {
    load("w." + name, params_.weight(id, m), params_.master(id, m));
  });
  for (std::size_t i = 0; i < params_.buffers().size(); ++i) {
    const TensorView view = params_.buffer(buffer(i));
    if (params_.buffers()[i].is_parameter_in_checkpoint)
      load("w." + params_.buffers()[i].name, view, view);
  }
  if (!unused.empty())
    run_.fail(fmt::format(
        "{} stored weights have no parameter, first '{}'", unused.size(), unused.front()));
  begin_step();
}

void ModuleRun::set_sequence(std::int64_t tokens, const std::vector<std::int64_t>& ids) {
  borders_ = run_.has("in.cu") ? run_.host_ints("in.cu") : std::vector<std::int64_t>{0, tokens};
  std::vector<std::int64_t> positions;
  for (std::size_t d = 1; d < borders_.size(); ++d) {
    for (std::int64_t t = borders_[d - 1]; t < borders_[d]; ++t)
      positions.push_back(t - borders_[d - 1]);
  }
  sequence_.cu = run_.upload_i32(borders_, {static_cast<std::int64_t>(borders_.size())});
  sequence_.positions = run_.upload_i32(positions, {tokens});
  if (!ids.empty()) sequence_.tokens = run_.upload_i32(ids, {tokens});
}

std::vector<std::int64_t> ModuleRun::targets(const std::vector<std::int64_t>& ids,
                                             int by,
                                             std::int64_t& valid) const {
  std::vector<std::int64_t> out(ids.size(), -100);
  valid = 0;
  for (std::size_t d = 1; d < borders_.size(); ++d) {
    for (std::int64_t t = borders_[d - 1]; t + by < borders_[d]; ++t, ++valid) {
      out[static_cast<std::size_t>(t)] = ids[static_cast<std::size_t>(t + by)];
    }
  }
  return out;
}

void ModuleRun::set_scalars(const StepScalars& values) {
  std::vector<double> host(kNumStepScalars);
  values.write(
      TensorView(reinterpret_cast<std::byte*>(host.data()), DType::f64, {kNumStepScalars}));
  scalars_ = run_.upload(host, {kNumStepScalars}, run_.precision().stats);
}

void ModuleRun::begin_step() {
  params_.zero_grads(run_.stream());
  zero_tensor(losses_, run_.stream());
  for (std::size_t i = 0; i < params_.buffers().size(); ++i) {
    const BufferSpec& spec = params_.buffers()[i];
    if (spec.lifetime != Lifetime::step) continue;
    if (spec.reduce == BufferReduce::max) {
      moesaic::run(
          run_.backend(),
          Fill{.y = params_.buffer(buffer(i)), .value = -std::numeric_limits<double>::infinity()});
    } else {
      zero_tensor(params_.buffer(buffer(i)), run_.stream());
    }
  }
}

RunContext ModuleRun::context() {
  return {
      run_.backend(), params_, transient_, weight_gradients_, sequence_, scalars_, losses_, true};
}

double ModuleRun::loss(Loss which) {
  return run_.download(loss_slot(losses_, which))[0];
}

void ModuleRun::expect_gradients(const std::string& kind, const std::string& part) {
  for_each_parameter([&](ParamId id, std::int64_t m, const std::string& name) {
    if (name.find(part) != std::string::npos) run_.expect(kind + name, params_.gradient(id, m));
  });
}

void ModuleRun::expect_no_gradient_outside(const std::string& part) {
  for_each_parameter([&](ParamId id, std::int64_t m, const std::string& name) {
    if (name.find(part) != std::string::npos) return;
    const auto values = run_.download(params_.gradient(id, m));
    if (std::any_of(values.begin(), values.end(), [](double v) { return v != 0.0; })) {
      run_.fail(fmt::format("the gradient of '{}' is not zero", name));
    }
  });
}

LayerRun::LayerRun(ModuleRun& owner, Module& module, std::int64_t tokens, std::int64_t hidden)
    : owner_(owner), module_(module) {
  const DType compute = owner.run().precision().compute;
  x_ = spec_.input("x", {tokens, hidden}, compute);
  y_ = spec_.activation("y", {tokens, hidden}, compute);
  module.declare(spec_, {tokens}, x_, y_);
  spec_.always_save(y_);
  spec_.plan({});
  tape_ = std::make_unique<Tape>(
      spec_, owner.run().poisoned({static_cast<std::int64_t>(spec_.slot_bytes())}, DType::u8));
}

ConstTensorView LayerRun::forward() {
  tape_->bind(x_, owner_.run().load("in.x"));
  RunContext context = owner_.context();
  tape_->forward(context);
  return tape_->in(y_);
}

TensorView LayerRun::backward(ConstTensorView dy) {
  const TensorView dx = owner_.run().poisoned(dy.shape(), dy.dtype());
  RunContext context = owner_.context();
  tape_->backward(context, [&] { module_.backward(*tape_, dy, dx); });
  return dx;
}

}  // namespace moesaic::verify
