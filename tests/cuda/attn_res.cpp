#include "kernels/ops/attn_res.h"

#include <deque>

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

DType acc_type(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}
// Orders of sums differ, also that of the softmax; one rounding at the end.
double elementwise_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 2e-5 : 1e-3;
}
double sum_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : 3e-5;
}

struct Size {
  std::int64_t tokens, d;
  int n;
};
// Sizes of the one-pass kernels (d a multiple of 8, up to 8192, up to 32 sources) and others.
const Size kSizes[] = {{1, 1, 1},
                       {0, 64, 2},
                       {5, 7, 3},
                       {33, 64, 2},
                       {40, 1032, 5},
                       {19, 2048, 9},
                       {35, 7168, 9},
                       {3, 8192, 32},
                       {4, 8200, 2},
                       {3, 64, 33},
                       {2, 24, 512},
                       {17000, 16, 2}};  // more than 1024 blocks of 16 tokens

class PathNames : public PathObserver {
 public:
  void ran(const char*, const char* path) override { last = path; }
  std::string last;
};

bool fits_one_pass(const Size& s, DType dtype) {
  return dtype == DType::bf16 && s.d % 8 == 0 && s.d <= 8192 && s.n <= 32;
}

struct Case {
  Case(const Size& s, DType dtype, DType weight_dtype)
      : size(s),
        h({s.tokens, s.d}, dtype),
        dh({s.tokens, s.d}, dtype),
        p({s.tokens, s.n}, acc_type(dtype)),
        query({s.d}, weight_dtype),
        norm({s.d}, weight_dtype),
        dquery({s.d}, acc_type(dtype)),
        dnorm({s.d}, acc_type(dtype)) {
    // Sources of very different sizes; the query makes the softmax anything from even to nearly one source.
    for (int i = 0; i < s.n; ++i) {
      sources.emplace_back(Shape{s.tokens, s.d}, dtype);
      fill_normal(sources.back().initial.view(), 100 + static_cast<std::uint64_t>(i), 0.1 + i % 7);
      gradients.emplace_back(Shape{s.tokens, s.d}, i % 2 == 0 ? dtype : acc_type(dtype));
      fill_normal(gradients.back().initial.view(), 900 + static_cast<std::uint64_t>(i));
    }
    fill_normal(h.initial.view(), 1);
    fill_normal(dh.initial.view(), 2);
    fill_normal(query.initial.view(), 3, 2.0 / std::sqrt(static_cast<double>(s.d)));
    fill_normal(norm.initial.view(), 4, 0.2, 1.0);
    fill_normal(dquery.initial.view(), 5);
    fill_normal(dnorm.initial.view(), 6);
    dispatch_float(p.initial.view().dtype(), [&]<class A>(TypeTag<A>) {
      for (std::int64_t i = 0; i < p.initial.view().numel(); ++i)
        p.initial.data<A>()[i] =
            static_cast<A>(uniform(7, static_cast<std::uint64_t>(i)) * 2.0 / s.n);
    });
  }
  template <class Side>
  AttnResForward forward(const Side& side) const {
    AttnResForward op{
        .h = side(h), .p = side(p), .sources = {}, .query = side(query), .norm = side(norm)};
    for (const auto& source : sources)
      op.sources.push_back(side(source));
    return op;
  }
  template <class Side>
  AttnResBackward backward(const Side& side, bool frozen) const {
    AttnResBackward op{.dsources = {},
                       .dquery = frozen ? TensorView() : side(dquery),
                       .dnorm = frozen ? TensorView() : side(dnorm),
                       .dh = side(dh),
                       .p = side(p),
                       .sources = {},
                       .query = side(query),
                       .norm = side(norm)};
    for (std::size_t i = 0; i < sources.size(); ++i) {
      op.sources.push_back(side(sources[i]));
      op.dsources.push_back(skipped(i) ? TensorView() : side(gradients[i]));
    }
    return op;
  }
  static bool skipped(std::size_t i) { return i % 5 == 3; }
  std::vector<const Twin*> all() const {
    std::vector<const Twin*> twins{&h, &dh, &p, &query, &norm, &dquery, &dnorm};
    for (const auto& twin : sources)
      twins.push_back(&twin);
    for (const auto& twin : gradients)
      twins.push_back(&twin);
    return twins;
  }
  Size size;
  Twin h, dh, p, query, norm, dquery, dnorm;
  std::deque<Twin> sources, gradients;
};

void check(BothBackends& both, const Size& s, DType dtype, DType weight_dtype, KernelPath path) {
  INFO(s.tokens << " x " << s.d << ", " << s.n << " sources, " << name(dtype) << ", weights "
                << name(weight_dtype) << ", plain " << (path == KernelPath::plain));
  const Case c(s, dtype, weight_dtype);
  PathNames paths;
  auto& context = std::get<CudaContext>(both.cuda.backend());
  context.path = path;
  context.paths = &paths;
  const std::string expected =
      path == KernelPath::automatic && fits_one_pass(s, dtype) ? "one_pass" : "plain";
  require_cuda_matches_cpu(both,
                           c.all(),
                           {{&c.h, elementwise_tolerance(dtype)}, {&c.p, sum_tolerance(dtype)}},
                           [&](auto side) { return c.forward(side); });
  CHECK(paths.last == expected);
  for (const bool frozen : {false, true}) {
    std::vector<Output> outputs{{&c.dquery, frozen ? 0 : sum_tolerance(dtype)},
                                {&c.dnorm, frozen ? 0 : sum_tolerance(dtype)}};
    for (std::size_t i = 0; i < c.gradients.size(); ++i) {
      const DType type = c.gradients[i].initial.view().dtype();
      outputs.push_back({&c.gradients[i], Case::skipped(i) ? 0 : elementwise_tolerance(type)});
    }
    paths.last.clear();
    require_cuda_matches_cpu(
        both, c.all(), outputs, [&](auto side) { return c.backward(side, frozen); });
    CHECK(paths.last == expected);
  }
  context.path = KernelPath::automatic;
  context.paths = nullptr;
}

}  // namespace

TEST_CASE("Attention residuals on CUDA match the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    check(both, s, DType::f64, DType::f64, KernelPath::automatic);
    check(both, s, DType::f32, DType::f32, KernelPath::automatic);
    check(both, s, DType::bf16, DType::bf16, KernelPath::automatic);
    check(both, s, DType::bf16, DType::f32, KernelPath::automatic);
    check(both, s, DType::bf16, DType::f32, KernelPath::plain);
  }
}

}  // namespace moesaic::test
