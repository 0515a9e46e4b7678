#pragma once
#include <string>

#include "core/base/random.h"
#include "core/data/token_source.h"

namespace moesaic::bench {

/// Documents of random tokens, one per window, so that attention sees the full context.
class RandomTokens : public data::TokenSource {
 public:
  RandomTokens(std::int64_t documents, std::int64_t length, std::int64_t vocabulary)
      : documents_(documents), length_(length), vocabulary_(vocabulary) {}
  std::int64_t num_documents() const noexcept override { return documents_; }
  std::int64_t document_length(std::int64_t) const override { return length_; }
  void read(std::int64_t document, std::int64_t begin, std::span<std::int32_t> out) const override {
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::int64_t at = begin + static_cast<std::int64_t>(i);
      const double u =
          uniform(hash_name("bench tokens"), static_cast<std::uint64_t>(document * length_ + at));
      const auto other = 1 + static_cast<std::int32_t>(u * static_cast<double>(vocabulary_ - 1));
      out[i] = at == length_ - 1 ? data::kEndOfText : other;
    }
  }
  const std::string& name() const noexcept override { return name_; }

 private:
  std::int64_t documents_, length_, vocabulary_;
  std::string name_ = "random tokens";
};

}  // namespace moesaic::bench
