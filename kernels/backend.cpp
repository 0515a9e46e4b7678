#include "kernels/backend.h"

#include "kernels/cpu/thread_pool.h"
#include "kernels/cuda_handles.h"

extern "C" void openblas_set_num_threads(int);

namespace moesaic {

struct BackendOwner::Impl {
  explicit Impl(const Options& o)
      : pool(o.device.kind == Device::Kind::cpu ? o.num_threads : 1),
        scratch(o.scratch_bytes == 0 ? Arena::measuring(o.device, "scratch." + o.name)
                                     : Arena(o.scratch_bytes, o.device, "scratch." + o.name)),
        stream(o.device, o.name, o.mode, o.priority) {
    if (o.device.kind == Device::Kind::cuda && o.mode != Stream::Mode::dry)
      blas_lt = cuda::create_blas_lt(o.device);
  }
  ~Impl() {
    if (blas_lt != nullptr) cuda::destroy_blas_lt(blas_lt);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // The stream's worker uses pool and scratch, so it is declared last and ends first.
  ThreadPool pool;
  Arena scratch;
  void* blas_lt = nullptr;
  Stream stream;
};

BackendOwner::BackendOwner(const Options& options) {
  openblas_set_num_threads(
      1);  // our own threads call it on fixed tiles (order of sums is a contract)
  impl_ = std::make_unique<Impl>(options);
  if (options.device.kind == Device::Kind::cpu) {
    backend_ = std::make_unique<Backend>(CpuContext{impl_->stream, impl_->scratch, impl_->pool});
  } else {
    const int sms = options.mode == Stream::Mode::dry ? 0 : cuda::multiprocessors(options.device);
    backend_ = std::make_unique<Backend>(CudaContext{.stream = impl_->stream,
                                                     .scratch = impl_->scratch,
                                                     .blas_lt = impl_->blas_lt,
                                                     .num_sms = sms,
                                                     .path = options.path});
  }
}

BackendOwner::~BackendOwner() = default;
Stream& BackendOwner::stream() noexcept {
  return impl_->stream;
}
Arena& BackendOwner::scratch() noexcept {
  return impl_->scratch;
}

void BackendOwner::observe(OpObserver* observer) {
  impl_->stream.synchronize();
  std::visit([observer](auto& context) { context.observer = observer; }, *backend_);
}

void BackendOwner::observe_paths(PathObserver* observer) {
  if (auto* context = std::get_if<CudaContext>(backend_.get())) context->paths = observer;
}

}  // namespace moesaic
