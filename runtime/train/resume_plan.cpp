#include "runtime/train/resume_plan.hpp"

#include "runtime/checkpoint/checkpoint_dir.hpp"
#include "runtime/checkpoint/checksum.hpp"
#include "runtime/checkpoint/manifest.hpp"
#include "runtime/config/config_schema.hpp"
#include "runtime/data/data.hpp"
#include "runtime/files/file_io.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <utility>

namespace smp {

namespace {

constexpr const char* samples_key
  = "samples per step (data.batch_size times replicas)";
constexpr const char* data_size_key = "bytes of data.path";
constexpr const char* data_sample_key = "sampled checksum of data.path";

/// The place of a file does not matter; the batch size counts all replicas.
bool is_remembered(const std::string& key) {
  auto* known = find_config_key(key);
  if ((known && known->is_file) || key == "data.batch_size")
    return false;
  for (auto table : {"model.", "data.", "optimizer."})
    if (key.starts_with(table))
      return true;
  return key == "smp.seed" || key == "smp.microbatches" || key == "train.dtype";
}

bool is_of_data(const std::string& key) {
  return key == data_size_key || key == data_sample_key;
}

/// With another value it would be another training.
bool must_stay(const std::string& key) {
  return key.starts_with("model.") || key.starts_with("data.")
         || key == "smp.seed" || key == "optimizer.type" || key == samples_key
         || is_of_data(key);
}

/// @returns what helps to find out how the data changed: "; data/a.txt was
/// written last, 2026-11-23 02:05:44 UTC"
std::string last_written(const data_source& data) {
  auto files = data.files();
  auto last = std::ranges::max_element(files, [](auto& x, auto& y) {
    return std::pair{x.changed.tv_sec, x.changed.tv_nsec}
           < std::pair{y.changed.tv_sec, y.changed.tv_nsec};
  });
  return last == files.end() ? std::string{}
                             : fmt::format("; {} was written last, {}",
                                           last->path, text_of(last->changed));
}

std::string value_of(const std::map<std::string, std::string>& xs,
                     const std::string& key) {
  auto i = xs.find(key);
  return i == xs.end() ? "not set" : i->second;
}

class planner_of_resume {
public:
  planner_of_resume(const train_config& x, const data_source& data)
    : config_(x), data_(data) {
    // nop
  }

  std::optional<resume_plan> run() const {
    auto& wanted = config_.checkpoint.resume;
    auto& dir = config_.checkpoint.dir;
    auto newest = dir.empty() ? std::nullopt : newest_checkpoint(dir);
    if (wanted == "none" && newest)
      throw config_error(fmt::format(
        "checkpoint.resume = \"none\", but checkpoint.dir holds {}; write "
        "\"auto\" to go on from it, or another checkpoint.dir",
        newest->folder));
    if (wanted != "none" && wanted != "auto")
      return go_on(named(wanted, newest));
    return newest ? std::optional{go_on(*newest)} : std::nullopt;
  }

private:
  static checkpoint_place named(const std::string& path,
                                const std::optional<checkpoint_place>& newest) {
    auto result = newest_checkpoint(path);
    if (!result)
      throw config_error(
        fmt::format("checkpoint.resume = \"{}\": no complete "
                    "checkpoint is there",
                    path));
    if (newest && newest->step > result->step)
      throw config_error(fmt::format(
        "checkpoint.resume = \"{}\", but checkpoint.dir holds a newer one, {}, "
        "that a later run would go on from; remove it or write another "
        "checkpoint.dir",
        path, newest->folder));
    return *result;
  }

  resume_plan go_on(const checkpoint_place& place) const {
    auto path = manifest_path(place.folder);
    checkpoint_manifest found;
    try {
      found = parse_manifest(read_text(path), path);
      refuse_wrong_step(place.folder, found.step);
    } catch (const error& e) {
      throw config_error(e.cause().text + way_around(place.folder));
    }
    auto fail = [&](const std::string& why) {
      throw config_error(
        fmt::format("cannot go on from {}: {}", place.folder, why));
    };
    resume_plan result{.folder = place.folder, .step = found.step};
    auto now = checkpoint_settings(config_, data_);
    auto both = now;
    both.insert(found.settings.begin(), found.settings.end());
    std::vector<std::string> different;
    bool changed_data = false;
    for (auto& [key, ignored] : both) {
      auto mine = value_of(now, key);
      auto theirs = value_of(found.settings, key);
      // Earlier checkpoints have no sample.
      if (mine == theirs
          || (key == data_sample_key && !found.settings.contains(key)))
        continue;
      changed_data = changed_data || is_of_data(key);
      if (must_stay(key))
        different.push_back(
          fmt::format("{} = {}, there {}", key, mine, theirs));
      else
        result.changes.push_back(
          fmt::format("{} = {}, was {}", key, mine, theirs));
    }
    if (!different.empty())
      fail(fmt::format("{}{}, or another checkpoint.dir to begin anew",
                       fmt::join(different, "; "),
                       changed_data
                         ? last_written(data_) + "; write what was there then"
                         : "; write what it was"));
    if (found.step > config_.train.steps)
      fail(
        fmt::format("{} steps are done, train.steps = {}; write more of "
                    "them, or another checkpoint.dir to begin anew",
                    found.step, config_.train.steps));
    return result;
  }

  const train_config& config_;
  const data_source& data_;
};

} // namespace

std::map<std::string, std::string>
checkpoint_settings(const train_config& x, const data_source& data) {
  std::map<std::string, std::string> result;
  std::istringstream lines{shared_settings(x)};
  for (std::string line; std::getline(lines, line);) {
    auto at = line.find(" = ");
    if (auto key = line.substr(0, at); is_remembered(key))
      result.emplace(key, line.substr(at + 3));
  }
  result[samples_key] = std::to_string(data.batch_size());
  uint64_t bytes = 0;
  std::vector<uint64_t> samples;
  for (auto& file : data.files()) {
    bytes += file.bytes;
    samples.push_back(file.sample);
  }
  if (bytes > 0) {
    result[data_size_key] = std::to_string(bytes);
    result[data_sample_key] = to_hex(
      checksum(samples.data(), samples.size() * sizeof(uint64_t)));
  }
  return result;
}

std::optional<resume_plan> plan_resume(const train_config& x,
                                       const data_source& data) {
  return planner_of_resume{x, data}.run();
}

} // namespace smp
