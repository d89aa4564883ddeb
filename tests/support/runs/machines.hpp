#pragma once

#include "tests/support/runs/program.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <sys/types.h>

namespace smp::test {

/// Several "machines" on this one: each a set of namespaces with a network, a
/// host name, a loopback interface, shared memory and mounts of its own, joined
/// by a switch. Skips the test, and says why, where they may not be made.
class machines {
public:
  explicit machines(size_t count, bool ipv6_only = false);

  /// Ends all that runs on them.
  ~machines();

  machines(const machines&) = delete;
  machines& operator=(const machines&) = delete;

  /// "ma", "mb", ...: its host name, which all of them know by /etc/hosts.
  std::string name(size_t i) const;

  std::string ipv4_address(size_t i) const;

  std::string ipv6_address(size_t i) const;

  /// Runs a program there.
  program start(size_t i, std::vector<std::string> command,
                const std::filesystem::path& directory,
                std::map<std::string, std::string> environment = {}) const;

  /// Gives each of them another interface, `eth1`, with a cable to the same
  /// switch.
  void add_second_network();

  /// Of its second interface.
  std::string second_address(size_t i) const;

  /// Pulls its cable out of the switch, and puts it back.
  void cut(size_t i) const;
  void mend(size_t i) const;

  /// From now on its line carries so much, as `tc` says it: "10mbit".
  void slow_down(size_t i, const std::string& rate) const;

  /// From now on so many of the packets to it are lost.
  void lose_packets(size_t i, double share) const;

  /// Ends at once: its cable is gone, and so are its processes.
  void vanish(size_t i) const;

  /// What its processes sent to the others until now, in bytes.
  uint64_t bytes_sent(size_t i, const std::string& interface = "eth0") const;

  /// Ports at which its processes listen, but for those of loopback.
  std::vector<uint16_t> listening_ports(size_t i) const;

  /// A script that takes the arguments of ssh and runs the command on the
  /// machine of that name, with stdin, stdout and stderr as ssh would.
  std::string stand_in_for_ssh() const;

  /// @returns whether no process is left there within the limit.
  bool empty_within(size_t i, std::chrono::milliseconds limit) const;

  /// Numbers of its processes.
  std::vector<pid_t> processes(size_t i) const;

private:
  pid_t hold(const std::string& host, const std::filesystem::path& hosts);
  void must(std::vector<std::string> command) const;
  void connect(size_t i, const std::string& interface,
               const std::vector<std::string>& addresses) const;
  void await_carrier(size_t i, const std::string& interface) const;

  bool ipv6_only_;
  pid_t switch_ = -1;
  std::vector<pid_t> holders_;
  std::filesystem::path hosts_;
};

} // namespace smp::test
