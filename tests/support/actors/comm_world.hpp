#pragma once

#include "actors/comm/comm_fabric.hpp"
#include "tests/support/actors/inbox.hpp"
#include "transport/loopback/loopback_fabric.hpp"
#include "transport/ucx/ucx_fabric.hpp"

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace smp::test {

/// Ranks whose messages pass the stages, over one kind of fabric.
class comm_world {
public:
  comm_world(const std::string& kind, uint64_t size,
             const comm_options& options,
             const std::vector<uint64_t>& machine_of_rank = {})
    : comm_world(kind, std::vector<comm_options>(size, options),
                 machine_of_rank) {
    // nop
  }

  /// @param options one per rank
  comm_world(const std::string& kind, const std::vector<comm_options>& options,
             const std::vector<uint64_t>& machine_of_rank = {})
    : heard_(options.size()) {
    auto size = options.size();
    auto host = std::make_shared<actor_host>();
    std::shared_ptr<loopback_network> network;
    if (kind == "loopback")
      network = std::make_shared<loopback_network>(size);
    for (uint64_t i = 0; i < size; ++i) {
      std::shared_ptr<fabric> inner;
      ucx_options ucx;
      if (kind == "tcp")
        ucx.transports = "tcp,self";
      if (network)
        inner = {network, &network->at(rank_id{i})};
      else
        inner = std::make_shared<ucx_fabric>(rank_id{i}, size, ucx);
      ranks_.push_back(std::make_unique<comm_fabric>(
        std::move(inner), host, std::make_shared<rank_board>(rank_id{i}, size),
        options[i]));
    }
    std::vector<std::string> addresses;
    for (auto& x : ranks_)
      addresses.push_back(x->address());
    for (auto& x : ranks_)
      x->place(machine_of_rank);
    for (uint64_t i = 0; i < size; ++i)
      ranks_[i]->start(addresses, heard_[i]);
    connect_devices();
  }

  ~comm_world() {
    for (auto& x : ranks_)
      x->stop(std::chrono::seconds{5});
  }

  comm_fabric& at(uint64_t rank) {
    return *ranks_[rank];
  }

  inbox& heard(uint64_t rank) {
    return heard_[rank];
  }

private:
  void connect_devices() {
    auto size = ranks_.size();
    std::vector<std::string> handles;
    for (auto& x : ranks_)
      handles.push_back(x->arena_handle());
    std::vector<std::vector<bool>> by(size, std::vector<bool>(size));
    for (uint64_t i = 0; i < size; ++i) {
      auto reached = ranks_[i]->open_arenas(handles);
      for (uint64_t k = 0; k < size; ++k)
        by[k][i] = reached[k];
    }
    for (uint64_t i = 0; i < size; ++i)
      ranks_[i]->reached_by(by[i]);
  }

  std::vector<inbox> heard_;
  std::vector<std::unique_ptr<comm_fabric>> ranks_;
};

inline uint64_t handled(const comm_report& x, comm_stage stage) {
  return x.stages.at(static_cast<size_t>(stage)).handled;
}

inline uint64_t passed_by(const comm_report& x, comm_stage stage) {
  return x.stages.at(static_cast<size_t>(stage)).passed_by;
}

inline uint64_t by_rule(const std::array<uint64_t, comm_rules>& x,
                        comm_rule rule) {
  return x[static_cast<size_t>(rule)];
}

/// Waits until rank 0 knows where all that it sent came to lie.
inline comm_report when_placed(comm_fabric& x, uint64_t tensors) {
  auto deadline = std::chrono::steady_clock::now() + patience;
  for (;;) {
    auto result = x.status();
    auto known = by_rule(result.sent, comm_rule::device_path)
                 + by_rule(result.sent, comm_rule::no_space);
    if (known >= tensors || std::chrono::steady_clock::now() > deadline)
      return result;
    std::this_thread::yield();
  }
}

} // namespace smp::test
