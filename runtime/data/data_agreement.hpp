#pragma once

namespace smp {

class data_source;
class rank_context;

/// Machines may have the data in different places, but it has to be the same:
/// each replica takes its part of a batch from what it reads itself.
/// Collective over the world.
/// @throws error (config), the same on all ranks, naming the first file that
///         differs from that of rank 0
void require_same_data(const data_source& data, const rank_context& rank);

} // namespace smp
