#include "runtime/offload/offload_store.hpp"

#include "runtime/offload/saved_block.hpp"
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

/// Tells whether an errno says that the disk or the quota is full, or that the
/// file may not be longer.
bool is_lack_of_room(int why) {
  return why == ENOSPC || why == EDQUOT || why == EFBIG;
}

/// Frees storages that nothing else uses. Memory that goes back to the heap
/// stays with the process (R27), so its pages go back to the system first.
void free_pages(std::vector<c10::Storage>& storages) {
  while (!storages.empty()) {
    auto memory = std::move(storages.back());
    storages.pop_back();
    if (!memory || memory.use_count() > 1
        || memory.data_ptr().get_deleter()
             != c10::GetDefaultCPUAllocator()->raw_deleter())
      continue;
    constexpr auto page = file_slots::granule;
    auto begin = reinterpret_cast<uintptr_t>(memory.mutable_data());
    auto end = (begin + memory.nbytes()) / page * page;
    begin = (begin + page - 1) / page * page;
    if (begin < end)
      ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  }
}

} // namespace

struct offload_store::saved_set {
  uint64_t lane = 0;
  std::vector<block_ptr> blocks = {};
  bool wanted = false;
  bool gone = false;
};

/// What is freed without the mutex.
struct offload_store::leftovers {
  std::vector<c10::Storage> memory = {};
  std::vector<std::unique_ptr<lent_storage>> lent = {};
  std::vector<std::shared_ptr<device_point>> points = {};
};

// -- set ----------------------------------------------------------------------

offload_store::set::set(std::shared_ptr<offload_store> store, set_ptr content)
  : store_(std::move(store)), content_(std::move(content)) {
  // nop
}

offload_store::set::~set() {
  leftovers freed;
  guard held{store_->mutex_};
  store_->remove(*content_, freed);
  held.unlock();
}

std::vector<offload_store::part> offload_store::set::take() {
  return store_->take(*content_);
}

// -- store --------------------------------------------------------------------

offload_store::offload_store(std::unique_ptr<offload_file> file,
                             options settings)
  : options_(std::move(settings)),
    file_(std::move(file)),
    bell_(std::make_shared<doorbell>()),
    mutex_(bell_->mutex),
    work_(bell_->work) {
  thread_ = std::thread{[this] { run(); }};
}

std::shared_ptr<offload_store>
offload_store::make(std::unique_ptr<offload_file> file, options settings) {
  return std::shared_ptr<offload_store>(
    new offload_store(std::move(file), std::move(settings)));
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

bool offload_store::takes(c10::Device x) const {
  return x.is_cpu() || (options_.device && x == options_.device->device());
}

offload_store::block_ptr offload_store::find_block(const part& range) {
  // No new storage has the address of one of which a weak pointer is left.
  auto given = given_.find({range.memory.unsafeGetStorageImpl(), range.offset,
                            range.bytes, range.version});
  auto result = given == given_.end() ? nullptr : given->second.second.lock();
  return result && result->holders > 0 ? result : nullptr;
}

/// @returns the block of these bytes, with one holder more
offload_store::block_ptr offload_store::block_of(const part& range,
                                                 guard& held) {
  auto result = find_block(range);
  if (!result) {
    held.unlock();
    result = saved_block::make(range.memory, range.offset, range.bytes,
                               options_.device.get(), bell_);
    held.lock();
    if (result->from)
      leaving_.push_back(result);
    auto* impl = range.memory.unsafeGetStorageImpl();
    c10::weak_intrusive_ptr<c10::StorageImpl> same{
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl)};
    given_.insert_or_assign(key{impl, range.offset, range.bytes, range.version},
                            std::pair{std::move(same), result});
  }
  ++result->holders;
  return result;
}

std::unique_ptr<offload_store::set>
offload_store::give(uint64_t lane, std::vector<part> parts) {
  auto content = std::make_shared<saved_set>();
  content->lane = lane;
  auto result = std::make_unique<set>(shared_from_this(), content);
  guard held{mutex_};
  for (auto& range : parts)
    content->blocks.push_back(block_of(range, held));
  held.unlock();
  parts.clear(); // may free memory
  held.lock();
  drop_copied(held);
  lanes_[lane].push_back(content.get());
  writes_.push_back(content);
  look_ahead();
  work_.notify_one();
  await(held, "writing activations to",
        [&] { return writes_.size() <= options_.horizon; });
  return result;
}

std::vector<offload_store::part> offload_store::take(saved_set& set) {
  leftovers freed;
  guard held{mutex_};
  // Backward has reached this lane, so its other sets come next.
  std::erase(order_, set.lane);
  order_.insert(order_.begin(), set.lane);
  want(set, true);
  await(held, "reading activations from", [&] {
    return std::ranges::all_of(
      set.blocks, [](auto& block) { return block->memory || block->why; });
  });
  auto blocks = set.blocks;
  for (auto& block : blocks)
    if (block->why)
      throw error{block->why};
  std::vector<part> result;
  for (auto& block : blocks)
    result.push_back(bring(*block, held));
  remove(set, freed);
  look_ahead();
  bring_next(held);
  held.unlock();
  return result;
}

/// @returns the bytes where they were. @pre they are in memory and wanted
offload_store::part offload_store::bring(saved_block& block, guard& held) {
  if (!block.on_device)
    return {block.memory, block.offset, block.bytes, 0};
  auto back = std::exchange(block.back, nullptr);
  if (!back)
    back = to_device(block, held);
  held.unlock();
  part result{back->take(), block.misalignment, block.bytes, 0};
  held.lock();
  return result;
}

/// The device copies the set that is needed next, if it is in memory.
void offload_store::bring_next(guard& held) {
  auto* set = next_set();
  if (set == nullptr)
    return;
  for (auto& block : std::vector{set->blocks}) {
    if (!block->on_device || !block->memory || block->back)
      continue;
    std::unique_ptr<lent_storage> back;
    try {
      back = to_device(*block, held);
    } catch (const c10::OutOfMemoryError&) {
      held.lock();
      return; // there may be room when it is needed
    }
    if (block->holders > 0 && !block->back)
      std::swap(block->back, back);
    held.unlock();
    back.reset();
    held.lock();
  }
}

/// Begins to copy. Returns with the mutex, and throws without it.
std::unique_ptr<lent_storage> offload_store::to_device(const saved_block& block,
                                                       guard& held) const {
  auto from = block.memory;
  auto ready = block.ready;
  held.unlock();
  auto result = options_.device->to_device(from, block.bytes,
                                           block.misalignment, ready.get());
  from = {};
  ready = nullptr;
  held.lock();
  return result;
}

/// The set is not needed any more.
void offload_store::remove(saved_set& set, leftovers& freed) {
  if (std::exchange(set.gone, true))
    return;
  if (auto lane = lanes_.find(set.lane); lane != lanes_.end()) {
    std::erase(lane->second, &set);
    if (lane->second.empty())
      lanes_.erase(lane);
  }
  for (auto& block : set.blocks) {
    --block->holders;
    block->wanted -= set.wanted ? 1 : 0;
    release(*block, freed);
  }
  set.blocks.clear();
}

/// Gives up the slot and the memory that are not needed.
void offload_store::release(saved_block& block, leftovers& freed) {
  if (block.moving)
    return; // `moved` calls this again
  if (block.holders == 0) {
    free_slot(block);
    freed.lent.push_back(std::move(block.back));
    freed.points.push_back(std::move(block.ready));
  }
  if (block.holders == 0 || (block.slot && block.wanted == 0))
    freed.memory.push_back(std::exchange(block.memory, {}));
}

void offload_store::free_slot(saved_block& block) {
  if (auto slot = std::exchange(block.slot, std::nullopt))
    slots_.give_back(*slot);
}

/// @param first whether it is read before all others
void offload_store::want(saved_set& set, bool first) {
  if (!std::exchange(set.wanted, true))
    for (auto& block : set.blocks)
      ++block->wanted;
  for (auto& block : set.blocks)
    if (!block->memory && !block->moving)
      reads_.insert(first ? reads_.begin() : reads_.end(), block);
  work_.notify_one();
}

/// @returns the one that backward comes to next; null: nobody knows
offload_store::saved_set* offload_store::next_set() const {
  for (auto id : order_)
    if (auto lane = lanes_.find(id); lane != lanes_.end())
      return lane->second.back();
  return nullptr;
}

/// Reads the next `horizon` sets.
void offload_store::look_ahead() {
  auto left = options_.horizon;
  for (auto id : order_) {
    auto lane = lanes_.find(id);
    if (lane == lanes_.end())
      continue;
    auto& sets = lane->second;
    for (auto set = sets.rbegin(); set != sets.rend(); ++set) {
      if (left-- == 0)
        return;
      if (!(*set)->wanted)
        want(**set, false);
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

/// Looks at the device meanwhile: one that has failed tells nobody.
/// @returns whether `over` says so in time
bool offload_store::wait_for(guard& held, clock::time_point until,
                             const std::function<bool()>& over) {
  constexpr std::chrono::seconds between_looks{1};
  while (!done_.wait_until(held, std::min(until, clock::now() + between_looks),
                           over)) {
    if (clock::now() >= until)
      return false;
    if (!options_.device)
      continue;
    held.unlock();
    auto why = options_.device->failed();
    held.lock();
    if (why)
      throw error{error_code::transport,
                  "activations of " + options_.device->device().str()
                    + " did not get to the file: " + *why};
  }
  return true;
}

void offload_store::await(guard& held, const char* what,
                          const std::function<bool()>& done) {
  if (done())
    return;
  auto begin = std::chrono::steady_clock::now();
  auto in_time = wait_for(held, begin + options_.patience,
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
  while (!stopping_) {
    drop_copied(held);
    if (stopping_)
      return;
    if (auto needed = next_read())
      read(held, *needed);
    else if (auto given = next_write())
      write(held, *given);
    else
      work_.wait(held);
  }
}

/// Frees memory of the device whose copies are done.
void offload_store::drop_copied(guard& held) {
  for (;;) {
    leftovers freed;
    while (!leaving_.empty() && leaving_.front()->is_there()) {
      auto& block = *leaving_.front();
      freed.lent.push_back(std::move(block.from));
      freed.points.push_back(std::move(block.ready));
      leaving_.pop_front();
    }
    if (freed.lent.empty())
      return;
    held.unlock();
    freed = {};
    held.lock();
  }
}

offload_store::block_ptr offload_store::next_read() {
  while (!reads_.empty()) {
    auto block = std::move(reads_.front());
    reads_.pop_front();
    if (block->slot && !block->memory && block->wanted > 0)
      return block;
  }
  return nullptr;
}

offload_store::block_ptr offload_store::next_write() {
  while (!writes_.empty()) {
    for (auto& block : writes_.front()->blocks)
      if (!block->slot && !block->stays && block->wanted == 0)
        return block->is_there() ? block : nullptr;
    writes_.pop_front();
    done_.notify_all();
  }
  return nullptr;
}

/// Ends a write or read, and frees what it kept.
void offload_store::moved(guard& held, saved_block& block,
                          c10::Storage memory) {
  leftovers freed;
  freed.memory.push_back(std::move(memory));
  block.moving = false;
  release(block, freed);
  done_.notify_all();
  held.unlock();
  free_pages(freed.memory);
  freed = {};
  held.lock();
}

/// Allocates memory before it reads, which may fail.
void offload_store::read(guard& held, saved_block& block) {
  auto from = block.slot->offset;
  block.moving = true;
  held.unlock();
  c10::Storage memory;
  failure why;
  try {
    memory = block.room(options_.device.get());
    auto* to = static_cast<char*>(memory.mutable_data()) + block.gap();
    if (auto error = file_->read(to, block.bytes, from))
      why = failed("read activations back from", error);
  } catch (const c10::Error& e) {
    why = {error_code::user_code, no_rank, {}, e.what_without_backtrace()};
  }
  held.lock();
  if (why) {
    block.why = std::move(why);
  } else {
    counts_.read += block.bytes;
    block.memory = std::move(memory);
    block.offset = block.gap();
  }
  moved(held, block, {});
}

void offload_store::write(guard& held, saved_block& block) {
  block.moving = true;
  auto memory = block.memory;
  auto slot = slots_.take(block.bytes);
  auto why = 0;
  if (!slot) {
    why = full_ ? ENOSPC : make_room(held, block.bytes);
    if (why == 0) // only this thread takes slots
      slot = slots_.take(block.bytes);
  }
  if (slot) {
    held.unlock();
    auto* begin = static_cast<const char*>(memory.data()) + block.offset;
    why = file_->write(begin, block.bytes, slot->offset);
    held.lock();
  }
  if (why != 0) {
    if (slot)
      slots_.give_back(*slot);
    refuse(held, block, why);
  } else {
    block.slot = slot;
    counts_.written += block.bytes;
    counts_.peak_bytes = std::max(counts_.peak_bytes, slots_.in_use());
  }
  moved(held, block, std::move(memory));
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
void offload_store::refuse(guard& held, saved_block& block, int why) {
  block.stays = true;
  if (!is_lack_of_room(why)) {
    block.why = failed("write activations to", why);
    return;
  }
  full_ = true;
  counts_.stayed += block.bytes;
  if (!options_.warn || std::exchange(warned_, true))
    return;
  auto text = fmt::format(
    "no room in '{}' for more activations ({}; {} MB are in the file, {} bytes "
    "more were needed): they stay in memory. Free some space, or name another "
    "folder in smp.offload_dir",
    options_.dir, std::strerror(why), slots_.in_use() / 1'000'000, block.bytes);
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
