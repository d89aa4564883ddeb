#pragma once

#include "tests/support/runs/tcp.hpp"
#include "transport/wake_up.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace smp::test {

/// Passes bytes between who connects and a port, and keeps what goes there.
class recorder {
public:
  explicit recorder(uint16_t to)
    : listener_(listen_anywhere()), thread_([this, to] { run(to); }) {
    // nop
  }

  ~recorder() {
    if (thread_.joinable())
      stop();
  }

  uint16_t port() const {
    return listening_port(listener_.get());
  }

  /// @returns what was sent on each connection.
  std::vector<std::vector<std::byte>> stop() {
    stop_.notify();
    thread_.join();
    std::vector<std::vector<std::byte>> result;
    for (auto& x : pairs_)
      result.push_back(std::move(x.recorded));
    return result;
  }

private:
  struct pair {
    file_descriptor from;
    file_descriptor to;
    std::vector<std::byte> recorded;
  };

  void run(uint16_t to) {
    for (;;) {
      std::vector<pollfd> fds{{stop_.fd(), POLLIN, 0},
                              {listener_.get(), POLLIN, 0}};
      for (auto& x : pairs_) {
        fds.push_back({x.from ? x.from.get() : -1, POLLIN, 0});
        fds.push_back({x.from ? x.to.get() : -1, POLLIN, 0});
      }
      ::poll(fds.data(), fds.size(), -1);
      if (fds[0].revents != 0)
        return;
      for (size_t i = 0; 2 * i + 2 < fds.size(); ++i) {
        if (fds[2 * i + 2].revents != 0)
          pass(pairs_[i], pairs_[i].from, pairs_[i].to, true);
        if (pairs_[i].from && fds[2 * i + 3].revents != 0)
          pass(pairs_[i], pairs_[i].to, pairs_[i].from, false);
      }
      if (fds[1].revents != 0)
        pairs_.push_back(
          {file_descriptor{::accept(listener_.get(), nullptr, nullptr)},
           connect_to(to),
           {}});
    }
  }

  static void pass(pair& x, file_descriptor& from, file_descriptor& to,
                   bool keep) {
    std::array<std::byte, 65536> bytes;
    auto n = ::recv(from.get(), bytes.data(), bytes.size(), 0);
    if (n <= 0) {
      x.from.reset();
      x.to.reset();
      return;
    }
    auto got = std::span{bytes}.first(static_cast<size_t>(n));
    send_bytes(to.get(), got);
    if (keep)
      x.recorded.insert(x.recorded.end(), got.begin(), got.end());
  }

  file_descriptor listener_;
  pollable_wake_up stop_;
  std::vector<pair> pairs_;
  std::thread thread_;
};

} // namespace smp::test
