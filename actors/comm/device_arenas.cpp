#include "actors/comm/device_arenas.hpp"

#include "transport/bytes.hpp"
#include "transport/error.hpp"

#include <utility>

namespace smp {

namespace {

/// In place of the bytes of a tensor.
struct loan {
  uint64_t number = 0;
  uint64_t offset = 0; // in the arena
  uint64_t size = 0;
};

template <class Inspector>
bool inspect(Inspector& f, loan& x) {
  return f.object(x).fields(f.field("number", x.number),
                            f.field("offset", x.offset),
                            f.field("size", x.size));
}

[[noreturn]] void refuse(rank_id from, const std::string& what) {
  throw error{failure{error_code::protocol, from, {}, what}};
}

shared_memory shared_by(device_ops* x, uint64_t size) {
  return x != nullptr && size > 0 ? x->share(size) : shared_memory{};
}

} // namespace

device_arenas::device_arenas(std::shared_ptr<device_ops> devices, uint64_t size)
  : devices_(std::move(devices)), own_(shared_by(devices_.get(), size)) {
  if (own_.bytes)
    blocks_.emplace(own_.bytes, own_.size);
}

std::vector<bool> device_arenas::open(const std::vector<std::string>& handles) {
  std::vector<bool> result;
  for (auto& x : handles) {
    others_.push_back(devices_ && !x.empty() ? devices_->open(x)
                                             : shared_memory{});
    result.push_back(others_.back().bytes != nullptr);
  }
  return result;
}

void device_arenas::lend(rank_id to, tensor_ref& x) {
  loan what;
  what.offset = static_cast<uint64_t>(static_cast<const std::byte*>(x.data)
                                      - own_.bytes.get());
  what.size = x.nbytes;
  {
    std::lock_guard guard{mutex_};
    what.number = next_++;
    lent_.emplace(std::pair{to, what.number}, std::move(x.owner));
  }
  byte_writer out;
  out.put(what);
  auto bytes = std::make_shared<std::vector<std::byte>>(out.take());
  x.home = std::exchange(x.device, {});
  x.data = bytes->data();
  x.nbytes = bytes->size();
  x.owner = std::move(bytes);
  x.lent = true;
}

void device_arenas::take_back(rank_id by, const message& x) {
  byte_reader in{x.body.bytes, "returned blocks"};
  auto n = in.count(sizeof(uint64_t), "numbers");
  std::vector<block> freed; // after the lock
  std::lock_guard guard{mutex_};
  for (uint32_t i = 0; i < n; ++i) {
    auto found = lent_.extract({by, in.u64("number")});
    if (found.empty())
      refuse(by, "returned a block that it was not lent");
    freed.push_back(std::move(found.mapped()));
  }
}

void device_arenas::lost(rank_id x) {
  std::lock_guard guard{mutex_};
  std::erase_if(lent_, [&](auto& y) { return y.first.first == x; });
}

device_arenas::borrowed device_arenas::find(rank_id from,
                                            const tensor_ref& x) const {
  byte_reader in{{static_cast<const std::byte*>(x.data), x.nbytes},
                 "tensor on a device"};
  auto what = in.get<loan>("place");
  auto known = from.value < others_.size() ? others_[from.value]
                                           : shared_memory{};
  if (!known.bytes)
    refuse(from, "lends a tensor of an arena that is not open here");
  if (what.size > known.size || what.offset > known.size - what.size)
    refuse(from, "lends a tensor that ends after its arena");
  borrowed result{x, what.number};
  auto& t = result.tensor;
  t.data = known.bytes.get() + what.offset;
  t.nbytes = what.size;
  t.owner = known.bytes;
  t.device = known.device;
  t.lent = false;
  return result;
}

message device_arenas::give_back(const std::vector<uint64_t>& numbers) {
  byte_writer out;
  out.count(numbers.size());
  for (auto x : numbers)
    out.u64(x);
  return {message_kind::returned, {out.take(), {}}};
}

} // namespace smp
