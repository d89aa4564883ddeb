#include "tests/support/catch.hpp"

#include "runtime/offload/offload_store.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"

#include <c10/core/CPUAllocator.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include <sys/resource.h>

using namespace smp;
using namespace smp::test;

using namespace std::chrono_literals;

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;

namespace {

using part = offload_store::part;
using texts = std::vector<std::string>;

constexpr uint64_t page = file_slots::granule;

/// Bytes that follow from `seed`.
part make_part(uint64_t bytes, uint32_t seed, uint64_t offset = 0) {
  c10::Storage memory{c10::Storage::use_byte_size_t{},
                      static_cast<int64_t>(offset + bytes),
                      c10::GetCPUAllocator(), true};
  std::mt19937 random{seed};
  auto* begin = static_cast<uint8_t*>(memory.mutable_data()) + offset;
  std::generate(begin, begin + bytes,
                [&] { return static_cast<uint8_t>(random()); });
  return {std::move(memory), offset, bytes, 0};
}

const uint8_t* begin_of(const part& x) {
  return static_cast<const uint8_t*>(x.memory.data()) + x.offset;
}

bool holds(const part& x, uint32_t seed) {
  auto expected = make_part(x.bytes, seed);
  return std::memcmp(begin_of(x), begin_of(expected), x.bytes) == 0;
}

/// What a `scripted_file` does, and did.
struct script {
  std::mutex mutex;
  std::condition_variable changed;
  texts log; // "write 0", "read 1": what, and the slot in units of `unit`
  uint64_t unit = page;
  uint64_t allowed = ~uint64_t{0}; // further calls wait
  uint64_t room = ~uint64_t{0};    // length that can be reserved
  int write_error = 0;
  int read_error = 0;
  std::vector<char> bytes;

  void fail(int of_write, int of_read) {
    std::unique_lock guard{mutex};
    write_error = of_write;
    read_error = of_read;
  }

  void allow(uint64_t n) {
    std::unique_lock guard{mutex};
    allowed = n;
    changed.notify_all();
  }

  /// Waits until so many calls began.
  texts await(size_t n) {
    std::unique_lock guard{mutex};
    changed.wait(guard, [&] { return log.size() >= n; });
    return log;
  }
};

class scripted_file final : public offload_file {
public:
  explicit scripted_file(script& x) : script_(x) {
    // nop
  }

  int reserve(uint64_t offset, uint64_t bytes) override {
    std::unique_lock guard{script_.mutex};
    return offset + bytes <= script_.room ? 0 : ENOSPC;
  }

  int write(const void* data, uint64_t bytes, uint64_t offset) override {
    auto guard = enter("write", offset);
    if (script_.write_error != 0)
      return script_.write_error;
    auto& to = script_.bytes;
    to.resize(std::max<size_t>(to.size(), offset + bytes));
    std::memcpy(to.data() + offset, data, bytes);
    return 0;
  }

  int read(void* data, uint64_t bytes, uint64_t offset) override {
    auto guard = enter("read", offset);
    if (script_.read_error != 0)
      return script_.read_error;
    std::memcpy(data, script_.bytes.data() + offset, bytes);
    return 0;
  }

private:
  std::unique_lock<std::mutex> enter(const char* what, uint64_t offset) {
    std::unique_lock guard{script_.mutex};
    script_.log.push_back(fmt::format("{} {}", what, offset / script_.unit));
    script_.changed.notify_all();
    auto n = script_.log.size();
    script_.changed.wait(guard, [&] { return n <= script_.allowed; });
    return guard;
  }

  script& script_;
};

std::shared_ptr<offload_store> scripted_store(script& x, uint64_t horizon,
                                              texts* warnings = nullptr) {
  offload_store::options options;
  options.dir = "DIR";
  options.horizon = horizon;
  if (warnings)
    options.warn = [warnings](auto& text) { warnings->push_back(text); };
  return offload_store::make(std::make_unique<scripted_file>(x), options);
}

std::shared_ptr<offload_store> file_store(const scratch_dir& dir,
                                          uint64_t horizon) {
  offload_store::options options;
  options.dir = dir.path;
  options.horizon = horizon;
  return offload_store::make(open_offload_file(dir.path), options);
}

} // namespace

TEST_CASE("bytes come back from a file, in steps that are alike",
          "[runtime][R57]") {
  scratch_dir dir;
  auto store = file_store(dir, 2);
  uint64_t length = 0;
  for (int step = 0; step < 4; ++step) {
    for (uint64_t m = 0; m < 3; ++m) {
      std::vector<std::unique_ptr<offload_store::set>> sets;
      std::vector<uint64_t> misaligned;
      for (uint32_t k = 0; k < 12; ++k) {
        auto seed = static_cast<uint32_t>(100 * m + k);
        auto first = make_part(70'000 + 1000 * k, seed, 64 + 4 * k);
        misaligned.push_back(reinterpret_cast<uintptr_t>(begin_of(first)) % 64);
        sets.push_back(
          store->give(m, {std::move(first), make_part(9, seed + 1)}));
      }
      store->announce(m);
      for (auto k = sets.size(); k-- > 0;) {
        auto seed = static_cast<uint32_t>(100 * m + k);
        auto back = sets[k]->take();
        REQUIRE(back.size() == 2);
        CHECK(holds(back[0], seed));
        CHECK(holds(back[1], seed + 1));
        CHECK(reinterpret_cast<uintptr_t>(begin_of(back[0])) % 64
              == misaligned[k]);
      }
    }
    store->end_step();
    auto x = store->status();
    CHECK(x.written > 0);
    CHECK(x.read <= x.written);
    CHECK(x.stayed == 0);
    if (step == 0)
      length = x.file_bytes;
    // One length for what 12 sets take, whatever became of them in time.
    CHECK(x.file_bytes == length);
  }
  store->stop();
  CHECK(store->status().bytes == 0);
  CHECK(std::filesystem::is_empty(dir.path));
}

TEST_CASE("what is written is not in memory any more", "[runtime][R57]") {
  script x;
  auto store = scripted_store(x, 4);
  auto bytes = make_part(page, 1);
  c10::weak_intrusive_ptr<c10::StorageImpl> memory{
    c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
      bytes.memory.unsafeGetStorageImpl())};
  auto first = store->give(0, {std::move(bytes)});
  auto second = store->give(0, {make_part(page, 2)});
  auto third = store->give(0, {make_part(page, 3)});
  // When the third write begins, the first is over.
  x.await(3);
  CHECK(memory.expired());
  CHECK(store->status().bytes >= 2 * page);
  CHECK(holds(first->take()[0], 1));
}

TEST_CASE("sets are read ahead in the order in which backward comes",
          "[runtime][R57]") {
  script x;
  x.allowed = 9;
  auto store = scripted_store(x, 2);
  std::vector<std::unique_ptr<offload_store::set>> sets;
  for (uint32_t i = 0; i < 8; ++i)
    sets.push_back(store->give(i / 4, {make_part(page, i)}));
  auto last = store->give(7, {make_part(page, 99)});
  x.await(9);
  // The microbatch of sets 4 to 7 turns around first.
  store->announce(1);
  store->announce(0);
  CHECK(x.await(10).back() == "read 7");
  x.allow(10);
  CHECK(x.await(11).back() == "read 6");
  x.allow(11);
  CHECK(holds(sets[7]->take()[0], 7));
  CHECK(x.await(12).back() == "read 5");
  x.allow(12);
  CHECK(holds(sets[6]->take()[0], 6));
  CHECK(x.await(13).back() == "read 4");
  x.allow(13);
  CHECK(holds(sets[5]->take()[0], 5));
  CHECK(x.await(14).back() == "read 3");
  x.allow(100);
  for (auto i : {4u, 3u, 2u, 1u, 0u})
    CHECK(holds(sets[i]->take()[0], i));
  CHECK(store->status().read == 8 * page);
}

TEST_CASE("a microbatch that turns around unannounced is read at once",
          "[runtime][R57]") {
  script x;
  auto store = scripted_store(x, 1);
  std::vector<std::unique_ptr<offload_store::set>> sets;
  for (uint32_t i = 0; i < 4; ++i)
    sets.push_back(store->give(i / 2, {make_part(page, i)}));
  auto last = store->give(7, {make_part(page, 99)});
  x.await(5);
  CHECK(holds(sets[3]->take()[0], 3));
  // And what is behind it comes next.
  CHECK(x.await(7)
        == texts{"write 0", "write 1", "write 2", "write 3", "write 4",
                 "read 3", "read 2"});
}

TEST_CASE("what is needed soon is not written", "[runtime][R57]") {
  script x;
  x.allowed = 0;
  auto store = scripted_store(x, 2);
  auto a = store->give(0, {make_part(page, 0)});
  auto b = store->give(0, {make_part(page, 1)});
  x.await(1);
  store->announce(0);
  x.allow(100);
  CHECK(holds(b->take()[0], 1));
  CHECK(holds(a->take()[0], 0));
  store->stop();
  CHECK(x.log == texts{"write 0"});
  CHECK(store->status().bytes == 0);
}

TEST_CASE("a caller that gives more than the file takes waits",
          "[runtime][R57]") {
  script x;
  x.allowed = 0;
  offload_store::options options;
  options.dir = "DIR";
  options.horizon = 2;
  options.patience = 20ms;
  auto store = offload_store::make(std::make_unique<scripted_file>(x), options);
  auto a = store->give(0, {make_part(page, 0)});
  auto b = store->give(0, {make_part(page, 1)});
  auto text = error_of([&] { store->give(0, {make_part(page, 2)}); },
                       error_code::transport);
  CHECK(text
        == "writing activations to the file in 'DIR' takes longer than 0 s "
           "(smp.offload_dir)");
  CHECK(store->status().wait_seconds > 0);
  x.allow(100);
}

TEST_CASE("a read that does not end is an error", "[runtime][R57]") {
  script x;
  offload_store::options options;
  options.dir = "DIR";
  options.patience = 20ms;
  auto store = offload_store::make(std::make_unique<scripted_file>(x), options);
  auto a = store->give(0, {make_part(page, 0)});
  auto b = store->give(1, {make_part(page, 1)});
  x.await(2);
  x.allow(2);
  CHECK_THAT(error_of([&] { a->take(); }, error_code::transport),
             StartsWith("reading activations from the file in 'DIR' takes"));
  x.allow(100);
}

TEST_CASE("what the disk has no room for stays in memory", "[runtime][R57]") {
  script x;
  x.room = 3 * page;
  texts warnings;
  auto store = scripted_store(x, 4, &warnings);
  for (uint64_t step = 1; step <= 2; ++step) {
    std::vector<std::unique_ptr<offload_store::set>> sets;
    for (uint32_t i = 0; i < 6; ++i)
      sets.push_back(store->give(0, {make_part(page, i)}));
    for (uint32_t i = 6; i-- > 0;)
      CHECK(holds(sets[i]->take()[0], i));
    store->end_step();
  }
  store->stop();
  CHECK(store->status().file_bytes <= 3 * page);
  CHECK(warnings.size() <= 1);
}

TEST_CASE("a full disk is told once, with the way out", "[runtime][R57]") {
  script x;
  x.room = page;
  texts warnings;
  // Each waits until the one before has been tried.
  auto store = scripted_store(x, 1, &warnings);
  auto a = store->give(0, {make_part(page, 0)});
  auto b = store->give(0, {make_part(2 * page, 1), make_part(page, 2)});
  auto c = store->give(0, {make_part(page, 3)});
  auto d = store->give(0, {make_part(page, 4)});
  CHECK(x.await(1) == texts{"write 0"});
  CHECK(holds(d->take()[0], 4));
  CHECK(holds(c->take()[0], 3));
  auto both = b->take();
  CHECK(holds(both[0], 1));
  CHECK(holds(both[1], 2));
  CHECK(holds(a->take()[0], 0));
  store->end_step();
  // The slot of the first one is free again.
  auto e = store->give(0, {make_part(page, 5)});
  auto f = store->give(0, {make_part(page, 6)});
  CHECK(x.await(3) == texts{"write 0", "read 0", "write 0"});
  CHECK(holds(e->take()[0], 5));
  store->stop();
  CHECK(store->status().stayed >= 4 * page);
  REQUIRE(warnings.size() == 1);
  CHECK_THAT(warnings[0],
             StartsWith("no room in 'DIR' for more activations (No space left")
               && ContainsSubstring("8192 bytes more were needed")
               && ContainsSubstring("they stay in memory")
               && ContainsSubstring("smp.offload_dir"));
}

TEST_CASE("a file that must not grow stops nothing", "[runtime][R57]") {
  scratch_dir dir;
  texts warnings;
  offload_store::options options;
  options.dir = dir.path;
  options.horizon = 1;
  options.warn = [&](auto& text) { warnings.push_back(text); };
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  auto small = before;
  small.rlim_cur = 1 << 20;
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  {
    auto store = offload_store::make(open_offload_file(dir.path), options);
    std::vector<std::unique_ptr<offload_store::set>> sets;
    for (uint32_t i = 0; i < 8; ++i)
      sets.push_back(store->give(0, {make_part(200'000, i)}));
    for (uint32_t i = 8; i-- > 0;)
      CHECK(holds(sets[i]->take()[0], i));
    store->stop();
    CHECK(store->status().file_bytes <= 1 << 20);
    CHECK(store->status().written > 0);
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  REQUIRE(warnings.size() == 1);
  CHECK_THAT(warnings[0], ContainsSubstring("File too large"));
}

TEST_CASE("a disk that fails is named when backward comes", "[runtime][R57]") {
  script x;
  x.write_error = EIO;
  auto store = scripted_store(x, 4);
  auto a = store->give(0, {make_part(page, 0)});
  auto b = store->give(0, {make_part(page, 1)});
  x.await(2);
  CHECK(error_of([&] { a->take(); }, error_code::transport)
        == "cannot write activations to the file in 'DIR': Input/output error "
           "(smp.offload_dir)");
  // The disk is well again.
  x.fail(0, 0);
  auto c = store->give(1, {make_part(page, 2)});
  auto d = store->give(1, {make_part(page, 3)});
  x.await(4);
  CHECK(holds(c->take()[0], 2));
  auto e = store->give(1, {make_part(page, 4)});
  auto f = store->give(1, {make_part(page, 5)});
  store->announce(1);
  CHECK(holds(f->take()[0], 5));
}

TEST_CASE("what cannot be read is an error", "[runtime][R57]") {
  script x;
  auto store = scripted_store(x, 4);
  auto a = store->give(0, {make_part(page, 0)});
  auto b = store->give(0, {make_part(page, 1)});
  x.await(2);
  x.fail(0, EIO);
  CHECK(error_of([&] { a->take(); }, error_code::transport)
        == "cannot read activations back from the file in 'DIR': Input/output "
           "error (smp.offload_dir)");
}

TEST_CASE("the same bytes are written once", "[runtime][R57]") {
  script x;
  auto store = scripted_store(x, 4);
  auto mask = make_part(page, 0);
  auto a = store->give(0, {make_part(page, 1), mask});
  auto b = store->give(0, {make_part(page, 2), mask});
  auto other = mask;
  other.version = 1; // changed in between
  auto c = store->give(0, {other});
  mask = other = {};
  auto last = store->give(1, {make_part(page, 9)});
  auto log = x.await(5);
  CHECK(log == texts{"write 0", "write 1", "write 2", "write 3", "write 4"});
  auto from_b = b->take();
  CHECK(holds(from_b[0], 2));
  CHECK(holds(from_b[1], 0));
  auto from_a = a->take();
  CHECK(holds(from_a[0], 1));
  CHECK(holds(from_a[1], 0));
  CHECK(holds(c->take()[0], 0));
}

TEST_CASE("what nobody wants any more frees its slot", "[runtime][R57]") {
  script x;
  x.allowed = 0;
  auto store = scripted_store(x, 4);
  auto a = store->give(0, {make_part(page, 0)});
  auto b = store->give(0, {make_part(page, 1)});
  x.await(1);
  a.reset(); // while it is written
  x.allow(1);
  x.await(2);
  CHECK(x.log == texts{"write 0", "write 0"});
  x.allow(100); // it may be written by then, and is read again
  CHECK(holds(b->take()[0], 1));
  store->stop();
  CHECK(store->status().bytes == 0);
}

TEST_CASE("a store stops although writes are left", "[runtime][R57]") {
  script x;
  x.allowed = 0;
  auto store = scripted_store(x, 4);
  auto a = store->give(0, {make_part(page, 0)});
  auto b = store->give(0, {make_part(page, 1)});
  auto c = store->give(0, {make_part(page, 2)});
  x.await(1);
  std::thread stopping{[&] { store->stop(); }};
  x.allow(100);
  stopping.join();
  // What was not written is there; of what was, nothing comes back.
  for (auto* y : {&a, &b, &c}) {
    auto text = error_of([&] { (*y)->take(); }, error_code::cancelled);
    CHECK((text == "no error"
           || text
                == "reading activations from the file in 'DIR' ended with the "
                   "session"));
  }
}

TEST_CASE("sets outlive their store's thread", "[runtime][R57]") {
  script x;
  std::unique_ptr<offload_store::set> a;
  {
    auto store = scripted_store(x, 4);
    a = store->give(0, {make_part(page, 0)});
    store->stop();
  }
  a.reset();
}

TEST_CASE("two threads give and take at once", "[runtime][R57]") {
  scratch_dir dir;
  auto store = file_store(dir, 3);
  std::atomic<int> wrong = 0;
  auto work = [&](uint64_t lane) {
    for (int step = 0; step < 10; ++step) {
      std::vector<std::unique_ptr<offload_store::set>> sets;
      for (uint32_t k = 0; k < 10; ++k)
        sets.push_back(store->give(
          lane, {make_part(30'000, static_cast<uint32_t>(lane * 50 + k))}));
      store->announce(lane);
      for (uint32_t k = 10; k-- > 0;)
        if (k % 4 != 0
            && !holds(sets[k]->take()[0], static_cast<uint32_t>(lane * 50 + k)))
          ++wrong;
    }
  };
  std::thread one{[&] { work(1); }}, two{[&] { work(2); }};
  one.join();
  two.join();
  CHECK(wrong == 0);
  store->stop();
  CHECK(store->status().bytes == 0);
}
