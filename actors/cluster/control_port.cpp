#include "actors/cluster/control_port.hpp"

#include "actors/protocol/actor_system.hpp"
#include "actors/protocol/plain_text.hpp"
#include "transport/network/addresses.hpp"

#include <fmt/format.h>

#include <set>
#include <utility>

namespace smp {

using namespace std::chrono_literals;

void open_line(actor_host& host, std::optional<tls_line>& x) {
  if (!x)
    return;
  if (!x->relay)
    x->relay = std::make_shared<tls_relay>();
  host.get().lines.push_back(x->relay);
}

supervisor_actor find_supervisor(caf::actor_system& system,
                                 const caf::io::middleman_actor& ports,
                                 const std::string& address, uint16_t port,
                                 std::chrono::milliseconds limit,
                                 const std::string& who) {
  caf::scoped_actor self{system};
  auto end = std::chrono::steady_clock::now() + limit;
  supervisor_actor result;
  caf::error last;
  while (!result) {
    auto left = std::chrono::ceil<std::chrono::milliseconds>(
      end - std::chrono::steady_clock::now());
    if (left <= 0ms)
      throw error{
        error_code::rank_down,
        fmt::format("{} could not reach the SUPERVISOR at {} within {} s: {}",
                    who, endpoint(address, port),
                    static_cast<double>(limit.count()) / 1000,
                    plain_text(last))};
    self->request(ports, left, caf::connect_atom_v, address, port)
      .receive(
        [&](const caf::node_id&, const caf::strong_actor_ptr& hdl,
            const std::set<std::string>&) {
          result = caf::actor_cast<supervisor_actor>(hdl);
        },
        [&](caf::error& e) {
          // `limit` cuts the last attempt short, so its timeout says less than
          // the error of an earlier attempt.
          if (!last || e != caf::sec::request_timeout)
            last = std::move(e);
        });
    if (!result)
      self->receive(caf::after(20ms) >> [] {});
  }
  return result;
}

} // namespace smp
