#pragma once

#include "transport/error.hpp"

#include <c10/util/Exception.h>

#include <string>

namespace smp {

class rank_context;
class running_call;

/// A device tells of an error when it is used next, so that the error looks
/// like one of other code. @returns `text`, with that said and how to find the
/// module, if the device of the rank has failed
std::string with_device_failure(const rank_context& rank, std::string text);

/// @returns the error of a device outside of executions, which `x` told of
failure device_failure(const rank_context& rank,
                       const c10::AcceleratorError& x);

/// Waits for the device if `smp.wait_for_device` says so.
/// @throws error if the device has failed; it is that of the running module
void settle_device(running_call& ex);

} // namespace smp
