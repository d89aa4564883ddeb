#pragma once

#include "tp/tensor_group.hpp"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace smp::test {

/// Peers that are threads and put their tensors on one table. No line of smp's
/// collectives.
class thread_group {
public:
  /// @param same_samples all have the same ones
  explicit thread_group(uint64_t size, bool same_samples = false)
    : size_(size), same_samples_(same_samples) {
    // nop
  }

  /// Runs `f(rank)` on a thread for each rank, which is a peer of the others.
  void on_all(const std::function<void(uint64_t)>& f) {
    std::vector<std::thread> threads;
    std::vector<std::string> failures(size_);
    for (uint64_t i = 0; i < size_; ++i)
      threads.emplace_back([&, i] {
        peer me{*this, i};
        auto* before = tensor_group::set_current(&me);
        try {
          f(i);
        } catch (const std::exception& e) {
          failures[i] = e.what();
        }
        tensor_group::set_current(before);
      });
    for (auto& t : threads)
      t.join();
    for (auto& x : failures)
      if (!x.empty())
        throw std::runtime_error{x};
  }

  /// @returns how many collectives a peer had on their way at one time, at most
  int most_under_way() const {
    return most_under_way_;
  }

  /// @returns how many the peer of the calling thread has on their way now
  static int under_way() {
    return dynamic_cast<peer&>(tensor_group::current()).under_way();
  }

  /// What a call of `module` for the samples of a peer draws from.
  static uint64_t seed_of(uint64_t peer, const std::string& module) {
    return std::hash<std::string>{}(module) % 100000 * 10 + peer;
  }

private:
  class peer final : public tensor_group {
  public:
    peer(thread_group& all, uint64_t rank) : all_(all), rank_(rank) {
      // nop
    }

    int under_way() const {
      return under_way_;
    }

    uint64_t size() const override {
      return all_.size_;
    }

    uint64_t rank() const override {
      return rank_;
    }

    bool same_samples() const override {
      return all_.same_samples_;
    }

    std::string next_name() override {
      return "call " + std::to_string(calls_++);
    }

    /// Numbers of a call depend on its peer and last module alone; without any
    /// it is the one that runs, "itself".
    void draw_as(uint64_t peer, const std::vector<std::string>& calls,
                 const std::function<void()>& f) override {
      std::unique_lock guard{all_.generator_};
      torch::manual_seed(seed_of(all_.same_samples_ ? 0 : peer,
                                 calls.empty() ? "itself" : calls.back()));
      f();
    }

    pending begin_allreduce(const at::Tensor& x,
                            const std::string& name) override {
      begun();
      return [this, x, name] {
        --under_way_;
        return sum(all_.meet(rank_, "allreduce " + name, x));
      };
    }

    pending begin_allgather(const at::Tensor& x,
                            const std::string& name) override {
      begun();
      return [this, x, name] {
        --under_way_;
        return torch::stack(all_.meet(rank_, "allgather " + name, x));
      };
    }

    pending begin_reduce_scatter(const at::Tensor& x,
                                 const std::string& name) override {
      begun();
      return [this, x, name] {
        --under_way_;
        return sum(all_.meet(rank_, "reduce_scatter " + name, x))
          .select(0, static_cast<int64_t>(rank_))
          .clone();
      };
    }

    pending begin_all_to_all(const at::Tensor& x,
                             const std::string& name) override {
      begun();
      return [this, x, name] {
        --under_way_;
        std::vector<at::Tensor> result;
        for (auto& y : all_.meet(rank_, "all_to_all " + name, x))
          result.push_back(y.select(0, static_cast<int64_t>(rank_)));
        return torch::stack(result);
      };
    }

    at::Tensor exchange_rows(const at::Tensor& x,
                             const std::vector<int64_t>& given,
                             const std::vector<int64_t>& taken,
                             const std::string& name) override {
      auto rows = all_.meet(rank_, "rows " + name, x);
      auto counts = all_.meet(rank_, "counts " + name, torch::tensor(given));
      std::vector<at::Tensor> result;
      for (size_t i = 0; i < rows.size(); ++i) {
        auto me = static_cast<int64_t>(rank_);
        auto before = counts[i].narrow(0, 0, me).sum().item<int64_t>();
        auto mine = counts[i][me].item<int64_t>();
        if (mine != taken.at(i))
          throw std::runtime_error{"another number of rows is wanted"};
        result.push_back(rows[i].narrow(0, before, mine));
      }
      return torch::cat(result);
    }

  private:
    static at::Tensor sum(const std::vector<at::Tensor>& xs) {
      return torch::stack(xs).sum(0, false, xs[0].scalar_type());
    }

    void begun() {
      std::lock_guard guard{all_.mutex_};
      all_.most_under_way_ = std::max(all_.most_under_way_, ++under_way_);
    }

    thread_group& all_;
    uint64_t rank_;
    int calls_ = 0;
    int under_way_ = 0;
  };

  /// @returns what all peers brought, by rank
  std::vector<at::Tensor> meet(uint64_t rank, const std::string& name,
                               const at::Tensor& x) {
    std::unique_lock guard{mutex_};
    // The n-th time that a peer comes under a name.
    auto key = name + " #" + std::to_string(visits_[{name, rank}]++);
    auto& place = table_[key];
    place.resize(size_);
    place[rank] = x.detach().clone();
    arrived_.notify_all();
    auto complete = [&] {
      for (auto& y : place)
        if (!y.defined())
          return false;
      return true;
    };
    if (!arrived_.wait_for(guard, std::chrono::seconds{30}, complete))
      throw std::runtime_error{"peers do not come to " + key};
    return place;
  }

  uint64_t size_;
  bool same_samples_;
  int most_under_way_ = 0;
  std::mutex generator_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::pair<std::string, uint64_t>, int> visits_;
  std::map<std::string, std::vector<at::Tensor>> table_; // nodes stay in place
};

} // namespace smp::test
