#pragma once
// Grouped products for tests: routing, operands on both devices, and the ops on them.
#include <string>
#include <vector>

#include "kernels/ops/grouped_gemm.h"
#include "tests/support/device_tensors.h"

namespace moesaic::test {

/// Which expert has how many rows, and where its weights are.
struct Routing {
  std::vector<std::int32_t> rows;   ///< of each expert
  std::vector<std::int32_t> slots;  ///< of each expert
  std::int64_t num_slots = 0;
  std::int64_t spare_rows = 0;  ///< allocated after the last expert's

  std::vector<std::int32_t> offsets() const {
    std::vector<std::int32_t> result{0};
    for (const auto r : rows)
      result.push_back(result.back() + r);
    return result;
  }
  std::int64_t rows_in_use() const { return offsets().back(); }
  std::int64_t rows_bound() const { return rows_in_use() + spare_rows; }
};
/// Expert e has slot 2 e (e + 2 experts if that is past the end): permuted, with slots that nobody uses.
inline Routing routing_of(std::vector<std::int32_t> rows, std::int64_t spare_rows) {
  Routing r;
  const auto experts = static_cast<std::int32_t>(rows.size());
  r.num_slots = experts + 3;
  for (std::int32_t e = 0; e < experts; ++e)
    r.slots.push_back((experts - 1 - e + 2) % static_cast<std::int32_t>(r.num_slots));
  r.rows = std::move(rows);
  r.spare_rows = spare_rows;
  return r;
}

inline void fill_ints(const TensorView& view, const std::vector<std::int32_t>& values) {
  for (std::size_t i = 0; i < values.size(); ++i)
    view.as<std::int32_t>()[i] = values[i];
}
/// All bits set: NaN in every floating type.
inline void poison(TensorView view) {
  std::memset(view.data(), 0xff, view.bytes());
}

struct PathLog : PathObserver {
  void ran(const char*, const char* path) override { last = path; }
  std::string last;
};

/// Chooses the kernels of a CUDA backend and notes which ran, until it goes.
class PathChoice {
 public:
  PathChoice(BackendOwner& owner, KernelPath path)
      : context_(std::get<CudaContext>(owner.backend())) {
    context_.path = path;
    context_.paths = &log_;
  }
  ~PathChoice() {
    context_.path = KernelPath::automatic;
    context_.paths = nullptr;
  }
  PathChoice(const PathChoice&) = delete;
  PathChoice& operator=(const PathChoice&) = delete;
  const std::string& ran() const { return log_.last; }

 private:
  CudaContext& context_;
  PathLog log_;
};

/// Random operands of all three ops; rows that no expert has are NaN, in results they are what they were.
struct GroupedTensors {
  GroupedTensors(
      const Routing& routing, std::int64_t n, std::int64_t k, DType operand, DType result)
      : x({routing.rows_bound(), k}, operand),
        dy({routing.rows_bound(), n}, operand),
        w({routing.num_slots, n, k}, operand),
        y({routing.rows_bound(), n}, result),
        dx({routing.rows_bound(), k}, result),
        dw({routing.num_slots, n, k}, result),
        offsets({static_cast<std::int64_t>(routing.rows.size()) + 1}, DType::i32),
        slots({static_cast<std::int64_t>(routing.rows.size())}, DType::i32) {
    fill_normal(x.initial.view(), 1);
    fill_normal(dy.initial.view(), 2);
    fill_normal(w.initial.view(), 3, 0.25);
    // As large as what is added, so that a result that is not accumulated is far off.
    const double spread = 0.25 * std::sqrt(static_cast<double>(k));
    fill_normal(y.initial.view(), 4, spread);
    fill_normal(dx.initial.view(), 5, spread);
    fill_normal(dw.initial.view(), 6, 5.0);
    fill_ints(offsets.initial.view(), routing.offsets());
    fill_ints(slots.initial.view(), routing.slots);
    poison(x.initial.view().rows(routing.rows_in_use(), routing.rows_bound()));
    poison(dy.initial.view().rows(routing.rows_in_use(), routing.rows_bound()));
  }
  std::vector<const Twin*> all() const { return {&x, &dy, &w, &y, &dx, &dw, &offsets, &slots}; }

  template <class Side>
  GroupedLinearForward forward(const Side& side, bool accumulate) const {
    return {.y = side(y),
            .x = side(x),
            .w = side(w),
            .offsets = side(offsets),
            .slot_of_expert = side(slots),
            .accumulate = accumulate};
  }
  template <class Side>
  GroupedLinearBackwardInput backward_input(const Side& side, bool accumulate) const {
    return {.dx = side(dx),
            .dy = side(dy),
            .w = side(w),
            .offsets = side(offsets),
            .slot_of_expert = side(slots),
            .accumulate = accumulate};
  }
  template <class Side>
  GroupedLinearBackwardWeight backward_weight(const Side& side) const {
    return {.dw = side(dw),
            .dy = side(dy),
            .x = side(x),
            .offsets = side(offsets),
            .slot_of_expert = side(slots)};
  }

  Twin x, dy, w, y, dx, dw, offsets, slots;
};

}  // namespace moesaic::test
