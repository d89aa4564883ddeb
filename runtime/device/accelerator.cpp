#include "runtime/device/accelerator.hpp"

#include <map>
#include <mutex>
#include <utility>

namespace smp {

namespace {

struct registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<accelerator>> all;

  static registry& get() {
    static registry result;
    return result;
  }
};

} // namespace

void add_accelerator(std::string name, std::shared_ptr<accelerator> x) {
  auto& known = registry::get();
  std::lock_guard guard{known.mutex};
  known.all.insert_or_assign(std::move(name), std::move(x));
}

std::shared_ptr<accelerator> find_accelerator(const std::string& name) {
  auto& known = registry::get();
  std::lock_guard guard{known.mutex};
  auto i = known.all.find(name);
  return i == known.all.end() ? nullptr : i->second;
}

std::set<std::string> accelerator_names() {
  auto& known = registry::get();
  std::lock_guard guard{known.mutex};
  std::set<std::string> result;
  for (auto& [name, x] : known.all)
    result.insert(name);
  return result;
}

} // namespace smp
