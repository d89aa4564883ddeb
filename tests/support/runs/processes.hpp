#pragma once

#include <chrono>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <sys/types.h>

namespace smp::test {

/// Waits for the end of any process, also one that its parent does not look
/// after. @returns false after the limit
bool ended_within(pid_t x, std::chrono::milliseconds limit);

/// @returns whether it is not even a zombie
bool is_gone(pid_t x);

/// @returns in the order of their start
std::vector<pid_t> children_of(pid_t x);

/// Whether the program of a process was started with an environment variable;
/// not yet true between fork and exec.
bool has_variable(pid_t x, const std::string& name);

/// Seconds that a process computed, in steps of 10 ms; 0 if it is gone.
double cpu_seconds_of(pid_t x);

/// @returns the tcp ports at which it listens, on any address
std::set<uint16_t> listening_ports_of(pid_t x);

/// Lets time pass, which is all that shows that something does not happen.
void let_pass(std::chrono::milliseconds x);

} // namespace smp::test
