#include "transport/flight/flight_image.hpp"

#include "transport/error.hpp"
#include "transport/flight/flight_layout.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <tuple>

namespace smp {

namespace {

using namespace flight;

[[noreturn]] void fail(const std::string& what) {
  throw error{error_code::protocol, "not a flight record: " + what};
}

template <size_t N>
std::string text_of(const std::array<char, N>& x) {
  return {x.data(), ::strnlen(x.data(), N)};
}

void read_names(std::span<const std::byte> from, flight_log& to) {
  while (from.size() >= sizeof(name_head)) {
    name_head head{};
    std::memcpy(&head, from.data(), sizeof(head));
    auto size = padded(sizeof(head) + head.size);
    if (size > from.size())
      fail("a name is longer than what is left");
    auto* text = reinterpret_cast<const char*>(from.data()) + sizeof(head);
    to.names.insert_or_assign(head.key, std::string{text, head.size});
    from = from.subspan(size);
  }
}

/// @returns whether a file of any content may be shown as `x`
bool is_plausible(const flight_event& x) {
  return x.kind != flight_kind::none && x.kind <= last_of(x.kind)
         && x.what <= last_of(x.what);
}

} // namespace

const std::string& flight_log::name(uint32_t x) const {
  static const std::string none;
  auto i = names.find(x);
  return i == names.end() ? none : i->second;
}

uint32_t flight_log::number_of(std::string_view name) const {
  for (auto& [number, text] : names)
    if (text == name && number >= first_text_name)
      return number;
  return unknown_name;
}

flight_log read_flight_image(std::span<const std::byte> image) {
  header head{};
  if (image.size() < page)
    fail("too short");
  std::memcpy(&head, image.data(), sizeof(head));
  if (head.magic != magic)
    fail("it begins with something else");
  auto left = image.size() - page;
  if (head.names_size > left || head.names_used > head.names_size
      || head.slots != (left - head.names_size) / sizeof(slot)
      || (left - head.names_size) % sizeof(slot) != 0)
    fail("its sizes do not match");
  flight_log result;
  result.rank = rank_id{head.rank};
  result.pid = head.pid;
  result.host = text_of(head.host);
  result.clock = text_of(head.clock);
  result.epoch = head.epoch;
  read_names(image.subspan(page, head.names_used), result);
  auto* at = image.data() + page + head.names_size;
  for (uint64_t i = 0; i < head.slots; ++i) {
    slot x{};
    std::memcpy(&x, at + i * sizeof(slot), sizeof(slot));
    if (x.stamp == 0 || x.stamp % 2 != 0)
      continue;
    auto event = std::bit_cast<flight_event>(x.words);
    if (is_plausible(event))
      result.events.push_back(event);
  }
  result.lost = head.next - std::min<uint64_t>(head.next, result.events.size());
  std::stable_sort(result.events.begin(), result.events.end(),
                   [](auto& x, auto& y) { return x.time < y.time; });
  return result;
}

} // namespace smp
