#include "core/train/sequence_buffers.h"

#include "core/base/random.h"
#include "kernels/ops/vocab_loss.h"
#include "tests/support/catch.h"

using namespace moesaic;

namespace {

using Ints = std::vector<std::int32_t>;

Ints read(ConstTensorView view) {
  return {view.as<std::int32_t>(), view.as<std::int32_t>() + view.numel()};
}
void append(Ints& to, const Ints& more) {
  to.insert(to.end(), more.begin(), more.end());
}

// Documents of one to `longest` tokens.
data::Batch packed(std::int64_t tokens, std::int64_t longest, std::uint64_t seed) {
  data::Batch batch = data::make_batch(tokens, 1);
  batch.num_samples = 1;
  batch.cu = {0};
  std::uint64_t draws = 0;
  while (batch.cu.back() < tokens) {
    const auto n = std::min<std::int64_t>(
        tokens - batch.cu.back(),
        1 + static_cast<std::int64_t>(uniform(seed, draws++) * static_cast<double>(longest)));
    for (std::int64_t i = 0; i < n; ++i) {
      batch.tokens.push_back(static_cast<std::int32_t>(batch.tokens.size() + 1000));
      batch.positions.push_back(static_cast<std::int32_t>(i));
      const bool last = i + 1 == n;
      batch.labels.push_back(last ? kIgnoredTarget : batch.tokens.back() + 1);
      batch.valid_labels += last ? 0 : 1;
    }
    batch.cu.push_back(static_cast<std::int32_t>(batch.tokens.size()));
  }
  return batch;
}

struct Loaded {
  Buffer host, device;
  SequenceBuffers buffers;
  Loaded(const data::Batch& batch, SequenceBuffers::Piece piece, Stream& stream)
      : host(bytes(batch, piece), kCpu, "host"),
        device(bytes(batch, piece), kCpu, "device"),
        buffers(
            static_cast<std::int64_t>(batch.tokens.size()), ints(host), ints(device), true, piece) {
    buffers.load(batch, stream);
    stream.synchronize();
  }
  static std::size_t bytes(const data::Batch& batch, SequenceBuffers::Piece piece) {
    return SequenceBuffers::bytes_for(static_cast<std::int64_t>(batch.tokens.size()), piece.count);
  }
  static TensorView ints(const Buffer& b) {
    return b.view({static_cast<std::int64_t>(b.bytes() / 4)}, DType::i32);
  }
};

}  // namespace

TEST_CASE(
    "sequence buffers: the pieces of a micro-batch hold what the whole holds, each token once") {
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const data::Batch batch = packed(48, 1 + static_cast<std::int64_t>(seed), seed);
    const Loaded whole(batch, {0, 1}, stream);
    const Sequence& s = whole.buffers.sequence();
    for (const int count : {2, 3, 8, 48}) {
      Ints tokens, targets, positions, mtp_tokens, mtp_targets;
      std::int64_t valid = 0, mtp = 0, documents = 0;
      for (int r = 0; r < count; ++r) {
        const Loaded piece(batch, {r, count}, stream);
        const Sequence& p = piece.buffers.sequence();
        append(tokens, read(p.tokens));
        append(targets, read(p.targets));
        append(positions, read(p.positions));
        append(mtp_tokens, read(p.mtp_tokens));
        append(mtp_targets, read(p.mtp_targets));
        valid += piece.buffers.valid_targets();
        mtp += piece.buffers.mtp_targets();
        documents += piece.buffers.documents();
        REQUIRE(read(p.cu).back() == 48 / count);
        REQUIRE(read(p.key_documents()).back() == 48 / count * (r + 1));
        REQUIRE(read(p.batch_documents()) == batch.cu);
      }
      INFO("seed " << seed << ", " << count << " pieces");
      CHECK(tokens == read(s.tokens));
      CHECK(targets == read(s.targets));
      CHECK(positions == read(s.positions));
      CHECK(mtp_tokens == read(s.mtp_tokens));
      CHECK(mtp_targets == read(s.mtp_targets));
      CHECK(valid == whole.buffers.valid_targets());
      CHECK(valid == batch.valid_labels);
      CHECK(mtp == whole.buffers.mtp_targets());
      CHECK(documents == whole.buffers.documents());
    }
  }
}
