#pragma once

// The result of a step body, in transit from pp_rank 0 to all ranks (R5).

#include "runtime/values/pack.hpp"
#include "transport/ids.hpp"
#include "transport/tensor_ref.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace smp {

class rank_context;
class running_call;

/// Tensors up to this size are sent with the end of the step; larger ones stay
/// on pp_rank 0 until another rank accesses them.
inline constexpr uint64_t travelling_result_bytes = 64 * 1024;

/// Encodes the detached results of the microbatch that `ex` runs; on pp_rank 0.
payload encode_result(const running_call& ex, const packer& tensors,
                      const value& x);

/// The result tensors of a microbatch as pp_rank 0 has them, with their
/// graphs.
std::vector<at::Tensor> materialised(const packer& tensors);

/// The result of one microbatch on any rank. Large tensors are fetched at the
/// first access, and released on pp_rank 0 once all ranks dropped theirs.
class step_result {
public:
  /// @param own the tensors themselves, on pp_rank 0; may be empty
  step_result(std::weak_ptr<const rank_context> rank, const payload& x,
              std::vector<at::Tensor> own = {});

  ~step_result();

  step_result(const step_result&) = delete;
  step_result& operator=(const step_result&) = delete;

  /// @returns the results as a T. May wait for pp_rank 0.
  /// @throws error if the session ended in the meantime
  template <class T>
  T get() {
    auto tensors = unpacker{resolve()};
    return get_value<T>(tensors, value_);
  }

  /// How often the optimizers of pp_rank 0 were called before the step.
  uint64_t updates() const noexcept {
    return updates_;
  }

private:
  struct entry;

  std::vector<at::Tensor> resolve();

  std::weak_ptr<const rank_context> rank_;
  value value_;
  uint64_t updates_ = 0;
  std::vector<entry> entries_;
};

} // namespace smp
