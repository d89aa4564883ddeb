#include "tests/faults/fault_point.hpp"

#include <torch/optim/sgd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

// One fault of a process that preloads this library, at one place, as the
// environment says: SMP_TEST_FAULT="KIND PHASE RANK TIME", where TIME counts
// how often the rank came there. It happens once in a run, also if that is
// started again: a file named "fault" says that it did, and when.

namespace {

namespace fs = std::filesystem;

struct wanted_fault {
  wanted_fault() {
    auto* text = std::getenv("SMP_TEST_FAULT");
    auto* self = std::getenv("SMP_RANK");
    std::string rank;
    std::istringstream{text != nullptr ? text : ""} >> kind >> phase >> rank
      >> time;
    here = self != nullptr && rank == self;
  }

  std::string kind, phase;
  int time = 0;
  bool here = false;
};

/// What holds their thread keeps all actors waiting.
void hold_actors() {
  std::signal(SIGRTMIN + 7, [](int) {
    for (;;)
      ::pause();
  });
  for (auto& thread : fs::directory_iterator{"/proc/self/task"}) {
    std::string name;
    std::getline(std::ifstream{thread.path() / "comm"}, name);
    if (name == "caf.worker")
      ::syscall(SYS_tgkill, ::getpid(), std::stoi(thread.path().filename()),
                SIGRTMIN + 7);
  }
}

/// Somebody else fills the disk that the run writes to.
void fill_disk() {
  auto out = ::open("disk/filler", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  std::array<char, 4096> zeros{};
  auto size = zeros.size();
  while (size > 0)
    if (::write(out, zeros.data(), size) < 0)
      size /= 2;
  ::close(out);
}

void fail(const std::string& kind) {
  if (kind == "kill")
    std::raise(SIGKILL);
  if (kind == "stop")
    std::raise(SIGSTOP);
  if (kind == "abort")
    std::abort();
  if (kind == "throw")
    throw std::runtime_error{"on purpose"};
  if (kind == "memory")
    throw std::bad_alloc{};
  if (kind == "loop")
    for (std::atomic<bool> forever = true; forever;) {
      // nop
    }
  if (kind == "actors")
    hold_actors();
  if (kind == "disk")
    fill_disk();
}

/// A step that fails is made again (docs/modes.md), so that what throws once
/// harms nobody.
bool throws(const std::string& kind) {
  return kind == "throw" || kind == "memory";
}

/// What stands behind this library in the order of symbols.
template <class Function>
Function* next_of(const char* symbol) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, symbol));
}

} // namespace

extern "C" void smp_fault_point(const char* phase) {
  static const wanted_fault wanted;
  static std::atomic<int> times = 0;
  static std::atomic<bool> broken = false;
  if (!wanted.here || wanted.phase != phase)
    return;
  if (++times == wanted.time) {
    auto x = ::open("fault", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    broken = x >= 0;
    ::close(x);
    if (broken)
      fail(wanted.kind);
  } else if (broken && throws(wanted.kind)) {
    fail(wanted.kind);
  }
}

// -- phases without code of a user --------------------------------------------

namespace torch::optim {

at::Tensor SGD::step(LossClosure closure) {
  smp_fault_point("optimizer");
  static auto* const next = next_of<at::Tensor(SGD*, LossClosure)>(
    "_ZN5torch5optim3SGD4stepESt8functionIFN2at6TensorEvEE");
  return next(this, std::move(closure));
}

} // namespace torch::optim

/// While the second checkpoint is written.
extern "C" int fsync(int fd) {
  std::array<char, 4096> path{};
  auto link = "/proc/self/fd/" + std::to_string(fd);
  if (::readlink(link.c_str(), path.data(), path.size() - 1) > 0
      && std::strstr(path.data(), "/step-20/") != nullptr)
    smp_fault_point("checkpoint");
  static auto* const next = next_of<int(int)>("fsync");
  return next(fd);
}
