#include "runtime/launch/network_choice.hpp"

#include "runtime/files/file_io.hpp"
#include "transport/error.hpp"
#include "transport/network/addresses.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>
#include <thread>

#include <arpa/inet.h>
#include <sys/socket.h>

namespace smp {

namespace {

using network_clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds pause_between_tries{100};

/// @returns whether `host` means this machine everywhere, unlike a name that
/// only resolves to loopback here (Debian writes "127.0.1.1 HOSTNAME")
bool means_loopback(const std::string& host) {
  in6_addr ignored{};
  bool number = ::inet_pton(AF_INET, host.c_str(), &ignored) == 1
                || ::inet_pton(AF_INET6, host.c_str(), &ignored) == 1;
  return host == "localhost" || (number && is_loopback(host));
}

/// @returns whether a process of this machine can listen on the address
bool is_own(const std::string& host) {
  auto all = resolve(host, 0);
  for (auto* x = all.get(); x != nullptr; x = x->ai_next) {
    file_descriptor probe{
      ::socket(x->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    if (probe && ::bind(probe.get(), x->ai_addr, x->ai_addrlen) == 0)
      return true;
  }
  return false;
}

/// A name service may need a moment for a machine that has just started.
void await_name(const std::string& host) {
  auto deadline = network_clock::now() + patience_between_machines;
  for (;;) {
    try {
      resolve(host, 0);
      return;
    } catch (const error& e) {
      if (network_clock::now() >= deadline)
        throw config_error(
          fmt::format("the machine of rank 0 is not known here: {}", e.what()));
    }
    std::this_thread::sleep_for(pause_between_tries);
  }
}

void check_conditions(const std::string& master, const session_config& x) {
  if (x.trusted_network && !x.keys.empty())
    return;
  std::string wanted;
  if (!x.trusted_network)
    wanted
      = "transport.trusted_network = true (UCX over tcp authenticates and "
        "encrypts nothing)";
  if (x.keys.empty())
    wanted += fmt::format(
      "{}transport.keys = DIR (made by smp-train keys DIR, "
      "the same on each machine)",
      wanted.empty() ? "" : " and ");
  throw config_error(
    fmt::format("rank 0 is to be reached at {}, so the run can cross machines: "
                "that needs {}; docs/machines.md",
                master, wanted));
}

} // namespace

network_choice choose_network(const rank_environment& x,
                              const session_config& config) {
  network_choice result;
  auto& master = x.rendezvous_address;
  auto named = !config.interface.empty();
  if (x.world_size == 1)
    return result;
  auto alone = means_loopback(master);
  // Without an address, rank 0 publishes its own in a file that all can read.
  auto told = !x.supervised && x.rendezvous_port == 0;
  if (alone && !(told && named && config.interface != "lo")) {
    result.master = master;
    return result;
  }
  check_conditions(alone ? config.interface : master, config);
  if (!alone)
    await_name(master);
  auto here = is_loopback(master);
  if (here && !named)
    throw config_error(fmt::format(
      "MASTER_ADDR={} leads to no other machine from here (see /etc/hosts); "
      "write its address, or set transport.interface",
      master));
  auto mine = named ? find_interface(config.interface)
                    : interface_towards(master);
  result.interface = mine.name;
  // The other ranks connect to the address of rank 0 that they were given,
  // through any interface; it may not belong to this machine (a mapped port).
  auto elsewhere = named && x.rank == 0 && !here && !is_own(master);
  result.master = here || elsewhere ? mine.address : master;
  auto silence = static_cast<int64_t>(config.link_timeout * 1000);
  result.line = tls_line{tls_keys{config.keys},
                         std::chrono::milliseconds{silence}, nullptr};
  return result;
}

bool opens_ports(std::string_view transports) {
  auto all_but = transports.starts_with('^');
  if (all_but)
    transports.remove_prefix(1);
  auto list = fmt::format(",{},", transports);
  auto names = [&list](const char* x) {
    return list.find(x) != std::string::npos;
  };
  return all_but ? !names(",tcp,") : names(",tcp,") || names(",all,");
}

namespace {

constexpr std::chrono::milliseconds answer_limit{5000};

/// One gate, asked until it answers.
class gate_call {
public:
  gate_call(const std::string& host, uint16_t port, const tls_line& line)
    : host_(host), port_(port), line_(line) {
    // nop
  }

  /// @returns nothing if nobody listens there yet
  /// @throws error (rank_down) when the time is up
  file_descriptor connect() {
    try {
      auto left = std::chrono::ceil<std::chrono::milliseconds>(
        deadline_ - network_clock::now());
      return connect_within(host_, port_, std::min(left, answer_limit));
    } catch (const error& e) {
      check_time(e.what());
      return {};
    }
  }

  /// @throws error (config) if one side rejects the other
  gate_answer ask(file_descriptor connection) const {
    try {
      tls_stream x{std::move(connection), line_.keys, tls_side::connects};
      return ask_gate(x, answer_limit);
    } catch (const error& e) {
      throw config_error(
        fmt::format("rank 0 at {}: {}", endpoint(host_, port_), e.what()));
    }
  }

  /// @throws error (rank_down) when the time is up, for the reason `why`
  void check_time(const std::string& why) const {
    if (network_clock::now() >= deadline_)
      throw error{failure{error_code::rank_down,
                          rank_id{0},
                          {},
                          fmt::format("was not reached within {} min: {}",
                                      patience_between_machines.count(), why)}};
  }

private:
  const std::string& host_;
  uint16_t port_;
  const tls_line& line_;
  network_clock::time_point deadline_ = network_clock::now()
                                        + patience_between_machines;
};

} // namespace

gate_answer ask_master(const std::string& host, uint16_t port,
                       const tls_line& line) {
  gate_call call{host, port, line};
  for (;;) {
    if (auto connection = call.connect())
      return call.ask(std::move(connection));
    std::this_thread::sleep_for(pause_between_tries);
  }
}

namespace {

bool is_of(const run_secret& x, const std::optional<run_secret>& attempt) {
  return attempt && equal_in_constant_time(x.bytes(), attempt->bytes());
}

} // namespace

std::optional<gate_answer> ask_master(const std::string& host, uint16_t port,
                                      const tls_line& line,
                                      const repeated_question& x) {
  // An attempt that ends takes a few seconds to tell all machines.
  constexpr std::chrono::seconds closing_limit{30};
  gate_call call{host, port, line};
  std::optional<network_clock::time_point> refused;
  for (;;) {
    std::optional<gate_answer> answer;
    try {
      if (auto connection = call.connect())
        answer = call.ask(std::move(connection));
      refused.reset();
    } catch (const error& e) {
      if (e.code() != error_code::config) // the time is up
        throw;
      if (!refused)
        refused = network_clock::now();
      if (network_clock::now() - *refused > closing_limit)
        throw;
    }
    if (answer && !is_of(answer->secret, x.before))
      return answer;
    if (answer)
      call.check_time("the attempt before has not ended");
    if (!x.pause(pause_between_tries))
      return std::nullopt;
  }
}

std::string machine_identity() {
  auto kernel = try_read("/proc/sys/kernel/random/boot_id").value_or("");
  // Containers may share a host's name; process numbers are valid only
  // within one container.
  std::error_code none;
  auto processes = std::filesystem::read_symlink("/proc/self/ns/pid", none);
  return host_name() + ' ' + kernel.substr(0, kernel.find('\n')) + ' '
         + processes.string();
}

} // namespace smp
