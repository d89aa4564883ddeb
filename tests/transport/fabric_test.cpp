// ctest: processors=2

#include "tests/support/catch.hpp"

#include "tests/support/actors/cluster.hpp"
#include "tests/support/actors/payloads.hpp"

#include <fmt/format.h>

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

using namespace smp;
using namespace smp::test;

// What every fabric promises. Each case runs over all of them.
#define ON_EVERY_FABRIC                                                        \
  auto kind = GENERATE(as<std::string>{}, "loopback", "shm", "tcp", "spin");   \
  CAPTURE(kind)

namespace {

std::string text_of(const message& x) {
  return to_text(x.body.bytes);
}

failure gone(uint64_t rank) {
  return {error_code::rank_down, rank_id{rank}, {}, "killed by signal 9"};
}

/// Lets every two ranks hear each other: connected, they can say goodbye at
/// once, where a connection that is still being made might end before.
void introduce_all(cluster& c, uint64_t size) {
  for (uint64_t from = 0; from < size; ++from)
    for (uint64_t to = 0; to < size; ++to)
      if (from != to)
        c.at(from).send(rank_id{to}, make_message("hello"));
  for (uint64_t i = 0; i < size; ++i) {
    REQUIRE(c.heard(i).wait_messages(size - 1));
    c.heard(i).take_messages();
  }
}

/// Waits until `rank` has read what others said before: what `last` says now
/// comes after it.
void catch_up(cluster& c, uint64_t rank, uint64_t last) {
  auto count = c.heard(rank).messages().size();
  c.at(last).send(rank_id{rank}, make_message("now"));
  REQUIRE(c.heard(rank).wait_messages(count + 1));
}

} // namespace

TEST_CASE("a message arrives as it was sent", "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 2};
  tensor_ref tensor = make_tensor(24, 1);
  tensor.dtype = 6;
  tensor.shape = {2, 1, 3};
  c.at(0).send(rank_id{1},
               make_message("hello", {tensor}, message_kind::object),
               c.heard(0).on_sent());
  REQUIRE(c.heard(1).wait_messages(1));
  auto [from, x] = c.heard(1).take_messages()[0];
  CHECK(from == rank_id{0});
  CHECK(x.kind == message_kind::object);
  CHECK(text_of(x) == "hello");
  REQUIRE(x.body.tensors.size() == 1);
  CHECK(x.body.tensors[0].dtype == 6);
  CHECK(x.body.tensors[0].shape == std::vector<int64_t>{2, 1, 3});
  CHECK(same_bytes(x.body.tensors[0], pattern(24, 1)));
  REQUIRE(c.heard(0).wait_sent(1));
  CHECK(c.heard(0).send_failures().empty());
}

TEST_CASE("tensors of any size arrive whole and aligned",
          "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 2};
  std::vector<uint64_t> sizes{0,     1,      4096,    4097,     8192,    8257,
                              65536, 262144, 1 << 20, 33 << 20, 80 << 20};
  for (auto size : sizes)
    c.at(0).send(rank_id{1},
                 make_message(std::to_string(size), {make_tensor(size, size)}),
                 c.heard(0).on_sent());
  REQUIRE(c.heard(1).wait_messages(sizes.size()));
  REQUIRE(c.heard(0).wait_sent(sizes.size()));
  std::multiset<uint64_t> seen;
  for (auto& [from, x] : c.heard(1).take_messages()) {
    auto size = std::stoull(text_of(x));
    seen.insert(size);
    REQUIRE(x.body.tensors.size() == 1);
    auto& t = x.body.tensors[0];
    CHECK(same_bytes(t, pattern(size, size)));
    CHECK(reinterpret_cast<uintptr_t>(t.data) % 64 == 0);
    CHECK(t.owner != nullptr);
  }
  CHECK(seen == std::multiset<uint64_t>(sizes.begin(), sizes.end()));
}

TEST_CASE("envelopes of any size arrive, with and without tensors",
          "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 2};
  std::vector<uint64_t> sizes{0, 1, 7900, 8000, 8100, 8200, 70000, 3 << 20};
  for (auto size : sizes) {
    auto text = to_text(pattern(size, size));
    c.at(0).send(rank_id{1}, make_message(text));
    c.at(0).send(rank_id{1}, make_message(text, {make_tensor(100000, size)}));
  }
  REQUIRE(c.heard(1).wait_messages(2 * sizes.size()));
  std::map<uint64_t, int> seen;
  for (auto& [from, x] : c.heard(1).take_messages()) {
    auto size = x.body.bytes.size();
    ++seen[size];
    CHECK(x.body.bytes == pattern(size, size));
    for (auto& t : x.body.tensors)
      CHECK(same_bytes(t, pattern(100000, size)));
  }
  for (auto size : sizes)
    CHECK(seen[size] == 2);
}

TEST_CASE("many tensors of mixed sizes arrive in their positions",
          "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 2};
  auto size_of = [](uint64_t i) {
    uint64_t sizes[] = {0, 3, 5000, 64, 70000, 4096};
    return sizes[i % 6] + i;
  };
  std::vector<tensor_ref> tensors;
  for (uint64_t i = 0; i < 500; ++i)
    tensors.push_back(make_tensor(size_of(i), i));
  c.at(0).send(rank_id{1}, make_message("many", tensors));
  REQUIRE(c.heard(1).wait_messages(1));
  auto got = c.heard(1).take_messages()[0].second.body.tensors;
  REQUIRE(got.size() == tensors.size());
  for (uint64_t i = 0; i < got.size(); ++i)
    REQUIRE(same_bytes(got[i], pattern(size_of(i), i)));
}

TEST_CASE("a tensor of many dimensions keeps its shape",
          "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 2};
  auto tensor = make_tensor(1, 1);
  tensor.shape.assign(2000, 1);
  c.at(0).send(rank_id{1}, make_message("deep", {tensor}));
  REQUIRE(c.heard(1).wait_messages(1));
  CHECK(c.heard(1).take_messages()[0].second.body.tensors[0].shape
        == tensor.shape);
}

TEST_CASE("a rank can send to itself, by copy", "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 2};
  auto tensor = make_tensor(10000, 1);
  c.at(1).send(rank_id{1}, make_message("me", {tensor}), c.heard(1).on_sent());
  REQUIRE(c.heard(1).wait_messages(1));
  REQUIRE(c.heard(1).wait_sent(1));
  auto [from, x] = c.heard(1).take_messages()[0];
  CHECK(from == rank_id{1});
  CHECK(x.body.tensors[0].data != tensor.data);
  CHECK(same_bytes(x.body.tensors[0], pattern(10000, 1)));
}

TEST_CASE("a sent message no longer keeps its tensors", "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 2};
  std::atomic<long> owners = -1;
  std::weak_ptr<const void> owner;
  std::vector<tensor_ref> tensors;
  tensors.push_back(make_tensor(100000, 1));
  owner = tensors[0].owner;
  c.at(0).send(rank_id{1}, make_message("x", std::move(tensors)),
               [&, sent = c.heard(0).on_sent()](const failure& x) {
                 owners = owner.use_count();
                 sent(x);
               });
  REQUIRE(c.heard(0).wait_sent(1));
  CHECK(owners == 0);
}

TEST_CASE("four ranks talk to all at once", "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 4};
  constexpr uint64_t rounds = 50;
  std::vector<std::thread> threads;
  for (uint64_t me = 0; me < 4; ++me)
    threads.emplace_back([&c, me] {
      for (uint64_t i = 0; i < rounds; ++i)
        for (uint64_t to = 0; to < 4; ++to) {
          auto size = i % 5 == 0 ? 100000 + i : 10 * i;
          c.at(me).send(rank_id{to},
                        make_message(std::to_string(i),
                                     {make_tensor(size, 1000 * me + i)}));
        }
    });
  for (auto& t : threads)
    t.join();
  for (uint64_t me = 0; me < 4; ++me) {
    REQUIRE(c.heard(me).wait_messages(4 * rounds));
    std::set<std::pair<uint64_t, uint64_t>> seen;
    for (auto& [from, x] : c.heard(me).take_messages()) {
      auto i = std::stoull(text_of(x));
      auto size = i % 5 == 0 ? 100000 + i : 10 * i;
      REQUIRE(
        same_bytes(x.body.tensors[0], pattern(size, 1000 * from.value + i)));
      seen.emplace(from.value, i);
    }
    CHECK(seen.size() == 4 * rounds);
  }
}

TEST_CASE("a flood of small messages arrives completely",
          "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 2};
  constexpr size_t count = 5000;
  for (size_t i = 0; i < count; ++i)
    c.at(0).send(rank_id{1}, make_message(std::to_string(i)),
                 c.heard(0).on_sent());
  REQUIRE(c.heard(1).wait_messages(count));
  REQUIRE(c.heard(0).wait_sent(count));
  std::set<std::string> seen;
  for (auto& [from, x] : c.heard(1).take_messages())
    seen.insert(text_of(x));
  CHECK(seen.size() == count);
}

TEST_CASE("what was moved is counted on both sides", "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 2};
  c.at(0).send(rank_id{1}, make_message("12345", {make_tensor(1000, 1)}));
  c.at(0).send(rank_id{1}, make_message("", {make_tensor(100000, 1)}));
  REQUIRE(c.heard(1).wait_messages(2));
  auto sent = c.at(0).stats();
  CHECK(sent.messages_sent == 2);
  CHECK(sent.bytes_sent == 101005);
  CHECK(sent.messages_received == 0);
  auto received = c.at(1).stats();
  CHECK(received.messages_received == 2);
  CHECK(received.bytes_received == 101005);
  CHECK(received.messages_sent == 0);
  CHECK(received.messages_refused == 0);
}

TEST_CASE("a rank that is told to be lost is lost once and for all",
          "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 3};
  c.at(0).peer_lost(gone(1));
  c.at(0).peer_lost({error_code::rank_down, rank_id{1}, {}, "again"});
  REQUIRE(c.heard(0).wait_losses(1));
  c.at(0).send(rank_id{1}, make_message("too late"), c.heard(0).on_sent());
  REQUIRE(c.heard(0).wait_sent(1));
  CHECK(c.heard(0).send_failures() == std::vector<failure>{gone(1)});
  // The others are not touched by that.
  c.at(0).send(rank_id{2}, make_message("still here"));
  REQUIRE(c.heard(2).wait_messages(1));
  c.at(2).send(rank_id{0}, make_message("me too"));
  REQUIRE(c.heard(0).wait_messages(1));
  CHECK(c.heard(0).losses() == std::vector<failure>{gone(1)});
}

TEST_CASE("a loss fails what is in flight to that rank",
          "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 2};
  constexpr size_t count = 40;
  auto tensor = make_tensor(8 << 20, 1);
  for (size_t i = 0; i < count; ++i)
    c.at(0).send(rank_id{1}, make_message("x", {tensor}), c.heard(0).on_sent());
  c.at(0).peer_lost(gone(1));
  REQUIRE(c.heard(0).wait_sent(count));
  REQUIRE(c.heard(0).wait_losses(1));
  for (auto& x : c.heard(0).send_failures())
    CHECK(x == gone(1));
  CHECK(c.heard(0).losses() == std::vector<failure>{gone(1)});
}

TEST_CASE("a stop sends what is queued", "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 2};
  for (int i = 0; i < 20; ++i)
    c.at(0).send(rank_id{1}, make_message("x", {make_tensor(1 << 20, 1)}),
                 c.heard(0).on_sent());
  c.at(0).stop(std::chrono::seconds{30});
  CHECK(c.heard(0).sent() == 20);
  CHECK(c.heard(0).send_failures().empty());
  CHECK(c.heard(1).wait_messages(20));
}

TEST_CASE("after a stop nothing is sent, and the others hear of no loss",
          "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 3};
  introduce_all(c, 3);
  c.at(0).send(rank_id{1}, make_message("a"));
  REQUIRE(c.heard(1).wait_messages(1));
  c.at(0).stop(std::chrono::seconds{5});
  c.at(0).stop(std::chrono::seconds{5});
  c.at(0).send(rank_id{1}, make_message("b"), c.heard(0).on_sent());
  REQUIRE(c.heard(0).wait_sent(1));
  CHECK(c.heard(0).send_failures()[0].code == error_code::cancelled);
  // The living ones go on, and time for a false alarm passes.
  for (int i = 0; i < 100; ++i) {
    c.at(1).send(rank_id{2}, make_message("ping"));
    REQUIRE(c.heard(2).wait_messages(static_cast<size_t>(i) + 1));
  }
  CHECK(c.heard(1).losses().empty());
  CHECK(c.heard(2).losses().empty());
  CHECK(c.heard(1).messages().size() == 1);
}

TEST_CASE("a send to a rank that left fails and does not hang",
          "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 2};
  c.at(0).send(rank_id{1}, make_message("a"));
  REQUIRE(c.heard(1).wait_messages(1));
  c.at(1).stop(std::chrono::seconds{5});
  c.at(0).send(rank_id{1}, make_message("b", {make_tensor(1 << 20, 1)}),
               c.heard(0).on_sent());
  REQUIRE(c.heard(0).wait_sent(1));
  REQUIRE(c.heard(0).send_failures().size() == 1);
  CHECK(c.heard(0).send_failures()[0].code == error_code::rank_down);
  CHECK(c.heard(0).send_failures()[0].rank == rank_id{1});
}

TEST_CASE(
  "a rank that leaves because it lost another says which, also from hearsay",
  "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 4};
  c.at(1).peer_lost(gone(3));
  REQUIRE(c.heard(1).wait_losses(1));
  auto send_to_one_that_left = [&](uint64_t from, uint64_t to) {
    c.at(to).stop(std::chrono::seconds{5});
    auto& heard = c.heard(from);
    // A smaller one may be gone before anybody looks whether the rank is there.
    c.at(from).send(rank_id{to}, make_message("b", {make_tensor(1 << 20, 1)}),
                    heard.on_sent());
    REQUIRE(heard.wait_sent(1));
    REQUIRE(heard.send_failures().size() == 1);
    auto why = heard.send_failures()[0];
    CHECK(why.code == error_code::rank_down);
    // UCX may see that the connection is gone before it reads the goodbye.
    if (why.rank == rank_id{3} || kind == "loopback")
      CHECK(why
            == failure{error_code::rank_down,
                       rank_id{3},
                       {},
                       fmt::format("lost, says rank {}, which left the run for "
                                   "this",
                                   to)});
  };
  send_to_one_that_left(2, 1);
  send_to_one_that_left(0, 2);
}

TEST_CASE(
  "a rank that takes all others for lost says why, and is not lost itself",
  "[transport][fabric]") {
  // As a rank that lost the SUPERVISOR does.
  ON_EVERY_FABRIC;
  cluster c{kind, 3};
  introduce_all(c, 3);
  c.at(1).peer_lost(gone(2));
  c.at(1).peer_lost(gone(0));
  REQUIRE(c.heard(1).wait_losses(2));
  c.at(1).stop(std::chrono::seconds{5});
  // Who sends before it reads the goodbye finds a broken connection.
  catch_up(c, 0, 2);
  c.at(0).send(rank_id{1}, make_message("b", {make_tensor(1 << 20, 1)}),
               c.heard(0).on_sent());
  REQUIRE(c.heard(0).wait_sent(1));
  REQUIRE(c.heard(0).send_failures().size() == 1);
  CHECK(c.heard(0).send_failures()[0]
        == failure{error_code::rank_down,
                   rank_id{2},
                   {},
                   "lost, says rank 1, which left the run for this"});
  CHECK(c.heard(0).losses().empty());
}

TEST_CASE("a rank that left in order may still be declared lost",
          "[transport][fabric]") {
  // A session that ends by an exception stops its fabric as any other; only
  // the control plane knows that this was no goodbye.
  ON_EVERY_FABRIC;
  cluster c{kind, 3};
  introduce_all(c, 3);
  c.at(1).stop(std::chrono::seconds{5});
  catch_up(c, 0, 2);
  c.at(0).send(rank_id{1}, make_message("b"), c.heard(0).on_sent());
  REQUIRE(c.heard(0).wait_sent(1));
  CHECK(c.heard(0).losses().empty());
  c.at(0).peer_lost(gone(1));
  REQUIRE(c.heard(0).wait_losses(1));
  CHECK(c.heard(0).losses() == std::vector<failure>{gone(1)});
}

TEST_CASE("what no fabric can send is reported and not sent",
          "[transport][fabric]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 2};
  auto on_device = make_tensor(8, 1);
  on_device.device = {1, 0};
  c.at(0).send(rank_id{1}, make_message("gpu", {on_device}),
               c.heard(0).on_sent());
  c.at(0).send(rank_id{7}, make_message("nobody"), c.heard(0).on_sent());
  REQUIRE(c.heard(0).wait_sent(2));
  REQUIRE(c.heard(0).send_failures().size() == 2);
  CHECK(c.heard(0).send_failures()[0].code == error_code::unsupported);
  CHECK(c.heard(0).send_failures()[1].code == error_code::transport);
  CHECK(c.at(0).stats().messages_sent == 0);
}
