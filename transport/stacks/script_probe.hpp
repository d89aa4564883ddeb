#pragma once

#include <optional>
#include <string>

namespace smp {

/// How an interpreter adds its frames to the stack of a thread: its handler for
/// `signal` writes those of the thread that it interrupts to `file`, without
/// any lock. Python's `faulthandler.register` makes such a handler.
struct script_probe {
  int signal = 0;
  int file = -1;
};

/// Reserves them for the rest of the process; the signal is ignored until a
/// handler is set, and when the interpreter takes that back.
/// @returns nothing if the program uses the signal itself, or there is no file
std::optional<script_probe> open_script_probe();

/// @returns why `open_script_probe` returned nothing; empty if it did not
std::string script_probe_problem();

} // namespace smp
