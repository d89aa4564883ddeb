#pragma once

// Which network of this machine a run uses, and on what conditions.

#include "runtime/config/session_config.hpp"
#include "runtime/launch/environment.hpp"
#include "transport/gate.hpp"
#include "transport/network/tls_relay.hpp"
#include "transport/process_state.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

namespace smp {

/// Within this time all machines of a run have begun it.
inline constexpr std::chrono::minutes patience_between_machines{5};

struct network_choice {
  /// "lo" where all ranks are on one machine.
  std::string interface = "lo";
  /// Where rank 0 is reached, and where it listens if it hosts the SUPERVISOR.
  std::string master = "127.0.0.1";
  /// None: the control plane does not leave this machine.
  std::optional<tls_line> line;
};

/// A run over several machines goes through the interface that leads to rank 0,
/// or the one that is configured. Waits until the name of rank 0's machine is
/// known, but not longer than `patience_between_machines`.
/// @throws error (config) that says what to do unless the network is trusted
/// and there are keys, or if there is no such interface
network_choice choose_network(const rank_environment& x,
                              const session_config& config);

/// UCX opens a port wherever it may use tcp, and asks nobody who connects.
/// @param transports as UCX_TLS names them: "tcp,self", "all", "^posix"
bool opens_ports(std::string_view transports);

/// Asks the gate at `host` for the secret of the run. Tries until somebody
/// listens there.
/// @throws error (config) if one side does not take the other's keys,
/// (rank_down) after `patience_between_machines`
gate_answer ask_master(const std::string& host, uint16_t port,
                       const tls_line& line);

/// @returns what is equal on the ranks of one machine and nowhere else: the
/// name of the host is not enough, nor is the kernel that containers share
std::string machine_identity();

} // namespace smp
