#pragma once

// What a step body returns, on its way from pp_rank 0 to all ranks (R5).

#include "runtime/values/pack.hpp"
#include "transport/ids.hpp"
#include "transport/tensor_ref.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace smp {

class rank_context;

/// Tensors up to this many bytes travel with the end of the step; larger ones
/// stay on pp_rank 0 until another rank touches them.
inline constexpr uint64_t travelling_result_bytes = 64 * 1024;

/// Encodes the detached results of a microbatch; on pp_rank 0.
/// @param held gets the names of those that stay here
payload encode_result(const rank_context& rank, const packer& tensors,
                      const value& x, std::vector<object_id>& held);

/// The tensors of a microbatch's results as pp_rank 0 has them, with their
/// graphs.
std::vector<at::Tensor> materialised(const packer& tensors);

/// The result of one microbatch on any rank. Large tensors are fetched when
/// first asked for, and let go on pp_rank 0 when all ranks dropped theirs.
class step_result {
public:
  /// @param own the tensors themselves, where they are; may be empty
  step_result(std::weak_ptr<const rank_context> rank, const payload& x,
              std::vector<at::Tensor> own = {});

  ~step_result();

  step_result(const step_result&) = delete;
  step_result& operator=(const step_result&) = delete;

  /// @returns the results as a T. May wait for pp_rank 0.
  /// @throws error if the session ended meanwhile
  template <class T>
  T get() {
    auto tensors = unpacker{resolve()};
    return get_value<T>(tensors, value_);
  }

private:
  struct entry;

  std::vector<at::Tensor> resolve();

  std::weak_ptr<const rank_context> rank_;
  value value_;
  std::vector<entry> entries_;
};

} // namespace smp
