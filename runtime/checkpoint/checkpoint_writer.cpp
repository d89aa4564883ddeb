#include "runtime/checkpoint/checkpoint_writer.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/checkpoint/checkpoint_dir.hpp"
#include "runtime/checkpoint/checksum.hpp"
#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/files/file_io.hpp"
#include "runtime/process/limits.hpp"
#include "transport/bytes.hpp"
#include "transport/exchange.hpp"

#include <fmt/format.h>

#include <exception>
#include <filesystem>
#include <system_error>
#include <utility>

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

void check_seen(const std::string& folder, const saved_file& file) {
  auto path = (std::filesystem::path{folder} / file.name).string();
  std::error_code ignored;
  auto size = std::filesystem::file_size(path, ignored);
  if (ignored || size != file.bytes)
    throw config_error(fmt::format(
      "{}: rank {} wrote it, but rank 0 does not see it: checkpoints need a "
      "folder that all machines share",
      path, file.rank));
}

} // namespace

failure failure_of(const std::exception& x) {
  if (auto* e = dynamic_cast<const error*>(&x))
    return e->cause();
  if (auto limit = exhausted_limit(x))
    return limit->cause();
  return {error_code::user_code, no_rank, {}, x.what()};
}

checkpoint_writer::result checkpoint_writer::run() {
  auto first = world_of(rank_).front();
  checkpoint_place place; // of rank 0; the others get the folder
  std::string folder;
  try {
    folder = agree_everywhere(rank_, "smp.checkpoint.begin", [&] {
      refuse_newer(dir_, manifest_.step);
      place = begin_checkpoint(dir_, manifest_.step);
      return place.folder;
    });
  } catch (const error&) {
    if (rank_.self() == first)
      throw;
    return {}; // rank 0 tells it as the end of all
  }
  auto mine = try_write(folder);
  if (rank_.self() != first) {
    rank_.exchange().send(first, part_name, to_payload(mine));
    return {};
  }
  try {
    complete(place, collect(std::move(mine)));
  } catch (...) {
    remove_checkpoint(folder);
    throw;
  }
  remove_old_checkpoints(dir_, place, keep_);
  return {.folder = folder, .bytes = manifest_.bytes()};
}

// -- each rank ----------------------------------------------------------------

checkpoint_writer::part_or_failure
checkpoint_writer::try_write(const std::string& folder) {
  failure found;
  try {
    if (auto* why = std::get_if<failure>(&mine_))
      throw error{*why};
    return write(folder);
  } catch (const std::exception& e) {
    found = failure_of(e);
  }
  if (found.rank == no_rank)
    found.rank = rank_.self();
  return found;
}

checkpoint_part checkpoint_writer::write(const std::string& folder) {
  auto& content = std::get<checkpoint_content>(mine_);
  part result;
  write_file(folder, "model", content.model, result);
  write_file(folder, "state", content.state, result);
  // Each replica has its own rows if replicas shard the optimizer's state.
  result.members = std::move(content.members);
  return result;
}

void checkpoint_writer::write_file(const std::string& folder, const char* kind,
                                   pieces& xs, part& out) const {
  if (xs.empty())
    return;
  saved_file file{
    .name = fmt::format("{}-{}.safetensors", kind, rank_.self().value),
    .rank = rank_.self().value};
  std::vector<tensor_outline> outlines;
  for (auto& x : xs)
    outlines.push_back({x.about.name + x.about.pieces.front().part,
                        x.value.scalar_type(), x.value.sizes().vec()});
  auto path = (std::filesystem::path{folder} / file.name).string();
  write_safetensors(path, outlines, [&](size_t i) {
    // A copy is of no use once it is written.
    auto bytes = std::exchange(xs[i].value, {})
                   .detach()
                   .to(at::kCPU)
                   .contiguous();
    auto& piece = xs[i].about.pieces.front();
    piece.file = file.name;
    piece.checksum = checksum(bytes.const_data_ptr(), bytes.nbytes());
    return bytes;
  });
  for (auto& x : xs)
    out.tensors.push_back(std::move(x.about));
  file.bytes = std::filesystem::file_size(path);
  out.files.push_back(std::move(file));
}

// -- rank 0 -------------------------------------------------------------------

/// @throws error the first failure of a rank, once all ranks have reported
std::vector<checkpoint_part>
checkpoint_writer::collect(part_or_failure mine) const {
  std::vector<part> result;
  failure first_failure;
  for (auto rank : world_of(rank_)) {
    auto theirs = rank == rank_.self()
                    ? std::move(mine)
                    : from_payload<part_or_failure>(
                      rank_.exchange().receive(rank, part_name),
                      "part of a checkpoint");
    if (auto* why = std::get_if<failure>(&theirs)) {
      if (!first_failure)
        first_failure = *why;
    } else {
      result.push_back(std::get<part>(std::move(theirs)));
    }
  }
  if (first_failure)
    throw error{first_failure};
  return result;
}

void checkpoint_writer::complete(const checkpoint_place& place,
                                 const std::vector<part>& parts) {
  for (auto& x : parts) {
    for (auto& file : x.files)
      check_seen(place.folder, file);
    manifest_.files.insert(manifest_.files.end(), x.files.begin(),
                           x.files.end());
    manifest_.add(x.tensors);
    for (auto& y : x.members)
      manifest_.optimizers.at(y.optimizer).members[y.parameter] = y.group;
  }
  commit_checkpoint(place, to_json(manifest_));
}

} // namespace smp
