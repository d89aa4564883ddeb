#include "runtime/base/random_stream.hpp"

#include "runtime/base/fault.hpp"
#include "runtime/base/fnv_hash.hpp"
#include "runtime/base/rank_context.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <atomic>
#include <mutex>
#include <utility>

namespace smp {

// -- seeds --------------------------------------------------------------------

namespace {

constexpr uint64_t golden = 0x9e3779b97f4a7c15;

uint64_t finalise(uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t splitmix64(uint64_t x) noexcept {
  return finalise(x + golden);
}

} // namespace

uint64_t microbatch_seed(uint64_t seed, uint64_t step, uint64_t data_rank,
                         uint64_t microbatch) noexcept {
  // Mix the seed alone first: seed 1, step 2 is not seed 2, step 1.
  auto result = splitmix64(seed);
  for (auto x : {step, data_rank, microbatch})
    result = splitmix64(result + x);
  return result;
}

uint64_t path_of_module(std::string_view name) noexcept {
  fnv_hash hash;
  hash.add(name);
  return hash.get() != 0 ? hash.get() : 1;
}

uint64_t path_of_call(uint64_t caller, uint64_t module,
                      uint64_t number) noexcept {
  return splitmix64(splitmix64(caller + module) + number);
}

uint64_t call_seed(uint64_t microbatch, uint64_t path) noexcept {
  return splitmix64(microbatch + path);
}

// -- the state of LibTorch's generator ----------------------------------------
// LibTorch's accessors copy 2.5 KB two or three times. Explicit instantiations
// may name private members: a call then pays only for copies that it needs.

namespace {

template <auto Member>
struct engine_access {
  friend auto engine_of(at::CPUGeneratorImpl& x) -> at::mt19937& {
    return x.*Member;
  }
};

auto engine_of(at::CPUGeneratorImpl& x) -> at::mt19937&;

template struct engine_access<&at::CPUGeneratorImpl::engine_>;

template <auto Member>
struct data_access {
  friend auto data_of(at::mt19937& x) -> at::mt19937_data_pod& {
    return x.*Member;
  }
};

auto data_of(at::mt19937& x) -> at::mt19937_data_pod&;

template struct data_access<&at::mt19937::data_>;

at::CPUGeneratorImpl& default_generator() {
  return *at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
}

/// Draws nothing yet: the first draw mixes the whole state.
void fill(at::mt19937_data_pod& x, uint64_t seed) noexcept {
  x.seed_ = seed;
  x.seeded_ = true;
  x.left_ = 1;
  x.next_ = 0;
  for (size_t i = 0; i < x.state_.size(); i += 2) {
    auto bits = finalise(seed + golden * (i / 2 + 1));
    x.state_[i] = static_cast<uint32_t>(bits);
    x.state_[i + 1] = static_cast<uint32_t>(bits >> 32);
  }
}

} // namespace

// -- generators of a language -------------------------------------------------

namespace {

std::atomic<language_generators*> watched = nullptr;
std::atomic<language_generators*> included = nullptr;

} // namespace

language_generators* watched_generators() noexcept {
  return watched;
}

void watch_generators(language_generators* x) noexcept {
  watched = x;
}

void random_stream::include(language_generators* x) noexcept {
  included = x;
}

// Never called under the mutex of LibTorch's generator: code that holds the
// language's lock may wait for that.

// -- streams ------------------------------------------------------------------

random_stream::counted random_stream::of_device() {
  auto device = rank_context::current_device();
  if (device.is_cpu())
    return {};
  auto generator = at::globalContext().defaultGenerator(device);
  std::lock_guard guard{generator.mutex()};
  return {generator.current_seed(), generator.get_offset()};
}

void random_stream::set_device(counted x) {
  auto device = rank_context::current_device();
  if (device.is_cpu() || SMP_FAULT("random-numbers-of-host"))
    return;
  auto generator = at::globalContext().defaultGenerator(device);
  std::lock_guard guard{generator.mutex()};
  generator.set_current_seed(x.seed);
  generator.set_offset(x.offset);
}

random_stream::random_stream(uint64_t seed)
  : engine_(at::mt19937{seed}.data()), device_{seed, 0} {
  // nop
}

random_stream random_stream::derived(uint64_t seed) noexcept {
  random_stream result{empty{}};
  fill(result.engine_, seed);
  result.device_ = {seed, 0};
  return result;
}

random_stream random_stream::of_default() {
  auto& gen = default_generator();
  std::unique_lock guard{gen.mutex_};
  random_stream result{empty{}};
  result.engine_ = data_of(engine_of(gen));
  result.next_float_normal_ = gen.next_float_normal_sample();
  result.next_double_normal_ = gen.next_double_normal_sample();
  result.device_ = of_device();
  guard.unlock();
  if (auto* x = included.load())
    result.included_ = x->now();
  return result;
}

void random_stream::swap_with_default() {
  if (auto* x = included.load()) {
    auto now = x->now();
    if (included_)
      x->put_back(included_);
    else
      x->seed(engine_.seed_);
    included_ = std::move(now);
  }
  auto& gen = default_generator();
  std::unique_lock guard{gen.mutex_};
  std::swap(engine_, data_of(engine_of(gen)));
  auto next_float = gen.next_float_normal_sample();
  gen.set_next_float_normal_sample(next_float_normal_);
  next_float_normal_ = next_float;
  auto next_double = gen.next_double_normal_sample();
  gen.set_next_double_normal_sample(next_double_normal_);
  next_double_normal_ = next_double;
  auto device = of_device();
  set_device(std::exchange(device_, device));
}

void random_stream::replace_default(uint64_t seed) {
  if (auto* x = included.load()) {
    included_ = x->now();
    x->seed(seed);
  }
  auto& gen = default_generator();
  std::unique_lock guard{gen.mutex_};
  auto& engine = data_of(engine_of(gen));
  engine_ = engine;
  fill(engine, seed);
  next_float_normal_ = gen.next_float_normal_sample();
  gen.set_next_float_normal_sample(std::nullopt);
  next_double_normal_ = gen.next_double_normal_sample();
  gen.set_next_double_normal_sample(std::nullopt);
  device_ = of_device();
  set_device({seed, 0});
}

void random_stream::restore_default() const {
  if (auto* x = included.load(); x != nullptr && included_)
    x->put_back(included_);
  auto& gen = default_generator();
  std::unique_lock guard{gen.mutex_};
  data_of(engine_of(gen)) = engine_;
  gen.set_next_float_normal_sample(next_float_normal_);
  gen.set_next_double_normal_sample(next_double_normal_);
  set_device(device_);
}

bool random_stream::operator==(const random_stream& other) const noexcept {
  auto& x = engine_;
  auto& y = other.engine_;
  return x.left_ == y.left_ && x.next_ == y.next_ && x.seed_ == y.seed_
         && x.seeded_ == y.seeded_
         && next_float_normal_ == other.next_float_normal_
         && next_double_normal_ == other.next_double_normal_
         && x.state_ == y.state_
         && (rank_context::current_device().is_cpu()
             || device_ == other.device_);
}

} // namespace smp
