#include "partition/rank_layout.hpp"
#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/checkpoint/checkpoint_dir.hpp"
#include "runtime/checkpoint/checkpoint_lock.hpp"
#include "runtime/checkpoint/checkpoint_parts.hpp"
#include "runtime/checkpoint/checksum.hpp"
#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/files/file_io.hpp"
#include "runtime/optimizer/loss_scaler.hpp"
#include "runtime/optimizer/optimizer_state.hpp"
#include "runtime/process/limits.hpp"
#include "runtime/session/distributed_optimizer.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/step/model_state.hpp"
#include "tp/distributed_module.hpp"
#include "transport/bytes.hpp"

#include <torch/optim/optimizer.h>

#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

namespace smp {

/// What a rank wrote.
struct checkpoint_part {
  std::vector<saved_file> files;
  std::vector<saved_tensor> tensors;
  std::vector<group_member> members;
};

template <class Inspector>
bool inspect(Inspector& f, checkpoint_part& x) {
  return f.object(x).fields(f.field("files", x.files),
                            f.field("tensors", x.tensors),
                            f.field("members", x.members));
}

namespace {

constexpr const char* part_name = "smp.checkpoint.part";

using part_or_failure = std::variant<checkpoint_part, failure>;

/// One checkpoint, as one rank sees it being written.
class checkpoint_save {
public:
  checkpoint_save(const distributed_model_base& model,
                  const std::vector<distributed_optimizer*>& optimizers)
    : model_(model),
      optimizers_(optimizers),
      rank_(session::current().internals()) {
    // nop
  }

  saved_checkpoint run(const std::string& dir, uint64_t step,
                       const checkpoint_options& x) {
    // Used by rank 0 only; the others get the folder.
    checkpoint_place place;
    auto folder = agree_everywhere(rank_, "smp.checkpoint.begin", [&] {
      lock_checkpoints(dir, model_.state());
      refuse_newer(dir, step);
      place = begin_checkpoint(dir, step);
      return place.folder;
    });
    auto mine = try_write(folder);
    if (rank_.self() != first())
      rank_.exchange().send(first(), part_name, to_payload(mine));
    auto bytes = agree_everywhere(rank_, "smp.checkpoint.end", [&] {
      uint64_t result = 0;
      try {
        result = complete(place, collect(mine), step, x);
      } catch (...) {
        remove_checkpoint(place.folder);
        throw;
      }
      remove_old_checkpoints(dir, place, x.num_kept_partial_checkpoints);
      return result;
    });
    return {.folder = folder, .bytes = bytes};
  }

private:
  rank_id first() const {
    return world_of(rank_).front();
  }

  // -- each rank --------------------------------------------------------------

  part_or_failure try_write(const std::string& folder) const {
    failure found;
    try {
      return write(folder);
    } catch (const error& e) {
      found = e.cause();
    } catch (const std::exception& e) {
      auto limit = exhausted_limit(e);
      found = limit ? limit->cause()
                    : failure{error_code::user_code, no_rank, {}, e.what()};
    }
    if (found.rank == no_rank)
      found.rank = rank_.self();
    return found;
  }

  /// What a file holds as one tensor.
  struct written_piece {
    const held_tensor* of = nullptr;
    at::Tensor value;
    std::vector<int64_t> begin; // in the whole
    std::string part = {};      // see `tensor_piece`
  };

  checkpoint_part write(const std::string& folder) const {
    auto held = held_tensors(model_, optimizers_);
    std::vector<written_piece> of_model, others;
    for (auto& x : held)
      for (auto& y : pieces_of(x))
        (x.role == tensor_role::parameter || x.role == tensor_role::buffer
           ? of_model
           : others)
          .push_back(std::move(y));
    checkpoint_part result;
    write_file(folder, "model", of_model, result);
    write_file(folder, "state", others, result);
    // Each replica has its own rows if replicas shard the optimizer's state.
    result.members = group_members(model_, optimizers_);
    return result;
  }

  static std::vector<written_piece> pieces_of(const held_tensor& x) {
    auto boxes = boxes_of(x.value.sizes(), x.slice, x.rows);
    if (boxes.size() == 1)
      return {{&x, x.value, boxes.front().begin}};
    std::vector<written_piece> result;
    int64_t at = 0;
    for (auto& box : boxes) {
      auto length = box.sizes.at(static_cast<size_t>(x.slice->dim));
      result.push_back({&x, x.value.narrow(x.slice->dim, at, length), box.begin,
                        fmt::format("#{}", result.size())});
      at += length;
    }
    return result;
  }

  void write_file(const std::string& folder, const char* kind,
                  const std::vector<written_piece>& xs,
                  checkpoint_part& out) const {
    if (xs.empty())
      return;
    saved_file file{
      .name = fmt::format("{}-{}.safetensors", kind, rank_.self().value),
      .rank = rank_.self().value};
    std::vector<tensor_outline> outlines;
    for (auto& x : xs)
      outlines.push_back(
        {x.of->name + x.part, x.value.scalar_type(), x.value.sizes().vec()});
    auto begin = out.tensors.size();
    for (auto& x : xs)
      out.tensors.push_back(describe(x, file.name));
    auto path = (std::filesystem::path{folder} / file.name).string();
    write_safetensors(path, outlines, [&](size_t i) {
      auto bytes = xs[i].value.detach().to(at::kCPU).contiguous();
      out.tensors[begin + i].pieces.front().checksum = checksum(
        bytes.const_data_ptr(), bytes.nbytes());
      return bytes;
    });
    file.bytes = std::filesystem::file_size(path);
    out.files.push_back(std::move(file));
  }

  static saved_tensor describe(const written_piece& x,
                               const std::string& file) {
    auto& of = *x.of;
    auto sizes = x.value.sizes().vec();
    auto* within = of.slice ? of.slice : of.rows;
    return {.role = of.role,
            .name = of.name,
            .dtype = dtype_in_file(x.value.scalar_type()),
            .shape = within ? within->whole : sizes,
            .pieces = {{.file = file,
                        .part = x.part,
                        .replica = of.replica,
                        .begin = x.begin,
                        .sizes = sizes}}};
  }

  // -- rank 0 -----------------------------------------------------------------

  /// @throws error the first failure of a rank, once all ranks have reported
  std::vector<checkpoint_part> collect(const part_or_failure& mine) const {
    std::vector<checkpoint_part> result;
    failure first_failure;
    for (auto rank : world_of(rank_)) {
      auto theirs = rank == rank_.self()
                      ? mine
                      : from_payload<part_or_failure>(
                        rank_.exchange().receive(rank, part_name),
                        "part of a checkpoint");
      if (auto* why = std::get_if<failure>(&theirs)) {
        if (!first_failure)
          first_failure = *why;
      } else {
        result.push_back(std::get<checkpoint_part>(std::move(theirs)));
      }
    }
    if (first_failure)
      throw error{first_failure};
    return result;
  }

  /// @returns the bytes of the checkpoint
  uint64_t complete(const checkpoint_place& place,
                    const std::vector<checkpoint_part>& parts, uint64_t step,
                    const checkpoint_options& x) const {
    auto manifest = head_of(step, x);
    for (auto& part : parts) {
      for (auto& file : part.files)
        check_seen(place.folder, file);
      manifest.files.insert(manifest.files.end(), part.files.begin(),
                            part.files.end());
      manifest.add(part.tensors);
      for (auto& y : part.members)
        manifest.optimizers.at(y.optimizer).members[y.parameter] = y.group;
    }
    commit_checkpoint(place, to_json(manifest));
    return manifest.bytes();
  }

  checkpoint_manifest head_of(uint64_t step,
                              const checkpoint_options& x) const {
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

  uint64_t position_of(rank_id x) const {
    auto& pipeline = rank_.pipeline();
    return static_cast<uint64_t>(std::find(pipeline.begin(), pipeline.end(), x)
                                 - pipeline.begin());
  }

  static void check_seen(const std::string& folder, const saved_file& file) {
    auto path = (std::filesystem::path{folder} / file.name).string();
    std::error_code ignored;
    auto size = std::filesystem::file_size(path, ignored);
    if (ignored || size != file.bytes)
      throw config_error(fmt::format(
        "{}: rank {} wrote it, but rank 0 does not see it: checkpoints need a "
        "folder that all machines share",
        path, file.rank));
  }

  const distributed_model_base& model_;
  const std::vector<distributed_optimizer*>& optimizers_;
  const rank_context& rank_;
};

} // namespace

saved_checkpoint
save_checkpoint(const std::string& path, uint64_t step,
                const distributed_model_base& model,
                const std::vector<distributed_optimizer*>& optimizers,
                const checkpoint_options& x) {
  using clock = std::chrono::steady_clock;
  if (!model.partitioned())
    throw error{error_code::unsupported,
                "save_checkpoint before the partition: make a step first, or "
                "call model.partition()"};
  flight_activity noted{session::current().internals().board().record(),
                        "checkpoint"};
  auto begin = clock::now();
  saved_checkpoint result;
  with_weights(optimizers, [&] {
    model.state().await_updates();
    result = checkpoint_save{model, optimizers}.run(path, step, x);
  });
  result.seconds = std::chrono::duration<double>(clock::now() - begin).count();
  return result;
}

} // namespace smp
