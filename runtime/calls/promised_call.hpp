#pragma once

// Requests that their callers do not wait for: what is known of their results
// before they run, and what must be kept until they have run (R38 to R41).

#include "runtime/calls/messages.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/lazy/promise.hpp"
#include "runtime/values/value.hpp"
#include "transport/error.hpp"

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace smp {

class model_map;
struct model_context;
class rank_context;
class order_book;
struct recorded_call;
struct call_target;

/// The results of a kind of call that its caller took the last time, at one
/// place in its code. Thread-safe.
class taken_results {
public:
  /// @returns nullopt until it is known
  std::optional<bool> find(size_t position) const;

  /// @returns whether this differs from what was known
  bool note(size_t position, bool taken);

  /// @returns the positions of the results that it did not take.
  std::vector<uint32_t> left() const;

private:
  mutable std::mutex mutex_;
  std::vector<std::optional<bool>> taken_;
};

/// Null if not tracked.
using taken_results_ptr = std::shared_ptr<taken_results>;

using prediction_ptr = std::shared_ptr<const prediction>;

/// How a call is sent, given what its caller knows of its results.
struct result_plan {
  /// What the caller goes on with; null: it waits.
  prediction_ptr next = {};
  /// See `forward_request::left`.
  std::optional<std::vector<uint32_t>> left = {};
  /// See `kind_of_call`; empty if it does not matter.
  std::string kind = {};
};

class promised_value;

/// A request, and what its reply told: some of its results may still be at
/// their owner. Completes when the reply arrives. A replay of its step sends it
/// with the same plan, and knows sizes and strides of the results meanwhile.
class sent_request : public completion, public call_plan {
public:
  result_plan plan;

  rank_id owner;
  module_id module;
  std::string name; // of the callee, for messages to users
  uint64_t number = 0;
  wait_reason why;

  /// Its caller waited for the reply: nothing in it depends on timing.
  bool waited = false;

  /// By result: the reply carries its content because the caller needs it
  /// anyway: a fetch would cost two more messages.
  std::vector<bool> pushed;

  /// By result, once done.
  std::vector<tensor_meta> results;

  /// By result, once done: the contents that the reply carried.
  std::vector<at::Tensor> contents;

  /// By result, once done: the arguments that a gradient of it reaches.
  reached_positions reaches;

  /// Stores what the reply tells of the results. @throws error (protocol) if it
  /// does not match the request
  void take(const call_reply& x);

  /// @returns sizes and strides of a result, if they are known: from the reply,
  /// or else from that of the replayed step, which must then turn out right
  std::optional<tensor_meta> known(size_t result);

  /// @returns how the reply differs from the replayed step in what `known` told
  /// of it; nothing if it does not
  std::optional<std::string> difference();

  /// The content of a result that nobody reads is not kept.
  void forget(size_t result);

  /// This call in the replayed step, if `known` may use its results.
  std::shared_ptr<const sent_request> recorded;

  /// Until done: values that the request names and that must stay alive.
  std::vector<std::shared_ptr<promised_value>> arguments;

  /// Its autograd node, whose shapes are unknown until the reply arrives.
  std::weak_ptr<torch::autograd::Node> node;

private:
  std::mutex mutex_;
  std::set<size_t> foretold_; // results whose sizes the record told
};

using sent_request_ptr = std::shared_ptr<sent_request>;

/// One result of such a request, or one gradient.
class promised_value : public promise_source {
public:
  promised_value(const rank_context& rank, sent_request_ptr from,
                 uint32_t output, object_id id, tensor_meta what,
                 taken_results_ptr taken = {});

  /// Tells the ranks that know of the result that they can drop it.
  ~promised_value() override;

  // -- promise_source ---------------------------------------------------------

  std::vector<int64_t> sizes() override;

  std::optional<std::vector<int64_t>> strides() override;

  completion_ptr content() override;

  void wait() override;
  bool waits_in_order() const override;

  at::Tensor take() override;

  wait_reason why() const override;

  // -- properties -------------------------------------------------------------

  object_id id() const noexcept {
    return id_;
  }

  const sent_request_ptr& request() const noexcept {
    return request_;
  }

  uint32_t output() const noexcept {
    return output_;
  }

  at::ScalarType dtype() const noexcept {
    return static_cast<at::ScalarType>(what_.dtype);
  }

  size_t dim() const noexcept {
    return what_.shape.size();
  }

  /// The content arrived before the caller continued.
  bool here() const {
    return request_->waited && request_->pushed.at(output_);
  }

  /// Records that a request to `x` names this result.
  void tell(rank_id x);

private:
  std::shared_ptr<model_context> model() const;
  void note_taken(bool x);
  void await(const completion_ptr& x) const;

  std::weak_ptr<const rank_context> rank_;
  sent_request_ptr request_;
  uint32_t output_;
  object_id id_;
  tensor_meta what_;
  taken_results_ptr taken_;
  std::mutex mutex_;
  completion_ptr content_;
  std::set<rank_id> told_;
};

using promised_value_ptr = std::shared_ptr<promised_value>;

/// @returns the promised value behind `x` if it is a pending result, or null.
promised_value_ptr promised_value_of(const at::Tensor& x);

/// The promised calls of one rank. Thread-safe.
class promise_book {
public:
  /// Bound on remembered kinds of calls. A model has few per module, but
  /// strings among the arguments may make every call a kind of its own.
  static constexpr size_t max_kinds = 1 << 16;

  /// @param on `smp.fast_mode`
  /// @param records outlives this
  promise_book(bool on, const order_book& records)
    : on_(on), records_(records) {
    // nop
  }

  bool on() const noexcept {
    return on_;
  }

  /// Sets the modules whose calls always wait.
  /// @param names see `module_list`
  /// @throws error (config) with the names that the model does not have
  void set_waiting(const model_map& map, const std::vector<std::string>& names);

  /// Tells whether calls of this target always wait, forward and backward.
  bool waits(const model_map& map, module_id module,
             const call_target& x) const;

  /// @returns how the next request of `ex` was sent in the replayed step, or
  /// null.
  std::shared_ptr<const recorded_call> recorded(const running_call& ex) const;

  /// True if every call of the step waits, as one that is run again does to
  /// show which promises do not hold.
  bool all_wait() const;

  /// True if any call of this step continued without its reply.
  bool promised() const;

  // -- predictions ------------------------------------------------------------

  /// What earlier calls of the same kind did.
  struct memory {
    /// Null: unpredictable, so calls of the kind wait.
    prediction_ptr next;
    taken_results_ptr taken;
  };

  /// @param place the call site, as a number: one call of a kind may have its
  /// results used right away, another may pass them on
  /// @returns the prediction; nullopt if the call has to show it: the first of
  /// its kind, and any call while all calls wait
  std::optional<memory> find(const std::string& kind, uint32_t place);

  /// Records the result of a call. A kind whose results vary is not predicted
  /// from then on.
  /// @param next see `memory`
  void remember(const std::string& kind, prediction_ptr next);

  /// Something was learned in this step: in later steps calls that waited here
  /// do not wait, or receive with the replies what was fetched here.
  void note_learnt();

  bool learnt() const;

  /// Modules turned out to keep no state: kinds that could not be predicted may
  /// be predicted now.
  void reconsider();

  /// Forgets all kinds if there are too many.
  /// @param trainable which tensors of the model require grad, as a number:
  /// predictions made under one value say nothing about another
  /// @param again the step is run again, with all calls waiting
  /// @param all_wait all calls of all steps wait
  void begin_step(uint64_t trainable, bool again = false,
                  bool all_wait = false);

  // -- names ------------------------------------------------------------------

  /// @returns the number for the next promise of `ex`: in a replayed step
  /// the recorded one, else one that is not in the record. So numbers are
  /// the same in every step of an unchanged flow, whatever the order in
  /// which the executions of this rank ask for them, and no two promises
  /// share one.
  uint64_t next_request(const running_call& ex);

  // -- letting go -------------------------------------------------------------

  /// Marks `x` as no longer needed: the next request to `who` carries that.
  void release(rank_id who, object_id x);

  /// @returns what `who` can let go of in step `s`. Of results of other steps
  /// it did so by itself: one that lives on, as in the traceback of a failed
  /// step, is released at any time.
  std::vector<object_id> take_releases(rank_id who, step_id s);

  /// Forgets pending releases: each rank drops everything by itself.
  void end_step();

private:
  bool on_;
  const order_book& records_;
  std::set<uint64_t> waiting_; // modules
  mutable std::mutex mutex_;
  /// The kinds known for one set of tensors that require grad; the first entry
  /// is that of this step.
  struct memories {
    struct entry {
      prediction_ptr next;
      std::map<uint32_t, taken_results_ptr> taken; // by place
    };

    uint64_t trainable = 0;
    std::map<std::string, entry> known; // by kind
  };
  std::list<memories> memories_ = std::list<memories>(1);
  // In this step:
  bool learnt_ = false;
  bool all_wait_ = false;
  bool promised_ = false;
  uint32_t requests_ = 0;
  std::map<rank_id, std::vector<object_id>> releases_;
};

/// @returns the key of a kind of calls: module, method, modes, types and
/// numbers of dimensions, and the structure of the arguments; not the numbers
/// in them.
std::string kind_of_call(module_id module, const call_target& x,
                         const value& args,
                         const std::vector<at::Tensor>& tensors);

/// Sends `c` for `ex`, which waits for the reply unless `c` is a promise.
/// @param x its `arguments` are those that `c` names
/// @returns the reply if `ex` waited for it
std::optional<call_reply> send(running_call& ex, call c,
                               const sent_request_ptr& x);

/// Waits for the replies to all requests that `ex` sent (R39), and completes
/// the autograd nodes of its calls. @throws error with the first cause
void fence(running_call& ex);

/// Turns promises that outlive the body of a microbatch into plain tensors.
void keep_promises_of(running_call& ex);

} // namespace smp
