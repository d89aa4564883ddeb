#include "transport/bytes.hpp"

#include <concepts>
#include <cstring>
#include <limits>

namespace smp {

namespace {

/// Numbers travel in little endian, whatever the machine uses.
template <std::unsigned_integral T>
T little(T x) noexcept {
  if constexpr (std::endian::native == std::endian::little) {
    return x;
  } else {
    T result = 0;
    for (size_t i = 0; i < sizeof(T); ++i, x = static_cast<T>(x >> 8))
      result = static_cast<T>((result << 8) | (x & 0xff));
    return result;
  }
}

template <std::unsigned_integral T>
void append(std::vector<std::byte>& buf, T x) {
  x = little(x);
  auto pos = buf.size();
  buf.resize(pos + sizeof(T));
  std::memcpy(buf.data() + pos, &x, sizeof(T));
}

} // namespace

// -- writing ------------------------------------------------------------------

void byte_writer::u8(uint8_t x) {
  buf_.push_back(std::byte{x});
}

void byte_writer::u16(uint16_t x) {
  append(buf_, x);
}

void byte_writer::u32(uint32_t x) {
  append(buf_, x);
}

void byte_writer::u64(uint64_t x) {
  append(buf_, x);
}

void byte_writer::i64(int64_t x) {
  append(buf_, static_cast<uint64_t>(x));
}

void byte_writer::f64(double x) {
  append(buf_, std::bit_cast<uint64_t>(x));
}

void byte_writer::boolean(bool x) {
  u8(x ? 1 : 0);
}

void byte_writer::count(size_t x) {
  if (x > std::numeric_limits<uint32_t>::max())
    throw error(error_code::unsupported,
                "a string or list in a message has " + std::to_string(x)
                  + " items, more than 32 bits can count");
  u32(static_cast<uint32_t>(x));
}

void byte_writer::string(std::string_view x) {
  count(x.size());
  raw(std::as_bytes(std::span{x}));
}

void byte_writer::bytes(std::span<const std::byte> x) {
  count(x.size());
  raw(x);
}

void byte_writer::raw(std::span<const std::byte> x) {
  buf_.insert(buf_.end(), x.begin(), x.end());
}

void byte_writer::tensor(tensor_ref x) {
  if (tensors_ == nullptr)
    throw error(error_code::internal, "a tensor where only bytes travel");
  tensors_->push_back(std::move(x));
}

std::vector<std::byte> byte_writer::take() {
  return std::exchange(buf_, {});
}

// -- reading ------------------------------------------------------------------

template <class T>
T byte_reader::number(const char* field) {
  T result;
  std::memcpy(&result, raw(sizeof(T), field).data(), sizeof(T));
  return little(result);
}

uint8_t byte_reader::u8(const char* field) {
  return number<uint8_t>(field);
}

uint16_t byte_reader::u16(const char* field) {
  return number<uint16_t>(field);
}

uint32_t byte_reader::u32(const char* field) {
  return number<uint32_t>(field);
}

uint64_t byte_reader::u64(const char* field) {
  return number<uint64_t>(field);
}

int64_t byte_reader::i64(const char* field) {
  return static_cast<int64_t>(number<uint64_t>(field));
}

double byte_reader::f64(const char* field) {
  return std::bit_cast<double>(number<uint64_t>(field));
}

bool byte_reader::boolean(const char* field) {
  if (remaining() > 0 && std::to_integer<uint8_t>(xs_[pos_]) > 1)
    fail(field, "neither 0 nor 1");
  return u8(field) == 1;
}

std::string byte_reader::string(const char* field) {
  auto chars = raw(count(1, field), field);
  return {reinterpret_cast<const char*>(chars.data()), chars.size()};
}

std::vector<std::byte> byte_reader::bytes(const char* field) {
  auto xs = raw(count(1, field), field);
  return {xs.begin(), xs.end()};
}

std::span<const std::byte> byte_reader::raw(size_t size, const char* field) {
  if (size > remaining())
    fail(field, std::to_string(size) + " bytes wanted, "
                  + std::to_string(remaining()) + " left");
  auto result = xs_.subspan(pos_, size);
  pos_ += size;
  return result;
}

uint32_t byte_reader::count(size_t min_item_size, const char* field) {
  auto result = u32(field);
  if (result > remaining() / min_item_size)
    fail(field, "claims " + std::to_string(result) + " items, but only "
                  + std::to_string(remaining()) + " bytes are left");
  return result;
}

const tensor_ref& byte_reader::tensor(const char* field) {
  if (tensors_.empty())
    fail(field, "the message has no more tensors");
  auto& result = tensors_.front();
  tensors_ = tensors_.subspan(1);
  return result;
}

void byte_reader::expect_end() const {
  if (remaining() > 0)
    fail("end of message", std::to_string(remaining()) + " bytes too many");
  if (!tensors_.empty())
    fail("end of message",
         std::to_string(tensors_.size()) + " tensors too many");
}

uint8_t byte_reader::choice(const char* field, uint8_t last) {
  auto result = u8(field);
  if (result > last) {
    --pos_;
    fail(field, "there is no value " + std::to_string(result));
  }
  return result;
}

std::string byte_reader::path_to(const char* field) const {
  std::string result{field};
  for (auto x = scope_; x != nullptr; x = x->outer_) {
    std::string name{x->name_};
    if (!name.empty())
      result = result.empty() ? name : name + "." + result;
  }
  return result;
}

void byte_reader::fail(const char* field, const std::string& why) const {
  std::string what{what_};
  if (!what.empty())
    what = "malformed " + what;
  auto path = path_to(field);
  if (!what.empty() && !path.empty())
    what += ": ";
  throw error(error_code::protocol,
              what + path + " at byte " + std::to_string(pos_) + ": " + why);
}

} // namespace smp
