#pragma once

// Message types of the communication stages and their type ids, which lie
// between those of smp's other actors and those of schedules.

#include "actors/protocol/comm_message.hpp"
#include "actors/protocol/type_ids.hpp"

#include <caf/allowed_unsafe_message_type.hpp>
#include <caf/type_id.hpp>

namespace smp {

/// Type ids of the other actors are below this one.
inline constexpr caf::type_id_t first_comm_type_id = caf::first_custom_type_id
                                                     + 90;

} // namespace smp

// These messages hold data that is valid in one process only.
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(smp::comm_message_ptr)

CAF_BEGIN_TYPE_ID_BLOCK(smp_comm, caf::first_custom_type_id + 90)
  CAF_ADD_TYPE_ID(smp_comm, (smp::comm_message_ptr))
  CAF_ADD_TYPE_ID(smp_comm, (smp::comm_stage_status))
CAF_END_TYPE_ID_BLOCK(smp_comm)

// The ids from there on belong to actors/protocol/schedule_interface.hpp.
static_assert(caf::id_block::smp_comm::end <= caf::first_custom_type_id + 100);
