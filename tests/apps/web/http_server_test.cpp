#include "tests/support/catch.hpp"

#include "apps/web/http_server.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/runs/process_memory.hpp"
#include "tests/support/runs/tcp.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <random>
#include <semaphore>
#include <span>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::app;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;

namespace {

std::shared_ptr<const std::string> shared(std::string x) {
  return std::make_shared<const std::string>(std::move(x));
}

http_server::options options_at(const std::string& address) {
  http_server::options result;
  result.address = http_address::parse(address);
  result.answer = [](const std::string& path,
                     const http_server::answer_to& to) {
    to({200, "text/plain", shared("this is " + path)});
  };
  result.stream_path = "/events";
  return result;
}

/// @returns all that the other side sends until it closes
std::string rest_of(int fd) {
  constexpr size_t more_than_any = 1 << 20;
  auto bytes = receive_bytes(fd, more_than_any);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

file_descriptor ask(uint16_t port, const std::string& text) {
  auto result = connect_to(port);
  send_bytes(result.get(), std::as_bytes(std::span{text}));
  return result;
}

std::string reply_to(uint16_t port, const std::string& text) {
  return rest_of(ask(port, text).get());
}

std::string get(uint16_t port, const std::string& target = "/",
                const std::string& host = "localhost") {
  return reply_to(
    port, fmt::format("GET {} HTTP/1.1\r\nHost: {}\r\n\r\n", target, host));
}

/// @returns what was sent until `end` was seen
std::string read_until(int fd, const std::string& end) {
  std::string result;
  while (result.find(end) == std::string::npos) {
    auto byte = receive_bytes(fd, 1);
    if (byte.empty())
      break;
    result += static_cast<char>(byte.front());
  }
  return result;
}

const std::string ask_for_events
  = "GET /events HTTP/1.1\r\n"
    "Host: 127.0.0.1\r\n\r\n";

} // namespace

TEST_CASE("A reader gets the answer to GET, and without its body to HEAD",
          "[apps][web]") {
  http_server server{options_at("127.0.0.1:0")};
  auto reply = get(server.port(), "/some?x=1");
  CHECK_THAT(reply, StartsWith("HTTP/1.1 200 OK\r\n")
                      && ContainsSubstring("\r\nContent-Length: 13\r\n")
                      && ContainsSubstring("\r\n\r\nthis is /some"));
  auto head = reply_to(server.port(),
                       "HEAD / HTTP/1.1\r\nHost: localhost:1\r\n\r\n");
  CHECK_THAT(head, ContainsSubstring("Content-Length: 9\r\n")
                     && Catch::Matchers::EndsWith("\r\n\r\n"));
}

TEST_CASE("What is no question is refused by name", "[apps][web]") {
  http_server server{options_at("127.0.0.1:0")};
  const std::pair<std::string, const char*> table[] = {
    {"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", "405"},
    {"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", "405"},
    {"GET / HTTP/1.1\r\n\r\n", "421"},
    {"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", "421"},
    {"GET / HTTP/1.1\r\nHost: localhost.evil.example:80\r\n\r\n", "421"},
    {"GET / HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", "421"},
    {"\x16\x03\x01 nonsense\r\n\r\n", "400"},
    {"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", "400"},
    {"GET / HTTP/1.1\r\nX: " + std::string(20'000, 'x') + "\r\n\r\n", "431"},
    {"GET /" + std::string(20'000, 'x') + " HTTP/1.1\r\n\r\n", "431"}};
  for (auto& [request, status] : table) {
    INFO(request.substr(0, 60));
    // What is too long is not read to its end, which may cut off the reply.
    auto reply = reply_to(server.port(), request);
    if (!reply.empty() || request.size() < 10'000)
      CHECK_THAT(reply, StartsWith(std::string{"HTTP/1.1 "} + status));
  }
  for (auto* host : {"127.0.0.1:8080", "LOCALHOST", "[::1]:1", "[::1]"})
    CHECK_THAT(get(server.port(), "/", host), StartsWith("HTTP/1.1 200"));
}

TEST_CASE("Where others can connect, a token is needed", "[apps][web]") {
  auto options = options_at("0.0.0.0:0");
  CHECK_FALSE(options.address.loopback);
  options.token = "abcdef";
  http_server server{std::move(options)};
  for (auto* target : {"/", "/?token=", "/?token=abcdeg", "/?token=abcdef1",
                       "/?xtoken=abcdef", "/events?token=abc"})
    CHECK_THAT(get(server.port(), target, "any.example"),
               StartsWith("HTTP/1.1 403"));
  for (auto* target : {"/?token=abcdef", "/?a=b&token=abcdef&c"})
    CHECK_THAT(get(server.port(), target, "any.example"),
               StartsWith("HTTP/1.1 200"));
}

TEST_CASE("An address that cannot be had is named", "[apps][web]") {
  http_server server{options_at("127.0.0.1:0")};
  auto taken = fmt::format("127.0.0.1:{}", server.port());
  CHECK_THAT(error_of([&] { http_server other{options_at(taken)}; }),
             ContainsSubstring(taken) && ContainsSubstring("in use"));
  for (auto* x : {"8080", "host.example:80", "127.0.0.1:", "127.0.0.1:x",
                  "127.0.0.1:99999", ""})
    CHECK_THAT(error_of([&] { http_address::parse(x); }),
               ContainsSubstring(x) && ContainsSubstring("127.0.0.1:8080"));
  CHECK(http_address::parse("[::1]:80").text() == "[::1]:80");
  CHECK(http_address::parse("localhost:80").text() == "127.0.0.1:80");
}

TEST_CASE("Listeners get what is new, those who were late all of it",
          "[apps][web]") {
  std::counting_semaphore<> began{0};
  auto options = options_at("127.0.0.1:0");
  options.limits.streams = 2;
  options.on_stream = [&] { began.release(); };
  http_server server{std::move(options)};
  auto first = ask(server.port(), ask_for_events);
  CHECK_THAT(read_until(first.get(), "\r\n\r\n"),
             ContainsSubstring("text/event-stream"));
  began.acquire();
  CHECK(server.streams() == 1);
  server.publish(shared("news1;"), shared("all1;"));
  CHECK(read_until(first.get(), ";") == "all1;");
  auto second = ask(server.port(), ask_for_events);
  read_until(second.get(), "\r\n\r\n");
  began.acquire();
  server.publish(shared("news2;"), shared("all2;"));
  CHECK(read_until(first.get(), ";") == "news2;");
  CHECK(read_until(second.get(), ";") == "all2;");
  CHECK_THAT(reply_to(server.port(), ask_for_events),
             StartsWith("HTTP/1.1 503"));
  // A closed page makes room.
  second = {};
  std::string reply;
  while (!reply.starts_with("HTTP/1.1 200")) {
    second = ask(server.port(), ask_for_events);
    reply = read_until(second.get(), "\r\n\r\n");
  }
  CHECK(server.streams() == 2);
}

TEST_CASE("Who sends nothing, half of it, or reads nothing is let go",
          "[apps][web]") {
  std::counting_semaphore<> began{0};
  auto options = options_at("127.0.0.1:0");
  options.limits.patience = std::chrono::milliseconds{100};
  options.on_stream = [&] { began.release(); };
  http_server server{std::move(options)};
  auto silent = connect_to(server.port());
  auto half = ask(server.port(), "GET / HTTP/1.1\r\nHost: loc");
  auto deaf = ask(server.port(), ask_for_events);
  began.acquire();
  // More than a socket holds.
  auto much = shared(std::string(32 << 20, 'x'));
  server.publish(much, much);
  CHECK(is_closed(silent.get()));
  CHECK(is_closed(half.get()));
  CHECK_THAT(get(server.port()), StartsWith("HTTP/1.1 200"));
  while (server.streams() > 0)
    CHECK_THAT(get(server.port()), StartsWith("HTTP/1.1 200"));
}

TEST_CASE("Strangers neither hold up a reader nor cost much memory",
          "[apps][web]") {
  descriptor_limit files{4096};
  http_server server{options_at("127.0.0.1:0")};
  REQUIRE_THAT(get(server.port()), StartsWith("HTTP/1.1 200"));
  const auto before = private_bytes();
  std::vector<file_descriptor> idle;
  for (int i = 0; i < 500; ++i)
    idle.push_back(connect_to(server.port()));
  CHECK_THAT(get(server.port()), StartsWith("HTTP/1.1 200"));
  // Those that were silent for longest had to go.
  CHECK(is_closed(idle.front().get()));
  std::mt19937 random{7};
  std::uniform_int_distribution<int> byte{0, 255};
  for (int i = 0; i < 300; ++i) {
    std::string noise(1 + i * 97, '\0');
    std::ranges::generate(noise,
                          [&] { return static_cast<char>(byte(random)); });
    ask(server.port(), noise);
    ask(server.port(), fmt::format("GET / HTTP/1.1\r\nHost: localhost\r\n"
                                   "Content-Length: {}\r\n\r\n",
                                   uint64_t{1} << (i % 64)));
  }
  CHECK_THAT(get(server.port()), StartsWith("HTTP/1.1 200"));
  CHECK(private_bytes() - before < 50 * mb);
}

TEST_CASE("An answer that comes after the server's end reaches nobody",
          "[apps][web]") {
  std::binary_semaphore asked{0};
  http_server::answer_to late;
  {
    auto options = options_at("127.0.0.1:0");
    options.answer = [&](const std::string&, http_server::answer_to to) {
      late = std::move(to);
      asked.release();
    };
    http_server server{std::move(options)};
    auto client = ask(server.port(),
                      "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    asked.acquire();
  }
  late({200, "text/plain", shared("too late")});
}
