// Sparse MLA on CUDA: the plain kernels against the CPU in every dtype, and what the ops promise, on the plain kernels and
// on those of large models.
#include <algorithm>

#include "tests/ops/sparse_mla_support.h"
#include "tests/support/catch.h"
#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

using namespace attention_test;

struct Widths {
  std::int64_t heads, dc, dr;
};
struct How {
  DType compute = DType::f32;
  KernelPath path = KernelPath::automatic;
  KeySums key_sums = KeySums::integer;
  const char* runs = "plain";
  bool backward_of_last = false;  ///< also of fewer queries than keys
};

Precision precision_of(DType compute) {
  return compute == DType::f64 ? kF64 : compute == DType::f32 ? kF32 : kBf16;
}

bool same(const Values& a, const Values& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}
bool same(const SparseMlaOutputs& a, const SparseMlaOutputs& b) {
  return same(a.o, b.o) && same(a.lse, b.lse) && same(a.max_logit, b.max_logit) &&
         same(a.dq, b.dq) && same(a.dkv, b.dkv);
}
Values part(const Values& v, std::int64_t begin, std::int64_t rows, std::int64_t width) {
  return {v.begin() + begin * width, v.begin() + (begin + rows) * width};
}

class Device : private PathObserver {
 public:
  Device() : owner_({.device = kCuda, .scratch_bytes = std::size_t{2} << 30, .name = "cuda"}) {
    context().paths = this;
  }

  /// Both ops, twice from poisoned memory: the same bits, unless floats are added in any order.
  SparseMlaOutputs run(const SparseMlaProblem& p, const How& how) {
    const SparseMlaOutputs first = once(p, how), second = once(p, how);
    if (how.key_sums == KeySums::integer) CHECK(same(first, second));
    return first;
  }

  // What sparse_mla_ops() makes tensors by.
  TensorView floats(const Values& values, Shape shape, DType dtype) {
    const OwnedTensor host(shape, dtype);
    dispatch_float(dtype, [&]<class T>(TypeTag<T>) {
      for (std::size_t i = 0; i < values.size(); ++i)
        host.data<T>()[i] = T(static_cast<acc_t<T>>(values[i]));
    });
    return copy(host.view());
  }
  TensorView ints(const Ints& values, Shape shape) {
    const OwnedTensor host(shape, DType::i32);
    std::copy(values.begin(), values.end(), host.data<std::int32_t>());
    return copy(host.view());
  }
  TensorView poisoned(Shape shape, DType dtype) {
    tensors_.emplace_back(shape, dtype, kCuda);
    fill_bytes(tensors_.back().view(), 0xff, owner_.stream());
    return tensors_.back().view();
  }

 private:
  CudaContext& context() { return std::get<CudaContext>(owner_.backend()); }
  void ran(const char*, const char* path) override {
    ran_ += ran_.empty() ? path : std::string(", ") + path;
  }
  TensorView copy(TensorView host) {
    tensors_.emplace_back(host.shape(), host.dtype(), kCuda);
    copy_tensor(tensors_.back().view(), host, owner_.stream());
    owner_.stream().synchronize();
    return tensors_.back().view();
  }
  Values get(ConstTensorView v) {
    return attention_test::read(download(v, owner_.stream()).view());
  }
  SparseMlaOutputs once(const SparseMlaProblem& p, const How& how) {
    context().path = how.path;
    ran_.clear();
    SparseMlaOps ops = sparse_mla_ops(*this, p, precision_of(how.compute), how.backward_of_last);
    const bool backward = !ops.backward.dq.empty();
    owner_.scratch().poison(owner_.stream());
    moesaic::run(owner_.backend(), ops.forward);
    SparseMlaOutputs r{
        get(ops.forward.o), get(ops.forward.lse), get(ops.forward.max_logit), {}, {}};
    if (backward) {
      ops.backward.key_sums = how.key_sums;
      owner_.scratch().poison(owner_.stream());
      moesaic::run(owner_.backend(), ops.backward);
      r.dq = get(ops.backward.dq);
      r.dkv = get(ops.backward.dkv);
    }
    owner_.stream().synchronize();
    tensors_.clear();
    CHECK(ran_ == (backward ? std::string(how.runs) + ", " + how.runs : how.runs));
    return r;
  }

  BackendOwner owner_;
  std::vector<OwnedTensor> tensors_;
  std::string ran_;
};

// f64, f32: only the order of sums and exp() differ from the CPU's. bf16: results are rounded on both sides, and
// gradients are formed from an output that may differ in its last bit.
double tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 5e-6 : 4e-3;
}
// `keys` 1: softmax over one key has no gradient, so that dq is the rounding error of a difference of numbers near 1.
void check_close(const SparseMlaOutputs& got,
                 const SparseMlaOutputs& want,
                 double limit,
                 std::int64_t keys) {
  CHECK(distance(got.o, want.o) <= limit);
  CHECK(distance(got.lse, want.lse) <= std::min(limit, 1e-5));
  CHECK(distance(got.max_logit, want.max_logit) <= std::min(limit, 1e-5));
  if (keys > 1) {
    CHECK(distance(got.dq, want.dq) <= limit);
  } else {
    CHECK(std::all_of(
        got.dq.begin(), got.dq.end(), [&](double x) { return std::abs(x) <= 100 * limit; }));
  }
  CHECK(distance(got.dkv, want.dkv) <= limit);
}

constexpr How kPlain{.compute = DType::f32, .path = KernelPath::plain};
struct Subject {
  const char* name;
  Widths widths;
  How how;
};
constexpr How kTiled{.compute = DType::bf16, .runs = "tiled"};
// Four queries of 16 heads share a block of threads, so do four of 3; two blocks share a query of 70.
const Subject kSubjects[] = {{"plain", {3, 6, 5}, kPlain},
                             {"automatic, 16 heads", {16, 512, 64}, kTiled},
                             {"automatic, 3 heads", {3, 512, 64}, kTiled}};

}  // namespace

TEST_CASE("Sparse MLA on CUDA: backward of the last queries against all keys so far", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Device device;
  const auto check = [&](const SparseMlaProblem& whole, const How& how) {
    const std::int64_t cuts[][2] = {{100, 259}, {1, 130}, {131, 195}};
    for (const auto& [begin, end] : cuts) {
      const SparseMlaProblem p{piece_of(whole.expanded, begin, end),
                               rows_of(whole.kv, 0, end, whole.width())};
      INFO("queries " << begin << " to " << end << ", " << name(how.compute) << ", " << how.runs);
      check_close(device.run(p, how),
                  run_sparse_mla(p, precision_of(how.compute), 2, true),
                  how.compute == DType::bf16 ? 1e-2 : tolerance(how.compute),
                  whole.expanded.k);
    }
  };
  const SparseMlaProblem small = make_sparse_mla({130, 65, 0, 63, 1}, 2, 6, 4, 20);
  for (const auto dtype : {DType::f64, DType::f32, DType::bf16})
    check(small, {.compute = dtype, .path = KernelPath::plain, .backward_of_last = true});
  check(make_sparse_mla({130, 65, 0, 63, 1}, 16, 512, 64, 48),
        {.compute = DType::bf16, .runs = "tiled", .backward_of_last = true});
}

TEST_CASE("Sparse MLA on CUDA (plain) matches the CPU, packed, in every dtype", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Device device;
  for (const Ints& lengths : {Ints{1}, Ints{65}, Ints{0, 5, 0, 70, 1, 64, 0}}) {
    for (const std::int64_t k : {1, 9, 300}) {
      for (const Widths& w : {Widths{3, 6, 5}, Widths{1, 8, 0}, Widths{4, 40, 24}}) {
        const SparseMlaProblem p = make_sparse_mla(lengths, w.heads, w.dc, w.dr, k);
        for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
          INFO(p.expanded.tk << " tokens, k " << k << ", width " << w.dc << " + " << w.dr << ", "
                             << name(dtype));
          How how = kPlain;
          how.compute = dtype;
          const SparseMlaOutputs want = run_sparse_mla(p, precision_of(dtype), 2);
          check_close(device.run(p, how), want, tolerance(dtype), k);
          how.key_sums = KeySums::float_atomics;
          check_close(device.run(p, how), want, tolerance(dtype), k);
        }
      }
    }
  }
}

TEST_CASE("Sparse MLA on CUDA (tiled) matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Device device;
  for (const std::int64_t heads : {1, 16, 24, 32, 48, 64, 70}) {
    for (const std::int64_t k : {1, 40, 64, 130}) {
      if (heads != 16 && (k == 1 || k == 64)) continue;
      const Ints lengths = k == 64 ? Ints{131} : Ints{0, 5, 1, 0, 70, 67};
      const SparseMlaProblem p = make_sparse_mla(lengths, heads, 512, 64, k);
      INFO(heads << " heads, k " << k);
      const SparseMlaOutputs want = run_sparse_mla(p, kF64, 2), got = device.run(p, kTiled);
      CHECK(distance(got.o, want.o) <= 5e-3);
      CHECK(distance(got.lse, want.lse) <= 1e-5);
      CHECK(distance(got.max_logit, want.max_logit) <= 1e-5);
      CHECK(distance(got.dq, want.dq) <= 1.5e-2);
      CHECK(distance(got.dkv, want.dkv) <= 1.5e-2);
      How floats = kTiled;
      floats.key_sums = KeySums::float_atomics;
      CHECK(distance(device.run(p, floats).dkv, got.dkv) <= 4e-3);
      std::printf("sparse mla tiled, %2d heads, k %3d: o %.1e lse %.1e dq %.1e dkv %.1e\n",
                  static_cast<int>(heads),
                  static_cast<int>(k),
                  distance(got.o, want.o),
                  distance(got.lse, want.lse),
                  distance(got.dq, want.dq),
                  distance(got.dkv, want.dkv));
    }
  }
}

TEST_CASE("Sparse MLA on CUDA: no tokens, and fewer queries than keys", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Device device;
  for (const auto& subject : kSubjects) {
    INFO(subject.name);
    const Widths& w = subject.widths;
    const SparseMlaProblem none = make_sparse_mla({}, w.heads, w.dc, w.dr, 3);
    for (const double m : device.run(none, kPlain).max_logit)
      CHECK(m == -std::numeric_limits<double>::infinity());
    for (const std::int64_t queries : {1, 7, 66}) {
      SparseMlaProblem p = make_sparse_mla({40, 0, 150}, w.heads, w.dc, w.dr, 20);
      auto& e = p.expanded;
      e.q.erase(e.q.begin(), e.q.end() - queries * w.heads * p.width());
      e.selected.erase(e.selected.begin(), e.selected.end() - queries * 20);
      e.tq = queries;
      const SparseMlaOutputs want = run_sparse_mla(p), got = device.run(p, subject.how);
      CHECK(distance(got.o, want.o) <= (subject.how.compute == DType::bf16 ? 5e-3 : 3e-6));
      CHECK(distance(got.lse, want.lse) <= 1e-5);
    }
  }
}

TEST_CASE("Sparse MLA on CUDA: rows without keys and keys that are not visible", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Device device;
  for (const auto& subject : kSubjects) {
    INFO(subject.name);
    const Widths& w = subject.widths;
    SparseMlaProblem p = make_sparse_mla({20, 150}, w.heads, w.dc, w.dr, 3);
    auto& selected = p.expanded.selected;
    for (const int row : {0, 5, 100})
      std::fill_n(selected.begin() + row * 3, 3, -1);
    selected[6 * 3] = 19;  // not visible to row 6, nor is another document to row 25
    selected[6 * 3 + 1] = selected[6 * 3 + 2] = -1;
    selected[25 * 3] = 2;
    selected[25 * 3 + 1] = selected[25 * 3 + 2] = -1;
    const SparseMlaOutputs r = device.run(p, subject.how), want = run_sparse_mla(p);
    for (const std::int64_t row : {0, 5, 100, 6, 25}) {
      CHECK(part(r.o, row, 1, w.heads * w.dc) == Values(w.heads * w.dc, 0));
      CHECK(part(r.dq, row, 1, w.heads * p.width()) == Values(w.heads * p.width(), 0));
      CHECK(r.lse[static_cast<std::size_t>(row)] == -std::numeric_limits<double>::infinity());
    }
    const bool rounds = subject.how.compute == DType::bf16;
    CHECK(distance(r.o, want.o) <= (rounds ? 5e-3 : 3e-6));
    CHECK(distance(r.dkv, want.dkv) <= (rounds ? 1.5e-2 : 5e-6));
  }
}

TEST_CASE("Sparse MLA on CUDA: a document in a pack gives the bits it gives alone", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Device device;
  for (const auto& subject : kSubjects) {
    const Widths& w = subject.widths;
    for (const int length : {1, 77, 200}) {
      for (const std::int64_t k : {3, 90}) {
        INFO(subject.name << ", " << length << " tokens, k " << k);
        SparseMlaProblem alone = make_sparse_mla({length}, w.heads, w.dc, w.dr, k);
        SparseMlaProblem pack = make_sparse_mla({33, length, 50}, w.heads, w.dc, w.dr, k, 1234);
        const auto put = [](Values& to, const Values& from, std::int64_t width) {
          std::copy(from.begin(), from.end(), to.begin() + 33 * width);
        };
        put(pack.expanded.q, alone.expanded.q, w.heads * alone.width());
        put(pack.expanded.d_o, alone.expanded.d_o, w.heads * w.dc);
        put(pack.kv, alone.kv, alone.width());
        for (std::size_t i = 0; i < alone.expanded.selected.size(); ++i) {
          const auto s = alone.expanded.selected[i];
          pack.expanded.selected[static_cast<std::size_t>(33 * k) + i] = s < 0 ? s : s + 33;
        }
        const SparseMlaOutputs a = device.run(alone, subject.how),
                               b = device.run(pack, subject.how);
        CHECK(same(part(b.o, 33, length, w.heads * w.dc), a.o));
        CHECK(same(part(b.dq, 33, length, w.heads * alone.width()), a.dq));
        // The unit of the sums is that of the whole call.
        CHECK(distance(part(b.dkv, 33, length, alone.width()), a.dkv) <= 2e-5);
      }
    }
  }
}

TEST_CASE("Sparse MLA on CUDA: sums of key gradients neither overflow nor hide what is not finite",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Device device;
  for (const auto& subject : kSubjects) {
    INFO(subject.name);
    const Widths& w = subject.widths;
    const SparseMlaProblem p = make_sparse_mla({90}, w.heads, w.dc, w.dr, 70);
    const SparseMlaOutputs want = run_sparse_mla(p);
    const double limit = subject.how.compute == DType::bf16 ? 1.5e-2 : 5e-6;
    for (const int power : {-100, -20, 20, 100}) {
      const double size = std::ldexp(1.0, power);  // of the cotangent
      SparseMlaProblem scaled = p;
      for (auto& x : scaled.expanded.d_o)
        x *= size;
      SparseMlaOutputs got = device.run(scaled, subject.how);
      for (auto* v : {&got.dq, &got.dkv})
        for (auto& x : *v)
          x /= size;
      INFO("cotangent of size " << size);
      CHECK(distance(got.dq, want.dq) <= limit);
      CHECK(distance(got.dkv, want.dkv) <= limit);
    }
    // All keys, queries and cotangents alike: every contribution has the same sign.
    SparseMlaProblem alike = p;
    for (auto* v : {&alike.expanded.q, &alike.expanded.d_o, &alike.kv})
      std::fill(v->begin(), v->end(), 2.0);
    expand(alike);
    CHECK(distance(device.run(alike, subject.how).dkv, run_sparse_mla(alike).dkv) <= limit);
    for (const double bad :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      for (int which = 0; which < 3; ++which) {
        SparseMlaProblem broken = p;
        (which == 0   ? broken.expanded.q
         : which == 1 ? broken.expanded.d_o
                      : broken.kv)[static_cast<std::size_t>(40 * p.width())] = bad;
        INFO("input " << which << " holds " << bad);
        const Values dkv = device.run(broken, subject.how).dkv;
        CHECK(std::all_of(dkv.begin(), dkv.end(), [](double x) { return std::isnan(x); }));
      }
    }
    // Nothing to add at all.
    SparseMlaProblem still = p;
    std::fill(still.expanded.d_o.begin(), still.expanded.d_o.end(), 0.0);
    const Values dkv = device.run(still, subject.how).dkv;
    CHECK(std::all_of(dkv.begin(), dkv.end(), [](double x) { return x == 0; }));
  }
}

}  // namespace moesaic::test
