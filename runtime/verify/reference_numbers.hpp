#pragma once

// The random numbers of a run in one process: each call of a module has a
// stream of its own (R23, docs/execution.md). Derived by hooks alone, apart
// from what does the same in a pipeline (R36).

#include "runtime/base/random_stream.hpp"
#include "runtime/intercept/call_observer.hpp"

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace smp {

/// Swaps random streams at the calls that it hears of, and lets another
/// observer hear of them.
class reference_numbers final : public call_observer {
public:
  using module_names = std::unordered_map<const void*, std::string>;

  /// @param names the first paths of the modules by their identity; a call of
  /// any other module belongs to its caller
  explicit reference_numbers(module_names names) : names_(std::move(names)) {
    // nop
  }

  ~reference_numbers() override {
    finish();
  }

  /// The body of a microbatch begins.
  /// @param seed that of the microbatch
  void start(uint64_t seed, call_observer* next);

  /// Its backward is over: the generator is what it was.
  void finish();

  // -- call_observer ----------------------------------------------------------

  void begin(const void* object,
             std::span<const at::Tensor> arguments) override;

  void end(const void* object, std::span<const at::Tensor> results) override;

  void fail(const void* object) override;

  void loss(std::span<const at::Tensor> inputs, const at::Tensor& x) override;

  void take_back() override;

private:
  /// A call, or the body.
  struct entry {
    const void* object = nullptr;
    uint64_t path = 0;
    /// Calls of modules from here, until now.
    std::map<std::string, uint32_t> counts;
    /// By number of a node of autograd: calls that it repeated from here.
    std::map<std::pair<uint64_t, std::string>, uint32_t> repeats;
    /// Nodes of autograd that it made; `end` is 0 while it goes on.
    uint64_t begin = 0, end = 0;
    /// Calls that were made, with the number of the next node.
    std::vector<std::pair<std::string, uint64_t>> made;
  };

  void leave(const void* object);
  uint64_t path_of_next(const std::string& module);
  uint64_t path_of_repeat(const std::string& module, uint64_t made_at);

  module_names names_;
  uint64_t seed_ = 0;
  call_observer* next_ = nullptr;
  std::deque<entry> entries_; // of the microbatch, those that are over too
  /// Those that go on, each with the stream that it interrupted, the node in
  /// which it was entered, and how often in a row.
  struct open_entry {
    entry* what = nullptr;
    random_stream before;
    const void* node = nullptr;
    uint32_t again = 0;
  };
  std::vector<open_entry> open_;
};

} // namespace smp
