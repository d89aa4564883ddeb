#include "runtime/checkpoint/checkpoint_dir.hpp"

#include "runtime/files/file_io.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <tuple>

namespace fs = std::filesystem;

namespace smp {

namespace {

constexpr std::string_view prefix = "step-";

std::string folder_name(const checkpoint_place& x) {
  return x.attempt == 1 ? fmt::format("{}{}", prefix, x.step)
                        : fmt::format("{}{}-{}", prefix, x.step, x.attempt);
}

/// @returns nothing if no checkpoint has such a name
std::optional<checkpoint_place> place_of(const fs::path& folder) {
  auto name = folder.filename().string();
  if (!name.starts_with(prefix))
    return std::nullopt;
  checkpoint_place result;
  result.folder = folder.string();
  auto* end = name.data() + name.size();
  auto at = std::from_chars(name.data() + prefix.size(), end, result.step).ptr;
  if (at != end && *at == '-')
    std::from_chars(at + 1, end, result.attempt);
  return folder_name(result) == name ? std::optional{result} : std::nullopt;
}

/// What this process sees of a checkpoint.
struct seen_checkpoint {
  bool complete = false;
  std::error_code why = {}; // set if it cannot look
};

seen_checkpoint look_at(const std::string& folder) {
  std::error_code why;
  auto status = fs::status(manifest_path(folder), why);
  if (status.type() == fs::file_type::none)
    return {.why = why};
  return {.complete = status.type() == fs::file_type::regular};
}

/// @throws error (config) if it cannot look: what it must not read may well be
///         complete
bool is_complete(const std::string& folder) {
  auto seen = look_at(folder);
  if (seen.why)
    file_errors{"read", folder}.fail(seen.why.message());
  return seen.complete;
}

/// A link leads to what someone else put there: it may be read, but nothing is
/// written or removed behind it.
bool is_link(const std::string& path) {
  std::error_code ignored;
  return fs::is_symlink(fs::symlink_status(path, ignored));
}

/// All folders with the name of a checkpoint, oldest first.
/// @throws error (config) if `dir` cannot be read
std::vector<checkpoint_place> all_checkpoints(const std::string& dir) {
  std::vector<checkpoint_place> result;
  std::error_code why, ignored;
  for (fs::directory_iterator i{dir, why}, end; i != end; i.increment(why))
    if (auto place = place_of(i->path()); place && i->is_directory(ignored))
      result.push_back(*place);
  if (why && why != std::errc::no_such_file_or_directory
      && why != std::errc::not_a_directory)
    file_errors{"read", dir}.fail(why.message());
  std::ranges::sort(result);
  return result;
}

/// Whether smp writes files of such a name into a checkpoint: manifest.json,
/// model-RANK.safetensors, state-RANK.safetensors, or one of these while it is
/// not whole yet.
bool is_own_file(std::string_view name) {
  name = name.substr(0, name.find(partial_mark));
  if (name == "manifest.json")
    return true;
  constexpr std::string_view suffix = ".safetensors";
  constexpr std::string_view kinds[] = {"model-", "state-"};
  auto* kind = std::ranges::find_if(
    kinds, [&](auto x) { return name.starts_with(x); });
  if (kind == std::end(kinds) || !name.ends_with(suffix))
    return false;
  name.remove_prefix(kind->size());
  name.remove_suffix(std::min(suffix.size(), name.size()));
  return !name.empty()
         && name.find_first_not_of("0123456789") == std::string_view::npos;
}

} // namespace

std::vector<checkpoint_place> complete_checkpoints(const std::string& dir) {
  auto result = all_checkpoints(dir);
  std::erase_if(result, [](auto& x) { return !is_complete(x.folder); });
  return result;
}

std::optional<checkpoint_place> newest_checkpoint(const std::string& path) {
  if (is_complete(path))
    return place_of(path).value_or(checkpoint_place{.folder = path});
  auto all = complete_checkpoints(path);
  return all.empty() ? std::nullopt : std::optional{all.back()};
}

std::string manifest_path(const std::string& folder) {
  return folder + "/manifest.json";
}

void refuse_wrong_step(const std::string& folder, uint64_t step) {
  auto place = place_of(folder);
  if (place && place->step != step)
    file_errors{"read", folder}.fail(
      fmt::format("its manifest is that of step {}; a folder of this name "
                  "holds step {}: rename it to step-{}",
                  step, place->step, step));
}

void refuse_newer(const std::string& dir, uint64_t step) {
  auto later = all_checkpoints(dir);
  std::erase_if(later, [step](auto& x) {
    return x.step <= step || !is_complete(x.folder);
  });
  if (!later.empty())
    throw config_error(fmt::format(
      "cannot save step {}: {} holds a newer checkpoint, {}, that a later run "
      "would go on from; remove it or save in another folder",
      step, dir, later.back().folder));
}

checkpoint_place begin_checkpoint(const std::string& dir, uint64_t step) {
  std::error_code why;
  fs::create_directories(dir, why);
  if (why)
    file_errors{"make", dir}.fail(why.message());
  checkpoint_place result{.step = step};
  auto folder = [&] { return (fs::path{dir} / folder_name(result)).string(); };
  while (is_complete(folder()) || is_link(folder()))
    ++result.attempt;
  result.folder = folder();
  remove_checkpoint(result.folder); // an incomplete one
  file_errors e{"make", result.folder};
  if (::mkdir(result.folder.c_str(), 0777) != 0 && errno != EEXIST)
    e.fail_errno("mkdir");
  sync_folder(dir, e);
  return result;
}

void commit_checkpoint(const checkpoint_place& x, const std::string& manifest) {
  auto path = manifest_path(x.folder);
  file_errors e{"write", path};
  replacement out{path, e};
  out.write(manifest.data(), manifest.size());
  out.commit();
}

void remove_checkpoint(const std::string& folder) noexcept {
  if (is_link(folder))
    return;
  ::unlink(manifest_path(folder).c_str());
  std::error_code ignored;
  std::vector<fs::path> files;
  for (fs::directory_iterator i{folder, ignored}, end; i != end;
       i.increment(ignored))
    if (is_own_file(i->path().filename().string()))
      files.push_back(i->path());
  for (auto& x : files)
    ::unlink(x.c_str());
  ::rmdir(folder.c_str());
}

void remove_old_checkpoints(const std::string& dir,
                            const checkpoint_place& newest, uint64_t keep) {
  uint64_t kept = 1;
  auto all = all_checkpoints(dir);
  std::ranges::reverse(all);
  for (auto& x : all) {
    if (!(std::tie(x.step, x.attempt) < std::tie(newest.step, newest.attempt)))
      continue;
    auto seen = look_at(x.folder);
    if (!seen.why && (!seen.complete || (keep > 0 && kept++ >= keep)))
      remove_checkpoint(x.folder);
  }
}

std::string way_around(const std::string& folder) {
  std::vector<checkpoint_place> all;
  try {
    all = all_checkpoints(fs::path{folder}.parent_path().string());
  } catch (const error&) {
    // It is a hint only.
  }
  std::erase_if(all, [&](auto& x) {
    std::error_code ignored;
    return !look_at(x.folder).complete
           || fs::equivalent(x.folder, folder, ignored);
  });
  return all.empty()
           ? "; there is no other checkpoint"
           : "; without this folder, " + all.back().folder + " is the newest";
}

} // namespace smp
