#pragma once

#include "transport/files/file_descriptor.hpp"
#include "transport/network/tls_keys.hpp"
#include "transport/network/tls_stream.hpp"

#include <chrono>
#include <memory>

namespace smp {

/// Carries bytes between TLS connections and sockets inside this process, on a
/// thread of its own: code that uses such a socket needs to know nothing of
/// TLS.
class tls_relay {
public:
  tls_relay();

  /// Waits up to a second to send what was written before the sockets closed.
  ~tls_relay();

  tls_relay(const tls_relay&) = delete;
  tls_relay& operator=(const tls_relay&) = delete;

  /// Any thread. @returns the socket that stands for `x` from now on: each ends
  /// when the other does. A machine that stops answering on one of its
  /// connections loses all of them
  /// @throws std::system_error where the process has no descriptor left
  file_descriptor add(tls_stream x);

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

/// How the control plane crosses a network. Without it: unencrypted, and only
/// over loopback.
struct tls_line {
  tls_keys keys;
  /// The other machine is lost after this long without a sign of life.
  std::chrono::milliseconds silence{15000};
  std::shared_ptr<tls_relay> relay;
};

} // namespace smp
