#include "memory/tiers/touch_log.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include <fmt/format.h>

#include "core/base/durable_file.h"
#include "core/base/error.h"
#include "core/base/json_value.h"

namespace moesaic::tiers {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 20;   // layers, experts, micro-batches
constexpr std::int64_t kLarge = std::int64_t{1} << 53;  // what JSON readers keep exactly

constexpr std::string_view kBeginning = "{\"moesaic_touch_log\":";

// Of a log that is to be written: what other files hold is not replaced.
const std::filesystem::path& checked(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string there(kBeginning.size(), ' ');
  file.read(there.data(), static_cast<std::streamsize>(there.size()));
  if (file.gcount() > 0 && there != kBeginning)
    throw UsageError(path.string() +
                     ": exists and is no touch log, so it is not replaced; name another file");
  return path;
}

std::string_view text(Updates updates) {
  return updates == Updates::none ? "none" : updates == Updates::touched ? "touched" : "dense";
}

class Reader {
 public:
  explicit Reader(const std::filesystem::path& path) : path_(path), file_(path, std::ios::binary) {
    if (!file_) throw InputError(path.string() + ": cannot be opened");
  }

  TouchLog read() {
    std::string line;
    while (std::getline(file_, line)) {
      ++line_;
      // The last line of a run that was killed may be cut anywhere.
      const bool is_cut = file_.eof();
      try {
        const JsonValue value = parse_json(line, where(), {.first_byte = 1});
        const JsonNode node(value, where());
        line_ == 1 ? head(node) : visit(node);
      } catch (const InputError&) {
        if (!is_cut || line_ == 1) throw;
        log_.last_step_was_cut = true;
      }
    }
    if (line_ == 0) throw InputError(path_.string() + ": is empty");
    finish_step(true);
    if (log_.entries.empty()) throw InputError(path_.string() + ": holds no whole step");
    return std::move(log_);
  }

 private:
  std::string where() const { return fmt::format("{}:{}", path_.string(), line_); }
  [[noreturn]] void refuse(const std::string& what) const {
    throw InputError(where() + ": " + what);
  }

  void head(const JsonNode& node) {
    node.object();
    if (node.member_or_null("moesaic_touch_log").is_null())
      refuse("is no touch log: the first line has no \"moesaic_touch_log\"");
    node.member("moesaic_touch_log").integer(1, 1);
    node.only({"moesaic_touch_log", "layers", "experts", "expert_bytes", "state_bytes", "updates"});
    log_.layers = static_cast<std::int32_t>(node.member("layers").integer(1, kMost));
    log_.experts = static_cast<std::int32_t>(node.member("experts").integer(1, kMost));
    log_.expert_bytes = static_cast<std::uint64_t>(node.member("expert_bytes").integer(0, kLarge));
    log_.state_bytes = static_cast<std::uint64_t>(node.member("state_bytes").integer(0, kLarge));
    const std::string updates = node.member("updates").text();
    for (const Updates u : {Updates::none, Updates::touched, Updates::dense})
      if (updates == text(u)) {
        log_.updates = u;
        filler_ = std::make_unique<TouchFiller>(log_);
        return;
      }
    node.member("updates").fail(fmt::format("\"{}\"; none, touched or dense", updates));
  }

  void visit(const JsonNode& node) {
    node.object();
    node.only({"step", "layer", "kind", "micro_batch", "tokens", "touched"});
    const std::int64_t step = node.member("step").integer(0, kLarge);
    Visit v;
    v.layer = static_cast<std::int32_t>(node.member("layer").integer(0, log_.layers - 1));
    const std::string kind = node.member("kind").text();
    const std::vector<VisitKind> kinds{VisitKind::forward, VisitKind::backward, VisitKind::update};
    const auto found =
        std::find_if(kinds.begin(), kinds.end(), [&](VisitKind k) { return kind == name(k); });
    if (found == kinds.end())
      node.member("kind").fail(fmt::format("\"{}\"; forward, backward or update", kind));
    v.kind = *found;
    if (v.kind != VisitKind::update)
      v.micro_batch = static_cast<std::int32_t>(node.member("micro_batch").integer(0, kMost));
    const std::vector<Block> blocks = touched(node, v);
    if (step != step_) {
      if (step < step_) refuse(fmt::format("step {} after step {}", step, step_));
      finish_step(false);
      step_ = step;
    }
    if (!schedule_.empty()) {
      const std::size_t at = entries_.size();
      if (at >= schedule_.size() || schedule_[at] != v)
        refuse(
            fmt::format("{} of layer {} is not what the first step did as its visit {}: a log "
                        "is of steps that are all alike",
                        kind,
                        v.layer,
                        at + 1));
    }
    entries_.push_back({step, v, filler_->blocks(step, v, blocks)});
  }

  std::vector<Block> touched(const JsonNode& node, const Visit& v) const {
    std::vector<Block> blocks;
    if (v.kind != VisitKind::forward) return blocks;
    const Block first = static_cast<Block>(v.layer) * log_.experts;
    const JsonNode tokens = node.member_or_null("tokens");
    if (!tokens.is_null()) {
      if (tokens.list().size() != static_cast<std::size_t>(log_.experts))
        tokens.fail(fmt::format(
            "{} numbers; one for each of the {} experts", tokens.list().size(), log_.experts));
      for (std::size_t e = 0; e < tokens.list().size(); ++e)
        if (tokens.item(e).integer(0, kLarge) > 0) blocks.push_back(first + static_cast<Block>(e));
      return blocks;
    }
    const JsonNode experts = node.member("touched");
    for (std::size_t i = 0; i < experts.list().size(); ++i)
      blocks.push_back(first + experts.item(i).integer(0, log_.experts - 1));
    std::sort(blocks.begin(), blocks.end());
    if (std::adjacent_find(blocks.begin(), blocks.end()) != blocks.end())
      experts.fail("names an expert twice");
    return blocks;
  }

  // Takes over the entries of the step that ended, if it is whole.
  void finish_step(bool at_end) {
    if (entries_.empty()) return;
    if (schedule_.empty()) {
      for (const TouchLog::Entry& e : entries_)
        schedule_.push_back(e.visit);
    }
    if (entries_.size() != schedule_.size()) {
      if (!at_end)
        refuse(fmt::format(
            "step {} had {} visits, the first step {}", step_, entries_.size(), schedule_.size()));
      log_.last_step_was_cut = true;
    } else {
      std::move(entries_.begin(), entries_.end(), std::back_inserter(log_.entries));
    }
    entries_.clear();
  }

  std::filesystem::path path_;
  std::ifstream file_;
  std::int64_t line_ = 0, step_ = -1;
  TouchLog log_;
  std::unique_ptr<TouchFiller> filler_;
  std::vector<Visit> schedule_;
  std::vector<TouchLog::Entry> entries_;
};

}  // namespace

std::int64_t TouchLog::steps() const {
  std::int64_t steps = 0, last = -1;
  for (const Entry& e : entries) {
    steps += e.step != last ? 1 : 0;
    last = e.step;
  }
  return steps;
}

std::vector<Visit> TouchLog::schedule() const {
  std::vector<Visit> visits;
  for (const Entry& e : entries) {
    if (e.step != first_step()) break;
    visits.push_back(e.visit);
  }
  return visits;
}

TouchLog read_touch_log(const std::filesystem::path& path) {
  return Reader(path).read();
}

TouchFiller::TouchFiller(const TouchLog& log) : experts_(log.experts), updates_(log.updates) {}

namespace {

bool has_layer(const std::vector<std::pair<Visit, std::vector<Block>>>& forwards,
               std::int32_t layer) {
  return std::any_of(forwards.begin(), forwards.end(), [&](const auto& forward) {
    return forward.first.layer == layer;
  });
}

}  // namespace

const TouchFiller::Forwards& TouchFiller::updated_by(const Visit& update) const {
  return has_layer(forwards_, update.layer) ? forwards_ : forwards_before_;
}

std::vector<Block> TouchFiller::blocks(std::int64_t step,
                                       const Visit& visit,
                                       const std::vector<Block>& touched) {
  if (step != step_) forwards_before_ = std::exchange(forwards_, {});
  step_ = step;
  if (visit.kind == VisitKind::forward) {
    forwards_.emplace_back(visit, touched);
    return touched;
  }
  std::vector<Block> blocks;
  const bool is_update = visit.kind == VisitKind::update;
  const Forwards& forwards = is_update ? updated_by(visit) : forwards_;
  if (is_update && updates_ == Updates::dense) {
    const Block first = static_cast<Block>(visit.layer) * experts_;
    // Where a log begins there is no step before.
    for (Block b = first; b < first + experts_ && has_layer(forwards, visit.layer); ++b)
      blocks.push_back(b);
    return blocks;
  }
  for (const auto& [forward, experts] : forwards) {
    const bool counts =
        forward.layer == visit.layer && (is_update || forward.micro_batch == visit.micro_batch);
    if (counts) blocks.insert(blocks.end(), experts.begin(), experts.end());
  }
  std::sort(blocks.begin(), blocks.end());
  blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
  if (visit.kind == VisitKind::backward) std::reverse(blocks.begin(), blocks.end());
  return blocks;
}

TouchLogWriter::TouchLogWriter(const std::filesystem::path& path, const TouchLog& head)
    : file_(std::make_unique<DurableFile>(checked(path), DurableFile::Mode::replace)),
      experts_(head.experts) {
  file_->write(
      fmt::format("{}1,\"layers\":{},\"experts\":{},\"expert_bytes\":{},\"state_bytes\":{},"
                  "\"updates\":\"{}\"}}\n",
                  kBeginning,
                  head.layers,
                  head.experts,
                  head.expert_bytes,
                  head.state_bytes,
                  text(head.updates)));
}
TouchLogWriter::~TouchLogWriter() = default;

void TouchLogWriter::forward(std::int64_t step,
                             const Visit& visit,
                             const std::vector<std::int64_t>& tokens) {
  MOESAIC_CHECK(tokens.size() == static_cast<std::size_t>(experts_), "a number for each expert");
  file_->write(
      fmt::format("{{\"step\":{},\"layer\":{},\"kind\":\"forward\",\"micro_batch\":{},"
                  "\"tokens\":[{}]}}\n",
                  step,
                  visit.layer,
                  visit.micro_batch,
                  fmt::join(tokens, ",")));
}

void TouchLogWriter::forward_touched(std::int64_t step,
                                     const Visit& visit,
                                     const std::vector<Block>& blocks) {
  std::vector<Block> experts;
  for (const Block b : blocks)
    experts.push_back(b % experts_);
  file_->write(
      fmt::format("{{\"step\":{},\"layer\":{},\"kind\":\"forward\",\"micro_batch\":{},"
                  "\"touched\":[{}]}}\n",
                  step,
                  visit.layer,
                  visit.micro_batch,
                  fmt::join(experts, ",")));
}

void TouchLogWriter::other(std::int64_t step, const Visit& visit) {
  file_->write(
      visit.kind == VisitKind::update
          ? fmt::format("{{\"step\":{},\"layer\":{},\"kind\":\"update\"}}\n", step, visit.layer)
          : fmt::format("{{\"step\":{},\"layer\":{},\"kind\":\"{}\",\"micro_batch\":{}}}\n",
                        step,
                        visit.layer,
                        name(visit.kind),
                        visit.micro_batch));
}

void TouchLogWriter::finish() {
  file_->finish(Sync::no);
}

void write_touch_log(const std::filesystem::path& path, const TouchLog& log) {
  TouchLogWriter writer(path, log);
  for (const TouchLog::Entry& e : log.entries) {
    if (e.visit.kind == VisitKind::forward) {
      writer.forward_touched(e.step, e.visit, e.blocks);
    } else {
      writer.other(e.step, e.visit);
    }
  }
  writer.finish();
}

}  // namespace moesaic::tiers
