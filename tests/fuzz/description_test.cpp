// A message with what its tensors are, behind the header.

#include "tests/fuzz/target.hpp"

#include "tests/support/actors/payloads.hpp"
#include "transport/ucx/wire.hpp"

#include <stdexcept>

using namespace smp;
using namespace smp::test;
using namespace smp::ucx;

namespace {

std::vector<fuzz_bytes> description_seeds() {
  auto tensors = make_message("envelope",
                              {make_tensor(100, 1), make_tensor(0, 2),
                               make_tensor(packed_limit, 3),
                               make_tensor(packed_limit + 1, 4)},
                              message_kind::control);
  tensors.body.tensors[0].shape = {2, 5, 10};
  tensors.body.tensors[0].strides = {1, 2, 10};
  return {write_description(make_message(""), 0),
          write_description(make_message("a call", {make_tensor(16, 1)}), 0),
          write_description(tensors, 0)};
}

bool reads_description(std::span<const std::byte> x) {
  block_pool pool{0};
  try {
    auto got = read_description(x, pool);
    // Sizes that were believed are sizes that are there.
    for (size_t i = 0; i < got.content.body.tensors.size(); ++i) {
      auto& tensor = got.content.body.tensors[i];
      if (!tensor.strides.empty() && !are_strides(tensor.strides, tensor.shape))
        throw std::logic_error{"strides that leave the tensor"};
      if (tensor.data == nullptr)
        continue;
      auto bytes = static_cast<const volatile std::byte*>(tensor.data);
      for (uint64_t at = 0; at < tensor.nbytes; ++at)
        (void)bytes[at];
    }
    return true;
  } catch (const error& e) {
    if (e.code() != error_code::protocol)
      throw;
    return false;
  }
}

} // namespace

SMP_FUZZ_TARGET(
  "a damaged description of a message is refused, or has all "
  "that it claims",
  (fuzz_target{"description", description_seeds, reads_description}))
