// What the ranks of a pipeline say to each other about modules and tensors. An
// input begins with which message it is to be, of those of `all_messages`.

#include "tests/fuzz/target.hpp"

#include "tests/support/torch/messages.hpp"

#include <stdexcept>

using namespace smp;
using namespace smp::test;

namespace {

const std::vector<message_type>& types() {
  static const auto result = all_messages();
  return result;
}

std::vector<fuzz_bytes> message_seeds() {
  std::vector<fuzz_bytes> result;
  for (auto& m : types()) {
    auto& seed = result.emplace_back(m.sent.bytes);
    seed.insert(seed.begin(), static_cast<std::byte>(result.size() - 1));
  }
  return result;
}

bool reads_message(std::span<const std::byte> x) {
  if (x.empty() || std::to_integer<size_t>(x[0]) >= types().size())
    return false;
  auto& m = types()[std::to_integer<size_t>(x[0])];
  payload body{{x.begin() + 1, x.end()}, m.sent.tensors};
  try {
    if (m.again(body).bytes != body.bytes)
      throw std::logic_error{std::string{"two forms of one "} + m.name};
    return true;
  } catch (const error& e) {
    if (e.code() != error_code::protocol)
      throw;
    return false;
  }
}

} // namespace

SMP_FUZZ_TARGET("a damaged message about a module is refused, or another one",
                (fuzz_target{"messages", message_seeds, reads_message}))
