#include "tests/support/catch.hpp"

#include "runtime/process/control_group.hpp"
#include "tests/support/scratch_dir.hpp"

#include <filesystem>
#include <string>

using namespace smp;
using namespace smp::test;

namespace {

/// A directory that stands for /sys/fs/cgroup.
struct group_dir : scratch_dir {
  explicit group_dir(const std::string& groups) {
    write("own", groups);
  }

  void set(const std::string& file, const std::string& text) {
    std::filesystem::create_directories((path / file).parent_path());
    write(file, text);
  }

  control_group look() const {
    return read_control_group({path.string(), (path / "own").string()});
  }
};

} // namespace

TEST_CASE("the least limit of a control group and those above it counts",
          "[runtime][cores]") {
  group_dir x{"1:name=systemd:/\n0::/job/step\n"};
  x.set("job/step/memory.max", "max\n");
  x.set("job/step/cpu.max", "max 100000\n");
  x.set("job/step/memory.events", "low 0\noom 3\noom_kill 2\n");
  CHECK_FALSE(x.look().memory);
  CHECK_FALSE(x.look().cpus);
  CHECK(x.look().oom_kills == 2);
  CHECK_FALSE(share_of_cpus(x.look(), 2));
  x.set("job/memory.max", "2000000000\n");
  x.set("job/cpu.max", "350000 100000\n");
  CHECK(x.look().memory == 2'000'000'000);
  CHECK(x.look().cpus == 3.5);
  CHECK(share_of_cpus(x.look(), 1) == 3);
  CHECK(share_of_cpus(x.look(), 2) == 1);
  CHECK(share_of_cpus(x.look(), 8) == 1);
}

TEST_CASE("control groups of version 1 say the same, also in a container",
          "[runtime][cores]") {
  // A container is told its path on the host, but sees its own group on top.
  group_dir x{"5:cpu,cpuacct:/docker/7\n4:memory:/docker/7\n"};
  x.set("memory/memory.limit_in_bytes", "9223372036854771712\n");
  x.set("memory/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n");
  x.set("cpu/cpu.cfs_quota_us", "-1\n");
  x.set("cpu/cpu.cfs_period_us", "100000\n");
  CHECK_FALSE(x.look().memory);
  CHECK_FALSE(x.look().cpus);
  CHECK(x.look().oom_kills == 1);
  x.set("memory/memory.limit_in_bytes", "512000000\n");
  x.set("cpu/cpu.cfs_quota_us", "200000\n");
  CHECK(x.look().memory == 512'000'000);
  CHECK(x.look().cpus == 2);
}

TEST_CASE("an end for lack of memory is reported as such",
          "[runtime][launch]") {
  group_dir x{"0::/job\n"};
  x.set("job/memory.events", "oom_kill 4\n");
  auto before = x.look();
  CHECK(why_killed(before, x.look()).empty());
  x.set("job/memory.events", "oom_kill 5\n");
  CHECK(why_killed(before, x.look()) == ", as the machine had no more memory");
  x.set("job/memory.max", "512000000\n");
  CHECK(why_killed(before, x.look())
        == ", as its control group (container, batch job) may use no more than "
           "512 MB of memory (docs/large_models.md)");
  // Without control groups nobody knows.
  CHECK(why_killed({}, {}).empty());
}

TEST_CASE("memory that only holds files that were read is free",
          "[runtime][launch]") {
  group_dir x{"0::/job/step\n"};
  auto meminfo = x.write("meminfo",
                         "MemTotal:       9000000 kB\n"
                         "MemFree:         100000 kB\n"
                         "MemAvailable:   4000000 kB\n");
  auto left = [&] { return memory_left(x.look(), meminfo); };
  CHECK(left() == 4'000'000 * uint64_t{1024});
  CHECK_FALSE(memory_left(x.look(), x.path / "nothing"));
  // The group above has less room than this one, and the machine more.
  x.set("job/step/memory.max", "max\n");
  x.set("job/step/memory.current", "5000\n");
  CHECK(left() == 4'000'000 * uint64_t{1024});
  x.set("job/memory.max", "2000000\n");
  x.set("job/memory.current", "1900000\n");
  CHECK(left() == 100'000);
  x.set("job/memory.stat", "anon 5\ninactive_file 300000\nslab 7\n");
  CHECK(left() == 400'000);
  x.set("job/memory.current", "2500000\n");
  CHECK(left() == 0);
  // Version 1.
  group_dir old{"4:memory:/docker/7\n"};
  old.set("memory/memory.limit_in_bytes", "512000000\n");
  old.set("memory/memory.usage_in_bytes", "500000000\n");
  old.set("memory/memory.stat", "inactive_file 1\ntotal_inactive_file 2000\n");
  CHECK(memory_left(old.look(), meminfo) == 12'002'000);
}
