// What begins each active message: anybody who reaches a port of UCX sends it.

#include "tests/fuzz/target.hpp"

#include "transport/ucx/wire.hpp"

using namespace smp;
using namespace smp::test;
using namespace smp::ucx;

namespace {

constexpr run_token token = {std::byte{1}, std::byte{2}, std::byte{3}};

std::vector<fuzz_bytes> header_seeds() {
  std::vector<fuzz_bytes> result;
  for (auto& x : std::vector<unit_header>{
         {},
         {unit_kind::long_description, data_kind::bytes, 3, 0, 17, 0, 0},
         {unit_kind::chunk, data_kind::bytes, 1, 4, 99, chunk_size,
          3 * chunk_size},
         {unit_kind::chunk, data_kind::bytes, 1, 0, 100, 0, chunk_size, 42},
         {unit_kind::placed, data_kind::none, 2, 0, 42, 1, 0},
         {unit_kind::goodbye, data_kind::none, 2, 0, 5, 0, 0}}) {
    result.emplace_back(header_size);
    write_header(result.back(), x, token);
  }
  return result;
}

bool reads_header(std::span<const std::byte> x) {
  auto header = read_header(x, token);
  if (!header)
    return false;
  // What is accepted means one thing only.
  fuzz_bytes again(header_size);
  write_header(again, *header, token);
  if (!std::equal(again.begin(), again.end(), x.begin()))
    throw std::logic_error{"two headers mean the same"};
  return true;
}

} // namespace

SMP_FUZZ_TARGET(
  "a damaged header of a UCX message is refused, or means what "
  "it says",
  (fuzz_target{"ucx_header", header_seeds, reads_header}))
