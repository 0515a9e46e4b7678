#pragma once
// What the files of the conformance suite share. Catch2's macros may not be used from several threads: cases throw.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "comm/communicator.h"
#include "memory/buffer.h"
#include "tests/comm/conformance.h"

namespace moesaic::test {

std::span<const ConformanceCase> move_cases();   ///< conformance_moves.cpp
std::span<const ConformanceCase> group_cases();  ///< conformance_groups.cpp

inline void expect(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

// Elements of type T where the communicator works: a copy of host values, and the way back.
template <class T>
class Values {
 public:
  Values(const std::vector<T>& host, Device device)
      : stream_(device, "test values"),
        host_(host),
        memory_(std::max<std::size_t>(1, host.size() * sizeof(T)), device, "test") {
    copy_tensor(view(), host_view(), stream_);
    stream_.synchronize();
  }
  TensorView view() const {
    return memory_.view({static_cast<std::int64_t>(host_.size())}, dtype_of<T>);
  }
  /// Once the work on the elements is done.
  const std::vector<T>& get() {
    copy_tensor(host_view(), view(), stream_);
    stream_.synchronize();
    return host_;
  }

 private:
  TensorView host_view() {
    return {reinterpret_cast<std::byte*>(host_.data()),
            dtype_of<T>,
            {static_cast<std::int64_t>(host_.size())}};
  }
  Stream stream_;
  std::vector<T> host_;
  Buffer memory_;
};

template <class T>
TensorView view_of(std::vector<T>& v) {
  return {
      reinterpret_cast<std::byte*>(v.data()), dtype_of<T>, {static_cast<std::int64_t>(v.size())}};
}

template <class T>
void expect_equal(const std::vector<T>& found, const std::vector<T>& wanted, const char* what) {
  expect(found.size() == wanted.size(),
         fmt::format("{}: {} elements, expected {}", what, found.size(), wanted.size()));
  for (std::size_t i = 0; i < found.size(); ++i) {
    expect(std::memcmp(&found[i], &wanted[i], sizeof(T)) == 0,
           fmt::format("{}: element {} is {}, expected {}",
                       what,
                       i,
                       static_cast<double>(found[i]),
                       static_cast<double>(wanted[i])));
  }
}

}  // namespace moesaic::test
