#include "transport/flight/flight_record.hpp"

#include "transport/error.hpp"
#include "transport/flight/flight_layout.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <new>
#include <unordered_set>
#include <utility>

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

namespace smp {

namespace {

using namespace flight;

int64_t now_of(clockid_t clock) noexcept {
  timespec x{};
  ::clock_gettime(clock, &x);
  return int64_t{x.tv_sec} * 1'000'000'000 + x.tv_nsec;
}

/// @returns what processes with the same clock have in common: their boot
std::string name_of_clock() {
  std::string result;
  std::ifstream in{"/proc/sys/kernel/random/boot_id"};
  std::getline(in, result);
  return result;
}

template <size_t N>
void put(std::array<char, N>& to, const std::string& text) {
  auto n = std::min(text.size(), N - 1);
  std::copy_n(text.data(), n, to.data());
}

std::shared_ptr<std::byte> own_memory() {
  auto size = flight_record::image_size();
  auto* p = ::mmap(nullptr, size, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED)
    throw std::bad_alloc{};
  return {static_cast<std::byte*>(p),
          [size](std::byte* x) { ::munmap(x, size); }};
}

header& header_of(std::byte* x) noexcept {
  return *reinterpret_cast<header*>(x);
}

std::byte* names_of(std::byte* x) noexcept {
  return x + page;
}

slot* slots_of(std::byte* x) noexcept {
  return reinterpret_cast<slot*>(x + page + names_capacity);
}

std::atomic_ref<uint64_t> shared(uint64_t& x) noexcept {
  return std::atomic_ref<uint64_t>{x};
}

std::array<uint64_t, words_of_event> words_of(const flight_event& x) noexcept {
  return std::bit_cast<std::array<uint64_t, words_of_event>>(x);
}

/// @returns those names that the events have
std::vector<std::byte> names_in(std::byte* memory,
                                std::span<const slot> slots) {
  std::unordered_set<uint32_t> used;
  for (auto& x : slots)
    used.insert(std::bit_cast<flight_event>(x.words).name);
  // Names are only ever added.
  auto size = std::min<uint64_t>(
    shared(header_of(memory).names_used).load(std::memory_order_acquire),
    names_capacity);
  std::vector<std::byte> result;
  auto* names = names_of(memory);
  for (uint64_t i = 0; i + sizeof(name_head) <= size;) {
    name_head head{};
    std::memcpy(&head, names + i, sizeof(head));
    auto bytes = padded(sizeof(head) + head.size);
    if (bytes > size - i) // the memory of a killed rank may hold anything
      break;
    if (used.contains(head.key))
      result.insert(result.end(), names + i, names + i + bytes);
    i += bytes;
  }
  return result;
}

/// @returns an image with the names in `memory`
std::vector<std::byte> image_with(std::byte* memory,
                                  std::span<const slot> slots, uint64_t noted) {
  auto& from = header_of(memory);
  header head{};
  head.magic = magic;
  head.rank = from.rank;
  head.pid = from.pid;
  head.epoch = from.epoch;
  head.host = from.host;
  head.clock = from.clock;
  head.next = noted;
  auto names = names_in(memory, slots);
  head.names_size = head.names_used = names.size();
  head.slots = slots.size();
  std::vector<std::byte> result(page + names.size() + slots.size_bytes());
  std::memcpy(result.data(), &head, sizeof(head));
  std::ranges::copy(names, result.begin() + page);
  std::ranges::copy(std::as_bytes(slots),
                    result.end() - static_cast<ptrdiff_t>(slots.size_bytes()));
  return result;
}

/// A thread that the machine stops in the middle of an event may go on when
/// others have filled the ring: two threads may want the same slot.
/// @returns whether the caller may write it, as event of that `stamp`; else
/// another thread writes it, or a later event has it
bool claim(slot& x, uint64_t stamp) noexcept {
  auto before = shared(x.stamp).load(std::memory_order_relaxed);
  return before % 2 == 0 && before < stamp
         && shared(x.stamp).compare_exchange_strong(
           before, stamp, std::memory_order_acquire, std::memory_order_relaxed);
}

/// @returns whether `to` got a complete event
bool copy(slot& from, slot& to) noexcept {
  auto before = shared(from.stamp).load(std::memory_order_acquire);
  if (before == 0 || before % 2 != 0)
    return false;
  for (size_t i = 0; i < words_of_event; ++i)
    to.words[i] = shared(from.words[i]).load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  to.stamp = before;
  return shared(from.stamp).load(std::memory_order_relaxed) == before;
}

} // namespace

// -- flight_trace -------------------------------------------------------------

bool flight_trace::add(const flight_event& x) {
  if (x.time > until_)
    return false;
  std::lock_guard guard{mutex_};
  if (events_.size() < limit_)
    events_.push_back(x);
  else
    ++lost_;
  return true;
}

std::vector<flight_event> flight_trace::take() {
  std::lock_guard guard{mutex_};
  return std::exchange(events_, {});
}

uint64_t flight_trace::lost() const {
  std::lock_guard guard{mutex_};
  return lost_;
}

// -- flight_record ------------------------------------------------------------

size_t flight_record::image_size() noexcept {
  return page + names_capacity + capacity * sizeof(slot);
}

flight_record::flight_record(rank_id self) : flight_record(self, own_memory()) {
  // nop
}

flight_record::flight_record(rank_id self, std::shared_ptr<std::byte> memory)
  : memory_(std::move(memory)) {
  auto& x = header_of(memory_.get());
  if (x.magic == magic)
    std::memset(memory_.get(), 0, image_size());
  x.rank = self.value;
  x.pid = static_cast<uint64_t>(::getpid());
  x.epoch = now_of(CLOCK_REALTIME) - now_of(CLOCK_MONOTONIC);
  std::array<char, 64> host{};
  ::gethostname(host.data(), host.size() - 1);
  x.host = host;
  put(x.clock, name_of_clock());
  x.names_size = names_capacity;
  x.slots = capacity;
  // Last: it makes the rest valid for who reads the memory of a killed rank.
  std::atomic_thread_fence(std::memory_order_release);
  x.magic = magic;
}

void flight_record::note(flight_event x) noexcept {
  x.time = now_of(CLOCK_MONOTONIC);
  auto& head = header_of(memory_.get());
  auto i = shared(head.next).fetch_add(1, std::memory_order_relaxed);
  auto& to = slots_of(memory_.get())[i % capacity];
  if (claim(to, 2 * i + 1)) {
    auto words = words_of(x);
    std::atomic_thread_fence(std::memory_order_release);
    for (size_t k = 0; k < words_of_event; ++k)
      shared(to.words[k]).store(words[k], std::memory_order_relaxed);
    shared(to.stamp).store(2 * i + 2, std::memory_order_release);
  }
  if (tracing())
    add_to_traces(x);
}

void flight_record::add_to_traces(const flight_event& x) {
  std::lock_guard guard{mutex_};
  std::erase_if(traces_, [&](auto& weak) {
    auto trace = weak.lock();
    return !trace || !trace->add(x);
  });
  tracing_ = !traces_.empty();
}

std::shared_ptr<flight_trace> flight_record::trace(size_t limit,
                                                   std::chrono::seconds life) {
  auto until = now_of(CLOCK_MONOTONIC) + std::chrono::nanoseconds{life}.count();
  auto result = std::make_shared<flight_trace>(limit, until);
  std::lock_guard guard{mutex_};
  traces_.push_back(result);
  tracing_ = true;
  return result;
}

bool flight_record::add_name(uint32_t key, std::string_view text) {
  auto& head = header_of(memory_.get());
  auto used = shared(head.names_used).load(std::memory_order_relaxed);
  auto need = padded(sizeof(name_head) + text.size());
  // Without a name, readers show the number.
  if (used + need > names_capacity)
    return false;
  name_head entry{key, static_cast<uint32_t>(text.size())};
  auto* to = names_of(memory_.get()) + used;
  std::memcpy(to, &entry, sizeof(entry));
  std::memcpy(to + sizeof(entry), text.data(), text.size());
  shared(head.names_used).store(used + need, std::memory_order_release);
  return true;
}

uint32_t flight_record::name(std::string_view text) {
  std::lock_guard guard{mutex_};
  if (auto i = names_.find(text); i != names_.end())
    return i->second;
  auto key = first_text_name + static_cast<uint32_t>(names_.size());
  if (!add_name(key, text))
    return unknown_name;
  names_.emplace(text, key);
  return key;
}

uint32_t flight_record::name(const wait_reason& x) {
  using enum wait_subject::kind;
  // Without the numbers that texts for people have: there is room for a fixed
  // number of names.
  switch (x.subject.what) {
    case step_end:
      return name("the end of the step");
    case exchange:
      return name("exchange " + x.subject.name);
    case collective:
      return name("collective " + x.subject.name);
    case module:
      return name(x.subject.name);
    case device:
      return name("the device");
    case other:
      break;
  }
  return name(x.what);
}

void flight_record::name_modules(std::span<const std::string> path_of) {
  std::lock_guard guard{mutex_};
  for (uint32_t i = 0; i < path_of.size(); ++i)
    add_name(i, path_of[i]);
}

std::vector<std::byte> flight_record::image_of(std::byte* memory,
                                               size_t limit) {
  auto& from = header_of(memory);
  if (from.magic != magic)
    return {};
  auto noted = shared(from.next).load(std::memory_order_relaxed);
  std::vector<slot> slots(capacity);
  size_t n = 0;
  for (size_t i = 0; i < capacity; ++i)
    n += copy(slots_of(memory)[i], slots[n]) ? 1 : 0;
  slots.resize(n);
  if (n > limit) {
    std::ranges::sort(slots, {}, &slot::stamp);
    slots.erase(slots.begin(), slots.end() - static_cast<ptrdiff_t>(limit));
  }
  return image_with(memory, slots, noted);
}

std::vector<std::byte>
flight_record::image(std::span<const flight_event> events,
                     uint64_t lost) const {
  std::vector<slot> slots(events.size());
  for (size_t i = 0; i < events.size(); ++i)
    slots[i] = {2 * i + 2, words_of(events[i])};
  return image_with(memory_.get(), slots, events.size() + lost);
}

} // namespace smp
