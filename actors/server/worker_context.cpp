#include "actors/server/worker_context.hpp"

#include <caf/sec.hpp>
#include <caf/send.hpp>

#include <chrono>
#include <exception>
#include <string>
#include <utility>

namespace smp {

namespace {

/// May run on the executor thread: holds a handle, never the state.
class mailbox_listener : public executor_listener {
public:
  explicit mailbox_listener(worker_context_actor hdl) : hdl_(std::move(hdl)) {
    // nop
  }

  void called(call x) override {
    caf::anon_send(hdl_, std::move(x));
  }

  void asked(call x) override {
    caf::anon_send(hdl_, std::move(x));
  }

  void returned(outcome x) override {
    caf::anon_send(hdl_, std::move(x));
  }

private:
  worker_context_actor hdl_;
};

/// An exception of the executor is a defect; its text is worth more to the
/// SERVER than a line on a terminal.
caf::error crash(std::exception_ptr& x) {
  try {
    std::rethrow_exception(x);
  } catch (const std::exception& e) {
    return caf::make_error(caf::sec::runtime_error, e.what());
  } catch (...) {
    return caf::make_error(caf::sec::runtime_error, "unknown exception");
  }
}

std::string describe(const context_notes::awaited_call& x) {
  auto what = x.why.what;
  switch (x.kind) {
    case call_kind::grant:
      return "the grant of the backward phase";
    case call_kind::remote:
      if (what.empty())
        what = "module " + std::to_string(x.module.value);
      return what + " from rank " + std::to_string(x.owner.value);
    default:
      if (x.why.from)
        what += " from rank " + std::to_string(x.why.from->value);
      return what;
  }
}

} // namespace

caf::error worker_context_state::refusal() const {
  return caf::make_error(caf::sec::unexpected_message,
                         std::string{"the WORKER CONTEXT is "}
                           + to_string(notes->state()));
}

context_status worker_context_state::status() const {
  auto x = notes->look();
  context_status result;
  result.context = notes->id();
  result.state = x.state;
  result.current = x.current.id;
  result.microbatch = x.current.microbatch;
  result.module = x.current.module;
  result.what = x.current.what;
  if (x.state == context_state::pending)
    result.waits_for = describe(x.waits_for);
  using seconds = std::chrono::duration<double>;
  result.seconds = seconds{self->clock().now() - x.since}.count();
  result.served = x.served;
  return result;
}

worker_context_actor::behavior_type
worker_context(worker_context_state::pointer self,
               std::shared_ptr<context_notes> notes, module_server_actor server,
               rank_services* services) {
  self->set_exception_handler(crash);
  auto& st = self->state;
  st.notes = std::move(notes);
  st.server = std::move(server);
  st.listener = std::make_unique<mailbox_listener>(self);
  st.exec = services->make_executor(*st.listener);
  return {
    [self](request& x) -> caf::result<void> {
      auto& st = self->state;
      if (!st.notes->start(x, self->clock().now()))
        return st.refusal();
      st.exec->start(std::move(x));
      return caf::unit;
    },
    [self](response& x) -> caf::result<void> {
      auto& st = self->state;
      if (!st.notes->resume(self->clock().now()))
        return st.refusal();
      st.exec->resume(std::move(x));
      return caf::unit;
    },
    [self](call& x) -> caf::result<void> {
      auto& st = self->state;
      auto ctx = st.notes->id();
      if (x.kind == call_kind::promise) {
        if (st.notes->state() != context_state::executing)
          return st.refusal();
        self->send(st.server, asked{ctx, std::move(x)});
        return caf::unit;
      }
      if (!st.notes->park(x, self->clock().now()))
        return st.refusal();
      self->send(st.server, suspended{ctx, std::move(x)});
      return caf::unit;
    },
    [self](outcome& x) -> caf::result<void> {
      auto& st = self->state;
      if (!st.notes->finish(self->clock().now()))
        return st.refusal();
      self->send(st.server, finished{st.notes->id(), std::move(x)});
      return caf::unit;
    },
    [self](status_atom) -> caf::result<context_status> {
      return self->state.status();
    },
  };
}

} // namespace smp
