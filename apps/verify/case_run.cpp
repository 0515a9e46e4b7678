#include "apps/verify/case_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/verify/case_compare.h"
#include "apps/verify/case_values.h"
#include "core/base/json_text.h"

namespace moesaic::verify {
namespace {

using Json = nlohmann::json;

Json parse_cfg(const CaseData& data) {
  const std::string where = data.name + ": the metadata entry 'cfg'";
  check_json(data.cfg, where, {});
  Json cfg = Json::parse(data.cfg);
  if (!cfg.is_object()) throw InputError(where + " is not a JSON object");
  return cfg;
}

}  // namespace

struct CaseRun::Impl {
  Impl(const CaseData& d, Backend& b, const Precision& p, CaseData* r)
      : data(d), record(r), backend(b), precision(p), cfg(parse_cfg(d)), norms(largest_norms(d)) {
    open_all();
    result.name = data.name;
  }
  void open_all() {
    for (const auto& [name, tensor] : data.tensors) {
      if (is_result(name)) open.insert(name);
    }
  }
  void check_all_reported() {
    if (open.empty()) return;
    failures.push_back(
        fmt::format("{} stored results were not reported, first '{}'", open.size(), *open.begin()));
  }

  TensorView allocate(const Shape& shape, DType dtype) {
    const std::size_t bytes = byte_size(dtype) * static_cast<std::size_t>(shape.numel());
    const Buffer& buffer =
        memory.emplace_back(std::max<std::size_t>(bytes, 1), stream_of(backend).device(), "verify");
    return buffer.view(shape, dtype);
  }

  template <class In>
  TensorView upload(const std::vector<In>& values, const Shape& shape, DType dtype) {
    MOESAIC_CHECK(static_cast<std::int64_t>(values.size()) == shape.numel(),
                  "as many values as elements");
    const TensorView device = allocate(shape, dtype);
    if (device.device() == kCpu) {
      write_values(dtype, device.data(), values);
      return device;
    }
    const Buffer host(std::max<std::size_t>(device.bytes(), 1), kCpu, "verify");
    write_values(dtype, host.data(), values);
    copy_tensor(device, host.view(shape, dtype), stream_of(backend));
    stream_of(backend).synchronize();
    return device;
  }

  template <class Out>
  std::vector<Out> download(const ConstTensorView& view) {
    stream_of(backend).synchronize();
    if (view.device() == kCpu) return read_values<Out>(view);
    const Buffer host(std::max<std::size_t>(view.bytes(), 1), kCpu, "verify");
    copy_tensor(host.view(view.shape(), view.dtype()), view, stream_of(backend));
    stream_of(backend).synchronize();
    return read_values<Out>(host.view(view.shape(), view.dtype()));
  }

  const Json* find_cfg(const std::string& path) const {
    const Json* at = &cfg;
    for (std::size_t begin = 0; begin <= path.size();) {
      const std::size_t end = std::min(path.find('.', begin), path.size());
      const std::string key = path.substr(begin, end - begin);
      if (!at->is_object() || !at->contains(key)) return nullptr;
      at = &(*at)[key];
      begin = end + 1;
    }
    return at;
  }
  template <class Test>
  const Json& need_cfg(const std::string& path, const char* what, Test test) const {
    const Json* found = find_cfg(path);
    if (found == nullptr) throw InputError(fmt::format("{}: cfg has no '{}'", data.name, path));
    if (!test(*found))
      throw InputError(fmt::format("{}: cfg '{}' should be {}", data.name, path, what));
    return *found;
  }

  // False, and the case fails, when there is nothing to compare with or the sizes differ.
  bool begin_result(const std::string& name, std::int64_t count) {
    if (!is_result(name) || !data.contains(name)) {
      failures.push_back(fmt::format("the runner reports '{}', which is not stored", name));
      return false;
    }
    if (!open.erase(name)) failures.push_back(fmt::format("'{}' was reported twice", name));
    const std::int64_t want = data.at(name).shape.numel();
    if (count != want) {
      failures.push_back(fmt::format("'{}' has {} elements, stored are {}", name, count, want));
      return false;
    }
    ++result.compared;
    return true;
  }

  // Axes of length 1 do not count: a single head, or a row of its own, is a matter of the op's arguments.
  void check_shape(const std::string& name, const Shape& got) {
    if (!is_result(name) || !data.contains(name)) return;  // begin_result() says so
    const Shape& want = data.at(name).shape;
    const auto axes = [](const Shape& shape) {
      std::vector<std::int64_t> long_ones;
      for (int i = 0; i < shape.rank; ++i) {
        if (shape[i] != 1) long_ones.push_back(shape[i]);
      }
      return long_ones;
    };
    if (axes(got) != axes(want)) {
      failures.push_back(
          fmt::format("'{}' has shape {}, stored is {}", name, to_string(got), to_string(want)));
    }
  }

  /// Stores a result in place of comparing it.
  void record_result(const std::string& name,
                     const Shape& shape,
                     bool is_floating_result,
                     std::vector<double> values) {
    if (!is_result(name)) failures.push_back(fmt::format("'{}' is no name of a result", name));
    if (is_floating_result &&
        !std::all_of(values.begin(), values.end(), [](double v) { return !std::isnan(v); }))
      failures.push_back(fmt::format("the f64 result '{}' is not a number somewhere", name));
    const bool is_new =
        record->tensors.try_emplace(name, CaseTensor{shape, is_floating_result, std::move(values)})
            .second;
    if (!is_new) failures.push_back(fmt::format("'{}' was reported twice", name));
    ++result.compared;
  }

  /// A result that is zero but for the rounding errors of f64 (the gradient of a softmax over one key) becomes zero: the
  /// relative error of noise says nothing.
  void clear_rounding_noise() {
    constexpr double kNoise = 1e-13;
    const auto largest = largest_norms(*record);
    for (auto& [name, tensor] : record->tensors) {
      if (!is_result(name) || !tensor.is_floating) continue;
      const double limit = kNoise * largest.at(kind_of(name));
      if (std::all_of(tensor.values.begin(), tensor.values.end(), [&](double v) {
            return std::abs(v) <= limit;
          }))
        std::fill(tensor.values.begin(), tensor.values.end(), 0.0);
    }
  }

  const CaseData& data;
  CaseData* record;  // not null: a recording run
  Backend& backend;
  Precision precision;
  Json cfg;
  std::map<std::string, double> norms;
  std::vector<Buffer> memory;
  std::map<std::pair<std::string, DType>, TensorView> loaded;
  std::set<std::string> open;  // results that nobody reported yet
  std::string form;            // empty, or in which form they are reported again
  struct Measured {
    std::string name, form;
    Difference difference;
    RowDifference row;  // of generated cases
  };
  std::vector<Measured> measured;
  std::vector<std::string> failures, notes;
  double factor_f32 = 1, factor_bf16 = 1;
  CaseResult result;
};

CaseRun::CaseRun(const CaseData& data, Backend& backend, const Precision& precision)
    : impl_(std::make_unique<Impl>(data, backend, precision, nullptr)) {}
CaseRun::CaseRun(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CaseRun::CaseRun(CaseRun&&) noexcept = default;
CaseRun::~CaseRun() = default;

CaseRun CaseRun::recording(CaseData& data, Backend& backend, const Precision& precision) {
  return CaseRun(std::make_unique<Impl>(data, backend, precision, &data));
}
bool CaseRun::is_recording() const {
  return impl_->record != nullptr;
}
bool CaseRun::report_again(const std::string& form) {
  if (is_recording()) return false;
  impl_->check_all_reported();
  impl_->open_all();
  impl_->form = form;
  return true;
}
bool CaseRun::is_generated() const {
  return impl_->data.generated.has_value();
}
bool CaseRun::replays_choices() const {
  return !is_recording() && (is_generated() || precision().compute == DType::bf16);
}
void CaseRun::store(const std::string& name,
                    Shape shape,
                    std::vector<double> values,
                    bool stays_f32) {
  MOESAIC_CHECK(is_recording(), "inputs are stored in recording runs");
  for (double& v : values)
    v = round_input(impl_->data.inputs_in, stays_f32, v);
  impl_->record->tensors[name] = {shape, true, std::move(values)};
}

Backend& CaseRun::backend() {
  return impl_->backend;
}
const Precision& CaseRun::precision() const {
  return impl_->precision;
}
Stream& CaseRun::stream() {
  return stream_of(impl_->backend);
}

std::int64_t CaseRun::cfg_int(const std::string& path) const {
  return impl_->need_cfg(path, "an integer", [](const Json& j) { return j.is_number_integer(); })
      .get<std::int64_t>();
}
double CaseRun::cfg_real(const std::string& path) const {
  return impl_->need_cfg(path, "a number", [](const Json& j) { return j.is_number(); })
      .get<double>();
}
std::string CaseRun::cfg_text(const std::string& path) const {
  return impl_->need_cfg(path, "a text", [](const Json& j) { return j.is_string(); })
      .get<std::string>();
}
bool CaseRun::cfg_bool(const std::string& path) const {
  return impl_->need_cfg(path, "true or false", [](const Json& j) { return j.is_boolean(); })
      .get<bool>();
}
bool CaseRun::cfg_has(const std::string& path) const {
  const Json* found = impl_->find_cfg(path);
  return found != nullptr && !found->is_null();
}
std::vector<std::int64_t> CaseRun::cfg_ints(const std::string& path) const {
  const auto all_ints = [](const Json& j) {
    return j.is_array() &&
           std::all_of(j.begin(), j.end(), [](const Json& v) { return v.is_number_integer(); });
  };
  return impl_->need_cfg(path, "a list of integers", all_ints).get<std::vector<std::int64_t>>();
}
std::vector<double> CaseRun::cfg_reals(const std::string& path) const {
  const auto all_numbers = [](const Json& j) {
    return j.is_array() &&
           std::all_of(j.begin(), j.end(), [](const Json& v) { return v.is_number(); });
  };
  return impl_->need_cfg(path, "a list of numbers", all_numbers).get<std::vector<double>>();
}

bool CaseRun::has(const std::string& name) const {
  return impl_->data.contains(name);
}
Shape CaseRun::shape(const std::string& name) const {
  return impl_->data.at(name).shape;
}
std::vector<std::string> CaseRun::names_with_prefix(const std::string& prefix) const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : impl_->data.tensors) {
    if (name.starts_with(prefix)) names.push_back(name);
  }
  return names;
}

TensorView CaseRun::load(const std::string& name, DType dtype) {
  const auto [entry, is_new] = impl_->loaded.try_emplace({name, dtype});
  if (is_new) entry->second = impl_->upload(impl_->data.at(name).values, shape(name), dtype);
  return entry->second;
}
TensorView CaseRun::load_i32(const std::string& name) {
  const auto [entry, is_new] = impl_->loaded.try_emplace({name, DType::i32});
  if (is_new) entry->second = upload_i32(host_ints(name), shape(name));
  return entry->second;
}
std::vector<std::int64_t> CaseRun::host_ints(const std::string& name) const {
  return read_ints(impl_->data, name);
}
std::vector<double> CaseRun::host_reals(const std::string& name) const {
  return impl_->data.at(name).values;
}

TensorView CaseRun::zeros(Shape shape, DType dtype) {
  const TensorView view = impl_->allocate(shape, dtype);
  zero_tensor(view, stream());
  return view;
}
TensorView CaseRun::poisoned(Shape shape, DType dtype) {
  // All bits set is a NaN in every floating format and -1 in integers.
  const TensorView view = impl_->allocate(shape, dtype);
  const Buffer host(std::max<std::size_t>(view.bytes(), 1), kCpu, "verify");
  std::memset(host.data(), 0xff, view.bytes());
  copy_tensor(view, host.view(shape, dtype), stream());
  stream().synchronize();
  return view;
}
TensorView CaseRun::upload(const std::vector<double>& values, Shape shape, DType dtype) {
  return impl_->upload(values, shape, dtype);
}
TensorView CaseRun::upload_i32(const std::vector<std::int64_t>& values, Shape shape) {
  for (const std::int64_t v : values) {
    if (v != static_cast<std::int32_t>(v)) {
      throw InputError(fmt::format("{}: integer {} does not fit 32 bits", impl_->data.name, v));
    }
  }
  return impl_->upload(values, shape, DType::i32);
}
std::vector<double> CaseRun::download(ConstTensorView view) {
  return impl_->download<double>(view);
}

void CaseRun::expect(const std::string& name, ConstTensorView got) {
  if (is_recording()) return impl_->record_result(name, got.shape(), true, download(got));
  impl_->check_shape(name, got.shape());
  expect(name, download(got));
}
void CaseRun::expect(const std::string& name, const std::vector<double>& got) {
  if (is_recording())
    return impl_->record_result(name, {static_cast<std::int64_t>(got.size())}, true, got);
  if (!impl_->begin_result(name, static_cast<std::int64_t>(got.size()))) return;
  const CaseTensor& want = impl_->data.at(name);
  Impl::Measured m{
      name, impl_->form, difference(got, want.values, impl_->norms[kind_of(name)]), {}};
  // A single turned sign may be all there is of a row.
  if (is_generated() && want.shape.rank > 1 && !has_kink(impl_->data, name))
    m.row = worst_row(got, want.values, want.shape[0]);
  impl_->measured.push_back(std::move(m));
}

void CaseRun::expect_exact(const std::string& name, const std::vector<std::int64_t>& got) {
  if (is_recording())
    return impl_->record_result(
        name, {static_cast<std::int64_t>(got.size())}, false, {got.begin(), got.end()});
  if (!impl_->begin_result(name, static_cast<std::int64_t>(got.size()))) return;
  const std::vector<std::int64_t> want = read_ints(impl_->data, name);
  const auto at = std::mismatch(got.begin(), got.end(), want.begin());
  if (at.first != got.end()) {
    impl_->failures.push_back(fmt::format("'{}' differs first at element {}: {}, stored is {}",
                                          name,
                                          at.first - got.begin(),
                                          *at.first,
                                          *at.second));
  }
}
void CaseRun::expect_exact(const std::string& name, ConstTensorView got_ints) {
  if (is_recording())
    return impl_->record_result(name, got_ints.shape(), false, download(got_ints));
  impl_->check_shape(name, got_ints.shape());
  expect_exact(name, impl_->download<std::int64_t>(got_ints));
}

void CaseRun::waive(const std::string& name, const std::string& reason) {
  MOESAIC_CHECK(!reason.empty(), "waiving a result needs a reason");
  if (!impl_->open.erase(name)) {
    fail(fmt::format("'{}' is waived, but is not a result that is still open", name));
    return;
  }
  note(fmt::format("{} waived: {}", name, reason));
}
void CaseRun::fail(const std::string& why) {
  impl_->failures.push_back(why);
}
void CaseRun::scale_limit(double factor_f32, double factor_bf16) {
  impl_->factor_f32 = factor_f32;
  impl_->factor_bf16 = factor_bf16;
}
void CaseRun::note(const std::string& text) {
  impl_->notes.push_back(text);
}

CaseResult CaseRun::finish() {
  Impl& run = *impl_;
  const DType compute = run.precision.compute;
  const double factor = compute == DType::f64   ? 1.0
                        : compute == DType::f32 ? run.factor_f32
                                                : run.factor_bf16;
  CaseResult& result = run.result;
  double worst_share = -1;  // of its limit
  for (const auto& m : run.measured) {
    const std::string label = m.form.empty() ? m.name : fmt::format("{} ({})", m.name, m.form);
    if (m.difference.stored_zero) {
      if (!(m.difference.absolute <= zero_floor(compute))) {
        run.failures.push_back(
            fmt::format("'{}' is stored as zeros, found {:.3g}", label, m.difference.absolute));
      }
      continue;
    }
    const double limit = factor * limit_of(compute, run.data, m.name);
    if (m.difference.relative / limit > worst_share) {
      worst_share = m.difference.relative / limit;
      result.worst_error = m.difference.relative;
      result.worst_tensor = label;
      result.limit = limit;
    }
    if (!(m.row.relative <= kRowFactor * limit)) {
      run.failures.push_back(
          fmt::format("row {} of '{}' is off by {:.3g}", m.row.row, label, m.row.relative));
    }
    if (!(m.difference.relative <= limit)) {
      run.failures.push_back(fmt::format("'{}' is off by {:.3g}", label, m.difference.relative));
    }
  }
  if (run.record != nullptr) run.clear_rounding_noise();
  run.check_all_reported();
  if (result.compared == 0) run.failures.push_back("nothing was compared");
  result.status = run.failures.empty() ? CaseResult::Status::passed : CaseResult::Status::failed;
  std::vector<std::string> lines = run.failures;
  lines.insert(lines.end(), run.notes.begin(), run.notes.end());
  constexpr std::size_t kMostLines = 6;
  if (lines.size() > kMostLines) {
    lines[kMostLines - 1] = fmt::format("and {} more", lines.size() - kMostLines + 1);
    lines.resize(kMostLines);
  }
  result.note = fmt::format("{}", fmt::join(lines, "; "));
  return result;
}

}  // namespace moesaic::verify
