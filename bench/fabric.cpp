// How fast bytes cross from one process to another:
//
//   bench_fabric [shm|tcp]
//
// Prints the median time of one direction (half a round trip between two ranks
// that are otherwise idle) and the bandwidth of a stream with a window of four
// messages.

#include "bench/fabric_pair.hpp"

using namespace smp;
using namespace smp::bench;
using steady = std::chrono::steady_clock;

namespace {

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

void run(const std::string& name) {
  ucx_options options;
  if (name == "tcp")
    options.transports = "tcp,self";
  fabric_pair pair{options};
  stay_on(0);
  std::printf("%-4s (%s)\n", name.c_str(),
              pair.ucx().transports_to(rank_id{1}).c_str());
  struct {
    const char* text;
    uint64_t size;
    int trips;
  } cases[] = {{"64 B", 64, 4000},        {"8 KB", 8 << 10, 4000},
               {"64 KB", 64 << 10, 3000}, {"1 MB", 1 << 20, 500},
               {"16 MB", 16 << 20, 60},   {"64 MB", 64 << 20, 20}};
  for (auto& x : cases) {
    auto trip = median(pair.round_trips(x.size, x.trips));
    auto rate = stream(pair.sends(), x.size, x.trips);
    std::printf("  %-6s %8.1f us one way %7.2f GB/s stream\n", x.text,
                trip / 2 * 1e6, rate / 1e9);
    std::fflush(stdout);
  }
}

} // namespace

int main(int argc, char** argv) {
  // A fork must precede the first thread, so each kind has its own processes.
  std::vector<std::string> kinds{"shm", "tcp"};
  if (argc > 1)
    kinds = {argv[1]};
  for (auto& kind : kinds)
    run(kind);
}
