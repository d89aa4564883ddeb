#pragma once

#include <memory>
#include <string>

struct ssl_ctx_st;

namespace smp {

/// Makes the keys of a run in `dir`, which only its user can enter: a
/// certificate authority that is forgotten at once, and one key with its
/// certificate, the same for all ranks. A process that has them is a rank.
/// @throws error (config) if they cannot be written, or if some exist already
void make_keys(const std::string& dir);

/// The keys of a run, as TLS uses them. BASP neither authenticates nor
/// encrypts, so between machines it travels in TLS 1.3, where each side must
/// show the other a certificate of the run's own authority.
class tls_keys {
public:
  /// @throws error (config) if there are none in `dir`, if other users can read
  /// the folder or the key, or if they have expired, with the date
  explicit tls_keys(const std::string& dir);

  ssl_ctx_st* get() const noexcept {
    return context_.get();
  }

private:
  std::shared_ptr<ssl_ctx_st> context_;
};

} // namespace smp
