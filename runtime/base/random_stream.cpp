#include "runtime/base/random_stream.hpp"

#include "transport/error.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <bit>
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

/// Whether LibTorch's engine stays within its state with these. Each
/// draw decrements `left` and increments `next`; only a fresh engine, which
/// has drawn nothing, differs.
bool is_reachable(int left, uint32_t next) noexcept {
  constexpr auto n = static_cast<uint32_t>(at::MERSENNE_STATE_N);
  if (left < 1 || static_cast<uint32_t>(left) > n)
    return false;
  return (left == 1 && next == 0)
         || static_cast<uint32_t>(left) + next == n + 1;
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

void random_stream::write(byte_writer& out) const {
  out.u64(engine_.seed_);
  out.u16(static_cast<uint16_t>(engine_.left_));
  out.u16(static_cast<uint16_t>(engine_.next_));
  for (auto x : engine_.state_)
    out.u32(x);
  // All streams have the same length (R33).
  out.boolean(next_float_normal_.has_value());
  out.u32(std::bit_cast<uint32_t>(next_float_normal_.value_or(0)));
  out.boolean(next_double_normal_.has_value());
  out.f64(next_double_normal_.value_or(0));
}

random_stream random_stream::read(byte_reader& in) {
  random_stream result;
  auto& engine = result.engine_;
  engine.seed_ = in.u64("random seed");
  engine.left_ = in.u16("random position");
  engine.next_ = in.u16("random position");
  if (!is_reachable(engine.left_, engine.next_))
    in.fail("random position", "no generator gets there");
  for (auto& x : engine.state_)
    x = in.u32("random state");
  const bool has_float = in.boolean("random normal");
  const auto next_float = std::bit_cast<float>(in.u32("random normal"));
  const bool has_double = in.boolean("random normal");
  const auto next_double = in.f64("random normal");
  if (has_float)
    result.next_float_normal_ = next_float;
  if (has_double)
    result.next_double_normal_ = next_double;
  return result;
}

} // namespace smp
