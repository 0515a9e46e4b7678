#define PCRE2_CODE_UNIT_WIDTH 8
#include <algorithm>
#include <array>
#include <limits>

#include <fmt/format.h>
#include <pcre2.h>

#include "core/base/error.h"
#include "core/tokenizer/unicode.h"

namespace moesaic::tokenizer {
namespace {

constexpr std::size_t kJitStackStart = 32 << 10, kJitStackMost = 16 << 20;

template <auto function>
struct Free {
  template <class T>
  void operator()(T* p) const noexcept {
    function(p);
  }
};
using Code = std::unique_ptr<pcre2_code, Free<pcre2_code_free>>;
using CompileContext = std::unique_ptr<pcre2_compile_context, Free<pcre2_compile_context_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Free<pcre2_match_context_free>>;
using MatchData = std::unique_ptr<pcre2_match_data, Free<pcre2_match_data_free>>;
using JitStack = std::unique_ptr<pcre2_jit_stack, Free<pcre2_jit_stack_free>>;

std::string message_of(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

// Steps of backtracking that a text of this size may take. A pattern that splits words needs a few per byte.
std::uint32_t match_limit(std::size_t bytes) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
  return static_cast<std::uint32_t>(std::min(kMost, 10'000'000 + std::uint64_t{64} * bytes));
}

}  // namespace

void require_unicode_libraries() {}

struct Regex::Impl {
  Code code;
  bool jit = false;
  std::string where;
};

Regex::Regex(const std::string& pattern, std::string where) : impl_(std::make_unique<Impl>()) {
  impl_->where = std::move(where);
  const CompileContext context(pcre2_compile_context_create(nullptr));
  if (!context) throw std::bad_alloc();
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  impl_->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()),
                                  pattern.size(),
                                  PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C,
                                  &error,
                                  &offset,
                                  context.get()));
  if (!impl_->code)
    throw InputError(fmt::format("{}: the pattern is refused by PCRE2: {} (at byte {} of {})",
                                 impl_->where,
                                 message_of(error),
                                 offset,
                                 pattern));
  std::uint32_t empty = 0;
  pcre2_pattern_info(impl_->code.get(), PCRE2_INFO_MATCHEMPTY, &empty);
  if (empty != 0)
    throw InputError(fmt::format(
        "{}: the pattern can match the empty text, which is not implemented", impl_->where));
  impl_->jit = pcre2_jit_compile(impl_->code.get(), PCRE2_JIT_COMPLETE) == 0;
}
Regex::~Regex() = default;

struct RegexMatcher::Impl {
  const Regex::Impl* regex = nullptr;
  MatchData data;
  MatchContext context;
  JitStack stack;
  std::uint32_t limit = 0;
};

RegexMatcher::RegexMatcher(const Regex& regex) : impl_(std::make_unique<Impl>()) {
  impl_->regex = regex.impl_.get();
  impl_->data.reset(pcre2_match_data_create(1, nullptr));
  impl_->context.reset(pcre2_match_context_create(nullptr));
  if (!impl_->data || !impl_->context) throw std::bad_alloc();
  if (!regex.impl_->jit) return;
  impl_->stack.reset(pcre2_jit_stack_create(kJitStackStart, kJitStackMost, nullptr));
  if (!impl_->stack) throw std::bad_alloc();
  pcre2_jit_stack_assign(impl_->context.get(), nullptr, impl_->stack.get());
}
RegexMatcher::RegexMatcher(RegexMatcher&&) noexcept = default;
RegexMatcher::~RegexMatcher() = default;

bool RegexMatcher::find(std::string_view text, std::size_t from, Match& match) {
  Impl& m = *impl_;
  if (const auto limit = match_limit(text.size()); limit != m.limit) {
    pcre2_set_match_limit(m.context.get(), limit);
    m.limit = limit;
  }
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const pcre2_code* code = m.regex->code.get();
  int result = PCRE2_ERROR_JIT_BADOPTION;
  if (m.regex->jit)
    result = pcre2_jit_match(code, subject, text.size(), from, 0, m.data.get(), m.context.get());
  if (result == PCRE2_ERROR_JIT_BADOPTION || result == PCRE2_ERROR_JIT_STACKLIMIT)
    result = pcre2_match(code,
                         subject,
                         text.size(),
                         from,
                         PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                         m.data.get(),
                         m.context.get());
  if (result == PCRE2_ERROR_NOMATCH) return false;
  if (result < 0)
    throw InputError(fmt::format(
        "{}: PCRE2 gave up on a text of {} bytes, searching from byte {}: {}. The pattern "
        "backtracks too much on this text; shorten the line, or simplify the pattern",
        m.regex->where,
        text.size(),
        from,
        message_of(result)));
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(m.data.get());
  match = {bounds[0], bounds[1]};
  return true;
}

}  // namespace moesaic::tokenizer
