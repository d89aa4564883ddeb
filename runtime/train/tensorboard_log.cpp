#include "runtime/train/tensorboard_log.hpp"

#include "runtime/base/print_stderr.hpp"
#include "runtime/files/errno_text.hpp"
#include "transport/process_state.hpp"

#include <boost/crc.hpp>
#include <fmt/format.h>
#include <protozero/pbf_writer.hpp>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <system_error>

#include <unistd.h>

namespace smp {

namespace {

// Numbers of fields in TensorBoard's event.proto, summary.proto, tensor.proto.
constexpr uint32_t event_wall_time = 1;
constexpr uint32_t event_step = 2;
constexpr uint32_t event_file_version = 3;
constexpr uint32_t event_summary = 5;
constexpr uint32_t summary_value = 1;
constexpr uint32_t value_tag = 1;
constexpr uint32_t value_simple = 2;
constexpr uint32_t value_tensor = 8;
constexpr uint32_t value_metadata = 9;
constexpr uint32_t tensor_dtype = 1;
constexpr uint32_t tensor_shape = 2;
constexpr uint32_t tensor_string = 8;
constexpr int32_t dtype_string = 7;
constexpr uint32_t metadata_plugin = 1;
constexpr uint32_t plugin_name = 1;

double now() {
  std::chrono::duration<double> since_epoch = std::chrono::system_clock::now()
                                                .time_since_epoch();
  return since_epoch.count();
}

/// CRC-32C, masked as TFRecord wants it: files that contain records must not
/// have the same sums.
uint32_t masked_crc(std::string_view x) {
  boost::crc_optimal<32, 0x1EDC6F41, 0xFFFFFFFF, 0xFFFFFFFF, true, true> sum;
  sum.process_bytes(x.data(), x.size());
  return std::rotr(static_cast<uint32_t>(sum.checksum()), 15) + 0xa282ead8u;
}

template <class T>
std::string bytes_of(T x) {
  auto bytes = std::bit_cast<std::array<char, sizeof(T)>>(x);
  return {bytes.begin(), bytes.end()};
}

static_assert(std::endian::native == std::endian::little);

/// Without line breaks that Markdown would remove, and with the columns.
std::string as_code(const std::string& text) {
  std::string result;
  for (size_t i = 0; i < text.size(); ++i)
    if (text[i] == '\x1b') // colours of the console
      i = std::min(text.find('m', i), text.size());
    else
      result += text[i];
  return "```\n" + result + "\n```";
}

} // namespace

tensorboard_log::tensorboard_log(const std::string& dir) {
  std::error_code ignored; // to open the file says why
  std::filesystem::create_directories(dir, ignored);
  path_ = fmt::format("{}/events.out.tfevents.{:010}.{}.{}", dir,
                      static_cast<int64_t>(now()), host_name(), ::getpid());
  errno = 0;
  out_.open(path_, std::ios::binary | std::ios::trunc);
  if (!out_)
    throw config_error(path_ + ": " + errno_text(errno));
  std::string first;
  protozero::pbf_writer x{first};
  x.add_double(event_wall_time, now());
  x.add_string(event_file_version, "brain.Event:2");
  put(first);
}

void tensorboard_log::put(const std::string& event) {
  if (!out_)
    return;
  auto size = bytes_of(static_cast<uint64_t>(event.size()));
  errno = 0;
  out_ << size << bytes_of(masked_crc(size)) << event
       << bytes_of(masked_crc(event)) << std::flush;
  if (!out_)
    print_stderr(
      "smp: {}: {}; monitor.tensorboard ends here, and the run goes "
      "on\n",
      path_, errno_text(errno));
}

void tensorboard_log::write(uint64_t step, const scalars& xs) {
  std::string summary;
  protozero::pbf_writer all{summary};
  for (auto& [name, number] : xs) {
    protozero::pbf_writer one{all, summary_value};
    one.add_string(value_tag, name.data(), name.size());
    one.add_float(value_simple, static_cast<float>(number));
  }
  std::string result;
  protozero::pbf_writer x{result};
  x.add_double(event_wall_time, now());
  x.add_int64(event_step, static_cast<int64_t>(step));
  x.add_message(event_summary, summary);
  put(result);
}

void tensorboard_log::write_text(std::string_view tag,
                                 const std::string& text) {
  std::string summary;
  {
    protozero::pbf_writer all{summary};
    protozero::pbf_writer one{all, summary_value};
    one.add_string(value_tag, tag.data(), tag.size());
    {
      protozero::pbf_writer content{one, value_tensor};
      content.add_enum(tensor_dtype, dtype_string);
      content.add_message(tensor_shape, std::string{}); // a scalar
      content.add_bytes(tensor_string, text);
    }
    protozero::pbf_writer about{one, value_metadata};
    protozero::pbf_writer plugin{about, metadata_plugin};
    plugin.add_string(plugin_name, "text");
  }
  std::string result;
  protozero::pbf_writer x{result};
  x.add_double(event_wall_time, now());
  x.add_message(event_summary, summary);
  put(result);
}

void tensorboard_log::on_start(const train_start& x) {
  write_text("partition", as_code(x.partition));
}

void tensorboard_log::on_step(const step_metrics& x) {
  scalars xs{{"loss/training", x.loss},
             {"optimizer/lr", x.lr},
             {"optimizer/grad_norm", x.grad_norm},
             {"optimizer/loss_scale", x.loss_scale},
             {"optimizer/skipped", x.skipped.empty() ? 0 : 1},
             {"speed/step_seconds", x.step_seconds},
             {"speed/samples_per_second", x.samples_per_second},
             {"speed/bubble_ratio", x.bubble_ratio},
             {"speed/checkpoint_seconds", x.checkpoint_seconds},
             {"communication/requests", static_cast<double>(x.requests)},
             {"communication/bytes_sent", static_cast<double>(x.bytes_sent)}};
  std::vector<std::string> names;
  names.reserve(x.devices.size());
  for (size_t i = 0; i < x.devices.size(); ++i)
    xs.emplace_back(names.emplace_back(fmt::format("device_memory/rank_{}", i)),
                    static_cast<double>(x.devices[i].memory));
  write(x.step, xs);
}

void tensorboard_log::on_evaluation(uint64_t step, double loss) {
  write(step, {{"loss/held_out", loss}});
}

} // namespace smp
