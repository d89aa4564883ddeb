#include "runtime/checkpoint/checkpoint_loader.hpp"

#include "actors/order/order_book.hpp"
#include "partition/rank_layout.hpp"
#include "runtime/base/mistakes.hpp"
#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/checkpoint/checkpoint_dir.hpp"
#include "runtime/checkpoint/checkpoint_parts.hpp"
#include "runtime/checkpoint/checksum.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/files/file_io.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/optimizer/foreign_optimizer.hpp"
#include "runtime/optimizer/loss_scaler.hpp"
#include "runtime/optimizer/optimizer_state.hpp"
#include "runtime/session/distributed_optimizer.hpp"
#include "runtime/session/placement.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/step/model_state.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/optim/optimizer.h>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

namespace smp {

namespace fs = std::filesystem;

namespace {

std::string key_of(tensor_role role, const std::string& name) {
  return fmt::format("{}/{}", static_cast<int>(role), name);
}

/// The overlap of a piece with the part of its tensor that a rank wants.
class overlap {
public:
  overlap(const tensor_piece& piece, const std::vector<int64_t>& begin,
          at::IntArrayRef sizes) {
    for (size_t i = 0; i < begin.size(); ++i) {
      auto from = std::max(piece.begin[i], begin[i]);
      auto to = std::min(piece.begin[i] + piece.sizes[i], begin[i] + sizes[i]);
      length_.push_back(std::max<int64_t>(to - from, 0));
      in_piece_.push_back(from - piece.begin[i]);
      in_wanted_.push_back(from - begin[i]);
    }
  }

  bool empty() const {
    return std::ranges::find(length_, 0) != length_.end();
  }

  void copy(const at::Tensor& piece, const at::Tensor& wanted) const {
    cut(wanted, in_wanted_).copy_(cut(piece, in_piece_));
  }

private:
  at::Tensor cut(at::Tensor x, const std::vector<int64_t>& begin) const {
    for (size_t i = 0; i < begin.size(); ++i)
      x = x.narrow(static_cast<int64_t>(i), begin[i], length_[i]);
    return x;
  }

  std::vector<int64_t> length_, in_piece_, in_wanted_;
};

/// @returns the whole sizes of a tensor, of which ranks may hold slices
at::IntArrayRef whole_sizes(const model_map& map, uint32_t tensor) {
  auto* slice = map.slice(tensor);
  return slice ? at::IntArrayRef{slice->whole}
               : map.model().tensors[tensor].tensor.sizes();
}

} // namespace

// -- finding ------------------------------------------------------------------

std::shared_ptr<checkpoint_loader>
checkpoint_loader::find(const std::string& path) {
  auto [folder, text] = agree_everywhere(
    session::current().internals(), "smp.checkpoint.find", [&] {
      auto place = newest_checkpoint(path);
      return place ? std::pair{place->folder,
                               read_text(manifest_path(place->folder))}
                   : std::pair{std::string{}, std::string{}};
    });
  return folder.empty() ? nullptr
                        : std::make_shared<checkpoint_loader>(folder, text);
}

checkpoint_loader::checkpoint_loader(std::string folder,
                                     const std::string& text)
  : rank_(session::current().internals()), folder_(std::move(folder)) {
  together("smp.checkpoint.manifest", [&] {
    manifest_ = parse_manifest(text, manifest_path(folder_));
    refuse_wrong_step(folder_, manifest_.step);
  });
  for (auto& x : manifest_.tensors)
    index_.emplace(key_of(x.role, x.name), &x);
}

void checkpoint_loader::together(const char* name,
                                 const std::function<void()>& f) const {
  do_together(rank_, name, [&] {
    try {
      f();
    } catch (const error& e) {
      auto cause = e.cause();
      if (cause.code == error_code::config)
        cause.text += way_around(folder_);
      throw error{cause};
    }
  });
}

void checkpoint_loader::fail(const std::string& why) const {
  throw config_error("cannot load checkpoint " + folder_ + ": " + why);
}

const saved_tensor* checkpoint_loader::find(tensor_role role,
                                            const std::string& name) const {
  auto i = index_.find(key_of(role, name));
  return i == index_.end() ? nullptr : i->second;
}

// -- checks -------------------------------------------------------------------

void checkpoint_loader::check(
  const distributed_model_base& model,
  const std::vector<distributed_optimizer*>& optimizers) {
  together("smp.checkpoint.check", [&] {
    check_model(model);
    check_optimizers(model, optimizers);
    tell_fields(optimizers);
    check_states(model, optimizers);
  });
  together("smp.checkpoint.verify", [&] {
    auto& layout = rank_.layout();
    for (size_t i = layout.rank(comm_group::world, rank_.self());
         i < manifest_.files.size(); i += layout.size(comm_group::world))
      check_file(manifest_.files[i]);
  });
}

void checkpoint_loader::check_model(const distributed_model_base& model) const {
  auto& map = model.state().map();
  auto& tensors = map.model().tensors;
  mistakes missing{"missing"};
  mistakes unknown{"not in the model"};
  mistakes misshapen{"of another shape"};
  mistakes mistyped{"of another type"};
  std::set<const saved_tensor*> known;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    auto& walked = tensors[i];
    if (walked.is_attribute || !walked.tensor.defined())
      continue;
    auto& name = walked.names.front();
    auto* saved = find(
      walked.is_buffer ? tensor_role::buffer : tensor_role::parameter, name);
    if (!saved) {
      missing.add(name);
      continue;
    }
    known.insert(saved);
    auto mine = whole_sizes(map, i);
    auto dtype = dtype_in_file(walked.tensor.scalar_type());
    if (at::IntArrayRef{saved->shape} != mine)
      misshapen.add(name, ": " + shape_text(saved->shape) + " instead of "
                            + shape_text(mine));
    else if (saved->dtype != dtype)
      mistyped.add(name, ": " + saved->dtype + " instead of " + dtype
                           + ", see smp.bf16_params and smp.fp16_params");
  }
  for (auto& saved : manifest_.tensors)
    if ((saved.role == tensor_role::parameter
         || saved.role == tensor_role::buffer)
        && !known.contains(&saved))
      unknown.add(saved.name);
  std::string text;
  for (auto* names : {&missing, &unknown, &misshapen, &mistyped})
    names->describe(text);
  if (!text.empty())
    fail("it is of another model: " + text + "; nothing was loaded");
}

void checkpoint_loader::check_optimizers(
  const distributed_model_base& model,
  const std::vector<distributed_optimizer*>& optimizers) const {
  auto& saved = manifest_.optimizers;
  if (saved.size() != optimizers.size())
    fail(
      fmt::format("it has {} optimizers, this program {}; nothing was "
                  "loaded",
                  saved.size(), optimizers.size()));
  for (size_t i = 0; i < saved.size(); ++i) {
    auto& inner = optimizers[i]->inner();
    if (auto type = type_of(inner); saved[i].type != type)
      fail(
        fmt::format("it is of the optimizer {}, this one is {}; nothing was "
                    "loaded",
                    saved[i].type, type));
    if (auto groups = inner.param_groups().size();
        saved[i].groups.size() != groups)
      fail(
        fmt::format("its optimizer has {} groups, this one {}; nothing was "
                    "loaded",
                    saved[i].groups.size(), groups));
  }
  for (auto& member : group_members(model, optimizers)) {
    auto& members = saved[member.optimizer].members;
    auto found = members.find(member.parameter);
    if (found == members.end() || found->second != member.group)
      fail(fmt::format(
        "'{}' is in group {} of the optimizer, there {}; nothing was loaded",
        member.parameter, member.group,
        found == members.end() ? "in none"
                               : fmt::format("in group {}", found->second)));
  }
}

/// Nothing but the checkpoint says what an optimizer of a program's own will
/// remember.
void checkpoint_loader::tell_fields(
  const std::vector<distributed_optimizer*>& optimizers) const {
  for (size_t number = 0; number < optimizers.size(); ++number) {
    auto* foreign = dynamic_cast<foreign_optimizer*>(
      &optimizers[number]->inner());
    if (!foreign)
      continue;
    auto prefix = fmt::format("optimizer{}/", number);
    std::map<std::string, bool> found; // counts
    for (auto& x : manifest_.tensors) {
      if (x.role != tensor_role::optimizer || !x.name.starts_with(prefix))
        continue;
      auto field = x.name.substr(prefix.size());
      field.resize(std::min(field.find('/'), field.size()));
      if (field == master_field || field == average_field)
        continue;
      // A parameter may be a single number, too.
      auto i = found.emplace(field, true).first;
      i->second = i->second && x.shape.empty();
    }
    std::vector<state_field> fields;
    for (auto& [name, is_count] : found)
      fields.push_back({name, is_count});
    foreign->expect_fields(fields);
  }
}

void checkpoint_loader::check_states(
  const distributed_model_base& model,
  const std::vector<distributed_optimizer*>& optimizers) const {
  auto& map = model.state().map();
  auto& tensors = map.model().tensors;
  mistakes misshapen{"of another shape"};
  for (size_t number = 0; number < optimizers.size(); ++number) {
    auto fields = state_fields(optimizers[number]->inner());
    fields.push_back({master_field, false});
    fields.push_back({average_field, false});
    for (uint32_t i = 0; i < tensors.size(); ++i) {
      auto& walked = tensors[i];
      if (walked.is_buffer || walked.is_attribute || !walked.tensor.defined())
        continue;
      for (auto& field : fields) {
        auto* saved = find(
          tensor_role::optimizer,
          state_name(number, field.name, walked.names.front()));
        auto wanted = field.is_count ? at::IntArrayRef{} : whole_sizes(map, i);
        if (saved && at::IntArrayRef{saved->shape} != wanted)
          misshapen.add(saved->name,
                        ": " + shape_text(saved->shape) + " instead of "
                          + shape_text(wanted)
                          + (saved->pieces.empty()
                               ? std::string{}
                               : " in " + saved->pieces.front().file));
      }
    }
  }
  std::string text;
  misshapen.describe(text);
  if (!text.empty())
    fail("what its optimizers remember is of another model: " + text
         + "; nothing was loaded");
}

void checkpoint_loader::check_file(const saved_file& saved) const {
  auto path = (fs::path{folder_} / saved.name).string();
  file_errors errors{"read", path};
  std::error_code why;
  if (auto size = fs::file_size(path, why); why)
    errors.fail(why.message());
  else if (size != saved.bytes)
    errors.fail(
      fmt::format("it has {} bytes, but {} were written", size, saved.bytes));
  safetensors_reader file{path};
  std::map<std::string, std::pair<const saved_tensor*, const tensor_piece*>>
    pieces;
  for (auto& tensor : manifest_.tensors)
    for (auto& piece : tensor.pieces)
      if (piece.file == saved.name)
        pieces.emplace(tensor.name + piece.part, std::pair{&tensor, &piece});
  for (auto& [name, wanted] : pieces) {
    auto& [tensor, piece] = wanted;
    auto index = file.find(name);
    if (!index)
      errors.fail("tensor \"" + name + "\" is missing");
    auto& found = file.tensors()[*index];
    if (found.shape != piece->sizes
        || dtype_in_file(found.dtype) != tensor->dtype)
      errors.fail("tensor \"" + name + "\" has another shape or type than "
                  + manifest_path(folder_) + " says");
    auto bytes = file.read(*index);
    if (checksum(bytes.const_data_ptr(), bytes.nbytes()) != piece->checksum)
      errors.fail(
        "the bytes of tensor \"" + name
        + "\" are not those that were written: their checksum differs");
  }
}

// -- loading ------------------------------------------------------------------

void checkpoint_loader::adopt_partition(
  const distributed_model_base& model) const {
  auto& walked = model.state().model();
  auto& pins = session::current().internals().marks().pins;
  if (manifest_.partition.empty() || model.partitioned()
      || !rank_.config().auto_partition
      || manifest_.pipeline != rank_.pipeline().size()
      || manifest_.partition.size() != walked.modules.size())
    return;
  // A pin also applies to descendants, unless they are pinned otherwise.
  std::vector<std::optional<uint64_t>> wanted;
  for (auto& module : walked.modules) {
    auto& mine = wanted.emplace_back();
    if (wanted.size() > 1)
      mine = wanted[module.parent];
    for (auto* hook : module.hooks)
      if (hook->pinned)
        mine = *hook->pinned;
    if (auto pin = pins.find(module.identity()); pin != pins.end())
      mine = pin->second;
    auto saved = manifest_.partition.find(module.names.front());
    if (saved == manifest_.partition.end() || (mine && *mine != saved->second))
      return;
  }
  place_by_name(model, manifest_.partition);
}

void checkpoint_loader::rehearse(
  const std::vector<distributed_optimizer*>& optimizers,
  const std::function<void(uint64_t)>& f) const {
  constexpr uint64_t enough = order_book::max_learnt + 3;
  for (uint64_t i = 0; i < std::min(manifest_.step, enough); ++i) {
    f(i);
    for (auto* x : optimizers)
      x->zero_grad();
  }
}

void checkpoint_loader::load(
  const distributed_model_base& model,
  const std::vector<distributed_optimizer*>& optimizers) {
  with_weights(optimizers, [&] {
    together("smp.checkpoint.load", [&] { load_parts(model, optimizers); });
  });
  readers_.clear();
}

void checkpoint_loader::load_parts(
  const distributed_model_base& model,
  const std::vector<distributed_optimizer*>& optimizers) {
  at::NoGradGuard no_grad;
  model.state().await_updates();
  auto& map = model.state().map();
  auto replica = rank_.layout().rank(comm_group::dp, rank_.self());
  auto& tensors = map.model().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    auto& walked = tensors[i];
    if (!map.owned(i) || walked.is_attribute || !walked.tensor.defined())
      continue;
    auto role = walked.is_buffer ? tensor_role::buffer : tensor_role::parameter;
    auto* slice = map.slice(i);
    auto values = walked.tensor; // a handle of the same tensor
    values.copy_(
      read(*find(role, walked.names.front()), slice, nullptr, replica, values));
    for (size_t number = 0; number < optimizers.size() && !walked.is_buffer;
         ++number)
      load_state(*optimizers[number], number, walked, slice);
  }
  auto* random = find(tensor_role::random, random_name(rank_.self().value));
  if (!random)
    random = find(tensor_role::random, random_name(0));
  if (random)
    set_random_state(read(*random, nullptr, nullptr, 0, {}));
  rank_.counters().drawn_step = manifest_.drawn_steps;
  for (size_t number = 0; number < optimizers.size(); ++number)
    if (auto& saved = manifest_.optimizers[number].loss_scale;
        saved && optimizers[number]->own_scaler())
      optimizers[number]->own_scaler()->restore(saved->value,
                                                saved->good_steps);
}

void checkpoint_loader::load_state(distributed_optimizer& x, size_t number,
                                   const walked_tensor& parameter,
                                   const tensor_slice* slice) {
  auto part = x.part_of(parameter.tensor, slice);
  if (!part)
    return;
  auto read_field = [&](const std::string& field) {
    auto* saved = find(tensor_role::optimizer,
                       state_name(number, field, parameter.names.front()));
    if (!saved)
      return at::Tensor{};
    auto is_count = saved->shape.empty();
    return read(*saved, is_count ? nullptr : slice,
                is_count ? nullptr : part->where, 0, part->values);
  };
  set_fields(x, *part, read_field);
}

void checkpoint_loader::load_options(
  const std::vector<distributed_optimizer*>& optimizers) const {
  for (size_t number = 0; number < optimizers.size(); ++number) {
    auto& inner = optimizers[number]->inner();
    auto& groups = inner.param_groups();
    for (size_t group = 0; group < groups.size(); ++group)
      set_options(inner, groups[group].options(),
                  manifest_.optimizers[number].groups[group]);
  }
}

safetensors_reader& checkpoint_loader::open(const std::string& file) {
  constexpr size_t max_open = 8;
  if (auto i = readers_.find(file); i != readers_.end())
    return i->second;
  if (readers_.size() == max_open)
    readers_.clear();
  return readers_.try_emplace(file, (fs::path{folder_} / file).string())
    .first->second;
}

/// @param slice what this rank holds of it; null: the whole
/// @param rows which of its rows are wanted; null: all
/// @param replica whose tensor to read, if each replica has its own
/// @param like has the type of the result if there is nothing to read
at::Tensor checkpoint_loader::read(const saved_tensor& x,
                                   const tensor_slice* slice,
                                   const tensor_slice* rows, uint64_t replica,
                                   const at::Tensor& like) {
  auto sizes = x.shape;
  if (slice)
    sizes.at(static_cast<size_t>(slice->dim)) = slice->length * slice->blocks;
  if (rows)
    sizes.at(0) = rows->length;
  std::vector<at::Tensor> parts;
  for (auto& box : boxes_of(sizes, slice, rows))
    parts.push_back(read(x, box, replica, like));
  if (parts.empty())
    return at::empty(sizes, like.options());
  return parts.size() == 1 ? parts.front() : at::cat(parts, slice->dim);
}

at::Tensor checkpoint_loader::read(const saved_tensor& x, const tensor_box& box,
                                   uint64_t replica, const at::Tensor& like) {
  if (std::ranges::find(x.pieces, replica, &tensor_piece::replica)
      == x.pieces.end())
    replica = 0;
  auto& [begin, sizes] = box;
  at::Tensor result;
  for (auto& piece : x.pieces) {
    overlap both{piece, begin, sizes};
    if (piece.replica != replica || both.empty())
      continue;
    auto& file = open(piece.file);
    auto position = file.find(x.name + piece.part);
    if (!position)
      fail(piece.file + " has no tensor \"" + x.name + piece.part + "\"");
    auto found = file.read(*position);
    if (piece.begin == begin && piece.sizes == sizes)
      return found;
    if (!result.defined())
      result = at::empty(sizes, found.options());
    both.copy(found, result);
  }
  // Nothing overlaps, as for a tensor without elements.
  return result.defined() ? result : at::empty(sizes, like.options());
}

// -- resuming -----------------------------------------------------------------

std::optional<resumed_checkpoint>
resume_from_checkpoint(const std::string& path, distributed_model_base& model,
                       const std::vector<distributed_optimizer*>& optimizers,
                       const std::function<void(uint64_t)>& rehearse) {
  auto found = checkpoint_loader::find(path);
  if (!found)
    return std::nullopt;
  found->check(model, optimizers);
  found->load_options(optimizers);
  found->adopt_partition(model);
  if (rehearse && session::current().config().deterministic_server) {
    found->rehearse(optimizers, rehearse);
    model.partition(); // if there was no step to run
    found->load(model, optimizers);
  } else {
    model.register_post_partition_hook(
      [found, &model, optimizers] { found->load(model, optimizers); });
  }
  auto& manifest = found->manifest();
  return resumed_checkpoint{.folder = found->folder(),
                            .step = manifest.step,
                            .user_content = manifest.user_content};
}

} // namespace smp
