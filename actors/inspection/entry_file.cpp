#include "actors/inspection/entry_file.hpp"

#include "transport/error.hpp"
#include "transport/files/private_file.hpp"
#include "transport/process_state.hpp"

#include <fmt/format.h>

#include <cstring>
#include <map>
#include <sstream>

#include <unistd.h>

namespace smp {

namespace {

constexpr const char* entry_head
  = "# Where smp-inspect and smp-top look at this run. Whoever can read this "
    "may.\n";

std::string text_of(const inspection_entry& x) {
  return fmt::format(
    "{}address {}\nport {}\nsecret {}\npid {}\nstarted {}\n"
    "host {}\n",
    entry_head, x.address, x.port, x.secret.to_hex(), x.pid, x.start_time,
    x.host);
}

} // namespace

inspection_entry entry_of_this_process(uint16_t port,
                                       const run_secret& secret) {
  inspection_entry result;
  result.port = port;
  result.secret = secret;
  result.pid = ::getpid();
  if (auto state = state_of_process(result.pid))
    result.start_time = state->start_time;
  result.host = host_name();
  return result;
}

std::string entry_path(const std::string& run_dir) {
  return run_dir + "/inspect.entry";
}

published_entry::published_entry(const std::string& run_dir,
                                 const inspection_entry& x)
  : path_(entry_path(run_dir)) {
  replace(x);
}

void published_entry::replace(const inspection_entry& x) {
  if (auto problem = write_private_file(path_, text_of(x)))
    throw config_error(
      fmt::format("cannot write {}: {}", path_, std::strerror(problem)));
}

published_entry::~published_entry() {
  ::unlink(path_.c_str());
}

std::optional<inspection_entry> read_entry(const std::string& path) {
  auto text = read_private_file(path);
  if (!text)
    return std::nullopt;
  std::map<std::string, std::string> values;
  std::istringstream lines{*text};
  for (std::string key, value; lines >> key && std::getline(lines, value);)
    if (key != "#" && value.size() > 1)
      values[key] = value.substr(1);
  inspection_entry result;
  auto secret = run_secret::from_hex(values["secret"]);
  std::istringstream numbers{values["port"] + ' ' + values["pid"] + ' '
                             + values["started"]};
  if (!secret || values["address"].empty()
      || !(numbers >> result.port >> result.pid >> result.start_time))
    throw config_error(path + ": not written by a run of smp");
  result.secret = *secret;
  result.address = values["address"];
  result.host = values["host"];
  return result;
}

bool is_orphaned(const inspection_entry& x) {
  if (x.host != host_name())
    return false;
  auto state = state_of_process(x.pid);
  return !state || state->ended() || state->start_time != x.start_time;
}

} // namespace smp
