#pragma once

// The messages of a collective. Each one carries the label of its call and its
// sender's signature, because any of them may arrive first.

#include "transport/collectives/collective_call.hpp"
#include "transport/error.hpp"
#include "transport/fabric.hpp"

#include <cstddef>
#include <variant>
#include <vector>

namespace smp {

/// The sender has joined: from now on it may be sent any amount.
struct joined_collective {};

/// The same from a rank that may leave no more here. A receiver that has not
/// joined drops it, and gets it again when the sender hears from it.
struct asking_collective {};

/// A segment of one of the receiver's pieces; its bytes are the only tensor.
struct piece_segment {
  uint32_t piece = 0;
  uint64_t offset = 0; // in the piece, in bytes
};

/// The collective fails on all ranks.
struct failed_collective {
  failure why;
};

template <class Inspector>
bool inspect(Inspector& f, joined_collective& x) {
  return f.object(x).fields();
}

template <class Inspector>
bool inspect(Inspector& f, asking_collective& x) {
  return f.object(x).fields();
}

template <class Inspector>
bool inspect(Inspector& f, piece_segment& x) {
  return f.object(x).fields(f.field("piece", x.piece),
                            f.field("offset", x.offset));
}

template <class Inspector>
bool inspect(Inspector& f, failed_collective& x) {
  return f.object(x).fields(f.field("why", x.why));
}

struct collective_message {
  collective_label label;
  collective_signature what;
  std::variant<joined_collective, piece_segment, failed_collective,
               asking_collective>
    content;
  tensor_ref bytes; // of a segment
};

/// Writes label and signature once for all messages of a call.
class collective_writer {
public:
  collective_writer(const collective_label& label,
                    const collective_signature& what);

  message joined() const;
  message asking() const;
  message segment(const piece_segment& x, tensor_ref bytes) const;
  message failed(const failure& why) const;

private:
  template <class T>
  message write(const T& x) const;

  std::vector<std::byte> begin_;
};

/// @param from,self sender and receiver
/// @throws error (protocol) for what no correct rank sends
collective_message read_collective(const message& x, rank_id from,
                                   rank_id self);

} // namespace smp
