#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/runs/tcp.hpp"
#include "transport/files/file_descriptor.hpp"
#include "transport/network/addresses.hpp"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

using namespace smp;
using namespace smp::test;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

namespace {

/// An address that answers nothing: the kernel drops who comes to a port whose
/// line is full.
struct silent_port {
  silent_port() : listener(listen_anywhere()) {
    REQUIRE(::listen(listener.get(), 0) == 0);
    auto to = loopback_address(listening_port(listener.get()));
    for (int i = 0; i < 4; ++i) {
      file_descriptor x{
        ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
      // Some are in the line, the others wait for a place.
      (void)::connect(x.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to));
      line.push_back(std::move(x));
    }
  }

  file_descriptor listener;
  std::vector<file_descriptor> line;
};

sockaddr_in address_of(const char* x) {
  sockaddr_in result{};
  result.sin_family = AF_INET;
  REQUIRE(::inet_pton(AF_INET, x, &result.sin_addr) == 1);
  return result;
}

addrinfo entry_of(sockaddr_in& x, addrinfo* next) {
  addrinfo result{};
  result.ai_family = AF_INET;
  result.ai_socktype = SOCK_STREAM;
  result.ai_addr = reinterpret_cast<sockaddr*>(&x);
  result.ai_addrlen = sizeof(x);
  result.ai_next = next;
  return result;
}

} // namespace

TEST_CASE("an address that swallows all leaves time for the next one",
          "[transport][network]") {
  silent_port hole;
  auto listener = listen_anywhere();
  auto good = loopback_address(listening_port(listener.get()));
  auto bad = loopback_address(listening_port(hole.listener.get()));
  auto second = entry_of(good, nullptr);
  auto first = entry_of(bad, &second);
  constexpr auto limit = 6s;
  auto begin = std::chrono::steady_clock::now();
  CHECK(connect_within(&first, "two", limit));
  // The first one had half of it.
  CHECK(std::chrono::steady_clock::now() - begin < limit);
  second.ai_addr = first.ai_addr;
  CHECK_THAT(error_of([&] { connect_within(&first, "two", 100ms); },
                      error_code::transport),
             ContainsSubstring("two: "));
}

TEST_CASE("a listener is at all addresses of the machine, at one port",
          "[transport][network]") {
  // For documentation (RFC 5737): no machine has it.
  auto other = address_of("192.0.2.1");
  auto first = address_of("127.0.0.1");
  auto second = address_of("127.0.0.2");
  auto last = entry_of(first, nullptr);
  auto third = entry_of(second, &last);
  auto again = entry_of(first, &third);
  auto all = entry_of(other, &again);
  auto listeners = listen_at(&all, "here");
  REQUIRE(listeners.size() == 2);
  auto port = local_port(listeners[0].get());
  CHECK(port != 0);
  CHECK(local_port(listeners[1].get()) == port);
  for (auto host : {"127.0.0.1", "127.0.0.2"})
    CHECK(connect_within(host, port, 30s));
  // Where one is taken, half of those who come would reach somebody else.
  second.sin_port = htons(port);
  auto free = address_of("127.0.0.3");
  free.sin_port = htons(port);
  auto taken = entry_of(second, nullptr);
  auto both = entry_of(free, &taken);
  CHECK_THAT(
    error_of([&] { listen_at(&both, "there"); }, error_code::transport),
    ContainsSubstring("there: ")
      && ContainsSubstring(std::strerror(EADDRINUSE)));
  auto none = entry_of(other, nullptr);
  CHECK_THAT(
    error_of([&] { listen_at(&none, "there"); }, error_code::transport),
    ContainsSubstring("there: ")
      && ContainsSubstring("no address of this machine"));
}

TEST_CASE("loopback is what leads nowhere else", "[transport][network]") {
  for (auto x : {"localhost", "127.0.0.1", "127.9.9.9", "::1"})
    CHECK(is_loopback(x));
  for (auto x :
       {"0.0.0.0", "::", "10.0.0.1", "fd00::1", "no.such.name.invalid"})
    CHECK_FALSE(is_loopback(x));
}

TEST_CASE("an interface is found by its name and by its address",
          "[transport][network]") {
  CHECK(find_interface("lo").address == "127.0.0.1");
  CHECK(find_interface("127.0.0.1").name == "lo");
  CHECK(interface_towards("127.0.0.1").name == "lo");
  CHECK_THAT(error_of([] { find_interface("ether9"); }, error_code::config),
             ContainsSubstring("ether9")
               && ContainsSubstring("transport.interface")
               && ContainsSubstring("lo (127.0.0.1)"));
}

TEST_CASE("an endpoint is written so that its port can be found",
          "[transport][network]") {
  auto [host, text] = GENERATE(table<std::string, std::string>(
    {{"10.0.0.1", "10.0.0.1:47"}, {"fd00::1", "[fd00::1]:47"}}));
  CHECK(endpoint(host, 47) == text);
  auto parts = parse_endpoint(text);
  REQUIRE(parts);
  CHECK(parts->host == host);
  CHECK(parts->port == 47);
}

TEST_CASE("what has no host or no port is no endpoint",
          "[transport][network]") {
  auto text = GENERATE(as<std::string>{}, "", "a", ":47", "a:", "a:b", "a:-1",
                       "a:65536", "a:47 ", "[fd00::1]");
  CAPTURE(text);
  CHECK_FALSE(parse_endpoint(text));
}

TEST_CASE("where nobody listens is an error with the place",
          "[transport][network]") {
  {
    auto x = listen_anywhere();
    CHECK(connect_within("localhost", listening_port(x.get()), 30s));
  }
  // Kept, as the system gives a free port to the next one who wants any.
  file_descriptor silent{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  auto address = loopback_address(0);
  socklen_t size = sizeof(address);
  auto* bound = reinterpret_cast<sockaddr*>(&address);
  REQUIRE(::bind(silent.get(), bound, size) == 0);
  REQUIRE(::getsockname(silent.get(), bound, &size) == 0);
  auto port = ntohs(address.sin_port);
  CHECK_THAT(error_of([&] { connect_within("127.0.0.1", port, 30s); },
                      error_code::transport),
             ContainsSubstring("127.0.0.1:" + std::to_string(port)));
  CHECK_THAT(
    error_of([] { resolve("no.such.name.invalid", 1); }, error_code::transport),
    ContainsSubstring("no.such.name.invalid"));
}
