#include "runtime/launch/hosts.hpp"

#include "runtime/base/print_stderr.hpp"
#include "runtime/launch/process_group.hpp"
#include "transport/error.hpp"
#include "transport/network/addresses.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <limits>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include <arpa/inet.h>

namespace smp {

namespace {

constexpr uint16_t default_port = 29400;

/// Saturates at the largest number: users may give anything.
uint64_t sum(const std::vector<uint64_t>& xs) {
  uint64_t result = 0;
  for (auto x : xs)
    if (__builtin_add_overflow(result, x, &result))
      return std::numeric_limits<uint64_t>::max();
  return result;
}

template <class T>
bool read_number(std::string_view text, T& result) {
  auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(),
                                        result);
  return problem == std::errc{} && end == text.data() + text.size()
         && result > 0;
}

bool is_ipv6(const std::string& x) {
  in6_addr ignored{};
  // A link-local address ends with the interface: "fe80::1%eth0".
  return ::inet_pton(AF_INET6, x.substr(0, x.find('%')).c_str(), &ignored) == 1;
}

/// What the user gives for one machine, in two parts.
struct named_host {
  std::string host; // as ssh takes it
  std::optional<std::string> ranks;
};

/// @param x "me@a:2", "a", "[fd00::1]:2", "fd00::1"
named_host read_host(const std::string& x) {
  auto begin = x.find('@') + 1; // 0 where there is none
  auto user = x.substr(0, begin);
  auto host = x.substr(begin);
  if (is_ipv6(host))
    return {x, {}};
  std::string rest;
  if (auto end = host.find(']'); host[0] == '[' && end != std::string::npos) {
    rest = host.substr(end + 1);
    host = host.substr(1, end - 1);
    if (!is_ipv6(host))
      host.clear();
  } else {
    end = std::min(host.find(':'), host.size());
    rest = host.substr(end);
    host.resize(end);
  }
  if (host.empty() || x[0] == '-' // would be an option of ssh
      || (!rest.empty() && rest[0] != ':'))
    throw config_error(fmt::format("--hosts: '{}' is not a host", x));
  if (rest.empty())
    return {user + host, {}};
  return {user + host, rest.substr(1)};
}

/// Quotes a word for the shell of the other machine.
std::string quoted(const std::string& x) {
  std::string result = "'";
  for (char c : x)
    if (c == '\'')
      result += "'\\''";
    else
      result += c;
  return result + '\'';
}

} // namespace

std::string shell_word(const std::string& x) {
  auto plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0
           || std::string_view{"_-./=:,+@%"}.find(c) != std::string_view::npos;
  };
  return !x.empty() && std::all_of(x.begin(), x.end(), plain) ? x : quoted(x);
}

namespace {

std::string remote_command(const std::vector<std::string>& words) {
  auto result = fmt::format("cd {} && {}=1 exec",
                            quoted(std::filesystem::current_path().string()),
                            ends_with_output_variable);
  for (auto& word : words)
    result += ' ' + quoted(word);
  return result;
}

} // namespace

std::vector<uint64_t> shares_of(uint64_t nodes,
                                const std::vector<uint64_t>& per_node,
                                uint64_t ranks) {
  auto result = per_node;
  if (per_node.empty() && ranks % nodes != 0)
    throw config_error(
      fmt::format("{} ranks do not divide evenly among {} machines:"
                  " give --ranks-per-node",
                  ranks, nodes));
  if (per_node.empty())
    result.assign(nodes, ranks / nodes);
  if (per_node.size() == 1)
    result.assign(nodes, per_node[0]);
  if (result.size() != nodes)
    throw config_error(
      fmt::format("--ranks-per-node {} has {} numbers for {} "
                  "machines",
                  fmt::join(per_node, ","), per_node.size(), nodes));
  for (auto x : result)
    if (x == 0)
      throw config_error("each machine needs at least one rank");
  if (sum(result) != ranks)
    throw config_error(
      fmt::format("{} ranks on {} machines are {}, but "
                  "smp.pipeline_parallel_degree (--ranks) is "
                  "{}",
                  fmt::join(result, " + "), nodes, sum(result), ranks));
  return result;
}

std::vector<host_share> read_hosts(const std::vector<std::string>& hosts,
                                   uint64_t ranks) {
  std::vector<host_share> result;
  std::vector<uint64_t> shares;
  for (auto& x : hosts) {
    auto named = read_host(x);
    result.push_back({std::move(named.host), 0});
    if (named.ranks && !read_number(*named.ranks, shares.emplace_back()))
      throw config_error(fmt::format("--hosts: '{}' is not HOST:RANKS", x));
  }
  if (!shares.empty() && shares.size() != hosts.size())
    throw config_error(
      "--hosts: give the number of ranks for all hosts, or for "
      "none");
  shares = shares_of(hosts.size(), shares, ranks);
  for (size_t i = 0; i < result.size(); ++i)
    result[i].ranks = shares[i];
  return result;
}

node_options read_node(uint64_t node, std::vector<uint64_t> shares,
                       const std::string& master) {
  node_options result;
  result.node = node;
  result.ranks_of = std::move(shares);
  auto colon = master.rfind(':');
  auto host = master.substr(0, std::min(colon, master.size()));
  if (host.size() > 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  else if (host.find_first_of(":[]") != std::string::npos)
    host.clear(); // ambiguous: IPv6 needs brackets
  if (colon == std::string::npos || host.empty()
      || !read_number(std::string_view{master}.substr(colon + 1), result.port))
    throw config_error(
      fmt::format("--master {} is not HOST:PORT, or "
                  "[IPV6]:PORT",
                  master));
  result.master = host;
  return result;
}

namespace {

/// With these codes a launcher has reported the error itself.
bool is_told(int code) {
  return code >= 1 && code <= 5;
}

constexpr std::chrono::seconds beginning{10};
constexpr std::chrono::milliseconds between{5000};

/// A machine that cannot be reached at first is a mistake, later it is lost.
auto retries_of(const std::vector<host_share>& hosts) {
  using clock = std::chrono::steady_clock;
  return [&hosts, begin = clock::now(),
          told = std::set<rank_id>{}](rank_id x, const process_end& end) mutable
         -> std::optional<std::chrono::milliseconds> {
    if ((end.signal == 0 && (is_told(end.code) || end.code == code_interrupted))
        || clock::now() - begin < beginning)
      return std::nullopt;
    if (told.insert(x).second)
      print_stderr("smp: machine {}: ssh {}; it is tried again every {} s\n",
                   hosts.at(x.value).host, end.describe(),
                   between.count() / 1000);
    return between;
  };
}

} // namespace

int launch_on_hosts(const std::vector<host_share>& hosts,
                    const std::vector<std::string>& command,
                    const std::string& master,
                    std::chrono::milliseconds interrupt_grace, bool restarts) {
  std::vector<uint64_t> ranks;
  for (auto& x : hosts)
    ranks.push_back(x.ranks);
  auto reached = master;
  if (reached.empty()) // "user@host" is for ssh
    reached = endpoint(hosts[0].host.substr(hosts[0].host.find('@') + 1),
                       default_port);
  process_group::options options;
  options.size = hosts.size();
  options.command_of = [&](uint64_t node) {
    auto words = command;
    words.insert(words.end(),
                 {"--nodes", std::to_string(hosts.size()), "--node-rank",
                  std::to_string(node), "--master", reached, "--ranks-per-node",
                  fmt::format("{}", fmt::join(ranks, ","))});
    // A machine that is off does not say that it is gone.
    return std::vector<std::string>{"ssh",
                                    "-o",
                                    "BatchMode=yes",
                                    "-o",
                                    "ServerAliveInterval=15",
                                    hosts[node].host,
                                    remote_command(words)};
  };
  if (restarts)
    options.again_after = retries_of(hosts);
  options.passes_signals = false;
  // The launchers there first end their ranks, and say why.
  options.grace = std::chrono::seconds{8};
  options.interrupt_grace = interrupt_grace + options.grace;
  process_group group{std::move(options)};
  group.start([](uint64_t) { return std::map<std::string, std::string>{}; });
  auto result = group.run();
  if (result.interrupted)
    return code_interrupted;
  if (!result.cause)
    return result.code;
  if (is_told(result.code))
    return result.code;
  if (auto i = result.cause.rank.value; i < hosts.size())
    print_stderr("smp: machine {}: ssh {}\n", hosts[i].host, result.cause.text);
  return code_rank_failed;
}

} // namespace smp
