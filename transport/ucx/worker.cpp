#include "transport/ucx/worker.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>
#include <vector>

namespace smp::ucx {

namespace {

struct setting {
  const char* key;
  std::string value;
  /// Not every build of UCX has the transport of this setting.
  bool optional = false;
};

std::vector<setting> settings_of(const ucx_options& x) {
  // Three probes without an answer, after an equally long pause.
  auto pause = std::to_string(std::max<int64_t>(1, x.silence.count() / 4000));
  return {
    {"NET_DEVICES", x.interface},
    {"TCP_KEEPIDLE", pause + "s", true},
    {"TCP_KEEPINTVL", pause + "s", true},
    {"TCP_KEEPCNT", "3", true},
    {"TLS", x.transports},
    // Error mode PEER needs the first one for shared memory, and the second one
    // for cma: otherwise UCX silently takes tcp.
    {"MM_ERROR_HANDLING", "y", true},
    {"CMA_MEMORY_INVALIDATE", "y", true},
    {"KEEPALIVE_INTERVAL", std::to_string(x.keepalive.count()) + "ms"},
    // Otherwise a rendezvous also uses the network card.
    {"MAX_RNDV_RAILS", "1"},
    // The default of 8 KB costs two thirds of the bandwidth.
    {"TCP_TX_SEG_SIZE", "1M", true},
    {"TCP_RX_SEG_SIZE", "1M", true},
  };
}

bool set_by_user(const char* key) {
  return std::getenv((std::string{"UCX_"} + key).c_str()) != nullptr;
}

void modify(ucp_config_t* config, const setting& x) {
  auto status = ucp_config_modify(config, x.key, x.value.c_str());
  if (status != UCS_OK && !x.optional)
    check(status, std::string{"UCX does not take "} + x.key + "=" + x.value);
}

} // namespace

void check(ucs_status_t status, const std::string& what) {
  if (status != UCS_OK)
    throw error{error_code::transport, what + ": " + ucs_status_string(status)};
}

worker::worker(const ucx_options& options) {
  ucp_config_t* raw = nullptr;
  check(ucp_config_read(nullptr, nullptr, &raw), "UCX_* in the environment");
  auto release = [](ucp_config_t* x) { ucp_config_release(x); };
  std::unique_ptr<ucp_config_t, decltype(release)> config{raw, release};
  for (auto& x : settings_of(options))
    if (!set_by_user(x.key))
      modify(config.get(), x);
  // The environment must not open a port to a network that is not trusted.
  if (!options.trusted_network)
    modify(config.get(), {"NET_DEVICES", "lo"});
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  check(ucp_init(&params, config.get(), &context_),
        "UCX cannot be set up with the transports " + options.transports);
  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  auto status = ucp_worker_create(context_, &worker_params, &worker_);
  if (status != UCS_OK) {
    ucp_cleanup(context_);
    check(status,
          "UCX cannot make a worker with the transports " + options.transports);
  }
}

worker::~worker() {
  ucp_worker_destroy(worker_);
  for (auto& [handle, memory] : registered_)
    ucp_mem_unmap(context_, handle);
  ucp_cleanup(context_);
}

void worker::register_memory(std::shared_ptr<std::byte> x, uint64_t size) {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                      | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = x.get();
  params.length = size;
  ucp_mem_h handle = nullptr;
  check(ucp_mem_map(context_, &params, &handle),
        "UCX does not register " + std::to_string(size) + " bytes");
  registered_.emplace_back(handle, std::move(x));
}

int worker::event_fd() const {
  int result = -1;
  check(ucp_worker_get_efd(worker_, &result), "UCX has no event descriptor");
  return result;
}

std::string worker::address() const {
  ucp_address_t* address = nullptr;
  size_t size = 0;
  check(ucp_worker_get_address(worker_, &address, &size), "UCX has no address");
  std::string result{reinterpret_cast<const char*>(address), size};
  ucp_worker_release_address(worker_, address);
  return result;
}

size_t worker::max_header() const {
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
  check(ucp_worker_query(worker_, &attributes), "UCX has no limits");
  return attributes.max_am_header;
}

std::string transports_of(ucp_ep_h x) {
  std::array<ucp_transport_entry_t, 16> entries{};
  ucp_ep_attr_t attributes{};
  attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attributes.transports.entries = entries.data();
  attributes.transports.num_entries = entries.size();
  attributes.transports.entry_size = sizeof(ucp_transport_entry_t);
  check(ucp_ep_query(x, &attributes), "UCX does not name its transports");
  std::string result;
  for (unsigned i = 0; i < attributes.transports.num_entries; ++i) {
    std::string name = entries[i].transport_name;
    if ((' ' + result + ' ').find(' ' + name + ' ') != std::string::npos)
      continue;
    if (!result.empty())
      result += ' ';
    result += name;
  }
  return result;
}

} // namespace smp::ucx
