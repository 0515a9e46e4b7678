#include "core/nn/tape.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace moesaic {
namespace {
constexpr std::size_t kAlign = 256;
std::size_t aligned(std::size_t n) {
  return (n + kAlign - 1) / kAlign * kAlign;
}
}  // namespace

bool glob_match(const std::string& pattern, const std::string& text) {
  // Greedy with backtracking to the last star: linear for one star, quadratic at worst.
  std::size_t p = 0, t = 0, star = std::string::npos, resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string::npos) {
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*')
    ++p;
  return p == pattern.size();
}

namespace {
bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(
      patterns.begin(), patterns.end(), [&](const auto& p) { return glob_match(p, name); });
}
}  // namespace

bool RecomputePolicy::matches(const std::string& name, StepKind producer) const {
  const bool is_named =
      all || matches_any(patterns, name) || (cheap && producer == StepKind::cheap);
  return is_named && !matches_any(kept, name);
}
bool RecomputePolicy::Offload::matches(const std::string& name) const {
  return matches_any(patterns, name);
}

ActId TapeSpec::input(const std::string& name, Shape shape, DType dtype) {
  const ActId id = activation(name, shape, dtype);
  activations_.back().is_input = true;
  return id;
}

ActId TapeSpec::activation(const std::string& name, Shape shape, DType dtype) {
  Activation a;
  a.name = name;
  a.shape = shape;
  a.dtype = dtype;
  activations_.push_back(a);
  return {static_cast<std::int32_t>(activations_.size() - 1)};
}

HostId TapeSpec::host_value(std::function<std::shared_ptr<void>()> make) {
  host_values_.push_back(std::move(make));
  return {static_cast<std::int32_t>(host_values_.size() - 1)};
}

void TapeSpec::step(const std::string& name,
                    std::vector<ActId> reads,
                    std::vector<ActId> writes,
                    std::function<void(Tape&)> run,
                    StepKind kind) {
  const int index = static_cast<int>(steps_.size());
  for (const ActId r : reads) {
    auto& a = activations_[static_cast<std::size_t>(r.index)];
    a.is_read = true;
    MOESAIC_CHECK(a.is_input || a.producer >= 0,
                  fmt::format("step '{}' reads '{}' before it is written", name, a.name));
  }
  for (const ActId w : writes) {
    auto& a = activations_[static_cast<std::size_t>(w.index)];
    MOESAIC_CHECK(!a.is_input && a.producer < 0,
                  fmt::format("step '{}' writes '{}' again", name, a.name));
    a.producer = index;
  }
  steps_.push_back({name, std::move(reads), std::move(writes), std::move(run), kind});
}

void TapeSpec::always_save(ActId id) {
  activations_[static_cast<std::size_t>(id.index)].pinned = true;
}

void TapeSpec::may_leave(ActId id) {
  MOESAIC_CHECK(activations_[static_cast<std::size_t>(id.index)].pinned,
                "what may leave is always kept");
  activations_[static_cast<std::size_t>(id.index)].may_leave = true;
}

void TapeSpec::never_save(ActId id) {
  activations_[static_cast<std::size_t>(id.index)].passing = true;
}

void TapeSpec::forward_only(ActId id) {
  activations_[static_cast<std::size_t>(id.index)].forward_only = true;
}

void TapeSpec::plan(const RecomputePolicy& policy) {
  MOESAIC_CHECK(!planned_, "a tape is planned once");
  for (auto& a : activations_) {
    if (!a.is_input) a.keep = choose(a, policy);
  }
  save_for_replays(policy);
  for (auto& a : activations_) {
    if (!a.is_input && a.keep != Keep::recompute) find_place(a, policy.offload);
  }
  planned_ = true;
}

// What others read is not offloaded by name: who reads it when is known of what may leave alone.
void TapeSpec::find_place(Activation& a, const RecomputePolicy::Offload& policy) {
  const std::size_t bytes = aligned(byte_size(a.dtype) * static_cast<std::size_t>(a.shape.numel()));
  const bool is_alone = a.may_leave && policy.residuals,
             is_named = !a.pinned && policy.matches(a.name);
  if (!is_alone && !is_named) {
    a.offset = slot_bytes_;
    slot_bytes_ += bytes;
    return;
  }
  a.keep = Keep::offload;
  const int next = static_cast<int>(parts_.size());
  if (is_named && named_part_ < 0) named_part_ = next;
  a.part = is_named ? named_part_ : next;
  if (a.part == next) parts_.push_back(0);
  std::size_t& part = parts_[static_cast<std::size_t>(a.part)];
  a.offset = part;
  part += bytes;
}

// For itself: without a look at what is replayed from it.
Keep TapeSpec::choose(const Activation& a, const RecomputePolicy& policy) const {
  MOESAIC_CHECK(a.producer >= 0, fmt::format("activation '{}' is never written", a.name));
  const Step& producer = steps_[static_cast<std::size_t>(a.producer)];
  if (producer.kind == StepKind::chooses) {
    if (!policy.all && policy.matches(a.name)) {
      throw UsageError(
          fmt::format("activations.recompute names '{}', which the step '{}' chooses: it must be "
                      "saved, or backward "
                      "could choose otherwise than forward. Remove it from the list.",
                      a.name,
                      producer.name));
    }
    return Keep::save;
  }
  if (a.pinned) return Keep::save;
  return policy.matches(a.name, producer.kind) || a.passing || a.forward_only ? Keep::recompute
                                                                              : Keep::save;
}

// From the last step to the first: what a replay reads is replayed, or, where only the replay wants it, saved.
void TapeSpec::save_for_replays(const RecomputePolicy& policy) {
  std::vector<bool> is_needed(activations_.size(), false);  // by a replay
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    bool is_replayed = false;
    for (const ActId w : step->writes) {
      const auto i = static_cast<std::size_t>(w.index);
      Activation& a = activations_[i];
      if (a.forward_only && !a.passing && is_needed[i] && a.keep == Keep::recompute &&
          !policy.matches(a.name, step->kind))
        a.keep = Keep::save;
      if (a.keep == Keep::recompute && (is_needed[i] || !a.forward_only)) is_replayed = true;
    }
    if (!is_replayed) continue;
    for (const ActId r : step->reads)
      is_needed[static_cast<std::size_t>(r.index)] = true;
  }
}

void WeightGradients::add(Backend& backend, std::function<void(Backend&)> work) {
  if (mode_ == Mode::at_once) {
    work(backend);
  } else {
    pending_.push_back(std::move(work));
  }
}

void WeightGradients::flush(Backend& backend) {
  for (const auto& work : pending_)
    work(backend);
  pending_.clear();
  while (!held_.empty())
    held_.pop_back();  // last taken, first given back
}

Tape::Scope::Scope(Tape& tape) : tape_(tape) {
  RunContext& context = tape.context();
  if (context.weight_gradients.mode() == WeightGradients::Mode::at_once)
    mark_.emplace(context.transient);
  ++tape.scopes_;
}

Tape::Stage::Stage(Tape& tape) : tape_(tape) {
  RunContext& context = tape.context();
  MOESAIC_CHECK(tape.in_backward_ && tape.scopes_ == 0, "a stage is a part of backward");
  if (context.weight_gradients.mode() != WeightGradients::Mode::at_once) return;
  mark_.emplace(context.transient);
  before_ = tape.transient_;
}

Tape::Stage::~Stage() {
  if (mark_) tape_.transient_ = std::move(before_);
}

Tape::Tape(const TapeSpec& spec, TensorView slot, std::vector<TensorView> parts)
    : spec_(&spec), slot_(slot), parts_(std::move(parts)), transient_(spec.activations().size()) {
  MOESAIC_CHECK(parts_.size() == spec.offloaded_parts().size(),
                "what is offloaded needs memory of its own");
  for (const auto& make : spec.host_values())
    host_values_.push_back(make());
}

void Tape::bind(ActId id, ConstTensorView view) {
  const auto& a = spec_->activations()[static_cast<std::size_t>(id.index)];
  MOESAIC_CHECK(a.is_input, fmt::format("'{}' is not an input", a.name));
  check_shape(view, a.shape, a.name.c_str());
  check_dtype(view, a.dtype, a.name.c_str());
  bound_.resize(spec_->activations().size());
  bound_[static_cast<std::size_t>(id.index)] = view;
}

RunContext& Tape::context() const {
  MOESAIC_CHECK(context_ != nullptr, "a tape is used outside forward() and backward()");
  return *context_;
}

TensorView Tape::saved_view(ActId id) const {
  const auto& a = spec_->activations()[static_cast<std::size_t>(id.index)];
  const TensorView& memory = a.part < 0 ? slot_ : parts_[static_cast<std::size_t>(a.part)];
  return {memory.data() + a.offset, a.dtype, a.shape, memory.device()};
}

TensorView Tape::temp(Shape shape, DType dtype, const char* tag) const {
  return context().transient.take(shape, dtype, tag);
}

ConstTensorView Tape::replaced_choice(const std::string& layer,
                                      std::int64_t first_token,
                                      bool is_shared,
                                      ConstTensorView chosen) const {
  const RunContext& c = context();
  if (c.choices == nullptr) return {};
  return c.choices->replace({layer, c.micro_batch, first_token, is_shared, chosen}, stream());
}

std::vector<std::string> Tape::saved_in_vain() const {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < asked_for_.size(); ++i) {
    const auto& a = spec_->activations()[i];
    if (a.is_input || a.pinned || !a.is_kept() || asked_for_[i]) continue;
    const auto& producer = spec_->steps()[static_cast<std::size_t>(a.producer)];
    if (producer.kind != StepKind::chooses) names.push_back(a.name);
  }
  return names;
}

ConstTensorView Tape::in(ActId id) {
  const auto i = static_cast<std::size_t>(id.index);
  if (!asked_for_.empty()) asked_for_[i] = true;
  const auto& a = spec_->activations()[i];
  if (a.is_input) return bound_[i];
  if (a.is_kept()) return saved_view(id);
  if (transient_[i].empty()) {
    // Only backward comes here: forward runs the steps in order.
    MOESAIC_CHECK(scopes_ == 0, fmt::format("'{}' is replayed inside a scope", a.name));
    const auto& step = spec_->steps()[static_cast<std::size_t>(a.producer)];
    for (const ActId r : step.reads)
      in(r);
    ++replays_;
    const ActId outer = std::exchange(replayed_, id);
    step.run(*this);
    replayed_ = outer;
    MOESAIC_CHECK(!transient_[i].empty(), fmt::format("'{}' was left out of its replay", a.name));
  }
  return transient_[i];
}

TensorView Tape::out(ActId id) {
  const auto i = static_cast<std::size_t>(id.index);
  const auto& a = spec_->activations()[i];
  if (a.is_kept() && !replayed_.valid()) return saved_view(id);
  // Saved values are never written again: a replayed step that also produces them writes elsewhere.
  if (transient_[i].empty())
    transient_[i] = context().transient.take(a.shape, a.dtype, a.name.c_str());
  return transient_[i];
}

TensorView Tape::reuse(ActId id) {
  const auto i = static_cast<std::size_t>(id.index);
  const auto& a = spec_->activations()[i];
  MOESAIC_CHECK(!a.is_input && !replayed_.valid(), fmt::format("'{}' is not to be reused", a.name));
  if (a.is_kept()) return saved_view(id);
  MOESAIC_CHECK(!transient_[i].empty(), fmt::format("'{}' is reused unread", a.name));
  return transient_[i];
}

TensorView Tape::own(ActId id) const {
  const auto& a = spec_->activations()[static_cast<std::size_t>(id.index)];
  MOESAIC_CHECK(a.pinned, fmt::format("'{}' is not always kept", a.name));
  return saved_view(id);
}

TensorView Tape::of_piece_before(ActId id) const {
  MOESAIC_CHECK(before_ != nullptr && before_->spec_ == spec_, "there is no piece before this one");
  return before_->own(id);
}

void Tape::gather_pieces(TensorView all, ActId id, std::int64_t pieces) const {
  const Tape* piece = this;
  for (std::int64_t i = pieces; i-- > 0; piece = piece->before_) {
    MOESAIC_CHECK(piece != nullptr, "a piece is missing");
    const TensorView rows = piece->own(id);
    copy_tensor(all.rows(i * rows.dim(0), (i + 1) * rows.dim(0)), rows, stream());
  }
}

bool Tape::is_wanted(ActId id) const {
  if (replayed_.valid()) return replayed_.index == id.index;
  const auto& a = spec_->activations()[static_cast<std::size_t>(id.index)];
  return a.is_kept() || a.is_read;
}

void Tape::forward(RunContext& context) {
  context_ = &context;
  asked_for_.clear();
  in_backward_ = false;
  replays_ = 0;
  const Arena::Mark mark(context.transient);
  for (const auto& step : spec_->steps())
    step.run(*this);
  std::fill(transient_.begin(), transient_.end(), TensorView());
  context_ = nullptr;
}

void Tape::backward(RunContext& context, const std::function<void()>& body) {
  context_ = &context;
  auto mark = std::make_unique<Arena::Mark>(context.transient);
  asked_for_.assign(spec_->activations().size(), false);
  in_backward_ = true;
  body();
  in_backward_ = false;
  if (context.weight_gradients.mode() == WeightGradients::Mode::deferred)
    context.weight_gradients.hold(std::move(mark));
  mark.reset();
  std::fill(transient_.begin(), transient_.end(), TensorView());
  context_ = nullptr;
}

}  // namespace moesaic
