#include "transport/network/addresses.hpp"

#include "transport/error.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <set>
#include <utility>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

namespace smp {

namespace {

std::string number_of(const sockaddr* x) {
  char text[NI_MAXHOST] = {};
  auto size = x->sa_family == AF_INET6 ? sizeof(sockaddr_in6)
                                       : sizeof(sockaddr_in);
  if (::getnameinfo(x, static_cast<socklen_t>(size), text, sizeof(text),
                    nullptr, 0, NI_NUMERICHOST)
      != 0)
    return {};
  return text;
}

bool is_loopback_address(const sockaddr* x) {
  if (x->sa_family == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in*>(x)->sin_addr.s_addr) >> 24
           == 127;
  return x->sa_family == AF_INET6
         && IN6_IS_ADDR_LOOPBACK(
           &reinterpret_cast<const sockaddr_in6*>(x)->sin6_addr);
}

/// @returns the address by which this machine reaches `x`; empty: no route
std::string source_towards(const addrinfo& x) {
  file_descriptor probe{
    ::socket(x.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, IPPROTO_UDP)};
  sockaddr_storage mine{};
  socklen_t size = sizeof(mine);
  // A UDP connect sends nothing: the kernel only chooses the route.
  if (!probe || ::connect(probe.get(), x.ai_addr, x.ai_addrlen) != 0
      || ::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&mine), &size)
           != 0)
    return {};
  return number_of(reinterpret_cast<sockaddr*>(&mine));
}

/// @returns 0, or the reason (errno)
int finish_connecting(int fd, std::chrono::milliseconds limit) {
  pollfd x{fd, POLLOUT, 0};
  int n = 0;
  do
    n = ::poll(&x, 1, static_cast<int>(std::max<int64_t>(0, limit.count())));
  while (n < 0 && errno == EINTR);
  if (n <= 0)
    return ETIMEDOUT;
  int problem = 0;
  socklen_t size = sizeof(problem);
  ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &problem, &size);
  return problem;
}

uint16_t& port_in(sockaddr_storage& x) {
  return x.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(x).sin6_port
                                 : reinterpret_cast<sockaddr_in&>(x).sin_port;
}

/// @param result empty at first
/// @returns 0, or why it does not listen at all of them (errno)
int try_to_listen(const addrinfo* addresses,
                  std::vector<file_descriptor>& result) {
  std::set<std::string> seen;
  int why = EADDRNOTAVAIL;
  for (auto* x = addresses; x != nullptr; x = x->ai_next) {
    sockaddr_storage at{};
    std::memcpy(&at, x->ai_addr, x->ai_addrlen);
    std::string bytes{reinterpret_cast<const char*>(&at), x->ai_addrlen};
    if (!seen.insert(std::move(bytes)).second)
      continue;
    // The free port chosen at the first address is used for all.
    if (!result.empty())
      port_in(at) = htons(local_port(result.front().get()));
    file_descriptor next{
      ::socket(x->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
    // A run may reuse the port of one that just ended.
    int yes = 1;
    if (next
        && ::setsockopt(next.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes))
             == 0
        && ::bind(next.get(), reinterpret_cast<sockaddr*>(&at), x->ai_addrlen)
             == 0
        && ::listen(next.get(), SOMAXCONN) == 0) {
      result.push_back(std::move(next));
      continue;
    }
    why = errno;
    // An address of another machine, or of a family that is disabled here.
    if (why != EADDRNOTAVAIL && why != EAFNOSUPPORT)
      return why;
  }
  return result.empty() ? why : 0;
}

} // namespace

std::vector<network_interface> network_interfaces() {
  ifaddrs* raw = nullptr;
  if (::getifaddrs(&raw) != 0)
    return {};
  std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> all{raw, ::freeifaddrs};
  std::vector<network_interface> result;
  for (auto family : {AF_INET, AF_INET6})
    for (auto* x = all.get(); x != nullptr; x = x->ifa_next)
      if (x->ifa_addr != nullptr && x->ifa_addr->sa_family == family
          && (x->ifa_flags & IFF_UP) != 0)
        result.push_back({x->ifa_name, number_of(x->ifa_addr)});
  return result;
}

network_interface find_interface(const std::string& wanted) {
  std::string names;
  for (auto& x : network_interfaces()) {
    // A link-local address ends with the interface: "fe80::1%eth0".
    if (x.name == wanted || x.address == wanted
        || x.address.substr(0, x.address.find('%')) == wanted)
      return x;
    names += (names.empty() ? "" : ", ") + x.name + " (" + x.address + ')';
  }
  throw config_error("no interface " + wanted
                     + " is up on this machine (transport.interface); there "
                       "are: "
                     + names);
}

network_interface interface_towards(const std::string& host) {
  auto all = resolve(host, 0);
  for (auto* x = all.get(); x != nullptr; x = x->ai_next)
    if (auto mine = source_towards(*x); !mine.empty())
      return find_interface(mine);
  throw config_error("no interface of this machine leads to " + host
                     + "; transport.interface names one");
}

resolved_addresses resolve(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* raw = nullptr;
  if (auto status = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(),
                                  &hints, &raw))
    throw error{error_code::transport,
                endpoint(host, port) + ": " + ::gai_strerror(status)};
  return resolved_addresses{raw};
}

bool is_loopback(const std::string& host) {
  if (host == "localhost")
    return true;
  try {
    auto all = resolve(host, 0);
    for (auto* x = all.get(); x != nullptr; x = x->ai_next)
      if (!is_loopback_address(x->ai_addr))
        return false;
    return true;
  } catch (const error&) {
    return false;
  }
}

file_descriptor connect_within(const std::string& host, uint16_t port,
                               std::chrono::milliseconds limit) {
  using clock = std::chrono::steady_clock;
  auto deadline = clock::now() + limit;
  auto all = resolve(host, port);
  auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline
                                                           - clock::now());
  return connect_within(all.get(), endpoint(host, port), left);
}

file_descriptor connect_within(const addrinfo* addresses,
                               const std::string& where,
                               std::chrono::milliseconds limit) {
  using clock = std::chrono::steady_clock;
  auto deadline = clock::now() + limit;
  int untried = 0;
  for (auto* x = addresses; x != nullptr; x = x->ai_next)
    ++untried;
  int why = EADDRNOTAVAIL;
  for (auto* x = addresses; x != nullptr; x = x->ai_next, --untried) {
    file_descriptor result{
      ::socket(x->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
    if (!result) {
      why = errno;
      continue;
    }
    why = ::connect(result.get(), x->ai_addr, x->ai_addrlen) == 0 ? 0 : errno;
    if (why == EINPROGRESS)
      why = finish_connecting(result.get(),
                              std::chrono::ceil<std::chrono::milliseconds>(
                                (deadline - clock::now()) / untried));
    int yes = 1;
    ::setsockopt(result.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    if (why == 0)
      return result;
  }
  throw error{error_code::transport, where + ": " + std::strerror(why)};
}

std::vector<file_descriptor> listen_at(const addrinfo* addresses,
                                       const std::string& where) {
  std::vector<file_descriptor> result;
  // A port that was free at the first address may be taken at another one.
  int why = EADDRINUSE;
  for (int tries = 0; tries < 10 && why == EADDRINUSE; ++tries) {
    result.clear();
    why = try_to_listen(addresses, result);
  }
  if (why != 0)
    throw error{
      error_code::transport,
      where + ": " + std::strerror(why)
        + (why == EADDRNOTAVAIL ? " (no address of this machine)" : "")};
  return result;
}

uint16_t local_port(int socket) {
  sockaddr_storage x{};
  socklen_t size = sizeof(x);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&x), &size) != 0)
    throw error{error_code::transport,
                std::string{"getsockname: "} + std::strerror(errno)};
  return ntohs(port_in(x));
}

std::string peer_address(int connection) {
  sockaddr_storage x{};
  socklen_t size = sizeof(x);
  if (::getpeername(connection, reinterpret_cast<sockaddr*>(&x), &size) != 0)
    return {};
  return number_of(reinterpret_cast<sockaddr*>(&x));
}

std::string endpoint(const std::string& host, uint16_t port) {
  auto text = host.find(':') == std::string::npos ? host : '[' + host + ']';
  return text + ':' + std::to_string(port);
}

std::optional<host_and_port> parse_endpoint(std::string_view x) {
  auto colon = x.rfind(':');
  if (colon == std::string_view::npos)
    return std::nullopt;
  host_and_port result;
  auto* end = x.data() + x.size();
  auto [rest, problem] = std::from_chars(x.data() + colon + 1, end,
                                         result.port);
  auto host = x.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2); // IPv6
  if (problem != std::errc{} || rest != end || host.empty())
    return std::nullopt;
  result.host = host;
  return result;
}

void bound_silence(int connection, std::chrono::milliseconds limit) {
  auto set = [connection](int level, int name, int value) {
    ::setsockopt(connection, level, name, &value, sizeof(value));
  };
  auto pause = static_cast<int>(
    std::max<int64_t>(1, limit.count() / 1000 / 5)); // seconds
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, pause);
  set(IPPROTO_TCP, TCP_KEEPINTVL, pause);
  // This replaces the number of probes, and applies to sent data as well.
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(limit.count()));
}

} // namespace smp
