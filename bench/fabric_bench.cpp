// How fast bytes cross from one process to another:
//
//   bench_fabric_bench [shm|tcp]
//
// Prints the median time of one direction (half a round trip between two ranks
// that are otherwise idle) and the bandwidth of a stream with a window of four
// messages.

#include "transport/ucx/ucx_fabric.hpp"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

using namespace smp;
using steady = std::chrono::steady_clock;

namespace {

/// Envelope of the messages: what the other side shall do.
enum class order : uint8_t { echo, count, quit };

struct listener : fabric_listener {
  explicit listener(std::function<void(message)> f) : handle(std::move(f)) {
    // nop
  }

  void on_message(rank_id, message x) override {
    handle(std::move(x));
  }

  void on_peer_lost(const failure& x) override {
    std::fprintf(stderr, "%s\n", x.describe().c_str());
    std::_Exit(3);
  }

  std::function<void(message)> handle;
};

message make(order what, uint64_t size) {
  static const auto block = std::make_shared<std::vector<char>>(64 << 20, 'x');
  message result;
  result.body.bytes = {static_cast<std::byte>(what)};
  if (size > 0)
    result.body.tensors.push_back({block->data(), size, 0, {},
                                   {static_cast<int64_t>(size)}, block});
  return result;
}

/// Gives `mine` to the other process and takes its own.
std::string swap_addresses(int socket, const std::string& mine) {
  char buffer[4096];
  if (::send(socket, mine.data(), mine.size(), 0) < 0)
    std::exit(1);
  auto size = ::recv(socket, buffer, sizeof buffer, 0);
  if (size <= 0)
    std::exit(1);
  return {buffer, static_cast<size_t>(size)};
}

/// Counts what arrives, for the main thread to wait for.
struct counter {
  void add() {
    std::lock_guard guard{mutex};
    ++value;
    changed.notify_one();
  }

  void wait(uint64_t x) {
    std::unique_lock guard{mutex};
    if (!changed.wait_for(guard, std::chrono::seconds{60},
                          [&] { return value >= x; })) {
      std::fprintf(stderr, "no answer\n");
      std::_Exit(3);
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  uint64_t value = 0;
};

/// Echoes or counts until told to quit.
void serve(int socket, const ucx_options& options) {
  ucx_fabric fabric{rank_id{1}, 2, options};
  auto other = swap_addresses(socket, fabric.address());
  counter quit;
  listener l{[&](message x) {
    auto what = static_cast<order>(x.body.bytes.at(0));
    if (what == order::quit)
      quit.add();
    else if (what == order::echo)
      fabric.send(rank_id{0}, make(what, tensor_bytes(x.body)));
  }};
  fabric.start({other, {}}, l);
  quit.wait(1);
  fabric.stop(std::chrono::seconds{5});
}

double round_trips(fabric& f, counter& answers, uint64_t size, int count) {
  std::vector<double> times;
  for (int i = 0; i < count + count / 5; ++i) {
    uint64_t before = 0;
    {
      std::lock_guard guard{answers.mutex};
      before = answers.value;
    }
    auto begin = steady::now();
    f.send(rank_id{1}, make(order::echo, size));
    answers.wait(before + 1);
    std::chrono::duration<double> spent = steady::now() - begin;
    if (i >= count / 5)
      times.push_back(spent.count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

double stream(fabric& f, uint64_t size, int count) {
  counter sent;
  auto begin = steady::now();
  for (int i = 0; i < count; ++i) {
    if (i >= 4)
      sent.wait(static_cast<uint64_t>(i) - 3);
    f.send(rank_id{1}, make(order::count, size),
           [&](const failure&) { sent.add(); });
  }
  sent.wait(static_cast<uint64_t>(count));
  std::chrono::duration<double> spent = steady::now() - begin;
  return static_cast<double>(size) * count / spent.count();
}

void measure(int socket, const ucx_options& options, const char* name) {
  ucx_fabric fabric{rank_id{0}, 2, options};
  auto other = swap_addresses(socket, fabric.address());
  counter answers;
  listener l{[&](message) { answers.add(); }};
  fabric.start({{}, other}, l);
  std::printf("%-4s (%s)\n", name, fabric.transports_to(rank_id{1}).c_str());
  struct {
    const char* text;
    uint64_t size;
    int trips;
  } cases[] = {{"64 B", 64, 4000},
               {"8 KB", 8 << 10, 4000},
               {"64 KB", 64 << 10, 3000},
               {"1 MB", 1 << 20, 500},
               {"16 MB", 16 << 20, 60},
               {"64 MB", 64 << 20, 20}};
  for (auto& x : cases) {
    auto trip = round_trips(fabric, answers, x.size, x.trips);
    auto rate = stream(fabric, x.size, x.trips);
    std::printf("  %-6s %8.1f us one way %7.2f GB/s stream\n", x.text,
                trip / 2 * 1e6, rate / 1e9);
    std::fflush(stdout);
  }
  fabric.send(rank_id{1}, make(order::quit, 0));
  fabric.stop(std::chrono::seconds{5});
}

void run(const std::string& name) {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) != 0)
    std::exit(1);
  ucx_options options;
  if (name == "tcp")
    options.transports = "tcp,self";
  std::fflush(stdout);
  auto child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    serve(sockets[1], options);
    std::_Exit(0);
  }
  ::close(sockets[1]);
  measure(sockets[0], options, name.c_str());
  ::close(sockets[0]);
  ::waitpid(child, nullptr, 0);
}

} // namespace

int main(int argc, char** argv) {
  // A fork must come before the first thread, so each kind has its processes.
  std::vector<std::string> kinds{"shm", "tcp"};
  if (argc > 1)
    kinds = {argv[1]};
  for (auto& kind : kinds)
    run(kind);
}
