#include "transport/collectives/collective_message.hpp"

#include "transport/bytes.hpp"

#include <algorithm>

namespace smp {

namespace {

using content = decltype(collective_message::content);

bool ascends(const std::vector<rank_id>& xs) {
  auto wrong = [](rank_id a, rank_id b) { return a >= b; };
  return std::adjacent_find(xs.begin(), xs.end(), wrong) == xs.end();
}

bool has(const std::vector<rank_id>& xs, rank_id x) {
  return std::binary_search(xs.begin(), xs.end(), x);
}

} // namespace

collective_writer::collective_writer(const collective_label& label,
                                     const collective_signature& what) {
  byte_writer out;
  out.put(label);
  out.put(what);
  begin_ = out.take();
}

template <class T>
message collective_writer::write(const T& x) const {
  byte_writer out;
  out.reserve(begin_.size() + 16);
  out.raw(begin_);
  out.put(content{x});
  return {message_kind::collective, {out.take(), {}}};
}

message collective_writer::joined() const {
  return write(joined_collective{});
}

message collective_writer::asking() const {
  return write(asking_collective{});
}

message collective_writer::segment(const piece_segment& x,
                                   tensor_ref bytes) const {
  auto result = write(x);
  result.body.tensors.push_back(std::move(bytes));
  return result;
}

message collective_writer::failed(const failure& why) const {
  return write(failed_collective{why});
}

collective_message read_collective(const message& x, rank_id from,
                                   rank_id self) {
  byte_reader in{x.body.bytes, "message of a collective"};
  collective_message result;
  result.label = in.get<collective_label>("label");
  auto& group = result.label.group;
  if (!ascends(group) || !has(group, from) || !has(group, self))
    in.fail("group", "no group of both ranks");
  result.what = in.get<collective_signature>("signature");
  auto& rows = result.what.rows;
  auto negative = [](int64_t size) { return size < 0; };
  auto& shape = result.what.shape;
  if (result.what.root >= group.size()
      || (!rows.empty() && rows.size() != group.size())
      || std::any_of(shape.begin(), shape.end(), negative))
    in.fail("signature", "not of this group");
  result.content = in.get<content>("content");
  in.expect_end();
  auto has_bytes = std::holds_alternative<piece_segment>(result.content);
  auto& tensors = x.body.tensors;
  if (tensors.size() != (has_bytes ? 1 : 0)
      || (has_bytes && !result.what.on_device
          && tensors[0].device != device_ref{}))
    in.fail("content", "not with these tensors");
  if (has_bytes)
    result.bytes = tensors[0];
  return result;
}

} // namespace smp
