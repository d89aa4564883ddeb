#include "transport/network/tls_stream.hpp"

#include "transport/error.hpp"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include <poll.h>
#include <sys/socket.h>

namespace smp {

namespace {

// OpenSSL's own socket BIO dies of SIGPIPE if the other side is gone.

int socket_of(BIO* x) {
  return static_cast<int>(reinterpret_cast<intptr_t>(BIO_get_data(x)));
}

/// @returns the result that OpenSSL expects of a BIO
int told(BIO* x, ssize_t n, void (*retry)(BIO*)) {
  BIO_clear_retry_flags(x);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
    retry(x);
  return static_cast<int>(n);
}

int write_socket(BIO* x, const char* data, int size) {
  auto n = ::send(socket_of(x), data, static_cast<size_t>(size),
                  MSG_NOSIGNAL | MSG_DONTWAIT);
  return told(x, n, [](BIO* y) { BIO_set_retry_write(y); });
}

int read_socket(BIO* x, char* data, int size) {
  auto n = ::recv(socket_of(x), data, static_cast<size_t>(size), MSG_DONTWAIT);
  if (n == 0)
    errno = 0; // ended, as opposed to broken
  return told(x, n, [](BIO* y) { BIO_set_retry_read(y); });
}

long control_socket(BIO*, int command, long, void*) {
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

/// One for the process, as OpenSSL requires.
BIO_METHOD* socket_method() {
  static BIO_METHOD* result = [] {
    auto* x = BIO_meth_new(BIO_TYPE_SOURCE_SINK | BIO_get_new_index(),
                           "smp socket");
    BIO_meth_set_write(x, write_socket);
    BIO_meth_set_read(x, read_socket);
    BIO_meth_set_ctrl(x, control_socket);
    return x;
  }();
  return result;
}

} // namespace

void tls_stream::free_stream::operator()(ssl_st* x) const {
  ::SSL_free(x);
}

tls_stream::tls_stream(file_descriptor connection, const tls_keys& keys,
                       tls_side side)
  : connection_(std::move(connection)),
    stream_(::SSL_new(keys.get())),
    read_events_(POLLIN),
    write_events_(POLLOUT) {
  auto* bio = BIO_new(socket_method());
  if (!stream_ || bio == nullptr)
    throw error{error_code::internal, "OpenSSL makes no TLS connection"};
  BIO_set_data(
    bio, reinterpret_cast<void*>(static_cast<intptr_t>(connection_.get())));
  BIO_set_init(bio, 1);
  SSL_set_bio(stream_.get(), bio, bio);
  if (side == tls_side::accepts)
    SSL_set_accept_state(stream_.get());
  else
    SSL_set_connect_state(stream_.get());
}

ssize_t tls_stream::read(std::span<std::byte> x) {
  if (over_)
    return -1;
  ::ERR_clear_error();
  errno = 0;
  auto size = static_cast<int>(std::min<size_t>(x.size(), INT_MAX));
  return settle(SSL_read(stream_.get(), x.data(), size), read_events_);
}

ssize_t tls_stream::write(std::span<const std::byte> x) {
  if (over_)
    return -1;
  ::ERR_clear_error();
  errno = 0;
  auto size = static_cast<int>(std::min<size_t>(x.size(), INT_MAX));
  return settle(SSL_write(stream_.get(), x.data(), size), write_events_);
}

ssize_t tls_stream::settle(int result, short& events) {
  if (result > 0)
    return result;
  auto number = errno;
  switch (SSL_get_error(stream_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      events = POLLIN;
      return 0;
    case SSL_ERROR_WANT_WRITE:
      events = POLLOUT;
      return 0;
    case SSL_ERROR_ZERO_RETURN:
      problem_ = "the other side closed the connection";
      break;
    case SSL_ERROR_SYSCALL:
      problem_number_ = number;
      problem_ = number != 0 ? std::strerror(number)
                             : "the other side closed the connection";
      break;
    default: {
      auto* why = ::ERR_reason_error_string(::ERR_get_error());
      problem_ = why != nullptr ? why : "TLS does not work";
      if (auto verdict = SSL_get_verify_result(stream_.get());
          verdict != X509_V_OK)
        problem_ = std::string{"the certificate of the other side: "}
                   + ::X509_verify_cert_error_string(verdict);
    }
  }
  ::ERR_clear_error();
  over_ = true;
  return -1;
}

bool tls_stream::has_buffered() const noexcept {
  return SSL_pending(stream_.get()) > 0;
}

void tls_stream::say_end() noexcept {
  if (!over_ && SSL_is_init_finished(stream_.get()) == 1)
    SSL_shutdown(stream_.get());
  ::ERR_clear_error();
}

} // namespace smp
