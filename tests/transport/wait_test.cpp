#include "tests/support/catch.hpp"

#include "transport/refuse_waits.hpp"
#include "transport/wait.hpp"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace smp;

namespace {

failure lost(uint64_t rank) {
  return {error_code::rank_down, rank_id{rank}, {}, "gone"};
}

} // namespace

TEST_CASE("a wait for what is done returns at once", "[transport][wait]") {
  auto x = std::make_shared<completion>();
  x->set();
  waiter::current().wait(x, {"nothing", {}});
  CHECK(x->done());
}

TEST_CASE("a wait ends when another thread ends the completion",
          "[transport][wait]") {
  auto x = std::make_shared<completion>();
  std::thread other{[x] { x->set(); }};
  waiter::current().wait(x, {"the other thread", {}});
  CHECK(x->done());
  CHECK_FALSE(x->cause());
  other.join();
}

TEST_CASE("a wait throws the failure of its completion", "[transport][wait]") {
  auto x = std::make_shared<completion>();
  std::thread other{[x] { x->fail(lost(3)); }};
  try {
    waiter::current().wait(x, {"rank 3", rank_id{3}});
    FAIL("no exception");
  } catch (const error& e) {
    CHECK(e.cause() == lost(3));
  }
  other.join();
}

TEST_CASE("the first end of a completion wins", "[transport][wait]") {
  completion x;
  x.fail(lost(1));
  x.set();
  x.fail(lost(2));
  CHECK(x.cause() == lost(1));
}

TEST_CASE("a wait for several names the first one that is missing",
          "[transport][wait]") {
  std::vector<std::pair<completion_ptr, wait_reason>> all;
  for (uint64_t i = 0; i < 3; ++i)
    all.emplace_back(std::make_shared<completion>(),
                     wait_reason{"m" + std::to_string(i), rank_id{i}, {}, i});
  all[0].first->set();
  auto why = reason_of_all(all);
  CHECK(why.what == "m1");
  REQUIRE(why.now);
  all[1].first->set();
  auto now = why.now();
  CHECK(now.what == "m2");
  CHECK(now.from == rank_id{2});
  CHECK(now.asks == uint64_t{2});
  all[2].first->fail(lost(2));
  CHECK(why.now().what == "m2");
}

TEST_CASE("callbacks run once, early ones at the end and late ones at once",
          "[transport][wait]") {
  completion x;
  int early = 0;
  int late = 0;
  x.on_done([&] { ++early; });
  CHECK(early == 0);
  x.set();
  x.set();
  CHECK(early == 1);
  x.on_done([&] { ++late; });
  CHECK(late == 1);
}

TEST_CASE("a callback may register another one", "[transport][wait]") {
  auto x = std::make_shared<completion>();
  bool inner = false;
  x->on_done([&] { x->on_done([&] { inner = true; }); });
  x->set();
  CHECK(inner);
}

TEST_CASE("racing ends of a completion run its callback once",
          "[transport][wait]") {
  for (int round = 0; round < 200; ++round) {
    completion x;
    std::atomic<int> calls = 0;
    std::thread a{[&] { x.set(); }};
    std::thread b{[&] { x.fail(lost(1)); }};
    x.on_done([&] { ++calls; });
    a.join();
    b.join();
    REQUIRE(calls == 1);
  }
}

TEST_CASE("an awaited value arrives from another thread", "[transport][wait]") {
  auto x = std::make_shared<awaited<std::string>>();
  std::thread other{[x] { x->set_value("hello"); }};
  CHECK(awaited<std::string>::get(x, {"greeting", rank_id{0}}) == "hello");
  other.join();
}

TEST_CASE("a scoped waiter serves its thread only and ends with its scope",
          "[transport][wait]") {
  struct counting : waiter {
    int calls = 0;
    void wait(const completion_ptr& x, const wait_reason&) override {
      ++calls;
      x->set();
    }
  };
  counting outer;
  counting inner;
  auto wait = [] {
    waiter::current().wait(std::make_shared<completion>(), {"x", {}});
  };
  {
    scoped_waiter a{outer};
    wait();
    {
      scoped_waiter b{inner};
      wait();
    }
    wait();
    std::thread other{[] {
      auto x = std::make_shared<completion>();
      x->set();
      waiter::current().wait(x, {"x", {}});
    }};
    other.join();
  }
  CHECK(outer.calls == 2);
  CHECK(inner.calls == 1);
  auto x = std::make_shared<completion>();
  x->set();
  waiter::current().wait(x, {"x", {}});
  CHECK(outer.calls == 2);
}

TEST_CASE("a thread that must not wait gets an error that names what and where",
          "[transport][wait]") {
  auto x = std::make_shared<awaited<int>>();
  auto ready = std::make_shared<awaited<int>>();
  ready->set_value(2);
  failure cause;
  int value = 0;
  std::thread other{[&] {
    refuse_waits("the thread that delivers messages");
    value = awaited<int>::get(ready, {"what is here", {}});
    try {
      awaited<int>::get(x, {"value of 'b'", rank_id{1}});
    } catch (const error& e) {
      cause = e.cause();
    }
  }};
  other.join();
  CHECK(value == 2);
  CHECK(cause.code == error_code::unsupported);
  CHECK(cause.text
        == "value of 'b' from rank 1 is waited for on the thread that delivers "
           "messages, which must not wait: use it on a thread of your own");
  // Nobody else is concerned.
  std::thread sets{[&] { x->set_value(3); }};
  CHECK(awaited<int>::get(x, {"value of 'b'", rank_id{1}}) == 3);
  sets.join();
}

TEST_CASE("a wait releases the lock of an interpreter, also when it fails",
          "[transport][wait]") {
  static std::mutex lock;
  static thread_local bool holds = false;
  release_in_waits({[]() -> void* {
                      if (!std::exchange(holds, false))
                        return nullptr;
                      lock.unlock();
                      return &lock;
                    },
                    [](void*) {
                      lock.lock();
                      holds = true;
                    }});
  lock.lock();
  holds = true;
  for (auto fails : {false, true}) {
    auto x = std::make_shared<completion>();
    // It cannot end the wait before it has the lock.
    std::thread other{[x, fails] {
      std::lock_guard guard{lock};
      fails ? x->fail(lost(1)) : x->set();
    }};
    try {
      waiter::current().wait(x, {"the other thread", {}});
      CHECK_FALSE(fails);
    } catch (const error& e) {
      CHECK(e.cause() == lost(1));
    }
    CHECK(holds);
    other.join();
  }
  holds = false;
  lock.unlock();
  release_in_waits({});
}
