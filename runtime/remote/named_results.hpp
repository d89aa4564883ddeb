#pragma once

#include "actors/protocol/result_name.hpp"
#include "transport/tensor_ref.hpp"
#include "transport/wait.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace smp {

/// A rank that goes on before the answer to its request is there must be able
/// to refer to the results by name (actors/protocol/result_name.hpp). So
/// whoever gets such a name may ask the owner for what does not exist yet; this
/// holds the results and those who asked too early. Results live until they are
/// dropped, at most until their microbatch ends. Thread-safe.
class named_results {
public:
  /// The answer to a request for a result.
  struct answer {
    at::Tensor tensor;
    tensor_ref bytes;
    failure why; // there is none
  };

  using askers = std::vector<std::pair<rank_id, object_id>>;

  /// @returns the ranks that asked for it before
  askers put(object_id id, microbatch_id m, at::Tensor x, tensor_ref bytes);

  /// @returns nothing if it is still to come: `put`, `fail_step` or `end_step`
  /// will name `by`
  std::optional<answer> ask(rank_id by, object_id id);

  /// @returns the result, or an undefined tensor.
  at::Tensor find(object_id id) const;

  /// @returns what is done when `id` is here, or null if it is.
  completion_ptr arrival(object_id id);

  /// Lets go of `id`.
  void drop(object_id id);

  /// Lets go of what a microbatch left.
  void drop(step_id s, microbatch_id m);

  /// What is not here yet will not come.
  askers fail_step(step_id s, const failure& why);

  /// Lets go of everything of `s` and of all steps before.
  askers end_step(step_id s);

  /// Results that are here.
  size_t size() const;

private:
  struct entry {
    at::Tensor tensor; // undefined: still to come
    tensor_ref bytes;
    microbatch_id microbatch;
    completion_ptr arrived;
    std::vector<rank_id> asked;
  };

  using entries = std::map<object_id, entry>;

  failure refusal(object_id id) const;
  static void give_up(entry& x, object_id id, const failure& why,
                      askers& result);

  mutable std::mutex mutex_;
  entries entries_;
  uint32_t over_ = 0;   // all steps up to this one
  uint32_t failed_ = 0; // this step
  failure why_;
};

} // namespace smp
