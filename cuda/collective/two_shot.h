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
// Zero copy: a rank may lend a peer its input, which that peer's reduce then reads, so that nothing is scattered to it; and
// its output, which that peer's reduce writes, so that nothing is gathered from it. Ranks decide alone, one buffer at a
// time; the cut of the data and the bits are the same either way. What is lent is said on the device, beside the scatter
// counter, and published with it in the first pass, when nothing has been reduced: so lenders and borrowers may come at
// different times, and from graphs. The chunks of one rank are touched in any rank's buffers by that rank alone, each
// element read from all before it is written, so that an operation may be in place.
//
// Staging at a rank has, for each phase, source and block, two slots, used by the parity of the round, and one counter
// of rounds. Rounds count up for ever, across launches. A rank that lent a peer both buffers is free of it, else paced:
// the peer waits for its scatter counter in each round, and it for the peer's reduce counter. Two slots and no word back
// are enough:
//   - scatter r overwrites what the peer reduced in round r - 2. That peer published the result of r - 2 afterwards, and
//     this rank, paced, saw it: it waited for it before the barrier that this scatter is behind.
//   - reduce r overwrites what the peer gathered in round r - 2. The peer, paced, published its scatter counter of round r
//     after that gather, in the same pass, and this rank's reduce of round r waited for that.
// A free rank tells and is told only that it began (the first scatter) and that all is reduced (the last reduce). The
// last holds for every pair, and closes the operation:
//   - A lent input is read, and a lent output is complete, before its owner leaves: it waited for all peers' last reduce.
//   - What a rank says it lends stands until then too, so that the next operation may overwrite it: a peer publishes its
//     last reduce after it read that, and reads the next one's after the next publication.
//   - A rank that goes from free to paced finds its slots empty, since every earlier operation was closed.
// Before a rank touches what a peer lends it reads its own stop word: an abort of the lender raises that first, and then
// waits for kernels that may have read it before (src/launch/lending.rs).
// All ranks walk the same rounds with the same blocks, since both follow from count and plan alone.
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

  // What `source` lends `owner`: addresses of its input and its output, in the line of the scatter counter.
  OSSICLE_DEVICE uint64_t* lent(uint32_t source, uint32_t owner) const {
    return counter(Phase::SCATTER, source, owner) + 1;
  }
};

// What peers lend this rank; null: not lent.
struct Borrowed {
  const void* input[MAX_RANKS];
  void* output[MAX_RANKS];
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
    const uint64_t left = end - from;
    const uint64_t size = min_of(slot_elements, ceil_div(ceil_div(left, ranks), pack) * pack);
    const uint64_t at = min_of(from + size * rank, end);
    return Chunk{at, min_of(size, end - at)};
  }
};

// Packs of one source in flight where nobody waits: as many as registers hold, since few blocks must fill the memory.
template <typename T> constexpr uint32_t FREE_PACKS = sizeof(T) == 1 ? 1 : sizeof(T) == 2 ? 3 : 4;

template <typename T, typename Op> struct TwoShot {
  const TwoShotWork& work;
  Staging staging;
  Rounds rounds;
  Op op;
  Borrowed& borrowed;    // the block's, known from the first wait on
  uint64_t count, base;  // rounds of this operation, and of those before it

  OSSICLE_DEVICE static TwoShot of(const Block& block, const TwoShotWork& work, Borrowed& borrowed) {
    constexpr uint64_t N = PACK_ELEMENTS<T>;
    const uint64_t part = ceil_div(ceil_div(work.count, block.blocks), N) * N;
    const uint64_t begin = min_of(part * block.index, work.count);
    const uint64_t end = min_of(begin + part, work.count);
    const Rounds rounds{begin, end, work.slot_bytes / sizeof(T), N, work.ranks};
    const uint64_t base = work.state->rounds[block.index];
    return TwoShot{work, Staging{work, block.index}, rounds, Op(work.ranks), borrowed, rounds.count(), base};
  }

  OSSICLE_DEVICE const T* input() const { return static_cast<const T*>(work.input); }
  OSSICLE_DEVICE T* output() const { return static_cast<T*>(work.output); }
  OSSICLE_DEVICE static bool is_aligned(const void* a, const void* b) {
    return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) % PACK_BYTES == 0;
  }

  // Whether this rank paces itself by the peer, and the peer by this rank: see above.
  OSSICLE_DEVICE bool paced_by(uint32_t peer) const { return !work.lent_input[peer] || !work.lent_output[peer]; }
  OSSICLE_DEVICE bool paces(uint32_t peer) const { return !borrowed.input[peer] || !borrowed.output[peer]; }

  OSSICLE_DEVICE void scatter(const Block& block, uint64_t round, uint64_t number) const {
    const bool aligned = is_aligned(work.input, nullptr);
    for (uint32_t hop = 1; hop < work.ranks; ++hop) {
      const uint32_t peer = (work.rank + hop) % work.ranks;
      if (work.lent_input[peer]) continue;
      const Rounds::Chunk chunk = rounds.chunk(round, peer);
      T* slot = reinterpret_cast<T*>(staging.slot(Phase::SCATTER, work.rank, peer, number));
      copy<T, Slot::TARGET>(block, input() + chunk.at, slot, chunk.count, aligned);
    }
  }

  OSSICLE_DEVICE void gather(const Block& block, uint64_t round, uint64_t number) const {
    const bool aligned = is_aligned(work.output, nullptr);
    for (uint32_t hop = 1; hop < work.ranks; ++hop) {
      const uint32_t peer = (work.rank + hop) % work.ranks;
      if (work.lent_output[peer]) continue;
      const Rounds::Chunk chunk = rounds.chunk(round, peer);
      const T* slot = reinterpret_cast<const T*>(staging.slot(Phase::GATHER, peer, work.rank, number));
      copy<T, Slot::SOURCE>(block, slot, output() + chunk.at, chunk.count, aligned);
    }
  }

  // Where one element or pack of this rank's chunk comes from and goes to.
  template <typename V> struct Places {
    const TwoShot& self;
    uint64_t number, offset;  // of the chunk in the data, in elements

    OSSICLE_DEVICE bool from_slot(uint32_t rank) const { return !self.borrowed.input[rank]; }
    OSSICLE_DEVICE bool to_slot(uint32_t rank) const { return !self.borrowed.output[rank]; }
    OSSICLE_DEVICE const V* source(uint32_t rank) const {
      return from_slot(rank)
                 ? reinterpret_cast<const V*>(self.staging.slot(Phase::SCATTER, rank, self.work.rank, number))
                 : reinterpret_cast<const V*>(static_cast<const T*>(self.borrowed.input[rank]) + offset);
    }
    OSSICLE_DEVICE V* target(uint32_t rank) const {
      return to_slot(rank) ? reinterpret_cast<V*>(self.staging.slot(Phase::GATHER, self.work.rank, rank, number))
                           : reinterpret_cast<V*>(static_cast<T*>(self.borrowed.output[rank]) + offset);
    }
  };

  // The same where everything is lent.
  template <typename V> struct LentPlaces {
    const TwoShot& self;
    uint64_t number, offset;

    OSSICLE_DEVICE bool from_slot(uint32_t) const { return false; }
    OSSICLE_DEVICE bool to_slot(uint32_t) const { return false; }
    OSSICLE_DEVICE const V* source(uint32_t rank) const {
      return reinterpret_cast<const V*>(static_cast<const T*>(self.borrowed.input[rank]) + offset);
    }
    OSSICLE_DEVICE V* target(uint32_t rank) const {
      return reinterpret_cast<V*>(static_cast<T*>(self.borrowed.output[rank]) + offset);
    }
  };

  // How a block goes on once it knows what its peers lend.
  struct Meeting {
    bool paced;    // this rank by a peer or a peer by it
    bool aligned;  // all buffers that its reduce touches
  };
  OSSICLE_DEVICE Meeting meeting() const {
    Meeting found{false, true};
    for (uint32_t rank = 0; rank < work.ranks; ++rank) {
      found.aligned = found.aligned && is_aligned(borrowed.input[rank], borrowed.output[rank]);
      found.paced = found.paced || (rank != work.rank && (paced_by(rank) || paces(rank)));
    }
    return found;
  }

  // PACKS: of one source in flight.
  template <uint32_t PACKS, template <typename> class PlacesOf>
  OSSICLE_DEVICE void reduce(const Block& block, uint64_t round, uint64_t number, bool aligned) const {
    const Rounds::Chunk chunk = rounds.chunk(round, work.rank);
    uint64_t reduced = 0;
#if defined(__CUDACC__) || defined(OSSICLE_ORDER_MODEL)
    if (aligned) {
      const uint64_t packs = chunk.count / PACK_ELEMENTS<T>;
      reduce_packs<T, PACKS>(block, PlacesOf<Bits>{*this, number, chunk.at}, packs, work.ranks, op);
      reduced = packs * PACK_ELEMENTS<T>;
    }
#else
    (void)aligned;
#endif
    reduce_elements<T>(block, PlacesOf<T>{*this, number, chunk.at}, reduced, chunk.count, work.ranks, op);
  }

  // A pass reduces one round, scatters the one after it and gathers the one before.
  struct Pass {
    uint64_t number;  // of the round that is reduced, ever
    bool scatters, reduces, gathers;
    bool first, last;
    OSSICLE_DEVICE static Pass of(uint64_t pass, uint64_t count, uint64_t base) {
      return Pass{base + pass - 1, pass < count, pass >= 1 && pass <= count, pass >= 2, pass == 0, pass == count + 1};
    }
  };

  // Threads 0 to ranks - 2 take the counters of one phase, the next ranks - 1 those of the other: each waits for or
  // tells one peer. A block of fewer threads goes round.
  OSSICLE_DEVICE bool wait(const Block& block, const Pass& pass, bool begins) const {
    bool ok = true;
    for (uint32_t i = block.thread; ok && i < 2 * (work.ranks - 1); i += block.threads) {
      const bool first = i < work.ranks - 1;
      const uint32_t peer = (work.rank + 1 + i % (work.ranks - 1)) % work.ranks;
      if (first && pass.reduces && (begins || paces(peer))) {
        ok = reached<Site::TWO_SHOT_SCATTERED>(Phase::SCATTER, peer, pass.number + 1, 0);
        if (ok && begins) borrow(peer);
      } else if (!first && pass.gathers && (pass.last || paced_by(peer))) {
        ok = reached<Site::TWO_SHOT_REDUCED>(Phase::GATHER, peer, pass.number, 1);
      }
    }
    if (begins && block.thread == block.threads - 1) {
      borrowed.input[work.rank] = work.input;
      borrowed.output[work.rank] = work.output;
      if (work.may_lend != 0 && told_to_stop(work.control, work.state)) ok = false;
    }
    return ok;
  }

  OSSICLE_DEVICE void borrow(uint32_t peer) const {
    const uint64_t* lent = staging.lent(peer, work.rank);
    borrowed.input[peer] = reinterpret_cast<const void*>(slot_load(lent));
    borrowed.output[peer] = reinterpret_cast<void*>(slot_load(lent + 1));
  }

  OSSICLE_DEVICE void lend(uint32_t peer) const {
    uint64_t* lent = staging.lent(work.rank, peer);
    slot_store(lent, static_cast<uint64_t>(reinterpret_cast<uintptr_t>(work.lent_input[peer])));
    slot_store(lent + 1, static_cast<uint64_t>(reinterpret_cast<uintptr_t>(work.lent_output[peer])));
  }

  template <Site SITE> OSSICLE_DEVICE bool reached(Phase phase, uint32_t peer, uint64_t rounds_done, uint32_t step) const {
    Wait wait = Wait::for_peer(work.control, work.state, peer, staging.block, step);
    const uint64_t* counter = staging.counter(phase, peer, work.rank);
    while (consume<SITE>(counter) < rounds_done) {
      if (!wait.again()) return false;
    }
    return true;
  }

  OSSICLE_DEVICE void tell(const Block& block, const Pass& pass, bool ends) const {
    for (uint32_t i = block.thread; i < 2 * (work.ranks - 1); i += block.threads) {
      const bool first = i < work.ranks - 1;
      const uint32_t peer = (work.rank + 1 + i % (work.ranks - 1)) % work.ranks;
      if (first && pass.scatters && (pass.first || paced_by(peer))) {
        if (pass.first) lend(peer);
        publish<Site::TWO_SHOT_SCATTER>(staging.counter(Phase::SCATTER, work.rank, peer), pass.number + 2);
      } else if (!first && pass.reduces && (ends || paces(peer))) {
        publish<Site::TWO_SHOT_REDUCE>(staging.counter(Phase::GATHER, work.rank, peer), pass.number + 1);
      }
    }
  }

  // In pass p the chunks of round p - 1 are reduced; the first pass only scatters, the last only gathers.
  OSSICLE_DEVICE bool begin(const Block& block) const {
    const Pass pass = Pass::of(0, count, base);
    scatter(block, 0, base);
    barrier<Site::TWO_SHOT_FIRST>(block);
    tell(block, pass, false);
    return barrier_and<Site::TWO_SHOT_MET>(block, wait(block, Pass::of(1, count, base), true));
  }

  OSSICLE_DEVICE void walk_paced(const Block& block, bool aligned) const {
    // Byte elements unpack into many registers.
    constexpr uint32_t PACKS = sizeof(T) == 1 ? 1 : 2;
    for (uint64_t number = 1; number < count + 2; ++number) {
      const Pass pass = Pass::of(number, count, base);
      if (number > 1 && !barrier_and<Site::TWO_SHOT_READY>(block, wait(block, pass, false))) break;
      if (pass.scatters) scatter(block, number, pass.number + 1);
      if (pass.reduces) reduce<PACKS, Places>(block, number - 1, pass.number, aligned);
      if (pass.gathers) gather(block, number - 2, pass.number - 1);
      barrier<Site::TWO_SHOT_MOVED>(block);
      tell(block, pass, number == count);
    }
  }

  // Where nothing is staged at this rank or by it, nobody waits between the first pass and the last.
  OSSICLE_DEVICE void walk_free(const Block& block, bool aligned) const {
    for (uint64_t round = 0; round < count; ++round) reduce<FREE_PACKS<T>, LentPlaces>(block, round, base + round, aligned);
    barrier<Site::TWO_SHOT_REDUCED_ALL>(block);
    tell(block, Pass::of(count, count, base), true);
    barrier_and<Site::TWO_SHOT_CLOSED>(block, wait(block, Pass::of(count + 1, count, base), false));
  }
};

template <typename T, template <typename> class OpOf> using TwoShotOf = TwoShot<T, OpOf<T>>;

// The first pass and the way of a free rank, out of line: the registers of one walk are not held during the other.
template <typename T, template <typename> class OpOf>
OSSICLE_APART bool begin_two_shot(const Block block, const TwoShotWork& work, Borrowed& borrowed) {
  return TwoShotOf<T, OpOf>::of(block, work, borrowed).begin(block);
}

template <typename T, template <typename> class OpOf>
OSSICLE_APART void walk_free(const Block block, const TwoShotWork& work, Borrowed& borrowed, bool aligned) {
  TwoShotOf<T, OpOf>::of(block, work, borrowed).walk_free(block, aligned);
}

template <typename T, template <typename> class OpOf>
OSSICLE_DEVICE void two_shot(const Block& block, const TwoShotWork& work) {
  OSSICLE_BLOCK_MEMORY(Borrowed, borrowed);
  enter(block, work.state, work.started);
  const TwoShotOf<T, OpOf> shot = TwoShotOf<T, OpOf>::of(block, work, borrowed);
  if (shot.count > 0 && begin_two_shot<T, OpOf>(block, work, borrowed)) {
    const auto [paced, aligned] = shot.meeting();
    if (paced) shot.walk_paced(block, aligned);
    else walk_free<T, OpOf>(block, work, borrowed, aligned);
  }
  // Whether it went through or stopped, the last thing that touched memory was before a barrier.
  if (block.thread == 0 && shot.count > 0) work.state->rounds[block.index] = shot.base + shot.count;
  leave_together(block, work.state, work.control, false);
}

}  // namespace ossicle
