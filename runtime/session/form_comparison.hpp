#pragma once

#include "runtime/collectives/tensor_collectives.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace smp {

class packer;

/// @param group ranks
/// @param told int64[ranks, 64]: each rank's description of its arguments
/// @throws error (user_code) naming ranks, tensor and both forms; (protocol)
/// naming a rank whose row describes no valid arguments
void compare_forms(const std::vector<uint64_t>& group, const at::Tensor& told);

/// Ranks that share modules need batches of the same sizes; otherwise the first
/// collective would fail with an obscure error. So peers exchange the forms of
/// the step body's arguments, once, before they call anything.
class form_comparison {
public:
  /// Call at the start of each microbatch's body. The first one starts the
  /// exchange; bodies that start while it waits wait too.
  /// @throws error as `compare_forms`
  void run(const packer& arguments);

private:
  std::optional<tensor_future> theirs_;
};

} // namespace smp
