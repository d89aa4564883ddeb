#include "runtime/execution/device_failure.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/execution/running_call.hpp"

namespace smp {

std::string with_device_failure(const rank_context& rank, std::string text) {
  auto* device = rank.launches();
  if (device && !rank.config().wait_for_device && device->failed())
    text += " (device " + device->get().str()
            + " has failed, in this launch or in an earlier one, which may be "
              "of another module: smp.wait_for_device = true names it)";
  return text;
}

failure device_failure(const rank_context& rank,
                       const c10::AcceleratorError& x) {
  return {error_code::user_code,
          rank.self(),
          {},
          with_device_failure(rank, x.what_without_backtrace())};
}

void settle_device(running_call& ex) {
  auto& rank = ex.rank();
  if (!rank.launches() || !rank.config().wait_for_device)
    return;
  try {
    rank.launches()->settle();
  } catch (const c10::AcceleratorError& e) {
    failure why{error_code::user_code, rank.self(), ex.module_path(),
                e.what_without_backtrace()};
    ex.keep_error(why); // TorchScript forgets all but its text
    throw error{std::move(why)};
  }
}

} // namespace smp
