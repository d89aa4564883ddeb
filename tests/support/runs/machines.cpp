#include "tests/support/runs/machines.hpp"

#include "tests/support/catch.hpp"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace smp::test {

namespace {

namespace fs = std::filesystem;

/// In the holder of a machine: makes it. @returns what failed, or nothing
const char* become_machine(const std::string& host, const fs::path& hosts) {
  if (::unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS | CLONE_NEWIPC) != 0)
    return "unshare";
  if (::sethostname(host.data(), host.size()) != 0)
    return "sethostname";
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
    return "mount --make-rprivate /";
  if (::mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777") != 0)
    return "mount /dev/shm";
  // The interfaces that /sys shows are those of who mounted it.
  if (::mount("sysfs", "/sys", "sysfs", 0, nullptr) != 0)
    return "mount /sys";
  if (::mount(hosts.c_str(), "/etc/hosts", nullptr, MS_BIND, nullptr) != 0)
    return "mount /etc/hosts";
  return nullptr;
}

std::vector<std::string> in_network(pid_t holder,
                                    std::vector<std::string> command) {
  command.insert(command.begin(),
                 {"nsenter", "-t", std::to_string(holder), "-n"});
  return command;
}

/// Of the switch: "port0", and "port0-eth1".
std::string port_of(size_t i, const std::string& interface = "eth0") {
  auto result = "port" + std::to_string(i);
  return interface == "eth0" ? result : result + '-' + interface;
}

} // namespace

machines::machines(size_t count, bool ipv6_only) : ipv6_only_(ipv6_only) {
  if (::geteuid() != 0)
    SKIP("only root can make network namespaces");
  std::string file = fs::temp_directory_path() / "smp-hosts-XXXXXX";
  auto fd = ::mkstemp(file.data());
  REQUIRE(fd >= 0);
  ::close(fd);
  hosts_ = file;
  {
    std::ofstream out{file};
    out << "127.0.0.1 localhost\n::1 localhost\n";
    for (size_t i = 0; i < count; ++i)
      out << (ipv6_only ? ipv6_address(i) : ipv4_address(i)) << ' ' << name(i)
          << '\n';
  }
  switch_ = hold("switch", hosts_);
  must(in_network(switch_, {"ip", "link", "add", "bridge", "type", "bridge"}));
  must(in_network(switch_, {"ip", "link", "set", "bridge", "up"}));
  for (size_t i = 0; i < count; ++i) {
    auto holder = hold(name(i), hosts_);
    holders_.push_back(holder);
    must(in_network(holder, {"ip", "link", "set", "lo", "up"}));
    std::vector<std::string> addresses{ipv6_address(i) + "/64"};
    if (!ipv6_only)
      addresses.push_back(ipv4_address(i) + "/24");
    connect(i, "eth0", addresses);
  }
  for (size_t i = 0; i < count; ++i)
    await_carrier(i, "eth0");
}

void machines::connect(size_t i, const std::string& interface,
                       const std::vector<std::string>& addresses) const {
  auto holder = holders_.at(i);
  auto port = port_of(i, interface);
  must(
    in_network(switch_, {"ip", "link", "add", port, "type", "veth", "peer",
                         "name", interface, "netns", std::to_string(holder)}));
  must(in_network(switch_, {"ip", "link", "set", port, "master", "bridge"}));
  must(in_network(switch_, {"ip", "link", "set", port, "up"}));
  for (auto& x : addresses) {
    std::vector<std::string> command{"ip", "addr", "add", x, "dev", interface};
    if (x.find(':') != std::string::npos)
      command.emplace_back("nodad");
    must(in_network(holder, std::move(command)));
  }
  must(in_network(holder, {"ip", "link", "set", interface, "up"}));
}

void machines::add_second_network() {
  for (size_t i = 0; i < holders_.size(); ++i)
    connect(i, "eth1", {second_address(i) + "/24"});
  for (size_t i = 0; i < holders_.size(); ++i)
    await_carrier(i, "eth1");
}

void machines::await_carrier(size_t i, const std::string& interface) const {
  // The kernel tells of it up to a second later, and UCX looks.
  auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds{10};
  while (std::chrono::steady_clock::now() < deadline) {
    program x{in_network(holders_.at(i), {"ip", "link", "show", interface})};
    if (x.join() == 0 && x.output().find("state UP") != std::string::npos)
      return;
  }
  SKIP("the network between namespaces does not come up here");
}

machines::~machines() {
  for (size_t i = 0; i < holders_.size(); ++i)
    for (auto pid : processes(i))
      ::kill(pid, SIGKILL);
  holders_.push_back(switch_);
  for (auto pid : holders_)
    if (pid > 0) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  std::error_code ignored;
  fs::remove(hosts_, ignored);
}

pid_t machines::hold(const std::string& host, const fs::path& hosts) {
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  auto result = ::fork();
  REQUIRE(result >= 0);
  if (result == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    std::string said;
    if (auto* what = become_machine(host, hosts))
      said = std::string{what} + ": " + std::strerror(errno);
    else
      said = "ready";
    auto ignored = ::write(ends[1], said.data(), said.size());
    static_cast<void>(ignored);
    ::close(ends[1]);
    for (;;)
      ::pause();
  }
  ::close(ends[1]);
  char text[200] = {};
  auto ignored = ::read(ends[0], text, sizeof(text) - 1);
  static_cast<void>(ignored);
  ::close(ends[0]);
  if (std::string{text} == "ready")
    return result;
  ::kill(result, SIGKILL);
  ::waitpid(result, nullptr, 0);
  SKIP("no namespaces may be made here: " << text);
  return -1;
}

void machines::must(std::vector<std::string> command) const {
  auto text = command[4];
  for (size_t i = 5; i < command.size(); ++i)
    text += ' ' + command[i];
  program x{std::move(command)};
  if (x.join() != 0)
    SKIP("no network between namespaces here: " << text << ": " << x.output());
}

std::string machines::name(size_t i) const {
  return std::string{"m"} + static_cast<char>('a' + i);
}

std::string machines::ipv4_address(size_t i) const {
  return "10.77.0." + std::to_string(i + 1);
}

std::string machines::second_address(size_t i) const {
  return "10.78.0." + std::to_string(i + 1);
}

std::string machines::ipv6_address(size_t i) const {
  return "fd77::" + std::to_string(i + 1);
}

program machines::start(size_t i, std::vector<std::string> command,
                        const fs::path& directory,
                        std::map<std::string, std::string> environment) const {
  // What nsenter does with the working directory is that of another mount.
  command.insert(command.begin(),
                 {"nsenter", "-t", std::to_string(holders_.at(i)), "-n", "-u",
                  "-i", "-m", "sh", "-c", "cd \"$0\" && exec \"$@\"",
                  directory.string()});
  return program{std::move(command), directory, std::move(environment)};
}

void machines::cut(size_t i) const {
  must(in_network(switch_, {"ip", "link", "set", port_of(i), "down"}));
}

void machines::mend(size_t i) const {
  must(in_network(switch_, {"ip", "link", "set", port_of(i), "up"}));
}

void machines::slow_down(size_t i, const std::string& rate) const {
  auto limit = [&](pid_t where, const std::string& device) {
    must(
      in_network(where, {"tc", "qdisc", "add", "dev", device, "root", "tbf",
                         "rate", rate, "burst", "32kbit", "latency", "200ms"}));
  };
  limit(switch_, port_of(i));
  limit(holders_.at(i), "eth0");
}

void machines::lose_packets(size_t i, double share) const {
  must(in_network(holders_.at(i),
                  {"iptables", "-w", "-A", "INPUT", "-i", "eth0", "-m",
                   "statistic", "--mode", "random", "--probability",
                   std::to_string(share), "-j", "DROP"}));
}

void machines::vanish(size_t i) const {
  must(in_network(switch_, {"ip", "link", "del", port_of(i)}));
  for (auto pid : processes(i))
    ::kill(pid, SIGKILL);
}

uint64_t machines::bytes_sent(size_t i, const std::string& interface) const {
  // What the switch got of it.
  program x{
    {"nsenter", "-t", std::to_string(switch_), "-n", "-m", "cat",
     "/sys/class/net/" + port_of(i, interface) + "/statistics/rx_bytes"}};
  REQUIRE(x.join() == 0);
  return std::stoull(x.output());
}

std::vector<uint16_t> machines::listening_ports(size_t i) const {
  program x{in_network(holders_.at(i), {"ss", "-ltnH"})};
  REQUIRE(x.join() == 0);
  std::vector<uint16_t> result;
  std::istringstream lines{x.output()};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields{line};
    std::string state;
    std::string queues[2];
    std::string local;
    fields >> state >> queues[0] >> queues[1] >> local;
    if (local.starts_with(ipv4_address(i)))
      result.push_back(
        static_cast<uint16_t>(std::stoi(local.substr(local.rfind(':') + 1))));
  }
  return result;
}

std::string machines::stand_in_for_ssh() const {
  std::string result
    = "#!/bin/bash\nwhile [ \"${1#-}\" != \"$1\" ]; do\n"
      "[ \"$1\" = -o ] && shift\nshift\ndone\n"
      "case $1 in\n";
  for (size_t i = 0; i < holders_.size(); ++i)
    result += name(i) + ") pid=" + std::to_string(holders_[i]) + ";;\n";
  // Through pipes: the other side sees that nobody reads any more, no signal.
  return result
         + "*) echo \"ssh: $1: no such machine\" >&2; exit 255;;\nesac\nshift\n"
           "mkfifo $0.$$\ncat <$0.$$ & reader=$!\n"
           "setsid nsenter -t $pid -n -u -i -m sh -c \"$*\" </dev/null "
           ">$0.$$ 2>&1 & remote=$!\n"
           "trap 'kill -9 $reader; exit 255' INT TERM\n"
           "wait $remote; code=$?; wait $reader; exit $code\n";
}

bool machines::empty_within(size_t i, std::chrono::milliseconds limit) const {
  auto deadline = std::chrono::steady_clock::now() + limit;
  while (!processes(i).empty()) {
    if (std::chrono::steady_clock::now() > deadline)
      return false;
    std::this_thread::yield();
  }
  return true;
}

std::vector<pid_t> machines::processes(size_t i) const {
  auto network = [](pid_t pid) {
    std::error_code ignored;
    return fs::read_symlink("/proc/" + std::to_string(pid) + "/ns/net",
                            ignored);
  };
  auto mine = network(holders_.at(i));
  std::vector<pid_t> result;
  std::error_code ignored;
  for (auto& entry : fs::directory_iterator{"/proc", ignored}) {
    auto pid = std::atoi(entry.path().filename().c_str());
    if (pid > 0 && pid != holders_[i] && !mine.empty() && network(pid) == mine)
      result.push_back(pid);
  }
  return result;
}

} // namespace smp::test
