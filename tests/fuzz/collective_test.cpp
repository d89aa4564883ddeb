// What begins each message of a collective.

#include "tests/fuzz/target.hpp"

#include "tests/support/actors/payloads.hpp"
#include "transport/collectives/collective_message.hpp"

using namespace smp;
using namespace smp::test;

namespace {

constexpr rank_id sender{1}, receiver{2};

std::vector<fuzz_bytes> collective_seeds() {
  collective_label label{{rank_id{0}, sender, receiver},
                         "loss",
                         step_id{3},
                         microbatch_id{1},
                         phase::backward,
                         7};
  collective_signature what{collective_kind::allreduce,
                            reduce_op::sum,
                            element_type::float32,
                            0,
                            {4, 8},
                            {}};
  collective_writer sums{label, what};
  what = {collective_kind::all_to_all,
          reduce_op::sum,
          element_type::int64,
          0,
          {3},
          {1, 0, 5}};
  collective_writer rows{label, what};
  auto bytes = make_tensor(64, 1);
  return {sums.joined().body.bytes, sums.asking().body.bytes,
          sums.segment({1, 64}, bytes).body.bytes,
          rows.segment({2, 0}, bytes).body.bytes,
          rows.failed({error_code::config, sender, "", "no"}).body.bytes};
}

bool reads_collective(std::span<const std::byte> x) {
  message m{message_kind::collective,
            {{x.begin(), x.end()}, {make_tensor(64, 1)}}};
  for (bool with_bytes : {true, false}) {
    try {
      if (!with_bytes)
        m.body.tensors.clear();
      auto got = read_collective(m, sender, receiver);
      // What is said of it to people.
      (void)got.what.describe();
      (void)got.what.count();
      return true;
    } catch (const error& e) {
      if (e.code() != error_code::protocol)
        throw;
    }
  }
  return false;
}

} // namespace

SMP_FUZZ_TARGET("a damaged message of a collective is refused or read",
                (fuzz_target{"collective", collective_seeds, reads_collective}))
