#pragma once

// Which network of this machine a run uses, and on what conditions.

#include "runtime/config/session_config.hpp"
#include "runtime/launch/environment.hpp"
#include "transport/gate.hpp"
#include "transport/network/tls_relay.hpp"
#include "transport/process_state.hpp"

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace smp {

/// Timeout for all machines of a run to start.
inline constexpr std::chrono::minutes patience_between_machines{5};

struct network_choice {
  /// "lo" where all ranks are on one machine.
  std::string interface = "lo";
  /// Address of rank 0, where it listens if it hosts the SUPERVISOR.
  std::string master = "127.0.0.1";
  /// Unset: the control plane does not leave this machine.
  std::optional<tls_line> line;
};

/// A run over several machines uses the interface that leads to rank 0, or the
/// one that is configured. Waits until the host name of rank 0 resolves, but
/// not longer than `patience_between_machines`.
/// @throws error (config) that says what to do if the network is not trusted or
/// there are no keys, or if there is no such interface
network_choice choose_network(const rank_environment& x,
                              const session_config& config);

/// UCX opens a port wherever it may use tcp, and authenticates no peer.
/// @param transports as UCX_TLS names them: "tcp,self", "all", "^posix"
bool opens_ports(std::string_view transports);

/// Asks the gate at `host` for the secret of the run. Retries until a
/// process listens there.
/// @throws error (config) if one side rejects the other's keys, (rank_down)
/// after `patience_between_machines`
gate_answer ask_master(const std::string& host, uint16_t port,
                       const tls_line& line);

/// How a launcher asks whose run may be started again.
struct repeated_question {
  /// Of the attempt before, whose gate may not be closed yet.
  std::optional<run_secret> before;
  /// Waits between tries; false: gives up.
  std::function<bool(std::chrono::milliseconds)> pause;
};

/// As above. A gate that closes while it is asked is no error yet.
/// @returns nothing if it gave up
std::optional<gate_answer> ask_master(const std::string& host, uint16_t port,
                                      const tls_line& line,
                                      const repeated_question& x);

/// @returns a text that is equal on the ranks of one machine and nowhere else:
/// neither the host name is enough, nor the kernel, which containers share
std::string machine_identity();

} // namespace smp
