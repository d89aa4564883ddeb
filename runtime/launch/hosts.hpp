#pragma once

// A run over several machines, started from one by ssh.

#include "runtime/launch/launcher.hpp"

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace smp {

struct host_share {
  std::string host;
  uint64_t ranks = 0;
};

/// @param hosts "a:2" or "a", "[fd00::1]:2" or "fd00::1"
/// @param ranks of the run; shared equally if no host gives its number
/// @throws error (config) if they cannot be shared equally, or do not add up
std::vector<host_share> read_hosts(const std::vector<std::string>& hosts,
                                   uint64_t ranks);

/// @param per_node ranks of each machine, or one number for all, or nothing
/// @returns the ranks of each machine
/// @throws error (config) if they do not add up to `ranks`
std::vector<uint64_t> shares_of(uint64_t nodes,
                                const std::vector<uint64_t>& per_node,
                                uint64_t ranks);

/// @returns `x` as a shell reads it, quoted if it has to be
std::string shell_word(const std::string& x);

/// @param master "HOST:PORT", "[IPV6]:PORT"
/// @throws error (config) if it is neither
node_options read_node(uint64_t node, std::vector<uint64_t> shares,
                       const std::string& master);

/// Runs `command` on each host, in this directory, with the options that
/// make it one launcher of several; stdin is empty. Their console output
/// appears on this console.
/// @param master "HOST:PORT"; empty: the first host and port 29400
/// @param interrupt_grace of those launchers, see `launch_options`
/// @param restarts whether they start the run again, so that one that is lost,
///        with its machine, may come back: ssh is tried again every 5 s
/// @returns the exit code of the launcher that is the cause
int launch_on_hosts(const std::vector<host_share>& hosts,
                    const std::vector<std::string>& command,
                    const std::string& master,
                    std::chrono::milliseconds interrupt_grace, bool restarts);

} // namespace smp
