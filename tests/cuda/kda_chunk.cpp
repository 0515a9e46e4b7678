#include "kernels/ops/kda_chunk.h"

#include "tests/cuda/kda_support.h"

namespace moesaic::test {
namespace {

// These tests are of the plain kernels, whatever else takes some of the sizes.
struct PlainBackends : BothBackends {
  PlainBackends() { std::get<CudaContext>(cuda.backend()).path = KernelPath::plain; }
};

// Both sides compute a chunk in the accumulation type from the same operands; the order of sums differs, and results are
// rounded to bf16. dg and dbeta are differences of large sums.
double row_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 2e-5 : 1e-3;
}
double state_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : 2e-5;
}
double difference_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-11 : 2e-4;
}

std::string describe(const KdaCase& c) {
  std::string text = "documents";
  for (const auto border : c.cu)
    text += " " + std::to_string(border);
  return text + ", heads " + std::to_string(c.heads) + " x " + std::to_string(c.K) + " x " +
         std::to_string(c.V) + ", chunk " + std::to_string(c.chunk_size) + ", " + name(c.dtype) +
         ", states " + std::to_string(c.states) + " saved " + std::to_string(c.saved) + " gates " +
         std::to_string(static_cast<int>(c.gates)) + " keys " +
         std::to_string(static_cast<int>(c.keys)) + " in place " + std::to_string(c.in_place);
}

void check(BothBackends& both, const KdaCase& c) {
  INFO(describe(c));
  const KdaTwins t(c);
  const auto poison = [&] { both.cuda.scratch().poison(both.cuda.stream()); };
  std::vector<Output> outputs{{&t.o, row_tolerance(c.dtype)}};
  if (c.states) outputs.push_back({c.in_place ? &t.s0 : &t.s_final, state_tolerance(c.dtype)});
  require_cuda_matches_cpu(both, t.all(), outputs, [&](auto side) {
    poison();
    return kda_forward(c, t, side);
  });

  // `saved` has a layout of its own on every device: each side's backward reads what its forward left.
  OwnedTensor host_saved, device_saved;
  if (c.saved) {
    host_saved = OwnedTensor(t.saved.host.view().shape(), t.saved.host.view().dtype());
    device_saved = OwnedTensor(t.saved.host.view().shape(), t.saved.host.view().dtype(), kCuda);
    for (const auto* twin : t.all())
      twin->reset(both.cuda.stream());
    auto forward = [&](Backend& backend, auto side) { run(backend, kda_forward(c, t, side)); };
    forward(both.cpu.backend(), [](const Twin& x) { return x.host.view(); });
    forward(both.cuda.backend(), [](const Twin& x) { return x.device.view(); });
    copy_tensor(device_saved.view(), t.saved.device.view(), both.cuda.stream());
    both.cuda.stream().synchronize();
    std::memcpy(host_saved.view().data(), t.saved.host.view().data(), host_saved.view().bytes());
  }
  outputs = {{&t.dq, row_tolerance(c.dtype)},
             {&t.dk, row_tolerance(c.dtype)},
             {c.in_place ? &t.d_o : &t.dv, row_tolerance(c.dtype)},
             {&t.dg, difference_tolerance(c.dtype)},
             {&t.dbeta, difference_tolerance(c.dtype)}};
  if (c.states) outputs.push_back({c.in_place ? &t.ds_final : &t.ds0, state_tolerance(c.dtype)});
  require_cuda_matches_cpu(both, t.all(), outputs, [&](auto side) {
    poison();
    const bool on_host = side(t.q).data() == t.q.host.view().data();
    const ConstTensorView saved = !c.saved  ? ConstTensorView()
                                  : on_host ? host_saved.view()
                                            : device_saved.view();
    return kda_backward(c, t, side, saved);
  });
}

const DType kTypes[] = {DType::f64, DType::f32, DType::bf16};

}  // namespace

TEST_CASE("KDA chunks on CUDA match the CPU for all lengths of documents", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  PlainBackends both;
  const std::vector<std::vector<std::int32_t>> documents = {{0, 1},
                                                            {0, 15},
                                                            {0, 16},
                                                            {0, 17},
                                                            {0, 33},
                                                            {0, 48},
                                                            {0, 63},
                                                            {0, 64},
                                                            {0, 65},
                                                            {0, 130},
                                                            {0, 0},
                                                            {0, 0, 0, 3, 3, 20, 84, 149, 149},
                                                            {0, 1, 2, 3, 66, 66, 130}};
  int flags = 0;
  for (const auto& cu : documents) {
    for (const int chunk : {16, 32, 48, 64}) {
      for (const auto dtype : kTypes) {
        ++flags;
        check(both,
              {cu,
               2,
               40,
               24,
               chunk,
               dtype,
               flags % 3 != 0,
               flags % 2 == 0,
               KdaGates::bounded,
               KdaKeys::random,
               flags % 5 == 0});
      }
    }
  }
}

TEST_CASE("KDA chunks on CUDA match the CPU for all sizes of heads", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  PlainBackends both;
  const std::vector<std::int32_t> cu = {0, 70, 70, 199};
  const std::int64_t sizes[][3] = {
      {1, 1, 1}, {2, 7, 3}, {3, 33, 20}, {1, 64, 64}, {2, 128, 128}, {1, 40, 130}, {1, 200, 36}};
  int flags = 0;
  for (const auto& s : sizes) {
    for (const auto dtype : kTypes) {
      ++flags;
      check(
          both,
          {cu, s[0], s[1], s[2], flags % 4 == 0 ? 32 : 64, dtype, flags % 3 != 0, flags % 2 == 0});
    }
  }
}

TEST_CASE("KDA chunks on CUDA: states of the first and the last document alone", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  PlainBackends both;
  for (const auto dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const std::int64_t size : {20, 128}) {
      for (const bool saved : {false, true}) {
        check(both,
              {.cu = {0, 40, 41, 150},
               .heads = 2,
               .K = size,
               .V = size,
               .chunk_size = 64,
               .dtype = dtype,
               .saved = saved,
               .ends = true});
      }
    }
  }
}

TEST_CASE("KDA chunks on CUDA: states too large for shared memory", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  PlainBackends both;
  check(both, {{0, 40, 75}, 2, 800, 40, 32, DType::f32});
  check(both, {{0, 40, 75}, 1, 800, 20, 64, DType::f64, true, false});
}

TEST_CASE("KDA chunks on CUDA match the CPU for all gates and for similar keys", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  PlainBackends both;
  for (const auto gates :
       {KdaGates::bounded, KdaGates::tiny, KdaGates::softplus, KdaGates::extreme}) {
    for (const auto keys : {KdaKeys::random, KdaKeys::same}) {
      for (const auto dtype : kTypes) {
        for (const int chunk : {16, 64}) {
          check(both, {{0, 150, 279}, 2, 64, 64, chunk, dtype, true, chunk == 16, gates, keys});
        }
      }
    }
  }
}

TEST_CASE("KDA chunks on CUDA match the CPU for a large shape", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  PlainBackends both;
  check(both, {{0, 300, 301, 1100}, 4, 128, 128, 64, DType::bf16});
  check(both, {{0, 300, 301, 700}, 4, 128, 128, 64, DType::f32, true, false, KdaGates::softplus});
}

TEST_CASE("A document's KDA on CUDA has the same bits packed and alone, whatever comes later",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  PlainBackends both;
  for (const auto dtype : {DType::f32, DType::bf16}) {
    for (const int chunk : {32, 64}) {
      const KdaCase c{{0, 77, 77, 78, 270}, 2, 72, 40, chunk, dtype, true, false};
      INFO(describe(c));
      const KdaTwins t(c);
      const auto device = [](const Twin& x) { return x.device.view(); };
      const auto run_all = [&] {
        run(both.cuda.backend(), kda_forward(c, t, device));
        run(both.cuda.backend(), kda_backward(c, t, device, {}));
      };
      const std::vector<const Twin*> results = {&t.o, &t.dq, &t.dk, &t.dv, &t.dg, &t.dbeta};
      const std::vector<const Twin*> states = {&t.s_final, &t.ds0};
      for (const auto* twin : t.all())
        twin->reset(both.cuda.stream());
      run_all();
      std::vector<OwnedTensor> packed, packed_states;
      for (const auto* twin : results)
        packed.push_back(download(twin->device.view(), both.cuda.stream()));
      for (const auto* twin : states)
        packed_states.push_back(download(twin->device.view(), both.cuda.stream()));

      for (std::int64_t n = 0; n < c.documents(); ++n) {
        const std::int64_t begin = c.cu[static_cast<std::size_t>(n)],
                           end = c.cu[static_cast<std::size_t>(n) + 1];
        KdaCase one = c;
        one.cu = {0, static_cast<std::int32_t>(end - begin)};
        const Twin cu({2}, DType::i32);
        std::copy(one.cu.begin(), one.cu.end(), cu.initial.data<std::int32_t>());
        cu.reset(both.cuda.stream());
        const auto part = [&](const Twin& x) {
          if (&x == &t.cu) return cu.device.view();
          const bool state = &x == &t.s0 || &x == &t.s_final || &x == &t.ds_final || &x == &t.ds0;
          return state ? x.device.view().rows(n, n + 1) : x.device.view().rows(begin, end);
        };
        run(both.cuda.backend(), kda_forward(one, t, part));
        run(both.cuda.backend(), kda_backward(one, t, part, {}));
        for (std::size_t i = 0; i < results.size(); ++i)
          CHECK(same_bits(download(part(*results[i]), both.cuda.stream()).view(),
                          packed[i].view().rows(begin, end)));
        for (std::size_t i = 0; i < states.size(); ++i)
          CHECK(same_bits(download(part(*states[i]), both.cuda.stream()).view(),
                          packed_states[i].view().rows(n, n + 1)));
      }

      // Another token, inside a chunk and a tile: no output before it changes.
      const std::int64_t changed = 78 + 90;
      for (const auto* twin : {&t.q, &t.k, &t.v}) {
        const auto row = twin->device.view().rows(changed, changed + 1);
        copy_tensor(row, twin->device.view().rows(3, 4), both.cuda.stream());
      }
      run(both.cuda.backend(), kda_forward(c, t, device));
      const auto after = download(t.o.device.view(), both.cuda.stream());
      CHECK(same_bits(after.view().rows(0, changed), packed[0].view().rows(0, changed)));
      CHECK_FALSE(same_bits(after.view().rows(changed, changed + 1),
                            packed[0].view().rows(changed, changed + 1)));
    }
  }
}

}  // namespace moesaic::test
