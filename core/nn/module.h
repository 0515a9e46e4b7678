#pragma once
#include "core/nn/tape.h"
#include "core/nn/token_slices.h"
#include "parallel/dispatch/exchange.h"

namespace moesaic {

/// Extents for which activations are declared.
struct Bounds {
  std::int64_t tokens = 0;    ///< T of a micro-batch, or of this rank's piece of it (`context`)
  std::int64_t sequence = 0;  ///< no document is longer; 0 = T
  /// Carries tokens to the ranks of their experts; null when every rank has all experts. Must outlive what is declared.
  ExpertExchange* exchange = nullptr;
  /// The runs of tokens along Axis::tp and Axis::etp; null when there is one. Outlive what is declared.
  const TokenSlices* slices = nullptr;
  const TokenSlices* expert_slices = nullptr;
  /// The pieces of a micro-batch along Axis::cp, and its runs over all ranks that share it, along Axis::cp and Axis::tp
  /// (may be `slices` or `context`); null as above.
  const TokenSlices* context = nullptr;
  const TokenSlices* batch_slices = nullptr;
  /// A micro-batch is worked off in so many equal pieces of `tokens` tokens, each behind the one before it (Tape::follow()),
  /// in backward the other way. Not with `context`.
  std::int64_t pieces = 1;
  /// Tokens of the whole micro-batch.
  std::int64_t batch_tokens() const {
    return context != nullptr ? tokens * context->size() : tokens * pieces;
  }
  /// Tokens up to the end of this rank's piece: those that its queries may see. Of pieces one after the other, those that the
  /// last one's may.
  std::int64_t key_tokens() const {
    return context != nullptr ? tokens * (context->rank() + 1) : tokens * pieces;
  }
  /// Tokens of this rank outside of what is split over Axis::tp.
  std::int64_t own_tokens() const { return slices != nullptr ? slices->own(tokens) : tokens; }
  std::int64_t longest() const { return sequence > 0 ? sequence : batch_tokens(); }
};

/// A part of a layer with an explicit forward and backward. The constructor declares parameters; declare() declares
/// activations and the steps that compute y from x; backward() turns dy into dx and adds into parameter gradients.
/// Backward code reads activations through Tape::in() and holds no case for recomputation.
class Module {
 public:
  virtual ~Module() = default;
  Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  /// Whether T are all tokens of the micro-batch even where they are cut (Bounds::slices): y and dx are then this rank's
  /// shares, to be added up. Otherwise T are the rank's own.
  virtual bool takes_all_tokens() const { return true; }
  /// Adds steps that read `x` [T, d] and write `y` [T, d], both of compute type.
  virtual void declare(TapeSpec& tape, const Bounds& bounds, ActId x, ActId y) = 0;
  /// dx is overwritten; dy is only read. Called inside Tape::backward().
  virtual void backward(Tape& tape, ConstTensorView dy, TensorView dx) = 0;
};

// --- linear layers through the tape; weights are [out, in]
/// y (+)= x W^T.
void linear(Tape& tape, TensorView y, ConstTensorView x, StorageId weight, bool accumulate = false);
/// dx (+)= dy W and dW += dy^T x. `dx` may be empty (inputs without gradient).
void linear_backward(Tape& tape,
                     TensorView dx,
                     ConstTensorView dy,
                     ConstTensorView x,
                     StorageId weight,
                     bool accumulate_dx);
/// The same for rows [begin, end) of W, i.e. for a slice of the outputs.
void linear_rows(Tape& tape, TensorView y, ConstTensorView x, StorageId weight, RowRange rows);
void linear_rows_backward(Tape& tape,
                          TensorView dx,
                          ConstTensorView dy,
                          ConstTensorView x,
                          StorageId weight,
                          RowRange rows,
                          bool accumulate_dx);
/// `x` in the wanted type: x itself, or a rounded copy that lives as long as Tape::temp() memory.
ConstTensorView cast_to(Tape& tape, ConstTensorView x, DType dtype, const char* tag);

// --- declarations
ParameterSpec matrix_spec(
    std::string name, std::int64_t rows, std::int64_t cols, double std, Part part);
ParameterSpec vector_spec(std::string name,
                          std::int64_t n,
                          Init::Kind init,
                          Part part,
                          StoredAs stored_as = StoredAs::compute);
/// The same parameter with dimension `dim` split over Axis::tp.
ParameterSpec split_over_tp(ParameterSpec spec, int dim);
/// Row blocks of `heads` consecutive heads, each cut into consecutive parts (per-head Muon).
std::vector<RowRange> head_blocks(std::int64_t heads, std::initializer_list<std::int64_t> parts);

}  // namespace moesaic
