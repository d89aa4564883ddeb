#include "tp/tensor_group.hpp"

#include "transport/error.hpp"

#include <utility>

namespace smp {

namespace {

thread_local tensor_group* current_group = nullptr;

class lone_group final : public tensor_group {
public:
  uint64_t size() const override {
    return 1;
  }

  uint64_t rank() const override {
    return 0;
  }

  std::string next_name() override {
    return {};
  }

  void draw_as(uint64_t, const std::vector<std::string>&,
               const std::function<void()>&) override {
    throw error{error_code::internal, "a module that nobody shares"};
  }

  pending begin_allreduce(const at::Tensor& x, const std::string&) override {
    return [x] { return x.clone(); };
  }

  pending begin_allgather(const at::Tensor& x, const std::string&) override {
    return [x] { return x.unsqueeze(0).clone(); };
  }

  pending begin_reduce_scatter(const at::Tensor& x,
                               const std::string&) override {
    return [x] { return x.squeeze(0).clone(); };
  }

  pending begin_all_to_all(const at::Tensor& x, const std::string&) override {
    return [x] { return x.clone(); };
  }

  at::Tensor exchange_rows(const at::Tensor& x, const std::vector<int64_t>&,
                           const std::vector<int64_t>&,
                           const std::string&) override {
    return x.clone();
  }
};

} // namespace

tensor_group::~tensor_group() = default;

tensor_group& tensor_group::current() {
  if (current_group)
    return *current_group;
  throw error{error_code::unsupported,
              "a distributed module or collective outside of a step: its peers "
              "are not there"};
}

tensor_group& tensor_group::lone() {
  static lone_group result;
  return result;
}

tensor_group* tensor_group::set_current(tensor_group* x) noexcept {
  return std::exchange(current_group, x);
}

} // namespace smp
