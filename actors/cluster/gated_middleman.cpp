#include "actors/cluster/gated_middleman.hpp"

#include "transport/error.hpp"
#include "transport/gate.hpp"
#include "transport/network/addresses.hpp"

#include <caf/io/basp_broker.hpp>
#include <caf/io/doorman.hpp>
#include <caf/io/middleman.hpp>
#include <caf/io/network/default_multiplexer.hpp>
#include <caf/io/network/multiplexer.hpp>
#include <caf/io/scribe.hpp>
#include <caf/make_counted.hpp>
#include <caf/sec.hpp>

#include <exception>
#include <memory>
#include <mutex>
#include <utility>

namespace smp {

namespace {

/// How long the other side may take to answer: it may be busy or stopped.
constexpr std::chrono::seconds gate_limit{5};

/// Passes what the gate admits to the broker, on the thread of the middleman.
class gate_doorman : public caf::io::doorman {
public:
  gate_doorman(caf::io::network::multiplexer& backend, gate::options x)
    : gate_doorman(backend, std::make_unique<handover>(), std::move(x)) {
    // nop
  }

  ~gate_doorman() override {
    close();
  }

  /// The broker accepts nothing itself.
  bool new_connection() override {
    return false;
  }

  void launch() override {
    // nop
  }

  void add_to_loop() override {
    // nop
  }

  void remove_from_loop() override {
    close();
  }

  /// The broker calls this until it has removed this doorman.
  void graceful_shutdown() override {
    caf::intrusive_ptr<gate_doorman> guard{this};
    close();
    detach(&backend_, false);
  }

  uint16_t port() const override {
    return port_;
  }

  std::string addr() const override {
    return address_;
  }

private:
  /// Outlives this object: connections may still be in flight to the thread of
  /// the middleman.
  struct handover {
    std::mutex mutex;
    gate_doorman* to = nullptr;
  };

  gate_doorman(caf::io::network::multiplexer& backend,
               std::shared_ptr<handover> way, gate::options x)
    : gate_doorman(backend, way, x.address,
                   std::make_unique<gate>(with_admit(backend, way, x))) {
    // nop
  }

  gate_doorman(caf::io::network::multiplexer& backend,
               std::shared_ptr<handover> way, std::string address,
               std::unique_ptr<gate> opened)
    : caf::io::doorman(
      caf::io::network::accept_hdl_from_socket(opened->listener())),
      backend_(backend),
      way_(std::move(way)),
      address_(std::move(address)),
      port_(opened->port()),
      gate_(std::move(opened)) {
    std::lock_guard guard{way_->mutex};
    way_->to = this;
  }

  static gate::options with_admit(caf::io::network::multiplexer& backend,
                                  std::shared_ptr<handover> way,
                                  gate::options x) {
    x.admit = [&backend, way = std::move(way)](file_descriptor y) {
      auto connection = std::make_shared<file_descriptor>(std::move(y));
      backend.post([way, connection] {
        std::lock_guard guard{way->mutex};
        if (way->to != nullptr)
          way->to->take(std::move(*connection));
      });
    };
    return x;
  }

  void take(file_descriptor x) {
    if (detached())
      return;
    auto connection = backend_.new_scribe(x.release());
    auto hdl = connection->hdl();
    static_cast<caf::io::abstract_broker*>(parent())->add_scribe(
      std::move(connection));
    doorman::new_connection(&backend_, hdl);
  }

  void close() {
    gate_.reset();
    std::lock_guard guard{way_->mutex};
    way_->to = nullptr;
  }

  caf::io::network::multiplexer& backend_;
  std::shared_ptr<handover> way_;
  std::string address_;
  uint16_t port_;
  std::unique_ptr<gate> gate_;
};

} // namespace

gated_middleman_impl::gated_middleman_impl(caf::actor_config& cfg,
                                           caf::actor broker, options x)
  : super(cfg, std::move(broker)), options_(std::move(x)) {
  // nop
}

caf::expected<caf::io::scribe_ptr>
gated_middleman_impl::connect(const std::string& host, uint16_t port) {
  try {
    auto connection = connect_within(host, port, gate_limit);
    if (options_.line) {
      bound_silence(connection.get(), options_.line->silence);
      tls_stream outer{std::move(connection), options_.line->keys,
                       tls_side::connects};
      pass_gate(outer, options_.secret, gate_limit);
      connection = options_.line->relay->add(std::move(outer));
    } else {
      pass_gate(connection.get(), options_.secret, gate_limit);
    }
    return system().middleman().backend().new_scribe(connection.release());
  } catch (const std::exception& e) {
    return caf::make_error(caf::sec::cannot_connect_to_node, e.what());
  }
}

caf::expected<caf::io::doorman_ptr>
gated_middleman_impl::open(uint16_t port, const char* address, bool) {
  gate::options x;
  if (address != nullptr)
    x.address = address;
  x.port = port;
  x.secret = options_.secret;
  x.line = options_.line;
  x.note = options_.note;
  x.on_refused = options_.on_refused;
  try {
    return caf::io::doorman_ptr{caf::make_counted<gate_doorman>(
      system().middleman().backend(), std::move(x))};
  } catch (const error& e) {
    return caf::make_error(caf::sec::cannot_open_port, e.what());
  }
}

caf::io::middleman_actor gated_middleman(caf::actor_system& system,
                                         gated_middleman_impl::options x) {
  return system.spawn<gated_middleman_impl, caf::detached + caf::hidden>(
    system.middleman().named_broker<caf::io::basp_broker>("BASP"),
    std::move(x));
}

} // namespace smp
