// What a stranger says to the port of a run, and what he answers to a rank.

#include "tests/fuzz/target.hpp"

#include "tests/support/actors/payloads.hpp"
#include "tests/support/runs/tcp.hpp"
#include "transport/error.hpp"
#include "transport/gate.hpp"

using namespace smp;
using namespace smp::test;
using namespace std::chrono_literals;

namespace {

constexpr size_t answer_size = 64;

std::vector<fuzz_bytes> gate_seeds() {
  auto hello = to_bytes("smpgate1" + std::string(32, 'x'));
  auto proof = hello;
  proof.resize(hello.size() + 32, std::byte{7});
  return {hello, proof};
}

gate& guarded() {
  static gate result{[] {
    gate::options x;
    x.secret = run_secret::make();
    x.patience = 30s;
    x.admit = [](file_descriptor) {};
    return x;
  }()};
  return result;
}

/// @returns whether the gate asked on
bool is_heard(std::span<const std::byte> x) {
  auto stranger = connect_to(guarded().port());
  linger at_once{1, 0}; // so that ports do not run out
  ::setsockopt(stranger.get(), SOL_SOCKET, SO_LINGER, &at_once,
               sizeof(at_once));
  send_bytes(stranger.get(), x);
  ::shutdown(stranger.get(), SHUT_WR);
  auto answer = receive_bytes(stranger.get(), answer_size);
  if (!is_closed(stranger.get()))
    throw std::logic_error{"the gate keeps who is gone"};
  if (guarded().stats().admitted != 0)
    throw std::logic_error{"the gate let a stranger in"};
  return answer.size() == answer_size;
}

void check_answer(std::span<const std::byte> x) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw std::runtime_error{"no pair of sockets"};
  file_descriptor rank{ends[0]}, stranger{ends[1]};
  send_bytes(stranger.get(), x);
  ::shutdown(stranger.get(), SHUT_WR);
  try {
    pass_gate(rank.get(), run_secret::make(), 30s);
  } catch (const error& e) {
    if (e.code() != error_code::transport)
      throw;
    return;
  }
  throw std::logic_error{"a rank takes a stranger for the gate"};
}

bool speaks_to_gate(std::span<const std::byte> x) {
  check_answer(x);
  return is_heard(x);
}

} // namespace

SMP_FUZZ_TARGET("nobody comes through the gate by chance",
                (fuzz_target{"gate", gate_seeds, speaks_to_gate, 1000}))
