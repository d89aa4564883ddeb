#pragma once

// The random numbers of a run in one process: each call of a module has its own
// stream (R23). Derived from hooks alone, independently of
// the code that does the same in a pipeline (R36).

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

/// Swaps random streams at the calls that it observes, and forwards these calls
/// to another observer.
class reference_numbers final : public call_observer {
public:
  using module_names = std::unordered_map<const void*, std::string>;

  /// @param names the first path of each module by identity; a call of any
  /// other module counts as part of its caller
  explicit reference_numbers(module_names names) : names_(std::move(names)) {
    // nop
  }

  ~reference_numbers() override {
    finish();
  }

  /// Begins the body of a microbatch.
  /// @param seed that of the microbatch
  void start(uint64_t seed, call_observer* next);

  /// Ends the microbatch after its backward: restores the generator.
  void finish();

  // -- call_observer ----------------------------------------------------------

  void begin(const void* object,
             std::span<const at::Tensor> arguments) override;

  void end(const void* object, std::span<const at::Tensor> results) override;

  void fail(const void* object) override;

  void body_done(std::span<const at::Tensor> inputs,
                 std::span<const at::Tensor> results) override;

  void take_back() override;

private:
  /// A call, or the body.
  struct entry {
    const void* object = nullptr;
    uint64_t path = 0;
    /// Calls made directly from here so far, by module.
    std::map<std::string, uint32_t> counts;
    /// By autograd node number and module: calls that it repeated from here.
    std::map<std::pair<uint64_t, std::string>, uint32_t> repeats;
    /// Autograd nodes made in it; `end` is 0 while it runs.
    uint64_t begin = 0, end = 0;
    /// Calls made from here, each with the number of the next autograd node.
    std::vector<std::pair<std::string, uint64_t>> made;
  };

  void leave(const void* object);
  uint64_t path_of_next(const std::string& module);
  uint64_t path_of_repeat(const std::string& module, uint64_t made_at);

  module_names names_;
  uint64_t seed_ = 0;
  call_observer* next_ = nullptr;
  std::deque<entry> entries_; // of the microbatch, ended ones included
  /// Entries that still run: each with the stream that it interrupted, the
  /// autograd node in which it began, and how often it re-entered itself.
  struct open_entry {
    entry* what = nullptr;
    random_stream before;
    const void* node = nullptr;
    uint32_t again = 0;
  };
  std::vector<open_entry> open_;
};

} // namespace smp
