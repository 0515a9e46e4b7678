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
                                  const Transfer& plan) {
  Stream& stream = stream_of(backend);
  Arena& scratch = scratch_of(backend);
  const Arena::Mark mark(scratch);
  const int ranks = options.grid.ranks();
  const auto num = static_cast<std::int64_t>(pieces.size());
  const std::int64_t runs = most_runs();
  // Sums of a rank's runs, in their order.
  const Shape shape{ranks * runs, num};
  const TensorView sent = scratch.take(shape, DType::i64, "exchange.sent_sums"),
                   came = scratch.take(shape, DType::i64, "exchange.sums"),
                   found = scratch.take(shape, DType::i64, "exchange.found_sums");
  AllToAllPlan sums;
  sums.row_bytes = num * 8;
  for (int p = 0; p < ranks; ++p) {
    for (auto* offsets : {&sums.send_offset, &sums.recv_offset})
      offsets->push_back(p * runs);
  }
  sums.send_rows.assign(static_cast<std::size_t>(ranks), 0);
  sums.recv_rows = sums.send_rows;
  // What each run's sums are about.
  std::vector<const RowRun*> about(static_cast<std::size_t>(ranks * runs), nullptr);
  const auto add = [&](const RowRun& run,
                       std::vector<std::int64_t>& rows,
                       const TensorView& to,
                       const auto& piece_of) {
    if (run.peer == rank) return;
    const std::int64_t nth = rows[static_cast<std::size_t>(run.peer)]++, at = run.peer * runs + nth;
    MOESAIC_CHECK(nth < runs, "more runs of rows between two ranks than there can be");
    for (std::int64_t i = 0; i < num; ++i) {
      const ConstTensorView all = piece_of(pieces[static_cast<std::size_t>(i)]);
      moesaic::run(backend,
                   ByteChecksum{.sum = to.rows(at, at + 1).reshaped({num}).rows(i, i + 1),
                                .x = all.rows(run.first, run.first + run.rows)});
    }
    if (&to == &found) about[static_cast<std::size_t>(at)] = &run;
  };
  for (const RowRun& run : plan.sends)
    add(run, sums.send_rows, sent, [](const Piece& piece) { return piece.in; });
  for (const RowRun& run : plan.receives)
    add(run, sums.recv_rows, found, [](const Piece& piece) { return ConstTensorView(piece.out); });
  if (group != nullptr) group->all_to_all(came, sent, sums, stream);
  if (stream.mode() == Stream::Mode::dry) return;
  std::vector<std::int64_t> host(static_cast<std::size_t>(2 * came.numel()));
  const TensorView copies(reinterpret_cast<std::byte*>(host.data()), DType::i64, {2, came.numel()});
  copy_tensor(copies.rows(0, 1).reshaped(shape), came, stream);
  copy_tensor(copies.rows(1, 2).reshaped(shape), found, stream);
  stream.synchronize();
  for (std::size_t at = 0; at < about.size(); ++at) {
    if (about[at] == nullptr) continue;
    for (std::int64_t i = 0; i < num; ++i) {
      const std::size_t of = at * static_cast<std::size_t>(num) + static_cast<std::size_t>(i);
      if (host[of] == host[of + static_cast<std::size_t>(came.numel())]) continue;
      const Piece& piece = pieces[static_cast<std::size_t>(i)];
      throw damaged(place,
                    fmt::format("{} of {} rows of {} {}",
                                piece.what,
                                about[at]->rows,
                                piece.in.dim(1),
                                name(piece.in.dtype())),
                    about[at]->peer,
                    *this);
    }
  }
}

}  // namespace moesaic
