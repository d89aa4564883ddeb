#pragma once

#include "transport/files/file_descriptor.hpp"
#include "transport/files/run_secret.hpp"
#include "transport/network/tls_relay.hpp"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace smp {

/// What a gate has counted.
struct gate_stats {
  /// Connections whose peer showed the secret of the run.
  uint64_t admitted = 0;
  /// Connections whose peer showed the keys of the run, and asked.
  uint64_t answered = 0;
  /// Connections that sent something else, or nothing in time, or had to make
  /// room for others.
  uint64_t refused = 0;
};

/// Owns a port of a run, and lets a peer through to the service behind it only
/// when it has shown the secret of the run (R44): parsers of protocols without
/// authentication would take a stranger's bytes for a rank's, or allocate as
/// much as those claim. The two sides challenge each other, so that a rank does
/// not talk to a stranger either:
///
///   rank to gate   mark (8 bytes), random bytes X (32)
///   gate to rank   random bytes Y (32), proof of ("gate", X Y) (32)
///   rank to gate   proof of ("rank", X Y) (32)
///
/// What follows belongs to the new owner of the connection. A connection that
/// is not admitted yet costs a descriptor and 72 bytes (with TLS some 50 KB),
/// and only for a while: beyond `unproven_limit` the oldest one is closed.
///
/// Over a network all of this happens inside TLS, which requires the keys of
/// the run from both sides. A rank that has them may ask instead of proving:
///
///   rank to gate   another mark (8), nothing (32)
///   gate to rank   the secret (32), length (4, little endian), note
class gate {
public:
  /// Who scans ports must not fill a log.
  static constexpr size_t told_limit = 16;

  struct options {
    /// An address of this machine, or a name: then all addresses of this
    /// machine to which it resolves.
    std::string address = "127.0.0.1";
    /// 0: any free port.
    uint16_t port = 0;
    run_secret secret;
    /// Required for any address but loopback.
    std::optional<tls_line> line;
    /// Sent with the secret to a rank that has the keys and asks.
    std::string note;
    /// A connection must show the secret within this time.
    std::chrono::milliseconds patience{5000};
    /// The most connections at one time that have not shown it.
    size_t unproven_limit = 64;
    /// Over a network: hears which peer was refused and why, once for each
    /// reason of each peer, up to `told_limit` times. Runs on the gate's
    /// thread; must not block.
    std::function<void(const std::string&)> on_refused = {};
    /// Takes an admitted connection. Runs on the gate's thread; must not block.
    std::function<void(file_descriptor)> admit;
  };

  /// Listens at once. @throws error (transport) if nothing can listen there
  explicit gate(options x);

  /// No `admit` runs afterwards.
  ~gate();

  gate(const gate&) = delete;
  gate& operator=(const gate&) = delete;

  uint16_t port() const noexcept;

  /// A listening descriptor; no other one in this process has its number.
  int listener() const noexcept;

  /// Any thread.
  gate_stats stats() const noexcept;

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

/// The other side: shows the secret over a fresh connection, and requires the
/// gate to show it, too.
/// @throws error (transport) if the gate does not answer within `limit`, or
/// cannot prove that it belongs to this run
void pass_gate(int connection, const run_secret& secret,
               std::chrono::milliseconds limit);

/// The same through TLS.
void pass_gate(tls_stream& connection, const run_secret& secret,
               std::chrono::milliseconds limit);

/// What a gate tells a rank of another machine that has the keys of the run.
struct gate_answer {
  run_secret secret;
  std::string note;
};

/// @throws error (transport) if the gate does not answer within `limit`, or one
/// side rejects the other's keys
gate_answer ask_gate(tls_stream& connection, std::chrono::milliseconds limit);

} // namespace smp
