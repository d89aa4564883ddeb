#include "runtime/offload/offload_store.hpp"

#include "transport/error.hpp"

#include <c10/core/CPUAllocator.h>

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

namespace smp {

namespace {

/// The file grows by this many bytes if there is space.
constexpr uint64_t growth = 16 << 20;

/// Alignment of addresses for vector instructions.
constexpr uint64_t alignment = 64;

/// Tells whether errno `x` says that the disk or the quota is full, or that the
/// file may not be longer.
bool is_lack_of_room(int x) {
  return x == ENOSPC || x == EDQUOT || x == EFBIG;
}

/// Frees storages that nothing else uses. Memory that goes back to the heap
/// stays with the process (R27), so its pages go back to the system first.
void free_pages(std::vector<c10::Storage>& xs) {
  while (!xs.empty()) {
    auto x = std::move(xs.back());
    xs.pop_back();
    if (!x || x.use_count() > 1
        || x.data_ptr().get_deleter()
             != c10::GetDefaultCPUAllocator()->raw_deleter())
      continue;
    constexpr auto page = file_slots::granule;
    auto begin = reinterpret_cast<uintptr_t>(x.mutable_data());
    auto end = (begin + x.nbytes()) / page * page;
    begin = (begin + page - 1) / page * page;
    if (begin < end)
      ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  }
}

} // namespace

/// Bytes that are written and read together. Several sets may share them.
struct offload_store::block {
  c10::Storage memory = {}; // empty: only the file has the bytes
  uint64_t offset = 0;      // in `memory`
  uint64_t bytes = 0;
  uint64_t misalignment = 0;
  std::optional<file_slots::slot> slot = {};
  uint32_t holders = 0; // sets that share it
  uint32_t wanted = 0;  // of these, the ones that need it in memory
  bool stays = false;   // in memory, as the file has no space
  bool moving = false;
  failure why = {}; // set if it could not be written or read
};

struct offload_store::entry {
  uint64_t lane = 0;
  std::vector<block_ptr> blocks = {};
  bool wanted = false;
  bool gone = false;
};

// -- set ----------------------------------------------------------------------

offload_store::set::set(std::shared_ptr<offload_store> store, entry_ptr x)
  : store_(std::move(store)), entry_(std::move(x)) {
  // nop
}

offload_store::set::~set() {
  std::vector<c10::Storage> freed; // after the lock
  guard held{store_->mutex_};
  store_->remove(*entry_, freed);
  held.unlock();
}

std::vector<offload_store::part> offload_store::set::take() {
  return store_->take(*entry_);
}

// -- store --------------------------------------------------------------------

offload_store::offload_store(std::unique_ptr<offload_file> file, options x)
  : options_(std::move(x)), file_(std::move(file)) {
  thread_ = std::thread{[this] { run(); }};
}

std::shared_ptr<offload_store>
offload_store::make(std::unique_ptr<offload_file> file, options x) {
  return std::shared_ptr<offload_store>(
    new offload_store(std::move(file), std::move(x)));
}

offload_store::~offload_store() {
  stop();
}

void offload_store::stop() {
  guard held{mutex_};
  stopping_ = true;
  held.unlock();
  work_.notify_all();
  done_.notify_all();
  if (thread_.joinable())
    thread_.join();
}

offload_store::counts offload_store::status() const {
  guard held{mutex_};
  auto result = counts_;
  result.bytes = slots_.in_use();
  result.file_bytes = slots_.size();
  return result;
}

// -- giving and taking --------------------------------------------------------

offload_store::block_ptr offload_store::block_of(const part& range) {
  auto* impl = range.memory.unsafeGetStorageImpl();
  key name{impl, range.offset, range.bytes, range.version};
  if (auto given = given_.find(name); given != given_.end())
    // A new storage may have the address of an old one.
    if (auto old = given->second.first.lock(); old && old.get() == impl)
      if (auto result = given->second.second.lock();
          result && result->holders > 0)
        return result;
  auto result = std::make_shared<block>();
  result->memory = range.memory;
  result->offset = range.offset;
  result->bytes = range.bytes;
  auto* begin = static_cast<const char*>(range.memory.data()) + range.offset;
  result->misalignment = reinterpret_cast<uintptr_t>(begin) % alignment;
  c10::weak_intrusive_ptr<c10::StorageImpl> same{
    c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl)};
  given_.insert_or_assign(name, std::pair{std::move(same), result});
  return result;
}

std::unique_ptr<offload_store::set> offload_store::give(uint64_t lane,
                                                        std::vector<part> xs) {
  auto x = std::make_shared<entry>();
  x->lane = lane;
  auto result = std::make_unique<set>(shared_from_this(), x);
  guard held{mutex_};
  for (auto& y : xs) {
    x->blocks.push_back(block_of(y));
    ++x->blocks.back()->holders;
  }
  lanes_[lane].push_back(x.get());
  writes_.push_back(x);
  look_ahead();
  work_.notify_one();
  await(held, "writing activations to",
        [&] { return writes_.size() <= options_.horizon; });
  return result;
}

std::vector<offload_store::part> offload_store::take(entry& x) {
  std::vector<c10::Storage> freed; // after the lock
  guard held{mutex_};
  // Backward has reached this lane, so its other sets come next.
  std::erase(order_, x.lane);
  order_.insert(order_.begin(), x.lane);
  want(x, true);
  await(held, "reading activations from", [&] {
    return std::ranges::all_of(x.blocks,
                               [](auto& y) { return y->memory || y->why; });
  });
  std::vector<part> result;
  for (auto& y : x.blocks) {
    if (y->why)
      throw error{y->why};
    result.push_back({y->memory, y->offset, y->bytes, 0});
  }
  remove(x, freed);
  look_ahead();
  held.unlock();
  return result;
}

/// `x` is not needed any more. @param freed gets storages to be freed without
/// the lock
void offload_store::remove(entry& x, std::vector<c10::Storage>& freed) {
  if (std::exchange(x.gone, true))
    return;
  if (auto lane = lanes_.find(x.lane); lane != lanes_.end()) {
    std::erase(lane->second, &x);
    if (lane->second.empty())
      lanes_.erase(lane);
  }
  for (auto& y : x.blocks) {
    --y->holders;
    y->wanted -= x.wanted ? 1 : 0;
    release(*y, freed);
  }
  x.blocks.clear();
}

/// Gives up the slot and the memory that `x` does not need.
void offload_store::release(block& x, std::vector<c10::Storage>& freed) {
  if (x.moving)
    return; // `moved` calls this again
  if (x.holders == 0)
    free_slot(x);
  if (x.holders == 0 || (x.slot && x.wanted == 0))
    freed.push_back(std::exchange(x.memory, {}));
}

void offload_store::free_slot(block& x) {
  if (auto slot = std::exchange(x.slot, std::nullopt))
    slots_.give_back(*slot);
}

/// @param first whether it is read before all others
void offload_store::want(entry& x, bool first) {
  if (!std::exchange(x.wanted, true))
    for (auto& y : x.blocks)
      ++y->wanted;
  for (auto& y : x.blocks)
    if (!y->memory && !y->moving)
      reads_.insert(first ? reads_.begin() : reads_.end(), y);
  work_.notify_one();
}

/// Reads the next `horizon` sets.
void offload_store::look_ahead() {
  auto left = options_.horizon;
  for (auto id : order_) {
    auto lane = lanes_.find(id);
    if (lane == lanes_.end())
      continue;
    auto& xs = lane->second;
    for (auto i = xs.rbegin(); i != xs.rend(); ++i) {
      if (left-- == 0)
        return;
      if (!(*i)->wanted)
        want(**i, false);
    }
  }
}

void offload_store::announce(uint64_t lane) {
  guard held{mutex_};
  if (std::ranges::find(order_, lane) != order_.end())
    return;
  order_.push_back(lane);
  look_ahead();
}

void offload_store::end_step() {
  guard held{mutex_};
  order_.clear();
  lanes_.clear();
  given_.clear();
  full_ = false;
}

void offload_store::await(guard& held, const char* what,
                          const std::function<bool()>& done) {
  if (done())
    return;
  auto begin = std::chrono::steady_clock::now();
  auto in_time = done_.wait_for(held, options_.patience,
                                [&] { return stopping_ || done(); });
  counts_.wait_seconds += std::chrono::duration<double>(
                            std::chrono::steady_clock::now() - begin)
                            .count();
  if (done())
    return;
  auto text = fmt::format("{} the file in '{}' ", what, options_.dir);
  if (in_time)
    throw error{error_code::cancelled, text + "ended with the session"};
  throw error{error_code::transport,
              text
                + fmt::format("takes longer than {} s (smp.offload_dir)",
                              options_.patience.count() / 1000)};
}

// -- thread of the file -------------------------------------------------------

void offload_store::run() {
  pthread_setname_np(pthread_self(), "smp.offload");
  // A limit on the length of files is an error here and must not end the
  // process.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  guard held{mutex_};
  while (!stopping_)
    if (auto x = next_read())
      read(held, x);
    else if (auto y = next_write())
      write(held, y);
    else
      work_.wait(held);
}

offload_store::block_ptr offload_store::next_read() {
  while (!reads_.empty()) {
    auto x = std::move(reads_.front());
    reads_.pop_front();
    if (x->slot && !x->memory && x->wanted > 0)
      return x;
  }
  return nullptr;
}

offload_store::block_ptr offload_store::next_write() {
  while (!writes_.empty()) {
    auto& x = *writes_.front();
    for (auto& y : x.blocks)
      if (!y->slot && !y->stays && y->wanted == 0)
        return y;
    writes_.pop_front();
    done_.notify_all();
  }
  return nullptr;
}

/// Ends a write or read, and frees what it kept.
void offload_store::moved(guard& held, block& x, c10::Storage memory) {
  std::vector<c10::Storage> freed;
  freed.push_back(std::move(memory));
  x.moving = false;
  release(x, freed);
  done_.notify_all();
  held.unlock();
  free_pages(freed);
  held.lock();
}

/// Allocates memory before it reads, which may fail.
void offload_store::read(guard& held, const block_ptr& x) {
  auto from = x->slot->offset;
  x->moving = true;
  held.unlock();
  c10::Storage memory;
  failure why;
  try {
    auto bytes = static_cast<int64_t>(x->misalignment + x->bytes);
    memory = {c10::Storage::use_byte_size_t{}, bytes, c10::GetCPUAllocator(),
              true};
    auto* to = static_cast<char*>(memory.mutable_data()) + x->misalignment;
    if (auto error = file_->read(to, x->bytes, from))
      why = failed("read activations back from", error);
  } catch (const c10::Error& e) {
    why = {error_code::user_code, no_rank, {}, e.what_without_backtrace()};
  }
  held.lock();
  if (why) {
    x->why = std::move(why);
  } else {
    counts_.read += x->bytes;
    x->memory = std::move(memory);
    x->offset = x->misalignment;
  }
  moved(held, *x, {});
}

void offload_store::write(guard& held, const block_ptr& x) {
  x->moving = true;
  auto memory = x->memory;
  auto slot = slots_.take(x->bytes);
  auto why = 0;
  if (!slot) {
    why = full_ ? ENOSPC : make_room(held, x->bytes);
    if (why == 0) // only this thread takes slots
      slot = slots_.take(x->bytes);
  }
  if (slot) {
    held.unlock();
    auto* begin = static_cast<const char*>(memory.data()) + x->offset;
    why = file_->write(begin, x->bytes, slot->offset);
    held.lock();
  }
  if (why != 0) {
    if (slot)
      slots_.give_back(*slot);
    refuse(held, *x, why);
  } else {
    x->slot = slot;
    counts_.written += x->bytes;
    counts_.peak_bytes = std::max(counts_.peak_bytes, slots_.in_use());
  }
  moved(held, *x, std::move(memory));
}

int offload_store::make_room(guard& held, uint64_t bytes) {
  auto least = slots_.missing(bytes);
  auto end = slots_.size();
  held.unlock();
  auto much = std::max(least, growth);
  auto why = file_->reserve(end, much);
  if (is_lack_of_room(why) && least < much)
    why = file_->reserve(end, much = least);
  held.lock();
  if (why == 0)
    slots_.grow(much);
  return why;
}

/// A full disk is not an error: the bytes stay in memory.
void offload_store::refuse(guard& held, block& x, int why) {
  x.stays = true;
  if (!is_lack_of_room(why)) {
    x.why = failed("write activations to", why);
    return;
  }
  full_ = true;
  counts_.stayed += x.bytes;
  if (!options_.warn || std::exchange(warned_, true))
    return;
  auto text = fmt::format(
    "no room in '{}' for more activations ({}; {} MB are in the file, {} bytes "
    "more were needed): they stay in memory. Free some space, or name another "
    "folder in smp.offload_dir",
    options_.dir, std::strerror(why), slots_.in_use() / 1'000'000, x.bytes);
  held.unlock();
  options_.warn(text);
  held.lock();
}

failure offload_store::failed(const char* what, int why) const {
  return {error_code::transport,
          no_rank,
          {},
          fmt::format("cannot {} the file in '{}': {} (smp.offload_dir)", what,
                      options_.dir, std::strerror(why))};
}

} // namespace smp
