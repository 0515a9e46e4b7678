#include "apps/verify/case_data.h"

#include <cstring>

#include <fmt/format.h>

namespace moesaic::verify {
namespace {

template <class T>
std::vector<double> read_as(const ConstTensorView& view) {
  std::vector<double> values(static_cast<std::size_t>(view.numel()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    T element;  // the file does not promise alignment
    std::memcpy(&element, view.data() + i * sizeof(T), sizeof(T));
    values[i] = static_cast<double>(element);
  }
  return values;
}

std::vector<double> read_values(const SafetensorsFile& file, const std::string& name) {
  const ConstTensorView view = file.view(name);
  switch (view.dtype()) {
    case DType::f64:
      return read_as<double>(view);
    case DType::f32:
      return read_as<float>(view);
    case DType::bf16:
      return read_as<bf16>(view);
    case DType::i64:
      return read_as<std::int64_t>(view);
    case DType::i32:
      return read_as<std::int32_t>(view);
    case DType::u8:
      return read_as<std::uint8_t>(view);
    default:
      throw InputError(fmt::format(
          "{}: tensor '{}' has dtype {}", file.path().string(), name, moesaic::name(view.dtype())));
  }
}

}  // namespace

const CaseTensor& CaseData::at(const std::string& tensor) const {
  const auto found = tensors.find(tensor);
  if (found == tensors.end())
    throw InputError(fmt::format("{}: there is no tensor '{}'", name, tensor));
  return found->second;
}

CaseData load_case(const SafetensorsFile& file) {
  CaseData data;
  data.name = file.path().stem().string();
  const auto cfg = file.metadata().find("cfg");
  if (cfg == file.metadata().end())
    throw InputError(file.path().string() + ": no 'cfg' in the metadata");
  data.cfg = cfg->second;
  const auto stored = file.metadata().find("result_dtype");
  data.stored_in_f32 = stored != file.metadata().end() && stored->second == "F32";
  for (const auto& [name, tensor] : file.tensors())
    data.tensors[name] = {tensor.shape, is_floating(tensor.dtype), read_values(file, name)};
  return data;
}

}  // namespace moesaic::verify
