#include "actors/schedule/schedule_errors.hpp"

#include "actors/protocol/plain_text.hpp"

#include <caf/exit_reason.hpp>
#include <caf/sec.hpp>

#include <cstdio>

namespace smp {

namespace {

std::string text_of(const caf::error& x) {
  auto& context = x.context();
  return context.match_elements<std::string>() ? context.get_as<std::string>(0)
                                               : to_string(context);
}

} // namespace

bool has_ended(const caf::error& x) {
  return x == caf::sec::request_receiver_down || x == caf::sec::broken_promise;
}

std::pair<error_code, std::string> explain(const caf::error& x,
                                           std::chrono::milliseconds timeout) {
  if (x == caf::sec::request_timeout) {
    char text[80];
    std::snprintf(text, sizeof(text), "did not answer within %g s",
                  static_cast<double>(timeout.count()) / 1000);
    return {error_code::stalled, text};
  }
  if (x == caf::sec::runtime_error)
    return {error_code::schedule, "threw: " + text_of(x)};
  if (!x || has_ended(x) || x.category() == caf::type_id_v<caf::exit_reason>)
    return {error_code::schedule, "ended without an answer"};
  return {error_code::schedule, "answered with an error: " + plain_text(x)};
}

} // namespace smp
