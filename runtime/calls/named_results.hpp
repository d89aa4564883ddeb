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

/// A rank that continues before the reply to its request has arrived refers to
/// the results by name (actors/protocol/result_name.hpp). A rank may thus ask
/// the owner for a result that does not exist yet. Holds the results, and the
/// ranks that asked early. Results live until they are dropped, at most until
/// their microbatch ends. Thread-safe.
class named_results {
public:
  /// The answer to a request for a result.
  struct answer {
    at::Tensor tensor;
    tensor_ref bytes;
    failure why; // set if there is no result
  };

  using askers = std::vector<std::pair<rank_id, object_id>>;

  /// @returns the ranks that asked for it before it existed
  askers put(object_id id, microbatch_id m, at::Tensor x, tensor_ref bytes);

  /// @returns nullopt if the result is still pending: `put`, `fail_step` or
  /// `end_step` will return `by` among its askers
  std::optional<answer> ask(rank_id by, object_id id);

  /// @returns the result, or an undefined tensor.
  at::Tensor find(object_id id) const;

  /// @returns a completion of the arrival of `id`, or null if it is here.
  completion_ptr arrival(object_id id);

  /// Drops `id`.
  void drop(object_id id);

  /// Drops the results of a microbatch.
  void drop(step_id s, microbatch_id m);

  /// Fails the results that are still pending; they will not arrive.
  askers fail_step(step_id s, const failure& why);

  /// Drops all results of step `s` and of all earlier steps.
  askers end_step(step_id s);

  /// Number of results that exist.
  size_t size() const;

private:
  struct entry {
    at::Tensor tensor; // undefined: pending
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
