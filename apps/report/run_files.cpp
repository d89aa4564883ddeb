#include "apps/report/run_files.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <toml++/toml.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <vector>

namespace fs = std::filesystem;

namespace smp::app {

namespace {

/// Enough for the last dozens of steps, in bytes: the file may have millions.
constexpr std::streamoff tail_size = 16384;

/// Of a step of very many ranks on devices a line may be longer.
constexpr std::streamoff longest_tail = 64 * tail_size;

/// @returns the complete lines at the end of a file, last one last
std::vector<std::string> last_lines(const fs::path& path,
                                    std::streamoff tail = tail_size) {
  std::ifstream file{path, std::ios::binary | std::ios::ate};
  if (!file)
    return {};
  auto size = static_cast<std::streamoff>(file.tellg());
  auto begin = std::max<std::streamoff>(size - tail, 0);
  file.seekg(begin);
  std::string text{std::istreambuf_iterator<char>{file}, {}};
  std::vector<std::string> result;
  // The first line may lack its begin, the last one its end.
  auto at = begin > 0 ? text.find('\n') + 1 : 0;
  for (auto end = text.find('\n', at); end != std::string::npos;
       end = text.find('\n', at)) {
    result.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  if (result.empty() && begin > 0 && tail < longest_tail)
    return last_lines(path, 2 * tail);
  return result;
}

std::optional<last_step> read_last_step(const fs::path& path) {
  constexpr size_t averaged = 40;
  auto lines = last_lines(path);
  std::optional<last_step> result;
  std::optional<uint64_t> from; // of a restart that no step has followed
  double seconds = 0;
  size_t count = 0;
  for (auto i = lines.rbegin(); i != lines.rend() && count < averaged; ++i) {
    auto x = nlohmann::json::parse(*i, nullptr, false);
    if (!x.is_object())
      continue;
    if (auto y = x.find("from_step");
        y != x.end() && y->is_number() && !result && !from)
      from = y->get<uint64_t>();
    if (!x.contains("step") || !x["step"].is_number())
      continue;
    if (!result && from && x["step"] != *from)
      continue; // is lost
    auto number = [&x](const char* key) {
      auto y = x.find(key);
      return y != x.end() && y->is_number() ? std::optional{y->get<double>()}
                                            : std::nullopt;
    };
    if (!result) {
      result.emplace();
      result->step = x["step"].get<uint64_t>();
      result->loss = number("loss");
      result->samples_per_second = number("samples_per_second").value_or(0);
      result->grad_norm = number("grad_norm");
      result->bubble = number("bubble_ratio");
    }
    if (auto loss = number("loss"))
      result->losses.insert(result->losses.begin(), *loss);
    seconds += number("step_seconds").value_or(0);
    ++count;
  }
  if (!result && from && *from > 0)
    result.emplace().step = *from;
  else if (result)
    result->step_seconds = seconds / static_cast<double>(count);
  return result;
}

/// Looks for folders "step-40".
void find_checkpoint(const fs::path& dir, run_files& to) {
  constexpr std::string_view prefix = "step-";
  std::error_code ignored;
  for (auto& x : fs::directory_iterator{dir, ignored}) {
    auto name = x.path().filename().string();
    uint64_t step = 0;
    auto* end = name.data() + name.size();
    if (!name.starts_with(prefix)
        || std::from_chars(name.data() + prefix.size(), end, step).ptr != end
        || (to.checkpoint && step <= *to.checkpoint))
      continue;
    to.checkpoint = step;
    to.checkpoint_time = std::chrono::file_clock::to_sys(
      x.last_write_time(ignored));
  }
}

void read_config_file(const fs::path& path, run_files& to) {
  try {
    auto config = toml::parse_file(path.string());
    if (auto dir = config["checkpoint"]["dir"].value<std::string>();
        dir && !dir->empty())
      find_checkpoint(*dir, to);
    auto number = [&config](const char* table, const char* key) {
      return static_cast<uint64_t>(
        std::max<int64_t>(config[table][key].value_or(int64_t{0}), 0));
    };
    to.steps = number("train", "steps");
    // Present only where samples are sequences.
    to.tokens_per_sample = number("data", "sequence_length");
    to.found = true;
  } catch (const toml::parse_error&) {
    // Missing, or not yet complete.
  }
}

void read_end(const fs::path& path, run_files& to) {
  std::ifstream file{path};
  auto x = nlohmann::json::parse(file, nullptr, false);
  if (!x.is_object() || !x.contains("exit_code")
      || !x["exit_code"].is_number_integer())
    return;
  to.exit_code = x["exit_code"].get<int>();
  if (auto cause = x.find("cause"); cause != x.end() && cause->is_string())
    to.cause = cause->get<std::string>();
  if (auto n = x.find("restarts"); n != x.end() && n->is_number_unsigned())
    to.restarts = n->get<uint64_t>();
}

void read_stall(const fs::path& path, run_files& to) {
  std::ifstream file{path};
  auto x = nlohmann::json::parse(file, nullptr, false);
  if (x.is_object() && x.contains("text") && x["text"].is_string())
    to.stall = x["text"].get<std::string>();
}

} // namespace

run_files read_run_files(const std::string& run_dir) {
  run_files result;
  fs::path dir{run_dir};
  std::error_code ignored;
  if (!fs::is_directory(dir, ignored))
    return result;
  read_config_file(dir / "config.toml", result);
  result.last = read_last_step(dir / "metrics.jsonl");
  read_end(dir / "end.json", result);
  read_stall(dir / "stall.json", result);
  result.found = result.found || result.last || result.exit_code
                 || fs::exists(dir / "log-0.txt", ignored);
  return result;
}

std::vector<config_setting> read_settings(const std::string& run_dir) {
  constexpr std::string_view follows = " follows from other keys";
  std::vector<config_setting> result;
  std::ifstream file{fs::path{run_dir} / "config.toml"};
  std::string table;
  for (std::string line; std::getline(file, line);) {
    std::string_view x = line;
    if (x.starts_with('[')) {
      table = x.substr(1, x.find(']') - 1);
      continue;
    }
    config_setting setting;
    // "# memory_weight = 0.8 follows from other keys"
    if (x.starts_with("# ") && x.ends_with(follows)) {
      x = x.substr(2, x.size() - 2 - follows.size());
      setting.origin = "other keys";
    }
    auto equals = x.find(" = ");
    if (table.empty() || x.starts_with('#') || equals == x.npos)
      continue;
    setting.name = table + '.' + std::string{x.substr(0, equals)};
    x = x.substr(equals + 3);
    // A value that has this in it has quotes behind it.
    if (auto comment = x.rfind("  # ");
        comment != x.npos && x.find('"', comment) == x.npos) {
      setting.origin = x.substr(comment + 4);
      x = x.substr(0, comment);
    }
    setting.value = x;
    result.push_back(std::move(setting));
  }
  return result;
}

std::string progress_text(const run_files& x) {
  if (!x.last)
    return {};
  auto result = x.steps > 0 ? fmt::format("step {}/{}", x.last->step, x.steps)
                            : fmt::format("step {}", x.last->step);
  if (x.last->loss)
    result += fmt::format(", loss {:.4f}", *x.last->loss);
  return result;
}

} // namespace smp::app
