#pragma once

// The message types of smp and their numbers.
//
// Requests, responses, calls and outcomes hold tensors by reference, so they
// may be sent inside a process only. Between ranks they travel through the
// fabric (actors/protocol/wire.hpp), whose messages come so far by themselves;
// CAF refuses to write them to a socket.

#include "actors/protocol/flight_query.hpp"
#include "actors/protocol/inspect_messages.hpp"
#include "actors/protocol/messages.hpp"
#include "transport/fabric.hpp"

#include <caf/allowed_unsafe_message_type.hpp>
#include <caf/type_id.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

struct server_status;

} // namespace smp

CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::message)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::request)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::response)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::call)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::outcome)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::suspended)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::asked)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::finished)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::completed)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::undelivered)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::forward_done)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::forward_over)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::microbatch_done)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::step_report)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::run_step)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::rank_report)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::step_plan)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::step_diverged)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::scheduled_step)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::server_status)

// -- type ids: append only, all ranks run the same build ----------------------

// The types of the first handshake come first, so that two builds that number
// the others differently can at least report the mismatch.

CAF_BEGIN_TYPE_ID_BLOCK(smp, first_custom_type_id)
  CAF_ADD_TYPE_ID(smp, (smp::member))
  CAF_ADD_TYPE_ID(smp, (smp::welcome))
  CAF_ADD_TYPE_ID(smp, (smp::rank_id))
  CAF_ADD_TYPE_ID(smp, (smp::failure))
  CAF_ADD_TYPE_ID(smp, (smp::request))
  CAF_ADD_TYPE_ID(smp, (smp::response))
  CAF_ADD_TYPE_ID(smp, (smp::call))
  CAF_ADD_TYPE_ID(smp, (smp::outcome))
  CAF_ADD_TYPE_ID(smp, (smp::suspended))
  CAF_ADD_TYPE_ID(smp, (smp::finished))
  CAF_ADD_TYPE_ID(smp, (smp::completed))
  CAF_ADD_TYPE_ID(smp, (smp::undelivered))
  CAF_ADD_TYPE_ID(smp, (smp::forward_done))
  CAF_ADD_TYPE_ID(smp, (smp::microbatch_done))
  CAF_ADD_TYPE_ID(smp, (smp::step_failed))
  CAF_ADD_TYPE_ID(smp, (smp::step_report))
  CAF_ADD_TYPE_ID(smp, (smp::run_step))
  CAF_ADD_TYPE_ID(smp, (smp::context_status))
  CAF_ADD_TYPE_ID(smp, (smp::server_status))
  CAF_ADD_TYPE_ID(smp, (smp::scheduler_status))
  CAF_ADD_TYPE_ID(smp, (smp::member_status))
  CAF_ADD_TYPE_ID(smp, (smp::supervisor_status))
  CAF_ADD_ATOM(smp, smp, status_atom)
  CAF_ADD_ATOM(smp, smp, token_atom)
  CAF_ADD_ATOM(smp, smp, down_atom)
  CAF_ADD_TYPE_ID(smp, (smp::message))
  CAF_ADD_ATOM(smp, smp, goodbye_atom)
  CAF_ADD_ATOM(smp, smp, deadline_atom)
  CAF_ADD_TYPE_ID(smp, (smp::rank_report))
  CAF_ADD_TYPE_ID(smp, (smp::forward_over))
  CAF_ADD_ATOM(smp, smp, moved_atom)
  CAF_ADD_TYPE_ID(smp, (smp::step_plan))
  CAF_ADD_TYPE_ID(smp, (smp::step_diverged))
  CAF_ADD_TYPE_ID(smp, (smp::scheduled_step))
  CAF_ADD_TYPE_ID(smp, (smp::asked))
  CAF_ADD_TYPE_ID(smp, (smp::rank_view))
  CAF_ADD_TYPE_ID(smp, (smp::stall_status))
  CAF_ADD_ATOM(smp, smp, look_atom)
  CAF_ADD_ATOM(smp, smp, stall_atom)
  CAF_ADD_ATOM(smp, smp, reached_atom)
  CAF_ADD_ATOM(smp, smp, again_atom)
CAF_END_TYPE_ID_BLOCK(smp)

// Messages for clients outside the run. Their ids follow those of the actor
// handles, which are part of the handshake (actors/protocol/actors.hpp).
CAF_BEGIN_TYPE_ID_BLOCK(smp_inspection, caf::first_custom_type_id + 60)
  CAF_ADD_TYPE_ID(smp_inspection, (smp::rank_status))
  CAF_ADD_TYPE_ID(smp_inspection, (smp::run_status))
  CAF_ADD_ATOM(smp_inspection, smp, inspect_atom)
  CAF_ADD_TYPE_ID(smp_inspection, (smp::flight_query))
  CAF_ADD_TYPE_ID(smp_inspection, (std::vector<std::string>))
  CAF_ADD_TYPE_ID(smp_inspection, (std::vector<uint64_t>))
CAF_END_TYPE_ID_BLOCK(smp_inspection)
