#pragma once

// Host names, addresses and interfaces of this machine.

#include "transport/files/file_descriptor.hpp"

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <netdb.h>

namespace smp {

/// An interface of this machine that is up.
struct network_interface {
  std::string name;    // "eth0"
  std::string address; // as a number, IPv4 or IPv6
};

/// @returns one entry for each address of each interface that is up; of one
/// interface IPv4 comes before IPv6
std::vector<network_interface> network_interfaces();

/// @returns the interface that has this name or this address
/// @throws error (config) that names the interfaces that exist
network_interface find_interface(const std::string& wanted);

/// @returns the interface by which this machine reaches `host`; if that is this
/// machine itself, the one that has its address
/// @throws error (config) if there is no route to it
network_interface interface_towards(const std::string& host);

struct free_addresses {
  void operator()(addrinfo* x) const {
    ::freeaddrinfo(x);
  }
};

using resolved_addresses = std::unique_ptr<addrinfo, free_addresses>;

/// @param host a name, or an address as a number
/// @returns all TCP addresses of `host`
/// @throws error (transport) if the name is not known
resolved_addresses resolve(const std::string& host, uint16_t port);

/// @returns whether `host` can only mean this machine: a loopback address, or a
/// name that resolves to nothing but loopback addresses here. False for a name
/// that is not known
bool is_loopback(const std::string& host);

/// Connects, or gives up after `limit`; tries all addresses of `host`. Each
/// gets an equal share of the remaining time: a network may silently drop what
/// is sent to one of them, as it often does with IPv6.
/// @returns a non-blocking socket
/// @throws error (transport)
file_descriptor connect_within(const std::string& host, uint16_t port,
                               std::chrono::milliseconds limit);

/// The same for `addresses`, in their order.
/// @param where named in the error
file_descriptor connect_within(const addrinfo* addresses,
                               const std::string& where,
                               std::chrono::milliseconds limit);

/// Listens at all of `addresses` that belong to this machine, at one
/// port: a client may know or reach only one of them. Duplicates count
/// once.
/// @param where named in the error
/// @returns non-blocking sockets, at least one
/// @throws error (transport) if no address belongs to this machine, or the port
/// is taken at one that does
std::vector<file_descriptor> listen_at(const addrinfo* addresses,
                                       const std::string& where);

/// @returns the port of the local side, of IPv4 or IPv6
/// @throws error (transport)
uint16_t local_port(int socket);

/// @returns the address of the other side, as a number; empty if it is gone
std::string peer_address(int connection);

/// @returns "10.0.0.1:4711", "[fe80::1]:4711"
std::string endpoint(const std::string& host, uint16_t port);

struct host_and_port {
  std::string host; // not empty
  uint16_t port = 0;
};

/// @returns the parts of an `endpoint`; nullopt if it is none
std::optional<host_and_port> parse_endpoint(std::string_view x);

/// Breaks the connection after `limit` without a sign of life from the other
/// side; else one to a machine that is gone stays for a quarter of an hour.
void bound_silence(int connection, std::chrono::milliseconds limit);

} // namespace smp
