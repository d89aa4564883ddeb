#include "runtime/sharing/script_layers.hpp"

#include "runtime/model/script_code.hpp"
#include "runtime/sharing/native_modules.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/erf.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace smp {

namespace {

namespace jit = torch::jit;

/// How a value of the code is computed.
struct formula;
using term = std::shared_ptr<const formula>;

struct formula {
  /// "input", "constant", "module", "attribute", the type of a module of
  /// torch.nn ("Linear"), or the operation ("aten::add").
  std::string what;
  std::vector<term> of = {};
  c10::IValue constant = {};
  /// Path below the layer of the module, or of the one whose code this is.
  std::string path = {};
  /// Position of an input, or of an item of a tuple.
  size_t index = 0;
  uint32_t module = 0; // position in the walk

  bool is(std::string_view x) const {
    return what == x;
  }

  const term& operator[](size_t i) const {
    return of.at(i);
  }
};

/// Thrown below if the code is not that of a layer.
struct other_code {
  std::string why;
};

void require(bool x, const std::string& why) {
  if (!x)
    throw other_code{why};
}

// -- following the code -------------------------------------------------------

class follower {
public:
  explicit follower(const walked_model& model) : model_(model) {
    // nop
  }

  term follow(uint32_t module, const std::string& path,
              const std::vector<term>& arguments) {
    auto* script = model_.modules[module].script;
    auto* graph = graph_of(*script->type(), "forward");
    require(graph && graph->inputs().size() == arguments.size() + 1
              && graph->outputs().size() == 1,
            "code of '" + path + "' is called in another way than it was made");
    std::map<const jit::Value*, term> known;
    known[graph->inputs()[0]] = make(
      {.what = "module", .path = path, .module = module});
    for (size_t i = 0; i < arguments.size(); ++i)
      known[graph->inputs()[i + 1]] = arguments[i];
    for (auto* node : graph->nodes())
      add(*node, path, known);
    return known.at(graph->outputs()[0]);
  }

private:
  static term make(formula x) {
    return std::make_shared<const formula>(std::move(x));
  }

  void add(const jit::Node& x, const std::string& path,
           std::map<const jit::Value*, term>& known) {
    std::string kind = x.kind().toQualString();
    require(x.blocks().empty() && !kind.ends_with('_'),
            "its code has branches or changes tensors: " + kind);
    if (x.kind() == c10::prim::Constant) {
      auto constant = jit::toIValue(x.output());
      require(constant.has_value(),
              "it calls a function"); // which is not a value
      known[x.output()] = make({.what = "constant", .constant = *constant});
      return;
    }
    if (auto access = access_of(x); access.object) {
      require(!access.writes, "it sets the attribute '" + access.name + "'");
      known[x.output()] = attribute(*known.at(access.object), access.name);
      return;
    }
    std::vector<term> of;
    for (auto* input : x.inputs())
      of.push_back(known.at(input));
    if (x.kind() == c10::prim::CallMethod) {
      require(x.s(c10::attr::name) == "forward" && of[0]->is("module"),
              "it calls something else than modules");
      known[x.output()] = call(*of[0], {of.begin() + 1, of.end()});
      return;
    }
    // Among sizes, only constants matter.
    if (kind == "prim::NumToTensor" || kind == "aten::Int"
        || kind == "aten::contiguous") {
      known[x.output()] = of[0];
      return;
    }
    for (size_t i = 0; i < x.outputs().size(); ++i)
      known[x.output(i)] = make(
        {.what = kind, .of = of, .path = path, .index = i});
  }

  term attribute(const formula& object, const std::string& name) {
    require(object.is("module"), "it reads an attribute of an object");
    auto below = object.path.empty() ? name : object.path + "." + name;
    auto value = model_.modules[object.module].script->getAttr(name);
    if (!value.isObject())
      return make({.what = "attribute", .path = below});
    auto i = model_.module_index.find(&value.toObjectRef());
    require(i != model_.module_index.end(), "'" + below + "' is not a module");
    return make({.what = "module", .path = below, .module = i->second});
  }

  /// Takes a module of torch.nn as a whole, or follows another's code.
  term call(const formula& callee, std::vector<term> arguments) {
    auto& type = model_.modules[callee.module].type;
    if (type == "torch.nn.modules.dropout.Dropout") {
      auto drop = follow(callee.module, callee.path, arguments);
      require((drop->is("aten::dropout") || drop->is("smp::dropout"))
                && drop->of[0] == arguments.at(0),
              "'" + callee.path + "' does not drop");
      return make({.what = "Dropout",
                   .of = {arguments[0], drop->of[1], drop->of[2]},
                   .path = callee.path});
    }
    auto native = native_of(model_, callee.module);
    if (!native || native->layer)
      return follow(callee.module, callee.path, arguments);
    require(native->doubt.empty() && arguments.size() == 1,
            "'" + callee.path + "' is more than its class says");
    return make({.what = native->type,
                 .of = std::move(arguments),
                 .path = callee.path,
                 .module = callee.module});
  }

  const walked_model& model_;
};

// -- numbers ------------------------------------------------------------------

std::optional<int64_t> integer(const term& x) {
  return x->is("constant") && x->constant.isInt()
           ? std::optional{x->constant.toInt()}
           : std::nullopt;
}

std::vector<std::optional<int64_t>> integers(const term& x) {
  std::vector<std::optional<int64_t>> result;
  if (x->is("prim::ListConstruct"))
    for (auto& y : x->of)
      result.push_back(integer(y));
  else if (x->is("constant") && x->constant.isIntList())
    for (auto y : x->constant.toIntVector())
      result.push_back(y);
  return result;
}

/// @returns a number, or a tensor with one
std::optional<c10::Scalar> number(const term& x) {
  if (!x->is("constant"))
    return std::nullopt;
  if (x->constant.isScalar())
    return x->constant.toScalar();
  if (x->constant.isTensor() && x->constant.toTensor().numel() == 1)
    return x->constant.toTensor().item();
  return std::nullopt;
}

// -- activations --------------------------------------------------------------

using function = std::function<at::Tensor(const at::Tensor&)>;

/// @param x the element-wise computation on `input`
function activation_of(const term& x, const term& input) {
  if (x == input)
    return [](const at::Tensor& y) { return y; };
  auto name = x->what.starts_with("aten::") ? x->what.substr(6) : x->what;
  auto unary = [&](at::Tensor (*f)(const at::Tensor&)) -> function {
    return [f, of = activation_of(x->of[0], input)](const at::Tensor& y) {
      return f(of(y));
    };
  };
  if (name == "gelu") {
    std::string how{x->of.size() > 1 && x->of[1]->constant.isString()
                      ? x->of[1]->constant.toStringRef()
                      : "none"};
    return [how, of = activation_of(x->of[0], input)](const at::Tensor& y) {
      return at::gelu(of(y), how);
    };
  }
  if (name == "relu")
    return unary(at::relu);
  if (name == "silu")
    return unary(at::silu);
  if (name == "tanh")
    return unary(at::tanh);
  if (name == "sigmoid")
    return unary(at::sigmoid);
  if (name == "erf")
    return unary(at::erf);
  auto two = name == "mul" || name == "add" || name == "sub" || name == "div"
             || name == "pow";
  require(two && (x->of.size() == 2 || integer(x->of[2]) == 1),
          "its activation has the operation " + x->what);
  auto right = number(x->of[1]);
  auto left = activation_of(x->of[0], input);
  if (name == "pow") {
    require(right.has_value(), "its activation has an unknown power");
    return
      [left, e = *right](const at::Tensor& y) { return at::pow(left(y), e); };
  }
  auto both = [name](const at::Tensor& a, const auto& b) {
    return name == "mul"   ? a * b
           : name == "add" ? a + b
           : name == "sub" ? a - b
                           : a / b;
  };
  if (right)
    return [left, both, b = *right](const at::Tensor& y) {
      return both(left(y), b);
    };
  return [left, both, of = activation_of(x->of[1], input)](
           const at::Tensor& y) { return both(left(y), of(y)); };
}

// -- the formula of a layer ---------------------------------------------------

class matcher {
public:
  explicit matcher(const walked_model& model) : model_(model) {
    // nop
  }

  transformer_layer_options run(const term& result, const term& states,
                                const term& mask) {
    mask_ = mask;
    o_.post_layernorm = result->is("LayerNorm");
    o_.pre_layernorm = !o_.post_layernorm;
    if (o_.pre_layernorm) {
      auto [between, half] = sum(result);
      auto [first, attention] = sum(between);
      require(first == states, "it does not add what goes in");
      require(norm(output_start(half), o_.output_norm) == between,
              "its halves do not follow each other");
      this->attention(attention, states, true);
    } else {
      o_.output_norm = norm_place(result);
      auto [between, half] = sum(result->of[0]);
      require(between->is("LayerNorm"), "no norm ends its first half");
      o_.attention_norm = norm_place(between);
      auto [first, attention] = sum(between->of[0]);
      require(first == states, "it does not add what goes in");
      require(output_start(half) == between,
              "its halves do not follow each other");
      this->attention(attention, states, false);
    }
    return std::move(o_);
  }

private:
  using options = transformer_layer_options;

  /// @returns the residual input, and the half that is added to it, which ends
  /// with dropout or a linear
  static std::pair<term, term> sum(const term& x) {
    require(x->is("aten::add") && (x->of.size() == 2 || integer(x->of[2]) == 1),
            "a half does not end with a sum but " + x->what);
    auto is_half = [](const term& y) {
      return y->is("Dropout") || y->is("Linear") || y->is("Conv1D");
    };
    if (is_half(x->of[1]))
      return {x->of[0], x->of[1]};
    require(is_half(x->of[0]), "a half does not end with a linear");
    return {x->of[1], x->of[0]};
  }

  options::norm_place norm_place(const term& x) const {
    auto native = native_of(model_, x->module).value();
    require(native.normalized_shape.size() == 1,
            "'" + x->path + "' normalises several axes");
    return {x->path, native.eps};
  }

  /// @returns the input of `x`, which must be a norm
  term norm(const term& x, options::norm_place& place) const {
    require(x->is("LayerNorm"), "no norm begins a half but " + x->what);
    place = norm_place(x);
    return x->of[0];
  }

  static options::linear_place linear_place(const term& x) {
    require(x->is("Linear") || x->is("Conv1D"),
            "a linear is wanted, not " + x->what);
    return {x->path, x->is("Conv1D")};
  }

  /// @returns the input of a dropout, or `x` if it is none
  static term dropout(const term& x, options::dropout_place& place) {
    if (!x->is("Dropout"))
      return x;
    auto p = number(x->of[1]);
    require(p && x->of[2]->constant.isBool(),
            "'" + x->path + "' tells its probability when it runs");
    place = {x->path, x->of[2]->constant.toBool() ? p->toDouble() : 0};
    return x->of[0];
  }

  /// @returns the input of the feed-forward half
  term output_start(const term& half) {
    auto second = dropout(half, o_.output_dropout);
    o_.output = linear_place(second);
    // The activation uses the first linear one or more times.
    auto first = second->of[0];
    while (!first->is("Linear") && !first->is("Conv1D")) {
      require(!first->of.empty(), "no linear begins its feed-forward half");
      first = first->of[0];
    }
    o_.intermediate = linear_place(first);
    o_.activation = activation_of(second->of[0], first);
    return first->of[0];
  }

  void attention(const term& half, const term& states, bool normed) {
    auto projected = dropout(half, o_.attention_output_dropout);
    o_.attention_output = linear_place(projected);
    auto x = same_heads(merged_heads(projected->of[0]));
    require(!x->is("aten::matmul") && !x->is("aten::bmm"),
            "its attention is computed by " + x->what
              + "; export it with attn_implementation=\"sdpa\"");
    require(x->is("aten::scaled_dot_product_attention"),
            "its attention ends with " + x->what);
    weights(*x);
    std::vector<term> sources;
    for (size_t i = 0; i < 3; ++i)
      sources.push_back(split_heads(x->of[i]));
    auto start = projections(sources);
    if (normed)
      start = norm(start, o_.attention_norm);
    require(start == states, "its attention is not over what goes in");
  }

  void weights(const formula& x) {
    if (!(x[3]->is("constant") && x[3]->constant.isNone())) {
      require(whole_mask(x[3], x[1]) == mask_, "its mask is computed inside");
      o_.takes_mask = true;
    }
    auto p = number(x[4]);
    require(p && x[5]->constant.isBool(), "its attention is not constant");
    o_.attention_dropout = {x.path, p->toDouble()};
    o_.causal = x[5]->constant.toBool();
    if (x.of.size() > 6 && !x[6]->constant.isNone())
      o_.scale = x[6]->constant.toScalar().toDouble();
    require(x.of.size() < 8 || !x[7]->constant.toBool(),
            "its query has more heads than its key");
  }

  /// [B, heads, tokens, d] -> [B, tokens, C] @returns the input
  static term merged_heads(const term& x) {
    require((x->is("aten::view") || x->is("aten::reshape"))
              && integers(x->of[1]).size() == 3,
            "it does not merge heads");
    auto& y = x->of[0];
    require(y->is("aten::transpose") && integer(y->of[1]) == 1
              && integer(y->of[2]) == 2,
            "it does not merge heads");
    return y->of[0];
  }

  static bool is_size(const term& x, int64_t axis) {
    return x->is("aten::size") && integer(x->of[1]) == axis;
  }

  /// A view [B, -1, tokens, d] of the result of attention, which has these
  /// sizes. @returns its input, or `x` if it is none
  static term same_heads(const term& x) {
    if (!x->is("aten::view") && !x->is("aten::reshape"))
      return x;
    auto& y = x->of[0];
    if (!y->is("aten::scaled_dot_product_attention")
        || !x->of[1]->is("prim::ListConstruct") || x->of[1]->of.size() != 4)
      return x;
    auto& sizes = x->of[1]->of;
    auto of = [&](size_t i, const term& whole) {
      auto axis = static_cast<int64_t>(i);
      return is_size(sizes[i], axis)
             && (sizes[i]->of[0] == y || sizes[i]->of[0] == whole);
    };
    return of(0, y->of[0]) && integer(sizes[1]) == -1 && of(2, y->of[0])
               && of(3, y->of[2])
             ? y
             : x;
  }

  /// As many columns of a mask as there are keys: all, unless keys are kept
  /// between calls. @returns the mask, or `x` if it is another part
  static term whole_mask(const term& x, const term& key) {
    auto y = x;
    while (y->is("aten::slice")) {
      auto axis = integer(y->of[1]);
      auto all = integer(y->of[3]) == std::numeric_limits<int64_t>::max()
                 || (axis == 3 && is_size(y->of[3], 2)
                     && y->of[3]->of[0] == key);
      if (!all || integer(y->of[2]) != 0 || integer(y->of[4]) != 1)
        return x;
      y = y->of[0];
    }
    return y;
  }

  /// [B, tokens, C] -> [B, heads, tokens, d] @returns the input
  term split_heads(const term& x) {
    auto order = x->is("aten::permute") ? integers(x->of[1])
                                        : std::vector<std::optional<int64_t>>{};
    require(order == std::vector<std::optional<int64_t>>{0, 2, 1, 3}
              || (x->is("aten::transpose") && integer(x->of[1]) == 1
                  && integer(x->of[2]) == 2),
            "it does not split heads");
    auto& y = x->of[0];
    auto sizes = y->is("aten::view") ? integers(y->of[1])
                                     : std::vector<std::optional<int64_t>>{};
    auto known = [&](size_t i) { return sizes[i].value_or(-1) > 0; };
    require(sizes.size() == 4 && (known(2) || known(3)),
            "its number of heads is not a constant");
    auto heads = known(2) ? *sizes[2] : features(y->of[0]) / *sizes[3];
    require(heads > 0, "its number of heads is not known");
    if (heads_ == 0)
      heads_ = heads;
    require(heads_ == heads, "its query has more heads than its key");
    o_.num_attention_heads = heads;
    return y->of[0];
  }

  /// @returns how many features a projection to query, key or value gives
  int64_t features(const term& x) const {
    if (x->is("prim::ListUnpack") && x->of[0]->is("aten::split"))
      return integer(x->of[0]->of[1]).value_or(0);
    linear_place(x); // or it is refused
    auto native = native_of(model_, x->module).value();
    return native.parameters.at("weight").size(x->is("Conv1D") ? 1 : 0);
  }

  /// @returns the input of the projections to query, key and value
  term projections(const std::vector<term>& xs) {
    if (xs[0]->is("prim::ListUnpack")) {
      auto split = xs[0]->of[0];
      for (size_t i = 0; i < 3; ++i)
        require(xs[i]->is("prim::ListUnpack") && xs[i]->of[0] == split
                  && xs[i]->index == i,
                "its query, key and value are in another order");
      require(split->is("aten::split") && integer(split->of[2]) == 2,
              "it does not split query, key and value");
      o_.query_key_value = {linear_place(split->of[0])};
      return split->of[0]->of[0];
    }
    for (auto& x : xs) {
      o_.query_key_value.push_back(linear_place(x));
      require(x->of[0] == xs[0]->of[0], "its attention is over something else");
    }
    return xs[0]->of[0];
  }

  const walked_model& model_;
  options o_;
  term mask_;
  int64_t heads_ = 0;
};

std::string with_remedy(const std::string& why) {
  return why.find(';') != why.npos
           ? why
           : why + "; export it as transformers has it (its linears may be)";
}

} // namespace

bool is_script_layer(std::string_view type) {
  constexpr std::array known{
    "transformers.models.gpt2.modeling_gpt2.GPT2Block",
    "transformers.models.bert.modeling_bert.BertLayer",
    "transformers.models.roberta.modeling_roberta.RobertaLayer"};
  return std::ranges::find(known, type) != known.end();
}

script_layer read_script_layer(const walked_model& model, uint32_t module) {
  script_layer result;
  auto& type = *model.modules[module].script->type();
  for_each_method(type, [&result](const std::string& name, jit::Graph&) {
    if (name != "forward")
      result.doubt = "it has a method '" + name
                     + "' beside forward, as a trace has of a second call; its "
                       "linears may be shared";
  });
  if (!result.doubt.empty())
    return result;
  auto* graph = graph_of(type, "forward");
  auto inputs = graph ? graph->inputs().size() - 1 : 0;
  if (inputs < 1 || inputs > 2) {
    result.doubt
      = "its code takes other arguments than hidden states and a mask; export "
        "it with these";
    return result;
  }
  std::vector<term> arguments;
  for (size_t i = 0; i < inputs; ++i)
    arguments.push_back(
      std::make_shared<const formula>(formula{.what = "input", .index = i}));
  try {
    auto found = follower{model}.follow(module, "", arguments);
    result.options = matcher{model}.run(found, arguments[0],
                                        inputs > 1 ? arguments[1] : term{});
  } catch (const other_code& e) {
    result.doubt = with_remedy(e.why);
  }
  return result;
}

} // namespace smp
