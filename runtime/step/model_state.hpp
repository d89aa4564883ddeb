#pragma once

#include "runtime/base/rank_context.hpp"
#include "runtime/calls/parameters.hpp"
#include "runtime/calls/promised_call.hpp"
#include "runtime/files/folder_lock.hpp"
#include "runtime/intercept/local_modules.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/model/module_facts.hpp"
#include "runtime/optimizer/loss_scaler.hpp"
#include "runtime/placement/partitioning.hpp"
#include "runtime/replicas/comm_hook.hpp"
#include "runtime/replicas/gradient_watch.hpp"
#include "runtime/step/order_learning.hpp"
#include "runtime/step/rollback_gradients.hpp"
#include "runtime/step/schedule_gate.hpp"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace smp {

class gradient_buckets;
class script_program;

/// The distributed model of a session with everything that depends on it: where
/// its modules are, what its calls return, which schedules fit. All of it dies
/// with the model; nothing carries over to the next one.
class model_state {
public:
  /// All of them outlive this.
  model_state(const rank_context& rank, const module_marks& marks,
              const schedule_policies& policies, model_root root);

  /// Restores local calls of the modules; placeholders stay placeholders.
  ~model_state();

  model_state(const model_state&) = delete;
  model_state& operator=(const model_state&) = delete;

  // -- partition --------------------------------------------------------------

  /// See `partitioning::wants_trace`.
  bool wants_trace(uint64_t devices) const {
    return partitioning_.wants_trace(devices);
  }

  /// See `partitioning::can_trace`.
  bool can_trace(uint64_t devices) const {
    return partitioning_.can_trace(devices);
  }

  /// See `partitioning::trace`.
  void trace(random_stream stream, const std::function<void()>& body);

  /// Partitions, and checks that the schedule fits. Collective over the world;
  /// a no-op once it has succeeded.
  /// @throws error (config), the same on all ranks
  void partition();

  /// See `schedule_gate::check`.
  void check_schedule(uint64_t microbatches) {
    gate_.check(program(), microbatches);
  }

  /// Calls `f` after the partition, or at once if it has happened.
  void on_partition(std::function<void()> f);

  /// True once calls of its modules may be remote.
  bool partitioned() const noexcept {
    return map_.partitioned();
  }

  /// See `partitioning::decide`; also checks the configuration's statements
  /// about modules.
  partition_decision decide(uint32_t devices, uint64_t default_device,
                            const sharing_request& sharing);

  /// See `sharing_rehearsal`. In a trace.
  sharing_rehearsal rehearse_sharing(const sharing_decision& x,
                                     const sharing_request& wanted) {
    return sharing_rehearsal{map_, x, wanted};
  }

  /// See `partitioning::on_decision`.
  void on_decision(std::function<void(const partition_decision&)> f) {
    partitioning_.on_decision(std::move(f));
  }

  /// The decision; null before the partition, and on all ranks except
  /// rank 0.
  const partition_decision* decision() const noexcept {
    return partitioning_.decision();
  }

  /// Partition and schedule as coloured text; see partition/print.hpp.
  const std::string& text() const noexcept {
    return text_;
  }

  /// The same with all modules on rank 0; on other ranks the same text.
  std::string full_text() const;

  const pipeline_program& program() const noexcept {
    return partitioning_.program();
  }

  const schedule_gate& gate() const noexcept {
    return gate_;
  }

  // -- properties -------------------------------------------------------------

  const model_map& map() const noexcept {
    return map_;
  }

  const walked_model& model() const noexcept {
    return map_.model();
  }

  promise_book& promises() noexcept {
    return promises_;
  }

  /// The rewritten TorchScript code; null for a torch::nn model, and before the
  /// partition.
  const script_program* script() const noexcept {
    return script_.get();
  }

  /// The view of this model that calls use.
  model_context& context() noexcept {
    return context_;
  }

  /// The gradients that replicas average; null if there is one replica, or the
  /// model is not partitioned yet.
  gradient_buckets* buckets() const noexcept {
    return buckets_.get();
  }

  smp::replication& replication() noexcept {
    return replication_;
  }

  /// Folders that are kept for this run as long as the model lives, by their
  /// canonical paths.
  std::map<std::string, folder_lock>& locks() noexcept {
    return locks_;
  }

  /// Training or evaluation mode of all modules on this rank.
  void train(bool on);

  bool is_training() const;

  /// Waits until all updates of other replicas have arrived.
  void await_updates() const;

  /// @returns which tensors require grad, as a number.
  uint64_t trainability() const;

  /// The factor by which backward multiplies losses, and so all gradients.
  model_loss_scale& loss_scale() noexcept {
    return loss_scale_;
  }

  const model_loss_scale& loss_scale() const noexcept {
    return loss_scale_;
  }

  gradient_watch& watch() noexcept {
    return watch_;
  }

  /// Notes the gradients that a step left, if others may change them wrongly.
  void watch_gradients();

  /// @param tensor owned by this rank
  /// @returns its gradient without the loss scale; if there is one, in float32
  /// or wider
  at::Tensor gradient(uint32_t tensor) const;

  // -- steps ------------------------------------------------------------------

  /// Copies the state that a step changes, so that the step can be rolled back
  /// if that is possible at all.
  void keep();

  /// @param again rerun after a rollback: no call continues without its
  /// reply this time
  void begin_step(bool again);

  /// Drops the copies of remote parameters; learns from the first steps which
  /// modules need no order. Collective.
  void end_step(bool complete);

  /// Tells whether it matters that calls change state: see
  /// `model_map::sees_state_again`; and replicas must not drift apart.
  bool minds_changes() const;

  /// Tells whether a step may be rolled back: no C++ module has state that smp
  /// does not see.
  bool can_take_back() const;

  /// Tells whether copies exist of everything that this rank changed in the
  /// last step.
  bool keeps_changes() const;

  /// Orders microbatches in the modules of these tensors: buffers that changed
  /// later than in the first training step, and parameters that calls change.
  /// Call alike on all ranks.
  void order_again(const std::set<uint32_t>& tensors);

  /// Orders microbatches in these modules, which keep state for the given
  /// reasons. Call alike on all ranks.
  void keep_order_of(const std::map<uint32_t, std::string>& xs);

  /// From now on microbatches run one after the other: they call these modules
  /// after their first backward, where nothing else keeps their order. Call
  /// alike on all ranks.
  void run_serially(const std::set<module_id>& modules);

  /// From now on microbatches always run one after the other. Call alike on all
  /// ranks.
  void run_serially();

  /// Restores buffers, gradients and attributes as of the last `keep`.
  void take_back();

  /// Drops the copies: the step is over.
  void forget_kept() noexcept {
    map_.order().forget_kept();
    gradients_.drop();
    attributes_.clear();
  }

private:
  void cast();
  void rewrite_script();
  void call_hooks();

  const rank_context& rank_;
  model_root root_;
  model_map map_;
  promise_book promises_;
  remote_parameters parameters_;
  local_modules modules_;
  partitioning partitioning_;
  order_learning order_learning_;
  schedule_gate gate_;
  rollback_gradients gradients_;
  std::vector<std::unique_ptr<kept_attributes>> attributes_;
  smp::replication replication_;
  std::unique_ptr<gradient_buckets> buckets_;
  std::unique_ptr<script_program> script_;
  model_loss_scale loss_scale_;
  gradient_watch watch_;
  map_changes changes_{map_};
  model_context context_;
  bool ready_ = false; // partitioned, and its schedule fits
  std::string text_;
  std::vector<std::function<void()>> hooks_;
  std::map<std::string, folder_lock> locks_;
};

} // namespace smp
