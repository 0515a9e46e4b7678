#pragma once
// One attention problem through the CUDA ops. Every run is made twice, from poisoned memory, and must
// give the same bits.
#include <string>
#include <vector>

#include "tests/ops/attention_support.h"
#include "tests/support/device_tensors.h"

namespace moesaic::test {

using attention_test::Ints;
using attention_test::Outputs;
using attention_test::Problem;
using attention_test::Values;

struct AttentionRun {
  DType compute = DType::f32;
  KernelPath path = KernelPath::automatic;
  bool wide_d_o = true;  ///< d_o in the statistics type, else in the compute type
  bool backward = true;
  Values max_before;  ///< not empty: max_logit accumulates onto this
};

inline Precision precision_of(DType compute) {
  return compute == DType::f64 ? kF64 : compute == DType::f32 ? kF32 : kBf16;
}

class DeviceAttention : private PathObserver {
 public:
  explicit DeviceAttention(std::size_t scratch_bytes = std::size_t{1} << 30)
      : owner_({.device = kCuda, .scratch_bytes = scratch_bytes, .name = "cuda"}) {
    context().paths = this;
  }
  Stream& stream() { return owner_.stream(); }
  Backend& backend() { return owner_.backend(); }
  CudaContext& context() { return std::get<CudaContext>(owner_.backend()); }
  /// What the last ops ran: "forward path, backward path".
  const std::string& ran() const { return ran_; }

  Outputs run(const Problem& p, const AttentionRun& how) {
    const Outputs first = run_once(p, how), second = run_once(p, how);
    CHECK(same(first, second));
    return first;
  }
  static bool same(const Values& a, const Values& b) {
    return a.size() == b.size() &&
           (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
  }
  static bool same(const Outputs& a, const Outputs& b) {
    return same(a.o, b.o) && same(a.lse, b.lse) && same(a.max_logit, b.max_logit) &&
           same(a.dq, b.dq) && same(a.dkvb, b.dkvb) && same(a.dkr, b.dkr);
  }

  TensorView upload(const Values& values, Shape shape, DType dtype) {
    const OwnedTensor host(shape, dtype);
    dispatch_float(dtype, [&]<class T>(TypeTag<T>) {
      for (std::size_t i = 0; i < values.size(); ++i)
        host.data<T>()[i] = T(static_cast<acc_t<T>>(values[i]));
    });
    return copy(host.view());
  }
  TensorView upload(const Ints& values, Shape shape) {
    const OwnedTensor host(shape, DType::i32);
    std::copy(values.begin(), values.end(), host.data<std::int32_t>());
    return copy(host.view());
  }
  TensorView poisoned(Shape shape, DType dtype) {
    tensors_.emplace_back(shape, dtype, kCuda);
    fill_bytes(tensors_.back().view(), 0xff, stream());
    return tensors_.back().view();
  }
  void forget() {
    stream().synchronize();
    tensors_.clear();
  }

  /// Both ops on uploaded tensors; `backward` takes what `forward` writes.
  struct Ops {
    AttentionForward forward;
    AttentionBackward backward;
  };
  Ops prepare(const Problem& p, const AttentionRun& how) {
    const DType stats = precision_of(how.compute).stats;
    const auto heads = p.heads;
    const TensorView max_logit =
        how.max_before.empty() ? poisoned({heads}, stats) : upload(how.max_before, {heads}, stats);
    const AttentionForward f{
        .o = poisoned({p.tq, heads, p.dv}, stats),
        .lse = poisoned({heads, p.tq}, stats),
        .max_logit = max_logit,
        .q = upload(p.q, {p.tq, heads, p.dn + p.dr}, how.compute),
        .kvb = upload(p.kvb, {p.tk, heads, p.dn + p.dv}, how.compute),
        .kr = p.dr > 0 ? upload(p.kr, {p.tk, p.dr}, how.compute) : TensorView(),
        .cu_seqlens = upload(p.cu, {static_cast<std::int64_t>(p.cu.size())}),
        .selected = p.k > 0 ? upload(p.selected, {p.tq, p.k}) : TensorView(),
        .scale = p.scale,
        .accumulate_max = !how.max_before.empty()};
    if (!how.backward) return {f, {}};
    return {f,
            {.dq = poisoned(f.q.shape(), how.compute),
             .dkvb = poisoned(f.kvb.shape(), how.compute),
             .dkr = p.dr > 0 ? poisoned(f.kr.shape(), how.compute) : TensorView(),
             .d_o = upload(p.d_o, f.o.shape(), how.wide_d_o ? stats : how.compute),
             .o = f.o,
             .lse = f.lse,
             .q = f.q,
             .kvb = f.kvb,
             .kr = f.kr,
             .cu_seqlens = f.cu_seqlens,
             .selected = f.selected,
             .scale = p.scale}};
  }

 private:
  void ran(const char*, const char* path) override {
    ran_ += ran_.empty() ? path : std::string(", ") + path;
  }
  TensorView copy(TensorView host) {
    tensors_.emplace_back(host.shape(), host.dtype(), kCuda);
    copy_tensor(tensors_.back().view(), host, stream());
    stream().synchronize();
    return tensors_.back().view();
  }
  Values read(ConstTensorView v) { return attention_test::read(download(v, stream()).view()); }

  Outputs run_once(const Problem& p, const AttentionRun& how) {
    ran_.clear();
    context().path = how.path;
    const Ops ops = prepare(p, how);
    owner_.scratch().poison(stream());
    moesaic::run(backend(), ops.forward);
    Outputs r{read(ops.forward.o), read(ops.forward.lse), read(ops.forward.max_logit), {}, {}, {}};
    if (how.backward) {
      owner_.scratch().poison(stream());
      moesaic::run(backend(), ops.backward);
      r.dq = read(ops.backward.dq);
      r.dkvb = read(ops.backward.dkvb);
      if (p.dr > 0) r.dkr = read(ops.backward.dkr);
    }
    forget();
    return r;
  }

  BackendOwner owner_;
  std::vector<OwnedTensor> tensors_;
  std::string ran_;
};

}  // namespace moesaic::test
