#include "core/nn/token_slices.h"

#include <stdexcept>

#include "memory/buffer.h"
#include "tests/support/catch.h"

namespace moesaic {
namespace {

void fail_unless(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(what);
}

}  // namespace

TEST_CASE(
    "Cut tokens are gathered in the order of ranks, and every rank gets the sum for its own") {
  constexpr int kRanks = 3;
  constexpr std::int64_t kTokens = 6, kWidth = 2, kOwn = kTokens / kRanks;
  run_local_ranks(kRanks, [&](Communicator& group) {
    const TokenSlices slices(group.rank(), kRanks, &group);
    Stream stream(kCpu, "token slices");
    const Buffer memory(64 * sizeof(double), kCpu, "test");
    const TensorView own = memory.view({kOwn, kWidth}, DType::f64),
                     all = memory.view({kTokens, kWidth}, DType::f64, 8 * sizeof(double));
    for (std::int64_t i = 0; i < own.numel(); ++i)
      own.as<double>()[i] = static_cast<double>(group.rank() * own.numel() + i);
    slices.gather(all, own, stream);
    stream.synchronize();
    for (std::int64_t i = 0; i < all.numel(); ++i)
      fail_unless(all.as<double>()[i] == static_cast<double>(i), "a run is not in its place");
    fail_unless(
        slices.own_rows(all).as<double>()[0] == static_cast<double>(group.rank() * kOwn * kWidth),
        "not the rank's own run");
    for (std::int64_t i = 0; i < all.numel(); ++i)
      all.as<double>()[i] = static_cast<double>(i * (group.rank() + 1));
    slices.sum_to_own(own, all, stream);
    stream.synchronize();
    for (std::int64_t i = 0; i < own.numel(); ++i)
      fail_unless(own.as<double>()[i] ==
                      static_cast<double>((group.rank() * own.numel() + i) * (1 + 2 + 3)),
                  "not the sum of all ranks");
  });
}

TEST_CASE("Tokens that do not divide among the ranks are refused") {
  const TokenSlices slices(0, 4, nullptr);
  CHECK(slices.own(8) == 2);
  CHECK_THROWS_AS(slices.own(6), InternalError);
}

}  // namespace moesaic
