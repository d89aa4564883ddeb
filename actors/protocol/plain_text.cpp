#include "actors/protocol/plain_text.hpp"

#include <caf/error.hpp>
#include <caf/exit_reason.hpp>
#include <caf/sec.hpp>

#include <algorithm>

namespace smp {

std::string plain_text(const caf::error& x) {
  auto& context = x.context();
  for (size_t i = 0; i < context.size(); ++i)
    if (context.match_element<std::string>(i))
      if (auto& text = context.get_as<std::string>(i); !text.empty())
        return text;
  if (!x)
    return "without a reason";
  if (x == caf::sec::request_timeout)
    return "no answer in time";
  if (x == caf::sec::request_receiver_down || x == caf::sec::broken_promise
      || x == caf::sec::remote_lookup_failed)
    return "it has ended";
  if (x == caf::exit_reason::remote_link_unreachable)
    return "the connection broke";
  // "caf::sec::unexpected_message" or "sec(unexpected_message)"
  auto text = to_string(x);
  while (!text.empty() && text.back() == ')')
    text.pop_back();
  text.erase(0, text.find_last_of(":(") + 1);
  std::ranges::replace(text, '_', ' ');
  return text;
}

caf::error error_of_exception(const std::exception_ptr& x) {
  try {
    std::rethrow_exception(x);
  } catch (const std::exception& e) {
    return caf::make_error(caf::sec::runtime_error, e.what());
  } catch (...) {
    return caf::make_error(caf::sec::runtime_error, "unknown exception");
  }
}

} // namespace smp
