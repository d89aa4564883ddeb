#include "tests/support/catch.hpp"

#include "actors/protocol/request_number.hpp"
#include "actors/protocol/result_name.hpp"
#include "runtime/calls/messages.hpp"
#include "runtime/calls/object_store.hpp"
#include "tests/support/error_of.hpp"
#include "transport/loopback/loopback_fabric.hpp"
#include "transport/wait.hpp"
#include "transport/wake_up.hpp"

#include <ATen/ATen.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <latch>
#include <mutex>
#include <random>
#include <thread>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

// -- ranks in one process -----------------------------------------------------

/// Wakes a test when a message was delivered.
struct bell {
  std::mutex mutex;
  std::condition_variable rang;

  void ring() {
    std::lock_guard guard{mutex};
    rang.notify_all();
  }

  /// @returns false if `ready` is not true in time
  bool wait(const std::function<bool()>& ready) {
    std::unique_lock guard{mutex};
    return rang.wait_for(guard, std::chrono::seconds{30}, ready);
  }
};

/// One rank: hands what arrives to its store.
struct node : fabric_listener {
  object_store store;
  bell& delivered;

  node(fabric& x, bell& y) : store(x), delivered(y) {
    // nop
  }

  void on_message(rank_id from, message x) override {
    store.deliver(from, std::move(x));
    delivered.ring();
  }

  void on_peer_lost(const failure& x) override {
    store.peer_lost(x);
  }
};

struct world {
  loopback_network net;
  bell delivered;
  std::vector<std::unique_ptr<node>> nodes;
  size_t names = 0;

  world(uint64_t size, loopback_options options) : net(size, options) {
    std::vector<std::string> addresses;
    for (uint64_t i = 0; i < size; ++i) {
      addresses.push_back(net.at(rank_id{i}).address());
      nodes.push_back(std::make_unique<node>(net.at(rank_id{i}), delivered));
    }
    for (uint64_t i = 0; i < size; ++i)
      net.at(rank_id{i}).start(addresses, *nodes[i]);
  }

  ~world() {
    for (uint64_t i = 0; i < nodes.size(); ++i)
      net.at(rank_id{i}).stop(std::chrono::milliseconds{0});
  }

  object_store& operator[](uint64_t rank) {
    return nodes[rank]->store;
  }

  /// @returns the name under which `rank` holds `x`, another one each time
  object_id hold(uint64_t rank, at::Tensor x, uint32_t holders = 1) {
    auto id = step_result_name(rank_id{rank}, step_id{1}, microbatch_id{0},
                               names++);
    nodes[rank]->store.hold(id, std::move(x), holders);
    return id;
  }

  uint64_t messages_of(uint64_t rank) {
    return net.at(rank_id{rank}).stats().messages_sent;
  }
};

/// Instead of blocking its thread, delivers messages until what it waits for
/// is done: a whole world on one thread, in the same order every time.
class stepping_waiter : public waiter {
public:
  explicit stepping_waiter(world& x) : world_(x), scope_(*this) {
    // nop
  }

  void wait(const completion_ptr& x, const wait_reason& why) override {
    reasons.push_back(why);
    if (before_delivery)
      std::exchange(before_delivery, {})();
    while (!x->done())
      if (!world_.net.deliver_one())
        throw error{error_code::stalled, "nothing is in flight"};
    if (auto cause = x->cause())
      throw error{std::move(cause)};
  }

  std::vector<wait_reason> reasons;
  /// Called once, when the next wait begins.
  std::function<void()> before_delivery;

private:
  world& world_;
  scoped_waiter scope_;
};

constexpr loopback_options stepped{
  .seed = 1, .reorder = false, .stepped = true};

message object(const object_message& x) {
  return {message_kind::object, to_payload(x)};
}

message object(std::vector<std::byte> body,
               std::vector<tensor_ref> tensors = {}) {
  return {message_kind::object, {std::move(body), std::move(tensors)}};
}

} // namespace

// -- values -------------------------------------------------------------------

TEST_CASE("the owner of an object gets it without a copy or a message") {
  world w{2, stepped};
  auto x = at::rand({3}).requires_grad_() * 2;
  auto id = w.hold(0, x);
  CHECK(id.owner == rank_id{0});
  CHECK(w[0].held() == 1);
  CHECK(w[0].fetch(id).is_same(x));
  CHECK(w[0].find(id)->is_same(x));
  CHECK(w.messages_of(0) == 0);
  w[0].release({id});
  CHECK(w[0].held() == 0);
  CHECK_FALSE(w[0].find(id).has_value());
}

TEST_CASE("another rank fetches an object once and keeps it until released") {
  world w{2, stepped};
  stepping_waiter waiter{w};
  auto x = at::rand({4, 3}).t();
  auto id = w.hold(0, x);
  CHECK_FALSE(w[1].find(id).has_value());
  auto y = w[1].fetch(id);
  CHECK(at::equal(x, y));
  CHECK(y.const_data_ptr() != x.const_data_ptr());
  CHECK(w[1].fetch(id).is_same(y));
  CHECK(w[1].find(id)->is_same(y));
  CHECK(w.messages_of(1) == 1);
  CHECK(w.messages_of(0) == 1);
  REQUIRE(waiter.reasons.size() == 2);
  CHECK(waiter.reasons[0].what == "object 0 of step 1 of rank 0");
  CHECK(waiter.reasons[0].from == rank_id{0});
  CHECK(w[1].cached() == 1);
  w[1].release({id});
  CHECK(w[1].cached() == 0);
  w.net.run();
  CHECK(w[0].held() == 0);
  CHECK(at::equal(x, y)); // who has the tensor keeps it
}

TEST_CASE("every dtype and a tensor without elements can be fetched") {
  world w{2, stepped};
  stepping_waiter waiter{w};
  for (auto dtype : {c10::kBool, c10::kBFloat16, c10::kHalf, c10::kLong,
                     c10::kComplexDouble}) {
    auto x = at::ones({2, 2}, dtype);
    auto y = w[1].fetch(w.hold(0, x));
    CHECK(y.scalar_type() == dtype);
    CHECK(at::equal(x, y));
  }
  auto empty = w[1].fetch(w.hold(0, at::empty({2, 0})));
  CHECK(empty.sizes() == at::IntArrayRef{2, 0});
}

TEST_CASE("a tensor that cannot cross ranks is not taken") {
  world w{1, stepped};
  CHECK(failure_of([&] { w.hold(0, at::eye(2).to_sparse()); }).code
        == error_code::unsupported);
  CHECK(w[0].held() == 0);
}

// -- letting go ---------------------------------------------------------------

TEST_CASE("an object goes when as many ranks as hold it released it") {
  world w{3, stepped};
  auto id = w.hold(0, at::rand({2}), 2);
  w[1].release({id});
  w[1].release({id, id}); // the same rank counts once
  w.net.run();
  CHECK(w[0].held() == 1);
  w[2].release({id});
  w.net.run();
  CHECK(w[0].held() == 0);
  w[2].release({id});
  w.net.run();
  CHECK(w[0].held() == 0);
  CHECK(w[0].malformed() == 0);
}

TEST_CASE("one release of many objects is one message per owner") {
  world w{3, stepped};
  std::vector<object_id> ids;
  for (uint64_t i = 0; i < 100; ++i)
    ids.push_back(w.hold(i % 2, at::rand({1})));
  w[2].release(ids);
  CHECK(w.messages_of(2) == 2);
  w.net.run();
  CHECK(w[0].held() == 0);
  CHECK(w[1].held() == 0);
  w[2].release({});
  CHECK(w.messages_of(2) == 2);
}

TEST_CASE("what was released is known to nobody") {
  world w{2, stepped};
  stepping_waiter waiter{w};
  auto old_id = w.hold(0, at::zeros({1}));
  w[0].release({old_id});
  auto new_id = w.hold(0, at::ones({1}));
  auto why = failure_of([&] { w[1].fetch(old_id); });
  CHECK(why.code == error_code::protocol);
  CHECK(why.rank == rank_id{0});
  CHECK(why.text
        == "object 0 of step 1 of rank 0 is not held there: never was, "
           "or released");
  CHECK(failure_of([&] { w[0].fetch(old_id); }) == why);
  CHECK(w[1].cached() == 0);
  w[1].release({old_id});
  w.net.run();
  CHECK(w[0].held() == 1);
  CHECK(w[1].fetch(new_id).item<float>() == 1);
}

TEST_CASE("an object id that was never given is unknown") {
  world w{2, stepped};
  stepping_waiter waiter{w};
  w.hold(0, at::rand({1}));
  for (auto id : {object_id{rank_id{0}, 0, 0}, object_id{rank_id{0}, 0, 2},
                  object_id{rank_id{0}, 1, 1},
                  // With one bit more it were a name, which may be early.
                  object_id{rank_id{0}, UINT64_MAX >> 1, UINT32_MAX}}) {
    CHECK_FALSE(is_result_name(id));
    CHECK(failure_of([&] { w[1].fetch(id); }).code == error_code::protocol);
    CHECK_FALSE(w[0].find(id).has_value());
  }
}

TEST_CASE("a wait gets an object although its rank releases it meanwhile") {
  world w{2, stepped};
  stepping_waiter waiter{w};
  auto id = w.hold(0, at::ones({2}), 2);
  waiter.before_delivery = [&] { w[1].release({id}); };
  CHECK(w[1].fetch(id).sum().item<float>() == 2);
  CHECK(w[1].cached() == 0);
}

TEST_CASE("memory that releases objects when it goes does not deadlock") {
  world w{2, stepped};
  stepping_waiter waiter{w};
  auto inner = w.hold(0, at::rand({1}));
  float memory[2] = {1, 2};
  auto outer = w.hold(
    0, at::from_blob(memory, {2}, [&](void*) { w[0].release({inner}); }));
  SECTION("released by its owner") {
    w[0].release({outer});
  }
  SECTION("released by another rank") {
    w[1].release({outer});
    w.net.run();
  }
  SECTION("cleared") {
    w[0].clear();
  }
  CHECK(w[0].held() == 0);
}

// -- losses and endings -------------------------------------------------------

TEST_CASE("what a request still needs is known, in order") {
  world w{3, stepped};
  constexpr step_id step{1};
  request_id asked{rank_id{0}, promise_number(step, 1)};
  std::vector<object_id> ids{result_name(rank_id{1}, asked, step, 0),
                             result_name(rank_id{2}, asked, step, 0),
                             result_name(rank_id{0}, asked, step, 0)};
  auto come = [&](uint64_t i) {
    auto id = ids[i];
    w[id.owner.value].put(id, microbatch_id{0}, at::ones({1}));
    w.net.run();
  };
  auto all = w[0].gather(ids, step, microbatch_id{0});
  w.net.run();
  CHECK(w[0].first_missing(ids) == ids[0]);
  come(0);
  CHECK(w[0].first_missing(ids) == ids[1]);
  come(1);
  CHECK(w[0].first_missing(ids) == ids[2]);
  CHECK_FALSE(all->done());
  come(2);
  CHECK_FALSE(w[0].first_missing(ids));
  CHECK(all->done());
}

TEST_CASE("the loss of an owner fails who waits and who comes later") {
  world w{3, stepped};
  stepping_waiter waiter{w};
  auto id = w.hold(0, at::rand({1}));
  auto cached = w.hold(0, at::rand({1}));
  auto other = w.hold(2, at::rand({1}));
  w[1].fetch(cached);
  failure loss{error_code::rank_down, rank_id{0}, {}, "killed by a test"};
  waiter.before_delivery = [&] { w.net.kill(loss); };
  CHECK(failure_of([&] { w[1].fetch(id); }) == loss);
  w.net.run();
  CHECK(failure_of([&] { w[1].fetch(id); }) == loss);
  CHECK(failure_of([&] { w[1].fetch(cached); }) == loss);
  CHECK(w[1].cached() == 0);
  CHECK_NOTHROW(w[1].release({id, cached}));
  CHECK_NOTHROW(w[1].fetch(other));
}

TEST_CASE("a fetch that could not be sent fails with the fabric's reason") {
  // A fabric that knows of the loss before anybody told the store.
  struct broken_fabric : fabric {
    rank_id self() const override {
      return rank_id{1};
    }
    std::string address() const override {
      return {};
    }
    void start(const std::vector<std::string>&, fabric_listener&) override {
      // nop
    }
    void send(rank_id to, message, sent_callback done) override {
      if (done)
        done({error_code::rank_down, to, {}, "gone"});
    }
    void park(pollable_wake_up& x) override {
      x.wait();
    }
    void peer_lost(const failure&) override {
      // nop
    }
    void stop(std::chrono::milliseconds) override {
      // nop
    }
    fabric_stats stats() const override {
      return {};
    }
  };
  broken_fabric f;
  object_store store{f};
  for (int i = 0; i < 2; ++i) {
    auto why = failure_of([&] { store.fetch({rank_id{0}, 3, 1}); });
    CHECK(why.code == error_code::rank_down);
    CHECK(why.text == "gone");
    CHECK(store.cached() == 0);
  }
}

TEST_CASE("clear lets go of everything and cancels who waits") {
  world w{2, stepped};
  stepping_waiter waiter{w};
  auto id = w.hold(0, at::rand({1}));
  auto kept = w.hold(0, at::rand({1}));
  w[1].fetch(kept);
  waiter.before_delivery = [&] { w[1].clear(); };
  CHECK(failure_of([&] { w[1].fetch(id); }).code == error_code::cancelled);
  CHECK(w[1].cached() == 0);
  w.net.run(); // the answer that nobody wants any more
  CHECK(w[1].malformed() == 0);
  w[0].clear();
  CHECK(w[0].held() == 0);
  CHECK_FALSE(w[0].find(id).has_value());
  auto fresh = w.hold(0, at::rand({1}));
  CHECK_FALSE(fresh == id);
  CHECK_FALSE(fresh == kept);
}

// -- hostile messages ---------------------------------------------------------

TEST_CASE("a damaged answer fails the fetch that it names") {
  world w{2, stepped};
  stepping_waiter waiter{w};
  auto id = w.hold(0, at::rand({2}));
  auto good = at::rand({2});
  tensor_ref bad{{6, {}, {3}, {}}, good.data_ptr(), 8, nullptr};
  auto named = without_owner(id);
  auto give = [&](message x) {
    waiter.before_delivery = [&w, x] { w[1].deliver(rank_id{0}, x); };
    auto why = failure_of([&] { w[1].fetch(id); });
    w.net.run();
    CHECK(why.code == error_code::protocol);
    CHECK(why.rank == rank_id{0});
    return why.text;
  };
  CHECK_THAT(give(object(object_content{named, bad})),
             ContainsSubstring("object 0 of step 1 of rank 0 came damaged: "
                               "received tensor: 8 bytes, but its shape needs "
                               "12"));
  auto answer = to_payload(object_message{object_content{named, bad}}).bytes;
  CHECK_THAT(give(object(answer)), ContainsSubstring("has no more tensors"));
  answer.push_back({});
  CHECK_THAT(give(object(answer, {bad})),
             ContainsSubstring("1 bytes too many"));
  CHECK_THAT(give(object(object_refusal{named, {}})),
             ContainsSubstring("why at byte 13: no such value"));
  CHECK(w[1].malformed() == 4);
  CHECK(w[1].cached() == 0);
  CHECK_NOTHROW(w[1].fetch(id)); // a damaged answer is not kept
}

TEST_CASE("messages that cannot be read are counted and do no harm") {
  world w{2, stepped};
  stepping_waiter waiter{w};
  auto x = at::rand({2});
  auto id = w.hold(0, x, 1);
  held_object wrong{id.number, 99};
  std::vector<object_message> messages{
    object_fetch{wrong}, object_content{wrong, {}},
    object_refusal{wrong, {error_code::rank_down, rank_id{1}, "", "x"}},
    object_release{{wrong}}, object_release{{{UINT64_MAX, 99}}}};
  std::vector<std::vector<std::byte>> originals;
  for (auto& m : messages)
    originals.push_back(to_payload(m).bytes);
  for (auto& body : originals) {
    for (size_t n = 0; n < body.size(); ++n) {
      auto before = w[0].malformed();
      w[0].deliver(
        rank_id{1},
        object({body.begin(), body.begin() + static_cast<ptrdiff_t>(n)}));
      CHECK(w[0].malformed() == before + 1);
    }
  }
  std::mt19937_64 engine{1};
  for (int round = 0; round < 20'000; ++round) {
    auto body = originals[engine() % originals.size()];
    for (auto n = engine() % 4; n > 0; --n) {
      // Not byte 9: the generation, which keeps the messages from being right.
      auto pos = engine() % body.size();
      if (pos < 9)
        body[pos] = static_cast<std::byte>(engine());
      else if (engine() % 2 == 0)
        body.push_back(static_cast<std::byte>(engine()));
      else
        body.pop_back();
    }
    w[engine() % 2].deliver(rank_id{engine() % 2}, object(std::move(body)));
  }
  w.net.run();
  CHECK(w[0].held() == 1);
  CHECK(w[1].cached() == 0);
  CHECK(at::equal(w[1].fetch(id), x));
}

// -- threads ------------------------------------------------------------------

TEST_CASE("many threads that ask for one object cause one transfer") {
  world w{2, {}};
  auto x = at::rand({1000});
  auto id = w.hold(0, x);
  constexpr size_t n = 8;
  std::latch start{n};
  std::vector<at::Tensor> results(n);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < n; ++i)
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      results[i] = w[1].fetch(id);
    });
  for (auto& t : threads)
    t.join();
  for (auto& y : results)
    CHECK(y.is_same(results[0]));
  CHECK(at::equal(results[0], x));
  CHECK(w.messages_of(1) == 1);
}

TEST_CASE("ranks that hold, fetch and release at once lose and keep nothing") {
  constexpr uint64_t ranks = 3;
  constexpr uint64_t rounds = 200;
  world w{ranks, {.seed = 7, .reorder = true}};
  // Each rank holds an object per round for both others.
  std::vector<std::vector<object_id>> ids(ranks);
  for (uint64_t r = 0; r < ranks; ++r)
    for (uint64_t i = 0; i < rounds; ++i)
      ids[r].push_back(w.hold(
        r, at::full({5}, static_cast<double>(r * rounds + i)), ranks - 1));
  std::atomic<uint64_t> wrong = 0;
  std::vector<std::thread> threads;
  for (uint64_t r = 0; r < ranks; ++r)
    for (uint64_t other = 0; other < ranks; ++other) {
      if (other == r)
        continue;
      threads.emplace_back([&, r, other] {
        for (uint64_t i = 0; i < rounds; ++i) {
          auto x = w[r].fetch(ids[other][i]);
          if (x[4].item<float>() != static_cast<float>(other * rounds + i))
            ++wrong;
          if (i % 10 == 9) {
            auto last = ids[other].begin() + static_cast<ptrdiff_t>(i) + 1;
            w[r].release({last - 10, last});
          }
        }
      });
    }
  for (auto& t : threads)
    t.join();
  CHECK(wrong == 0);
  for (uint64_t r = 0; r < ranks; ++r)
    CHECK(w[r].cached() == 0);
  CHECK(w.delivered.wait(
    [&] { return w[0].held() + w[1].held() + w[2].held() == 0; }));
}
