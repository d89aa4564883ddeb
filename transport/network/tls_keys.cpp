#include "transport/network/tls_keys.hpp"

#include "transport/error.hpp"
#include "transport/files/file_descriptor.hpp"
#include "transport/files/run_secret.hpp"

#include <openssl/asn1.h>
#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/ec.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <span>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace smp {

namespace {

constexpr const char* authority_file = "ca.pem";
constexpr const char* certificate_file = "rank.pem";
constexpr const char* key_file = "rank.key";

/// Clocks of machines differ, and a run may be long. In seconds.
constexpr long valid_before = 24L * 60 * 60;
constexpr long valid_after = 365 * valid_before;

template <auto Free>
struct free_with {
  template <class T>
  void operator()(T* x) const {
    Free(x);
  }
};

using key_ptr = std::unique_ptr<EVP_PKEY, free_with<EVP_PKEY_free>>;
using certificate_ptr = std::unique_ptr<X509, free_with<X509_free>>;
using text_ptr = std::unique_ptr<BIO, free_with<BIO_free_all>>;
using extension_ptr = std::unique_ptr<X509_EXTENSION,
                                      free_with<X509_EXTENSION_free>>;

[[noreturn]] void keys_fail(const std::string& what) {
  auto code = ::ERR_get_error();
  ::ERR_clear_error();
  auto* why = code != 0 ? ::ERR_reason_error_string(code) : nullptr;
  throw config_error(what + (why != nullptr ? std::string{": "} + why : ""));
}

void must(bool done, const char* what) {
  if (!done)
    keys_fail(std::string{"keys: OpenSSL cannot "} + what);
}

// -- making -------------------------------------------------------------------

void add_extension(X509* to, X509* issuer, int kind, const char* value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, to, nullptr, nullptr, 0);
  extension_ptr x{X509V3_EXT_conf_nid(nullptr, &context, kind, value)};
  must(x && X509_add_ext(to, x.get(), -1) == 1, "describe a certificate");
}

/// @param issuer null: self-signed
certificate_ptr make_certificate(const char* name, EVP_PKEY* key, X509* issuer,
                                 EVP_PKEY* issuer_key) {
  certificate_ptr result{X509_new()};
  must(result != nullptr, "make a certificate");
  auto* x = result.get();
  X509_set_version(x, X509_VERSION_3);
  std::array<std::byte, 8> number;
  fill_with_random_bytes(number);
  uint64_t serial = 0;
  std::memcpy(&serial, number.data(), sizeof(serial));
  ASN1_INTEGER_set_uint64(X509_get_serialNumber(x), serial >> 1);
  X509_gmtime_adj(X509_getm_notBefore(x), -valid_before);
  X509_gmtime_adj(X509_getm_notAfter(x), valid_after);
  X509_set_pubkey(x, key);
  auto* subject = X509_get_subject_name(x);
  X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name), -1,
                             -1, 0);
  auto* from = issuer != nullptr ? issuer : x;
  X509_set_issuer_name(x, X509_get_subject_name(from));
  auto authority = issuer == nullptr;
  add_extension(x, from, NID_basic_constraints,
                authority ? "critical,CA:TRUE,pathlen:0" : "critical,CA:FALSE");
  add_extension(x, from, NID_key_usage,
                authority ? "critical,keyCertSign"
                          : "critical,digitalSignature");
  add_extension(x, from, NID_subject_key_identifier, "hash");
  must(X509_sign(x, issuer_key, EVP_sha256()) > 0, "sign a certificate");
  return result;
}

void write_new(int dir, const std::string& where, const char* name, mode_t mode,
               BIO* content) {
  char* data = nullptr;
  auto size = BIO_get_mem_data(content, &data);
  file_descriptor file{::openat(
    dir, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode)};
  if (!file && errno == EEXIST)
    throw config_error(where + "/" + name
                       + ": is there already; take another folder, or "
                         "remove it");
  if (!file || ::write(file.get(), data, static_cast<size_t>(size)) != size
      || ::fsync(file.get()) != 0)
    throw config_error(where + "/" + name
                       + ": cannot be written: " + std::strerror(errno));
}

// -- reading ------------------------------------------------------------------

/// @throws error (config) unless only this user, or root, has access
void check_private(const struct stat& x, const std::string& path,
                   const char* what, const char* mode) {
  if ((x.st_mode & 0077) != 0 || (x.st_uid != ::geteuid() && x.st_uid != 0))
    throw config_error(path + ": must be a " + what
                       + " of this user that no one else can read: chmod "
                       + mode + ' ' + path);
}

file_descriptor open_private_folder(const std::string& dir) {
  file_descriptor result{
    ::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  struct stat info {};
  if (!result || ::fstat(result.get(), &info) != 0)
    throw config_error(dir + ": no folder of keys: " + std::strerror(errno)
                       + "; smp-train keys " + dir + " makes one");
  check_private(info, dir, "folder", "700");
  return result;
}

/// Erases its content at the end.
struct key_text {
  ~key_text() {
    OPENSSL_cleanse(bytes.data(), bytes.size());
  }

  std::array<char, 16384> bytes = {};
  size_t size = 0;
};

text_ptr read_key_file(int dir, const std::string& where, const char* name,
                       key_text& storage) {
  auto path = where + '/' + name;
  // To open a pipe would wait for somebody who writes to it.
  file_descriptor file{
    ::openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)};
  struct stat info {};
  if (!file || ::fstat(file.get(), &info) != 0)
    throw config_error(path + ": " + std::strerror(errno) + "; smp-train keys "
                       + where + " makes the keys of a run");
  if (!S_ISREG(info.st_mode))
    throw config_error(path + ": is not a regular file");
  if (name == key_file)
    check_private(info, path, "file", "600");
  auto got = ::read(file.get(), storage.bytes.data(), storage.bytes.size());
  if (got < 0)
    throw config_error(path + ": " + std::strerror(errno));
  storage.size = static_cast<size_t>(got);
  return text_ptr{
    BIO_new_mem_buf(storage.bytes.data(), static_cast<int>(storage.size))};
}

/// @returns "Nov 23 02:05:44 2026 GMT"
std::string text_of_time(const ASN1_TIME* x) {
  text_ptr text{BIO_new(BIO_s_mem())};
  if (!text || ASN1_TIME_print(text.get(), x) != 1)
    return "an unknown time";
  char* data = nullptr;
  auto size = BIO_get_mem_data(text.get(), &data);
  return {data, static_cast<size_t>(size)};
}

/// Otherwise only the other machines would refuse it, and say so there.
void check_dates(const X509* x, const std::string& path,
                 const std::string& where) {
  auto* end = X509_get0_notAfter(x);
  auto* begin = X509_get0_notBefore(x);
  if (X509_cmp_current_time(end) <= 0)
    throw config_error(path + ": expired on " + text_of_time(end)
                       + "; make new keys in another folder (smp-train keys "
                         "DIR) and copy it to all machines in place of "
                       + where);
  if (X509_cmp_current_time(begin) > 0)
    throw config_error(path + ": is valid only from " + text_of_time(begin)
                       + " on; is the clock of this machine right?");
}

certificate_ptr read_certificate(int dir, const std::string& where,
                                 const char* name) {
  key_text storage;
  auto text = read_key_file(dir, where, name, storage);
  certificate_ptr result{
    PEM_read_bio_X509(text.get(), nullptr, nullptr, nullptr)};
  if (!result)
    keys_fail(where + '/' + name + ": is not a certificate");
  check_dates(result.get(), where + '/' + name, where);
  return result;
}

} // namespace

void make_keys(const std::string& dir) {
  if (::mkdir(dir.c_str(), 0700) != 0 && errno != EEXIST)
    throw config_error(dir + ": cannot be made: " + std::strerror(errno));
  auto folder = open_private_folder(dir);
  key_ptr authority_key{EVP_EC_gen("P-256")};
  key_ptr key{EVP_EC_gen("P-256")};
  must(authority_key && key, "make a key");
  auto authority = make_certificate("smp run", authority_key.get(), nullptr,
                                    authority_key.get());
  auto certificate = make_certificate("smp rank", key.get(), authority.get(),
                                      authority_key.get());
  text_ptr texts[3];
  for (auto& x : texts)
    x.reset(BIO_new(BIO_s_secmem()));
  must(PEM_write_bio_X509(texts[0].get(), authority.get()) == 1
         && PEM_write_bio_X509(texts[1].get(), certificate.get()) == 1
         && PEM_write_bio_PrivateKey(texts[2].get(), key.get(), nullptr,
                                     nullptr, 0, nullptr, nullptr)
              == 1,
       "write keys");
  // The key is checked first, in case there is one, and written last.
  if (::faccessat(folder.get(), key_file, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
    throw config_error(dir + ": holds the keys of a run already");
  write_new(folder.get(), dir, authority_file, 0600, texts[0].get());
  write_new(folder.get(), dir, certificate_file, 0600, texts[1].get());
  write_new(folder.get(), dir, key_file, 0600, texts[2].get());
}

tls_keys::tls_keys(const std::string& dir) {
  auto folder = open_private_folder(dir);
  auto authority = read_certificate(folder.get(), dir, authority_file);
  auto certificate = read_certificate(folder.get(), dir, certificate_file);
  key_ptr key;
  {
    key_text storage;
    auto text = read_key_file(folder.get(), dir, key_file, storage);
    key.reset(PEM_read_bio_PrivateKey(text.get(), nullptr, nullptr, nullptr));
  }
  if (!key)
    keys_fail(dir + '/' + key_file + ": is not a key");
  context_.reset(SSL_CTX_new(TLS_method()), SSL_CTX_free);
  auto* x = context_.get();
  must(x != nullptr && SSL_CTX_set_min_proto_version(x, TLS1_3_VERSION) == 1,
       "speak TLS 1.3");
  if (SSL_CTX_use_certificate(x, certificate.get()) != 1
      || SSL_CTX_use_PrivateKey(x, key.get()) != 1
      || SSL_CTX_check_private_key(x) != 1
      || X509_STORE_add_cert(SSL_CTX_get_cert_store(x), authority.get()) != 1)
    keys_fail(dir + ": key and certificates do not belong together");
  // No peer is accepted without a certificate, on either side.
  SSL_CTX_set_verify(x, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT,
                     nullptr);
  SSL_CTX_set_num_tickets(x, 0); // connections are never resumed
  SSL_CTX_set_session_cache_mode(x, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(x, SSL_MODE_ENABLE_PARTIAL_WRITE
                        | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
}

} // namespace smp
