#pragma once

// Encoding of requests, responses and control messages between ranks: their
// fields, one after the other (transport/bytes.hpp).
//
// request, response: id, the other fields, then the body
// control:           kind u8, then the message

#include "actors/protocol/messages.hpp"
#include "actors/protocol/result_name.hpp"
#include "transport/fabric.hpp"
#include "transport/inspect.hpp"

#include <optional>
#include <variant>

namespace smp {

// -- encoding -----------------------------------------------------------------

message encode(request x);
message encode(response x);
message encode(const microbatch_done& x);
message encode(const step_failed& x);
message encode(const rank_report& x);
message encode(const forward_over& x);
message encode(const step_plan& x);
message encode(const step_diverged& x);

/// Concatenates the tensors of all values.
message encode(const step_report& x);

using incoming = std::variant<request, response, microbatch_done, step_failed,
                              step_report, rank_report, forward_over, step_plan,
                              step_diverged>;

/// Reads a message of kind request, response or control.
/// @throws error (protocol) naming the first malformed field
incoming decode(message x);

/// @returns the phase of an encoded request; nothing if `x` does not contain it
/// or is not a request.
std::optional<phase> phase_of(const message& x);

// -- fields -------------------------------------------------------------------

/// @returns the results in `xs` in the short form sent with the request `x`.
std::vector<uint64_t> short_names(const std::vector<object_id>& xs,
                                  request_id x);

std::vector<object_id> long_names(const std::vector<uint64_t>& xs,
                                  request_id x);

template <class Inspector>
auto names_field(Inspector& f, const char* name, std::vector<object_id>& xs,
                 const request_id& x) {
  return f.field(
    name, [&xs, &x] { return short_names(xs, x); },
    [&xs, &x](const std::vector<uint64_t>& ys) {
      xs = long_names(ys, x);
      return true;
    });
}

/// All fields except the id, which comes first, and the body, which comes last.
template <class Inspector>
bool inspect_head(Inspector& f, request& x) {
  return f.object(x).fields(
    f.field("step", x.step), f.field("microbatch", x.microbatch),
    f.field("start number", x.start_number), f.field("module", x.module),
    f.field("phase", x.what), f.field("promised", x.promised),
    f.field("after", x.after), names_field(f, "needs", x.needs, x.id),
    names_field(f, "released", x.released, x.id));
}

template <class Inspector>
bool inspect_head(Inspector& f, response& x) {
  return f.object(x).fields(f.field("error", x.error));
}

template <class Inspector>
bool inspect(Inspector& f, microbatch_done& x) {
  return f.object(x).fields(f.field("step", x.step),
                            f.field("microbatch", x.microbatch));
}

template <class Inspector>
bool inspect(Inspector& f, step_report& x) {
  return f.object(x).fields(f.field("step", x.step), f.field("error", x.error),
                            f.field("values", x.values));
}

template <class Inspector>
bool inspect(Inspector& f, rank_report& x) {
  return f.object(x).fields(
    f.field("step", x.step), f.field("pp_rank", x.level.pp_rank),
    f.field("busy", x.level.busy), f.field("bytes", x.level.bytes));
}

template <class Inspector>
bool inspect(Inspector& f, forward_over& x) {
  return f.object(x).fields(f.field("step", x.step),
                            f.field("start number", x.start_number));
}

template <class Inspector>
bool inspect(Inspector& f, step_plan& x) {
  return f.object(x).fields(
    f.field("step", x.step), f.field("mode", x.what), f.field("key", x.key),
    f.field("replayed step", x.source), f.field("same order", x.same_order));
}

template <class Inspector>
bool inspect(Inspector& f, step_diverged& x) {
  return f.object(x).fields(f.field("step", x.step), f.field("text", x.text));
}

} // namespace smp
