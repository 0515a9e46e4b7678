// manifest.json of checkpoints. The input has no checksum; the target adds it, or no change would get past it. Accepted ⇒ tensors lie
// in their files, names stay in the folder, and what we write for it reads back as the same.
#include "core/checkpoint/manifest.h"

#include <fmt/format.h>

#include "core/base/crc32c.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/strict_json.h"

using namespace moesaic;

MOESAIC_FUZZ_TARGET(manifest) {
  fuzz::accepts([&] { parse_manifest(input, "unsealed"); });
  const std::string sealed = fmt::format(
      "{},\n\"manifest_crc32c\": \"{:08x}\"}}\n", input, crc32c(input.data(), input.size()));
  Manifest manifest;
  if (!fuzz::accepts([&] { manifest = parse_manifest(sealed, "manifest.json"); })) return;
  fuzz::require_strict_json(sealed);
  for (const auto& file : manifest.files)
    fuzz::require(file.name.find('/') == std::string::npos && file.name.front() != '.',
                  "files lie in the checkpoint's folder");
  for (const auto& t : manifest.tensors) {
    const auto& file = manifest.files.at(t.file);
    fuzz::require(t.offset <= file.bytes && t.bytes <= file.bytes - t.offset,
                  "a tensor lies in its file");
    fuzz::require(is_inside(t.box(), t.whole()), "a piece lies in its tensor");
  }
  const std::string text = manifest_text(manifest);
  fuzz::require(manifest_text(parse_manifest(text, "again")) == text,
                "what is written reads back as the same");
}
