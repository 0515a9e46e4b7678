#include "core/model/expert_rows.h"

namespace moesaic {

ExpertRows::ExpertRows(const ParameterStore& params, std::int64_t experts) {
  if (!params.wants_member_rows() || params.is_pretend()) return;
  memory_ = make_host_buffer(static_cast<std::size_t>(experts + 1) * byte_size(DType::i32),
                             params.device(),
                             "rows of experts");
  arrived_.emplace(params.device());
}

void ExpertRows::set(std::span<const std::int64_t> rows) {
  is_under_way_ = false;
  rows_ = rows.empty()
              ? nullptr
              : std::make_shared<const std::vector<std::int64_t>>(rows.begin(), rows.end());
}

void ExpertRows::read(ConstTensorView offsets, Stream& stream) {
  rows_ = nullptr;
  if (!arrived_ || stream.mode() == Stream::Mode::dry) return;
  copy_tensor(memory_.view(offsets.shape(), DType::i32), offsets, stream);
  stream.record(*arrived_);
  is_under_way_ = true;
}

std::shared_ptr<const std::vector<std::int64_t>> ExpertRows::get() {
  if (!is_under_way_) return rows_;
  is_under_way_ = false;
  arrived_->wait_on_host();
  const auto* offsets = reinterpret_cast<const std::int32_t*>(memory_.data());
  std::vector<std::int64_t> rows(memory_.bytes() / byte_size(DType::i32) - 1);
  for (std::size_t e = 0; e < rows.size(); ++e)
    rows[e] = offsets[e + 1] - offsets[e];
  rows_ = std::make_shared<const std::vector<std::int64_t>>(std::move(rows));
  return rows_;
}

}  // namespace moesaic
