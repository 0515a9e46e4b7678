#include "core/train/offloaded_state.h"

#include <cstring>
#include <memory>
#include <utility>

#include "core/base/split_float.h"
#include "core/nn/expert_tiers.h"
#include "core/train/optimizer.h"
#include "kernels/ops/elementwise.h"

namespace moesaic {
namespace {

// A parameter in the record of a member.
struct InRecord {
  const ParameterStore& params;
  ParamId id;
  std::int64_t member;

  StorageId storage() const { return params.storage_of(id); }
  Shape shape() const { return params.own_piece(id, member).block.extent; }
  std::size_t numel() const { return static_cast<std::size_t>(shape().numel()); }

  void read(MemberPart part, const std::function<void(const TensorView&)>& work) const {
    params.tiers()->with_host(
        storage(), member, part, MemberAccess::read, [&](const TensorView& all) {
          work(params.box_of_member(all, id));
        });
  }
  void write(MemberPart part, const std::byte* from) const {
    params.tiers()->with_host(
        storage(), member, part, MemberAccess::change, [&](const TensorView& all) {
          const TensorView to = params.box_of_member(all, id);
          std::memcpy(to.data(), from, to.bytes());
        });
  }
};

StateTensor named(const InRecord& record, std::string name, std::shared_ptr<StateAccess> access) {
  access->shape = record.shape();
  return {std::move(name),
          {},
          {},
          place_in_whole(record.params, record.id, record.member),
          std::move(access)};
}

// All of it lies in one section of the record.
std::shared_ptr<StateAccess> section(const InRecord& record, MemberPart part, DType dtype) {
  auto access = std::make_shared<StateAccess>();
  access->dtype = dtype;
  access->read = [record, part](const StateAccess::Sink& sink, Stream&) {
    record.read(part, [&](const TensorView& values) { sink(values.data(), values.bytes()); });
  };
  access->write = [record, part](const std::byte* from, Stream&) { record.write(part, from); };
  return access;
}

// The half of a split master that kernels read lies in the record too, or on the device.
class SplitWeight {
 public:
  explicit SplitWeight(const InRecord& record)
      : record_(record), is_offloaded_(record.params.has_tiered_weights(record.storage())) {}

  std::vector<bf16> download(Stream& stream) const {
    std::vector<bf16> weight(record_.numel());
    if (is_offloaded_) {
      record_.read({.kind = MemberPart::Kind::weight}, [&](const TensorView& values) {
        std::memcpy(weight.data(), values.data(), values.bytes());
      });
    } else {
      copy_tensor(on_host(weight), record_.params.own_weight(record_.id, record_.member), stream);
      stream.synchronize();
    }
    return weight;
  }
  void upload(std::vector<bf16>& weight, Stream& stream) const {
    const TensorView host = on_host(weight);
    if (is_offloaded_) return record_.write({.kind = MemberPart::Kind::weight}, host.data());
    copy_tensor(record_.params.own_weight(record_.id, record_.member), host, stream);
    stream.synchronize();
  }

 private:
  TensorView on_host(std::vector<bf16>& weight) const {
    return {reinterpret_cast<std::byte*>(weight.data()), DType::bf16, record_.shape()};
  }

  const InRecord& record_;
  bool is_offloaded_;
};

std::shared_ptr<StateAccess> split_master(const InRecord& record) {
  constexpr MemberPart kRemainder{.kind = MemberPart::Kind::remainder};
  auto access = std::make_shared<StateAccess>();
  access->dtype = DType::f32;
  access->read = [record](const StateAccess::Sink& sink, Stream& stream) {
    const std::vector<bf16> weight = SplitWeight(record).download(stream);
    std::vector<float> joined(weight.size());
    record.read(kRemainder, [&](const TensorView& values) {
      for (std::size_t i = 0; i < joined.size(); ++i)
        joined[i] = join_float(weight[i], values.as<std::uint16_t>()[i]);
    });
    sink(reinterpret_cast<const std::byte*>(joined.data()), joined.size() * sizeof(float));
  };
  access->write = [record](const std::byte* from, Stream& stream) {
    std::vector<bf16> weight(record.numel());
    std::vector<std::uint16_t> remainder(weight.size());
    for (std::size_t i = 0; i < weight.size(); ++i) {
      float value = 0;  // files align nothing
      std::memcpy(&value, from + i * sizeof(float), sizeof(float));
      split_float(value, weight[i], remainder[i]);
    }
    SplitWeight(record).upload(weight, stream);
    record.write(kRemainder, reinterpret_cast<const std::byte*>(remainder.data()));
  };
  return access;
}

}  // namespace

std::vector<std::int64_t> own_members(const ParameterStore& params, StorageId id) {
  const auto ids = params.params_of(id);
  std::vector<std::int64_t> own;
  for (std::int64_t m = 0; m < params.members_here(ids.front()); ++m) {
    if (params.own_piece(ids.front(), m).is_empty()) continue;
    for (const ParamId p : ids)
      MOESAIC_CHECK(params.owns_whole(p, m), "offloaded experts have one owner");
    own.push_back(m);
  }
  return own;
}

StateTensor master_of_member(const ParameterStore& params, ParamId id, std::int64_t member) {
  const InRecord record{params, id, member};
  const std::string name = params.member_name(id, member);
  const Precision& precision = params.precision();
  if (params.masters_are_weights(id)) {
    if (!params.has_tiered_weights(record.storage()))
      return {name, params.master(id, member), {}, place_in_whole(params, id, member)};
    return named(
        record, name, section(record, {.kind = MemberPart::Kind::weight}, precision.master));
  }
  if (precision.split_masters) return named(record, name, split_master(record));
  return named(record, name, section(record, {.kind = MemberPart::Kind::master}, precision.master));
}

StateTensor state_of_member(const ParameterStore& params,
                            ParamId id,
                            std::int64_t member,
                            const std::string& name,
                            int kind) {
  const InRecord record{params, id, member};
  return named(
      record,
      name,
      section(record, {.kind = MemberPart::Kind::state, .state = kind}, params.precision().master));
}

void refresh_offloaded(const ParameterStore& params, StorageId id, Backend& backend) {
  const auto ids = params.params_of(id);
  // Split masters were loaded as both halves.
  if (params.masters_are_weights(ids.front()) || params.precision().split_masters) return;
  const bool is_offloaded = params.has_tiered_weights(id);
  const ExpertTiers::Access access{
      .weight = is_offloaded ? MemberAccess::replace : MemberAccess::none,
      .state = MemberAccess::read};
  for (const std::int64_t m : own_members(params, id)) {
    params.tiers()->with_members(
        id, {&m, 1}, access, stream_of(backend), [&](std::span<const MemberTensors> members) {
          for (const ParamId p : ids) {
            const TensorView weight =
                is_offloaded ? params.box_of_member(members[0].weight, p) : params.own_weight(p, m);
            run(backend, Cast{.y = weight, .x = params.box_of_member(members[0].master, p)});
          }
        });
  }
}

}  // namespace moesaic
