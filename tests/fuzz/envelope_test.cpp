// What MODULE SERVERS say to each other. The first byte is the kind of message,
// the second how many tensors come with it.

#include "tests/fuzz/target.hpp"

#include "actors/protocol/wire.hpp"
#include "tests/support/actors/payloads.hpp"

using namespace smp;
using namespace smp::test;

namespace {

std::vector<tensor_ref> some_tensors(size_t number) {
  std::vector<tensor_ref> result;
  while (result.size() < number)
    result.push_back(make_tensor(4 * result.size(), result.size()));
  return result;
}

fuzz_bytes with_kind(const message& x) {
  fuzz_bytes result{static_cast<std::byte>(x.kind),
                    static_cast<std::byte>(x.body.tensors.size())};
  result.insert(result.end(), x.body.bytes.begin(), x.body.bytes.end());
  return result;
}

std::vector<fuzz_bytes> envelope_seeds() {
  const failure why{error_code::user_code, rank_id{1}, "blocks.3", "boom"};
  const payload body{to_bytes("arguments"), some_tensors(3)};
  const request_id id{rank_id{3}, request_number(step_id{5}, 17)};
  request call{
    id, step_id{5}, microbatch_id{2}, module_id{40}, phase::backward, body};
  call.promised = true;
  call.needs = {result_name(rank_id{1}, {rank_id{3}, 17}, step_id{5}, 2)};
  call.released = {result_name(rank_id{2}, {rank_id{3}, 17}, step_id{5}, 7)};
  step_report report{step_id{9}, {}, {}};
  report.values = {{to_bytes("loss"), {make_tensor(4, 1)}},
                   {},
                   {to_bytes("x"), {make_tensor(8, 2), make_tensor(0, 3)}}};
  std::vector<fuzz_bytes> result;
  for (auto& x :
       {encode(call), encode(response{id, body, {}}),
        encode(response{id, {}, why}),
        encode(microbatch_done{step_id{4}, microbatch_id{1}}),
        encode(step_failed{step_id{4}, why}), encode(report),
        encode(rank_report{step_id{4}, {}}),
        encode(forward_over{step_id{4}, 2}),
        encode(step_plan{step_id{4}, step_plan::mode::replay, 77, step_id{2}}),
        encode(step_diverged{step_id{4}, "another call"})})
    result.push_back(with_kind(x));
  return result;
}

bool decodes(std::span<const std::byte> x) {
  if (x.size() < 2 || x[0] > static_cast<std::byte>(message_kind::control))
    return false; // not for a MODULE SERVER
  try {
    decode({static_cast<message_kind>(x[0]),
            {{x.begin() + 2, x.end()},
             some_tensors(std::to_integer<size_t>(x[1]) % 8)}});
    return true;
  } catch (const error& e) {
    if (e.code() != error_code::protocol)
      throw;
    return false;
  }
}

} // namespace

SMP_FUZZ_TARGET(
  "a damaged envelope of a request, an answer or a notice is "
  "refused or read",
  (fuzz_target{"envelope", envelope_seeds, decodes}))
