// ctest: processors=2

#include "tests/support/catch.hpp"

#include "tests/support/actors/cluster.hpp"
#include "tests/support/actors/payloads.hpp"
#include "transport/ucx/wire.hpp"
#include "transport/ucx/worker.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

using namespace smp;
using namespace smp::test;
using namespace smp::ucx;

namespace {

constexpr run_token token = {std::byte{1}, std::byte{2}, std::byte{3}};

ucx_options with_token() {
  auto result = cluster::options_for("tcp");
  result.token = token;
  return result;
}

/// Speaks UCX to a fabric of rank 0 as rank 1 of 3 would, or would not.
class stranger {
public:
  stranger() : worker_{with_token()}, rank_{rank_id{0}, 3, with_token()} {
    auto other = worker_.address();
    rank_.start({"", other, other}, heard_);
    auto address = rank_.address();
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                        | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    check(ucp_ep_create(worker_.get(), &params, &endpoint_), "endpoint");
  }

  ~stranger() {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    finish(ucp_ep_close_nbx(endpoint_, &param));
    rank_.stop(std::chrono::seconds{0});
  }

  void send(const std::vector<std::byte>& header,
            const std::vector<std::byte>& data = {}) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_EAGER;
    finish(ucp_am_send_nbx(endpoint_, 0, header.data(), header.size(),
                           data.data(), data.size(), &param));
  }

  /// Drives UCX until `done` or the deadline.
  bool progress_until(const std::function<bool()>& done) {
    auto deadline = std::chrono::steady_clock::now() + patience;
    while (!done()) {
      if (std::chrono::steady_clock::now() > deadline)
        return false;
      ucp_worker_progress(worker_.get());
    }
    return true;
  }

  ucx_fabric& rank() {
    return rank_;
  }

  inbox& heard() {
    return heard_;
  }

private:
  void finish(ucs_status_ptr_t request) {
    if (!UCS_PTR_IS_PTR(request))
      return;
    progress_until(
      [&] { return ucp_request_check_status(request) != UCS_INPROGRESS; });
    ucp_request_free(request);
  }

  worker worker_;
  inbox heard_;
  ucx_fabric rank_;
  ucp_ep_h endpoint_ = nullptr;
};

unit_header header_of(unit_kind kind) {
  unit_header result;
  result.kind = kind;
  result.from = 1;
  return result;
}

std::vector<std::byte> bytes_of(const unit_header& x,
                                const std::vector<std::byte>& more = {},
                                const run_token& of = token) {
  std::vector<std::byte> result(header_size);
  write_header(result, x, of);
  result.insert(result.end(), more.begin(), more.end());
  return result;
}

std::vector<std::byte> described(std::vector<tensor_ref> tensors) {
  return write_description(make_message("x", std::move(tensors)), 0);
}

unit_header chunk_of(uint32_t tensor, uint64_t offset, uint64_t size) {
  auto result = header_of(unit_kind::chunk);
  result.data = data_kind::bytes;
  result.tensor = tensor;
  result.offset = offset;
  result.tensor_size = size;
  return result;
}

/// The first bytes of one tensor each of several messages.
void send_parts(stranger& to, uint64_t messages, uint64_t size) {
  auto header = chunk_of(0, 0, size);
  for (; header.number < messages; ++header.number)
    to.send(bytes_of(header), std::vector<std::byte>(100));
}

void check_cut_off(stranger& by, const std::string& reason) {
  auto& heard = by.heard();
  REQUIRE(by.progress_until([&] { return !heard.losses().empty(); }));
  auto why = heard.losses()[0];
  CHECK(why.code == error_code::protocol);
  CHECK(why.rank == rank_id{1});
  CHECK_THAT(why.text, Catch::Matchers::ContainsSubstring(reason));
  CHECK(heard.messages().empty());
}

} // namespace

TEST_CASE("what no rank of the run sends is dropped and counted",
          "[transport][ucx]") {
  stranger s;
  auto unknown = header_of(unit_kind::description);
  unknown.from = 3;
  auto oneself = header_of(unit_kind::description);
  oneself.from = 0;
  s.send(to_bytes("GET / HTTP/1.1"));
  s.send(bytes_of(unknown));
  s.send(bytes_of(oneself));
  CHECK(
    s.progress_until([&] { return s.rank().stats().messages_refused == 3; }));
  // A correct one still arrives.
  s.send(bytes_of(header_of(unit_kind::description), described({})));
  CHECK(s.progress_until([&] { return s.heard().messages().size() == 1; }));
  CHECK(s.heard().losses().empty());
}

TEST_CASE("what does not carry the token of the run is dropped and counted",
          "[transport][ucx]") {
  stranger s;
  auto other = run_secret::make().token("ucx");
  // Each of these would end the connection, or the run.
  s.send(bytes_of(header_of(unit_kind::goodbye), {}, other));
  s.send(
    bytes_of(header_of(unit_kind::description), to_bytes("rubbish"), other));
  s.send(bytes_of(chunk_of(0, 10, 5), {}, run_token{}), to_bytes("beyond"));
  s.send(bytes_of(header_of(unit_kind::description), described({}), other));
  CHECK(
    s.progress_until([&] { return s.rank().stats().messages_refused == 4; }));
  s.send(bytes_of(header_of(unit_kind::description), described({})));
  CHECK(s.progress_until([&] { return s.heard().messages().size() == 1; }));
  CHECK(s.heard().losses().empty());
}

TEST_CASE("a rank that breaks the protocol is cut off with the reason",
          "[transport][ucx]") {
  stranger s;
  std::string expected;
  auto data = std::vector<std::byte>(100);
  auto large = make_tensor(10000, 1);
  SECTION("a description that cannot be read") {
    s.send(bytes_of(header_of(unit_kind::description), to_bytes("rubbish")));
    expected = "sent a malformed message: kind";
  }
  SECTION("a long description that cannot be read") {
    auto header = header_of(unit_kind::long_description);
    header.data = data_kind::bytes;
    s.send(bytes_of(header), to_bytes("rubbish"));
    expected = "sent a malformed message: kind";
  }
  SECTION("a part beyond its tensor") {
    s.send(bytes_of(chunk_of(0, 9950, 10000)), data);
    expected = "beyond its tensor";
  }
  SECTION("a part whose end overflows") {
    s.send(bytes_of(chunk_of(0, ~uint64_t{0}, 10000)), data);
    expected = "beyond its tensor";
  }
  SECTION("a tensor of an absurd size") {
    s.send(bytes_of(chunk_of(0, 0, ~uint64_t{0})), data);
    expected = "beyond its tensor";
  }
  SECTION("parts that differ about the size") {
    s.send(bytes_of(chunk_of(0, 0, 10000)), data);
    s.send(bytes_of(chunk_of(0, 100, 20000)), data);
    expected = "differ about the size";
  }
  SECTION("more bytes than the tensor has") {
    data.resize(3000);
    s.send(bytes_of(chunk_of(0, 0, 5000)), data);
    s.send(bytes_of(chunk_of(0, 0, 5000)), data);
    expected = "twice";
  }
  SECTION("a part of a tensor that needs none") {
    s.send(bytes_of(chunk_of(0, 0, 4096)), data);
    expected = "belongs into its description";
  }
  SECTION("one message described twice") {
    s.send(bytes_of(header_of(unit_kind::description), described({large})));
    s.send(bytes_of(header_of(unit_kind::description), described({large})));
    expected = "twice";
  }
  SECTION("parts of another tensor than described") {
    s.send(bytes_of(header_of(unit_kind::description), described({large})));
    data.resize(5000);
    s.send(bytes_of(chunk_of(1, 0, 5000)), data);
    expected = "do not fit";
  }
  check_cut_off(s, expected);
}

TEST_CASE("what comes for a message that was refused is written nowhere else",
          "[transport][ucx]") {
  stranger s;
  auto first = header_of(unit_kind::description);
  first.number = 1;
  s.send(bytes_of(first, described({})));
  REQUIRE(s.progress_until([&] { return s.heard().messages().size() == 1; }));
  // Held up until all is there, the fabric reads it before it cuts off.
  std::promise<void> held_up;
  std::promise<void> all_sent;
  s.rank().send(rank_id{0}, make_message("x"), [&](const failure&) {
    held_up.set_value();
    all_sent.get_future().wait();
  });
  held_up.get_future().wait();
  auto large = make_tensor(10000, 1);
  s.send(
    bytes_of(header_of(unit_kind::description), described({large, large})));
  s.send(bytes_of(chunk_of(0, 0, 10000)), std::vector<std::byte>(10000));
  s.send(bytes_of(chunk_of(1, 0, 5000)), std::vector<std::byte>(5000));
  s.send(bytes_of(chunk_of(0, 5000, 10000)), std::vector<std::byte>(5000));
  all_sent.set_value();
  REQUIRE(s.progress_until([&] { return !s.heard().losses().empty(); }));
  CHECK_THAT(s.heard().losses()[0].text,
             Catch::Matchers::ContainsSubstring("do not fit"));
}

TEST_CASE("a rank that announces too much at once is cut off with the reason",
          "[transport][ucx]") {
  stranger s;
  std::string expected;
  SECTION("parts of too many messages") {
    send_parts(s, 1025, 5000);
    expected = "sent parts of more than 1024 messages and completed none";
  }
  SECTION("descriptions of too many messages") {
    auto header = header_of(unit_kind::description);
    for (; header.number < 1025; ++header.number)
      s.send(bytes_of(header, described({make_tensor(10000, 1)})));
    expected = "sent parts of more than 1024 messages and completed none";
  }
  SECTION("messages that are too large together") {
    send_parts(s, 7, uint64_t{100} << 20);
    expected = "bytes in several messages at once";
  }
  check_cut_off(s, expected);
}

TEST_CASE("messages that a rank has under way are counted down again",
          "[transport][ucx]") {
  stranger s;
  auto bytes = pattern(5000, 1);
  auto part = chunk_of(0, 0, bytes.size());
  auto what = header_of(unit_kind::description);
  SECTION("one message after the other") {
    for (; part.number < 1100; ++part.number) {
      what.number = part.number;
      s.send(bytes_of(part), bytes);
      s.send(bytes_of(what, described({make_tensor(bytes)})));
    }
  }
  SECTION("one alone may be large, beside small ones") {
    send_parts(s, 1, uint64_t{1} << 30);
    for (part.number = 1; part.number < 1101; ++part.number) {
      what.number = part.number;
      s.send(bytes_of(part), bytes);
      s.send(bytes_of(what, described({make_tensor(bytes)})));
    }
  }
  REQUIRE(
    s.progress_until([&] { return s.heard().messages().size() == 1100; }));
  CHECK(s.heard().losses().empty());
}

TEST_CASE("bytes that a rank has under way are counted down again",
          "[transport][ucx]") {
  stranger s;
  auto bytes = pattern(1 << 20, 1);
  auto part = chunk_of(0, 0, bytes.size());
  auto what = header_of(unit_kind::description);
  // One alone may be so large.
  send_parts(s, 1, uint64_t{1} << 30);
  for (part.number = 1; part.number < 600; ++part.number) {
    what.number = part.number;
    s.send(bytes_of(part), bytes);
    s.send(bytes_of(what, described({make_tensor(bytes)})));
    REQUIRE(s.progress_until([&] { return !s.heard().messages().empty(); }));
    s.heard().take_messages();
  }
  CHECK(s.heard().losses().empty());
}

TEST_CASE("the parts of a message may come before its description",
          "[transport][ucx]") {
  stranger s;
  auto bytes = pattern(10000, 1);
  auto part = [&](size_t from, size_t size) {
    auto first = bytes.begin() + static_cast<ptrdiff_t>(from);
    return std::vector<std::byte>(first, first + static_cast<ptrdiff_t>(size));
  };
  s.send(bytes_of(chunk_of(0, 6000, 10000)), part(6000, 4000));
  s.send(bytes_of(header_of(unit_kind::description),
                  described({make_tensor(bytes)})));
  s.send(bytes_of(chunk_of(0, 0, 10000)), part(0, 6000));
  REQUIRE(s.progress_until([&] { return s.heard().messages().size() == 1; }));
  CHECK(same_bytes(s.heard().messages()[0].second.body.tensors[0], bytes));
}

TEST_CASE(
  "tcp listens on the loopback interface only, whatever the user's "
  "environment says",
  "[transport][ucx]") {
  auto options = cluster::options_for("tcp");
  SECTION("the user says") {
    ::setenv("UCX_NET_DEVICES", "all", 1);
  }
  SECTION("he trusts, as long as the run names no other one") {
    options.trusted_network = true;
  }
  ucx_fabric rank{rank_id{0}, 2, options};
  ::unsetenv("UCX_NET_DEVICES");
  size_t listening = 0;
  for (auto& entry : std::filesystem::directory_iterator{"/proc/self/fd"}) {
    auto fd = std::stoi(entry.path().filename());
    int accepts = 0;
    socklen_t size = sizeof accepts;
    sockaddr_storage address{};
    socklen_t address_size = sizeof address;
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size) != 0
        || accepts == 0
        || ::getsockname(fd, reinterpret_cast<sockaddr*>(&address),
                         &address_size)
             != 0
        || address.ss_family != AF_INET)
      continue;
    ++listening;
    auto ip = ntohl(reinterpret_cast<sockaddr_in&>(address).sin_addr.s_addr);
    CHECK(ip >> 24 == 127);
  }
  CHECK(listening > 0);
}

TEST_CASE("transports that do not exist are an error that names them",
          "[transport][ucx]") {
  ucx_options options;
  options.transports = "carrier_pigeon";
  CHECK_THROWS_WITH((ucx_fabric{rank_id{0}, 2, options}),
                    Catch::Matchers::ContainsSubstring("carrier_pigeon"));
}

TEST_CASE("a fabric that was never started refuses to send and stops",
          "[transport][ucx]") {
  inbox heard;
  ucx_fabric rank{rank_id{0}, 2, cluster::options_for("shm")};
  rank.send(rank_id{1}, make_message("x"), heard.on_sent());
  CHECK(heard.send_failures().size() == 1);
  CHECK_THROWS_AS(rank.start({"only one"}, heard), error);
  rank.stop(std::chrono::seconds{1});
}

TEST_CASE("received blocks are used again", "[transport][ucx]") {
  cluster c{"shm", 2};
  std::vector<const void*> places;
  for (size_t i = 0; i < 3; ++i) {
    c.at(0).send(rank_id{1}, make_message("x", {make_tensor(1 << 20, i)}));
    REQUIRE(c.heard(1).wait_messages(1));
    places.push_back(c.heard(1).take_messages()[0].second.body.tensors[0].data);
  }
  CHECK(places[0] == places[1]);
  CHECK(places[0] == places[2]);
}

namespace {

/// Takes its first message and then no other until it is told to go on.
class slow_listener : public fabric_listener {
public:
  void on_message(rank_id, message x) override {
    std::unique_lock guard{mutex_};
    texts_.push_back(to_text(x.body.bytes));
    changed_.notify_all();
    changed_.wait(guard, [this] { return goes_on_; });
  }

  void on_peer_lost(const failure&) override {
    // nop
  }

  void go_on() {
    std::lock_guard guard{mutex_};
    goes_on_ = true;
    changed_.notify_all();
  }

  std::vector<std::string> wait_for(size_t count) {
    std::unique_lock guard{mutex_};
    changed_.wait_for(guard, patience, [&] { return texts_.size() >= count; });
    return texts_;
  }

private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool goes_on_ = false;
  std::vector<std::string> texts_;
};

} // namespace

TEST_CASE("the most urgent of the small messages that wait to leave goes first",
          "[transport][ucx]") {
  inbox ignored;
  slow_listener slow;
  auto options = cluster::options_for("shm");
  options.priority = [](const message& x) -> uint8_t {
    return to_text(x.body.bytes) == "urgent" ? 0 : 2;
  };
  ucx_fabric from{rank_id{0}, 2, options};
  ucx_fabric to{rank_id{1}, 2, options};
  const std::vector<std::string> addresses{from.address(), to.address()};
  from.start(addresses, ignored);
  to.start(addresses, slow);
  size_t sent = 0;
  auto send = [&](const std::string& x) {
    from.send(rank_id{1}, make_message(x));
    ++sent;
  };
  send("first");
  REQUIRE(slow.wait_for(1).size() == 1);
  while (from.queued_to(rank_id{1}) < 10 && sent < 10000)
    send(std::to_string(sent));
  send("urgent");
  // The thread may have had the worker: then the message waits to be taken.
  auto deadline = std::chrono::steady_clock::now() + patience;
  while (from.stats().messages_sent < sent
         && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  REQUIRE(from.stats().messages_sent == sent);
  slow.go_on();
  auto heard = slow.wait_for(sent);
  REQUIRE(heard.size() == sent);
  auto urgent = std::find(heard.begin(), heard.end(), "urgent");
  CHECK(heard.end() - urgent > 5);
  for (auto x : {&from, &to})
    x->stop(std::chrono::seconds{5});
}

TEST_CASE("what was posted to a rank before its goodbye was read ends as well",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  inbox heard;
  slow_listener slow;
  auto options = cluster::options_for(kind);
  ucx_fabric from{rank_id{0}, 2, options};
  ucx_fabric leaves{rank_id{1}, 2, options};
  const std::vector<std::string> addresses{from.address(), leaves.address()};
  from.start(addresses, slow);
  leaves.start(addresses, heard);
  from.send(rank_id{1}, make_message("both are connected"));
  REQUIRE(heard.wait_messages(1));
  leaves.send(rank_id{0}, make_message("first"));
  REQUIRE(slow.wait_for(1).size() == 1);
  // The thread of `from` tells, and reads nothing.
  leaves.stop(std::chrono::seconds{5});
  from.send(rank_id{1}, make_message("b", {make_tensor(1 << 20, 1)}),
            heard.on_sent());
  slow.go_on();
  REQUIRE(heard.wait_sent(1));
  REQUIRE(heard.send_failures().size() == 1);
  CHECK(heard.send_failures()[0].code == error_code::rank_down);
  CHECK(heard.send_failures()[0].rank == rank_id{1});
  from.stop(std::chrono::seconds{5});
}
