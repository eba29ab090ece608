// Two-shot all-gather and broadcast: the staging, the rounds and the passes of the two-shot all-reduce, without sums.
//
// Bytes, whatever their type. A block owns one contiguous part of the data (in an all-gather of every rank's) and walks it
// in rounds, in three phases:
//   scatter   broadcast only: the root puts every other rank's chunk of the round into that rank's staging;
//   give      every rank puts its own chunk into its output and into every other rank's staging. An all-gather and the
//             root take it from the input, the others from what the root scattered;
//   gather    the other ranks' chunks go from staging to the output.
// One round apart, between one pair of barriers: scatter of round r + 1 | give of round r | gather of round r - 1. So a
// broadcast costs the root 2 (ranks - 1) / ranks times the data, with two ranks just the data, and the other ranks pass on
// the rest. Never more than if the root gave all to everybody, so there is no second way.
//
// Two slots and no word back are enough, also between operations and with the all-reduce, whose slots, counters and
// numbers of rounds these are:
//   - give r overwrites what the peer gathered in round r - 2. The peer published that it had given round r - 1 after that
//     gather, in the same pass, and this rank's pass waited for it, since it gathers round r - 1 too. The root takes
//     nothing from the others, and they give it nothing, but it is told and waits all the same.
//   - scatter r overwrites what the peer gave on in round r - 2; the peer published that, and the root's gather of r - 2
//     waited for it before the barrier that this scatter is behind.
//   - When a rank is through, all peers have given their last round, hence given on all that was scattered, and gathered
//     all but that round; the other kernels rely on no more.
#pragma once
#include "two_shot.h"

namespace ossicle {

// Where bytes go: the slots of some peers, and a place in the output or none.
struct Targets {
  const TwoShotWork& work;
  const Staging& staging;
  Phase phase;
  uint64_t number;
  uint32_t first, last;  // hops to the peers
  uint8_t* output;

  // Null for the root of a broadcast, which has all of it.
  OSSICLE_DEVICE uint8_t* slot(uint32_t hop) const {
    const uint32_t peer = (work.rank + hop) % work.ranks;
    return peer == work.root ? nullptr : staging.slot(phase, work.rank, peer, number);
  }
};

#if defined(__CUDACC__) || defined(OSSICLE_ORDER_MODEL)
OSSICLE_DEVICE Bits load_unit(const Bits* from, bool slot) { return load_bits(from, slot); }
OSSICLE_DEVICE void store_unit(Bits* to, const Bits& unit, bool slot) { store_bits(to, unit, slot); }
template <typename V> OSSICLE_DEVICE V load_unit(const V* from, bool slot) { return slot ? slot_load(from) : *from; }
template <typename V> OSSICLE_DEVICE void store_unit(V* to, const V& unit, bool) { slot_store(to, unit); }

// Whole units of bytes from `begin` on, several in flight a thread; returns where they end.
template <typename V>
OSSICLE_DEVICE uint64_t spread_units(const Block& block, const uint8_t* from, bool from_slot, uint64_t begin, uint64_t bytes,
                                     const Targets& targets) {
  constexpr uint32_t UNROLL = 8;
  const uint64_t units = (bytes - begin) / sizeof(V);
  const V* source = reinterpret_cast<const V*>(from + begin);
  for (uint64_t base = block.thread; base < units; base += UNROLL * block.threads) {
    V unit[UNROLL];
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; ++u) {
      const uint64_t i = base + u * block.threads;
      if (i < units) unit[u] = load_unit(source + i, from_slot);
    }
    for (uint32_t hop = targets.first; hop <= targets.last; ++hop) {
      // After the peers comes the output.
      const bool slot = hop < targets.last;
      uint8_t* to = slot ? targets.slot(hop) : targets.output;
      if (!to) continue;
#pragma unroll
      for (uint32_t u = 0; u < UNROLL; ++u) {
        const uint64_t i = base + u * block.threads;
        if (i < units) store_unit(reinterpret_cast<V*>(to + begin) + i, unit[u], slot);
      }
    }
  }
  return begin + units * sizeof(V);
}
#endif

// In units as wide as the addresses allow; slots allow all.
OSSICLE_DEVICE void spread(const Block& block, const uint8_t* from, bool from_slot, uint64_t bytes, const Targets& targets) {
#if defined(__CUDACC__) || defined(OSSICLE_ORDER_MODEL)
  const uintptr_t places = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(targets.output);
  uint64_t moved = 0;
  if (places % PACK_BYTES == 0) moved = spread_units<Bits>(block, from, from_slot, 0, bytes, targets);
  if (places % 4 == 0) moved = spread_units<uint32_t>(block, from, from_slot, moved, bytes, targets);
  spread_units<uint8_t>(block, from, from_slot, moved, bytes, targets);
#else
  for (uint32_t hop = targets.first; hop <= targets.last; ++hop) {
    uint8_t* to = hop < targets.last ? targets.slot(hop) : targets.output;
    if (!to) continue;
    if (from_slot) copy<uint8_t, Slot::SOURCE>(block, from, to, bytes, false);
    else copy<uint8_t, Slot::TARGET>(block, from, to, bytes, false);
  }
#endif
}

struct TwoShotMove {
  const TwoShotWork& work;
  Staging staging;
  Rounds rounds;

  OSSICLE_DEVICE bool gathers_all() const { return work.root == NO_ROOT; }
  OSSICLE_DEVICE bool is_root() const { return work.root == work.rank; }
  OSSICLE_DEVICE uint32_t peer(uint32_t hop) const { return (work.rank + hop) % work.ranks; }
  OSSICLE_DEVICE const uint8_t* input() const { return static_cast<const uint8_t*>(work.input); }

  // An all-gather's rounds are cut for one rank, whose data every rank has at another place of the output.
  OSSICLE_DEVICE Rounds::Chunk chunk(uint64_t round, uint32_t rank) const {
    return rounds.chunk(round, gathers_all() ? 0 : rank);
  }
  OSSICLE_DEVICE uint8_t* output(uint32_t rank, uint64_t at) const {
    return static_cast<uint8_t*>(work.output) + at + (gathers_all() ? rank * work.count : 0);
  }
  // Null where it lies there already.
  OSSICLE_DEVICE uint8_t* output_of_input(uint64_t at) const {
    uint8_t* to = output(work.rank, at);
    return to == input() + at ? nullptr : to;
  }

  OSSICLE_DEVICE void scatter(const Block& block, uint64_t round, uint64_t number) const {
    for (uint32_t hop = 1; hop < work.ranks; ++hop) {
      const Rounds::Chunk part = chunk(round, peer(hop));
      const Targets targets{work, staging, Phase::SCATTER, number, hop, hop + 1, output_of_input(part.at)};
      spread(block, input() + part.at, false, part.count, targets);
    }
  }

  OSSICLE_DEVICE void give(const Block& block, uint64_t round, uint64_t number) const {
    const Rounds::Chunk part = chunk(round, work.rank);
    const bool from_slot = !gathers_all() && !is_root();
    const uint8_t* from = from_slot ? staging.slot(Phase::SCATTER, work.root, work.rank, number) : input() + part.at;
    uint8_t* to = from_slot ? output(work.rank, part.at) : output_of_input(part.at);
    const Targets targets{work, staging, Phase::GATHER, number, 1, work.ranks, to};
    spread(block, from, from_slot, part.count, targets);
  }

  OSSICLE_DEVICE void gather(const Block& block, uint64_t round, uint64_t number) const {
    for (uint32_t hop = 1; hop < work.ranks; ++hop) {
      const Rounds::Chunk part = chunk(round, peer(hop));
      const Targets targets{work, staging, Phase::GATHER, number, 0, 0, output(peer(hop), part.at)};
      spread(block, staging.slot(Phase::GATHER, peer(hop), work.rank, number), true, part.count, targets);
    }
  }

  // Threads 0 to ranks - 2 each wait for what one peer gave, the next for what the root scattered. A block of fewer
  // threads goes round.
  OSSICLE_DEVICE bool wait(const Block& block, uint64_t given, bool gathers, bool gives) const {
    const bool scattered = gives && !gathers_all() && !is_root();
    bool ok = true;
    for (uint32_t i = block.thread; ok && i < work.ranks; i += block.threads) {
      if (i + 1 < work.ranks) {
        if (gathers) ok = staging.reached<Site::MOVE_GIVEN>(Phase::GATHER, peer(1 + i), given, 1);
      } else if (scattered) {
        ok = staging.reached<Site::MOVE_SCATTERED>(Phase::SCATTER, work.root, given + 1, 0);
      }
    }
    return ok;
  }

  OSSICLE_DEVICE void tell(const Block& block, uint64_t given, bool scatters, bool gives) const {
    for (uint32_t i = block.thread; i < 2 * (work.ranks - 1); i += block.threads) {
      const uint32_t to = peer(1 + i % (work.ranks - 1));
      if (i >= work.ranks - 1) {
        if (scatters) publish<Site::MOVE_SCATTER>(staging.counter(Phase::SCATTER, work.rank, to), given + 2);
      } else if (gives) {
        publish<Site::MOVE_GIVE>(staging.counter(Phase::GATHER, work.rank, to), given + 1);
      }
    }
  }
};

OSSICLE_DEVICE void two_shot_move(const Block& block, const TwoShotWork& work) {
  enter(block, work.state, work.started);
  const bool all_gather = work.root == NO_ROOT;
  const uint64_t part = ceil_div(ceil_div(work.count, block.blocks), PACK_BYTES) * PACK_BYTES;
  const uint64_t begin = min_of(part * block.index, work.count);
  const uint64_t end = min_of(begin + part, work.count);
  const Rounds rounds{begin, end, work.slot_bytes, PACK_BYTES, all_gather ? 1 : work.ranks};
  const TwoShotMove move{work, Staging{work, block.index}, rounds};
  const uint64_t count = rounds.count();
  const uint64_t base = work.state->rounds[block.index];
  // A broadcast scatters one pass ahead of what it gives.
  const uint64_t ahead = all_gather ? 0 : 1;
  for (uint64_t pass = 0; count > 0 && pass < count + ahead + 1; ++pass) {
    const uint64_t given = base + pass - ahead;  // rounds given before this pass, ever
    const bool scatters = work.root == work.rank && pass < count;
    const bool gives = pass >= ahead && pass < count + ahead, gathers = pass > ahead;
    const bool goes_on = pass > 0 || !behind_stopped(work.state);
    if (!barrier_and<Site::MOVE_READY>(block, goes_on && move.wait(block, given, gathers, gives))) break;
    if (scatters) move.scatter(block, pass, given + 1);
    if (gives) move.give(block, pass - ahead, given);
    if (gathers && work.root != work.rank) move.gather(block, pass - ahead - 1, given - 1);
    barrier<Site::MOVE_MOVED>(block);
    move.tell(block, given, scatters, gives);
  }
  // The last pass ended in a barrier, whether it went through or stopped, and told nobody.
  if (block.thread == 0 && count > 0) work.state->rounds[block.index] = base + count;
  leave_together(block, work.state, work.control, false);
}

}  // namespace ossicle
