#pragma once

// What the code of a rank may know about where it runs: its own identity, and
// the stores that all calls share. Everything in runtime/ may include this. The
// folder that owns a type declares it, and this header only forward-declares
// it, so a file sees only what it includes.

#include "transport/ids.hpp"

#include <c10/core/Device.h>

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
class rank_device;
class rank_layout;
class order_book;
class remote_parameters;
class saved_calls;
class script_code;
class session;
struct session_config;
class tensor_group;

/// The distributed model of a session, as its calls see it. Lives as
/// long as the model.
struct model_context {
  /// Which rank owns each module and tensor.
  const model_map* map = nullptr;
  /// The changes that calls may make to the map.
  map_changes* changes = nullptr;
  /// Values of parameters and buffers that other ranks own.
  placeholder_source* placeholders = nullptr;
  remote_parameters* parameters = nullptr;
  /// What is known about calls whose callers do not wait (promises).
  promise_book* promises = nullptr;
  /// Runs the requests of other ranks for modules of this one.
  module_runner* modules = nullptr;
  /// What the code of a TorchScript model does; null for torch::nn, and until
  /// the code is rewritten.
  const script_code* script = nullptr;
};

/// Counters of the running step, and of the session.
struct step_counters {
  std::atomic<uint64_t> step = 0; // the current or last one
  /// The user's step: a step that is run again gets another `step`, but draws
  /// the same random numbers (R23).
  std::atomic<uint64_t> drawn_step = 0;
  std::atomic<uint64_t> microbatches = 0;
  std::atomic<uint64_t> executing_ns = 0;
  std::atomic<uint64_t> requests = 0;
  std::atomic<uint64_t> waits = 0;
  /// Errors of LibTorch in backward phases.
  std::atomic<uint64_t> failed_graphs = 0;
  /// Since the session began: calls of `model.backward`, on pp_rank 0, and of
  /// `distributed_optimizer::step`.
  std::atomic<uint64_t> backwards = 0;
  std::atomic<uint64_t> updates = 0;
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

  /// Collective operations on the tensors of a group of ranks.
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

  /// State that backward needs of the calls that this rank ran.
  saved_calls& calls() const noexcept {
    return *calls_;
  }

  /// Holds the arguments of checkpointed calls until backward needs them (R57);
  /// null: they stay in memory.
  offload_store* offload() const noexcept {
    return offload_;
  }

  /// Records steps and replays them (R33).
  order_book& records() const noexcept {
    return *records_;
  }

  /// Keeps the order of microbatches in modules that change state (R19).
  microbatch_sequencer& sequencer() const noexcept {
    return *sequencer_;
  }

  rank_board& board() const noexcept {
    return *board_;
  }

  /// Where the modules of this rank compute.
  c10::Device device() const noexcept {
    return device_;
  }

  /// What this rank launches there; null on the host.
  const rank_device* launches() const noexcept {
    return launches_;
  }

  step_counters& counters() const noexcept {
    return counters_;
  }

  /// The current or last step.
  step_id step() const noexcept {
    return step_id{counters_.step};
  }

  /// The user's step, which goes into the seeds of random numbers (R23).
  uint64_t drawn_step() const noexcept {
    return counters_.drawn_step;
  }

  /// The one distributed model of the session, or null.
  const std::shared_ptr<model_context>& model() const noexcept {
    return model_;
  }

  /// Notified of every call that this rank runs; usually null.
  call_observer* observer() const noexcept {
    return observer_;
  }

  /// The session object of this rank that the user holds, or null.
  session* owner() const noexcept {
    return owner_;
  }

  /// @returns the rank whose code the calling thread runs, or null.
  static const rank_context* current() noexcept;

  /// @returns the device of the calling thread's rank; the host without one.
  static c10::Device current_device() noexcept;

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
  order_book* records_ = nullptr;
  microbatch_sequencer* sequencer_ = nullptr;
  rank_board* board_ = nullptr;
  c10::Device device_{c10::kCPU};
  const rank_device* launches_ = nullptr;
  std::shared_ptr<model_context> model_;
  std::atomic<call_observer*> observer_ = nullptr;
  session* owner_ = nullptr;
  mutable step_counters counters_;
};

} // namespace smp
