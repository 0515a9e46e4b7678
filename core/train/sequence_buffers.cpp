#include "core/train/sequence_buffers.h"

#include <algorithm>
#include <vector>

#include "kernels/ops/vocab_loss.h"

namespace moesaic {
namespace {
constexpr int kRows = 5;  // tokens, targets, positions, mtp tokens, mtp targets; then the documents
}  // namespace

// Rounded up, so that micro-batches side by side all start where kernels like it.
std::size_t SequenceBuffers::bytes_for(std::int64_t most_tokens, int pieces) noexcept {
  constexpr std::size_t kAlignment = 256;
  const std::int64_t own = most_tokens / pieces;
  // Of a piece, of what comes before it, and of the whole.
  const std::int64_t documents = pieces > 1 ? own + 2 * most_tokens + 3 : own + 1;
  const std::size_t bytes = static_cast<std::size_t>(kRows * own + documents) * 4;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

SequenceBuffers::SequenceBuffers(
    std::int64_t most_tokens, TensorView host, TensorView device, bool with_mtp, Piece piece)
    : with_mtp_(with_mtp), most_tokens_(most_tokens), piece_(piece), host_(host), device_(device) {
  MOESAIC_CHECK(host.bytes() >= bytes_for(most_tokens, piece.count) &&
                    device.bytes() >= bytes_for(most_tokens, piece.count),
                "memory for fewer tokens");
}

void SequenceBuffers::load(const data::Batch& batch, Stream& stream) {
  const auto whole = static_cast<std::int64_t>(batch.tokens.size());
  MOESAIC_CHECK(whole <= most_tokens_, "the batch does not fit its buffers");
  const std::vector<std::int64_t> cuts = equal_cuts(whole, piece_.count);
  ContextPiece piece = context_piece(batch.cu, cuts, piece_.index);
  if (!piece_.in_turn) piece.links.loan = query_loan(batch.cu, cuts, piece_.index);
  const auto begin = static_cast<std::size_t>(piece.begin),
             t = static_cast<std::size_t>(piece.end - piece.begin);
  auto* host = host_.as<std::int32_t>();
  const auto copy = [&](const std::vector<std::int32_t>& from, std::size_t at, std::size_t n) {
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(at), n, host);
    host += n;
  };
  copy(batch.tokens, begin, t);
  copy(batch.labels, begin, t);
  copy(batch.positions, begin, t);
  std::int32_t *mtp_tokens = host, *mtp_targets = host + t;
  host += 2 * t;
  // Positions without an MTP target still pass the module and count in its router's statistics, as in the golden cases.
  num_mtp_targets_ = num_valid_targets_ = 0;
  for (std::size_t i = 0; i < t; ++i) {
    // Position i sees token i+1 and predicts token i+2, all of one document (SPEC 8.1); the rest is masked. What it sees
    // then still reaches the router's counts, so it must not depend on which sequences share a micro-batch. Token i+1 may
    // be in the next piece.
    const std::size_t next = begin + i + 1;
    const bool inside = next < batch.tokens.size() && batch.positions[next] != 0;
    mtp_tokens[i] = inside ? batch.tokens[next] : data::kEndOfText;
    mtp_targets[i] = inside ? batch.labels[next] : kIgnoredTarget;
    num_mtp_targets_ += mtp_targets[i] != kIgnoredTarget ? 1 : 0;
    num_valid_targets_ += batch.labels[begin + i] != kIgnoredTarget ? 1 : 0;
  }
  copy(piece.cu, 0, piece.cu.size());
  if (piece_.count > 1) {
    copy(piece.keys, 0, piece.keys.size());
    copy(batch.cu, 0, batch.cu.size());
  }
  const QueryLoan& loan = piece.links.loan;
  std::vector<std::int32_t> lent;
  if (loan.helps())
    lent = documents_before(batch.cu, cuts[static_cast<std::size_t>(loan.partner)] + loan.rows);
  copy(lent, 0, lent.size());
  const std::int64_t used = host - host_.as<std::int32_t>();
  const TensorView all = device_.rows(0, used);
  copy_tensor(all, host_.rows(0, used), stream);
  std::int64_t at = 0;
  const auto next = [&](std::size_t n) {
    at += static_cast<std::int64_t>(n);
    return all.rows(at - static_cast<std::int64_t>(n), at);
  };
  sequence_ = {};
  sequence_.tokens = next(t);
  sequence_.targets = next(t);
  sequence_.positions = next(t);
  const TensorView further = next(2 * t);
  if (with_mtp_) {
    sequence_.mtp_tokens = further.rows(0, static_cast<std::int64_t>(t));
    sequence_.mtp_targets = further.rows(static_cast<std::int64_t>(t), further.dim(0));
  }
  sequence_.cu = next(piece.cu.size());
  if (piece_.count > 1) {
    sequence_.keys = next(piece.keys.size());
    sequence_.batch = next(batch.cu.size());
  }
  if (!lent.empty()) sequence_.lent = next(lent.size());
  sequence_.links = piece.links;
}

}  // namespace moesaic
