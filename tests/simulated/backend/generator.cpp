#include "tests/simulated/backend/generator.hpp"

#include "tests/simulated/backend/sim_device.hpp"
#include "tests/simulated/driver/options.hpp"
#include "tests/simulated/driver/streams.hpp"

#include <ATen/core/TensorBase.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <vector>

namespace smp::sim {

sim_generator::sim_generator(c10::DeviceIndex device)
  : c10::GeneratorImpl(c10::Device{sim_type, device},
                       c10::DispatchKeySet{c10::DispatchKey::PrivateUse1}) {
  // nop
}

c10::DeviceType sim_generator::device_type() {
  return sim_type;
}

void sim_generator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

void sim_generator::set_offset(uint64_t offset) {
  TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
  offset_ = offset;
}

uint64_t sim_generator::get_offset() const {
  return offset_;
}

uint64_t sim_generator::current_seed() const {
  return seed_;
}

uint64_t sim_generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

c10::intrusive_ptr<c10::TensorImpl> sim_generator::get_state() const {
  auto state = at::empty({2 * sizeof(uint64_t)}, at::kByte);
  auto* bytes = state.mutable_data_ptr<uint8_t>();
  std::memcpy(bytes, &seed_, sizeof seed_);
  std::memcpy(bytes + sizeof seed_, &offset_, sizeof offset_);
  return state.getIntrusivePtr();
}

void sim_generator::set_state(const c10::TensorImpl& state) {
  at::detail::check_rng_state(state);
  TORCH_CHECK(state.numel() == 2 * sizeof(uint64_t),
              "the state of another kind of generator");
  const auto* bytes = static_cast<const uint8_t*>(state.data());
  std::memcpy(&seed_, bytes, sizeof seed_);
  std::memcpy(&offset_, bytes + sizeof seed_, sizeof offset_);
}

uint64_t sim_generator::next_seed() {
  // (The finalizer of splitmix64.)
  auto x = seed_ + (offset_ / 4 + 1) * 0x9e3779b97f4a7c15;
  offset_ += 4;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

sim_generator* sim_generator::clone_impl() const {
  auto* copy = new sim_generator{device().index()};
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

namespace {

std::vector<at::Generator> generators_of_devices() {
  std::vector<at::Generator> result;
  for (auto device = 0; device < config().devices; ++device)
    result.push_back(at::make_generator<sim_generator>(to_index(device)));
  return result;
}

c10::DeviceIndex or_current(c10::DeviceIndex device) {
  return device < 0 ? to_index(current_device()) : device;
}

} // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* const all = new std::vector<at::Generator>{
    generators_of_devices()};
  return all->at(static_cast<size_t>(or_current(device)));
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<sim_generator>(or_current(device));
}

} // namespace smp::sim
