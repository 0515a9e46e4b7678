#include "core/train/weights_alone.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "core/base/split_float.h"
#include "core/nn/expert_tiers.h"
#include "core/train/optimizer.h"

namespace moesaic {
namespace {

/// Fills a weight in host memory with elements [begin, begin + n) of a master.
class Rounding {
 public:
  Rounding(DType master, DType weight, bool is_split)
      : master_(master), is_same_(master == weight), is_split_(is_split) {
    MOESAIC_CHECK(is_same_ || (master == DType::f32 && weight == DType::bf16),
                  "weights are their own masters, or bf16 of f32");
  }

  /// `from`: the whole master, as files hold it, not aligned.
  void fill(std::byte* weight, const std::byte* from, std::int64_t begin, std::int64_t n) const {
    const std::size_t each = byte_size(master_);
    from += static_cast<std::size_t>(begin) * each;
    if (is_same_) {
      std::memcpy(weight, from, static_cast<std::size_t>(n) * each);
      return;
    }
    auto* rounded = reinterpret_cast<bf16*>(weight);
    for (std::int64_t i = 0; i < n; ++i, from += sizeof(float)) {
      float value = 0;
      std::memcpy(&value, from, sizeof(float));
      rounded[i] = this->rounded(value);
    }
  }

 private:
  // Halves of split masters round away from zero, others to even.
  bf16 rounded(float value) const {
    if (!is_split_) return bf16(value);
    bf16 weight;
    std::uint16_t remainder = 0;
    split_float(value, weight, remainder);
    return weight;
  }

  DType master_;
  bool is_same_, is_split_;
};

// In pieces, through little host memory.
void upload(TensorView weight, const std::byte* from, const Rounding& rounding, Stream& stream) {
  constexpr std::int64_t kPiece = std::int64_t{4} << 20;  // elements
  const std::int64_t n = weight.numel();
  const TensorView flat = weight.reshaped({n});
  std::vector<std::byte> piece(static_cast<std::size_t>(std::min(n, kPiece)) *
                               byte_size(weight.dtype()));
  for (std::int64_t at = 0; at < n; at += kPiece) {
    const std::int64_t count = std::min(kPiece, n - at);
    rounding.fill(piece.data(), from, at, count);
    copy_tensor(
        flat.rows(at, at + count), TensorView(piece.data(), weight.dtype(), {count}), stream);
    stream.synchronize();
  }
}

}  // namespace

StateTensor weight_to_load(const ParameterStore& params, ParamId id, std::int64_t member) {
  const StorageId storage = params.storage_of(id);
  const bool is_offloaded = params.has_tiered_weights(storage);
  const std::string name = params.member_name(id, member);
  const auto place = place_in_whole(params, id, member);
  if (!is_offloaded && params.masters_are_weights(id))
    return {name, params.own_weight(id, member), {}, place};
  const Precision& precision = params.precision();
  const DType weight = params.masters_are_weights(id) ? precision.master : precision.compute;
  const Rounding rounding(precision.master, weight, precision.split_masters);
  auto access = std::make_shared<StateAccess>();
  access->dtype = precision.master;
  access->shape = params.own_piece(id, member).block.extent;
  access->read = [name](const StateAccess::Sink&, Stream&) {
    throw InternalError("'" + name +
                        "' was rounded when it was loaded; there is no master to read");
  };
  access->write = [&params, id, member, storage, is_offloaded, rounding](const std::byte* from,
                                                                         Stream& stream) {
    if (!is_offloaded) return upload(params.own_weight(id, member), from, rounding, stream);
    params.tiers()->with_host(storage,
                              member,
                              {.kind = MemberPart::Kind::weight},
                              MemberAccess::change,
                              [&](const TensorView& all) {
                                const TensorView to = params.box_of_member(all, id);
                                rounding.fill(to.data(), from, 0, to.numel());
                              });
  };
  return {name, {}, {}, place, std::move(access)};
}

}  // namespace moesaic
