#include "apps/web/http_server.hpp"

#include "transport/error.hpp"
#include "transport/files/run_secret.hpp"
#include "transport/network/addresses.hpp"

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <list>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace smp::app {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using tcp = asio::ip::tcp;
using shared_text = std::shared_ptr<const std::string>;

namespace {

shared_text make_text(std::string x) {
  return std::make_shared<const std::string>(std::move(x));
}

http_reply refusal(unsigned status, const std::string& why) {
  return {status, "text/plain; charset=utf-8", make_text(why + '\n')};
}

std::string_view view_of(beast::string_view x) {
  return {x.data(), x.size()};
}

/// @returns the value of `key` in a query; the token has no escapes
std::string_view in_query(std::string_view query, std::string_view key) {
  while (!query.empty()) {
    auto end = std::min(query.find('&'), query.size());
    auto pair = query.substr(0, end);
    query.remove_prefix(std::min(end + 1, query.size()));
    if (pair.size() > key.size() && pair.starts_with(key)
        && pair[key.size()] == '=')
      return pair.substr(key.size() + 1);
  }
  return {};
}

bool same_token(std::string_view x, std::string_view y) {
  return equal_in_constant_time(std::as_bytes(std::span{x}),
                                std::as_bytes(std::span{y}));
}

/// Whether a Host header names this machine as only its own programs do.
bool is_this_machine(std::string_view x) {
  if (auto colon = x.rfind(':');
      colon != std::string_view::npos && x.find(']', colon) == x.npos)
    x = x.substr(0, colon);
  constexpr std::string_view name = "localhost";
  auto is_name = std::ranges::equal(x, name, [](char a, char b) {
    return (a >= 'A' && a <= 'Z' ? a - 'A' + 'a' : a) == b;
  });
  return is_name || x == "127.0.0.1" || x == "[::1]";
}

/// Neither the end of a connection nor an error of the network.
bool is_no_http(beast::error_code x) {
  return x != http::error::end_of_stream && x != http::error::partial_message
         && x.category()
              == http::make_error_code(http::error::bad_method).category();
}

std::string head_of(unsigned status, const std::string& type,
                    std::optional<size_t> length) {
  auto reason = view_of(http::obsolete_reason(http::int_to_status(status)));
  return fmt::format(
    "HTTP/1.1 {} {}\r\nContent-Type: {}\r\n{}Cache-Control: no-store\r\n"
    "X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n"
    "Referrer-Policy: no-referrer\r\nConnection: close\r\n\r\n",
    status, reason, type,
    length ? fmt::format("Content-Length: {}\r\n", *length) : "");
}

} // namespace

http_address http_address::parse(const std::string& x) {
  auto wrong = [&](const char* why) {
    return config_error(
      fmt::format("{}: {}; write an address and a port, such "
                  "as 127.0.0.1:8080",
                  x, why));
  };
  auto parts = parse_endpoint(x);
  if (!parts)
    throw wrong("no port");
  auto& host = parts->host;
  boost::system::error_code problem;
  auto address = asio::ip::make_address(
    host == "localhost" ? "127.0.0.1" : host, problem);
  if (problem)
    throw wrong("no address of this machine");
  http_address result;
  result.host = address.to_string();
  result.port = parts->port;
  result.loopback = address.is_loopback();
  return result;
}

std::string http_address::text() const {
  return endpoint(host, port);
}

/// All but the constructor, `publish` and `streams` is on the server's thread.
struct http_server::impl : std::enable_shared_from_this<impl> {
  class connection;

  explicit impl(options x)
    : config(std::move(x)), acceptor(context), pause(context) {
    // nop
  }

  void listen();
  void accept();
  void add(tcp::socket socket);
  void send_all(const shared_text& news, const shared_text& all);

  options config;
  std::list<connection*> silent; // those whose request is awaited, oldest first
  std::vector<connection*> listeners;
  size_t open = 0;
  std::atomic<size_t> streams = 0;
  uint16_t port = 0;
  /// Its operations own their connections, which use what is above.
  asio::io_context context{1};
  tcp::acceptor acceptor;
  asio::steady_timer pause;
  /// Those that have no operation: somebody looks for their answer.
  std::set<std::shared_ptr<connection>> awaiting;
  std::thread thread;
};

/// One client, from its connection to the end of the reply. Its operations keep
/// it alive.
class http_server::impl::connection
  : public std::enable_shared_from_this<connection> {
public:
  connection(impl& of, tcp::socket socket)
    : of_(of),
      stream_(std::move(socket)),
      buffer_(of_.config.limits.header_bytes + 1024) {
    ++of_.open;
    place_ = of_.silent.insert(of_.silent.end(), this);
  }

  ~connection() {
    --of_.open;
    forget_silence();
    if (std::erase(of_.listeners, this) > 0)
      --of_.streams;
  }

  void read() {
    parser_.header_limit(static_cast<uint32_t>(of_.config.limits.header_bytes));
    stream_.expires_after(of_.config.limits.patience);
    http::async_read_header(
      stream_, buffer_, parser_,
      [self = shared_from_this()](beast::error_code problem, size_t) {
        self->forget_silence();
        if (!problem)
          self->answer();
        else if (problem == http::error::header_limit
                 || problem == http::error::buffer_overflow)
          self->reply(refusal(431, "the request is too long"));
        else if (is_no_http(problem))
          self->reply(refusal(400, "this is no HTTP"));
      });
  }

  void close() {
    forget_silence();
    boost::system::error_code ignored;
    stream_.socket().close(ignored);
  }

  /// Of a stream: sends an event, or all of them once it has taken the last.
  void send(const shared_text& news, const shared_text& all) {
    if (busy_)
      late_ = all;
    else
      write_event(std::exchange(has_all_, true) ? news : all);
  }

private:
  void forget_silence() {
    if (auto place = std::exchange(place_, std::nullopt))
      of_.silent.erase(*place);
  }

  /// @returns why the request is refused, if it is
  std::optional<http_reply> refused(std::string_view query) const {
    auto& request = parser_.get();
    auto& config = of_.config;
    if (request.method() != http::verb::get
        && request.method() != http::verb::head)
      return refusal(405, "only GET and HEAD");
    if (config.address.loopback
        && !is_this_machine(view_of(request[http::field::host])))
      return refusal(421,
                     "this address is for programs of this machine; from "
                     "others, forward the port with ssh -L");
    if (!config.token.empty()
        && !same_token(in_query(query, "token"), config.token))
      return refusal(403, "the token in the address is missing or wrong");
    return std::nullopt;
  }

  void answer() {
    auto target = view_of(parser_.get().target());
    auto mark = std::min(target.find('?'), target.size());
    std::string path{target.substr(0, mark)};
    auto query = target.substr(std::min(mark + 1, target.size()));
    if (auto no = refused(query))
      return reply(std::move(*no));
    if (!of_.config.stream_path.empty() && path == of_.config.stream_path)
      return begin_stream();
    // What is awaited here is bounded by whoever answers.
    stream_.expires_never();
    auto self = shared_from_this();
    of_.awaiting.insert(self);
    // The server, and this with it, may be gone when the answer comes.
    of_.config.answer(path, [of = of_.weak_from_this(),
                             me = std::weak_ptr{self}](http_reply x) {
      if (auto server = of.lock())
        asio::post(server->context, [me, x = std::move(x)]() mutable {
          if (auto self = me.lock())
            self->reply(std::move(x));
        });
    });
  }

  void reply(http_reply x) {
    of_.awaiting.erase(shared_from_this());
    auto head = head_of(x.status, x.type, x.body->size());
    if (parser_.get().method() == http::verb::head)
      x.body = make_text({});
    write(std::move(head), x.body, [] {}); // then this closes
  }

  void begin_stream() {
    if (of_.streams >= of_.config.limits.streams)
      return reply(refusal(503, "too many pages are open"));
    if (parser_.get().method() == http::verb::head)
      return reply({200, "text/event-stream", make_text({})});
    boost::system::error_code ignored;
    stream_.socket().non_blocking(true, ignored); // for `watch`
    of_.listeners.push_back(this);
    ++of_.streams;
    write(head_of(200, "text/event-stream", std::nullopt), make_text({}),
          [this] { go_on(); });
    watch();
    if (of_.config.on_stream)
      of_.config.on_stream();
  }

  void write_event(shared_text x) {
    write({}, std::move(x), [this] { go_on(); });
  }

  void go_on() {
    busy_ = false;
    if (!late_)
      return;
    has_all_ = true;
    write_event(std::exchange(late_, nullptr));
  }

  /// Sees when the page is closed. What it sends does not count.
  void watch() {
    stream_.socket().async_wait(
      tcp::socket::wait_read,
      [self = shared_from_this()](boost::system::error_code problem) {
        std::array<char, 256> ignored;
        if (!problem)
          self->stream_.socket().read_some(asio::buffer(ignored), problem);
        if (problem && problem != asio::error::would_block)
          self->close();
        else
          self->watch();
      });
  }

  /// @param done is called unless this fails, then the connection ends
  template <class F>
  void write(std::string head, shared_text body, F done) {
    busy_ = true;
    head_ = std::move(head);
    body_ = std::move(body);
    stream_.expires_after(of_.config.limits.patience);
    std::array<asio::const_buffer, 2> parts{asio::buffer(head_),
                                            asio::buffer(*body_)};
    asio::async_write(stream_, parts,
                      [self = shared_from_this(),
                       done](boost::system::error_code problem, size_t) {
                        self->stream_.expires_never();
                        self->body_.reset();
                        if (problem)
                          self->close();
                        else
                          done();
                      });
  }

  impl& of_;
  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  http::request_parser<http::empty_body> parser_;
  std::optional<std::list<connection*>::iterator> place_;
  std::string head_;
  shared_text body_;
  bool busy_ = false;
  bool has_all_ = false;
  shared_text late_;
};

void http_server::impl::listen() {
  auto& x = config.address;
  try {
    tcp::endpoint where{asio::ip::make_address(x.host), x.port};
    acceptor.open(where.protocol());
    acceptor.set_option(tcp::acceptor::reuse_address(true));
    acceptor.bind(where);
    acceptor.listen();
    port = acceptor.local_endpoint().port();
  } catch (const boost::system::system_error& e) {
    throw config_error(fmt::format("{}: nothing can listen there: {}", x.text(),
                                   e.code().message()));
  }
}

void http_server::impl::accept() {
  acceptor.async_accept(
    [this](boost::system::error_code problem, tcp::socket socket) {
      if (problem == asio::error::operation_aborted)
        return;
      if (!problem) {
        add(std::move(socket));
        return accept();
      }
      // Out of descriptors: those that are open end soon.
      constexpr std::chrono::milliseconds rest{100};
      pause.expires_after(rest);
      pause.async_wait([this](boost::system::error_code stopped) {
        if (!stopped)
          accept();
      });
    });
}

void http_server::impl::add(tcp::socket socket) {
  if (open >= config.limits.connections) {
    if (silent.empty())
      return; // closes it
    silent.front()->close();
  }
  std::make_shared<connection>(*this, std::move(socket))->read();
}

void http_server::impl::send_all(const shared_text& news,
                                 const shared_text& all) {
  for (auto* x : std::vector{listeners})
    x->send(news, all);
}

http_server::http_server(options x)
  : impl_(std::make_shared<impl>(std::move(x))) {
  impl_->listen();
  impl_->accept();
  impl_->thread = std::thread{[x = impl_.get()] { x->context.run(); }};
}

http_server::~http_server() {
  impl_->context.stop();
  impl_->thread.join();
}

uint16_t http_server::port() const noexcept {
  return impl_->port;
}

size_t http_server::streams() const noexcept {
  return impl_->streams;
}

void http_server::publish(shared_text news, shared_text all) {
  asio::post(impl_->context,
             [x = impl_.get(), news = std::move(news), all = std::move(all)] {
               x->send_all(news, all);
             });
}

} // namespace smp::app
