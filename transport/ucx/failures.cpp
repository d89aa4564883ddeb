#include "transport/ucx/failures.hpp"

#include <string>

namespace smp::ucx {

namespace {

error_code code_of(ucs_status_t x) noexcept {
  switch (x) {
    // The other side ended the transfer: it counts this rank as lost.
    case UCS_ERR_CANCELED:
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_NOT_CONNECTED:
    // Memory of a process that is gone cannot be read.
    case UCS_ERR_IO_ERROR:
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_REJECTED:
    // The kernel gave up a connection.
    case UCS_ERR_TIMED_OUT:
    // The first message to a process that is gone finds none of its memory.
    case UCS_ERR_SHMEM_SEGMENT:
      return error_code::rank_down;
    case UCS_ERR_MESSAGE_TRUNCATED:
    case UCS_ERR_INVALID_PARAM:
      return error_code::internal;
    default:
      return error_code::transport;
  }
}

const char* text_of(error_code x, during at) noexcept {
  if (x == error_code::rank_down)
    return at == during::receiving
             ? "connection lost in the middle of a message: "
             : "connection lost: ";
  return at == during::sending ? "cannot be sent to: "
                               : "what it sends cannot be received: ";
}

} // namespace

failure failure_of(ucs_status_t x, rank_id rank, during at) {
  // Whatever ended a connection, messages no longer reach that rank.
  auto code = at == during::nothing ? error_code::rank_down : code_of(x);
  std::string text = text_of(code, at);
  return {code, rank, {}, text + ucs_status_string(x)};
}

} // namespace smp::ucx
