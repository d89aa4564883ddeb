#include "runtime/train/plugin.hpp"

#include "transport/error.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <filesystem>
#include <mutex>
#include <vector>

#include <dlfcn.h>

namespace smp {

namespace {

struct registered_model {
  const char* abi;
  std::string name;
  plugin_factory make;
};

/// Global, as loading is per process: the libraries with the models that they
/// registered, and the models of the library that is being loaded.
struct registry {
  std::mutex loading_mutex;
  std::map<std::string, std::vector<registered_model>> libraries;
  std::vector<registered_model> incoming;

  static registry& get() {
    static registry x;
    return x;
  }
};

[[noreturn]] void refuse(const std::string& text) {
  throw error{error_code::config, text};
}

/// @returns the models of `library`, loaded once per process
const std::vector<registered_model>& load(const std::string& library) {
  auto& all = registry::get();
  std::unique_lock guard{all.loading_mutex};
  auto known = all.libraries.find(library);
  if (known != all.libraries.end())
    return known->second;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(library, ignored))
    refuse(fmt::format("model.library = \"{}\" is not a file", library));
  all.incoming.clear();
  // Never closed: its code belongs to modules that may still be in use.
  if (::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr)
    refuse(
      fmt::format("model.library = \"{}\" cannot be loaded: {}; if it "
                  "misses a symbol, build it again with this smp and its "
                  "LibTorch",
                  library, ::dlerror()));
  return all.libraries.emplace(library, std::move(all.incoming)).first->second;
}

std::string list_of(const std::vector<registered_model>& models) {
  std::string result;
  for (auto& x : models)
    result += (result.empty() ? "\"" : ", \"") + x.name + '"';
  return result;
}

plugin_factory find(const std::string& library, const std::string& name) {
  auto& models = load(library);
  if (models.empty())
    refuse(
      fmt::format("model.library = \"{}\" registers no model; see "
                  "SMP_REGISTER_MODEL in runtime/train/plugin.hpp",
                  library));
  for (auto& x : models) {
    // Before its code is called: its tensors may have another layout.
    if (std::string_view{x.abi} != SMP_PLUGIN_ABI)
      refuse(
        fmt::format("model.library = \"{}\" was built for {}, this smp "
                    "is {}; build it again",
                    library, x.abi, SMP_PLUGIN_ABI));
    if (x.name == name)
      return x.make;
  }
  refuse(fmt::format("model.name = \"{}\" is not in {}; it has: {}", name,
                     library, list_of(models)));
}

template <class T>
T parse(const std::string& name, const std::string& value, const char* type) {
  T result{};
  auto* end = value.data() + value.size();
  auto [at, code] = std::from_chars(value.data(), end, result);
  if (code != std::errc{} || at != end)
    refuse(fmt::format("model.options.{} = {} is not {}", name, value, type));
  return result;
}

} // namespace

// -- options ------------------------------------------------------------------

const std::string* model_options::find(const std::string& name) const {
  asked_.insert(name);
  auto i = values_.find(name);
  return i == values_.end() ? nullptr : &i->second;
}

int64_t model_options::integer(const std::string& name,
                               int64_t fallback) const {
  auto* x = find(name);
  return x == nullptr ? fallback : parse<int64_t>(name, *x, "an integer");
}

double model_options::number(const std::string& name, double fallback) const {
  auto* x = find(name);
  return x == nullptr ? fallback : parse<double>(name, *x, "a number");
}

bool model_options::flag(const std::string& name, bool fallback) const {
  auto* x = find(name);
  if (x == nullptr)
    return fallback;
  if (*x != "true" && *x != "false")
    refuse(
      fmt::format("model.options.{} = {} is neither true nor false", name, *x));
  return *x == "true";
}

std::string model_options::text(const std::string& name,
                                const std::string& fallback) const {
  auto* x = find(name);
  return x == nullptr ? fallback : *x;
}

void model_options::check_all_used() const {
  for (auto& [name, value] : values_)
    if (!asked_.contains(name))
      refuse(fmt::format(
        "model.options.{} is not an option of this model; {}", name,
        asked_.empty() ? "it has none"
                       : fmt::format("it has: {}", fmt::join(asked_, ", "))));
}

// -- registration -------------------------------------------------------------

bool register_plugin_model(const char* abi, const char* name,
                           plugin_factory f) noexcept {
  registry::get().incoming.push_back({abi, name, f});
  return true;
}

void detail::check_number_of_tensors(size_t given, size_t taken) {
  if (given != taken)
    refuse(
      fmt::format("the data has {} tensors, but forward of this model "
                  "takes {}",
                  given, taken));
}

// -- loading ------------------------------------------------------------------

void check_plugin_model(const std::string& library, const std::string& name) {
  find(library, name);
}

std::unique_ptr<trainable> make_plugin_model(const std::string& library,
                                             const std::string& name,
                                             const model_options& options) {
  auto result = find(library, name)(options);
  options.check_all_used();
  return result;
}

} // namespace smp
