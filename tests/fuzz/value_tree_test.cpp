// Arguments and results of modules.

#include "tests/fuzz/target.hpp"

#include "runtime/values/value_codec.hpp"

using namespace smp;
using namespace smp::test;

namespace {

fuzz_bytes written(value x) {
  byte_writer out;
  out.put(x);
  return out.take();
}

std::vector<fuzz_bytes> value_seeds() {
  list_value items{{value::of(int64_t{-1}), value::of(0.5), value::of(true)},
                   "List[int]"};
  tuple_value pair{{value{{tensor_index{2}}}, value{{undefined_tensor{}}}}};
  dict_value table{{{value::of("mask"), value{{pair}}},
                    {value::of(int64_t{7}), value{{items}}}},
                   "Dict[str, Tensor]"};
  value deep = value::of("end");
  for (size_t i = 1; i < max_value_depth; ++i)
    deep = value{{tuple_value{{deep}}}};
  return {written(value::none()),
          written(value::of(std::complex<double>{1, -2})),
          written(value{{table}}),
          written(deep),
          written(value::of(device_ref{})),
          written(value{{dtype_value{6}}})};
}

bool reads_value(std::span<const std::byte> x) {
  try {
    byte_reader in{x, "value"};
    auto got = in.get<value>();
    in.expect_end();
    if (written(got) != fuzz_bytes{x.begin(), x.end()})
      throw std::logic_error{"two forms of one value"};
    return true;
  } catch (const error& e) {
    if (e.code() != error_code::protocol)
      throw;
    return false;
  }
}

} // namespace

SMP_FUZZ_TARGET("a damaged tree of values is refused, or has one meaning",
                (fuzz_target{"value_tree", value_seeds, reads_value}))
