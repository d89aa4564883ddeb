#pragma once

#include "runtime/remote/messages.hpp"
#include "runtime/remote/named_results.hpp"
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

/// Results and gradients stay where they were made until somebody needs their
/// bytes (R38). Each rank has one table of what it holds for others and of
/// what it fetched from them. Thread-safe.
class object_store {
public:
  /// @param x outlives this store and hands messages of kind `object` to
  ///          `deliver`, losses to `peer_lost`
  explicit object_store(fabric& x);

  /// Fails as cancelled whoever still waits.
  ~object_store();

  object_store(const object_store&) = delete;
  object_store& operator=(const object_store&) = delete;

  /// Keeps `x` until `holders` different ranks released it. Nobody may write
  /// to `x` afterwards (take a clone otherwise, R13). One that is not
  /// contiguous is copied here, not on the thread that will send it.
  /// @pre holders > 0
  /// @throws error (unsupported) if `x` cannot cross ranks
  object_id hold(at::Tensor x, uint32_t holders = 1);

  /// @returns what is here under `id`: held by this rank or fetched already.
  std::optional<at::Tensor> find(object_id id) const;

  /// Gives the tensor of `id`: without a copy if this rank owns it; else asks
  /// the owner once, however many ask here, parks (`waiter::current()`), and
  /// keeps the answer until this rank releases `id`.
  /// @throws error naming the object if its owner does not hold it or is lost
  at::Tensor fetch(object_id id);

  /// Says that this rank no longer needs `ids`: one message per owner.
  /// Idempotent, also for ids that were never held.
  void release(std::vector<object_id> ids);

  /// Lets go of what this rank holds although others did not release it: they
  /// never heard of it.
  void withdraw(const std::vector<object_id>& ids);

  // -- results with a name (runtime/remote/named_results.hpp)
  // ------------------------

  /// Holds the result `id` of this rank until it is dropped. As with `hold`,
  /// nobody may write to `x`.
  /// @throws error (unsupported) if `x` cannot cross ranks
  void put(object_id id, microbatch_id m, at::Tensor x);

  /// Begins to fetch `id`. @returns what is done when `find(id)` gives it
  completion_ptr want(object_id id);

  /// Begins to fetch what a request needs; `end_microbatch` lets go of it.
  /// @returns what is done when all is here, or null if it is
  completion_ptr gather(const std::vector<object_id>& ids, step_id s,
                        microbatch_id m);

  /// @returns the first of `ids` that is not here yet
  std::optional<object_id>
  first_missing(const std::vector<object_id>& ids) const;

  /// @returns the fetched tensor of `id`, which is not kept here any longer.
  /// @pre `want(id)` is done
  at::Tensor take(object_id id);

  /// Lets go of results of this rank and of copies of others'. Nobody else
  /// hears of it.
  void drop(const std::vector<object_id>& ids);

  /// Lets go of what a microbatch left here.
  void end_microbatch(step_id s, microbatch_id m);

  /// Named results of this step that are not here yet fail with `why`.
  void fail_step(step_id s, const failure& why);

  /// Lets go of what a step left here.
  void end_step(step_id s);

  /// Takes a message of kind `object`. Never blocks, never throws: what cannot
  /// be read is counted and fails the fetch it names.
  void deliver(rank_id from, message x);

  /// Fails every fetch from `x.rank`, now and later.
  void peer_lost(const failure& x) {
    fail(x.rank, x);
  }

  /// Fails every fetch from `owner` with `x`, now and later.
  void fail(rank_id owner, const failure& x);

  /// Objects that this rank holds for others; 0 after a step.
  size_t held() const;

  /// Objects of other ranks that were fetched and not released.
  size_t cached() const;

  /// Messages that could not be read.
  uint64_t malformed() const noexcept;

  /// Lets go of everything; who waits gets `cancelled`. Ids given so far stay
  /// invalid.
  void clear();

private:
  struct slot;
  struct fetching;
  using fetching_ptr = std::shared_ptr<fetching>;

  const slot* find_slot(object_id id) const;
  at::Tensor free_slot(slot& x);
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
  std::vector<slot> slots_;    // by number
  std::vector<uint64_t> free_; // numbers of empty slots
  std::map<object_id, fetching_ptr> fetched_;
  named_results named_;
  /// Copies of named results that requests needed.
  std::map<std::pair<step_id, microbatch_id>, std::vector<object_id>> gathered_;
  std::map<rank_id, failure> lost_;
  std::atomic<uint64_t> malformed_ = 0;
};

} // namespace smp
