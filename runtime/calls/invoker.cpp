#include "runtime/calls/invoker.hpp"

#include "runtime/base/fnv_hash.hpp"
#include "transport/error.hpp"

#include <map>
#include <mutex>
#include <stdexcept>

namespace smp {

namespace {

/// Filled before main, and by libraries that are loaded later.
struct registry {
  std::mutex mutex;
  std::map<uint64_t, std::pair<std::string, invoker_function>> functions;

  static registry& get() {
    static registry x;
    return x;
  }
};

} // namespace

uint64_t register_invoker(const char* type_name, invoker_function f) {
  auto& r = registry::get();
  fnv_hash hash;
  hash.add(type_name);
  auto id = hash.get();
  std::unique_lock guard{r.mutex};
  auto& entry = r.functions[id];
  if (!entry.first.empty() && entry.first != type_name)
    throw std::logic_error{"two invokers with one hash: " + entry.first
                           + " and " + type_name};
  entry = {type_name, f};
  return id;
}

invoker_function find_invoker(uint64_t x) {
  auto& r = registry::get();
  std::unique_lock guard{r.mutex};
  auto i = r.functions.find(x);
  if (i == r.functions.end())
    throw error{error_code::protocol,
                "a call of a function that this program does not have: do all "
                "ranks run the same binary?"};
  return i->second.second;
}

} // namespace smp
