#include "apps/selftest/choices.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic::apps::selftest {
namespace {

std::vector<std::int32_t> on_host(ConstTensorView view, Stream& stream) {
  std::vector<std::int32_t> values(static_cast<std::size_t>(view.numel()));
  if (values.empty()) return values;
  const Buffer memory(view.bytes(), kCpu, "choices");
  const TensorView host = memory.view(view.shape(), DType::i32);
  copy_tensor(host, view, stream);
  stream.synchronize();
  std::memcpy(values.data(), host.data(), view.bytes());
  return values;
}

template <class T>
void put(std::string& bytes, const T* data, std::size_t n) {
  bytes.append(reinterpret_cast<const char*>(data), n * sizeof(T));
}
template <class T>
void get(const std::string& bytes, std::size_t& at, T* data, std::size_t n) {
  MOESAIC_CHECK(at + n * sizeof(T) <= bytes.size(), "a record of choices is cut off");
  std::memcpy(data, bytes.data() + at, n * sizeof(T));
  at += n * sizeof(T);
}

}  // namespace

void ChoiceRecord::add(int step, const std::string& layer, std::int64_t micro_batch, Rows rows) {
  const bool is_new = rows_.emplace(std::tuple(step, layer, micro_batch), std::move(rows)).second;
  MOESAIC_CHECK(is_new, layer + " chose twice for one micro-batch");
}

const ChoiceRecord::Rows& ChoiceRecord::at(int step,
                                           const std::string& layer,
                                           std::int64_t micro_batch) const {
  const auto it = rows_.find({step, layer, micro_batch});
  MOESAIC_CHECK(
      it != rows_.end(),
      fmt::format(
          "one rank made no choice in {}, step {}, micro-batch {}", layer, step + 1, micro_batch));
  return it->second;
}

std::size_t ChoiceRecord::most_bytes() const {
  std::size_t most = 0;
  for (const auto& [key, rows] : rows_)
    most = std::max(most, rows.values.size() * sizeof(std::int32_t));
  return most;
}

std::string ChoiceRecord::bytes() const {
  std::string all;
  for (const auto& [key, rows] : rows_) {
    const auto& [step, layer, micro_batch] = key;
    const auto name = static_cast<std::int64_t>(layer.size());
    const std::int64_t numbers[] = {step, micro_batch, name, rows.tokens, rows.k};
    put(all, numbers, 5);
    put(all, layer.data(), layer.size());
    put(all, rows.values.data(), rows.values.size());
  }
  return all;
}

ChoiceRecord ChoiceRecord::read(const std::string& bytes) {
  ChoiceRecord record;
  for (std::size_t at = 0; at < bytes.size();) {
    std::int64_t numbers[5];
    get(bytes, at, numbers, 5);
    std::string layer(static_cast<std::size_t>(numbers[2]), ' ');
    get(bytes, at, layer.data(), layer.size());
    Rows rows{numbers[3], numbers[4], {}};
    rows.values.resize(static_cast<std::size_t>(rows.tokens * rows.k));
    get(bytes, at, rows.values.data(), rows.values.size());
    record.add(static_cast<int>(numbers[0]), layer, numbers[1], std::move(rows));
  }
  return record;
}

ConstTensorView ChoiceRecorder::replace(const Choice& choice, Stream& stream) {
  MOESAIC_CHECK(choice.first_token == 0, "the record is that of one rank");
  to_.add(step_,
          choice.layer,
          choice.micro_batch,
          {choice.chosen.dim(0), choice.chosen.dim(1), on_host(choice.chosen, stream)});
  return {};
}

ConstTensorView ChoiceReplay::replace(const Choice& choice, Stream& stream) {
  const ChoiceRecord::Rows& rows = record_.at(step_, choice.layer, choice.micro_batch);
  const std::int64_t tokens = choice.chosen.dim(0), k = choice.chosen.dim(1),
                     first = choice.first_token;
  MOESAIC_CHECK(first + tokens <= rows.tokens && k == rows.k,
                choice.layer + ": the choices of one rank have another shape");
  const std::vector<std::int32_t> own = on_host(choice.chosen, stream);
  const std::int32_t* given = rows.values.data() + first * k;
  if (!choice.is_shared || counts_shared_) {
    choices_ += std::count_if(own.begin(), own.end(), [](std::int32_t v) { return v >= 0; });
    differing_ += count_differing(own, given, k);
  }
  // The stream has passed whatever read the last one.
  const std::size_t bytes = choice.chosen.bytes();
  const Buffer staging(std::max<std::size_t>(1, bytes), kCpu, "given choices, host");
  const TensorView host = staging.view(choice.chosen.shape(), DType::i32),
                   view = given_.view(choice.chosen.shape(), DType::i32);
  std::memcpy(host.data(), given, bytes);
  copy_tensor(view, host, stream);
  stream.synchronize();
  return view;
}

std::int64_t count_differing(const std::vector<std::int32_t>& own,
                             const std::int32_t* other,
                             std::int64_t k) {
  std::int64_t differing = 0;
  for (std::size_t i = 0; i < own.size(); ++i) {
    const std::int32_t* row = other + static_cast<std::int64_t>(i) / k * k;
    if (own[i] >= 0 && std::find(row, row + k, own[i]) == row + k) ++differing;
  }
  return differing;
}

}  // namespace moesaic::apps::selftest
