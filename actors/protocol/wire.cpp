#include "actors/protocol/wire.hpp"

#include "actors/protocol/inspect_messages.hpp"
#include "transport/bytes.hpp"

#include <string>
#include <utility>

namespace smp {

namespace {

enum class control_kind : uint8_t {
  microbatch_done,
  step_failed,
  step_report,
  rank_report,
  forward_over,
  step_plan,
  step_diverged,
};

constexpr control_kind last_of(control_kind) noexcept {
  return control_kind::step_diverged;
}

/// How a request or response is encoded.
enum class message_style : uint8_t { in_full, as_recorded };

constexpr message_style last_of(message_style) noexcept {
  return message_style::as_recorded;
}

// -- requests and responses ---------------------------------------------------

/// Bytes reserved before the body: enough for most messages.
constexpr size_t usual_head = 64;

template <class T>
message encode_in_full(message_kind kind, T x) {
  byte_writer out;
  out.reserve(usual_head + x.body.bytes.size());
  out.put(message_style::in_full);
  out.put(x.id);
  inspect_head(out, x);
  out.raw(x.body.bytes);
  return {kind, {out.take(), std::move(x.body.tensors)}};
}

void put_rest(byte_writer& out, const recorded_request& x) {
  for (auto y : short_names(x.released, x.id))
    out.u64(y);
}

void put_rest(byte_writer&, const recorded_response&) {
  // nop
}

void get_rest(byte_reader& in, recorded_request& x) {
  std::vector<uint64_t> names;
  while (in.remaining() > 0)
    names.push_back(in.u64("released"));
  x.released = long_names(names, x.id);
}

void get_rest(byte_reader& in, recorded_response&) {
  in.expect_end();
}

template <class T>
message encode_as_recorded(message_kind kind, T x) {
  byte_writer out;
  out.put(message_style::as_recorded);
  out.put(x.id);
  put_rest(out, x);
  return {kind, {out.take(), std::move(x.tensors)}};
}

template <class InFull, class AsRecorded>
incoming decode_either(message x, const char* what) {
  byte_reader in{x.body.bytes, what};
  auto form = in.get<message_style>("form");
  auto id = in.get<request_id>("id");
  if (form == message_style::as_recorded) {
    AsRecorded result{id, std::move(x.body.tensors)};
    get_rest(in, result);
    return result;
  }
  InFull result;
  result.id = id;
  inspect_head(in, result);
  auto first = x.body.bytes.begin();
  x.body.bytes.erase(first, first + static_cast<ptrdiff_t>(in.position()));
  result.body = std::move(x.body);
  return result;
}

// -- control ------------------------------------------------------------------

template <class T>
message encode_control(control_kind kind, const T& x) {
  message result{message_kind::control, {}};
  byte_writer out{result.body.tensors};
  out.put(kind);
  out.put(x);
  result.body.bytes = out.take();
  return result;
}

template <class T>
T read_to_end(byte_reader& in) {
  auto result = in.get<T>();
  in.expect_end();
  return result;
}

incoming decode_control(const payload& x) {
  byte_reader in{x.bytes, "control message", x.tensors};
  switch (in.get<control_kind>("kind")) {
    case control_kind::microbatch_done:
      return read_to_end<microbatch_done>(in);
    case control_kind::step_failed: {
      auto result = read_to_end<step_failed>(in);
      if (!result.error)
        in.fail("error", "there is none");
      return result;
    }
    case control_kind::step_report:
      return read_to_end<step_report>(in);
    case control_kind::rank_report:
      return read_to_end<rank_report>(in);
    case control_kind::forward_over:
      return read_to_end<forward_over>(in);
    case control_kind::step_plan:
      return read_to_end<step_plan>(in);
    case control_kind::step_diverged:
      return read_to_end<step_diverged>(in);
  }
  in.fail("kind", "there is no such kind");
}

} // namespace

// -- names --------------------------------------------------------------------

std::vector<uint64_t> short_names(const std::vector<object_id>& xs,
                                  request_id x) {
  std::vector<uint64_t> result;
  for (auto& y : xs) {
    auto name = short_name(y);
    if (long_name(name, x.origin, step_of(x)) != y)
      throw error{
        error_code::internal,
        "a request names a value that is not a result of its own step"};
    result.push_back(name);
  }
  return result;
}

std::vector<object_id> long_names(const std::vector<uint64_t>& xs,
                                  request_id x) {
  std::vector<object_id> result;
  for (auto y : xs)
    result.push_back(long_name(y, x.origin, step_of(x)));
  return result;
}

// -- encoding -----------------------------------------------------------------

message encode(request x) {
  return encode_in_full(message_kind::request, std::move(x));
}

message encode(recorded_request x) {
  return encode_as_recorded(message_kind::request, std::move(x));
}

message encode(response x) {
  return encode_in_full(message_kind::response, std::move(x));
}

message encode(recorded_response x) {
  return encode_as_recorded(message_kind::response, std::move(x));
}

message encode(const microbatch_done& x) {
  return encode_control(control_kind::microbatch_done, x);
}

message encode(const step_failed& x) {
  return encode_control(control_kind::step_failed, x);
}

message encode(const rank_report& x) {
  return encode_control(control_kind::rank_report, x);
}

message encode(const forward_over& x) {
  return encode_control(control_kind::forward_over, x);
}

message encode(const step_plan& x) {
  return encode_control(control_kind::step_plan, x);
}

message encode(const step_diverged& x) {
  return encode_control(control_kind::step_diverged, x);
}

message encode(const step_report& x) {
  return encode_control(control_kind::step_report, x);
}

// -- decoding -----------------------------------------------------------------

incoming decode(message x) {
  switch (x.kind) {
    case message_kind::request:
      return decode_either<request, recorded_request>(std::move(x), "request");
    case message_kind::response:
      return decode_either<response, recorded_response>(std::move(x),
                                                        "response");
    case message_kind::control:
      return decode_control(x.body);
    default:
      throw error{error_code::protocol,
                  "malformed message: kind "
                    + std::to_string(static_cast<int>(x.kind))
                    + " is not for the MODULE SERVER"};
  }
}

std::optional<phase> phase_of(const message& x) {
  if (x.kind != message_kind::request)
    return std::nullopt;
  try {
    byte_reader in{x.body.bytes, "request"};
    if (in.get<message_style>("form") != message_style::in_full)
      return std::nullopt;
    request head;
    head.id = in.get<request_id>("id");
    inspect_head(in, head);
    return head.what;
  } catch (const error&) {
    return std::nullopt;
  }
}

} // namespace smp
