#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace moesaic::pipeline {

/// Pipeline schedules as data. A *chunk* is a contiguous range of layers that one rank holds; chunks are
/// numbered in the order of the model, over all ranks. Boundary c lies between chunks c and c + 1.
///
///   gpipe        all forwards, then all backwards; every micro-batch is in flight
///   one_f_one_b  one backward as soon as one is ready; at most `stages` micro-batches in flight
///   interleaved  the same over several chunks per rank, dealt out in turn
///   zero_bubble  backward in two parts, gradients of weights fill what would be idle: ZB-H1 with one chunk
///                per rank, ZB-V with two (down the ranks and up again)
///   vertical     one rank: every chunk passes all micro-batches before the next one begins, backward likewise from the
///                last chunk to the first; what stands at the boundaries of all micro-batches is kept
enum class Kind : std::uint8_t { gpipe, one_f_one_b, interleaved, zero_bubble, vertical };
const char* name(Kind kind) noexcept;

struct Sizes {
  int stages = 1;         ///< ranks of the pipeline
  int chunks = 1;         ///< per rank
  int micro_batches = 1;  ///< of a step
  /// vertical: in the last chunk each micro-batch turns round at once, so that the chunk keeps one of them, not all.
  bool turns_at_end = false;
  /// vertical: so many successive micro-batches hang together, each on those before it: a chunk's backward takes them from
  /// the last to the first. The last chunk, where each turns round at once, does not.
  int pieces = 1;
  /// vertical: so many pass all chunks, forward and backward, before the next ones begin; 0 = all.
  int together = 0;
  int num_chunks() const noexcept { return stages * chunks; }
  int in_a_group() const noexcept { return together > 0 ? together : micro_batches; }
};

/// Which rank holds which chunk.
class Placement {
 public:
  enum class Form : std::uint8_t {
    loop,  ///< 0, 1, … stages - 1, 0, 1, …
    vee,   ///< 0, 1, … stages - 1, stages - 1, … 1, 0: first and last chunk on one rank
  };
  Placement(Form form, int stages, int chunks_per_rank);
  Form form() const noexcept { return form_; }
  int stages() const noexcept { return stages_; }
  int num_chunks() const noexcept { return static_cast<int>(rank_of_.size()); }
  int rank_of(int chunk) const;
  /// In the order of the model.
  const std::vector<int>& chunks_of(int rank) const;
  /// Whether what passes the boundary is a message; else both of its chunks are on one rank.
  bool is_crossed(int boundary) const { return rank_of(boundary) != rank_of(boundary + 1); }

 private:
  Form form_;
  int stages_;
  std::vector<int> rank_of_;
  std::vector<std::vector<int>> chunks_of_;
};

/// activation: the bundle after chunk `boundary`; gradient: what backward returns for it.
enum class Payload : std::uint8_t { activation, gradient };

/// One end of the transfer of a bundle.
struct Message {
  bool is_send = false;
  Payload payload = Payload::activation;
  int boundary = 0;
  int micro_batch = 0;
  int peer = 0;  ///< rank of the pipeline
  bool operator==(const Message&) const = default;
};

enum class Work : std::uint8_t {
  forward,
  backward,         ///< gradients of inputs and of weights
  backward_input,   ///< of inputs alone
  backward_weight,  ///< of weights alone, after backward_input
  exchange,         ///< bundles
};
/// F, B (also for backward_input), W, X.
char letter(Work work) noexcept;

struct Action {
  Work work = Work::forward;
  int chunk = 0;        ///< not for an exchange
  int micro_batch = 0;  ///< not for an exchange
  /// Of an exchange: posted together, so that none waits for another (Communicator::exchange()); the next
  /// action may wait for all of them. Between two ranks, messages arrive in the order of the lists.
  std::vector<Message> messages;
  bool is_exchange() const noexcept { return work == Work::exchange; }
  bool operator==(const Action&) const = default;
};
std::string to_string(const Message& message);
std::string to_string(const Action& action);

/// What each rank does in a step, in order.
struct Schedule {
  Kind kind = Kind::one_f_one_b;
  Sizes sizes;
  Placement placement{Placement::Form::loop, 1, 1};
  std::vector<std::vector<Action>> ranks;
};

/// Empty, or why the schedule does not exist for these sizes, with the nearest valid values.
std::string size_problem(Kind kind, const Sizes& sizes);

/// Throws UsageError with the size_problem(). The result has passed validate().
Schedule make_schedule(Kind kind, const Sizes& sizes);

}  // namespace moesaic::pipeline
