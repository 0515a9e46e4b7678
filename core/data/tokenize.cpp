#include "core/data/tokenize.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic::data {
namespace {

constexpr std::int64_t kBatchBytes = std::int64_t{1} << 18;
constexpr std::size_t kBatchPieces = 4096;
constexpr std::int64_t kPieceCost = 256;  // of the memory around a piece, for tiny ones

// Some pieces, first as text, then as tokens.
struct Batch {
  std::int64_t index = 0;
  std::int64_t cost = 0;  // bytes it counts for while it is in flight
  std::vector<TextPiece> pieces;
  std::vector<std::int32_t> tokens;
  std::vector<std::size_t> ends;  // of each piece's tokens
  std::int64_t text_bytes = 0, replaced = 0;
  std::string first_replaced;
  std::exception_ptr error;  // what stopped it; earlier batches are sound
};

class Pipeline {
 public:
  Pipeline(DocumentReader& reader,
           const tokenizer::Tokenizer& tokenizer,
           const TokenizeOptions& options)
      : reader_(reader), tokenizer_(tokenizer), options_(options) {
    threads_.emplace_back([this] { read_all(); });
    for (int i = 0; i < options.threads; ++i)
      threads_.emplace_back([this] { encode_all(); });
  }
  ~Pipeline() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_)
      thread.join();
  }
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  /// The batches in their order; false at the end. Throws the error of the first one that has one.
  bool next(Batch& batch) {
    std::unique_lock lock(mutex_);
    in_flight_ -= batch.cost;
    changed_.notify_all();
    changed_.wait(lock,
                  [&] { return done_.count(next_) != 0 || (all_read_ && next_ == num_read_); });
    if (done_.count(next_) == 0) return false;
    batch = std::move(done_.extract(next_++).mapped());
    lock.unlock();
    if (batch.error) std::rethrow_exception(batch.error);
    return true;
  }

 private:
  // Reader thread. An error becomes a batch of its own, behind the sound ones.
  void read_all() {
    for (bool more = true; more;) {
      Batch batch;
      try {
        more = read_batch(batch);
      } catch (...) {
        batch.error = std::current_exception();
        more = false;
      }
      if (!submit(std::move(batch))) return;
    }
    const std::lock_guard lock(mutex_);
    all_read_ = true;
    changed_.notify_all();
  }

  // False when the input has ended; the batch then holds what was left. An error leaves what came before it in `held_back_`.
  bool read_batch(Batch& batch) {
    if (held_back_) std::rethrow_exception(held_back_);
    TextPiece piece;
    while (batch.cost < kBatchBytes && batch.pieces.size() < kBatchPieces) {
      try {
        if (!reader_.next(piece)) return false;
      } catch (...) {
        if (batch.pieces.empty()) throw;
        held_back_ = std::current_exception();  // the documents before it come first
        return true;
      }
      batch.cost += static_cast<std::int64_t>(piece.text.size()) + kPieceCost;
      batch.pieces.push_back(std::move(piece));
    }
    return true;
  }

  bool submit(Batch batch) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      return stopped_ || in_flight_ == 0 || in_flight_ + batch.cost <= options_.bytes_in_flight;
    });
    if (stopped_) return false;
    batch.index = num_read_++;
    in_flight_ += batch.cost;
    todo_.push_back(std::move(batch));
    changed_.notify_all();
    return true;
  }

  void encode_all() {
    std::unique_ptr<tokenizer::Encoder> encoder;
    for (;;) {
      Batch batch;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stopped_ || !todo_.empty() || all_read_; });
        if (stopped_ || todo_.empty()) return;
        batch = std::move(todo_.front());
        todo_.pop_front();
      }
      try {
        if (!encoder) encoder = tokenizer_.encoder(options_.encode);
        if (!batch.error) encode(*encoder, batch);
      } catch (...) {
        batch.error = std::current_exception();
      }
      const std::lock_guard lock(mutex_);
      const std::int64_t index = batch.index;
      done_.emplace(index, std::move(batch));
      changed_.notify_all();
    }
  }

  void encode(tokenizer::Encoder& encoder, Batch& batch) const {
    for (TextPiece& piece : batch.pieces) {
      const std::int64_t before = encoder.replaced();
      try {
        encoder.encode(piece.text, batch.tokens);
      } catch (const InputError& error) {
        throw InputError(fmt::format("{}: {}", reader_.where(piece), error.what()));
      }
      const std::int64_t replaced = encoder.replaced() - before;
      if (replaced > 0 && options_.refuse_invalid_utf8)
        throw InputError(fmt::format(
            "{}: the document that begins here is not valid UTF-8 ({} places); convert it, or say "
            "--invalid-utf8 replace",
            reader_.where(piece),
            replaced));
      if (replaced > 0 && batch.replaced == 0) batch.first_replaced = reader_.where(piece);
      batch.replaced += replaced;
      batch.text_bytes += static_cast<std::int64_t>(piece.text.size());
      batch.ends.push_back(batch.tokens.size());
      std::string().swap(piece.text);
    }
  }

  DocumentReader& reader_;
  const tokenizer::Tokenizer& tokenizer_;
  const TokenizeOptions& options_;
  std::exception_ptr held_back_;  // reader thread only

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Batch> todo_;
  std::map<std::int64_t, Batch> done_;
  std::int64_t next_ = 0, num_read_ = 0, in_flight_ = 0;
  bool all_read_ = false, stopped_ = false;

  std::vector<std::thread> threads_;  // last: they use the rest
};

}  // namespace

TokenizeStats tokenize(DocumentReader& reader,
                       const tokenizer::Tokenizer& tokenizer,
                       MegatronWriter& writer,
                       const TokenizeOptions& options,
                       const std::function<void(const TokenizeStats&)>& progress) {
  MOESAIC_CHECK(options.threads > 0, "at least one thread");
  TokenizeStats stats;
  std::int64_t in_document = 0;
  Pipeline pipeline(reader, tokenizer, options);
  for (Batch batch; pipeline.next(batch);) {
    std::size_t begin = 0;
    for (std::size_t i = 0; i < batch.pieces.size(); ++i) {
      const std::size_t count = batch.ends[i] - begin;
      writer.append({batch.tokens.data() + begin, count});
      begin = batch.ends[i];
      in_document += static_cast<std::int64_t>(count);
      if (!batch.pieces[i].ends_document) continue;
      if (in_document > 0) {
        if (options.end_of_text) writer.append({&*options.end_of_text, 1});
        writer.end_document();
      } else {
        ++stats.empty_documents;  // a normaliser or pattern left nothing of it
      }
      in_document = 0;
    }
    stats.text_bytes += batch.text_bytes;
    if (stats.replaced == 0) stats.first_replaced = batch.first_replaced;
    stats.replaced += batch.replaced;
    stats.bytes_read = reader.bytes_read();
    stats.documents = writer.num_documents();
    stats.tokens = writer.num_tokens();
    progress(stats);
  }
  stats.empty_documents += reader.empty_documents();
  stats.bytes_read = reader.bytes_read();
  return stats;
}

}  // namespace moesaic::data
