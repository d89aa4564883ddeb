#pragma once

#include "actors/protocol/actor_host.hpp"
#include "transport/error.hpp"
#include "transport/files/run_secret.hpp"
#include "transport/network/tls_relay.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace smp {

/// What follows the end of the ranks.
enum class run_course : uint8_t {
  unknown, // the first machine has not said
  again,   // the ranks are started again
  over,
  lost, // the SUPERVISOR is gone without a word
};

/// Connects the launcher of another machine to the SUPERVISOR: it is not a
/// rank, but is the first to know how one of its ranks ended. Free of CAF.
class supervisor_link {
public:
  struct options {
    /// Index of this machine.
    uint64_t machine = 0;
    std::string address = "127.0.0.1";
    uint16_t port = 0;
    std::optional<tls_line> line;
    run_secret secret;
    std::chrono::milliseconds limit{30000};
    /// The run ends by a stall. Any thread; must not block.
    std::function<void(const failure&)> on_end;
    /// The SUPERVISOR is gone. The same.
    std::function<void()> on_lost;
  };

  /// Waits until the SUPERVISOR answers.
  /// @throws error (rank_down) after `limit`
  supervisor_link(actor_host& host, options x);

  ~supervisor_link();

  /// See `supervisor_host::report_down`.
  void report_down(const failure& x);

  /// See `supervisor_host::report_result`.
  void report_result(const failure& x);

  /// See `supervisor_host::report_stop`.
  void report_stop(rank_id x, bool stopped);

  /// @returns what the first machine has said so far
  run_course course() const;

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

} // namespace smp
