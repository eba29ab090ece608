// A model of the proxy, and of the one at the other end (src/proxy/): it takes slots from the ring that one rank's kernels
// fill, as far as their notes say, and fills the ring that the next rank's kernels drain.
#pragma once
#include "world.h"

namespace ossicle::model {

class Proxy {
 public:
  Proxy(World& world, uint32_t sender) : world_(world), from_(world.rank[sender]), to_(world.rank[(sender + 1) % world.ranks]) {
    for (uint32_t b = 0; b < BLOCKS; ++b) moved_[b] = from_.net_tail[b * FLAG_STRIDE];
  }

  void run() {
    while (world_.ended < world_.ranks) {
      for (uint32_t b = 0; b < BLOCKS; ++b) move(b);
      pause();
    }
  }

 private:
  void move(uint32_t b) {
    const uint64_t position = moved_[b], slot = position % world_.slots;
    if (memory->load(from_.net_tail + b * FLAG_STRIDE, 8, Kind::ORDERED) <= position) return;
    if (memory->load(to_.net_drained + b * FLAG_STRIDE, 8, Kind::ORDERED) + world_.slots <= position) return;
    const SlotNote note = slot_load(from_.notes + b * NOTE_LINE + slot);
    if (note.bytes > world_.slot_bytes || note.ordinal < last_[b] || note.ordinal >= world_.ops.size() || note.step >= MAX_STEPS) {
      found("a note that is not of its slot");
    }
    last_[b] = note.ordinal;
    const uint64_t at = (b * world_.slots + slot) * world_.slot_bytes;
    for (uint32_t i = 0; i < note.bytes; i += 4) {
      const uint64_t word = memory->load(from_.net_slots + at + i, 4, Kind::PAYLOAD);
      memory->store(to_.slots + at + i, 4, word, Kind::PAYLOAD);
    }
    memory->store(to_.tail + b * FLAG_STRIDE, 8, position + 1, Kind::ORDERED);
    memory->store(from_.net_head + b * FLAG_STRIDE, 8, position + 1, Kind::ORDERED);
    moved_[b] = position + 1;
  }

  World& world_;
  Rank& from_;
  Rank& to_;
  uint64_t moved_[BLOCKS], last_[BLOCKS] = {};
};

}  // namespace ossicle::model
