#pragma once

#include "runtime/session/tensor_collectives.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace smp {

class packer;

/// @param group ranks
/// @param told int64[ranks, 64]: what each says of its arguments
/// @throws error (user_code) naming ranks, tensor and both forms; (protocol)
/// naming the rank that says what no arguments are
void compare_forms(const std::vector<uint64_t>& group, const at::Tensor& told);

/// Ranks that share modules have batches of the same sizes; what else the first
/// collective said would be hard to understand. So peers tell each other the
/// forms of what the step's body is given, once, before they call anything.
class form_comparison {
public:
  /// At the begin of the body of each microbatch. The first one asks, and those
  /// that begin while it waits do so, too.
  /// @throws error as `compare_forms`
  void run(const packer& arguments);

private:
  std::optional<tensor_future> theirs_;
};

} // namespace smp
