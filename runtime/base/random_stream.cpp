#include "runtime/base/random_stream.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

namespace smp {

namespace {

uint64_t splitmix64(uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

at::CPUGeneratorImpl& default_generator() {
  return *at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
}

} // namespace

uint64_t microbatch_seed(uint64_t seed, uint64_t step, uint64_t dp_rank,
                         uint64_t microbatch) noexcept {
  // Mixed once alone: seed 1 of step 2 is not seed 2 of step 1.
  auto result = splitmix64(seed);
  for (auto x : {step, dp_rank, microbatch})
    result = splitmix64(result + x);
  return result;
}

random_stream::random_stream(uint64_t seed)
  : engine_(at::mt19937{seed}.data()) {
  // nop
}

// Each draw decrements `left` and increments `next`; only a fresh engine, which
// has drawn nothing, differs.
bool random_stream::is_reachable(int left, uint32_t next) noexcept {
  constexpr auto n = static_cast<uint32_t>(at::MERSENNE_STATE_N);
  if (left < 1 || static_cast<uint32_t>(left) > n)
    return false;
  return (left == 1 && next == 0)
         || static_cast<uint32_t>(left) + next == n + 1;
}

random_stream random_stream::of_default() {
  auto& gen = default_generator();
  std::unique_lock guard{gen.mutex_};
  random_stream result;
  result.engine_ = gen.engine().data();
  result.next_float_normal_ = gen.next_float_normal_sample();
  result.next_double_normal_ = gen.next_double_normal_sample();
  return result;
}

void random_stream::swap_with_default() {
  auto& gen = default_generator();
  std::unique_lock guard{gen.mutex_};
  // No engine is default-constructed here: seeding costs more than the swap.
  auto engine = gen.engine();
  auto theirs = engine.data();
  engine.set_data(engine_);
  gen.set_engine(engine);
  engine_ = theirs;
  auto next_float = gen.next_float_normal_sample();
  gen.set_next_float_normal_sample(next_float_normal_);
  next_float_normal_ = next_float;
  auto next_double = gen.next_double_normal_sample();
  gen.set_next_double_normal_sample(next_double_normal_);
  next_double_normal_ = next_double;
}

bool random_stream::operator==(const random_stream& other) const noexcept {
  auto& x = engine_;
  auto& y = other.engine_;
  return x.left_ == y.left_ && x.next_ == y.next_ && x.seed_ == y.seed_
         && x.seeded_ == y.seeded_
         && next_float_normal_ == other.next_float_normal_
         && next_double_normal_ == other.next_double_normal_
         && x.state_ == y.state_;
}

} // namespace smp
