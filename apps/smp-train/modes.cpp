#include "apps/smp-train/modes.hpp"

#include <algorithm>
#include <filesystem>

namespace smp::app {

namespace {

constexpr run_mode all[] = {
  {.name = "dynamic"},
  {.name = "fast", .fast = true},
  {.name = "static", .replays = true},
  {.name = "static+fast", .fast = true, .replays = true},
  {.name = "deterministic", .deterministic = true},
  {.name = "deterministic+static", .replays = true, .deterministic = true},
  {.name = "deterministic+fast", .fast = true, .deterministic = true},
  {.name = "deterministic+static+fast",
   .fast = true,
   .replays = true,
   .deterministic = true},
};

} // namespace

std::vector<run_mode> modes_of(const std::vector<std::string>& names) {
  auto named = [&names](const char* x) {
    return std::find(names.begin(), names.end(), x) != names.end();
  };
  std::vector<run_mode> result;
  for (auto& x : all)
    if (named(x.name) || named("all"))
      result.push_back(x);
  return result;
}

std::vector<std::string> names_of_modes() {
  std::vector<std::string> result;
  for (auto& x : all)
    result.emplace_back(x.name);
  result.emplace_back("all");
  return result;
}

void set_mode(train_config& config, const run_mode& x) {
  // Fast mode is set to its default: no step fails because of a promise.
  config.smp.fast_mode = x.fast ? std::nullopt : std::optional{false};
  config.smp.static_mode = x.replays;
  config.smp.deterministic_server = x.deterministic;
  // Removes configured keys that have no effect in this mode.
  config.smp = without_idle_keys(std::move(config.smp));
}

std::vector<std::string>
without_options(const std::vector<std::string>& xs,
                const std::vector<std::string>& options) {
  std::vector<std::string> result;
  for (size_t i = 0; i < xs.size(); ++i) {
    auto name = xs[i].substr(0, xs[i].find('='));
    if (std::find(options.begin(), options.end(), name) == options.end())
      result.push_back(xs[i]);
    else if (name == xs[i])
      ++i; // its value
  }
  return result;
}

std::string path_of_mode(const std::string& path, const run_mode& x) {
  if (path.empty())
    return {};
  std::filesystem::path whole{path};
  auto name = whole.stem().string() + "-" + x.name + whole.extension().string();
  return whole.replace_filename(name).string();
}

} // namespace smp::app
