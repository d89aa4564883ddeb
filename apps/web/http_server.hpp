#pragma once

// HTTP for a few readers of this machine, amid strangers: whoever connects can
// read, and can neither hold up the others nor cost more than a bounded part of
// memory.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace smp::app {

/// Where a server listens.
struct http_address {
  std::string host; // an address, as Boost.Asio writes it
  uint16_t port = 0;
  /// Only this machine reaches it.
  bool loopback = true;

  /// @param x HOST:PORT, with an address or "localhost"; port 0: any free one
  /// @throws error (config) if it is not that
  static http_address parse(const std::string& x);

  std::string text() const;
};

struct http_reply {
  unsigned status = 200;
  std::string type = "text/plain; charset=utf-8";
  std::shared_ptr<const std::string> body;
};

struct http_limits {
  /// Open at once. If there are more, the one goes that is silent for longest.
  size_t connections = 256;
  /// Of those, how many may be streams of events.
  size_t streams = 16;
  size_t header_bytes = 8192;
  /// From the connection to the end of its request, and for each reply.
  std::chrono::milliseconds patience{5000};
};

/// Answers GET and HEAD, one request per connection, on a thread of its own. On
/// loopback the request must name this machine as its host, so that no page of
/// the web can read along in a browser (DNS rebinding); elsewhere it must have
/// the token.
class http_server {
public:
  using answer_to = std::function<void(http_reply)>;

  struct options {
    http_address address;
    /// "token=..." must be in the query; empty: nobody needs one.
    std::string token;
    http_limits limits;
    /// Called with the path for each good request that is not `stream_path`, on
    /// the server's thread, which must not wait. What it is given may be called
    /// on any thread, at any time, once.
    std::function<void(const std::string& path, answer_to)> answer;
    /// Where server-sent events are; empty: nowhere.
    std::string stream_path;
    /// Called on the server's thread when somebody begins to listen there.
    std::function<void()> on_stream;
  };

  /// Binds the address, and serves.
  /// @throws error (config) that names the address if that is not possible
  explicit http_server(options x);
  ~http_server();
  http_server(const http_server&) = delete;
  http_server& operator=(const http_server&) = delete;

  /// The port, if any was asked for.
  uint16_t port() const noexcept;

  /// How many listen to events.
  size_t streams() const noexcept;

  /// Sends an event to all streams. Any thread may call this.
  /// @param news to those who had all events
  /// @param all to those who had none, or were too slow for the last ones
  void publish(std::shared_ptr<const std::string> news,
               std::shared_ptr<const std::string> all);

private:
  struct impl;
  std::shared_ptr<impl> impl_;
};

} // namespace smp::app
