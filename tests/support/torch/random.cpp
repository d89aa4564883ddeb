#include "tests/support/torch/random.hpp"

#include <ATen/CPUGeneratorImpl.h>

namespace smp::test {

namespace {

uint64_t scrambled(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t mixed(uint64_t x) {
  return scrambled(x + 0x9e3779b97f4a7c15);
}

/// FNV-1a of the characters and a final 0.
uint64_t number_of(const std::string& name) {
  uint64_t result = 14695981039346656037ull;
  for (size_t i = 0; i <= name.size(); ++i)
    result = (result ^ static_cast<uint8_t>(name.c_str()[i]))
             * 1099511628211ull;
  return result;
}

} // namespace

uint64_t body_seed(uint64_t seed, uint64_t step, uint64_t dp_rank,
                   uint64_t microbatch) {
  return mixed(mixed(mixed(mixed(seed) + step) + dp_rank) + microbatch);
}

uint64_t seed_of_call(uint64_t body, const std::vector<called>& chain) {
  uint64_t path = 0;
  for (auto& [module, number] : chain)
    path = mixed(mixed(path + number_of(module)) + number);
  return mixed(body + path);
}

void seed_generator(uint64_t seed) {
  auto generator = at::detail::getDefaultCPUGenerator();
  auto* cpu = generator.get<at::CPUGeneratorImpl>();
  at::mt19937 engine;
  auto data = engine.data(); // freshly seeded, but for the state
  data.seed_ = seed;
  for (size_t i = 0; i < data.state_.size(); ++i) {
    auto pair = scrambled(seed + 0x9e3779b97f4a7c15 * (i / 2 + 1));
    data.state_[i] = static_cast<uint32_t>(i % 2 == 0 ? pair : pair >> 32);
  }
  engine.set_data(data);
  cpu->set_engine(engine);
  cpu->set_next_float_normal_sample({});
  cpu->set_next_double_normal_sample({});
}

one_process_numbers::one_process_numbers()
  : generator_(at::detail::getDefaultCPUGenerator()),
    outside_(generator_.get_state()) {
  set_current(this);
}

one_process_numbers::~one_process_numbers() {
  set_current(nullptr);
  generator_.set_state(outside_);
}

void one_process_numbers::name(const torch::nn::Module& root) {
  for (auto& x : root.named_modules())
    names_.emplace(dynamic_cast<const void*>(x.value().get()), x.key());
}

void one_process_numbers::start(uint64_t seed, uint64_t step,
                                uint64_t microbatch) {
  body_ = body_seed(seed, step, 0, microbatch);
  generator_.set_current_seed(body_);
  open_.assign(1, {});
}

void one_process_numbers::enter(const std::string& module) {
  auto& from = open_.back();
  open x;
  x.module = module;
  x.chain = from.chain;
  x.chain.emplace_back(module, from.counts[module]++);
  x.before = generator_.get_state();
  seed_generator(seed_of_call(body_, x.chain));
  open_.push_back(std::move(x));
}

void one_process_numbers::leave() {
  generator_.set_state(open_.back().before);
  open_.pop_back();
}

void one_process_numbers::begin(const void* object,
                                std::span<const at::Tensor>) {
  auto i = names_.find(object);
  if (i == names_.end() || open_.empty())
    return;
  // A method that calls another one of its own module.
  if (open_.back().object == object) {
    ++open_.back().again;
    return;
  }
  enter(i->second);
  open_.back().object = object;
}

void one_process_numbers::end(const void* object, std::span<const at::Tensor>) {
  if (open_.empty() || open_.back().object != object)
    return;
  if (open_.back().again > 0)
    --open_.back().again;
  else
    leave();
}

} // namespace smp::test
