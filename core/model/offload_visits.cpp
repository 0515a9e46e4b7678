#include "core/model/offload_visits.h"

#include <algorithm>
#include <numeric>

namespace moesaic {
namespace {
std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}
}  // namespace

OffloadVisits::OffloadVisits(const Model& model, const std::vector<int>& slots_of_chunk)
    : model_(&model) {
  for (int c = 0; c < model.num_chunks(); ++c) {
    const std::vector<std::size_t> parts = model.offloaded_parts(c);
    parts_.push_back(static_cast<int>(parts.size()));
    first_.emplace_back();
    for (int s = 0; s < slots_of_chunk[at(c)]; ++s) {
      first_.back().push_back(static_cast<int>(sizes_.size()));
      sizes_.insert(sizes_.end(), parts.begin(), parts.end());
    }
  }
}

std::vector<int> OffloadVisits::tensors(int chunk, int slot) const {
  std::vector<int> all(at(parts_[at(chunk)]));
  std::iota(all.begin(), all.end(), first_[at(chunk)][at(slot)]);
  return all;
}

void OffloadVisits::add(const ChunkPass& pass) {
  positions_.resize(std::max(positions_.size(), at(pass.micro_batch) + 1));
  Position& position = positions_[at(pass.micro_batch)];
  if (pass.is_backward)
    backward(pass, position);
  else
    forward(pass, position);
}

offload::Visit OffloadVisits::reads_at(const Position& position) const {
  offload::Visit reads;
  if (position.cur >= 0) reads.push_back({position.cur, false});
  for (const int tensor : position.bank)
    reads.push_back({tensor, false});
  return reads;
}

void OffloadVisits::forward(const ChunkPass& pass, Position& position) {
  const Model::Chunk& chunk = model_->chunk(pass.chunk);
  int next = first_[at(pass.chunk)][at(pass.slot)];
  if (chunk.is_first) {
    position = {};
    const int part = model_->embedding_part();
    if (part >= 0) position.cur = next++;
    visits_.emplace_back();
    if (part >= 0) visits_.back().push_back({position.cur, true});
  }
  position.to_read_again.resize(static_cast<std::size_t>(model_->loss_rows()));
  for (std::size_t l = chunk.begin; l < chunk.end; ++l) {
    const DecoderLayer& layer = model_->layer(l);
    const DecoderLayer::Parts parts = layer.offloaded();
    const auto tensor = [&](int part) { return part < 0 ? -1 : next + part; };
    offload::Visit reads = reads_at(position), again = reads;
    for (const int own : {tensor(parts.named), tensor(parts.mid)}) {
      if (own >= 0) again.push_back({own, false});
    }
    for (const int part : {parts.named, parts.mid, parts.out}) {
      if (part >= 0) reads.push_back({tensor(part), true});
    }
    visits_.push_back(std::move(reads));
    position.to_read_again[l] = std::move(again);
    const LayerResidual& residual = layer.options().residual;
    if (residual.attn_starts_block && position.cur >= 0) position.bank.push_back(position.cur);
    if (residual.mlp_starts_block && parts.mid >= 0) position.bank.push_back(tensor(parts.mid));
    position.cur = tensor(parts.out);
    next += static_cast<int>(layer.tape_spec().offloaded_parts().size());
  }
  if (!chunk.is_last) return;
  visits_.push_back(reads_at(position));
  position.to_read_again.back() = visits_.back();
}

void OffloadVisits::backward(const ChunkPass& pass, const Position& position) {
  const Model::Chunk& chunk = model_->chunk(pass.chunk);
  if (chunk.is_last) visits_.push_back(position.to_read_again.back());
  for (std::size_t l = chunk.end; l-- > chunk.begin;)
    visits_.push_back(position.to_read_again[l]);
}

}  // namespace moesaic
