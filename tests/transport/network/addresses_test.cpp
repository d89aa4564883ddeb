#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/tcp.hpp"
#include "transport/file_descriptor.hpp"
#include "transport/network/addresses.hpp"

#include <string>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

using namespace smp;
using namespace smp::test;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

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
  CHECK(endpoint("10.0.0.1", 47) == "10.0.0.1:47");
  CHECK(endpoint("fd00::1", 47) == "[fd00::1]:47");
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
