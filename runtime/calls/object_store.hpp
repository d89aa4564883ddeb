#pragma once

#include "runtime/calls/messages.hpp"
#include "runtime/calls/named_results.hpp"
#include "transport/fabric.hpp"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace smp {

/// Results and gradients stay on the rank that made them until another rank
/// needs their bytes (R38). Each rank has one table of the objects it holds for
/// others and of the objects it fetched from them. Thread-safe.
class object_store {
public:
  /// @param x outlives this store and passes messages of kind `object` to
  /// `deliver`, peer losses to `peer_lost`
  explicit object_store(fabric& x);

  /// Fails all pending fetches with `cancelled`.
  ~object_store();

  object_store(const object_store&) = delete;
  object_store& operator=(const object_store&) = delete;

  /// Keeps `x`, a result of a step, until `holders` different ranks have
  /// released it. `x` must not be written to afterwards (clone it otherwise,
  /// R13). A non-contiguous tensor is copied here, not on the thread that sends
  /// it.
  /// @param id its `step_result_name`, which was never used before
  /// @pre holders > 0
  /// @throws error (unsupported) if `x` cannot cross ranks
  void hold(object_id id, at::Tensor x, uint32_t holders = 1);

  /// @returns the tensor of `id` if this rank holds it or has fetched it.
  std::optional<at::Tensor> find(object_id id) const;

  /// Returns the tensor of `id`: without a copy if this rank owns it; else asks
  /// the owner once for all callers, parks (`waiter::current()`), and keeps the
  /// content until this rank releases `id`.
  /// @throws error naming the object if its owner does not hold it or is lost
  at::Tensor fetch(object_id id);

  /// Tells the owners that this rank no longer needs `ids`: one message each.
  /// Idempotent, also for ids that were never held.
  void release(std::vector<object_id> ids);

  /// Drops the results of a step that this rank holds and other ranks did not
  /// release, because they never learned of them.
  void withdraw(step_id s);

  // -- results of requests (runtime/calls/named_results.hpp) ------------------

  /// Holds the result `id` of this rank until it is dropped. As with `hold`,
  /// `x` must not be written to afterwards.
  /// @throws error (unsupported) if `x` cannot cross ranks
  void put(object_id id, microbatch_id m, at::Tensor x);

  /// Begins to fetch `id`. @returns a completion: then `find(id)` has it
  completion_ptr want(object_id id);

  /// Begins to fetch the results a request needs; `end_microbatch` drops them.
  /// @returns a completion of all fetches, or null if all are here
  completion_ptr gather(const std::vector<object_id>& ids, step_id s,
                        microbatch_id m);

  /// @returns the first of `ids` that has not arrived yet
  std::optional<object_id>
  first_missing(const std::vector<object_id>& ids) const;

  /// @returns the fetched tensor of `id`, and removes it from this store.
  /// @pre `want(id)` is done
  at::Tensor take(object_id id);

  /// Drops results of this rank and copies of others' results, without a
  /// message to any other rank.
  void drop(const std::vector<object_id>& ids);

  /// Drops everything that a microbatch left here.
  void end_microbatch(step_id s, microbatch_id m);

  /// Fails the named results of this step that have not arrived, with `why`.
  void fail_step(step_id s, const failure& why);

  /// Drops everything that a step left here.
  void end_step(step_id s);

  /// Handles a message of kind `object`. Never blocks, never throws: a
  /// malformed message is counted and fails the fetch it names.
  void deliver(rank_id from, message x);

  /// Fails every fetch from `x.rank`, pending and future.
  void peer_lost(const failure& x) {
    fail(x.rank, x);
  }

  /// Fails every fetch from `owner` with `x`, pending and future.
  void fail(rank_id owner, const failure& x);

  /// Number of objects that this rank holds for others; 0 after a step.
  size_t held() const;

  /// Number of objects of other ranks that were fetched and not released.
  size_t cached() const;

  /// Number of malformed messages.
  uint64_t malformed() const noexcept;

  /// Drops everything; pending fetches fail with `cancelled`.
  void clear();

private:
  struct held_tensor;
  struct fetching;
  using fetching_ptr = std::shared_ptr<fetching>;

  at::Tensor release_held(rank_id by, object_id id);
  fetching_ptr join(object_id id);
  void answer(rank_id to, object_id id);
  void finish(object_id id, at::Tensor x, failure why);
  void forget_failed(object_id id, const fetching_ptr& x);
  void answer(rank_id to, object_id id, const tensor_ref& bytes);
  void refuse(rank_id to, object_id id, const failure& why);
  void answer(const named_results::askers& xs, const failure& why);
  void forget(const std::vector<object_id>& ids);
  void send(rank_id to, const object_message& x,
            fabric::sent_callback done = {});
  void handle(rank_id from, const object_fetch& x);
  void handle(rank_id from, const object_content& x);
  void handle(rank_id from, const object_refusal& x);
  void handle(rank_id from, const object_release& x);

  fabric& fabric_;
  mutable std::mutex mutex_;
  std::map<object_id, held_tensor> held_;
  std::map<object_id, fetching_ptr> fetched_;
  named_results named_;
  /// Copies of named results that requests needed.
  std::map<std::pair<step_id, microbatch_id>, std::vector<object_id>> gathered_;
  std::map<rank_id, failure> lost_;
  std::atomic<uint64_t> malformed_ = 0;
};

} // namespace smp
