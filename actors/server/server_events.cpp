// What a MODULE SERVER notes of messages and of its schedule, for readers after
// the fact. What executions do, they note themselves (executor.cpp).

#include "actors/protocol/request_number.hpp"
#include "actors/protocol/wire.hpp"
#include "actors/server/server_core.hpp"

#include <utility>

namespace smp {

namespace {

uint64_t bytes_of(const payload& x) {
  return x.bytes.size() + tensor_bytes(x);
}

} // namespace

void server_core::note(flight_kind kind, const request& of, rank_id peer,
                       uint64_t bytes, context_id ctx) {
  flight_event x;
  x.kind = kind;
  x.number = of.id.number;
  x.origin = static_cast<uint32_t>(of.id.origin.value);
  x.amount = bytes;
  x.step = static_cast<uint32_t>(of.step.value);
  x.name = static_cast<uint32_t>(of.module.value);
  x.microbatch = static_cast<uint32_t>(of.microbatch.value);
  x.what = of.what;
  x.context = static_cast<uint32_t>(ctx.value);
  if (peer != no_rank)
    x.peer = static_cast<uint32_t>(peer.value);
  options_.board.record().note(x);
}

void server_core::note_arrival(const request& x) {
  if (is_root_request(x.id))
    note(flight_kind::admitted, x);
  else
    note(flight_kind::arrived, x, x.id.origin, bytes_of(x.body));
}

void server_core::note_reply(const pending_call& of, const response& x) {
  request asked;
  asked.id = x.id;
  asked.step = current_.step;
  asked.what = of.what;
  if (auto i = contexts_.find(of.context);
      i != contexts_.end() && i->second.current)
    asked.microbatch = i->second.current->microbatch;
  if (of.kind == call_kind::grant)
    note(flight_kind::admitted, asked);
  else
    note(flight_kind::reply, asked, no_rank, bytes_of(x.body), of.context);
}

void server_core::note_answer(const response& x) {
  if (x.id.origin == self())
    return;
  request of;
  of.id = x.id;
  of.step = current_.step;
  note(flight_kind::answered, of, x.id.origin, bytes_of(x.body));
}

void server_core::note_failure() {
  request x;
  x.step = current_.step;
  note(flight_kind::failed, x);
}

void server_core::ask(context_id ctx, rank_id owner, request x) {
  note(flight_kind::asked, x, owner, bytes_of(x.body), ctx);
  options_.board.note();
  auto on_sent = output_.on_asked(x.id);
  options_.fabric.send(owner, encode(std::move(x)), std::move(on_sent));
}

} // namespace smp
