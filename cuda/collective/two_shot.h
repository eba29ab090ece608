// Two-shot all-reduce: every rank reduces one part of the data and gives the result to all.
//
// For messages where bandwidth rules. Each block owns one contiguous part of the data and walks it in rounds; a round is
// cut into one chunk a rank. In three phases
//   scatter   this rank's input of every other rank's chunk goes into that rank's staging;
//   reduce    this rank's own chunk, from its input and what the others scattered, in rank order with one rounding, goes
//             to its output and into every other rank's staging;
//   gather    the other ranks' chunks go from staging to the output.
// A block runs them one round apart, all between one pair of barriers, so that their loads are in flight together:
//
//   scatter of round r + 1 | reduce of round r | gather of round r - 1
//
// Staging at a rank has, for each phase, source and block, two slots, used by the parity of the round, and one counter
// of rounds. Rounds count up for ever, across launches. Two slots and no word back are enough:
//   - scatter r overwrites what the peer reduced in round r - 2. That peer published the result of r - 2 afterwards, and
//     this rank saw it: its gather of r - 2 waited for it before the barrier that this scatter is behind.
//   - reduce r overwrites what the peer gathered in round r - 2. The peer published its scatter of round r after that
//     gather, in the same pass, and this rank's reduce of round r waited for that scatter.
// All ranks walk the same rounds with the same blocks, since both follow from count and plan alone.
// With zero copy ranks may do without staging: two_shot_direct.h, which has the kernel.
#pragma once
#include "../core/element.h"
#include "../core/wait.h"
#include "pack.h"

namespace ossicle {

enum class Phase : uint32_t { SCATTER = 0, GATHER = 1 };

// One block's view of the staging of all ranks.
struct Staging {
  const TwoShotWork& work;
  uint32_t block;

  // A rank's staging has no place for itself.
  OSSICLE_DEVICE static uint32_t place(uint32_t source, uint32_t owner) { return source - (source > owner ? 1 : 0); }

  OSSICLE_DEVICE uint64_t index(Phase phase, uint32_t source, uint32_t owner) const {
    return (static_cast<uint64_t>(phase) * (work.ranks - 1) + place(source, owner)) * work.most_blocks + block;
  }

  OSSICLE_DEVICE uint8_t* slot(Phase phase, uint32_t source, uint32_t owner, uint64_t round) const {
    return work.slots[owner] + (index(phase, source, owner) * 2 + (round & 1)) * work.slot_bytes;
  }

  OSSICLE_DEVICE uint64_t* counter(Phase phase, uint32_t source, uint32_t owner) const {
    return work.counters[owner] + index(phase, source, owner) * FLAG_STRIDE;
  }

  // Waits for what a peer puts here. One thread.
  template <Site SITE> OSSICLE_DEVICE bool reached(Phase phase, uint32_t peer, uint64_t rounds_done, uint32_t step,
                                                 bool parks = false) const {
    Wait wait = Wait::for_peer(work.control, work.state, peer, block, step, parks);
    const uint64_t* told = counter(phase, peer, work.rank);
    while (consume<SITE>(told) < rounds_done) {
      if (!wait.again()) return false;
    }
    return true;
  }
};

// What a block does to its part of the data.
struct Rounds {
  uint64_t begin, end;  // elements
  uint64_t slot_elements;
  uint64_t pack;  // elements of one
  uint32_t ranks;

  // Elements of a whole round; the last is cut evenly, in packs.
  OSSICLE_DEVICE uint64_t width() const { return slot_elements * ranks; }
  OSSICLE_DEVICE uint64_t count() const { return ceil_div(end - begin, width()); }

  struct Chunk {
    uint64_t at, count;
  };
  OSSICLE_DEVICE Chunk chunk(uint64_t round, uint32_t rank) const {
    const uint64_t from = begin + round * width();
    const uint64_t size = min_of(slot_elements, ceil_div(ceil_div(end - from, ranks), pack) * pack);
    const uint64_t at = min_of(from + size * rank, end);
    return Chunk{at, min_of(size, end - at)};
  }
};

// Packs of one source in flight. Byte elements unpack into many registers.
template <typename T> constexpr uint32_t STAGED_PACKS = sizeof(T) == 1 ? 1 : 2;

template <typename T, typename Op> struct TwoShot {
  const TwoShotWork& work;
  Staging staging;
  Rounds rounds;
  Op op;
  bool aligned;

  OSSICLE_DEVICE const T* input() const { return static_cast<const T*>(work.input); }
  OSSICLE_DEVICE T* output() const { return static_cast<T*>(work.output); }

  OSSICLE_DEVICE void scatter(const Block& block, uint64_t round, uint64_t number) const {
    for (uint32_t hop = 1; hop < work.ranks; ++hop) {
      const uint32_t peer = (work.rank + hop) % work.ranks;
      const Rounds::Chunk chunk = rounds.chunk(round, peer);
      T* slot = reinterpret_cast<T*>(staging.slot(Phase::SCATTER, work.rank, peer, number));
      copy<T, Slot::TARGET>(block, input() + chunk.at, slot, chunk.count, aligned);
    }
  }

  OSSICLE_DEVICE void gather(const Block& block, uint64_t round, uint64_t number) const {
    for (uint32_t hop = 1; hop < work.ranks; ++hop) {
      const uint32_t peer = (work.rank + hop) % work.ranks;
      const Rounds::Chunk chunk = rounds.chunk(round, peer);
      const T* slot = reinterpret_cast<const T*>(staging.slot(Phase::GATHER, peer, work.rank, number));
      copy<T, Slot::SOURCE>(block, slot, output() + chunk.at, chunk.count, aligned);
    }
  }

  // Where one element or pack of this rank's chunk comes from and goes to.
  template <typename V> struct Places {
    const TwoShot& self;
    uint64_t number, offset;  // of the chunk in the data, in elements

    OSSICLE_DEVICE bool from_slot(uint32_t rank) const { return rank != self.work.rank; }
    OSSICLE_DEVICE bool to_slot(uint32_t rank) const { return rank != self.work.rank; }
    OSSICLE_DEVICE const V* source(uint32_t rank) const {
      return rank == self.work.rank
                 ? reinterpret_cast<const V*>(self.input() + offset)
                 : reinterpret_cast<const V*>(self.staging.slot(Phase::SCATTER, rank, self.work.rank, number));
    }
    OSSICLE_DEVICE V* target(uint32_t rank) const {
      return rank == self.work.rank
                 ? reinterpret_cast<V*>(self.output() + offset)
                 : reinterpret_cast<V*>(self.staging.slot(Phase::GATHER, self.work.rank, rank, number));
    }
  };

  OSSICLE_DEVICE void reduce(const Block& block, uint64_t round, uint64_t number) const {
    const Rounds::Chunk chunk = rounds.chunk(round, work.rank);
    uint64_t reduced = 0;
#if defined(__CUDACC__) || defined(OSSICLE_ORDER_MODEL)
    if (aligned) {
      const uint64_t packs = chunk.count / PACK_ELEMENTS<T>;
      const Places<Bits> places{*this, number, chunk.at};
      reduce_packs<T, STAGED_PACKS<T>>(block, places, packs, work.ranks, op);
      reduced = packs * PACK_ELEMENTS<T>;
    }
#endif
    reduce_elements<T>(block, Places<T>{*this, number, chunk.at}, reduced, chunk.count, work.ranks, op);
  }

  // Threads 0 to ranks - 2 take the counters of one phase, the next ranks - 1 those of the other: each waits for or
  // tells one peer. A block of fewer threads goes round.
  OSSICLE_DEVICE bool wait(const Block& block, uint64_t number, bool scattered, bool gathered) const {
    bool ok = true;
    for (uint32_t i = block.thread; ok && i < 2 * (work.ranks - 1); i += block.threads) {
      const bool first = i < work.ranks - 1;
      const uint32_t peer = (work.rank + 1 + i % (work.ranks - 1)) % work.ranks;
      if (first && scattered) {
        ok = staging.reached<Site::TWO_SHOT_SCATTERED>(Phase::SCATTER, peer, number + 1, 0);
      } else if (!first && gathered) {
        ok = staging.reached<Site::TWO_SHOT_REDUCED>(Phase::GATHER, peer, number, 1);
      }
    }
    return ok;
  }

  OSSICLE_DEVICE void tell(const Block& block, uint64_t number, bool scattered, bool reduced) const {
    for (uint32_t i = block.thread; i < 2 * (work.ranks - 1); i += block.threads) {
      const bool first = i < work.ranks - 1;
      const uint32_t peer = (work.rank + 1 + i % (work.ranks - 1)) % work.ranks;
      if (first && scattered) {
        publish<Site::TWO_SHOT_SCATTER>(staging.counter(Phase::SCATTER, work.rank, peer), number + 2);
      } else if (!first && reduced) {
        publish<Site::TWO_SHOT_REDUCE>(staging.counter(Phase::GATHER, work.rank, peer), number + 1);
      }
    }
  }
};

template <typename T, template <typename> class OpOf>
OSSICLE_DEVICE void two_shot_staged(const Block& block, const TwoShotWork& work) {
  enter(block, work.state, work.started);
  constexpr uint64_t N = PACK_ELEMENTS<T>;
  const bool aligned =
      (reinterpret_cast<uintptr_t>(work.input) | reinterpret_cast<uintptr_t>(work.output)) % PACK_BYTES == 0;
  const uint64_t part = ceil_div(ceil_div(work.count, block.blocks), N) * N;
  const uint64_t begin = min_of(part * block.index, work.count);
  const uint64_t end = min_of(begin + part, work.count);
  const Rounds rounds{begin, end, work.slot_bytes / sizeof(T), N, work.ranks};
  const TwoShot<T, OpOf<T>> shot{work, Staging{work, block.index}, rounds, OpOf<T>(work.ranks), aligned};
  const uint64_t count = rounds.count();
  const uint64_t base = work.state->rounds[block.index];
  // In pass p the chunks of round p are reduced; the one before only scatters, the one after only gathers.
  for (uint64_t pass = 0; count > 0 && pass < count + 2; ++pass) {
    const uint64_t number = base + pass - 1;  // of round pass - 1, ever
    const bool scatters = pass < count, reduces = pass >= 1 && pass <= count, gathers = pass >= 2;
    const bool goes_on = pass > 0 || !behind_stopped(work.state);
    if (!barrier_and<Site::TWO_SHOT_READY>(block, goes_on && shot.wait(block, number, reduces, gathers))) break;
    if (scatters) shot.scatter(block, pass, number + 1);
    if (reduces) shot.reduce(block, pass - 1, number);
    if (gathers) shot.gather(block, pass - 2, number - 1);
    barrier<Site::TWO_SHOT_MOVED>(block);
    shot.tell(block, number, scatters, reduces);
  }
  // The last pass ended in a barrier, whether it went through or stopped, and told nobody.
  if (block.thread == 0 && count > 0) work.state->rounds[block.index] = base + count;
  leave_together(block, work.state, work.control, false);
}

}  // namespace ossicle
