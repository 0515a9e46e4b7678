#include "core/train/lr_schedule.h"

#include <cmath>
#include <string>

#include "core/base/error.h"
#include "tests/support/catch.h"

using moesaic::LrSchedule;

TEST_CASE("learning rate: warm-up rises linearly to the peak at its last step") {
  for (const auto kind :
       {LrSchedule::Kind::constant, LrSchedule::Kind::cosine, LrSchedule::Kind::wsd}) {
    const LrSchedule s{.kind = kind,
                       .peak = 4e-4,
                       .floor = 4e-5,
                       .warmup_steps = 4,
                       .total_steps = 20,
                       .decay_steps = 8};
    CHECK(s.at(1) == Approx(1e-4));
    CHECK(s.at(3) == Approx(3e-4));
    CHECK(s.at(4) == Approx(4e-4));
  }
}

TEST_CASE("learning rate: without warm-up the first step has the peak") {
  const LrSchedule constant{.peak = 1e-3};
  CHECK(constant.at(1) == 1e-3);
  CHECK(constant.at(1000000) == 1e-3);
}

TEST_CASE("learning rate: cosine is half way at half time and stays at the floor") {
  const LrSchedule s{.kind = LrSchedule::Kind::cosine,
                     .peak = 2.0,
                     .floor = 1.0,
                     .warmup_steps = 10,
                     .total_steps = 30};
  CHECK(s.at(20) == Approx(1.5));
  CHECK(s.at(15) == Approx(1.0 + 0.5 * (1.0 + std::sqrt(0.5))));
  CHECK(s.at(30) == Approx(1.0));
  CHECK(s.at(99) == Approx(1.0));
}

TEST_CASE("learning rate: warm-up, stable, decay in three shapes") {
  LrSchedule s{.kind = LrSchedule::Kind::wsd,
               .peak = 3.0,
               .floor = 1.0,
               .warmup_steps = 2,
               .total_steps = 20,
               .decay_steps = 8};
  CHECK(s.at(12) == 3.0);
  s.shape = LrSchedule::Shape::linear;
  CHECK(s.at(14) == Approx(2.5));
  s.shape = LrSchedule::Shape::one_minus_sqrt;
  CHECK(s.at(14) == Approx(2.0));
  s.shape = LrSchedule::Shape::cosine;
  CHECK(s.at(16) == Approx(2.0));
  for (const auto shape :
       {LrSchedule::Shape::linear, LrSchedule::Shape::cosine, LrSchedule::Shape::one_minus_sqrt}) {
    s.shape = shape;
    CHECK(s.at(20) == Approx(1.0));
    CHECK(s.at(21) == Approx(1.0));
  }
}

TEST_CASE("learning rate: impossible schedules name the value") {
  const auto text = [](LrSchedule s) {
    try {
      s.check();
    } catch (const moesaic::UsageError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const LrSchedule good{.kind = LrSchedule::Kind::wsd,
                        .peak = 1e-3,
                        .warmup_steps = 5,
                        .total_steps = 50,
                        .decay_steps = 15};
  CHECK(text(good).empty());
  auto bad = good;
  bad.decay_steps = 46;
  CHECK(text(bad).find("46") != std::string::npos);
  bad = good;
  bad.warmup_steps = 51;
  CHECK(text(bad).find("51") != std::string::npos);
  bad = good;
  bad.floor = 2e-3;
  CHECK(text(bad).find("0.002") != std::string::npos);
  bad = good;
  bad.peak = -1;
  CHECK(text(bad).find("-1") != std::string::npos);
  CHECK_THROWS_AS(moesaic::lr_decay_shape_from_name("sqrt"), moesaic::UsageError);
  CHECK(moesaic::lr_decay_shape_from_name("1-sqrt") == LrSchedule::Shape::one_minus_sqrt);
}
