#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace smp {

class map_changes;
struct invocation;
class packer;
class unpacker;
struct value;

/// What a module keeps in attributes that are neither parameters nor buffers,
/// at one time.
class kept_attributes {
public:
  virtual ~kept_attributes() = default;

  /// @returns what is different now: "sets its attribute 'calls'"; empty if
  /// nothing is, or if the walk knows it from the code
  virtual std::string changes() const = 0;

  /// Tells whether all of them could be copied.
  virtual bool complete() const {
    return true;
  }

  /// Gives all attributes the values that they had; may be called again.
  /// @param changes where parameters and buffers are, which follow; null: this
  /// undoes a trace, which no part of smp has followed
  virtual void put_back(map_changes* changes) = 0;
};

/// What smp asks of a module, whether it is one of torch::nn, of TorchScript or
/// of Python. Any thread may call; the functions take the locks of that
/// language.
class module_facts {
public:
  virtual ~module_facts() = default;

  virtual bool is_training() const noexcept = 0;

  /// Sets training or evaluation mode of it and of all below it.
  virtual void train(bool on) = 0;

  /// Why it may do something else than its class: "its forward was replaced";
  /// empty if it does not.
  virtual std::string differs_from_class() const = 0;

  /// An attribute that is an option of its class, such as "padding_idx"; none
  /// if there is no such attribute, or if it is no number, flag or list of
  /// integers.
  virtual c10::IValue option(const char* name) const = 0;

  /// @returns null: its code changes none, as far as smp can tell
  virtual std::unique_ptr<kept_attributes> keep_attributes() const = 0;
};

/// A module of another language, as a torch::nn::Module stands for it. What it
/// consists of, and what LibTorch's classes would say, it says itself. Found by
/// `dynamic_cast`.
class foreign_module : public module_facts {
public:
  struct contents {
    std::vector<std::pair<std::string, at::Tensor>> parameters;
    std::vector<std::pair<std::string, at::Tensor>> buffers;
    std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>
      children;
  };

  /// @returns what it has directly, in the order of registration
  virtual contents find() = 0;

  /// See `walked_module::container`.
  virtual bool is_container() const = 0;

  /// See `walked_module::sequential`.
  virtual bool is_sequential() const = 0;

  /// Of a sequential one: see `smp::run_range`
  /// (runtime/intercept/sequential.hpp).
  virtual invocation run_range(uint32_t first, uint32_t last, bool served,
                               unpacker& in, const std::vector<value>& args,
                               packer& out)
    = 0;
};

} // namespace smp
