#include "actors/server/worker_context.hpp"

#include <caf/sec.hpp>
#include <caf/send.hpp>

#include <exception>
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

std::string describe(const call& x) {
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

caf::error worker_context_state::check(context_state x) const {
  if (status.state != x)
    return caf::make_error(caf::sec::unexpected_message,
                           std::string{"the WORKER CONTEXT is "}
                             + to_string(status.state) + ", not "
                             + to_string(x));
  return {};
}

caf::error worker_context_state::move(context_state from, context_state to) {
  if (auto err = check(from))
    return err;
  status.state = to;
  since = self->clock().now();
  return {};
}

context_status worker_context_state::answer() const {
  auto result = status;
  if (status.state == context_state::pending)
    result.waits_for = waits_for;
  using seconds = std::chrono::duration<double>;
  result.seconds = seconds{self->clock().now() - since}.count();
  return result;
}

worker_context_actor::behavior_type
worker_context(worker_context_state::pointer self, context_id id,
               module_server_actor server, const executor_factory& make) {
  self->set_exception_handler(crash);
  auto& st = self->state;
  st.status.context = id;
  st.since = self->clock().now();
  st.server = std::move(server);
  st.listener = std::make_unique<mailbox_listener>(self);
  st.exec = make(*st.listener);
  using enum context_state;
  return {
    [self](request& x) -> caf::result<void> {
      auto& st = self->state;
      if (auto err = st.move(idle, executing))
        return err;
      st.status.current = x.id;
      st.status.microbatch = x.microbatch;
      st.status.module = x.module;
      st.status.what = x.what;
      st.exec->start(std::move(x));
      return caf::unit;
    },
    [self](response& x) -> caf::result<void> {
      if (auto err = self->state.move(pending, executing))
        return err;
      self->state.exec->resume(std::move(x));
      return caf::unit;
    },
    [self](call& x) -> caf::result<void> {
      auto& st = self->state;
      if (x.kind == call_kind::promise) {
        if (auto err = st.check(executing))
          return err;
        self->send(st.server, asked{st.status.context, std::move(x)});
        return caf::unit;
      }
      if (auto err = st.move(executing, pending))
        return err;
      st.waits_for = describe(x);
      self->send(st.server, suspended{st.status.context, std::move(x)});
      return caf::unit;
    },
    [self](outcome& x) -> caf::result<void> {
      auto& st = self->state;
      if (auto err = st.move(executing, idle))
        return err;
      ++st.status.served;
      self->send(st.server, finished{st.status.context, std::move(x)});
      return caf::unit;
    },
    [self](status_atom) -> caf::result<context_status> {
      return self->state.answer();
    },
  };
}

} // namespace smp
