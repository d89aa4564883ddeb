// How a rank introduces itself, and is answered: what CAF gives to actors.

#include "tests/fuzz/target.hpp"

#include "actors/cluster/roster.hpp"
#include "actors/protocol/inspect_messages.hpp"
#include "actors/protocol/introduction.hpp"

#include <caf/binary_deserializer.hpp>
#include <caf/binary_serializer.hpp>
#include <caf/byte_buffer.hpp>

using namespace smp;
using namespace smp::test;

namespace {

member of_run(uint64_t rank) {
  member result;
  result.rank = rank_id{rank};
  result.pid = 4711;
  result.host = "node1";
  result.machine = "node1 boot";
  result.cores = {0, 1, 130};
  result.run_id = "run";
  result.build = "build";
  result.settings = "smp.seed = 1\n";
  return result;
}

member rank_three() {
  auto result = of_run(3);
  result.fabric_address = std::string("\0\1\2", 3);
  return result;
}

/// The first byte says who speaks: a rank, or the SUPERVISOR.
template <class T>
fuzz_bytes spoken(std::byte who, const T& x) {
  caf::byte_buffer buffer;
  caf::binary_serializer out{nullptr, buffer};
  if (!out.apply(x))
    return {};
  fuzz_bytes result{who};
  for (auto y : buffer)
    result.push_back(static_cast<std::byte>(y));
  return result;
}

std::vector<fuzz_bytes> introduction_seeds() {
  return {spoken(std::byte{0}, rank_three()),
          spoken(std::byte{1}, welcome{{rank_three(), rank_three()}, {}}),
          spoken(std::byte{1},
                 welcome{{}, {error_code::config, rank_id{1}, "", "no"}})};
}

template <class T>
bool heard(std::span<const std::byte> bytes, T& x) {
  caf::binary_deserializer in{nullptr, bytes.data(), bytes.size()};
  return in.apply(x) && in.remaining() == 0;
}

bool takes_part(std::span<const std::byte> x) {
  if (x.empty())
    return false;
  if (x[0] != std::byte{0}) {
    welcome answer;
    return heard(x.subspan(1), answer);
  }
  member m;
  if (!heard(x.subspan(1), m))
    return false;
  roster members{4, "run"};
  members.admit(of_run(0));
  if (members.check_stranger(m).code != error_code::none)
    return true; // read, and sent away
  members.admit(m);
  (void)members.missing(std::chrono::seconds{1});
  return true;
}

} // namespace

SMP_FUZZ_TARGET("a damaged introduction of a rank is refused or read",
                (fuzz_target{"introduction", introduction_seeds, takes_part}))
