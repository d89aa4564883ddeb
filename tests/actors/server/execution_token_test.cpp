#include "tests/support/catch.hpp"

#include "actors/server/execution_token.hpp"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

using namespace smp;

namespace {

struct three_seats {
  explicit three_seats(execution_token& token) {
    for (auto name : {"a", "b", "c"})
      seats.push_back(token.enroll([this, name] { granted += name; }));
  }

  std::vector<execution_token::seat> seats;
  std::string granted;
};

} // namespace

TEST_CASE("a free token is taken without a callback", "[actors][token]") {
  execution_token token;
  three_seats x{token};
  CHECK(token.try_acquire(x.seats[0]));
  token.release(x.seats[0]);
  CHECK(token.try_acquire(x.seats[1]));
  CHECK(x.granted.empty());
}

TEST_CASE("those in line get the token in their order", "[actors][token]") {
  execution_token token;
  three_seats x{token};
  CHECK(token.try_acquire(x.seats[0]));
  CHECK_FALSE(token.try_acquire(x.seats[2]));
  CHECK_FALSE(token.try_acquire(x.seats[1]));
  token.release(x.seats[0]);
  CHECK(x.granted == "c");
  CHECK_FALSE(token.try_acquire(x.seats[0]));
  token.release(x.seats[2]);
  CHECK(x.granted == "cb");
  token.release(x.seats[1]);
  CHECK(x.granted == "cba");
}

TEST_CASE("an execution that leaves the line is not called",
          "[actors][token]") {
  execution_token token;
  three_seats x{token};
  CHECK(token.try_acquire(x.seats[0]));
  CHECK_FALSE(token.try_acquire(x.seats[1]));
  CHECK_FALSE(token.try_acquire(x.seats[2]));
  token.leave(x.seats[1]);
  token.release(x.seats[0]);
  CHECK(x.granted == "c");
}

TEST_CASE("an execution that leaves with the token gives it back",
          "[actors][token]") {
  execution_token token;
  three_seats x{token};
  CHECK(token.try_acquire(x.seats[0]));
  CHECK_FALSE(token.try_acquire(x.seats[1]));
  CHECK_FALSE(token.try_acquire(x.seats[2]));
  token.leave(x.seats[0]);
  CHECK(x.granted == "b");
  // It was granted the token but does not know it yet.
  token.leave(x.seats[1]);
  CHECK(x.granted == "bc");
}

TEST_CASE("only the owner can release the token", "[actors][token]") {
  execution_token token;
  three_seats x{token};
  CHECK(token.try_acquire(x.seats[0]));
  token.release(x.seats[1]);
  CHECK_FALSE(token.try_acquire(x.seats[2]));
}

TEST_CASE("threads with the token exclude each other", "[actors][token]") {
  constexpr int num_threads = 3;
  constexpr int num_rounds = 500;
  struct rank {
    std::mutex mutex;
    std::condition_variable wake;
    bool granted = false;
    execution_token::seat seat = 0;
  };
  execution_token token;
  std::vector<rank> ranks(num_threads);
  for (auto& x : ranks)
    x.seat = token.enroll([&x] {
      std::lock_guard guard{x.mutex};
      x.granted = true;
      x.wake.notify_one();
    });
  int inside = 0; // plain: a race would show under ThreadSanitizer
  int rounds = 0;
  std::atomic<bool> overlap = false;
  auto work = [&](rank& x) {
    for (int i = 0; i < num_rounds; ++i) {
      if (!token.try_acquire(x.seat)) {
        std::unique_lock guard{x.mutex};
        x.wake.wait(guard, [&] { return x.granted; });
        x.granted = false;
      }
      if (++inside != 1)
        overlap = true;
      ++rounds;
      --inside;
      token.release(x.seat);
    }
  };
  std::vector<std::thread> threads;
  for (auto& x : ranks)
    threads.emplace_back(work, std::ref(x));
  for (auto& x : threads)
    x.join();
  CHECK_FALSE(overlap);
  CHECK(rounds == num_threads * num_rounds);
}
