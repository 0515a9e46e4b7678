// The tensor-core kernels of the KDA chunk form against the CPU op in f64, on operands that bf16 and f32 hold exactly.
#include <cstdlib>
#include <functional>

#include "kernels/ops/kda_chunk.h"
#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

constexpr std::int64_t kDim = 128;

// Bounds for bf16 operands with f32 sums: 4e-3 to 6e-3 is usual for o and the states, more where
// keys repeat. Slices (one head, the last chunk of the longest document) have fewer elements to average over.
// SPEC 1.5 measures 1.1e-2 to 1.6e-2 for such operands where keys are equal: updates of the state nearly cancel there, their
// roundings do not.
constexpr double kOutput = 1e-2, kOutputOfSimilarKeys = 1.6e-2, kOperandGradient = 1.5e-2,
                 kScalarGradient = 2e-2, kSlice = 1.5;

enum class Gate { usual, slow, none, bounded, mixed, extreme };
enum class Keys { random, similar };

struct Case {
  std::vector<std::int32_t> cu;
  std::int64_t heads = 2;
  Gate gate = Gate::usual;
  Keys keys = Keys::random;
  bool s0 = true, ds_final = true, saved = false;
  bool equal_heads = false;  ///< every head holds the values of the first
  bool ends = false;         ///< states of the first and of the last document alone
  std::int64_t tokens() const { return cu.back(); }
  std::int64_t documents() const { return static_cast<std::int64_t>(cu.size()) - 1; }
  std::int64_t states() const { return ends ? 1 : documents(); }
};

double uniform(std::uint64_t key, std::int64_t i) {
  return 0.5 * std::erfc(-standard_normal(key, static_cast<std::uint64_t>(i)) / std::sqrt(2.0));
}
double log_decay(Gate gate, std::int64_t i) {
  const double u = uniform(77, i), x = uniform(78, i);
  switch (gate) {
    case Gate::usual:
      return -0.5 * u;
    case Gate::slow:
      return -1e-3 * u;
    case Gate::none:
      return 0.0;
    case Gate::bounded:
      return -5.0 / (1 + std::exp(-6.0 * (u - 0.5) * 4));  // often nearly -5
    case Gate::mixed:
      return x < 0.1 ? -30.0 * u : x < 0.2 ? -5.0 * u : -0.1 * u;
    case Gate::extreme:
      return x < 0.05 ? -1600.0 * u : x < 0.06 ? -std::numeric_limits<float>::max() : -0.05 * u;
  }
  return 0.0;
}

/// A tensor in f64 whose values `narrow` holds too. With `equal_heads` every head gets the values of the first, and nothing
/// in f64.
struct Exact {
  Exact() = default;
  Exact(Shape shape,
        DType narrow_type,
        bool equal_heads,
        const std::function<double(std::int64_t)>& value)
      : narrow(shape, narrow_type), device(shape, narrow_type, kCuda) {
    if (!equal_heads) wide = OwnedTensor(shape, DType::f64);
    const std::int64_t width = shape.rank == 2   ? 1
                               : shape.rank == 3 ? shape[2]
                                                 : shape[2] * shape[3];
    dispatch_float(narrow_type, [&]<class T>(TypeTag<T>) {
      for (std::int64_t i = 0; i < shape.numel(); ++i) {
        const bool copied = equal_heads && i / width % shape[1] != 0;
        narrow.data<T>()[i] = copied ? narrow.data<T>()[i - width] : T(value(i));
        if (!equal_heads) wide.data<double>()[i] = static_cast<double>(narrow.data<T>()[i]);
      }
    });
  }
  OwnedTensor wide, narrow, device;
};

/// Of [.., heads, ..]: the errors over everything, of the worst head, of rows from `from` on.
struct Errors {
  double all = 0, head = 0, tail = 0;
};
Errors errors_of(ConstTensorView got, const double* want, std::int64_t heads, std::int64_t from) {
  Errors e;
  const std::int64_t rows = got.dim(0), width = rows == 0 ? 0 : got.numel() / rows / heads;
  dispatch_float(got.dtype(), [&]<class T>(TypeTag<T>) {
    const auto error = [&](std::int64_t first_row, std::int64_t first_head, std::int64_t end_head) {
      double difference = 0, norm = 0;
      for (std::int64_t r = first_row; r < rows; ++r) {
        for (std::int64_t i = (r * heads + first_head) * width; i < (r * heads + end_head) * width;
             ++i) {
          const double d = static_cast<double>(got.as<T>()[i]) - want[i];
          difference += d * d;
          norm += want[i] * want[i];
        }
      }
      if (!std::isfinite(difference)) return static_cast<double>(INFINITY);
      return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
    };
    e.all = error(0, 0, heads);
    for (std::int64_t h = 0; h < heads; ++h)
      e.head = std::max(e.head, error(0, h, h + 1));
    e.tail = error(from, 0, heads);
  });
  return e;
}

struct Paths : PathObserver {
  void ran(const char*, const char* path) override { last = path; }
  std::string last;
};

class Run {
 public:
  explicit Run(const Case& c) : c_(c) {
    const std::int64_t T = c.tokens(), H = c.heads, N = c.documents();
    const auto normal = [](std::uint64_t key, double spread) {
      return [=](std::int64_t i) {
        return spread * standard_normal(key, static_cast<std::uint64_t>(i));
      };
    };
    q_ = Exact({T, H, kDim}, DType::bf16, c.equal_heads, normal(1, 1.0 / kDim));
    if (c.keys == Keys::random) {
      k_ = Exact({T, H, kDim}, DType::bf16, c.equal_heads, normal(2, 1 / std::sqrt(double{kDim})));
    } else {  // cosine about 0.97
      k_ = Exact({T, H, kDim}, DType::bf16, c.equal_heads, [&](std::int64_t i) {
        const auto own = static_cast<std::uint64_t>(i),
                   common = static_cast<std::uint64_t>(i % (H * kDim));
        return (0.985 * standard_normal(3, common) + 0.17 * standard_normal(2, own)) /
               std::sqrt(double{kDim});
      });
    }
    v_ = Exact({T, H, kDim}, DType::bf16, c.equal_heads, normal(4, 1));
    d_o_ = Exact({T, H, kDim}, DType::bf16, c.equal_heads, normal(5, 1));
    g_ = Exact({T, H, kDim}, DType::f32, c.equal_heads, [&](std::int64_t i) {
      return log_decay(c.gate, i);
    });
    beta_ = Exact({T, H}, DType::f32, c.equal_heads, [&](std::int64_t i) {
      return c.keys == Keys::similar ? 0.9 + 0.099 * uniform(6, i)
             : i % 97 == 13          ? 0.0
                                     : 0.02 + 0.96 * uniform(6, i);
    });
    s0_ = Exact({c.states(), H, kDim, kDim}, DType::f32, c.equal_heads, normal(7, 0.3));
    ds_final_ = Exact({c.states(), H, kDim, kDim}, DType::f32, c.equal_heads, normal(8, 0.3));
    cu_ = OwnedTensor({N + 1}, DType::i32);
    cu_device_ = OwnedTensor({N + 1}, DType::i32, kCuda);
    std::copy(c.cu.begin(), c.cu.end(), cu_.data<std::int32_t>());
  }

  template <class Pick>
  static KdaChunkForward forward(const Run& r,
                                 const Pick& pick,
                                 TensorView o,
                                 TensorView s_final,
                                 TensorView saved,
                                 ConstTensorView cu) {
    return {.o = o,
            .s_final = s_final,
            .saved = saved,
            .q = pick(r.q_),
            .k = pick(r.k_),
            .v = pick(r.v_),
            .g = pick(r.g_),
            .beta = pick(r.beta_),
            .s0 = r.c_.s0 ? pick(r.s0_) : TensorView(),
            .cu_seqlens = cu};
  }
  const Case& spec() const { return c_; }

  struct Results {
    OwnedTensor o, s_final, dq, dk, dv, dg, dbeta, ds0;
    Results(const Case& c, DType t, DType a, Device d)
        : o({c.tokens(), c.heads, kDim}, t, d),
          s_final({c.states(), c.heads, kDim, kDim}, a, d),
          dq({c.tokens(), c.heads, kDim}, t, d),
          dk({c.tokens(), c.heads, kDim}, t, d),
          dv({c.tokens(), c.heads, kDim}, t, d),
          dg({c.tokens(), c.heads, kDim}, a, d),
          dbeta({c.tokens(), c.heads}, a, d),
          ds0({c.states(), c.heads, kDim, kDim}, a, d) {}
    std::vector<const OwnedTensor*> all() const {
      return {&o, &s_final, &dq, &dk, &dv, &dg, &dbeta, &ds0};
    }
  };
  template <class RunForward, class RunBackward, class Pick>
  void both(const Results& r,
            TensorView saved,
            ConstTensorView cu,
            const Pick& pick,
            const RunForward& run_forward,
            const RunBackward& run_backward) const {
    run_forward(forward(*this, pick, r.o.view(), r.s_final.view(), saved, cu));
    run_backward(KdaChunkBackward{.dq = r.dq.view(),
                                  .dk = r.dk.view(),
                                  .dv = r.dv.view(),
                                  .dg = r.dg.view(),
                                  .dbeta = r.dbeta.view(),
                                  .ds0 = r.ds0.view(),
                                  .d_o = pick(d_o_),
                                  .ds_final = c_.ds_final ? pick(ds_final_) : TensorView(),
                                  .q = pick(q_),
                                  .k = pick(k_),
                                  .v = pick(v_),
                                  .g = pick(g_),
                                  .beta = pick(beta_),
                                  .s0 = c_.s0 ? pick(s0_) : TensorView(),
                                  .saved = saved,
                                  .cu_seqlens = cu});
  }

  /// In f64 on the host.
  Results reference(BackendOwner& cpu) const {
    Results r(c_, DType::f64, DType::f64, kCpu);
    const auto run_op = [&](const auto& op) { run(cpu.backend(), op); };
    both(
        r, {}, cu_.view(), [](const Exact& x) { return x.wide.view(); }, run_op, run_op);
    cpu.stream().synchronize();
    return r;
  }
  /// On the device; the results come back to the host. `change` may alter the operands first.
  Results device(BackendOwner& cuda) const {
    for (const Exact* x : {&q_, &k_, &v_, &d_o_, &g_, &beta_, &s0_, &ds_final_})
      copy_tensor(x->device.view(), x->narrow.view(), cuda.stream());
    copy_tensor(cu_device_.view(), cu_.view(), cuda.stream());
    const Results r(c_, DType::bf16, DType::f32, kCuda);
    const Results host(c_, DType::bf16, DType::f32, kCpu);
    for (const auto* x : host.all())
      std::memset(x->view().data(), 0xff, x->view().bytes());
    const auto on_device = r.all(), on_host = host.all();
    for (std::size_t i = 0; i < on_device.size(); ++i)
      copy_tensor(on_device[i]->view(), on_host[i]->view(), cuda.stream());
    OwnedTensor saved;
    if (c_.saved)
      saved = OwnedTensor({kda_saved_numel(c_.tokens(), c_.documents(), c_.heads, kDim, kDim, 64)},
                          DType::f32,
                          kCuda);
    Paths paths;
    std::get<CudaContext>(cuda.backend()).paths = &paths;
    const auto run_op = [&](const auto& op) {
      cuda.scratch().poison(cuda.stream());
      run(cuda.backend(), op);
      CHECK(paths.last == "tiled");
    };
    both(
        r,
        saved.view(),
        cu_device_.view(),
        [](const Exact& x) { return x.device.view(); },
        run_op,
        run_op);
    std::get<CudaContext>(cuda.backend()).paths = nullptr;
    for (std::size_t i = 0; i < on_device.size(); ++i)
      copy_tensor(on_host[i]->view(), on_device[i]->view(), cuda.stream());
    cuda.stream().synchronize();
    return host;
  }

  Exact q_, k_, v_, d_o_, g_, beta_, s0_, ds_final_;

 private:
  Case c_;
  OwnedTensor cu_, cu_device_;
};

struct Backends {
  explicit Backends(std::size_t cpu_mebibytes = 256)
      : cpu({.device = kCpu,
             .mode = Stream::Mode::immediate,
             .num_threads = 16,
             .scratch_bytes = cpu_mebibytes << 20,
             .name = "cpu"}),
        cuda({.device = kCuda, .scratch_bytes = std::size_t{1} << 30, .name = "cuda"}) {}
  BackendOwner cpu, cuda;
};

void check_case(Backends& both, const Case& c) {
  const Run run(c);
  const auto want = run.reference(both.cpu), got = run.device(both.cuda);
  std::string label = "documents";
  for (std::size_t i = 1; i < c.cu.size(); ++i)
    label += " " + std::to_string(c.cu[i] - c.cu[i - 1]);
  label += ", heads " + std::to_string(c.heads) + ", gate " +
           std::to_string(static_cast<int>(c.gate)) + ", keys " +
           std::to_string(static_cast<int>(c.keys)) + (c.s0 ? ", s0" : "") +
           (c.ds_final ? ", ds_final" : "") + (c.saved ? ", saved" : "");
  INFO(label);
  std::int64_t longest = 0;
  for (std::int64_t n = 0; n < c.documents(); ++n) {
    const auto at = [&](std::int64_t i) { return c.cu[static_cast<std::size_t>(i)]; };
    if (at(n + 1) - at(n) > at(longest + 1) - at(longest)) longest = n;
  }
  const std::int64_t begin = c.cu[static_cast<std::size_t>(longest)],
                     end = c.cu[static_cast<std::size_t>(longest) + 1];
  const std::int64_t last_chunk = begin + (std::max<std::int64_t>(end - begin, 1) - 1) / 64 * 64;
  const char* names[] = {"o", "s_final", "dq", "dk", "dv", "dg", "dbeta", "ds0"};
  const double output = c.keys == Keys::similar ? kOutputOfSimilarKeys : kOutput;
  const double bounds[] = {output,
                           output,
                           kOperandGradient,
                           kOperandGradient,
                           kOperandGradient,
                           kScalarGradient,
                           kScalarGradient,
                           kOperandGradient};
  const auto g = got.all(), w = want.all();
  std::string line;
  for (std::size_t i = 0; i < g.size(); ++i) {
    INFO(names[i]);
    const bool per_token = g[i]->view().dim(0) == c.tokens() && i != 1 && i != 7;
    const Errors e =
        errors_of(g[i]->view(), w[i]->data<double>(), c.heads, per_token ? last_chunk : 0);
    char text[64];
    std::snprintf(text, sizeof text, " %s %.1e/%.1e/%.1e", names[i], e.all, e.head, e.tail);
    line += text;
    CHECK(e.all <= bounds[i]);
    CHECK(e.head <= kSlice * bounds[i]);
    CHECK(e.tail <= kSlice * bounds[i]);
  }
  if (std::getenv("MOESAIC_PRINT_ERRORS") != nullptr)
    std::printf("%s:%s\n", label.c_str(), line.c_str()), std::fflush(stdout);
}

}  // namespace

TEST_CASE("KDA tensor-core kernels: document lengths", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Backends both;
  for (const std::int32_t T : {1, 2, 15, 16, 17, 47, 63, 64, 65, 127, 128, 129, 191, 257, 449, 700})
    check_case(both,
               {.cu = {0, T},
                .heads = 1 + T % 5,
                .s0 = T % 2 == 0,
                .ds_final = T % 3 == 0,
                .saved = T % 4 == 1});
  check_case(both, {.cu = {0, 0, 5, 70, 70, 134, 300, 301, 301}, .heads = 3});
  check_case(both,
             {.cu = {0, 0, 5, 70, 70, 134, 300, 301, 301},
              .heads = 2,
              .s0 = false,
              .ds_final = false,
              .saved = true});
  Case many{.cu = {0}, .heads = 3};  // enough chains for blocks of four warps in each scan
  for (std::int32_t n = 0; n < 17; ++n)
    many.cu.push_back(many.cu.back() + n * 5 % 23);
  check_case(both, many);
  for (const bool saved : {false, true})
    check_case(both, {.cu = {0, 70, 134, 300}, .heads = 3, .saved = saved, .ends = true});
  check_case(both, {.cu = {0, 0, 0}, .heads = 2});
}

TEST_CASE("KDA tensor-core kernels: gates of any size", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Backends both;
  for (const Gate gate :
       {Gate::usual, Gate::slow, Gate::none, Gate::bounded, Gate::mixed, Gate::extreme}) {
    check_case(both, {.cu = {0, 330}, .heads = 2, .gate = gate});
    check_case(both,
               {.cu = {0, 200, 456},
                .heads = 3,
                .gate = gate,
                .s0 = false,
                .ds_final = false,
                .saved = true});
  }
}

TEST_CASE("KDA tensor-core kernels: similar keys and beta near 1", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Backends both;
  for (const Gate gate : {Gate::usual, Gate::slow, Gate::none})
    check_case(both, {.cu = {0, 500}, .heads = 2, .gate = gate, .keys = Keys::similar});
}

TEST_CASE("KDA tensor-core kernels: a long document", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Backends both(1024);
  check_case(both,
             {.cu = {0, 8192}, .heads = 4, .gate = Gate::slow, .s0 = false, .ds_final = false});
}

TEST_CASE("KDA tensor-core kernels: heads in groups", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Backends both;
  // More chunks times heads than scratch holds records at a time. Heads that hold the same must give the same.
  const Run run(Case{.cu = {0, 3000, 8300}, .heads = 33, .ds_final = false, .equal_heads = true});
  const auto results = run.device(both.cuda);
  for (const auto* x : results.all()) {
    const auto view = x->view();
    const std::int64_t rows = view.dim(0);
    const std::size_t head = view.bytes() / static_cast<std::size_t>(rows * 33);
    bool equal = true;
    for (std::int64_t i = 0; i < rows * 33; ++i) {
      const std::byte* at = view.data() + static_cast<std::size_t>(i) * head;
      equal = equal && (i % 33 == 0 || std::memcmp(at, at - head, head) == 0);
    }
    CHECK(equal);
    CHECK(std::isfinite(relative_error(view, view)));
  }
}

TEST_CASE("KDA tensor-core kernels: bits depend on the document's earlier tokens alone", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Backends both;
  const Case packed{.cu = {0, 77, 333, 333, 500}, .heads = 3, .gate = Gate::mixed};
  Run all(packed);
  const auto first = all.device(both.cuda), again = all.device(both.cuda);
  for (std::size_t i = 0; i < first.all().size(); ++i)
    CHECK(same_bits(first.all()[i]->view(), again.all()[i]->view()));

  SECTION("a document alone") {
    for (std::size_t n = 0; n + 1 < packed.cu.size(); ++n) {
      const std::int32_t begin = packed.cu[n], length = packed.cu[n + 1] - begin;
      if (length == 0) continue;
      Run one(Case{.cu = {0, length}, .heads = packed.heads, .gate = packed.gate});
      const auto copy = [&](const Exact& to, const Exact& from, std::int64_t row) {
        const auto source = from.narrow.view().rows(row, row + to.narrow.view().dim(0));
        std::memcpy(to.narrow.view().data(), source.data(), source.bytes());
      };
      copy(one.q_, all.q_, begin);
      copy(one.k_, all.k_, begin);
      copy(one.v_, all.v_, begin);
      copy(one.d_o_, all.d_o_, begin);
      copy(one.g_, all.g_, begin);
      copy(one.beta_, all.beta_, begin);
      copy(one.s0_, all.s0_, static_cast<std::int64_t>(n));
      copy(one.ds_final_, all.ds_final_, static_cast<std::int64_t>(n));
      const auto alone = one.device(both.cuda);
      for (std::size_t i = 0; i < alone.all().size(); ++i) {
        const std::int64_t row = i == 1 || i == 7 ? static_cast<std::int64_t>(n) : begin;
        const auto part = first.all()[i]->view().rows(row, row + alone.all()[i]->view().dim(0));
        INFO("document " << n << ", result " << i);
        CHECK(same_bits(alone.all()[i]->view(), part));
      }
    }
  }
  SECTION("later tokens") {
    for (const std::int64_t t : {78, 90, 140, 141, 200, 332, 400}) {
      const std::size_t n = t < 333 ? 1 : 3;
      Run changed(packed);
      for (std::int64_t r = t; r < packed.cu[n + 1]; ++r) {
        for (std::int64_t i = r * packed.heads * kDim; i < (r + 1) * packed.heads * kDim; ++i) {
          changed.q_.narrow.data<bf16>()[i] = bf16(0.3f);
          changed.k_.narrow.data<bf16>()[i] = bf16(-0.1f);
          changed.v_.narrow.data<bf16>()[i] = bf16(7.0f);
          changed.g_.narrow.data<float>()[i] = i % 3 == 0 ? -300.0f : -0.7f;
        }
      }
      const auto other = changed.device(both.cuda);
      INFO("tokens from " << t << " on changed");
      CHECK(same_bits(other.o.view().rows(0, t), first.o.view().rows(0, t)));
      const std::int64_t end = packed.cu[n + 1];
      CHECK(same_bits(other.o.view().rows(end, packed.tokens()),
                      first.o.view().rows(end, packed.tokens())));
      CHECK(!same_bits(other.o.view().rows(t, t + 1), first.o.view().rows(t, t + 1)));
    }
  }
}

}  // namespace moesaic::test
