#include "tests/support/catch.hpp"

#include "actors/inspection/entry_file.hpp"
#include "apps/report/exit_codes.hpp"
#include "apps/report/run_source.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/files/file_descriptor.hpp"
#include "transport/files/run_secret.hpp"

#include <chrono>
#include <optional>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

using namespace smp;
using namespace smp::app;
using namespace smp::test;

TEST_CASE("A viewer with patience asks a silent run again", "[apps][inspect]") {
  file_descriptor port{
    ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  REQUIRE(::bind(port.get(), generic, size) == 0);
  REQUIRE(::listen(port.get(), 8) == 0);
  REQUIRE(::getsockname(port.get(), generic, &size) == 0);
  scratch_dir dir;
  dir.write("stall.json", R"({"text": "rank 1 waits"})");
  published_entry entry{dir.path, entry_of_this_process(ntohs(address.sin_port),
                                                        run_secret::make())};
  auto questions = [&] {
    size_t result = 0;
    while (file_descriptor{::accept(port.get(), nullptr, nullptr)})
      ++result;
    return result;
  };
  run_source source{dir.path};
  auto look = source.look();
  CHECK(look.what == run_look::state::unreachable);
  CHECK_THAT(look.text, Catch::Matchers::EndsWith(
                          "; its last report of a stall: rank 1 waits"));
  CHECK(questions() == 1);
  source.look(std::chrono::seconds{1});
  CHECK(questions() >= 2);
}

TEST_CASE("A run that nobody can be asked about yet is starting",
          "[apps][inspect]") {
  scratch_dir dir;
  dir.write("log-0.txt", "");
  std::optional<published_entry> entry;
  entry.emplace(dir.path, entry_of_this_process(0, run_secret::make()));
  run_source source{dir.path};
  auto look = source.look();
  CHECK(look.what == run_look::state::starting);
  CHECK(to_string(look.what) == std::string{"starting"});
  CHECK(problems_of(look).empty());
  CHECK(code_of(look) == exit_well);
  entry.reset();
  look = source.look();
  CHECK(look.what == run_look::state::ended);
  CHECK(code_of(look) == exit_ended);
}
