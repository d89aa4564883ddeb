#include "transport/error.hpp"

namespace smp {

const char* to_string(error_code x) noexcept {
  switch (x) {
    case error_code::none:
      return "none";
    case error_code::config:
      return "config";
    case error_code::user_code:
      return "user_code";
    case error_code::rank_down:
      return "rank_down";
    case error_code::cancelled:
      return "cancelled";
    case error_code::protocol:
      return "protocol";
    case error_code::transport:
      return "transport";
    case error_code::unsupported:
      return "unsupported";
    case error_code::stalled:
      return "stalled";
    case error_code::numbers:
      return "numbers";
    case error_code::schedule:
      return "schedule";
    case error_code::internal:
      return "internal";
  }
  return "unknown";
}

std::string failure::describe() const {
  std::string place;
  if (rank != no_rank)
    place = "rank " + std::to_string(rank.value);
  if (!module.empty()) {
    if (!place.empty())
      place += ", ";
    place += "module " + module;
  }
  if (place.empty())
    return text;
  return place + ": " + text;
}

} // namespace smp
