#pragma once
#include <cstdint>

#include "core/base/tensor.h"

namespace moesaic {

/// Queries whose keys one rank selects for another: later ones see more keys, so that contiguous pieces are unequal work.
struct QueryLoan {
  int partner = -1;       ///< rank along Axis::cp; -1: none
  std::int64_t rows = 0;  ///< the first so many of whoever gives them away
  bool gives = false;
  bool helps() const noexcept { return rows > 0 && !gives; }
};

/// How a rank's piece of a micro-batch hangs together with those of other ranks along Axis::cp; host values. Alone: nothing
/// before, nothing after.
struct PieceLinks {
  int rank = 0;
  /// The rank on which the document begins that holds the piece's first token; `rank` when it begins with the piece.
  int first = 0;
  /// The rank that holds the last token of the document that holds the piece's last token.
  int last = 0;
  /// How many of the piece's tokens are of that document.
  std::int64_t last_tokens = 0;
  QueryLoan loan;
  bool continues() const noexcept { return first < rank; }
  bool continued() const noexcept { return last > rank; }
};

/// One micro-batch as kernels see it: documents packed behind each other. Device tensors; the host knows the extents.
///
///   tokens    i32 [T]      targets  i32 [T]  token to predict at each position, -100 = none
///   positions i32 [T]      position inside the document
///   cu        i32 [N + 1]  document boundaries, cu[0] = 0, cu[N] = T; empty documents allowed
///   mtp_tokens, mtp_targets i32 [T]  tokens one further and targets two further (empty without MTP)
///
/// Where the micro-batch is cut along Axis::cp these are of the rank's piece, and besides:
///   keys      i32          document boundaries of all tokens up to the piece's end; they begin where the documents do
///   batch     i32          of the whole micro-batch
///   lent      i32          of all tokens up to the last query that another rank lends to this one (links.loan); empty = none
struct Sequence {
  ConstTensorView tokens;
  ConstTensorView targets;
  ConstTensorView positions;
  ConstTensorView cu;
  ConstTensorView mtp_tokens;
  ConstTensorView mtp_targets;
  ConstTensorView keys = {};   ///< empty = cu
  ConstTensorView batch = {};  ///< empty = cu
  ConstTensorView lent = {};
  PieceLinks links = {};
  std::int64_t num_tokens() const { return tokens.dim(0); }
  std::int64_t num_documents() const { return cu.dim(0) - 1; }
  ConstTensorView key_documents() const { return keys.empty() ? cu : keys; }
  ConstTensorView batch_documents() const { return batch.empty() ? cu : batch; }
};

}  // namespace moesaic
