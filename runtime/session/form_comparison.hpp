#pragma once

#include "runtime/session/tensor_collectives.hpp"

#include <optional>

namespace smp {

class packer;

/// Ranks that share modules have batches of the same sizes; what else the first
/// collective said would be hard to understand. So peers tell each other the
/// forms of what the step's body is given, once, before they call anything.
class form_comparison {
public:
  /// At the begin of the body of each microbatch. The first one asks, and those
  /// that begin while it waits do so, too.
  /// @throws error (user_code) naming ranks, tensor and both forms
  void run(const packer& arguments);

private:
  std::optional<tensor_future> theirs_;
};

} // namespace smp
