#include "partition/rank_layout.hpp"
#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/checkpoint/checkpoint_lock.hpp"
#include "runtime/checkpoint/checkpoint_parts.hpp"
#include "runtime/checkpoint/checkpoint_writer.hpp"
#include "runtime/checkpoint/pending_checkpoint.hpp"
#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/optimizer/loss_scaler.hpp"
#include "runtime/optimizer/optimizer_state.hpp"
#include "runtime/process/control_group.hpp"
#include "runtime/session/distributed_optimizer.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/step/model_state.hpp"
#include "tp/distributed_module.hpp"

#include <torch/optim/optimizer.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

namespace smp {

namespace {

using clock = std::chrono::steady_clock;

using content_or_failure = std::variant<checkpoint_content, failure>;

/// What one rank saves.
class checkpoint_source {
public:
  checkpoint_source(const distributed_model_base& model,
                    const std::vector<distributed_optimizer*>& optimizers)
    : model_(model),
      optimizers_(optimizers),
      rank_(session::current().internals()) {
    // nop
  }

  /// Its tensors share memory with the model.
  /// @returns never throws: ranks that go on would wait for this one
  content_or_failure content() const {
    try {
      checkpoint_content result;
      for (auto& x : held_tensors(model_, optimizers_)) {
        auto of_model = x.role == tensor_role::parameter
                        || x.role == tensor_role::buffer;
        add_pieces(x, of_model ? result.model : result.state);
      }
      result.members = group_members(model_, optimizers_);
      return result;
    } catch (const std::exception& e) {
      return failure_of(e);
    }
  }

  checkpoint_manifest head(uint64_t step, const checkpoint_options& x) const {
    checkpoint_manifest result;
    result.step = step;
    auto& layout = rank_.layout();
    result.pipeline = layout.size(comm_group::pp);
    result.tensor = layout.size(comm_group::tp);
    result.ranks = layout.size(comm_group::world);
    result.drawn_steps = rank_.drawn_step();
    result.settings = x.settings;
    result.user_content = x.user_content;
    for (auto* optimizer : optimizers_) {
      auto& inner = optimizer->inner();
      auto& saved = result.optimizers.emplace_back();
      saved.type = type_of(inner);
      for (auto& group : inner.param_groups())
        saved.groups.push_back(options_of(inner, group.options()));
      if (auto* scaler = optimizer->own_scaler();
          scaler && scaler->is_dynamic())
        saved.loss_scale = {scaler->value(), scaler->good_steps()};
    }
    auto& map = model_.state().map();
    for (size_t i = 0; i < map.model().modules.size() && result.pipeline > 1;
         ++i)
      result.partition[map.name(module_id{i})] = position_of(
        map.owner(module_id{i}));
    return result;
  }

private:
  uint64_t position_of(rank_id x) const {
    auto& pipeline = rank_.pipeline();
    return static_cast<uint64_t>(std::find(pipeline.begin(), pipeline.end(), x)
                                 - pipeline.begin());
  }

  static void add_pieces(const held_tensor& x,
                         std::vector<checkpoint_content::piece>& to) {
    auto boxes = boxes_of(x.value.sizes(), x.slice, x.rows);
    int64_t at = 0;
    for (size_t i = 0; i < boxes.size(); ++i) {
      auto value = x.value.detach();
      std::string part;
      if (boxes.size() > 1) {
        auto length = boxes[i].sizes.at(static_cast<size_t>(x.slice->dim));
        value = value.narrow(x.slice->dim, at, length);
        part = fmt::format("#{}", i);
        at += length;
      }
      to.push_back({describe(x, boxes[i], value, std::move(part)), value});
    }
  }

  static saved_tensor describe(const held_tensor& x, const tensor_box& box,
                               const at::Tensor& value, std::string part) {
    auto sizes = value.sizes().vec();
    auto* within = x.slice ? x.slice : x.rows;
    return {.role = x.role,
            .name = x.name,
            .dtype = dtype_in_file(value.scalar_type()),
            .shape = within ? within->whole : sizes,
            .pieces = {{.file = {},
                        .part = std::move(part),
                        .replica = x.replica,
                        .begin = box.begin,
                        .sizes = sizes}}};
  }

  const distributed_model_base& model_;
  const std::vector<distributed_optimizer*>& optimizers_;
  const rank_context& rank_;
};

/// Calls `f` with each tensor.
template <class F>
void for_each_value(content_or_failure& x, F f) {
  if (auto* held = std::get_if<checkpoint_content>(&x))
    for (auto* part : {&held->model, &held->state})
      for (auto& piece : *part)
        f(piece.value);
}

/// From now on the tensors are in host memory of their own. Never throws, as
/// `checkpoint_source::content`.
void copy_values(content_or_failure& x) {
  try {
    for_each_value(x, [](at::Tensor& value) {
      value = value.to(at::kCPU, value.scalar_type(), false, true,
                       c10::MemoryFormat::Contiguous);
    });
  } catch (const std::exception& e) {
    x = failure_of(e);
  }
}

/// Whether all ranks have room for a copy of what they hold. Collective.
bool have_room(const rank_context& rank, const session_config& config,
               content_or_failure& mine) {
  // The same on all ranks, as the configuration is.
  if (config.offload_optimizer || config.offload_activations)
    return false;
  // All ranks of a machine look before any of them copies. A tenth is for what
  // else may come.
  uint64_t bytes = 0;
  for_each_value(mine, [&](const at::Tensor& x) { bytes += x.nbytes(); });
  auto need = static_cast<double>(bytes) * 1.1
              * static_cast<double>(rank.layout().local_size(rank.self()));
  auto left = memory_left(read_control_group());
  auto lacks = left && need > static_cast<double>(*left) ? 1.0 : 0.0;
  auto sum = rank.exchange().all_reduce_sum(world_of(rank),
                                            "smp.checkpoint.room", {lacks});
  return sum.front() == 0;
}

} // namespace

pending_checkpoint::pending_checkpoint(
  const std::string& path, uint64_t step, const distributed_model_base& model,
  const std::vector<distributed_optimizer*>& optimizers,
  const checkpoint_options& x)
  : pending_checkpoint(path, step, model, optimizers, x, true) {
  // nop
}

pending_checkpoint::pending_checkpoint(
  const std::string& path, uint64_t step, const distributed_model_base& model,
  const std::vector<distributed_optimizer*>& optimizers,
  const checkpoint_options& x, bool may_copy)
  : rank_(session::current().internals()),
    step_(step),
    written_(std::make_shared<awaited<folder_and_bytes>>()) {
  if (!model.partitioned())
    throw error{error_code::unsupported,
                "save_checkpoint before the partition: make a step first, or "
                "call model.partition()"};
  flight_activity noted{rank_.board().record(), "checkpoint"};
  auto begin = clock::now();
  checkpoint_source source{model, optimizers};
  checkpoint_manifest head; // of rank 0
  agree_everywhere(rank_, "smp.checkpoint.lock", [&] {
    lock_checkpoints(path, model.state());
    head = source.head(step, x);
    return true;
  });
  std::shared_ptr<checkpoint_writer> writer;
  bool in_background = false;
  with_weights(optimizers, [&] {
    model.state().await_updates();
    auto mine = source.content();
    in_background = may_copy
                    && have_room(rank_, session::current().config(), mine);
    if (in_background)
      copy_values(mine);
    writer = std::make_shared<checkpoint_writer>(
      rank_, path, x.num_kept_partial_checkpoints, std::move(head),
      std::move(mine));
    if (!in_background)
      write(*writer);
  });
  if (in_background)
    thread_ = std::thread{[this, writer] { write(*writer); }};
  seconds_ = std::chrono::duration<double>(clock::now() - begin).count();
}

pending_checkpoint::~pending_checkpoint() {
  if (thread_.joinable())
    thread_.join();
}

void pending_checkpoint::write(checkpoint_writer& x) {
  try {
    auto [folder, bytes] = x.run();
    written_->set_value({folder, bytes});
  } catch (const std::exception& e) {
    written_->fail(failure_of(e));
  }
}

saved_checkpoint pending_checkpoint::await() {
  flight_activity noted{rank_.board().record(), "checkpoint"};
  auto begin = clock::now();
  // Nothing to wait for in the eyes of the stall search: the rank works.
  const wait_reason writing{.what = "the writing of a checkpoint",
                            .from = {},
                            .subject = {.what = wait_subject::kind::device}};
  auto own = [&] { return awaited<folder_and_bytes>::get(written_, writing); };
  if (rank_.self() != world_of(rank_).front())
    own(); // rank 0 may need it
  auto [folder, bytes] = agree_everywhere(rank_, "smp.checkpoint.end", own);
  seconds_ += std::chrono::duration<double>(clock::now() - begin).count();
  return {.folder = folder, .bytes = bytes, .seconds = seconds_};
}

saved_checkpoint
save_checkpoint(const std::string& path, uint64_t step,
                const distributed_model_base& model,
                const std::vector<distributed_optimizer*>& optimizers,
                const checkpoint_options& x) {
  return pending_checkpoint{path, step, model, optimizers, x, false}.await();
}

} // namespace smp
