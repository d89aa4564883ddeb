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

/// Stands for a module in the path of a backward that another rank asked for.
inline constexpr uint64_t path_of_backward = 1;

/// Gives each call of a module that one execution makes a stream of random
/// numbers of its own (R23): swaps streams in and out of the default generator,
/// and numbers calls where they are made. Where a call runs, and what runs
/// before it, makes no difference.
///
/// Draws belong to the innermost call. A call that is entered twice in a row,
/// as by a hook inside of a hook, is one.
class call_streams {
public:
  /// A module, and how often it was called from one place.
  using count = std::pair<uint64_t, uint32_t>;

  /// A place that makes calls which run elsewhere.
  struct origin {
    uint64_t path = 0;
    /// Those of the called modules that are not 0.
    std::vector<count> counts;
  };

  /// A call that was made. Kept as long as autograd nodes of it may run, which
  /// tell by the thread that made them and their number there where they are
  /// from.
  struct made_call {
    uint64_t path = 0;
    uint64_t caller = 0; // its path
    uint64_t module = 0; // 0: a call of this number was made before
    uint32_t number = 0;
    uint64_t thread = 0;
    uint64_t begin = 0;
    uint64_t end = 0; // behind the last node that was made in it
  };

  call_streams() = default;
  call_streams(const call_streams&) = delete;
  call_streams& operator=(const call_streams&) = delete;

  // -- life -------------------------------------------------------------------

  /// What follows belongs to another microbatch.
  /// @param seed see `microbatch_seed`
  void begin(uint64_t seed);

  /// Leaves all calls.
  void end();

  /// Others run until `resume`: the generator is what it was before the first
  /// call was entered.
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

  /// A call that was made elsewhere, or before.
  void enter_at(uint64_t path, uint64_t module);

  /// A place elsewhere, of which calls run here. Draws nothing itself.
  void enter_origin(origin x);

  /// Leaves what was entered last.
  void leave();

  /// @returns the call that runs and what it called until now: `enter_origin`
  /// goes on from there.
  origin here() const;

  /// Calls draw other numbers from now on, of the same paths.
  /// @param x 0: those of the microbatch
  /// @returns the former one
  uint64_t draw_others(uint64_t x) noexcept {
    return std::exchange(others_, x);
  }

  /// Runs `f` with the stream of a call of any microbatch. It must not call
  /// modules or wait.
  /// @param seed of the microbatch
  void draw_as(uint64_t seed, uint64_t path,
               const std::function<void()>& f) const;

  /// The call that runs, and how many collectives it began before.
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
  // Code that an autograd node runs may call modules again, as checkpointing of
  // activations does. Such a call has the path of the call that it repeats:
  // the first of the module that was made after the node was, from the same
  // place.

  /// @returns what was made since `begin`, for a backward.
  std::vector<made_call> take_made();

  /// What follows is backward of these calls.
  void begin_backward(std::vector<made_call> made);

  /// What follows is backward of the calls that were made here.
  void begin_backward() {
    repeating_.reset();
  }

private:
  static constexpr auto nowhere = static_cast<size_t>(-1);

  /// A call that goes on.
  struct frame {
    uint64_t path = 0;
    uint64_t module = 0;        // 0: none that may be entered in a row
    const void* node = nullptr; // of autograd, in which it was entered
    size_t made = nowhere;      // position in `made_`
    uint32_t again = 0;         // how often it was entered in a row
    uint32_t collectives = 0;   // that it began
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
  std::vector<frame> frames_; // more than `depth_`: they are used again
  size_t depth_ = 0;
  std::vector<made_call> made_;
  /// The node that repeated calls last, by thread and number; the calls.
  std::optional<std::pair<uint64_t, uint64_t>> repeating_;
  std::vector<count> repeats_;
};

/// A call lasts as long as this.
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
