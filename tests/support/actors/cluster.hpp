#pragma once

#include "tests/support/actors/inbox.hpp"
#include "transport/loopback/loopback_fabric.hpp"
#include "transport/ucx/ucx_fabric.hpp"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace smp::test {

/// Several ranks in this process over one kind of fabric: "loopback", "shm",
/// "sysv" (shm without files), "tcp" or "spin" (shm, waiting awake). What holds
/// for all kinds is tested through this.
class cluster {
public:
  /// @param before_start called for each rank, if set
  cluster(const std::string& kind, uint64_t size,
          const std::function<void(uint64_t, fabric&)>& before_start = {})
    : heard_(size) {
    if (kind == "loopback") {
      network_ = std::make_unique<loopback_network>(size);
      for (uint64_t i = 0; i < size; ++i)
        fabrics_.push_back(&network_->at(rank_id{i}));
    } else {
      for (uint64_t i = 0; i < size; ++i) {
        owned_.push_back(
          std::make_unique<ucx_fabric>(rank_id{i}, size, options_for(kind)));
        fabrics_.push_back(owned_.back().get());
      }
    }
    std::vector<std::string> addresses;
    for (auto x : fabrics_)
      addresses.push_back(x->address());
    for (uint64_t i = 0; before_start && i < size; ++i)
      before_start(i, *fabrics_[i]);
    for (uint64_t i = 0; i < size; ++i)
      fabrics_[i]->start(addresses, heard_[i]);
  }

  ~cluster() {
    for (auto x : fabrics_)
      x->stop(std::chrono::seconds{5});
  }

  cluster(const cluster&) = delete;
  cluster& operator=(const cluster&) = delete;

  static ucx_options options_for(const std::string& kind) {
    ucx_options result;
    if (kind == "tcp")
      result.transports = "tcp,self";
    if (kind == "sysv")
      result.transports = "sysv,cma,self";
    if (kind == "spin")
      result.spin = std::chrono::microseconds{200};
    return result;
  }

  fabric& at(uint64_t rank) {
    return *fabrics_[rank];
  }

  inbox& heard(uint64_t rank) {
    return heard_[rank];
  }

private:
  std::vector<inbox> heard_;
  std::unique_ptr<loopback_network> network_;
  std::vector<std::unique_ptr<ucx_fabric>> owned_;
  std::vector<fabric*> fabrics_;
};

} // namespace smp::test
