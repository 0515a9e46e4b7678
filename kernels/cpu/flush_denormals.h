#pragma once
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace moesaic::cpu {

/// While it lives, this thread treats numbers below the smallest normal one as zero. Decays
/// multiply towards zero, and arithmetic on such numbers is up to a hundred times slower on some
/// processors.
class FlushDenormals {
 public:
#if defined(__SSE__)
  FlushDenormals() noexcept : saved_(_mm_getcsr()) {
    _mm_setcsr(saved_ | 0x8040U);
  }
  ~FlushDenormals() {
    _mm_setcsr(saved_);
  }
#else
  FlushDenormals() noexcept = default;
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__SSE__)
  unsigned saved_;
#endif
};

}  // namespace moesaic::cpu
