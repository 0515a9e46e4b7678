#include "kernels/ops/rms_norm.h"
#include "memory/stream.h"
#include "tests/support/device_tensors.h"

namespace moesaic::test {

TEST_CASE("Copies and zeros on a CUDA stream keep every byte, for pageable and pinned host memory",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Stream stream(kCuda, "copy");
  for (const std::int64_t n : {1, 3, 4, 255, 4096, 4097, 65532, 65536, 65540, 10000001}) {
    for (const auto kind : {MemoryKind::pageable_host, MemoryKind::pinned_host}) {
      const OwnedTensor source({n}, DType::u8, kCpu, kind), back({n}, DType::u8, kCpu, kind),
          middle({n}, DType::u8, kCuda), other({n}, DType::u8, kCuda);
      for (std::int64_t i = 0; i < n; ++i)
        source.data<std::uint8_t>()[i] =
            static_cast<std::uint8_t>(mix64(static_cast<std::uint64_t>(i)) | 1);
      copy_tensor(middle.view(), source.view(), stream);
      copy_tensor(other.view(), middle.view(), stream);
      copy_tensor(back.view(), other.view(), stream);
      stream.synchronize();
      CHECK(same_bits(back.view(), source.view()));
      zero_tensor(other.view().rows(n / 2, n), stream);
      copy_tensor(back.view(), other.view(), stream);
      stream.synchronize();
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        if (back.data<std::uint8_t>()[i] != (i < n / 2 ? source.data<std::uint8_t>()[i] : 0))
          ++wrong;
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("A small copy to pinned memory passes the large ones of other CUDA streams", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  constexpr std::int64_t kLarge = std::int64_t{64} << 20;
  constexpr int kCopies = 16;  // some 20 ms
  Stream large_stream(kCuda, "large"), stream(kCuda, "small");
  const OwnedTensor large({kLarge}, DType::u8, kCuda),
      there({kLarge}, DType::u8, kCpu, MemoryKind::pinned_host), counts({64}, DType::i32, kCuda),
      here({64}, DType::i32, kCpu, MemoryKind::pinned_host);
  fill_bytes(counts.view(), 7, stream);
  stream.synchronize();
  Event end(kCuda);
  for (int i = 0; i < kCopies; ++i)
    copy_tensor(there.view(), large.view(), large_stream);
  large_stream.record(end);
  copy_tensor(here.view(), counts.view(), stream);
  stream.synchronize();
  CHECK_FALSE(end.reached());
  for (std::int64_t i = 0; i < 64; ++i)
    CHECK(here.data<std::int32_t>()[i] == 0x07070707);
  large_stream.synchronize();
  CHECK(end.reached());
}

// Stream a makes a value by long work, stream b reads it, a may only overwrite it after b has. A
// missing wait in either direction gives a wrong value.
TEST_CASE("Events order two CUDA streams in both directions", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  constexpr std::int64_t kNumElements = std::int64_t{16} << 20;
  constexpr int kRounds = 12;
  Stream a(kCuda, "a"), b(kCuda, "b");
  const OwnedTensor shared({kNumElements}, DType::i32, kCuda),
      scratch({kNumElements}, DType::i32, kCuda), read({kNumElements}, DType::i32, kCuda);
  std::vector<OwnedTensor> patterns, results;
  for (int r = 0; r < kRounds; ++r) {
    patterns.emplace_back(Shape{kNumElements}, DType::i32, kCpu, MemoryKind::pinned_host);
    results.emplace_back(Shape{2}, DType::i32, kCpu, MemoryKind::pinned_host);
    std::fill_n(patterns.back().data<std::int32_t>(), kNumElements, r + 1);
  }
  for (int r = 0; r < kRounds; ++r) {
    Event written(kCuda), consumed(kCuda);
    for (int i = 0; i < 4; ++i)
      zero_tensor(scratch.view(), a);
    copy_tensor(shared.view(), patterns[static_cast<std::size_t>(r)].view(), a);
    a.record(written);
    b.wait(written);
    copy_tensor(read.view(), shared.view(), b);
    const auto result = results[static_cast<std::size_t>(r)].view();
    copy_tensor(result.rows(0, 1), read.view().rows(0, 1), b);
    copy_tensor(result.rows(1, 2), read.view().rows(kNumElements - 1, kNumElements), b);
    b.record(consumed);
    a.wait(consumed);
    zero_tensor(shared.view(), a);
  }
  a.synchronize();
  b.synchronize();
  for (int r = 0; r < kRounds; ++r) {
    const auto* result = results[static_cast<std::size_t>(r)].data<std::int32_t>();
    CHECK(result[0] == r + 1);
    CHECK(result[1] == r + 1);
  }
}

TEST_CASE("A CUDA event is reached when never recorded and after the host has waited for it",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Stream stream(kCuda, "main");
  Event event(kCuda);
  CHECK(event.reached());
  const OwnedTensor big({std::int64_t{64} << 20}, DType::u8, kCuda);
  for (int i = 0; i < 16; ++i)
    zero_tensor(big.view(), stream);
  stream.record(event);
  event.wait_on_host();
  CHECK(event.reached());
}

// Two backends on one device share nothing but the tensors they are given: each has its own stream
// and scratch.
TEST_CASE("Two CUDA streams compute side by side what one computes alone", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  constexpr std::int64_t kRows = 3000, kHidden = 2048;
  const auto make = [](int id) {
    return BackendOwner::Options{.device = kCuda,
                                 .scratch_bytes = std::size_t{64} << 20,
                                 .name = "stream" + std::to_string(id)};
  };
  BackendOwner one(make(1)), two(make(2));
  struct Work {
    OwnedTensor x{{kRows, kHidden}, DType::f32, kCuda}, dy{{kRows, kHidden}, DType::f32, kCuda},
        dx{{kRows, kHidden}, DType::f32, kCuda}, weight{{kHidden}, DType::f32, kCuda},
        dweight{{kHidden}, DType::f32, kCuda}, y{{kRows, kHidden}, DType::f32, kCuda},
        inv_rms{{kRows}, DType::f32, kCuda};
  };
  const auto start = [&](const Work& w, std::uint64_t key, Stream& stream) {
    const OwnedTensor x({kRows, kHidden}, DType::f32), dy({kRows, kHidden}, DType::f32),
        weight({kHidden}, DType::f32);
    fill_normal(x.view(), key);
    fill_normal(dy.view(), key + 1);
    fill_normal(weight.view(), key + 2);
    copy_tensor(w.x.view(), x.view(), stream);
    copy_tensor(w.dy.view(), dy.view(), stream);
    copy_tensor(w.weight.view(), weight.view(), stream);
    zero_tensor(w.dweight.view(), stream);
    stream.synchronize();
  };
  const auto compute = [](const Work& w, Backend& backend) {
    for (int i = 0; i < 5; ++i) {
      run(backend,
          RmsNormForward{.y = w.y.view(),
                         .inv_rms = w.inv_rms.view(),
                         .x = w.x.view(),
                         .weight = w.weight.view()});
      run(backend,
          RmsNormBackward{.dx = w.dx.view(),
                          .dweight = w.dweight.view(),
                          .dy = w.dy.view(),
                          .x = w.x.view(),
                          .weight = w.weight.view(),
                          .inv_rms = w.inv_rms.view()});
    }
  };
  const Work first, second;
  start(first, 1, one.stream());
  start(second, 7, one.stream());
  compute(first, one.backend());
  compute(second, one.backend());
  const auto alone1 = download(first.dweight.view(), one.stream()),
             alone2 = download(second.dweight.view(), one.stream());
  start(first, 1, one.stream());
  start(second, 7, two.stream());
  compute(first, one.backend());
  compute(second, two.backend());
  CHECK(same_bits(download(first.dweight.view(), one.stream()).view(), alone1.view()));
  CHECK(same_bits(download(second.dweight.view(), two.stream()).view(), alone2.view()));
}

TEST_CASE("A dry run on CUDA measures the scratch that the real run needs", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  constexpr std::int64_t kRows = 1000, kHidden = 300;
  const OwnedTensor x({kRows, kHidden}, DType::f32, kCuda), dx({kRows, kHidden}, DType::f32, kCuda),
      weight({kHidden}, DType::f32, kCuda), dweight({kHidden}, DType::f32, kCuda),
      inv_rms({kRows}, DType::f32, kCuda);
  const RmsNormBackward op{.dx = dx.view(),
                           .dweight = dweight.view(),
                           .dy = x.view(),
                           .x = x.view(),
                           .weight = weight.view(),
                           .inv_rms = inv_rms.view()};
  BackendOwner dry({.device = kCuda, .mode = Stream::Mode::dry, .name = "dry"});
  run(dry.backend(), op);
  const std::size_t needed = dry.scratch().high_water_bytes();
  REQUIRE(needed > 256);
  BackendOwner enough({.device = kCuda, .scratch_bytes = needed, .name = "enough"});
  CHECK_NOTHROW(run(enough.backend(), op));
  enough.stream().synchronize();
  BackendOwner short_of_it({.device = kCuda, .scratch_bytes = needed - 256, .name = "short"});
  CHECK_THROWS_AS(run(short_of_it.backend(), op), ResourceError);
}

TEST_CASE("Running out of device memory names the tag and leaves the device usable", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  std::string message;
  try {
    const Buffer impossible(std::size_t{1} << 50, kCuda, "impossible");
  } catch (const ResourceError& e) {
    message = e.what();
  }
  CHECK(message.find("'impossible'") != std::string::npos);
  Stream stream(kCuda, "after");
  const OwnedTensor ok({16}, DType::i32, kCuda);
  zero_tensor(ok.view(), stream);
  CHECK(same_bits(download(ok.view(), stream).view(), OwnedTensor({16}, DType::i32).view()));
}

}  // namespace moesaic::test
