#include "apps/bench/a2a_method.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include <fmt/format.h>

#include "apps/bench/timing.h"
#include "core/base/random.h"

namespace moesaic::bench {
namespace {

// An integer from -largest to largest; a bf16 holds all up to 256.
double value_at(std::int64_t largest, std::uint64_t index) {
  return std::floor(uniform(7, index) * static_cast<double>(2 * largest + 1)) -
         static_cast<double>(largest);
}

// Terms of every token's sum: ranks, or choices without deduplication.
std::vector<double> terms_of(const A2aMethod::Options& o, const TokenChoices& choices) {
  const std::int64_t per_rank = o.routing.experts / o.grid.ranks();
  std::vector<double> terms;
  for (std::int64_t t = 0; t < choices.tokens(); ++t) {
    std::set<std::int64_t> ranks;
    for (std::int64_t j = 0; j < choices.choices; ++j)
      ranks.insert(choices.places[static_cast<std::size_t>(t * choices.choices + j)] / per_rank);
    terms.push_back(static_cast<double>(o.method == ExchangeMethod::pair
                                            ? choices.choices
                                            : static_cast<std::int64_t>(ranks.size())));
  }
  return terms;
}

void write(const TensorView& view, std::int64_t i, double v) {
  dispatch_float(view.dtype(), [&]<class T>(TypeTag<T>) { view.as<T>()[i] = T(v); });
}

}  // namespace

struct A2aMethod::Impl {
  const Options o;
  ExpertExchange exchange;
  ExchangePlan plan;
  std::vector<Buffer> memory;
  TensorView plan_memory, topk, weights, x, out, rows, topk_rows, weights_rows, row_count, transit,
      returned;
  TensorView host_out, wanted, before;
  bool ran = false;
  std::unique_ptr<BackendOwner> owner;

  Impl(Communicator* group, const Options& options, const TokenChoices& choices)
      : o(options),
        exchange(group,
                 {.method = o.method,
                  .grid = o.grid,
                  .experts = o.routing.experts,
                  .choices = o.routing.choices,
                  .max_tokens = o.routing.tokens,
                  .weights = o.dtype == DType::f64 ? DType::f64 : DType::f32,
                  .buffer_factor = o.buffer_factor}),
        plan(exchange.make_plan(o.device)) {
    const ExchangeBounds& b = exchange.bounds();
    const std::int64_t tokens = o.routing.tokens, k = o.routing.choices, d = o.width;
    const DType stats = exchange.options().weights;
    plan_memory = take({b.plan_bytes}, DType::u8);
    topk = take({tokens, k}, DType::i32);
    weights = take({tokens, k}, stats);
    x = take({tokens, d}, o.dtype);
    out = take({tokens, d}, o.dtype);
    rows = take({b.rows, d}, o.dtype);
    topk_rows = take({b.rows, k}, DType::i32);
    weights_rows = take({b.rows, k}, stats);
    row_count = take({1}, DType::i32);
    transit = take({exchange.transit_bytes(d, o.dtype, o.format)}, DType::u8);
    returned = take({b.returned_rows, d}, o.dtype);
    host_out = take({tokens, d}, o.dtype, kCpu);
    wanted = take({tokens, d}, o.dtype, kCpu);
    before = take({tokens, d}, o.dtype, kCpu);
    BackendOwner::Options backend{.device = o.device, .num_threads = o.num_threads, .name = "a2a"};
    {
      BackendOwner::Options dry = backend;
      dry.mode = Stream::Mode::dry;
      BackendOwner measured(dry);
      static_cast<void>(step(measured, measured.backend()));
      backend.scratch_bytes = std::max<std::size_t>(4096, measured.scratch().high_water_bytes());
    }
    owner = std::make_unique<BackendOwner>(backend);
    fill(choices);
  }

  TensorView take(Shape shape, DType dtype) { return take(shape, dtype, o.device); }
  TensorView take(Shape shape, DType dtype, Device device) {
    const std::size_t bytes = byte_size(dtype) * static_cast<std::size_t>(shape.numel());
    return memory.emplace_back(std::max<std::size_t>(1, bytes), device, "bench a2a")
        .view(shape, dtype);
  }

  void fill(const TokenChoices& choices) {
    const std::int64_t d = o.width,
                       most = std::max<std::int64_t>(o.grid.ranks(), o.routing.choices);
    const std::int64_t largest =
        o.format == RowFormat::fp8 ? 1 : std::max<std::int64_t>(1, 256 / most);
    const auto terms = terms_of(o, choices);
    const TensorView host_topk = take(topk.shape(), DType::i32, kCpu),
                     host_weights = take(weights.shape(), weights.dtype(), kCpu);
    std::copy(choices.places.begin(), choices.places.end(), host_topk.as<std::int32_t>());
    for (std::int64_t a = 0; a < host_weights.numel(); ++a)
      write(host_weights, a, uniform(8, static_cast<std::uint64_t>(a)));
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      const double v = value_at(largest, static_cast<std::uint64_t>(i));
      write(host_out, i, v);
      write(wanted, i, v * terms[static_cast<std::size_t>(i / d)]);
    }
    Stream& stream = owner->stream();
    copy_tensor(topk, host_topk, stream);
    copy_tensor(weights, host_weights, stream);
    copy_tensor(x, host_out, stream);
    stream.synchronize();
  }

  A2aTimes step(BackendOwner& on, Backend& backend) {
    A2aTimes times;
    double last = seconds_now();
    const auto lap = [&](double& part) {
      on.stream().synchronize();
      const double now = seconds_now();
      part += now - last;
      last = now;
    };
    exchange.begin_plan(plan,
                        backend,
                        plan_memory,
                        {.topk = topk, .weights = weights, .kept = {}, .place_of_expert = {}});
    exchange.finish_plan(plan, backend);
    lap(times.plan);
    const EnteredRows from = exchange.enter(plan, backend, transit, x, o.format);
    for (int pass = 0; pass < plan.passes(); ++pass) {
      exchange.dispatch_choices(plan, backend, pass, topk_rows, weights_rows, row_count);
      exchange.dispatch(plan, backend, pass, rows, from);
      lap(times.dispatch);
      exchange.combine(plan, backend, pass, returned, rows);
      lap(times.combine);
    }
    exchange.leave(plan, backend, out, returned);
    lap(times.combine);
    return times;
  }

  void compare() {
    copy_tensor(host_out, out, owner->stream());
    owner->stream().synchronize();
    const double limit = o.format == RowFormat::fp8 ? 1.0 / 64 : 0.0;
    dispatch_float(o.dtype, [&]<class T>(TypeTag<T>) {
      for (std::int64_t i = 0; i < wanted.numel(); ++i) {
        const auto got = static_cast<double>(host_out.as<T>()[i]),
                   want = static_cast<double>(wanted.as<T>()[i]);
        if (std::abs(got - want) <= limit * std::abs(want)) continue;
        throw InternalError(fmt::format(
            "{}: element {} of the result is {}, not {}", name(o.method), i, got, want));
      }
    });
    if (ran && std::memcmp(host_out.data(), before.data(), before.bytes()) != 0)
      throw InternalError(fmt::format("{}: a repetition gave other bits", name(o.method)));
    std::memcpy(before.data(), host_out.data(), before.bytes());
    ran = true;
  }
};

A2aMethod::A2aMethod(Communicator* group, const Options& options, const TokenChoices& choices)
    : impl_(std::make_unique<Impl>(group, options, choices)) {}
A2aMethod::~A2aMethod() = default;

A2aTimes A2aMethod::run() {
  const A2aTimes times = impl_->step(*impl_->owner, impl_->owner->backend());
  impl_->compare();
  return times;
}
int A2aMethod::passes() const {
  return impl_->plan.passes();
}
Traffic A2aMethod::rows() const {
  return impl_->exchange.traffic(impl_->plan, 1);
}
std::int64_t A2aMethod::received() const {
  std::int64_t sum = 0;
  for (int pass = 0; pass < passes(); ++pass)
    sum += impl_->plan.rows(pass);
  return sum;
}

}  // namespace moesaic::bench
