#include "runtime/remote/messages.hpp"

namespace smp {

request_head read_head(const payload& x) {
  return byte_reader{x.bytes, "request"}.get<request_head>();
}

std::optional<held_object> answered_fetch(const payload& x) {
  try {
    byte_reader in{x.bytes};
    auto which = in.u8();
    if (which != object_message{object_content{}}.index()
        && which != object_message{object_refusal{}}.index())
      return std::nullopt;
    return in.get<held_object>();
  } catch (const error&) {
    return std::nullopt;
  }
}

} // namespace smp
