// Every key says what it means to change it when a run continues.
#include <set>

#include "core/config/fields.h"
#include "core/config/resume_rules.h"
#include "core/config/schema.h"
#include "tests/support/catch.h"
#include "tests/unit/config_support.h"

using namespace config_tests;
namespace config = moesaic::config;
using config::OnResume;

namespace {

bool is_value(const config::Field& field) {
  return field.type.section() == nullptr;
}

OnResume kind_of(const std::string& key) {
  const config::ResumeRule* rule = config::resume_rule(key);
  REQUIRE(rule != nullptr);
  return rule->kind;
}

}  // namespace

TEST_CASE("config: every key has its rule for runs that continue (core/config/resume_rules.h)") {
  std::set<std::string> keys;
  config::walk(config::root_section(), "", [&](const std::string& key, const config::Field& field) {
    keys.insert(key);
    if (!is_value(field)) return;
    INFO("add a line for " << key << " to core/config/resume_rules.h");
    CHECK(config::resume_rule(key) != nullptr);
  });
  std::set<std::string_view> seen;
  for (const config::ResumeRule& rule : config::kResumeRules) {
    CAPTURE(rule.key);
    CHECK(seen.insert(rule.key).second);
    std::string key(rule.key);
    if (key.ends_with(".*")) key.resize(key.size() - 2);
    if (key.ends_with("[]")) key.resize(key.size() - 2);
    CHECK(keys.contains(key));  // no rule outlives its key
  }
}

TEST_CASE("config: the longest rule counts, whatever the item of a list") {
  CHECK(kind_of("model.hidden_size") == OnResume::refused);
  CHECK(kind_of("model.linear_attn_config.kda_layers") == OnResume::refused);
  CHECK(kind_of("model.balance.aux_loss_weight") == OnResume::logged);
  CHECK(kind_of("model.balance.aux_loss") == OnResume::refused);
  CHECK(kind_of("train.phases[3].lr_scale[12].scale") == OnResume::logged);
  CHECK(kind_of("run.seed") == OnResume::refused);
  CHECK(kind_of("log.interval") == OnResume::free);
  CHECK(config::resume_rule("modelling.x") == nullptr);
  CHECK(config::resume_rule("log") == nullptr);
}

TEST_CASE("config: explain says what a change means to a run that continues") {
  CHECK(contains(config::explain("model.hidden_size"),
                 "on resume: must not change (it was trained as another model)"));
  CHECK(contains(config::explain("optimizer.lr"), "on resume: may change; the run gives other"));
  CHECK(contains(config::explain("log.interval"), "on resume: may change; the numbers stay"));
}
