#include "runtime/intercept/execution_interceptors.hpp"

#include "actors/board/call_slot.hpp"
#include "actors/board/rank_board.hpp"
#include "actors/server/executor.hpp"
#include "actors/server/microbatch_sequencer.hpp"
#include "runtime/base/here.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/intercept/call_scope.hpp"
#include "runtime/intercept/checkpointed_call.hpp"
#include "runtime/intercept/device_interceptor.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/offload/offloaded_tensors.hpp"
#include "transport/wait.hpp"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace smp {

namespace {

/// Keeps microbatches in order (R19), and gives the token back while one waits
/// for its turn.
class order_interceptor final : public call_interceptor {
public:
  void enter(const intercepted_call& x) override {
    auto* ex = ordered(x);
    if (ex == nullptr)
      return;
    ex->note_state();
    auto& rank = ex->rank();
    if (auto open = rank.sequencer().opening({*x.module}, ex->start_number(),
                                             ex->microbatch()))
      waiter::current().wait(
        open,
        {"the turn of microbatch " + std::to_string(ex->microbatch().value)
           + " in '" + rank.model()->map->name(*x.module) + "'",
         std::nullopt});
  }

  void leave(const intercepted_call& x, bool) override {
    if (auto* ex = ordered(x))
      ex->rank().sequencer().leave({*x.module}, ex->start_number());
  }

private:
  static running_call* ordered(const intercepted_call& x) {
    auto* ex = x.ordered && !x.served ? running_call::current() : nullptr;
    // A recomputation in backward changes no state.
    return ex != nullptr && !ex->in_backward() ? ex : nullptr;
  }
};

/// Gives the call its random numbers (R23).
class numbers_interceptor final : public call_interceptor {
public:
  void enter(const intercepted_call& x) override {
    if (auto* ex = drawing(x))
      ex->streams().enter(x.stream);
  }

  void leave(const intercepted_call& x, bool) override {
    if (auto* ex = drawing(x))
      ex->streams().leave();
  }

private:
  static running_call* drawing(const intercepted_call& x) {
    return x.stream != 0 ? running_call::current() : nullptr;
  }
};

/// Moves tensors that are kept until backward to a file (R57).
class offload_interceptor final : public call_interceptor {
public:
  std::unique_ptr<offloaded_tensors>
  keep(const std::vector<at::Tensor>& xs) override {
    auto* ex = running_call::current();
    auto* store = ex != nullptr ? ex->rank().offload() : nullptr;
    // Tensors of recomputations and calls in backward are needed at once.
    return store != nullptr && !ex->in_backward()
             ? offloaded_tensors::take(*store, ex->start_number(), xs)
             : nullptr;
  }
};

/// Gives a recomputation the state of its first pass (R52).
class state_interceptor final : public call_interceptor {
public:
  void enter(const intercepted_call& x) override {
    if (auto* ex = recomputing(x))
      ex->states().enter(*ex, *ex->rank().model()->changes, *x.module);
  }

  void leave(const intercepted_call& x, bool) override {
    if (auto* ex = recomputing(x))
      ex->states().leave(*ex, *ex->rank().model()->changes, *x.module);
  }

private:
  static running_call* recomputing(const intercepted_call& x) {
    auto* ex = x.module ? running_call::current() : nullptr;
    return ex != nullptr && ex->pass().what != recompute_pass::kind::only
             ? ex
             : nullptr;
  }
};

/// Shows the running module on the rank board.
class activity_interceptor final : public call_interceptor {
public:
  void enter(const intercepted_call& x) override {
    if (auto* slot = slot_of(x)) {
      slot->enter(*x.module);
      trace(flight_kind::module_begins, *x.module);
    }
  }

  void leave(const intercepted_call& x, bool failed) override {
    if (auto* slot = slot_of(x)) {
      slot->leave(failed);
      trace(flight_kind::module_ends, *x.module);
    }
  }

private:
  static void trace(flight_kind kind, module_id module) {
    auto* call = running_call::current();
    if (call == nullptr)
      return;
    auto& record = call->rank().board().record();
    if (!record.tracing())
      return;
    flight_event x;
    x.kind = kind;
    x.name = static_cast<uint32_t>(module.value);
    x.step = static_cast<uint32_t>(call->step().value);
    x.microbatch = static_cast<uint32_t>(call->microbatch().value);
    x.what = call->in_backward() ? phase::backward : phase::forward;
    x.context = static_cast<uint32_t>(call->executor().id().value);
    record.note(x);
  }

  /// A served request is already on the board, as a whole.
  static call_slot* slot_of(const intercepted_call& x) {
    return x.module && (!x.served || x.part) ? here::of_thread().slot : nullptr;
  }
};

order_interceptor keeps_order;
numbers_interceptor gives_numbers;
recompute_interceptor computes_again;
offload_interceptor offloads;
state_interceptor recalls_state;
device_interceptor waits_for_device;
activity_interceptor tells_activity;

} // namespace

void intercept_execution() noexcept {
  set_interceptor(interceptor::order, &keeps_order);
  set_interceptor(interceptor::numbers, &gives_numbers);
  set_interceptor(interceptor::recompute, &computes_again);
  set_interceptor(interceptor::offload, &offloads);
  set_interceptor(interceptor::state, &recalls_state);
  auto* rank = rank_context::current();
  if (rank && rank->launches() && rank->config().wait_for_device)
    set_interceptor(interceptor::device, &waits_for_device);
  set_interceptor(interceptor::activity, &tells_activity);
}

} // namespace smp
