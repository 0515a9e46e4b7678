#include "apps/verify/large/case_builder.h"

#include "apps/verify/case_compare.h"
#include "core/base/random.h"

namespace moesaic::verify {

CaseBuilder::CaseBuilder(const std::string& name, DType inputs_in) {
  data_.name = name;
  data_.inputs_in = inputs_in;
  data_.generated = GeneratedAccuracy{};
}

std::uint64_t CaseBuilder::key(const std::string& tensor) const {
  return hash_name(data_.name + "/" + tensor);
}

void CaseBuilder::fill(const std::string& tensor,
                       Shape shape,
                       const std::function<double(std::int64_t, double)>& f,
                       bool stays_f32) {
  const std::uint64_t k = key(tensor);
  std::vector<double> values(static_cast<std::size_t>(shape.numel()));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = round_input(
        data_.inputs_in, stays_f32, f(static_cast<std::int64_t>(i), standard_normal(k, i)));
  data_.tensors[tensor] = {shape, true, std::move(values)};
}

void CaseBuilder::normal(const std::string& tensor, Shape shape, double scale, double mean) {
  fill(tensor, shape, [=](std::int64_t, double x) { return mean + scale * x; });
}

void CaseBuilder::uniform(const std::string& tensor, Shape shape, double low, double high) {
  const std::uint64_t k = key(tensor);
  fill(tensor, shape, [=](std::int64_t i, double) {
    return low + (high - low) * moesaic::uniform(k, static_cast<std::uint64_t>(i));
  });
}

void CaseBuilder::ints(const std::string& tensor,
                       Shape shape,
                       const std::vector<std::int64_t>& values) {
  MOESAIC_CHECK(static_cast<std::int64_t>(values.size()) == shape.numel(),
                "as many values as elements");
  data_.tensors[tensor] = {shape, false, {values.begin(), values.end()}};
}

void CaseBuilder::random_ints(const std::string& tensor, Shape shape, std::int64_t bound) {
  const std::uint64_t k = key(tensor);
  std::vector<std::int64_t> values(static_cast<std::size_t>(shape.numel()));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<std::int64_t>(moesaic::uniform(k, i) * static_cast<double>(bound));
  ints(tensor, shape, values);
}

LargeCases large_cases() {
  LargeCases cases;
  add_kda_cases(cases);
  add_attention_cases(cases);
  add_indexer_cases(cases);
  add_grouped_cases(cases);
  add_routing_cases(cases);
  add_row_cases(cases);
  add_vocabulary_cases(cases);
  add_muon_cases(cases);
  add_layer_cases(cases);
  return cases;
}

}  // namespace moesaic::verify
