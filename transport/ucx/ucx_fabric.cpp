#include "transport/ucx/ucx_fabric.hpp"

#include "transport/ucx/engine.hpp"

#include <utility>

namespace smp {

ucx_fabric::ucx_fabric(rank_id self, uint64_t world_size, ucx_options options)
  : engine_(std::make_unique<engine>(self, world_size, std::move(options))) {
  // nop
}

ucx_fabric::~ucx_fabric() = default;

rank_id ucx_fabric::self() const {
  return engine_->self();
}

std::string ucx_fabric::address() const {
  return engine_->address();
}

void ucx_fabric::start(const std::vector<std::string>& addresses,
                       fabric_listener& listener) {
  engine_->start(addresses, listener);
}

void ucx_fabric::send(rank_id to, message x, sent_callback done) {
  engine_->send(to, std::move(x), {}, std::move(done));
}

void ucx_fabric::place_with(tensor_places& x) {
  engine_->place_with(x);
}

void ucx_fabric::send_marked(rank_id to, message x,
                             std::vector<uint64_t> transfers,
                             sent_callback done) {
  engine_->send(to, std::move(x), std::move(transfers), std::move(done));
}

void ucx_fabric::register_memory(std::shared_ptr<std::byte> x, uint64_t size) {
  engine_->register_memory(std::move(x), size);
}

void ucx_fabric::park(pollable_wake_up& x) {
  engine_->park(x);
}

void ucx_fabric::peer_lost(const failure& x) {
  engine_->peer_lost(x);
}

void ucx_fabric::stop(std::chrono::milliseconds limit) {
  engine_->stop(limit);
}

uint64_t ucx_fabric::queued_to(rank_id x) const {
  return engine_->queued_to(x);
}

fabric_stats ucx_fabric::stats() const {
  return engine_->stats();
}

std::string ucx_fabric::transports_to(rank_id x) const {
  return engine_->transports_to(x);
}

} // namespace smp
