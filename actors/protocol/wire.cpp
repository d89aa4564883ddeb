#include "actors/protocol/wire.hpp"

#include <bit>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace smp {

static_assert(std::endian::native == std::endian::little,
              "numbers cross ranks in little-endian form");

namespace {

/// Bytes of an object's id.
constexpr size_t object_size = 2 * sizeof(uint64_t) + sizeof(uint32_t);

enum class control_kind : uint8_t {
  microbatch_done,
  step_failed,
  step_report,
  rank_report,
  forward_over,
  step_plan,
  step_diverged,
};

/// How a request or response says what it is.
enum class message_style : uint8_t { in_full, as_recorded };

// -- writing ------------------------------------------------------------------

class writer {
public:
  template <class T>
  void number(T x) {
    auto pos = bytes_.size();
    bytes_.resize(pos + sizeof(T));
    std::memcpy(bytes_.data() + pos, &x, sizeof(T));
  }

  void string(const std::string& x) {
    number(static_cast<uint32_t>(x.size()));
    append(x.data(), x.size());
  }

  void append(const void* data, size_t size) {
    auto first = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), first, first + size);
  }

  void append(const std::vector<std::byte>& x) {
    bytes_.insert(bytes_.end(), x.begin(), x.end());
  }

  void error(const failure& x) {
    number(x.code);
    if (!x)
      return;
    number(x.rank.value);
    string(x.module);
    string(x.text);
  }

  void reserve(size_t x) {
    bytes_.reserve(x);
  }

  std::vector<std::byte> take() {
    return std::move(bytes_);
  }

private:
  std::vector<std::byte> bytes_;
};

// -- reading ------------------------------------------------------------------

/// Reads from the front of an envelope; every read names what it reads.
class reader {
public:
  reader(const std::vector<std::byte>& bytes, std::string_view what)
    : bytes_(bytes), what_(what) {
    // nop
  }

  [[noreturn]] void fail(std::string_view field, std::string_view why) const {
    std::string text{"malformed "};
    text.append(what_).append(": ").append(field).append(" ").append(why);
    throw smp::error{error_code::protocol, std::move(text)};
  }

  template <class T>
  T number(std::string_view field) {
    need(sizeof(T), field);
    T result;
    std::memcpy(&result, bytes_.data() + pos_, sizeof(T));
    pos_ += sizeof(T);
    return result;
  }

  /// An enumeration whose last value is `last`.
  template <class T>
  T code(std::string_view field, T last) {
    auto x = number<uint8_t>(field);
    if (x > static_cast<uint8_t>(last))
      fail(field, "has no such value: " + std::to_string(x));
    return static_cast<T>(x);
  }

  std::string string(std::string_view field) {
    auto size = number<uint32_t>(field);
    need(size, field);
    std::string result(size, '\0');
    if (size > 0)
      std::memcpy(result.data(), bytes_.data() + pos_, size);
    pos_ += size;
    return result;
  }

  std::vector<std::byte> take(uint64_t size, std::string_view field) {
    need(size, field);
    auto first = bytes_.begin() + static_cast<ptrdiff_t>(pos_);
    pos_ += size;
    return {first, first + static_cast<ptrdiff_t>(size)};
  }

  request_id id() {
    auto origin = number<uint64_t>("origin");
    return {rank_id{origin}, number<uint64_t>("number")};
  }

  failure error() {
    failure result;
    result.code = code("failure code", error_code::internal);
    if (!result)
      return result;
    result.rank = rank_id{number<uint64_t>("failure rank")};
    result.module = string("failure module");
    result.text = string("failure text");
    return result;
  }

  uint64_t left() const noexcept {
    return bytes_.size() - pos_;
  }

  size_t position() const noexcept {
    return pos_;
  }

  void end() const {
    if (left() > 0)
      fail("end", "is followed by " + std::to_string(left()) + " bytes");
  }

private:
  void need(uint64_t size, std::string_view field) const {
    if (size > left())
      fail(field, "is cut off: " + std::to_string(size) + " bytes wanted, "
                    + std::to_string(left()) + " there");
  }

  const std::vector<std::byte>& bytes_;
  std::string_view what_;
  size_t pos_ = 0;
};

// -- the body behind a header ---------------------------------------------------

message with_body(message_kind kind, writer& header, payload body) {
  header.append(body.bytes);
  return {kind, {header.take(), std::move(body.tensors)}};
}

payload body_of(message x, const reader& header) {
  auto first = x.body.bytes.begin();
  x.body.bytes.erase(first, first + static_cast<ptrdiff_t>(header.position()));
  return std::move(x.body);
}

void no_tensors(const message& x, const reader& from) {
  if (!x.body.tensors.empty())
    from.fail("tensors", "are there, but it has none");
}

// -- control ------------------------------------------------------------------

writer control(control_kind kind, step_id step) {
  writer out;
  out.number(kind);
  out.number(step.value);
  return out;
}

step_report decode_report(step_id step, reader& in,
                          std::vector<tensor_ref> tensors) {
  step_report result{step, {}, in.error()};
  auto count = in.number<uint64_t>("count of values");
  // Checked before anything is allocated: each value has 16 bytes here.
  if (count > in.left() / 16)
    in.fail("count of values",
            "is " + std::to_string(count) + ", more than the message holds");
  struct extent {
    uint64_t bytes;
    uint64_t tensors;
  };
  std::vector<extent> extents(count);
  for (auto& x : extents) {
    x.bytes = in.number<uint64_t>("size of a value");
    x.tensors = in.number<uint64_t>("tensors of a value");
  }
  auto next = tensors.begin();
  for (auto& x : extents) {
    if (x.tensors > static_cast<uint64_t>(tensors.end() - next))
      in.fail("tensors of a value", "are more than the message holds");
    auto last = next + static_cast<ptrdiff_t>(x.tensors);
    auto& value = result.values.emplace_back();
    value.bytes = in.take(x.bytes, "a value");
    value.tensors.assign(std::move_iterator{next}, std::move_iterator{last});
    next = last;
  }
  if (next != tensors.end())
    in.fail("tensors", "are more than its values have");
  in.end();
  return result;
}

incoming decode_control(message x) {
  reader in{x.body.bytes, "control message"};
  auto kind = in.code("kind", control_kind::step_diverged);
  auto step = step_id{in.number<uint64_t>("step")};
  switch (kind) {
    case control_kind::microbatch_done: {
      auto mb = microbatch_id{in.number<uint64_t>("microbatch")};
      in.end();
      no_tensors(x, in);
      return microbatch_done{step, mb};
    }
    case control_kind::step_failed: {
      auto err = in.error();
      if (!err)
        in.fail("failure code", "is missing");
      in.end();
      no_tensors(x, in);
      return step_failed{step, std::move(err)};
    }
    case control_kind::rank_report: {
      rank_report result{step, {}};
      result.level.pp_rank = in.number<uint32_t>("pp_rank");
      result.level.busy = in.number<uint8_t>("busy") != 0;
      result.level.bytes = in.number<uint64_t>("bytes");
      in.end();
      no_tensors(x, in);
      return result;
    }
    case control_kind::forward_over: {
      auto turn = in.number<uint64_t>("turn");
      in.end();
      no_tensors(x, in);
      return forward_over{step, turn};
    }
    case control_kind::step_plan: {
      step_plan result;
      result.step = step;
      result.what = in.code("mode", step_plan::mode::replay);
      result.key = in.number<uint64_t>("key");
      result.source = step_id{in.number<uint64_t>("replayed step")};
      in.end();
      no_tensors(x, in);
      return result;
    }
    case control_kind::step_diverged: {
      auto text = in.string("text");
      in.end();
      no_tensors(x, in);
      return step_diverged{step, std::move(text)};
    }
    default:
      return decode_report(step, in, std::move(x.body.tensors));
  }
}

} // namespace

// -- requests and responses ---------------------------------------------------

namespace {

void begin(writer& out, message_style style, request_id id) {
  out.number(style);
  out.number(id.origin.value);
  out.number(id.number);
}

message_style read_style(reader& in) {
  return in.code("form", message_style::as_recorded);
}

} // namespace

message encode(request x) {
  writer out;
  out.reserve(63 + object_size * x.needs.size() + x.body.bytes.size());
  begin(out, message_style::in_full, x.id);
  out.number(x.step.value);
  out.number(x.microbatch.value);
  out.number(x.turn);
  out.number(x.module.value);
  out.number(x.what);
  out.number(static_cast<uint8_t>(x.promised));
  out.number(x.after);
  out.number(static_cast<uint32_t>(x.needs.size()));
  for (auto& y : x.needs) {
    out.number(y.owner.value);
    out.number(y.number);
    out.number(y.generation);
  }
  return with_body(message_kind::request, out, std::move(x.body));
}

message encode(recorded_request x) {
  writer out;
  begin(out, message_style::as_recorded, x.id);
  return {message_kind::request, {out.take(), std::move(x.tensors)}};
}

message encode(response x) {
  writer out;
  out.reserve(18 + x.body.bytes.size());
  begin(out, message_style::in_full, x.id);
  out.error(x.error);
  return with_body(message_kind::response, out, std::move(x.body));
}

message encode(recorded_response x) {
  writer out;
  begin(out, message_style::as_recorded, x.id);
  return {message_kind::response, {out.take(), std::move(x.tensors)}};
}

// -- control ------------------------------------------------------------------

message encode(const step_plan& x) {
  auto out = control(control_kind::step_plan, x.step);
  out.number(x.what);
  out.number(x.key);
  out.number(x.source.value);
  return {message_kind::control, {out.take(), {}}};
}

message encode(const step_diverged& x) {
  auto out = control(control_kind::step_diverged, x.step);
  out.string(x.text);
  return {message_kind::control, {out.take(), {}}};
}

message encode(const microbatch_done& x) {
  auto out = control(control_kind::microbatch_done, x.step);
  out.number(x.microbatch.value);
  return {message_kind::control, {out.take(), {}}};
}

message encode(const step_failed& x) {
  auto out = control(control_kind::step_failed, x.step);
  out.error(x.error);
  return {message_kind::control, {out.take(), {}}};
}

message encode(const rank_report& x) {
  auto out = control(control_kind::rank_report, x.step);
  out.number(x.level.pp_rank);
  out.number(static_cast<uint8_t>(x.level.busy));
  out.number(x.level.bytes);
  return {message_kind::control, {out.take(), {}}};
}

message encode(const forward_over& x) {
  auto out = control(control_kind::forward_over, x.step);
  out.number(x.turn);
  return {message_kind::control, {out.take(), {}}};
}

message encode(const step_report& x) {
  auto out = control(control_kind::step_report, x.step);
  out.error(x.error);
  out.number(static_cast<uint64_t>(x.values.size()));
  for (auto& y : x.values) {
    out.number(static_cast<uint64_t>(y.bytes.size()));
    out.number(static_cast<uint64_t>(y.tensors.size()));
  }
  message result{message_kind::control, {}};
  for (auto& y : x.values) {
    out.append(y.bytes);
    auto& tensors = result.body.tensors;
    tensors.insert(tensors.end(), y.tensors.begin(), y.tensors.end());
  }
  result.body.bytes = out.take();
  return result;
}

// -- reading ------------------------------------------------------------------

incoming decode(message x) {
  switch (x.kind) {
    case message_kind::request: {
      reader in{x.body.bytes, "request"};
      auto style = read_style(in);
      request result;
      result.id = in.id();
      if (style == message_style::as_recorded) {
        in.end();
        return recorded_request{result.id, std::move(x.body.tensors)};
      }
      result.step = step_id{in.number<uint64_t>("step")};
      result.microbatch = microbatch_id{in.number<uint64_t>("microbatch")};
      result.turn = in.number<uint64_t>("turn");
      result.module = module_id{in.number<uint64_t>("module")};
      result.what = in.code("phase", phase::backward);
      result.promised = in.code("promised", uint8_t{1}) != 0;
      result.after = in.number<uint64_t>("request before it");
      auto needs = in.number<uint32_t>("count of needed objects");
      // Checked before anything is allocated.
      if (needs > in.left() / object_size)
        in.fail("count of needed objects", "is more than the message holds");
      for (uint32_t i = 0; i < needs; ++i) {
        object_id y;
        y.owner.value = in.number<uint64_t>("owner of an object");
        y.number = in.number<uint64_t>("number of an object");
        y.generation = in.number<uint32_t>("generation of an object");
        result.needs.push_back(y);
      }
      result.body = body_of(std::move(x), in);
      return result;
    }
    case message_kind::response: {
      reader in{x.body.bytes, "response"};
      auto style = read_style(in);
      response result;
      result.id = in.id();
      if (style == message_style::as_recorded) {
        in.end();
        return recorded_response{result.id, std::move(x.body.tensors)};
      }
      result.error = in.error();
      result.body = body_of(std::move(x), in);
      return result;
    }
    case message_kind::control:
      return decode_control(std::move(x));
    default:
      throw error{error_code::protocol,
                  "malformed message: kind "
                    + std::to_string(static_cast<int>(x.kind))
                    + " is not for the MODULE SERVER"};
  }
}

} // namespace smp
