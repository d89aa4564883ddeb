#pragma once

#include "transport/files/file_descriptor.hpp"
#include "transport/network/tls_keys.hpp"

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include <sys/types.h>

struct ssl_st;

namespace smp {

enum class tls_side { connects, accepts };

/// A TLS connection over a non-blocking socket. The first read or write does
/// the handshake, and nothing gets through before the other side has shown a
/// certificate of the run.
class tls_stream {
public:
  /// @throws error (internal) if OpenSSL has no memory
  tls_stream(file_descriptor connection, const tls_keys& keys, tls_side side);

  int fd() const noexcept {
    return connection_.get();
  }

  /// @returns the number of bytes read; 0: none yet, see `events`; -1: the
  /// connection is over, see `problem`
  ssize_t read(std::span<std::byte> x);

  /// As `read`. @returns the number of bytes written
  ssize_t write(std::span<const std::byte> x);

  /// What to `poll` for after a `read` that gave 0.
  short read_events() const noexcept {
    return read_events_;
  }

  /// What to `poll` for after a `write` that gave 0.
  short write_events() const noexcept {
    return write_events_;
  }

  /// @returns whether `read` has bytes that `poll` does not see
  bool has_buffered() const noexcept;

  /// Tells the other side that nothing follows.
  void say_end() noexcept;

  /// Why it is over: errno, or 0 if the other side closed it or violated TLS.
  int problem_number() const noexcept {
    return problem_number_;
  }

  /// The same in words.
  const std::string& problem() const noexcept {
    return problem_;
  }

private:
  struct free_stream {
    void operator()(ssl_st* x) const;
  };

  ssize_t settle(int result, short& events);

  file_descriptor connection_;
  std::unique_ptr<ssl_st, free_stream> stream_;
  short read_events_;
  short write_events_;
  int problem_number_ = 0;
  std::string problem_;
  bool over_ = false;
};

} // namespace smp
