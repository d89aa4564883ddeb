#include "actors/server/worker_context.hpp"

#include <chrono>
#include <string>
#include <utility>

namespace smp {

namespace {

std::string describe(const context_view::awaited_call& x) {
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

worker_context_state::~worker_context_state() {
  if (code)
    code->close();
}

context_status worker_context_state::status() const {
  auto x = code->look();
  context_status result;
  result.context = code->id();
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
               std::shared_ptr<executor> code) {
  self->state.code = std::move(code);
  return {
    [self](status_atom) { return self->state.status(); },
  };
}

} // namespace smp
