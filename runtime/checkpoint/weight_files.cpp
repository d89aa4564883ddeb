#include "runtime/checkpoint/weight_files.hpp"

#include "runtime/base/json_text.hpp"
#include "runtime/files/file_io.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <map>
#include <set>
#include <string_view>
#include <system_error>

namespace smp {

namespace {

using json = nlohmann::json;

/// Names of files, each with the names of its tensors.
using weight_map = std::map<std::string, std::set<std::string>>;

constexpr uint64_t max_index_size = 100'000'000; // bytes, as of a header

/// @returns the file to open first
std::string first_file(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored))
    return path;
  for (auto* name : {"model.safetensors", "model.safetensors.index.json"})
    if (auto file = std::filesystem::path{path} / name;
        std::filesystem::exists(file, ignored))
      return file.string();
  file_errors{"read", path}.fail(
    "the folder has neither model.safetensors "
    "nor model.safetensors.index.json");
}

/// Whether `x` names a file of the same folder, and none elsewhere.
bool is_name_beside(std::string_view x) {
  constexpr std::string_view parts{"/\0", 2};
  return !x.empty() && x != "." && x != ".."
         && x.find_first_of(parts) == std::string_view::npos;
}

json parse_index(const std::string& text, const file_errors& e) {
  constexpr int max_depth = 8;
  std::set<std::string> names; // in the object that is being read
  auto check = [&](int depth, json::parse_event_t event, json& x) {
    if (depth > max_depth)
      e.fail("it is nested too deep");
    if (event != json::parse_event_t::key)
      return true;
    if (depth == 1)
      names.clear();
    else if (depth == 2 && !names.insert(x.get<std::string>()).second)
      e.fail(json_text(x) + " stands twice in it");
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::exception& x) {
    e.fail(std::string{"it is not valid JSON: "} + x.what());
  }
}

weight_map read_index(const std::string& path, const file_errors& e) {
  auto text = try_read(path, max_index_size + 1);
  if (!text)
    e.fail_errno("open");
  if (text->size() > max_index_size)
    e.fail(fmt::format("an index has at most {} bytes", max_index_size));
  const auto index = parse_index(*text, e);
  if (!index.is_object() || !index.contains("weight_map")
      || !index["weight_map"].is_object())
    e.fail("it has no \"weight_map\" from tensors to files");
  weight_map result;
  for (auto& [name, file] : index["weight_map"].items()) {
    if (!file.is_string() || !is_name_beside(file.get<std::string>()))
      e.fail(
        fmt::format("weight_map: '{}' is in {}, which is not the name of a "
                    "file beside the index",
                    name, json_text(file)));
    result[file.get<std::string>()].insert(name);
  }
  return result;
}

} // namespace

weight_files::weight_files(const std::string& path) {
  auto file = first_file(path);
  if (file.ends_with(".json"))
    add_indexed(file);
  else
    add_one(file);
}

void weight_files::add_one(const std::string& path) {
  auto& file = files_.emplace_back(path);
  for (size_t k = 0; k < file.tensors().size(); ++k)
    add_tensor(k);
}

void weight_files::add_indexed(const std::string& index) {
  const file_errors e{"read", index};
  const auto folder = std::filesystem::path{index}.parent_path();
  for (auto& [name, wanted] : read_index(index, e)) {
    std::error_code ignored;
    if (!std::filesystem::exists(folder / name, ignored))
      e.fail(fmt::format("weight_map: '{}' is in \"{}\", which is not there",
                         *wanted.begin(), name));
    auto& file = files_.emplace_back((folder / name).string());
    for (auto& tensor : wanted)
      if (!file.find(tensor))
        e.fail(
          fmt::format("weight_map: '{}' is in \"{}\", which does not "
                      "have it",
                      tensor, name));
    for (size_t k = 0; k < file.tensors().size(); ++k)
      if (wanted.contains(file.tensors()[k].name))
        add_tensor(k);
  }
}

void weight_files::add_tensor(size_t position) {
  tensors_.push_back(files_.back().tensors()[position]);
  places_.push_back({files_.size() - 1, position});
}

at::Tensor weight_files::read(size_t position) const {
  auto& x = places_.at(position);
  return files_[x.file].read(x.position);
}

at::Tensor weight_files::read_rows(size_t position, int64_t begin,
                                   int64_t rows) const {
  auto& x = places_.at(position);
  return files_[x.file].read_rows(x.position, begin, rows);
}

} // namespace smp
