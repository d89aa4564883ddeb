#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <fmt/format.h>

#include <cstring>
#include <limits>
#include <variant>

// Arguments and results of every kind through a call of a module on another
// rank.

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

/// Gives back what it gets, of any type.
struct echo_impl : torch::nn::Module {
  template <class T>
  T forward(T x) {
    return x;
  }
};
TORCH_MODULE_IMPL(echo, echo_impl);

/// Gives back copies, so that the bytes go both ways.
struct copier_impl : torch::nn::Module {
  std::vector<Tensor> forward(std::vector<Tensor> xs) {
    for (auto& x : xs)
      if (x.defined())
        x = x.clone();
    return xs;
  }
};
TORCH_MODULE_IMPL(copier, copier_impl);

/// Tells what it sees of its arguments.
struct observer_impl : torch::nn::Module {
  std::vector<bool> forward(Tensor a, std::map<std::string, Tensor> b,
                            std::optional<Tensor> c) {
    return {a.is_same(b.at("same")), a.is_same(b.at("view")),
            c && !c->defined(),      a.is_contiguous(),
            a.requires_grad(),       b.at("view").requires_grad()};
  }
};
TORCH_MODULE_IMPL(observer, observer_impl);

/// Returns a reference to what it has.
struct keeper_impl : torch::nn::Module {
  const Tensor& forward(Tensor x) {
    last = x * 2;
    return last;
  }

  Tensor last;
};
TORCH_MODULE_IMPL(keeper, keeper_impl);

/// Returns what cannot be sent.
struct sparse_result_impl : torch::nn::Module {
  std::pair<Tensor, std::vector<Tensor>> forward(Tensor x) {
    return {x, {x * 1, x.detach().to_sparse()}};
  }
};
TORCH_MODULE_IMPL(sparse_result, sparse_result_impl);

/// Writes into a nested tensor. @returns the number of tensors in it
struct writer_impl : torch::nn::Module {
  int64_t forward(Tensor x) {
    x.mul_(2);
    return x.size(0);
  }
};
TORCH_MODULE_IMPL(writer, writer_impl);

struct values_impl : torch::nn::Module {
  values_impl() {
    partition_scope on_rank_1{1};
    all = submodule<echo>(std::make_shared<hooked<echo_impl>>());
    copy = submodule<copier>(std::make_shared<hooked<copier_impl>>());
    observe = submodule<observer>(std::make_shared<hooked<observer_impl>>());
    keep = submodule<keeper>(std::make_shared<hooked<keeper_impl>>());
    bad = submodule<sparse_result>(
      std::make_shared<hooked<sparse_result_impl>>());
    write = submodule<writer>(std::make_shared<hooked<writer_impl>>());
    register_module("write", write);
    register_module("all", all);
    register_module("copy", copy);
    register_module("observe", observe);
    register_module("keep", keep);
    register_module("bad", bad);
    register_module("list", list);
  }
  submodule<echo> all = nullptr;
  submodule<copier> copy = nullptr;
  submodule<observer> observe = nullptr;
  submodule<keeper> keep = nullptr;
  submodule<sparse_result> bad = nullptr;
  submodule<writer> write = nullptr;
  torch::nn::Sequential list{torch::nn::Linear(2, 2)};
};
TORCH_MODULE_IMPL(values, values_impl);

/// Runs `body` as a microbatch on rank 0; returns its failures.
std::vector<std::string> with_values(
  const std::function<void(values_impl&, std::vector<std::string>&)>& body) {
  std::vector<std::string> result;
  run_virtual_world(2, manual_world(), [&](session& s) {
    distributed_model model{values{}};
    set_partition(*model->list->ptr(0), 1);
    auto run = step([&] { body(*model, result); });
    run();
    if (s.last_step().requests == 0 && s.rank() == 0)
      result.push_back("nothing was asked of rank 1");
  });
  return result;
}

std::string refusal_of(const std::function<void(values_impl&)>& body) {
  return test::error_of([&] {
    run_virtual_world(2, manual_world(), [&](session&) {
      distributed_model model{values{}};
      set_partition(*model->list->ptr(0), 1);
      step([&] { body(*model); })();
    });
  });
}

} // namespace

TEST_CASE("values of every C++ type cross ranks and come back",
          "[runtime][values]") {
  auto failures = with_values([](values_impl& m, auto& failures) {
    auto check = [&](const char* name, const auto& x) {
      if (!(m.all(x) == x))
        failures.push_back(name);
    };
    check("bool", true);
    check("int", -7);
    check("int64", std::numeric_limits<int64_t>::min());
    check("unsigned", 4'000'000'000u);
    check("float", 0.1f);
    check("double", -0.1);
    check("infinity", std::numeric_limits<double>::infinity());
    check("complex", std::complex<double>{1, -2});
    check("c10 complex", c10::complex<float>{1, -2});
    check("string", std::string{"a\0b", 3});
    check("device", c10::Device{c10::kCPU});
    check("dtype", c10::ScalarType::Float8_e4m3fn);
    check("enum", c10::MemoryFormat::ChannelsLast);
    check("nullopt", std::optional<int>{});
    check("optional", std::optional<std::vector<double>>{{1, 2}});
    check("array", std::array<int, 3>{1, 2, 3});
    check("vector of bool", std::vector<bool>{true, false});
    check("nested", std::vector<std::tuple<std::string, std::pair<int, bool>>>{
                      {"x", {1, true}}, {"", {2, false}}});
    check("map",
          std::map<std::string, std::vector<int64_t>>{{"b", {1}}, {"a", {}}});
    check("unordered map", std::unordered_map<int, std::string>{{2, "x"}});
    using choice = std::variant<int64_t, std::string, std::vector<double>>;
    check("variant", std::vector<choice>{choice{int64_t{3}}, choice{"s"},
                                         choice{std::vector<double>{1}}});
    check("empty variant", std::variant<std::monostate, int>{});
    torch::OrderedDict<std::string, int64_t> dict;
    dict.insert("z", 1);
    dict.insert("a", 2);
    if (m.all(dict).keys() != std::vector<std::string>{"z", "a"})
      failures.push_back("ordered dict");
    if (!m.all(c10::Scalar{int64_t{3}}).isIntegral(false))
      failures.push_back("scalar");
  });
  CHECK(failures == std::vector<std::string>{});
}

TEST_CASE("what a module returns by reference is a value of its caller",
          "[runtime][values]") {
  auto failures = with_values([](values_impl& m, auto& failures) {
    const auto& first = m.keep(torch::ones({2}));
    const auto& second = m.keep(torch::full({2}, 3.0));
    if (!first.equal(torch::full({2}, 2.0)))
      failures.push_back("first");
    if (!second.equal(torch::full({2}, 6.0)))
      failures.push_back("second");
  });
  CHECK(failures == std::vector<std::string>{});
}

TEST_CASE("tensors of every dtype and form cross ranks and come back",
          "[runtime][values]") {
  auto failures = with_values([](values_impl& m, auto& failures) {
    auto bytes = torch::arange(96).to(torch::kByte);
    std::vector<Tensor> xs;
    for (auto dtype : {c10::kBool,
                       c10::kByte,
                       c10::kChar,
                       c10::kShort,
                       c10::kInt,
                       c10::kLong,
                       c10::kUInt16,
                       c10::kUInt32,
                       c10::kUInt64,
                       c10::kHalf,
                       c10::kBFloat16,
                       c10::kFloat,
                       c10::kDouble,
                       c10::kComplexHalf,
                       c10::kComplexFloat,
                       c10::kComplexDouble,
                       c10::kFloat8_e5m2,
                       c10::kFloat8_e4m3fn,
                       c10::kFloat8_e5m2fnuz,
                       c10::kFloat8_e4m3fnuz,
                       c10::kFloat8_e8m0fnu}) {
      auto source = dtype == c10::kBool ? bytes % 2 : bytes;
      xs.push_back(source.view(dtype));
    }
    auto real = torch::arange(24.0).view({4, 6});
    auto complex = torch::complex(real, real + 1);
    for (auto& x :
         {real.t(), real.slice(1, 1, 6, 2), real.select(0, 2),
          torch::ones({3}).expand({2, 3}), torch::empty({0}),
          torch::empty({3, 0, 2}), torch::scalar_tensor(2.5), complex.conj(),
          at::imag(complex.conj()), real.narrow(0, 1, 2)})
      xs.push_back(x);
    xs.push_back({}); // a tensor object without a tensor
    auto ys = m.copy(xs);
    for (size_t i = 0; i < xs.size(); ++i) {
      auto x = xs[i], y = ys.at(i);
      auto same = x.defined() == y.defined();
      if (same && x.defined()) {
        same = y.strides() == x.clone().resolve_conj().resolve_neg().strides();
        x = x.resolve_conj().resolve_neg().contiguous();
        y = y.contiguous();
        same = same && x.scalar_type() == y.scalar_type()
               && x.sizes() == y.sizes() && x.nbytes() == y.nbytes()
               && (x.nbytes() == 0
                   || std::memcmp(x.const_data_ptr(), y.const_data_ptr(),
                                  x.nbytes())
                        == 0);
      }
      if (!same)
        failures.push_back(fmt::format("tensor {}", i));
    }
  });
  CHECK(failures == std::vector<std::string>{});
}

// Those that torch.nn's encoder makes of a padded batch in evaluation.
TEST_CASE("nested tensors without a gradient cross ranks and come back",
          "[runtime][values]") {
  auto failures = with_values([](values_impl& m, auto& failures) {
    auto rows = std::vector{torch::arange(6.0).view({2, 3}),
                            torch::arange(12.0).view({4, 3})};
    auto check = [&](const char* name, const Tensor& x) {
      // The first call waits; a later one might go on with a promise.
      for (int i = 0; i < 3; ++i) {
        auto y = m.copy(std::vector{x}).at(0);
        auto same = y.is_nested() && y.size(0) == x.size(0);
        auto xs = x.unbind();
        auto ys = same ? y.unbind() : xs;
        for (size_t k = 0; k < xs.size(); ++k)
          same = same && torch::equal(xs[k], ys[k]);
        if (!same)
          failures.push_back(name);
      }
    };
    torch::NoGradGuard no_grad;
    auto x = at::_nested_tensor_from_tensor_list(rows);
    check("rows", x);
    check("transposed", x.transpose(1, 2));
    check("none", at::_nested_tensor_from_tensor_list(
                    {torch::ones({0, 3}), torch::ones({2, 3})}));
    if (m.write(x) != 2 || x.unbind()[1][3][2].item<double>() != 22)
      failures.push_back("written in place");
  });
  CHECK(failures == std::vector<std::string>{});
  CHECK_THAT(refusal_of([&](values_impl& m) {
               auto x = at::_nested_tensor_from_tensor_list(
                 {torch::ones({2, 3}), torch::ones({1, 3})});
               m.copy(std::vector{x.requires_grad_(true)});
             }),
             ContainsSubstring("call of 'copy': argument 0, item 0: a nested "
                               "tensor that requires grad"));
}

TEST_CASE("a tensor that occurs twice in a message arrives as one",
          "[runtime][values]") {
  std::vector<bool> seen;
  with_values([&](values_impl& m, auto&) {
    auto x = torch::ones({2, 3}).t().requires_grad_(true) * 2;
    std::map<std::string, Tensor> more{{"same", x},
                                       {"view", x.detach().view_as(x)}};
    seen = m.observe(x, more, std::optional<Tensor>{Tensor{}});
  });
  CHECK(seen == std::vector<bool>{true, false, true, false, true, false});
}

TEST_CASE("a value that cannot be sent is named with its module and place",
          "[runtime][values]") {
  auto sparse = torch::eye(3).to_sparse();
  CHECK_THAT(refusal_of([&](values_impl& m) {
               m.copy(std::vector<Tensor>{torch::ones({1}), sparse});
             }),
             ContainsSubstring("'copy'")
               && ContainsSubstring("argument 0, item 1: a sparse tensor"));
  CHECK_THAT(refusal_of([&](values_impl& m) {
               std::map<std::string, Tensor> more;
               more["q"] = at::quantize_per_tensor(torch::ones({2}), 0.1, 0,
                                                   c10::kQInt8);
               m.observe(torch::ones({1}), more, std::nullopt);
             }),
             ContainsSubstring("'observe'")
               && ContainsSubstring("argument 1, entry 0: a quantised"));
  CHECK_THAT(
    refusal_of([](values_impl& m) { m.all(torch::empty({2}, torch::kMeta)); }),
    ContainsSubstring("'all'")
      && ContainsSubstring("argument 0: a tensor on device meta"));
  CHECK_THAT(refusal_of([](values_impl& m) {
               m.all(std::numeric_limits<uint64_t>::max());
             }),
             ContainsSubstring("'all'") && ContainsSubstring("argument 0"));
  CHECK_THAT(refusal_of([](values_impl& m) { m.bad(torch::ones({2})); }),
             ContainsSubstring("rank 1, module bad")
               && ContainsSubstring("result, element 1, item 1: a sparse"));
  CHECK_THAT(refusal_of([](values_impl& m) {
               m.list->forward(std::map<int, Tensor>{});
             }),
             ContainsSubstring("argument 0: a Sequential cannot carry")
               && ContainsSubstring("map"));
}

TEST_CASE(
  "a traced module that passes what cannot be sent stays with its "
  "caller",
  "[runtime][values]") {
  auto world = manual_world();
  world.config.auto_partition = true;
  auto run = [&](auto body) {
    return test::error_of([&] {
      run_virtual_world(2, world, [&](session&) {
        distributed_model model{values{}};
        step([&] { body(*model); })();
      });
    });
  };
  auto result = run([](values_impl& m) { m.bad(torch::ones({2})); });
  CHECK_THAT(result, ContainsSubstring(
                       "module bad is pinned to device 1, but stays with the "
                       "root: result, element 1, item 1: a sparse tensor"));
  auto argument = run([](values_impl& m) {
    m.copy(std::vector<Tensor>{torch::ones({1}), torch::eye(3).to_sparse()});
  });
  CHECK_THAT(argument,
             ContainsSubstring("module copy is pinned to device 1, but stays "
                               "with the root: argument 0, item 1: a sparse"));
}
