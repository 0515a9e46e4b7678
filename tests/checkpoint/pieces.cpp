// Tensors in pieces: whatever the layout they were saved under, any other layout reads the same bits.
#include <algorithm>
#include <cstdio>
#include <functional>

#include <nlohmann/json.hpp>

#include "core/base/crc32c.h"
#include "core/checkpoint/boxes.h"
#include "core/checkpoint/manifest.h"
#include "core/checkpoint/safetensors.h"
#include "tests/checkpoint/support.h"

namespace moesaic {
namespace {

using namespace test;
using nlohmann::json;

// A tensor whose element i (row-major) holds i, cut along its dimensions at the given places.
class Cut {
 public:
  Cut(std::string name, const Shape& whole, const std::vector<std::vector<std::int64_t>>& cuts)
      : name_(std::move(name)), whole_(whole) {
    std::vector<Box> boxes{whole_box(whole)};
    for (std::size_t d = 0; d < cuts.size(); ++d) {
      std::vector<Box> finer;
      for (const Box& b : boxes) {
        std::int64_t begin = 0;
        std::vector<std::int64_t> ends = cuts[d];
        ends.push_back(whole.dim[d]);
        for (const std::int64_t end : ends) {
          Box part = b;
          part.begin.dim[d] = begin;
          part.extent.dim[d] = end - begin;
          finer.push_back(part);
          begin = end;
        }
      }
      boxes = finer;
    }
    for (const Box& b : boxes)
      memory_.emplace_back(static_cast<std::size_t>(b.extent.numel()), -1);
    for (std::size_t i = 0; i < boxes.size(); ++i)
      tensors_.push_back(
          {name_,
           TensorView(reinterpret_cast<std::byte*>(memory_[i].data()), DType::i32, boxes[i].extent),
           {},
           boxes.size() == 1 ? std::nullopt
                             : std::optional(StateTensor::Place{whole, boxes[i].begin})});
  }
  void fill() {
    std::vector<std::int32_t> all(static_cast<std::size_t>(whole_.numel()));
    for (std::size_t i = 0; i < all.size(); ++i)
      all[i] = static_cast<std::int32_t>(i);
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const Box box = box_of(tensors_[i]);
      copy_box(tensors_[i].view.data(),
               box,
               reinterpret_cast<const std::byte*>(all.data()),
               whole_box(whole_),
               box,
               4);
    }
  }
  const std::vector<StateTensor>& tensors() const { return tensors_; }
  const std::vector<std::vector<std::int32_t>>& memory() const { return memory_; }
  static Box box_of(const StateTensor& t) {
    return t.place ? Box{t.place->begin, t.view.shape()} : whole_box(t.view.shape());
  }

 private:
  std::string name_;
  Shape whole_;
  std::vector<std::vector<std::int32_t>> memory_;
  std::vector<StateTensor> tensors_;
};

const std::vector<std::vector<std::vector<std::int64_t>>> kLayouts{
    {}, {{3}}, {{1, 2, 6}}, {{}, {4}}, {{2, 5}, {1}}, {{3}, {}, {2}}, {{1, 4}, {2}, {1, 2}}};

}  // namespace

TEST_CASE("any layout of pieces loads into any other with the same bits") {
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  const Shape whole{7, 5, 3};
  for (std::size_t from = 0; from < kLayouts.size(); ++from) {
    Cut saved("model.w", whole, kLayouts[from]);
    saved.fill();
    const TemporaryFolder dir;
    // Small files, so that the pieces lie in several.
    save_checkpoint(dir.path(), 1, saved.tensors(), {}, "", 0, 0, stream, 150);
    verify_checkpoint(step_folder(dir.path(), 1));
    for (std::size_t to = 0; to < kLayouts.size(); ++to) {
      Cut loaded("model.w", whole, kLayouts[to]), expected("model.w", whole, kLayouts[to]);
      expected.fill();
      // As ranks do: each asks for its own pieces.
      for (const auto& t : loaded.tensors())
        load_checkpoint(step_folder(dir.path(), 1), {&t, 1}, true, stream);
      INFO("from layout " << from << " to " << to);
      CHECK(loaded.memory() == expected.memory());
    }
  }
}

TEST_CASE("pieces are read into split masters, and data files of pieces are safetensors") {
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  std::vector<float> all{1.0F, -2.5F, 3.25F, 1e-20F, 7.0F, 1.0F / 3.0F};
  const StateTensor::Place left{Shape{2, 3}, Shape{0, 0}}, right{Shape{2, 3}, Shape{0, 2}};
  std::vector<float> a{all[0], all[1], all[3], all[4]}, b{all[2], all[5]};
  const std::vector<StateTensor> saved{
      {"model.w",
       TensorView(reinterpret_cast<std::byte*>(a.data()), DType::f32, Shape{2, 2}),
       {},
       left},
      {"model.w",
       TensorView(reinterpret_cast<std::byte*>(b.data()), DType::f32, Shape{2, 1}),
       {},
       right}};
  const TemporaryFolder dir;
  save_checkpoint(dir.path(), 1, saved, {}, "", 0, 0, stream);
  const fs::path folder = step_folder(dir.path(), 1);
  const SafetensorsFile file(folder / "model.safetensors");
  CHECK(file.contains("model.w[0:2,0:2]"));
  CHECK(file.contains("model.w[0:2,2:3]"));
  std::vector<std::uint16_t> weight(6), remainder(6);
  const StateTensor split{
      "model.w",
      TensorView(reinterpret_cast<std::byte*>(weight.data()), DType::bf16, Shape{2, 3}),
      TensorView(reinterpret_cast<std::byte*>(remainder.data()), DType::u16, Shape{2, 3})};
  load_checkpoint(folder, {&split, 1}, true, stream);
  save_checkpoint(dir.path(), 2, {&split, 1}, {}, "", 0, 0, stream);
  const SafetensorsFile again(step_folder(dir.path(), 2) / "model.safetensors");
  const float* found = again.view("model.w").as<float>();
  CHECK(std::equal(all.begin(), all.end(), found));
  // Another shape is refused with the shape of the whole.
  Cut other("model.w", Shape{3, 3}, {});
  const auto text = input_error([&] { load_checkpoint(folder, other.tensors(), true, stream); });
  CHECK(mentions(text, "'model.w' is f32 [2, 3], expected i32 [3, 3]"));
  CHECK(mentions(text, "1 tensor(s)"));
}

TEST_CASE("pieces that overlap, leave holes, or do not belong together are refused") {
  Cut saved("w", Shape{4, 2}, {{1, 3}});
  saved.fill();
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  const TemporaryFolder dir;
  save_checkpoint(dir.path(), 1, saved.tensors(), {}, "", 0, 0, stream);
  const std::string good = read_file(step_folder(dir.path(), 1) / kManifestName);
  CHECK(parse_manifest(good, "m").tensors.size() == 3);
  const auto refusal = [&](const std::function<void(json&)>& change) {
    json root = json::parse(good);
    root.erase("manifest_crc32c");
    change(root);
    std::string body = root.dump();
    body.pop_back();
    char seal[64];
    std::snprintf(
        seal, sizeof seal, ",\n\"manifest_crc32c\": \"%08x\"}\n", crc32c(body.data(), body.size()));
    return input_error([&] { parse_manifest(body + seal, "m"); });
  };
  CHECK(mentions(refusal([](json& m) { m["tensors"][1]["begin"][0] = 0; }), "overlap"));
  CHECK(mentions(refusal([](json& m) { m["tensors"].erase(1); }), "hold 4 of 8 elements"));
  CHECK(mentions(refusal([](json& m) { m["tensors"][2]["begin"][0] = 4; }),
                 "does not lie in the whole"));
  CHECK(mentions(refusal([](json& m) { m["tensors"][2]["whole"] = {5, 2}; }), "different tensors"));
  CHECK(mentions(refusal([](json& m) { m["tensors"][2]["dtype"] = "F32"; }), "different tensors"));
  CHECK(mentions(refusal([](json& m) { m["tensors"][2].erase("begin"); }), "has no 'begin'"));
  CHECK(mentions(refusal([](json& m) { m["tensors"][0]["begin"] = {0}; }),
                 "does not lie in the whole"));
  CHECK(mentions(refusal([](json& m) {
                   m["tensors"][0]["whole"] = {4, std::int64_t{1} << 61};
                 }),
                 "overflows"));
  CHECK(mentions(refusal([](json& m) {
                   m["tensors"][1].erase("begin");
                   m["tensors"][1].erase("whole");
                 }),
                 "is listed twice"));
  CHECK(mentions(refusal([](json& m) { m["schema"] = 1; }), "schema version 1"));
}

}  // namespace moesaic
