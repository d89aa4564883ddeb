#pragma once

#include "runtime/config/config_file.hpp"

#include <atomic>

namespace smp::app {

/// First call in main: SIGUSR1 and SIGUSR2 wait until somebody handles them,
/// instead of ending a program that has just begun.
void hold_signals();

/// From now on Ctrl-C and the other signals do in this rank what `config` says.
/// @param supervised our launcher passes SIGTERM on as SIGINT, and sends it
///        itself to end a rank
void catch_signals(const train_config& config, bool supervised);

/// @returns what Ctrl-C sets: the run is to end after the current step. The
/// second Ctrl-C ends the process at once; our launcher passes only one on.
const std::atomic<bool>& interrupted() noexcept;

/// @returns whether it was our launcher, which will start this rank again
bool begins_again() noexcept;

/// @returns whether `checkpoint.signal` came since the last call
bool take_wish_to_save() noexcept;

/// @returns the number of `checkpoint.signal`; 0: none
int save_signal(const train_config& config) noexcept;

} // namespace smp::app
