#pragma once

// The port where clients ask how a run does. Free of CAF.

#include "transport/run_secret.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace smp {

/// What a client sends, again and again; each is answered by the size of the
/// answer (u32, little endian) and the answer.
inline constexpr char inspection_question = '?';

/// An answer is no larger, in bytes.
inline constexpr size_t inspection_answer_limit = size_t{64} << 20;

/// Whoever may talk to actors may also end the run: CAF's protocol runs any
/// handler of any actor. So those who look speak a protocol of their own, which
/// has one question and nothing to decode, at a port of its own, behind a gate
/// with a secret of its own (R44). Neither opens the control plane.
///
/// Clients cost the run little: they share answers, of which there are at most
/// `rate_limit` a second, and one that does not read is dropped.
class inspection_port {
public:
  using bytes = std::vector<std::byte>;

  struct options {
    std::string address = "127.0.0.1";
    /// 0: any free port.
    uint16_t port = 0;
    run_secret secret;
    /// @returns how the run does. On the thread of the port, which it may
    /// block for as long as a client waits.
    std::function<bytes()> collect;
    /// At one time; the oldest one makes room.
    size_t client_limit = 16;
    /// Answers a second.
    double rate_limit = 20;
  };

  /// Listens at once. @throws error (transport) if nothing can listen there
  explicit inspection_port(options x);

  /// Nothing is collected afterwards.
  ~inspection_port();

  inspection_port(const inspection_port&) = delete;
  inspection_port& operator=(const inspection_port&) = delete;

  uint16_t port() const noexcept;

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

} // namespace smp
