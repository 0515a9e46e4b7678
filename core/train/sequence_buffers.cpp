#include "core/train/sequence_buffers.h"

#include <algorithm>
#include <cstring>

#include "kernels/ops/vocab_loss.h"

namespace moesaic {
namespace {
constexpr int kRows = 5;  // tokens, targets, positions, mtp tokens, mtp targets; then cu
}

// Rounded up, so that micro-batches side by side all start where kernels like it.
std::size_t SequenceBuffers::bytes_for(std::int64_t most_tokens) noexcept {
  constexpr std::size_t kAlignment = 256;
  const std::size_t bytes = static_cast<std::size_t>(kRows * most_tokens + most_tokens + 1) * 4;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

SequenceBuffers::SequenceBuffers(std::int64_t most_tokens,
                                 TensorView host,
                                 TensorView device,
                                 bool with_mtp)
    : with_mtp_(with_mtp), most_tokens_(most_tokens), host_(host), device_(device) {
  MOESAIC_CHECK(host.bytes() >= bytes_for(most_tokens) && device.bytes() >= bytes_for(most_tokens),
                "memory for fewer tokens");
}

void SequenceBuffers::load(const data::Batch& batch, Stream& stream) {
  const auto tokens = static_cast<std::int64_t>(batch.tokens.size());
  MOESAIC_CHECK(tokens <= most_tokens_, "the batch does not fit its buffers");
  auto* host = host_.as<std::int32_t>();
  const auto t = batch.tokens.size();
  std::memcpy(host, batch.tokens.data(), t * 4);
  std::memcpy(host + t, batch.labels.data(), t * 4);
  std::memcpy(host + 2 * t, batch.positions.data(), t * 4);
  std::int32_t* mtp_tokens = host + 3 * t;
  std::int32_t* mtp_targets = host + 4 * t;
  // Positions without an MTP target still pass the module and count in its router's statistics, as in the golden cases.
  num_mtp_targets_ = 0;
  num_valid_targets_ = batch.valid_labels;
  for (std::size_t i = 0; i < t; ++i) {
    // Position i sees token i+1 and predicts token i+2, all of one document (SPEC 8.1); the rest is masked. What it sees
    // then still reaches the router's counts, so it must not depend on which sequences share a micro-batch.
    const bool inside = i + 1 < t && batch.positions[i + 1] != 0;
    mtp_tokens[i] = inside ? batch.tokens[i + 1] : data::kEndOfText;
    mtp_targets[i] = inside ? batch.labels[i + 1] : kIgnoredTarget;
    num_mtp_targets_ += mtp_targets[i] != kIgnoredTarget ? 1 : 0;
  }
  std::memcpy(host + kRows * t, batch.cu.data(), batch.cu.size() * 4);
  const std::int64_t used = kRows * tokens + static_cast<std::int64_t>(batch.cu.size());
  const TensorView all = device_.rows(0, used);
  copy_tensor(all, host_.rows(0, used), stream);
  const auto row = [&](std::int64_t r) { return all.rows(r * tokens, (r + 1) * tokens); };
  sequence_ = {};
  sequence_.tokens = row(0);
  sequence_.targets = row(1);
  sequence_.positions = row(2);
  if (with_mtp_) {
    sequence_.mtp_tokens = row(3);
    sequence_.mtp_targets = row(4);
  }
  sequence_.cu = all.rows(kRows * tokens, used);
}

}  // namespace moesaic
