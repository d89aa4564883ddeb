#pragma once

#include "runtime/base/random_stream.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace torch::autograd {
struct Node;
} // namespace torch::autograd

namespace smp {

/// Stands in for a module in the path of a backward requested by another rank.
inline constexpr uint64_t path_of_backward = 1;

/// Gives each module call that one execution makes its own stream of random
/// numbers (R23): swaps streams in and out of the default generator and numbers
/// calls at the call site. The draws therefore depend neither on where a call
/// runs nor on what runs before it.
///
/// Draws belong to the innermost call. A call that is entered twice in a row,
/// as when one hook runs inside another, counts as one.
class call_streams {
public:
  /// A module, and the number of times it was called from one place.
  using count = std::pair<uint64_t, uint32_t>;

  /// A call site whose calls run elsewhere.
  struct origin {
    uint64_t path = 0;
    /// The nonzero counts of the called modules.
    std::vector<count> counts;
  };

  /// A call that was made. Kept for as long as its autograd nodes may run: the
  /// thread that created a node and the node's number on that thread identify
  /// the call that the node belongs to.
  struct made_call {
    uint64_t path = 0;
    uint64_t caller = 0; // its path
    uint64_t module = 0; // 0: a call of this number was made before
    uint32_t number = 0;
    uint64_t thread = 0;
    uint64_t begin = 0;
    uint64_t end = 0; // one past the last node created in it
  };

  call_streams() = default;
  call_streams(const call_streams&) = delete;
  call_streams& operator=(const call_streams&) = delete;

  // -- life -------------------------------------------------------------------

  /// Starts another microbatch.
  /// @param seed see `microbatch_seed`
  void begin(uint64_t seed);

  /// Leaves all calls.
  void end();

  /// Other executions run until `resume`: the generator returns to its state
  /// before the first call was entered.
  void suspend() {
    swap_with_outside();
  }

  void resume() {
    swap_with_outside();
  }

  // -- calls that run here ----------------------------------------------------

  /// The step body.
  void enter_body();

  /// @param module see `path_of_module`
  void enter(uint64_t module);

  /// Enters a call that was made elsewhere, or earlier.
  void enter_at(uint64_t path, uint64_t module);

  /// Enters a call site elsewhere whose calls run here. Draws nothing itself.
  void enter_origin(origin x);

  /// Leaves the innermost entry.
  void leave();

  /// @returns the running call and the counts of its calls so far, from which
  /// `enter_origin` continues.
  origin here() const;

  /// From now on calls draw different numbers for the same paths.
  /// @param x 0: the numbers of the microbatch
  /// @returns the previous value
  uint64_t draw_others(uint64_t x) noexcept {
    return std::exchange(others_, x);
  }

  /// Runs `f` with the random stream of a call in any microbatch. `f` must not
  /// call modules or wait.
  /// @param seed of the microbatch
  void draw_as(uint64_t seed, uint64_t path,
               const std::function<void()>& f) const;

  /// The running call, and the number of collectives it began before this one.
  std::pair<uint64_t, uint32_t> next_collective() {
    if (depth_ == 0)
      return {0, 0};
    return {top().path, top().collectives++};
  }

  // -- calls that run elsewhere -----------------------------------------------

  /// @returns the path of a call that is made now.
  uint64_t call(uint64_t module);

  /// Makes one call of each of `modules`, in this order.
  origin call_each(const std::vector<uint64_t>& modules);

  // -- backward ---------------------------------------------------------------
  // Code that an autograd node runs may call modules again, as activation
  // checkpointing does. Such a call has the path of the call that it repeats:
  // the first call of the module, from the same call site, that was made after
  // the node was created.

  /// @returns the calls made since `begin`, for a backward.
  std::vector<made_call> take_made();

  /// Begins the backward of these calls.
  void begin_backward(std::vector<made_call> made);

  /// Begins the backward of the calls that were made here.
  void begin_backward() {
    repeating_.reset();
  }

private:
  static constexpr auto nowhere = static_cast<size_t>(-1);

  /// A call that has not returned yet.
  struct frame {
    uint64_t path = 0;
    uint64_t module = 0;        // 0: cannot be entered in a row
    const void* node = nullptr; // autograd node it was entered in
    size_t made = nowhere;      // position in `made_`
    uint32_t again = 0;         // times it was entered in a row
    uint32_t collectives = 0;   // number it began
    bool draws = false;
    random_stream before{random_stream::empty{}}; // if it draws
    std::vector<count> counts;
  };

  frame& top() {
    return frames_[depth_ - 1];
  }

  frame& push(uint64_t path, uint64_t module);
  uint64_t seed_at(uint64_t seed, uint64_t path) const noexcept;

  uint64_t seed_at(uint64_t path) const noexcept {
    return seed_at(seed_, path);
  }

  made_call number(uint64_t module);
  uint32_t calls_of(uint64_t module, uint64_t caller) const;
  std::optional<made_call> repeated(const torch::autograd::Node& node,
                                    uint64_t module);
  void swap_with_outside();

  uint64_t seed_ = 0;
  uint64_t others_ = 0;
  std::vector<frame> frames_; // may exceed `depth_`: frames are reused
  size_t depth_ = 0;
  std::vector<made_call> made_;
  /// The node that last repeated calls, by thread and number, and those calls.
  std::optional<std::pair<uint64_t, uint64_t>> repeating_;
  std::vector<count> repeats_;
};

/// RAII guard: leaves the call when it goes out of scope.
class entered_call {
public:
  explicit entered_call(call_streams& x) : streams_(x) {
    // nop
  }

  ~entered_call() {
    streams_.leave();
  }

  entered_call(const entered_call&) = delete;
  entered_call& operator=(const entered_call&) = delete;

private:
  call_streams& streams_;
};

template <class Inspector>
bool inspect(Inspector& f, call_streams::origin& x) {
  return f.object(x).fields(f.field("path", x.path),
                            f.field("counts", x.counts));
}

} // namespace smp
