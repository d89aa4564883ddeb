// ctest: alone
#include "tests/support/catch.hpp"

#include "runtime/values/pack.hpp"
#include "runtime/values/value_codec.hpp"
#include "transport/error.hpp"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/frontend/script_type_parser.h>

#include <limits>

using namespace smp;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::Message;

// -- a type of a user ---------------------------------------------------------

namespace {

struct hidden_state {
  at::Tensor hidden;
  int64_t length = 0;
};

struct unknown_type {};

enum class colour : uint8_t { red, green = 200 };

} // namespace

template <>
struct smp::pack<hidden_state> {
  static value put(packer& p, const hidden_state& x) {
    return put_value(p, std::tie(x.hidden, x.length));
  }
  static hidden_state get(unpacker& u, const value& x) {
    auto [hidden, length] = get_value<std::tuple<at::Tensor, int64_t>>(u, x);
    return {hidden, length};
  }
};

namespace {

// -- what can be sent, as the compiler sees it --------------------------------

static_assert(owning<at::Tensor> && owning<c10::IValue> && owning<bool>);
static_assert(owning<std::vector<std::optional<at::Tensor>>>);
static_assert(owning<std::tuple<at::Tensor, std::tuple<int, hidden_state>>>);
static_assert(std::same_as<unpacked_t<std::string_view>, std::string>);
static_assert(std::same_as<unpacked_t<std::optional<at::IntArrayRef>>,
                           std::optional<std::vector<int64_t>>>);
static_assert(packable<at::TensorList> && packable<const char*>);
static_assert(!packable<unknown_type> && !unpackable<unknown_type>);
static_assert(!packable<std::map<std::string, std::vector<unknown_type>>>);
static_assert(!unpackable<std::tuple<int, unknown_type>>);
static_assert(!packable<std::optional<std::optional<int>>>);

// -- helpers ------------------------------------------------------------------

/// Sends `x` through the codec to an `unpacker` with the same tensors.
template <class T>
auto round_trip(const T& x) {
  packer p;
  auto w = from_payload<value>(to_payload(put_value(p, x)), "value");
  CHECK(p.depth() == 0);
  unpacker u{p.tensors()};
  return get_value<T>(u, w);
}

template <class T>
bool survives(const T& x) {
  return round_trip(x) == x;
}

/// Reads `x`, which has no tensors, as a T.
template <class T>
auto read_as(const value& x) {
  unpacker u{{}};
  return get_value<T>(u, x);
}

} // namespace

// -- C++ types ----------------------------------------------------------------

TEST_CASE("numbers of every C++ type survive with their whole range") {
  CHECK(survives(true));
  CHECK(survives(std::numeric_limits<int8_t>::min()));
  CHECK(survives(std::numeric_limits<uint8_t>::max()));
  CHECK(survives(std::numeric_limits<short>::min()));
  CHECK(survives(std::numeric_limits<int>::min()));
  CHECK(survives(std::numeric_limits<unsigned>::max()));
  CHECK(survives(std::numeric_limits<int64_t>::min()));
  CHECK(survives(std::numeric_limits<long long>::max()));
  CHECK(survives(size_t{std::numeric_limits<int64_t>::max()}));
  CHECK(survives('x'));
  CHECK(survives(colour::green));
  CHECK(survives(0.1f));
  CHECK(survives(std::numeric_limits<float>::denorm_min()));
  CHECK(survives(std::numeric_limits<double>::max()));
  CHECK(survives(std::complex<float>{0.1f, -2}));
  CHECK(survives(std::complex<double>{0.1, -2}));
  CHECK(survives(c10::complex<double>{0.1, -2}));
}

TEST_CASE("an integer that its type or the wire cannot hold is refused") {
  packer p;
  CHECK_THROWS_MATCHES(
    put_value(p, std::numeric_limits<uint64_t>::max()), error,
    Message("value: 18446744073709551615 does not fit into 64 bits with sign"));
  CHECK_THROWS_MATCHES(read_as<uint8_t>(value::of(int64_t{256})), error,
                       Message("value: 256 is out of the range of its type"));
  CHECK_THROWS_MATCHES(read_as<unsigned>(value::of(int64_t{-1})), error,
                       Message("value: -1 is out of the range of its type"));
  CHECK(read_as<int8_t>(value::of(int64_t{-128})) == -128);
}

TEST_CASE("strings, containers and nothing survive") {
  CHECK(survives(std::string{"a\0b", 3}));
  CHECK(round_trip(std::string_view{"view"}) == "view");
  CHECK(round_trip<const char*>("literal") == "literal");
  CHECK(survives(std::optional<int>{}));
  CHECK(survives(std::optional<int>{7}));
  CHECK(survives(std::vector<bool>{true, false, true}));
  CHECK(survives(std::vector<float>{}));
  CHECK(survives(std::vector<std::vector<std::string>>{{"a"}, {}, {"b", ""}}));
  CHECK(survives(std::array<int, 3>{1, 2, 3}));
  CHECK(survives(std::tuple<>{}));
  CHECK(survives(std::tuple{1, std::string{"x"}, std::pair{2.5, true}}));
  CHECK(survives(std::map<std::string, int>{{"b", 1}, {"a", 2}}));
  CHECK(survives(std::map<int, std::optional<bool>>{{3, {}}, {-3, true}}));
  CHECK(survives(std::unordered_map<std::string, double>{{"x", 1}, {"y", 2}}));
  CHECK(round_trip(nullptr) == nullptr);
  packer p;
  CHECK(put_value(p, std::nullopt) == value::none());
  unpacker u{{}};
  CHECK_NOTHROW(get_value<std::nullopt_t>(u, value::none()));
  std::vector<int64_t> sizes{4, 5};
  CHECK(round_trip(at::IntArrayRef{sizes}) == sizes);
  CHECK(*round_trip(std::optional<at::IntArrayRef>{sizes}) == sizes);
}

TEST_CASE("scalars, devices and dtypes survive with their kind") {
  CHECK(round_trip(c10::Scalar{true}).isBoolean());
  CHECK(round_trip(c10::Scalar{int64_t{-3}}).toLong() == -3);
  CHECK(round_trip(c10::Scalar{int64_t{-3}}).isIntegral(false));
  CHECK(round_trip(c10::Scalar{0.1}).toDouble() == 0.1);
  auto z = c10::complex<double>{1, 2};
  CHECK(round_trip(c10::Scalar{z}).toComplexDouble() == z);
  CHECK(survives(c10::Device{c10::kCPU}));
  CHECK(survives(c10::Device{c10::kCUDA, 7}));
  CHECK(survives(c10::ScalarType::BFloat16));
  CHECK(survives(c10::ScalarType::Undefined));
  packer p;
  CHECK_THROWS_MATCHES(
    put_value(p, c10::Scalar{std::numeric_limits<uint64_t>::max()}), error,
    Message("value: an unsigned number that does not fit into 64 bits with "
            "sign"));
}

TEST_CASE("device and dtype numbers that do not exist are refused") {
  CHECK_THROWS_MATCHES(read_as<c10::Device>(value::of(device_ref{200, 0})),
                       error, Message("value: there is no device 200:0"));
  CHECK_THROWS_AS(read_as<c10::Device>(value::of(device_ref{0, 1})), error);
  CHECK_THROWS_AS(read_as<c10::Device>(value::of(device_ref{1, -2})), error);
  CHECK_THROWS_AS(read_as<c10::Device>(value::of(device_ref{1, 300})), error);
  CHECK_THROWS_MATCHES(read_as<c10::ScalarType>(value::of(dtype_value{255})),
                       error, Message("value: there is no dtype 255"));
}

TEST_CASE("a user's type is sent once its pack is specialised") {
  auto t = at::rand({2, 3});
  auto x = round_trip(std::vector<hidden_state>{{t, 5}, {at::Tensor{}, 6}});
  REQUIRE(x.size() == 2);
  CHECK(x[0].hidden.is_same(t));
  CHECK(x[0].length == 5);
  CHECK_FALSE(x[1].hidden.defined());
  CHECK(x[1].length == 6);
}

// -- tensors ------------------------------------------------------------------

TEST_CASE("a tensor that occurs twice is sent once and arrives as one") {
  auto a = at::rand({2});
  auto b = at::rand({2});
  auto same_a = a;         // the same TensorImpl
  auto view = a.view({2}); // another one, over the same memory
  std::map<std::string, at::Tensor> dict{{"k", a}};
  packer p;
  auto v = put_value(p, std::tie(a, b, same_a, view, dict));
  CHECK(p.tensors().size() == 3);
  unpacker u{p.tensors()};
  auto [a2, b2, same_a2, view2, dict2] = get_value<
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor,
               std::map<std::string, at::Tensor>>>(u, v);
  CHECK(a2.is_same(a));
  CHECK(same_a2.is_same(a2));
  CHECK(dict2["k"].is_same(a2));
  CHECK(b2.is_same(b));
  CHECK(view2.is_same(view));
}

TEST_CASE(
  "a packer keeps its tensors, so that none takes the place of another") {
  packer p;
  for (uint32_t i = 0; i < 100; ++i)
    CHECK(p.add(at::empty({1})) == i);
}

TEST_CASE("an undefined tensor differs from no tensor") {
  CHECK_FALSE(round_trip(at::Tensor{}).defined());
  CHECK_FALSE(round_trip(std::optional<at::Tensor>{}).has_value());
  auto x = round_trip(std::optional<at::Tensor>{at::Tensor{}});
  REQUIRE(x.has_value());
  CHECK_FALSE(x->defined());
  auto t = at::rand({1});
  CHECK(round_trip(std::optional{t})->is_same(t));
  std::vector<at::Tensor> list{t, {}, t};
  auto y = round_trip(at::TensorList{list});
  REQUIRE(y.size() == 3);
  CHECK(y[0].is_same(y[2]));
  CHECK_FALSE(y[1].defined());
}

TEST_CASE("a message without the tensor that it names is refused") {
  unpacker u{{at::rand({1})}};
  CHECK_THROWS_MATCHES(get_value<at::Tensor>(u, value::tensor(1)), error,
                       Message("value: tensor 1 of a message with 1"));
}

// -- errors -------------------------------------------------------------------

TEST_CASE("an error names the place, what was expected and what was found") {
  unpacker u{{}};
  auto list = value::list(
    {value::tuple({value::of("a"), value::of(1.5)}),
     value::tuple({value::of("b"), value::of(int64_t{2})})});
  value_path::scope here{u, "argument", 1};
  using type = std::vector<std::pair<std::string, double>>;
  try {
    get_value<type>(u, list);
    FAIL("no error");
  } catch (const error& x) {
    CHECK(x.code() == error_code::protocol);
    CHECK(x.cause().text
          == "argument 1, item 1, element 1: float expected, found int");
  }
  CHECK(u.place() == "argument 1");
  CHECK_THROWS_MATCHES(
    (get_value<std::tuple<int, int>>(u, value::tuple({value::none()}))), error,
    Message("argument 1: tuple of 2 expected, found tuple of 1"));
  CHECK_THROWS_MATCHES(
    (get_value<std::map<std::string, int>>(
      u, value::dict({{value::of("a"), value::of(int64_t{1})},
                      {value::of("a"), value::of(int64_t{2})}}))),
    error, Message("argument 1, entry 1: this key stands twice in its dict"));
}

TEST_CASE("every kind is refused where another is expected") {
  std::vector<value> all{value::none(),
                         value::of(true),
                         value::of(int64_t{1}),
                         value::of(1.5),
                         value::of(std::complex<double>{1}),
                         value::of("s"),
                         value::tensor(0),
                         value::undefined(),
                         value::list({}),
                         value::tuple({}),
                         value::dict({}),
                         value::of(device_ref{}),
                         value::of(dtype_value{})};
  auto accepted = [&]<class T>(std::type_identity<T>) {
    std::string result;
    for (auto& x : all) {
      unpacker u{{at::Tensor{}}};
      try {
        get_value<T>(u, x);
        result += to_string(x.kind());
        result += ' ';
      } catch (const error&) {
        // nop
      }
    }
    return result;
  };
  CHECK(accepted(std::type_identity<bool>{}) == "bool ");
  CHECK(accepted(std::type_identity<int>{}) == "int ");
  CHECK(accepted(std::type_identity<float>{}) == "float ");
  CHECK(accepted(std::type_identity<std::complex<float>>{}) == "complex ");
  CHECK(accepted(std::type_identity<std::string>{}) == "string ");
  CHECK(accepted(std::type_identity<at::Tensor>{})
        == "tensor undefined tensor ");
  CHECK(accepted(std::type_identity<std::optional<bool>>{}) == "none bool ");
  CHECK(accepted(std::type_identity<std::vector<int>>{}) == "list ");
  CHECK(accepted(std::type_identity<std::tuple<>>{}) == "tuple ");
  CHECK(accepted(std::type_identity<std::map<int, int>>{}) == "dict ");
  CHECK(accepted(std::type_identity<c10::Device>{}) == "device ");
  CHECK(accepted(std::type_identity<c10::ScalarType>{}) == "dtype ");
  CHECK(accepted(std::type_identity<c10::Scalar>{})
        == "bool int float complex ");
}

// -- TorchScript --------------------------------------------------------------

TEST_CASE("TorchScript values survive with their types, empty lists too") {
  auto t = at::rand({2});
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("b", t);
  dict.insert("a", at::rand({1}));
  c10::List<std::optional<at::Tensor>> maybe{std::optional<at::Tensor>{t},
                                             std::optional<at::Tensor>{}};
  auto any = c10::impl::GenericList{c10::AnyType::get()};
  any.push_back(1);
  any.push_back("text");
  std::vector<c10::IValue> values{
    c10::IValue{},
    t,
    true,
    int64_t{-7},
    0.1,
    c10::complex<double>{1, 2},
    "text",
    c10::Device{c10::kCPU},
    std::vector<int64_t>{1, 2},
    std::vector<int64_t>{},
    std::vector<double>{},
    std::vector<at::Tensor>{t, t},
    c10::List<bool>{true, false},
    c10::List<std::string>{},
    maybe,
    any,
    dict,
    c10::Dict<int64_t, c10::List<double>>{},
    c10::ivalue::Tuple::create({t, c10::ivalue::Tuple::create({1}), "x"}),
  };
  for (auto& x : values) {
    auto y = round_trip(x);
    CAPTURE(x.type()->annotation_str());
    CHECK(x.tagKind() == y.tagKind());
    CHECK(x.type()->annotation_str() == y.type()->annotation_str());
    packer p1;
    packer p2;
    CHECK(put_value(p1, x) == put_value(p2, y));
    REQUIRE(p1.tensors().size() == p2.tensors().size());
    for (size_t i = 0; i < p1.tensors().size(); ++i)
      CHECK(p1.tensors()[i].is_same(p2.tensors()[i]));
  }
}

TEST_CASE("a nested tensor that reaches beyond its memory is refused") {
  auto read = [](at::Tensor elements, at::Tensor sizes, at::Tensor strides,
                 at::Tensor offsets) {
    unpacker u{{elements, sizes, strides, offsets}};
    return get_value<at::Tensor>(u,
                                 value::of(nested_tensor{{0}, {1}, {2}, {3}}));
  };
  auto six = at::arange(6.0);
  auto number = [](std::initializer_list<int64_t> xs) {
    return at::tensor(at::ArrayRef<int64_t>{xs}, at::kLong);
  };
  auto sizes = number({1, 2, 2, 2}).view({2, 2});
  auto strides = number({2, 1, 2, 1}).view({2, 2});
  auto offsets = number({0, 2});
  CHECK(at::equal(read(six, sizes, strides, offsets).unbind()[1],
                  six.narrow(0, 2, 4).view({2, 2})));
  auto huge = number({1, 2, int64_t{1} << 62, int64_t{1} << 62}).view({2, 2});
  for (auto& parts : std::vector<std::array<at::Tensor, 4>>{
         {six.narrow(0, 0, 5), sizes, strides, offsets},
         {six, sizes, strides, number({0, 3})},
         {six, sizes, strides, number({-1, 2})},
         {six, -sizes, strides, offsets},
         {six, sizes, -strides, offsets},
         {six, huge, strides, offsets},
         {six, huge, huge, offsets},
         {six, sizes, strides, number({0})},
         {six, sizes, strides.view({4, 1}), offsets},
         {six, sizes.view({4}), strides.view({4}), offsets},
         {six, sizes.to(at::kInt), strides, offsets},
         {six.view({2, 3}), sizes, strides, offsets}})
    CHECK_THROWS_WITH(read(parts[0], parts[1], parts[2], parts[3]),
                      ContainsSubstring("value: a nested tensor "));
}

TEST_CASE("TorchScript values that cannot be sent are refused by name") {
  packer p;
  auto named = c10::TupleType::createNamed(
    c10::QualifiedName{"point"}, std::vector<std::string>{"x", "y"},
    std::vector<c10::TypePtr>{c10::IntType::get(), c10::IntType::get()});
  auto cu = std::make_shared<torch::jit::CompilationUnit>();
  auto type = c10::ClassType::create(c10::QualifiedName{"my_class"}, cu, true);
  auto object = c10::ivalue::Object::create(c10::StrongTypePtr{cu, type}, 0);
  value_path::scope here{p, "argument", 0};
  CHECK_THROWS_MATCHES(
    put_value(p, c10::IValue{object}), error,
    Message("argument 0: object of class my_class cannot be sent to another "
            "rank"));
  CHECK_THROWS_MATCHES(
    put_value(p, c10::IValue{c10::ivalue::Tuple::createNamed({1, 2}, named)}),
    error,
    Message("argument 0: a named tuple (point) would arrive without its "
            "names"));
  auto cyclic = c10::impl::GenericList{c10::AnyType::get()};
  cyclic.push_back(cyclic);
  CHECK_THROWS_WITH(put_value(p, c10::IValue{cyclic}),
                    ContainsSubstring("nested too deep"));
  cyclic.clear(); // else it would hold itself for ever
}

TEST_CASE("types that bytes make up are refused") {
  using type = c10::IValue;
  auto one = value::of(int64_t{1});
  CHECK_THROWS_WITH(read_as<type>(value::list({}, "List[nonsense]")),
                    ContainsSubstring("is not a TorchScript type"));
  CHECK_THROWS_WITH(read_as<type>(value::list({}, "int")),
                    ContainsSubstring("is not a list type"));
  CHECK_THROWS_WITH(read_as<type>(value::dict({}, "List[int]")),
                    ContainsSubstring("is not a dict type"));
  CHECK_THROWS_WITH(read_as<type>(value::list({}, std::string(300, '('))),
                    ContainsSubstring("300 characters"));
  CHECK_THROWS_AS(read_as<type>(value::list({}, std::string(256, '('))), error);
  CHECK_THROWS_WITH(read_as<type>(value::list({one}, "List[str]")),
                    ContainsSubstring("item 0: str expected, found int"));
  CHECK_THROWS_WITH(read_as<type>(value::list({one}, "List[Tensor]")),
                    ContainsSubstring("item 0: Tensor expected, found int"));
  CHECK_THROWS_WITH(read_as<type>(value::dict({{one, one}}, "Dict[str, int]")),
                    ContainsSubstring("entry 0: str expected, found int"));
  CHECK_THROWS_WITH(
    read_as<type>(value::dict({{value::of("a"), one}, {value::of("a"), one}})),
    ContainsSubstring("stands twice"));
  unpacker u{{at::rand({1})}};
  CHECK_THROWS_WITH(
    get_value<type>(u, value::list({value::tensor(0)}, "List[int]")),
    ContainsSubstring("item 0: int expected, found Tensor"));
}
