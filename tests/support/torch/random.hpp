#pragma once

// The random streams of R23 (docs/internals/rules.md) in one process, from its
// words alone: no line of runtime/ derives a number here (R36).

#include "runtime/intercept/call_observer.hpp"

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace smp::test {

/// The seed of a microbatch's step body.
uint64_t body_seed(uint64_t seed, uint64_t step, uint64_t dp_rank,
                   uint64_t microbatch);

/// A call: a module's first name, and how often its caller called it before.
using called = std::pair<std::string, uint64_t>;

/// The seed of a call's stream.
/// @param chain from what the body called to the call itself
uint64_t seed_of_call(uint64_t body, const std::vector<called>& chain);

/// Makes LibTorch's generator draw from a stream of 64 bits.
void seed_generator(uint64_t seed);

/// Draws of a microbatch that runs in one process: where a plain model says
/// that a module begins and ends, the streams change.
class one_process_numbers final : public call_observer {
public:
  one_process_numbers();
  ~one_process_numbers() override;

  /// Of the modules that are told by object.
  void name(const torch::nn::Module& root);
  void name(const void* object, std::string x) {
    names_.emplace(object, std::move(x));
  }

  /// A microbatch begins.
  void start(uint64_t seed, uint64_t step, uint64_t microbatch);

  void enter(const std::string& module);
  void leave();

  void begin(const void* object, std::span<const at::Tensor>) override;
  void end(const void* object, std::span<const at::Tensor>) override;
  void fail(const void*) override {
    // nop
  }
  void body_done(std::span<const at::Tensor>,
                 std::span<const at::Tensor>) override {
    // nop
  }
  void take_back() override {
    // nop
  }

private:
  struct open {
    std::string module;
    const void* object = nullptr;
    std::map<std::string, uint64_t> counts;
    at::Tensor before; // state of the generator
    std::vector<called> chain;
    int again = 0;
  };

  std::map<const void*, std::string> names_;
  at::Generator generator_;
  at::Tensor outside_;
  uint64_t body_ = 0;
  std::vector<open> open_;
};

/// A call of a module, told by its name.
class named_call {
public:
  explicit named_call(const std::string& module)
    : to_(dynamic_cast<one_process_numbers*>(call_observer::current())) {
    if (to_)
      to_->enter(module);
  }

  ~named_call() {
    if (to_)
      to_->leave();
  }

  named_call(const named_call&) = delete;
  named_call& operator=(const named_call&) = delete;

private:
  one_process_numbers* to_;
};

/// The same, told by its identity.
class told_call {
public:
  explicit told_call(const void* object)
    : to_(call_observer::current()), object_(object) {
    if (to_)
      to_->begin(object_, {});
  }

  ~told_call() {
    if (to_)
      to_->end(object_, {});
  }

  told_call(const told_call&) = delete;
  told_call& operator=(const told_call&) = delete;

private:
  call_observer* to_;
  const void* object_;
};

/// A module that tells an observer of its calls, and is the plain one
/// otherwise.
template <class Impl>
class told : public Impl {
public:
  using Impl::Impl;

  template <class... Ts>
  auto forward(Ts&&... xs)
    -> decltype(std::declval<Impl&>().forward(std::forward<Ts>(xs)...)) {
    told_call call{
      dynamic_cast<const void*>(static_cast<torch::nn::Module*>(this))};
    return Impl::forward(std::forward<Ts>(xs)...);
  }
};

/// Holder of it: what stands for `smp::submodule` in a plain model whose
/// modules draw.
template <class H>
class noted : public torch::nn::ModuleHolder<told<typename H::ContainedType>> {
public:
  using base = torch::nn::ModuleHolder<told<typename H::ContainedType>>;
  using base::base;

  template <class... Ts>
  auto operator()(Ts&&... xs)
    -> decltype(std::declval<told<typename H::ContainedType>&>().forward(
      std::forward<Ts>(xs)...)) {
    return this->impl_->forward(std::forward<Ts>(xs)...);
  }
};

} // namespace smp::test
