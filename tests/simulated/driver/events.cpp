#include "tests/simulated/driver/events.hpp"

#include "tests/simulated/driver/event_state.hpp"
#include "tests/simulated/driver/files.hpp"
#include "tests/simulated/driver/host_waits.hpp"
#include "tests/simulated/driver/stream.hpp"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <ctime>

namespace smp::sim {

namespace {

constexpr size_t page_size = 4096;

void futex(const std::atomic<uint32_t>& word, int operation, uint32_t value,
           const timespec* patience) {
  // (The kernel reads the word only.)
  syscall(SYS_futex, &word, operation, value, patience, nullptr, 0);
}

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch()
         / std::chrono::nanoseconds{1};
}

/// Also where the counts have gone round.
bool not_before(uint32_t count, uint32_t record) {
  return static_cast<int32_t>(count - record) >= 0;
}

void host_saw(const event& x) {
  clock_vector seen;
  if (auto guard = checker().lock())
    seen = x->seen;
  checker().host_saw(seen);
}

} // namespace

// -- the state ----------------------------------------------------------------

event_state::event_state() : counts_(&own_), file_(-1) {
  // nop
}

event_state::event_state(int file) : file_(file) {
  auto* mapped = mmap(nullptr, page_size, PROT_READ | PROT_WRITE, MAP_SHARED,
                      file, 0);
  if (mapped == MAP_FAILED)
    fail("mapping an event");
  counts_ = static_cast<counts*>(mapped);
}

event_state::~event_state() {
  if (file_ < 0)
    return;
  munmap(counts_, page_size);
  close(file_);
}

uint32_t event_state::ask() {
  return counts_->asked.fetch_add(1) + 1;
}

uint32_t event_state::asked() const {
  return counts_->asked;
}

void event_state::reach(uint32_t record) {
  reached_at_ns_ = now_ns();
  counts_->reached = record;
  futex(counts_->reached, FUTEX_WAKE, INT_MAX, nullptr);
}

bool event_state::reached(uint32_t record) const {
  return not_before(counts_->reached, record);
}

void event_state::await(uint32_t record) const {
  // Looks up now and then, so that a process can end whatever it waits for.
  constexpr timespec patience{0, 50'000'000};
  while (!stopping()) {
    uint32_t count = counts_->reached;
    if (not_before(count, record))
      return;
    futex(counts_->reached, FUTEX_WAIT, count, &patience);
  }
}

// -- for everybody ------------------------------------------------------------

event make_event() {
  return std::make_shared<event_state>();
}

void record(const event& x, int device, int64_t id) {
  no_host_function("a record of an event");
  auto& on = find_stream(device, id);
  auto guard = checker().lock();
  if (guard) {
    join(on.seen, checker().host());
    x->seen = on.seen;
  }
  on.push([x, number = x->ask()] { x->reach(number); });
}

void wait(const event& x, int device, int64_t id) {
  no_host_function("a stream's wait for an event");
  auto& on = find_stream(device, id);
  auto guard = checker().lock();
  if (guard)
    join(on.seen, x->seen);
  auto number = x->asked();
  if (!x->reached(number))
    on.push([x, number] { x->await(number); });
}

bool reached(const event& x) {
  return x->reached(x->asked());
}

bool done(const event& x) {
  no_host_function("a query of an event");
  if (!reached(x))
    return false;
  host_saw(x);
  return true;
}

void synchronize(const event& x) {
  no_host_function("a wait for an event");
  count_host_wait("event");
  x->await(x->asked());
  host_saw(x);
}

double elapsed_ms(const event& from, const event& to) {
  return static_cast<double>(to->reached_at_ns() - from->reached_at_ns()) / 1e6;
}

event make_shared_event() {
  return std::make_shared<event_state>(
    make_shared_file("sim-event", page_size));
}

event_handle export_event(const event& x) {
  return {getpid(), x->file()};
}

event import_event(const event_handle& handle) {
  return std::make_shared<event_state>(
    open_shared_file(handle.process, handle.file));
}

} // namespace smp::sim
