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

// -- requests and responses ---------------------------------------------------

/// Bytes reserved before the body: enough for most messages.
constexpr size_t usual_head = 64;

template <class T>
message encode_with_body(message_kind kind, T x) {
  byte_writer out;
  out.reserve(usual_head + x.body.bytes.size());
  out.put(x.id);
  inspect_head(out, x);
  out.raw(x.body.bytes);
  return {kind, {out.take(), std::move(x.body.tensors)}};
}

/// Reads all but the body.
template <class T>
T decode_head(byte_reader& in) {
  T result;
  result.id = in.get<request_id>("id");
  inspect_head(in, result);
  return result;
}

template <class T>
T decode_with_body(message x, const char* what) {
  byte_reader in{x.body.bytes, what};
  auto result = decode_head<T>(in);
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
  return encode_with_body(message_kind::request, std::move(x));
}

message encode(response x) {
  return encode_with_body(message_kind::response, std::move(x));
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
      return decode_with_body<request>(std::move(x), "request");
    case message_kind::response:
      return decode_with_body<response>(std::move(x), "response");
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
    return decode_head<request>(in).what;
  } catch (const error&) {
    return std::nullopt;
  }
}

} // namespace smp
