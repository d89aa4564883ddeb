#pragma once

// Host names, addresses and interfaces of this machine.

#include "transport/file_descriptor.hpp"

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
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

/// @returns the interface that is called so or that has this address
/// @throws error (config) that names those which there are
network_interface find_interface(const std::string& wanted);

/// @returns the interface by which this machine reaches `host`; if that is this
/// machine itself, the one that has its address
/// @throws error (config) if there is no way to it
network_interface interface_towards(const std::string& host);

struct free_addresses {
  void operator()(addrinfo* x) const {
    ::freeaddrinfo(x);
  }
};

using resolved_addresses = std::unique_ptr<addrinfo, free_addresses>;

/// @param host a name, or an address as a number
/// @returns all addresses of TCP
/// @throws error (transport) if the name is not known
resolved_addresses resolve(const std::string& host, uint16_t port);

/// @returns whether only this machine itself can mean that: a loopback address,
/// or a name that stands for nothing else here. A name that is not known is
/// none
bool is_loopback(const std::string& host);

/// Connects, or gives up after `limit`; tries all addresses of `host`. Each
/// gets an equal share of the time that is left: a network may swallow what
/// goes to one of them without a word, as it often does with IPv6.
/// @returns a socket that does not block
/// @throws error (transport)
file_descriptor connect_within(const std::string& host, uint16_t port,
                               std::chrono::milliseconds limit);

/// The same for `addresses`, in their order.
/// @param where said in the error
file_descriptor connect_within(const addrinfo* addresses,
                               const std::string& where,
                               std::chrono::milliseconds limit);

/// Listens at all of `addresses` that are this machine's, at one port: who
/// comes may know or reach only one of them. One that stands there twice counts
/// once.
/// @param where said in the error
/// @returns sockets that do not block, at least one
/// @throws error (transport) if no address is this machine's, or the port is
/// taken at one that is
std::vector<file_descriptor> listen_at(const addrinfo* addresses,
                                       const std::string& where);

/// @returns the port of this side, of IPv4 or IPv6
/// @throws error (transport)
uint16_t local_port(int socket);

/// @returns the address of the other side, as a number; empty if it is gone
std::string peer_address(int connection);

/// @returns "10.0.0.1:4711", "[fe80::1]:4711"
std::string endpoint(const std::string& host, uint16_t port);

/// After `limit` without a sign of life from the other side the connection is
/// broken: else one to a machine that is gone stays for a quarter of an hour.
void bound_silence(int connection, std::chrono::milliseconds limit);

} // namespace smp
