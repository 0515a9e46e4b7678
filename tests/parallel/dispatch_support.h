#pragma once
// Routings for tests of the exchange of tokens, and the layer of experts that they are checked with, by brute force
// in f64 and through the product's ops on the ranks of one process.
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "core/base/random.h"
#include "kernels/backend.h"
#include "kernels/ops/permute.h"
#include "parallel/dispatch/exchange.h"
#include "parallel/dispatch/routed_plan.h"
#include "parallel/expert_replicas.h"
#include "tests/support/catch.h"

namespace moesaic::test {

enum class Spread : std::uint8_t { even, skewed, one_expert, own_rank, last_rank };

/// The tokens of all ranks and what they chose.
struct ExchangeCase {
  NodeGrid grid{1, 1};
  std::int32_t experts_per_rank = 2;
  std::int64_t choices = 2, width = 5;
  std::vector<std::int64_t> tokens;  ///< by rank
  Spread spread = Spread::even;
  double drop = 0;        ///< share of dropped choices
  bool different = true;  ///< a token's choices are different experts, as far as there are enough
  bool permuted = false;  ///< experts live at other places than in order
  std::int32_t replicas =
      0;  ///< slots for copies on every rank, filled for experts of falling popularity
  double buffer_factor = 0;
  int chunks = 1, passes = 1;
  RowFormat format = RowFormat::plain;  ///< of the forward dispatch
  bool verify = false;
  bool count_experts = false;
  std::uint64_t seed = 1;

  std::int64_t experts() const { return std::int64_t{experts_per_rank} * grid.ranks(); }
  std::int64_t max_tokens() const { return *std::max_element(tokens.begin(), tokens.end()); }
  std::string text() const {
    std::string t = fmt::format(
        "{} x {}, {} experts and {} replicas a rank, top {}, spread {}, drop {}, factor {}, chunks "
        "{}, passes {}, "
        "seed {}, "
        "tokens",
        grid.nodes,
        grid.per_node,
        experts_per_rank,
        replicas,
        choices,
        static_cast<int>(spread),
        drop,
        buffer_factor,
        chunks,
        passes,
        seed);
    for (const std::int64_t n : tokens)
      t += fmt::format(" {}", n);
    return t;
  }
};

/// Draws from one stream of numbers.
class Draw {
 public:
  explicit Draw(std::uint64_t key) : key_(key) {}
  double operator()() { return uniform(key_, next_++); }
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>((*this)() * static_cast<double>(n));
  }

 private:
  std::uint64_t key_, next_ = 0;
};

/// What one rank's tokens hold, as host values.
struct RankTokens {
  std::vector<std::int32_t> topk;  ///< [tokens, k]
  std::vector<std::uint8_t> kept;  ///< [tokens, k]
  std::vector<double> weights;     ///< [tokens, k]
  std::vector<double> x, dout;     ///< [tokens, width]
};

inline std::vector<RankTokens> draw_tokens(const ExchangeCase& c) {
  std::vector<RankTokens> ranks;
  const std::int64_t experts = c.experts();
  for (int r = 0; r < c.grid.ranks(); ++r) {
    Draw draw(mix64(c.seed * 1000 + static_cast<std::uint64_t>(r)));
    RankTokens rank;
    const std::int64_t tokens = c.tokens[static_cast<std::size_t>(r)];
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::vector<std::int32_t> chosen;
      for (std::int64_t j = 0; j < c.choices; ++j) {
        std::int64_t e = 0;
        for (int attempt = 0; attempt < 50; ++attempt) {
          const double u = draw();
          const auto at = [&](double v) {
            return static_cast<std::int64_t>(v * static_cast<double>(experts));
          };
          e = c.spread == Spread::even         ? at(u)
              : c.spread == Spread::skewed     ? at(u * u * u * u)
              : c.spread == Spread::one_expert ? experts / 2
              : c.spread == Spread::own_rank
                  ? r * c.experts_per_rank + static_cast<std::int64_t>(u * c.experts_per_rank)
                  : experts - 1 - static_cast<std::int64_t>(u * c.experts_per_rank);
          const auto e32 = static_cast<std::int32_t>(e);
          if (!c.different || std::find(chosen.begin(), chosen.end(), e32) == chosen.end()) break;
        }
        chosen.push_back(static_cast<std::int32_t>(e));
        rank.kept.push_back(draw() >= c.drop ? 1 : 0);
        if (draw() < c.drop / 4) chosen.back() = -1;
        rank.weights.push_back(0.1 + draw());
      }
      rank.topk.insert(rank.topk.end(), chosen.begin(), chosen.end());
    }
    for (std::int64_t i = 0; i < tokens * c.width; ++i) {
      rank.x.push_back(2 * draw() - 1);
      rank.dout.push_back(2 * draw() - 1);
    }
    ranks.push_back(std::move(rank));
  }
  return ranks;
}

inline std::vector<std::int32_t> places_of_experts(const ExchangeCase& c) {
  std::vector<std::int32_t> places(static_cast<std::size_t>(c.experts()));
  for (std::size_t e = 0; e < places.size(); ++e)
    places[e] = static_cast<std::int32_t>(c.permuted ? (e * 7 + 3) % places.size() : e);
  return places;  // 7 shares no factor with the sizes of these tests
}

/// By loads that make the first experts worth copying.
inline ExpertCopies copies_of(const ExchangeCase& c) {
  std::vector<double> load(static_cast<std::size_t>(c.experts()));
  for (std::size_t e = 0; e < load.size(); ++e)
    load[e] = 1 / static_cast<double>(e + 1);
  return balanced_copies(load, c.grid, places_of_experts(c), c.replicas);
}

/// The place at home of the expert that is, or has a copy, at this one.
inline std::int64_t home_of(const ExchangeCase& c, const ExpertCopies& copies, std::int64_t place) {
  const std::int64_t each = copies.places_per_rank(), rank = place / each, number = place % each;
  if (number < copies.homes) return rank * copies.homes + number;
  const std::int32_t expert = copies.expert_of_slot.at(
      static_cast<std::size_t>(rank * copies.slots + number - copies.homes));
  return places_of_experts(c).at(static_cast<std::size_t>(expert));
}

inline std::vector<TokenChoices> choices_of(const ExchangeCase& c,
                                            const std::vector<RankTokens>& ranks) {
  std::vector<TokenChoices> all;
  const auto turns = copies_of(c).place_of_turn;
  for (const RankTokens& rank : ranks) {
    TokenChoices one{c.choices, {}};
    for (std::size_t a = 0; a < rank.topk.size(); ++a) {
      const std::size_t turn = a / static_cast<std::size_t>(c.choices) % kReplicaTurns;
      one.places.push_back(
          rank.topk[a] < 0 || rank.kept[a] == 0
              ? -1
              : turns[static_cast<std::size_t>(rank.topk[a]) * kReplicaTurns + turn]);
    }
    all.push_back(std::move(one));
  }
  return all;
}

/// Expert that is at home at place p: y_c = a(p, c) x_c^2.
inline double expert_factor(std::int64_t place, std::int64_t column) {
  return 0.5 + uniform(99, static_cast<std::uint64_t>(place * 64 + column));
}

/// out[t] = sum_j w_j E_j(x_t), and the gradients for dout.
struct LayerResult {
  std::vector<double> out, dx, dweights;
};
inline LayerResult brute_force(const ExchangeCase& c,
                               const RankTokens& rank,
                               const TokenChoices& choices) {
  LayerResult result;
  result.out.assign(rank.x.size(), 0);
  result.dx.assign(rank.x.size(), 0);
  result.dweights.assign(rank.topk.size(), 0);
  const ExpertCopies copies = copies_of(c);
  for (std::size_t a = 0; a < choices.places.size(); ++a) {
    if (choices.places[a] < 0) continue;
    const std::size_t t = a / static_cast<std::size_t>(c.choices);
    const std::int64_t home = home_of(c, copies, choices.places[a]);
    for (std::int64_t col = 0; col < c.width; ++col) {
      const std::size_t i = t * static_cast<std::size_t>(c.width) + static_cast<std::size_t>(col);
      const double f = expert_factor(home, col), x = rank.x[i], g = rank.dout[i];
      result.out[i] += rank.weights[a] * f * x * x;
      result.dx[i] += rank.weights[a] * 2 * f * x * g;
      result.dweights[a] += f * x * x * g;
    }
  }
  return result;
}

/// Memory full of NaN (-1 for integers), or a copy of values.
class Field {
 public:
  Field(Shape shape, DType dtype)
      : buffer_(
            std::max<std::size_t>(1, byte_size(dtype) * static_cast<std::size_t>(shape.numel())),
            kCpu,
            "test"),
        view_(buffer_.view(shape, dtype)) {
    std::memset(buffer_.data(), 0xff, buffer_.bytes());
  }
  template <class T>
  Field(Shape shape, DType dtype, const std::vector<T>& values) : Field(shape, dtype) {
    for (std::size_t i = 0; i < values.size(); ++i)
      set(static_cast<std::int64_t>(i), static_cast<double>(values[i]));
  }
  operator TensorView() const { return view_; }       // NOLINT(google-explicit-constructor)
  operator ConstTensorView() const { return view_; }  // NOLINT(google-explicit-constructor)
  TensorView view() const { return view_; }
  double at(std::int64_t i) const {
    switch (view_.dtype()) {
      case DType::f64:
        return view_.as<double>()[i];
      case DType::f32:
        return static_cast<double>(view_.as<float>()[i]);
      case DType::bf16:
        return static_cast<double>(static_cast<float>(view_.as<bf16>()[i]));
      case DType::i32:
        return view_.as<std::int32_t>()[i];
      default:
        return view_.as<std::uint8_t>()[i];
    }
  }
  void set(std::int64_t i, double v) const {
    switch (view_.dtype()) {
      case DType::f64:
        view_.as<double>()[i] = v;
        break;
      case DType::f32:
        view_.as<float>()[i] = static_cast<float>(v);
        break;
      case DType::bf16:
        view_.as<bf16>()[i] = bf16(v);
        break;
      case DType::i32:
        view_.as<std::int32_t>()[i] = static_cast<std::int32_t>(v);
        break;
      default:
        view_.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(v);
    }
  }
  std::vector<double> values() const {
    std::vector<double> v;
    for (std::int64_t i = 0; i < view_.numel(); ++i)
      v.push_back(at(i));
    return v;
  }

 private:
  Buffer buffer_;
  TensorView view_;
};

/// What one rank saw.
struct RankRun {
  LayerResult result;
  Traffic traffic;  ///< of one dispatch, rows of one byte
  ExchangeStatistics statistics;
  int passes = 0;
  std::vector<std::vector<std::int32_t>>
      places;                             ///< here, of the rows of all passes, in their order
  std::vector<double> first_column;       ///< of these rows
  std::vector<std::int64_t> expert_rows;  ///< as the plan tells
};

/// The layer of experts of one rank through ExpertExchange, forward and backward.
class ExchangeRun {
 public:
  ExchangeRun(Communicator* group,
              const ExchangeCase& c,
              ExchangeMethod method,
              DType compute,
              Stream::Mode mode);
  RankRun run(const RankTokens& tokens);

 private:
  void experts_forward();
  void experts_backward();
  void settle();
  double factor(std::int32_t number, std::int64_t column) const {
    return expert_factor(home_of(c_, copies_, rank_ * copies_.places_per_rank() + number), column);
  }

  ExchangeCase c_;
  DType compute_, stats_;
  int rank_;
  ExpertCopies copies_;
  ExpertExchange exchange_;
  BackendOwner owner_;
  Field topk_rows_, weights_rows_, row_count_, rows_, drows_, partial_, offsets_, map_,
      token_of_row_, xs_, ye_, dweights_rows_;
};

/// The same on all ranks of one process; results by rank.
std::vector<RankRun> run_exchange(const ExchangeCase& c,
                                  ExchangeMethod method,
                                  DType compute = DType::f64,
                                  Stream::Mode mode = Stream::Mode::immediate);

}  // namespace moesaic::test
