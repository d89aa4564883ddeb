#pragma once

// Connections as a stranger makes them: bytes to a port of this machine.

#include "transport/files/file_descriptor.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

namespace smp::test {

inline sockaddr_in loopback_address(uint16_t port) {
  sockaddr_in result{};
  result.sin_family = AF_INET;
  result.sin_port = htons(port);
  result.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return result;
}

/// @throws std::runtime_error if nobody listens there
inline file_descriptor connect_to(uint16_t port) {
  file_descriptor result{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  auto address = loopback_address(port);
  if (!result
      || ::connect(result.get(), reinterpret_cast<sockaddr*>(&address),
                   sizeof(address))
           != 0)
    throw std::runtime_error{"nobody listens at port " + std::to_string(port)};
  return result;
}

/// @returns a socket that listens at a free port
inline file_descriptor listen_anywhere() {
  file_descriptor result{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  auto address = loopback_address(0);
  if (::bind(result.get(), reinterpret_cast<sockaddr*>(&address),
             sizeof(address))
        != 0
      || ::listen(result.get(), SOMAXCONN) != 0)
    throw std::runtime_error{"nothing can listen"};
  return result;
}

/// @returns 0 if `fd` is not a socket that listens
inline uint16_t listening_port(int fd) {
  int listens = 0;
  socklen_t size = sizeof(listens);
  if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0
      || listens == 0)
    return 0;
  sockaddr_in address{};
  size = sizeof(address);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin_port);
}

/// @returns the numbers of all open descriptors of this process
inline std::vector<int> open_descriptors() {
  std::vector<int> result;
  auto* dir = ::opendir("/proc/self/fd");
  while (auto* entry = ::readdir(dir))
    if (auto fd = std::atoi(entry->d_name);
        entry->d_name[0] != '.' && fd != ::dirfd(dir))
      result.push_back(fd);
  ::closedir(dir);
  return result;
}

/// @returns false where the other side does not want them any more
inline bool send_bytes(int fd, std::span<const std::byte> x) {
  while (!x.empty()) {
    auto n = ::send(fd, x.data(), x.size(), MSG_NOSIGNAL);
    if (n <= 0)
      return false;
    x = x.subspan(static_cast<size_t>(n));
  }
  return true;
}

/// @returns up to `size` bytes; fewer after the deadline or at the end
inline std::vector<std::byte>
receive_bytes(int fd, size_t size,
              std::chrono::milliseconds limit = std::chrono::seconds{30}) {
  std::vector<std::byte> result(size);
  size_t have = 0;
  while (have < size) {
    pollfd x{fd, POLLIN, 0};
    if (::poll(&x, 1, static_cast<int>(limit.count())) <= 0)
      break;
    auto n = ::recv(fd, result.data() + have, size - have, 0);
    if (n <= 0)
      break;
    have += static_cast<size_t>(n);
  }
  result.resize(have);
  return result;
}

/// @returns whether the other side closes within the limit; what it sends
/// before does not count
inline bool
is_closed(int fd, std::chrono::milliseconds limit = std::chrono::seconds{30}) {
  auto deadline = std::chrono::steady_clock::now() + limit;
  std::byte ignored[4096];
  for (;;) {
    auto left = std::chrono::ceil<std::chrono::milliseconds>(
      deadline - std::chrono::steady_clock::now());
    pollfd x{fd, POLLIN, 0};
    if (left.count() <= 0 || ::poll(&x, 1, static_cast<int>(left.count())) <= 0)
      return false;
    if (::recv(fd, ignored, sizeof(ignored), 0) <= 0)
      return true;
  }
}

/// Lets this process open so many files, as long as it lives.
class descriptor_limit {
public:
  explicit descriptor_limit(rlim_t wanted) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    auto now = before_;
    now.rlim_cur = wanted < now.rlim_max ? wanted : now.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &now);
  }

  ~descriptor_limit() {
    ::setrlimit(RLIMIT_NOFILE, &before_);
  }

  descriptor_limit(const descriptor_limit&) = delete;
  descriptor_limit& operator=(const descriptor_limit&) = delete;

private:
  rlimit before_;
};

} // namespace smp::test
