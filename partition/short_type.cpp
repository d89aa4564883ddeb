#include "partition/short_type.hpp"

namespace smp {

std::string short_type(std::string x) {
  auto end = x.find('<');
  auto begin = x.find_last_of(":.", end);
  if (begin != std::string::npos)
    x.erase(0, begin + 1);
  for (std::string suffix : {"_impl", "Impl"})
    if (x.size() > suffix.size() && x.ends_with(suffix))
      x.resize(x.size() - suffix.size());
  return x;
}

} // namespace smp
