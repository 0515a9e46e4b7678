#include "core/data/fingerprint.h"

#include <algorithm>
#include <vector>

#include "core/base/crc32c.h"

namespace moesaic::data {
namespace {

constexpr std::int64_t kDocuments = 64, kTokens = 64;

}  // namespace

std::uint32_t fingerprint(const TokenSource& source) {
  const std::int64_t documents = source.num_documents();
  std::vector<std::int64_t> seen{documents, source.num_tokens()};
  const std::int64_t looked_at = std::min(documents, kDocuments);
  for (std::int64_t i = 0; i < looked_at; ++i) {
    // The first, the last, and those between them; 64-bit products of i and any number of documents that fits a file.
    const std::int64_t d = looked_at == 1 ? 0 : (documents - 1) / (looked_at - 1) * i;
    const std::int64_t document = i + 1 == looked_at ? documents - 1 : d;
    const std::int64_t length = source.document_length(document);
    seen.push_back(length);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(std::min(length, kTokens)));
    for (const std::int64_t begin : {std::int64_t{0}, length - std::min(length, kTokens)}) {
      source.read(document, begin, tokens);
      seen.insert(seen.end(), tokens.begin(), tokens.end());
    }
  }
  return crc32c(seen.data(), seen.size() * sizeof(seen[0]));
}

}  // namespace moesaic::data
