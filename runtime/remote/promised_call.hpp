#pragma once

// Requests that nobody waits for: what is known of their results before they
// ran, and what has to be remembered until they did (R38 to R41).

#include "runtime/lazy/promise.hpp"
#include "runtime/remote/execution.hpp"
#include "runtime/remote/messages.hpp"
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
class record_book;
struct recorded_call;
struct call_target;

/// Which results of a kind of call its caller took the last time, at a place in
/// its code. Thread-safe.
class taken_results {
public:
  /// @returns nothing before it is known
  std::optional<bool> find(size_t position) const;

  /// @returns whether that is news
  bool note(size_t position, bool taken);

  /// @returns the positions of those that it did not take.
  std::vector<uint32_t> left() const;

private:
  mutable std::mutex mutex_;
  std::vector<std::optional<bool>> taken_;
};

/// Null if nobody notes it.
using taken_results_ptr = std::shared_ptr<taken_results>;

/// What a call returned, as far as it must be known before the next one ran.
struct prediction {
  struct tensor {
    at::ScalarType dtype = at::kFloat;
    bool requires_grad = false;
    int64_t dim = 0;
  };

  /// A tensor or a tuple of tensors.
  value result;
  std::vector<tensor> tensors;
};

using prediction_ptr = std::shared_ptr<const prediction>;

/// How a promise was sent: a replay of the step sends it so again.
struct promise_memo : call_memo {
  prediction_ptr next;
  std::vector<bool> push; // by output
};

/// How a call was sent that waited, and whose results have names: see
/// `forward_request::held`.
struct waiting_memo : call_memo {
  std::vector<uint32_t> held;
};

class promised_value;

/// A request whose results may still be with their owner; done when its answer
/// came.
class promised_request : public completion {
public:
  rank_id owner;
  module_id module;
  std::string name; // of what runs, for people
  uint64_t number = 0;
  wait_reason why;

  /// Its caller went on with the answer: nothing in it is a matter of timing.
  bool waited = false;

  /// The answer tells the sizes of results; of gradients they are known.
  bool tells_sizes = false;

  /// By output, once done: sizes, strides as a `tensor_ref` has them, and the
  /// arguments that a gradient of the output reaches.
  std::vector<std::vector<int64_t>> sizes;
  std::vector<std::vector<int64_t>> strides;
  reached_positions reaches;

  /// By output: its content comes with the answer, as the caller needs it
  /// anyway: a fetch would be two messages more.
  std::vector<bool> pushed;

  /// By output, once done: what came with the answer.
  std::vector<at::Tensor> contents;

  /// Takes what the answer brought. @throws error (protocol) if that is not
  /// what was asked for
  void take(promise_reply x);

  /// What it was in the step that is replayed, if that tells the sizes now.
  std::shared_ptr<const recorded_call> recorded;

  /// Until done: what the request names must not be let go.
  std::vector<std::shared_ptr<promised_value>> arguments;

  /// Its autograd node, whose shapes are not known before the answer.
  std::weak_ptr<torch::autograd::Node> node;
};

using promised_request_ptr = std::shared_ptr<promised_request>;

/// One result of such a request, or one gradient.
class promised_value : public promise_source {
public:
  promised_value(const rank_context& rank, promised_request_ptr from,
                 uint32_t output, object_id id, prediction::tensor what,
                 taken_results_ptr taken = {});

  /// Tells the ranks that heard of the result that it can go.
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

  const promised_request_ptr& request() const noexcept {
    return request_;
  }

  uint32_t output() const noexcept {
    return output_;
  }

  const prediction::tensor& what() const noexcept {
    return what_;
  }

  /// The content came before its caller went on.
  bool here() const {
    return request_->waited && request_->pushed.at(output_);
  }

  /// A request to `x` names this result.
  void tell(rank_id x);

private:
  std::shared_ptr<model_context> model() const;
  void note_taken(bool x);
  void await(const completion_ptr& x) const;

  std::weak_ptr<const rank_context> rank_;
  promised_request_ptr request_;
  uint32_t output_;
  object_id id_;
  prediction::tensor what_;
  taken_results_ptr taken_;
  std::mutex mutex_;
  completion_ptr content_;
  std::set<rank_id> told_;
};

using promised_value_ptr = std::shared_ptr<promised_value>;

/// @returns where `x`, a pending result of another rank, is; else null.
promised_value_ptr promised_value_of(const at::Tensor& x);

/// What one rank knows of its promised calls. Thread-safe.
class promise_book {
public:
  /// Kinds of calls that are remembered. A model has few for each module, but
  /// texts among the arguments may make every call one of a kind of its own.
  static constexpr size_t max_kinds = 1 << 16;

  /// @param on `smp.fast_mode`
  /// @param records outlives this
  promise_book(bool on, const record_book& records)
    : on_(on), records_(records) {
    // nop
  }

  bool on() const noexcept {
    return on_;
  }

  /// Finds the modules whose calls always wait.
  /// @param names see `module_list`
  /// @throws error (config) naming what the model does not have
  void set_waiting(const model_map& map, const std::vector<std::string>& names);

  /// Tells whether calls of this target always wait, forward and backward.
  bool waits(const model_map& map, module_id module,
             const call_target& x) const;

  /// @returns how the next request of `ex` was sent in the step that is
  /// replayed, or null.
  std::shared_ptr<const recorded_call> recorded(const execution& ex) const;

  /// Every call of the step waits, to show which promises do not hold.
  bool all_wait() const;

  /// Tells whether anything in this step went on without its answer.
  bool promised() const;

  // -- predictions ------------------------------------------------------------

  /// What calls of the same kind did.
  struct memory {
    /// Null: it cannot be predicted, calls of the kind wait.
    prediction_ptr next;
    taken_results_ptr taken;
  };

  /// @param place where an execution calls it, as a number: one of a kind is
  ///        looked at here, another one goes on there
  /// @returns what is to be expected; nothing if the call has to show it, as
  ///          the first of its kind, and as any where all wait
  std::optional<memory> find(const std::string& kind, uint32_t place);

  /// A kind of call that does not do the same each time is not predicted from
  /// then on.
  /// @param next see `memory`
  void remember(const std::string& kind, prediction_ptr next);

  /// Something was remembered in this step: later ones do not wait where this
  /// one did, or get what this one fetched with the answers.
  void note_learnt();

  bool learnt() const;

  /// Modules turned out to keep no state: what could not be predicted may be
  /// predicted now.
  void reconsider();

  /// Forgets all kinds where there are too many.
  /// @param trainable which tensors of the model require grad, as a number:
  /// what calls return under one says nothing about another one
  /// @param all_wait see there
  void begin_step(uint64_t trainable, bool all_wait = false);

  // -- names ------------------------------------------------------------------

  /// @returns the number of a promise that `ex` sends next: in a replayed step
  /// what the record has there, else one that the record does not have. So
  /// numbers are the same in every step as long as the flow is, whatever the
  /// order in which the executions of this rank come by, and never the same
  /// for two promises.
  uint64_t next_request(const execution& ex);

  // -- letting go -------------------------------------------------------------

  /// `x` is no longer needed: the next request to `who` says so.
  void release(rank_id who, object_id x);

  std::vector<object_id> take_releases(rank_id who);

  /// The ranks let go of everything by themselves.
  void end_step();

private:
  bool on_;
  const record_book& records_;
  std::set<uint64_t> waiting_; // modules
  mutable std::mutex mutex_;
  /// What is remembered while some tensors require grad and others do not; the
  /// first one is that of this step.
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

/// @returns what makes two calls the same kind: module, method, modes, types
/// and numbers of dimensions, and the structure of the arguments; not the
/// numbers in them.
std::string kind_of_call(module_id module, const call_target& x,
                         const value& args,
                         const std::vector<at::Tensor>& tensors);

/// Sends `c`, a `promise_call`, for `ex`, which goes on.
/// @param x its `arguments` are those that `c` names
void send_promise(execution& ex, call c, const promised_request_ptr& x);

/// Waits until everything that `ex` sent is answered (R39), and completes the
/// autograd nodes of what it called. @throws error with the first cause
void fence(execution& ex);

/// Makes promises that outlive the body of a microbatch ordinary tensors.
void keep_promises_of(execution& ex);

} // namespace smp
