// Checksums of what an exchange moves, for looking for faults of network and libraries (ExchangeOptions::verify).
#include <fmt/format.h>

#include "parallel/dispatch/exchange_impl.h"

namespace moesaic {
namespace {

InternalError damaged(const ExpertExchange::Impl::Place& place,
                      const std::string& what,
                      int sender,
                      const ExpertExchange::Impl& self) {
  return InternalError(
      fmt::format("{}{}: {} that rank {} of the expert group sent to rank {} arrived damaged ({} "
                  "exchange); a link, its library or memory is at fault",
                  place.label.empty() ? "" : place.label + ", ",
                  place.hop,
                  what,
                  sender,
                  self.rank,
                  name(self.options.method)));
}

}  // namespace

void ExpertExchange::Impl::be_at(const ExchangePlan::Impl& plan,
                                 const char* what,
                                 std::size_t hop) {
  if (!options.verify) return;
  place.label = plan.label;
  place.hop = fmt::format("{}, hop {} of {}", what, hop + 1, hops.size);
}

void ExpertExchange::Impl::verify_counts(const ExchangePlan::Impl& plan, Backend& backend) {
  Stream& stream = stream_of(backend);
  Arena& scratch = scratch_of(backend);
  const Arena::Mark mark(scratch);
  const std::int64_t ranks = options.grid.ranks();
  const TensorView own = scratch.take({1}, DType::i64, "exchange.sent_sums"),
                   made = scratch.take({ranks}, DType::i64, "exchange.sums"),
                   found = scratch.take({ranks}, DType::i64, "exchange.found_sums");
  run(backend, ByteChecksum{.sum = own, .x = plan.counts});
  if (group != nullptr) group->all_gather(made, own, stream);
  for (std::int64_t p = 0; p < ranks; ++p)
    run(backend, ByteChecksum{.sum = found.rows(p, p + 1), .x = plan.all_counts.rows(p, p + 1)});
  if (stream.mode() == Stream::Mode::dry) return;
  std::vector<std::int64_t> host(static_cast<std::size_t>(2 * ranks));
  const TensorView copies(reinterpret_cast<std::byte*>(host.data()), DType::i64, {2, ranks});
  copy_tensor(copies.rows(0, 1).reshaped({ranks}), made, stream);
  copy_tensor(copies.rows(1, 2).reshaped({ranks}), found, stream);
  stream.synchronize();
  for (std::int64_t p = 0; p < ranks; ++p) {
    if (host[static_cast<std::size_t>(p)] == host[static_cast<std::size_t>(ranks + p)]) continue;
    throw damaged(place, "the counts", static_cast<int>(p), *this);
  }
}

void ExpertExchange::Impl::verify(Backend& backend,
                                  const std::vector<Piece>& pieces,
                                  const AllToAllPlan& plan) {
  Stream& stream = stream_of(backend);
  Arena& scratch = scratch_of(backend);
  const Arena::Mark mark(scratch);
  const auto num = static_cast<std::int64_t>(pieces.size());
  const Shape shape{options.grid.ranks(), num};
  const TensorView sent = scratch.take(shape, DType::i64, "exchange.sent_sums"),
                   came = scratch.take(shape, DType::i64, "exchange.sums"),
                   found = scratch.take(shape, DType::i64, "exchange.found_sums");
  zero_tensor(sent, stream);
  zero_tensor(found, stream);
  const auto sum = [&](const TensorView& sums, int p, std::int64_t i, ConstTensorView rows) {
    if (p == rank || rows.dim(0) == 0) return;
    run(backend,
        ByteChecksum{.sum = sums.rows(p, p + 1).reshaped({num}).rows(i, i + 1), .x = rows});
  };
  AllToAllPlan one_each;
  for (int p = 0; p < options.grid.ranks(); ++p) {
    const auto at = static_cast<std::size_t>(p);
    for (std::int64_t i = 0; i < num; ++i) {
      const Piece& piece = pieces[static_cast<std::size_t>(i)];
      const std::int64_t s = plan.send_offset[at], r = plan.recv_offset[at];
      sum(sent, p, i, piece.in.rows(s, s + plan.send_rows[at]));
      sum(found, p, i, piece.out.rows(r, r + plan.recv_rows[at]));
    }
    one_each.send_rows.push_back(1);
    one_each.recv_rows.push_back(1);
    one_each.send_offset.push_back(p);
    one_each.recv_offset.push_back(p);
  }
  one_each.row_bytes = num * 8;
  if (group != nullptr) group->all_to_all(came, sent, one_each, stream);
  if (stream.mode() == Stream::Mode::dry) return;
  std::vector<std::int64_t> host(static_cast<std::size_t>(2 * came.numel()));
  const TensorView copies(reinterpret_cast<std::byte*>(host.data()), DType::i64, {2, came.numel()});
  copy_tensor(copies.rows(0, 1).reshaped(shape), came, stream);
  copy_tensor(copies.rows(1, 2).reshaped(shape), found, stream);
  stream.synchronize();
  for (int p = 0; p < options.grid.ranks(); ++p) {
    for (std::int64_t i = 0; i < num; ++i) {
      const auto at = static_cast<std::size_t>(p * num + i);
      if (host[at] == host[at + static_cast<std::size_t>(came.numel())]) continue;
      const Piece& piece = pieces[static_cast<std::size_t>(i)];
      throw damaged(place,
                    fmt::format("{} of {} rows of {} {}",
                                piece.what,
                                plan.recv_rows[static_cast<std::size_t>(p)],
                                piece.in.dim(1),
                                name(piece.in.dtype())),
                    p,
                    *this);
    }
  }
}

}  // namespace moesaic
