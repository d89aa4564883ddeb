#pragma once

// What the code of a rank may know about the place where it runs: who it is,
// and where the stores are that all calls share. Everything in runtime/ may
// include this; what a pointer leads to is declared by the folder it belongs
// to, so a file sees only what it includes.

#include "transport/ids.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace smp {

class call_observer;
class collectives;
class exchange;
class map_changes;
class microbatch_sequencer;
class model_map;
class module_runner;
class object_store;
class offload_store;
class placeholder_source;
class promise_book;
class rank_board;
class rank_layout;
class record_book;
class remote_parameters;
class saved_calls;
class script_code;
class session;
struct session_config;
class tensor_group;

/// The distributed model of a session, as its calls see it. Dies with the
/// model.
struct model_context {
  /// Which module and tensor lives where.
  const model_map* map = nullptr;
  /// What calls may change of it.
  map_changes* changes = nullptr;
  /// Values of what other ranks own.
  placeholder_source* placeholders = nullptr;
  remote_parameters* parameters = nullptr;
  /// What is known of calls that nobody waits for.
  promise_book* promises = nullptr;
  /// Runs what other ranks ask of the modules of this one.
  module_runner* modules = nullptr;
  /// What the code of a TorchScript model does; null for torch::nn, and before
  /// the code was rewritten.
  const script_code* script = nullptr;
};

/// What is counted while a step runs.
struct step_counters {
  std::atomic<uint64_t> step = 0; // the one that runs or ran last
  /// Steps of the user: one that is run again has another `step`, but draws the
  /// same random numbers (R23).
  std::atomic<uint64_t> drawn_step = 0;
  std::atomic<uint64_t> microbatches = 0;
  std::atomic<uint64_t> executing_ns = 0;
  std::atomic<uint64_t> requests = 0;
  std::atomic<uint64_t> waits = 0;
};

class rank_context : public std::enable_shared_from_this<rank_context> {
public:
  rank_context() = default;
  rank_context(const rank_context&) = delete;
  rank_context& operator=(const rank_context&) = delete;

  rank_id self() const noexcept {
    return self_;
  }

  uint64_t pp_rank() const noexcept {
    return pp_rank_;
  }

  /// Ranks of the pipeline group by pp_rank.
  const std::vector<rank_id>& pipeline() const noexcept {
    return pipeline_;
  }

  const session_config& config() const noexcept {
    return *config_;
  }

  const rank_layout& layout() const noexcept {
    return *layout_;
  }

  smp::exchange& exchange() const noexcept {
    return *exchange_;
  }

  /// Sums and moves of tensors between the ranks of a group.
  smp::collectives& collectives() const noexcept {
    return *collectives_;
  }

  /// The ranks that share modules with this one; null: there are none.
  tensor_group* tensor_peers() const noexcept {
    return tensor_peers_;
  }

  object_store& objects() const noexcept {
    return *objects_;
  }

  /// What backward needs of the calls that this rank ran.
  saved_calls& calls() const noexcept {
    return *calls_;
  }

  /// Where the arguments of checkpointed calls are until backward needs them
  /// (R57); null: in memory.
  offload_store* offload() const noexcept {
    return offload_;
  }

  /// Records steps and replays them (R33).
  record_book& records() const noexcept {
    return *records_;
  }

  /// Keeps the order of microbatches in modules that change state (R19).
  microbatch_sequencer& sequencer() const noexcept {
    return *sequencer_;
  }

  rank_board& board() const noexcept {
    return *board_;
  }

  step_counters& counters() const noexcept {
    return counters_;
  }

  /// The step that runs or ran last.
  step_id step() const noexcept {
    return step_id{counters_.step};
  }

  /// The same as part of the seeds of random numbers (R23).
  uint64_t drawn_step() const noexcept {
    return counters_.drawn_step;
  }

  /// The one distributed model of the session, or null.
  const std::shared_ptr<model_context>& model() const noexcept {
    return model_;
  }

  /// Hears of every call that this rank runs; usually null.
  call_observer* observer() const noexcept {
    return observer_;
  }

  /// What the user holds of this rank, or null.
  session* owner() const noexcept {
    return owner_;
  }

  /// @returns the rank whose code the calling thread runs, or null.
  static const rank_context* current() noexcept;

  /// @returns the model of the calling thread's rank, or null.
  static std::shared_ptr<model_context> current_model() noexcept;

  /// Makes `x` the rank of the calling thread; null for none.
  static void set_current(const rank_context* x) noexcept;

protected:
  ~rank_context() = default;

  rank_id self_;
  uint64_t pp_rank_ = 0;
  std::vector<rank_id> pipeline_;
  const session_config* config_ = nullptr;
  const rank_layout* layout_ = nullptr;
  smp::exchange* exchange_ = nullptr;
  smp::collectives* collectives_ = nullptr;
  tensor_group* tensor_peers_ = nullptr;
  object_store* objects_ = nullptr;
  saved_calls* calls_ = nullptr;
  offload_store* offload_ = nullptr;
  record_book* records_ = nullptr;
  microbatch_sequencer* sequencer_ = nullptr;
  rank_board* board_ = nullptr;
  std::shared_ptr<model_context> model_;
  std::atomic<call_observer*> observer_ = nullptr;
  session* owner_ = nullptr;
  mutable step_counters counters_;
};

} // namespace smp
