#pragma once

// The port where clients query the status of a run. Free of CAF.

#include "transport/files/run_secret.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace smp {

/// The requests of a client, which it may repeat; one byte each. The reply is
/// the size of the answer (u32, little endian), then the answer.
enum class inspection_question : char {
  status = '?',       // a `run_status`
  events = 'e',       // the last events of all ranks: a list of images
  recent = 'r',       // the same, fewer: what is asked several times a second
  begin_trace = 'b',  // ranks keep all events from now on; an empty list
  finish_trace = 'f', // those, a list of images
  stacks = 's',       // where the threads of ranks are: `process_stacks`es
};

/// Upper bound on the size of an answer, in bytes.
inline constexpr size_t inspection_answer_limit = size_t{64} << 20;

/// A client that can talk to actors can also end the run: CAF's protocol lets
/// it call any handler of any actor. So observers use a separate protocol, with
/// requests of one byte and nothing to decode, on a separate port behind a gate
/// with a separate secret (R44). Neither opens the control plane.
///
/// Bounds the cost for the run: clients share answers, at most `rate_limit` per
/// second, and a client that does not read its answers is dropped.
class inspection_port {
public:
  using bytes = std::vector<std::byte>;

  struct options {
    std::string address = "127.0.0.1";
    /// 0: any free port.
    uint16_t port = 0;
    run_secret secret;
    /// @returns the encoded answer. Called on the thread of the port, which it
    /// may block while a client waits.
    std::function<bytes(inspection_question)> collect;
    /// Maximum number of connections; at the limit the oldest one is closed.
    size_t client_limit = 16;
    /// Answers per second.
    double rate_limit = 20;
  };

  /// Listens at once. @throws error (transport) if the port cannot be opened
  explicit inspection_port(options x);

  /// After this, `collect` is not called again.
  ~inspection_port();

  inspection_port(const inspection_port&) = delete;
  inspection_port& operator=(const inspection_port&) = delete;

  uint16_t port() const noexcept;

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

} // namespace smp
