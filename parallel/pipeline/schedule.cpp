#include "parallel/pipeline/schedule.h"

#include <fmt/format.h>

#include "core/base/error.h"
#include "parallel/pipeline/orders.h"
#include "parallel/pipeline/validate.h"

namespace moesaic::pipeline {

const char* name(Kind kind) noexcept {
  constexpr const char* kNames[] = {"gpipe", "1f1b", "interleaved", "zero_bubble", "vertical"};
  return kNames[static_cast<std::size_t>(kind)];
}

Placement::Placement(Form form, int stages, int chunks_per_rank)
    : form_(form), stages_(stages), chunks_of_(static_cast<std::size_t>(stages)) {
  MOESAIC_CHECK(stages >= 1 && chunks_per_rank >= 1, "a pipeline without stages or chunks");
  for (int chunk = 0; chunk < stages * chunks_per_rank; ++chunk) {
    const bool is_way_back = form == Form::vee && chunk / stages % 2 == 1;
    const int rank = is_way_back ? stages - 1 - chunk % stages : chunk % stages;
    rank_of_.push_back(rank);
    chunks_of_[static_cast<std::size_t>(rank)].push_back(chunk);
  }
}

int Placement::rank_of(int chunk) const {
  MOESAIC_CHECK(0 <= chunk && chunk < num_chunks(), "no such chunk");
  return rank_of_[static_cast<std::size_t>(chunk)];
}

const std::vector<int>& Placement::chunks_of(int rank) const {
  MOESAIC_CHECK(0 <= rank && rank < stages_, "no such rank");
  return chunks_of_[static_cast<std::size_t>(rank)];
}

char letter(Work work) noexcept {
  constexpr char kLetters[] = {'F', 'B', 'B', 'W', 'X'};
  return kLetters[static_cast<std::size_t>(work)];
}

std::string to_string(const Message& m) {
  return fmt::format("{} {} at boundary {} of micro-batch {} {} rank {}",
                     m.is_send ? "send" : "receive",
                     m.payload == Payload::activation ? "activation" : "gradient",
                     m.boundary,
                     m.micro_batch,
                     m.is_send ? "to" : "from",
                     m.peer);
}

std::string to_string(const Action& action) {
  if (!action.is_exchange()) {
    constexpr const char* kWords[] = {"forward", "backward", "backward-input", "backward-weight"};
    return fmt::format("{} of micro-batch {} through chunk {}",
                       kWords[static_cast<std::size_t>(action.work)],
                       action.micro_batch,
                       action.chunk);
  }
  std::string text;
  for (const Message& m : action.messages)
    text += (text.empty() ? "" : " + ") + to_string(m);
  return text.empty() ? "empty exchange" : text;
}

std::string size_problem(Kind kind, const Sizes& sizes) {
  const auto at_least_one = [](const char* what, int value) {
    return fmt::format("{} {}: at least 1", value, what);
  };
  if (sizes.stages < 1) return at_least_one("stages", sizes.stages);
  if (sizes.chunks < 1) return at_least_one("chunks per rank", sizes.chunks);
  if (sizes.micro_batches < 1) return at_least_one("micro-batches", sizes.micro_batches);
  if (kind == Kind::one_f_one_b && sizes.chunks != 1)
    return fmt::format(
        "1f1b holds one chunk per rank, not {}. Nearest valid: 1, or schedule interleaved",
        sizes.chunks);
  if (kind == Kind::interleaved && sizes.chunks < 2)
    return "interleaved needs several chunks per rank, not 1. Nearest valid: 2, or schedule 1f1b";
  if (kind == Kind::zero_bubble && sizes.chunks > 2)
    return fmt::format(
        "zero_bubble holds one chunk per rank (ZB-H1) or two (ZB-V), not {}. Nearest "
        "valid: 2",
        sizes.chunks);
  if (kind == Kind::vertical && sizes.stages != 1)
    return fmt::format("vertical is the order of one stage, not of {}. Nearest valid: 1",
                       sizes.stages);
  const int group = sizes.in_a_group();
  if (sizes.pieces < 1 || group % sizes.pieces != 0 || sizes.micro_batches % group != 0)
    return fmt::format(
        "{} micro-batches are not groups of {}, each of them runs of {} pieces: every one of these "
        "numbers is a multiple of the next",
        sizes.micro_batches,
        group,
        sizes.pieces);
  if (kind != Kind::vertical && (sizes.pieces > 1 || sizes.together > 0))
    return fmt::format("{} does not know pieces of micro-batches; only vertical does", name(kind));
  return "";
}

Schedule make_schedule(Kind kind, const Sizes& sizes) {
  if (const std::string problem = size_problem(kind, sizes); !problem.empty())
    throw UsageError("pipeline schedule: " + problem);
  const bool is_vee = kind == Kind::zero_bubble && sizes.chunks == 2;
  Schedule schedule{
      .kind = kind,
      .sizes = sizes,
      .placement = Placement(
          is_vee ? Placement::Form::vee : Placement::Form::loop, sizes.stages, sizes.chunks),
      .ranks = {}};
  schedule.ranks = with_exchanges(kind == Kind::zero_bubble
                                      ? zero_bubble_order(schedule.placement, sizes.micro_batches)
                                      : fixed_order(kind, sizes),
                                  schedule.placement);
  validate(schedule);
  return schedule;
}

}  // namespace moesaic::pipeline
