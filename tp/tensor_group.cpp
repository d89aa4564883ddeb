#include "tp/tensor_group.hpp"

#include "transport/error.hpp"

#include <utility>

namespace smp {

namespace {

thread_local tensor_group* current_group = nullptr;

} // namespace

tensor_group::~tensor_group() = default;

tensor_group& tensor_group::current() {
  if (current_group)
    return *current_group;
  throw error{error_code::unsupported,
              "a distributed module or collective outside of a step: its peers "
              "are not there"};
}

tensor_group* tensor_group::set_current(tensor_group* x) noexcept {
  return std::exchange(current_group, x);
}

} // namespace smp
