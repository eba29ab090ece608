// Two-shot all-reduce with zero copy: ranks of one process lend each other their buffers.
//
// A rank may lend its peers its input, which their reduce then reads, so that nothing is scattered to them; and its output,
// which their reduce writes, so that nothing is gathered from them. What is not lent goes through the staging of two_shot.h,
// in its rounds, passes and phases. Ranks decide alone, one buffer at a time; the cut of the data and the bits are the same
// either way. What is lent is said on the device, beside the scatter counter, and published with it in the first pass,
// when nothing has been reduced: so lenders and borrowers may come at different times, and from graphs. The chunks of one
// rank are touched in any rank's buffers by that rank alone, each element read from all before it is written, so that an
// operation may be in place.
//
// A rank that lends both buffers is free of its peers, else paced: a peer waits for its scatter counter in each round, and
// it for the peer's reduce counter. Two slots and no word back are enough:
//   - scatter r overwrites what the peer reduced in round r - 2. That peer published the result of r - 2 afterwards, and
//     this rank, paced, saw it: it waited for it before the barrier that this scatter is behind.
//   - reduce r overwrites what the peer gathered in round r - 2. The peer, paced, published its scatter counter of round r
//     after that gather, in the same pass, and this rank's reduce of round r waited for that.
// A free rank tells and is told only that it began (the first scatter) and that all is reduced (the last reduce). The
// last holds for every pair, and closes the operation:
//   - A lent input is read, and a lent output is complete, before its owner leaves: it waited for all peers' last reduce.
//   - What a rank says it lends stands until then too, so that the next operation may overwrite it: a peer publishes its
//     last reduce after it read that, and reads the next one's after the next publication.
//   - A rank that goes from free to paced, or to a move, finds its slots empty: when it is through, all peers have reduced
//     all that was scattered, and gathered all but the last round. So all reduce counters stand at the number of rounds;
//     scatter counters may be behind it, and never ahead.
// An operation that was stopped is not closed: peers may still be about to read what it lent. So the ones behind it tell
// nobody anything and touch nothing of others (State::stopped).
//
// An end of a rank that lends (src/launch/lending.rs) tells its peers by their stop words which operations it leaves
// unfinished, and waits for the kernels that may be using what it lent. The first block says that its kernel may
// (Control::borrowing), then reads its stop word, then lets all blocks touch what is lent (State::cleared); so whoever has not
// said so stops. A kernel that stops says when it is out (Control::out). On a GPU it stays then until its own rank is aborted,
// so that its stream does not run past the unfinished operation. All of this the kernel does itself, so that replays of
// graphs are no different.
#pragma once
#include "two_shot.h"

namespace ossicle {

// What a block's threads share.
struct Borrowed {
  // What peers lend this rank; null: not lent.
  const void* input[MAX_RANKS];
  void* output[MAX_RANKS];
  uint32_t lends;  // Lends, of this rank
};

// Packs of one source in flight where nobody waits: as many as registers hold, since few blocks must fill the memory.
template <typename T> constexpr uint32_t FREE_PACKS = sizeof(T) == 1 ? 1 : sizeof(T) == 2 ? 3 : 4;

template <typename T, typename Op> struct Direct {
  const TwoShotWork& work;
  Staging staging;
  Rounds rounds;
  Op op;
  Borrowed& borrowed;    // the block's, known from the first wait on
  uint32_t lent;         // Lends, of this rank
  uint64_t count, base;  // rounds of this operation, and of those before it

  OSSICLE_DEVICE static Direct of(const Block& block, const TwoShotWork& work, Borrowed& borrowed, uint32_t lent) {
    constexpr uint64_t N = PACK_ELEMENTS<T>;
    const uint64_t part = ceil_div(ceil_div(work.count, block.blocks), N) * N;
    const uint64_t begin = min_of(part * block.index, work.count);
    const uint64_t end = min_of(begin + part, work.count);
    const Rounds rounds{begin, end, work.slot_bytes / sizeof(T), N, work.ranks};
    const uint64_t base = work.state->rounds[block.index];
    return Direct{work, Staging{work, block.index}, rounds, Op(work.ranks), borrowed, lent, rounds.count(), base};
  }

  OSSICLE_DEVICE const T* input() const { return static_cast<const T*>(work.input); }
  OSSICLE_DEVICE T* output() const { return static_cast<T*>(work.output); }
  OSSICLE_DEVICE static bool is_aligned(const void* a, const void* b) {
    return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) % PACK_BYTES == 0;
  }

  OSSICLE_DEVICE bool lends(Lends which) const { return (lent & which) != 0; }
  // Whether this rank paces itself by its peers, and a peer by this rank: see above.
  OSSICLE_DEVICE bool is_paced() const { return !lends(LENDS_INPUT) || !lends(LENDS_OUTPUT); }
  OSSICLE_DEVICE bool paces(uint32_t peer) const { return !borrowed.input[peer] || !borrowed.output[peer]; }

  OSSICLE_DEVICE void scatter(const Block& block, uint64_t round, uint64_t number) const {
    if (lends(LENDS_INPUT)) return;
    const bool aligned = is_aligned(work.input, nullptr);
    for (uint32_t hop = 1; hop < work.ranks; ++hop) {
      const uint32_t peer = (work.rank + hop) % work.ranks;
      const Rounds::Chunk chunk = rounds.chunk(round, peer);
      T* slot = reinterpret_cast<T*>(staging.slot(Phase::SCATTER, work.rank, peer, number));
      copy<T, Slot::TARGET>(block, input() + chunk.at, slot, chunk.count, aligned);
    }
  }

  OSSICLE_DEVICE void gather(const Block& block, uint64_t round, uint64_t number) const {
    if (lends(LENDS_OUTPUT)) return;
    const bool aligned = is_aligned(work.output, nullptr);
    for (uint32_t hop = 1; hop < work.ranks; ++hop) {
      const uint32_t peer = (work.rank + hop) % work.ranks;
      const Rounds::Chunk chunk = rounds.chunk(round, peer);
      const T* slot = reinterpret_cast<const T*>(staging.slot(Phase::GATHER, peer, work.rank, number));
      copy<T, Slot::SOURCE>(block, slot, output() + chunk.at, chunk.count, aligned);
    }
  }

  // Where one element or pack of this rank's chunk comes from and goes to.
  template <typename V> struct Places {
    const Direct& self;
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
    const Direct& self;
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
      found.paced = found.paced || (rank != work.rank && (is_paced() || paces(rank)));
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
        ok = staging.reached<Site::DIRECT_SCATTERED>(Phase::SCATTER, peer, pass.number + 1, 0, true);
        if (ok && begins) borrow(peer);
      } else if (!first && pass.gathers && (pass.last || is_paced())) {
        ok = staging.reached<Site::DIRECT_REDUCED>(Phase::GATHER, peer, pass.number, 1, true);
      }
    }
    if (begins && block.thread == block.threads - 1) {
      borrowed.input[work.rank] = work.input;
      borrowed.output[work.rank] = work.output;
      ok = may_borrow(block) && ok;
    }
    return ok;
  }

  // One thread of a block, before it touches what peers lend. The first block asks for all of them: the host's words cost a
  // GPU about 1 us, one block after another. Its answer orders nothing: what was loaded from a buffer before it came was
  // still lent then, and stores are never early.
  OSSICLE_DEVICE bool may_borrow(const Block& block) const {
    State* state = work.state;
    const uint64_t number = state->ordinal + 1;
    if (block.index == 0) {
      store_word(&work.control->borrowing, number);
      order_before_loads<Site::DIRECT_BORROWING>();
      if (told_to_stop(work.control, state, true)) return false;
      store_word(&state->cleared, number);
      return true;
    }
    Wait wait = Wait::for_peer(work.control, state, work.rank, block.index, 0, true);
    wait.reported = true;  // if the first block is held up, it is by a peer, and says so
    while (load_word(&state->cleared) < number) {
      if (!wait.again()) return false;
    }
    return true;
  }

  // What `source` lends `owner`: addresses of its input and its output, in the line of the scatter counter.
  OSSICLE_DEVICE uint64_t* said(uint32_t source, uint32_t owner) const {
    return staging.counter(Phase::SCATTER, source, owner) + 1;
  }

  OSSICLE_DEVICE void borrow(uint32_t peer) const {
    const uint64_t* addresses = said(peer, work.rank);
    borrowed.input[peer] = reinterpret_cast<const void*>(slot_load(addresses));
    borrowed.output[peer] = reinterpret_cast<void*>(slot_load(addresses + 1));
  }

  OSSICLE_DEVICE void lend(uint32_t peer) const {
    uint64_t* addresses = said(work.rank, peer);
    slot_store(addresses, lends(LENDS_INPUT) ? seen_by(peer, work.input, work.lent_input) : 0);
    slot_store(addresses + 1, lends(LENDS_OUTPUT) ? seen_by(peer, work.output, work.lent_output) : 0);
  }

  OSSICLE_DEVICE static uint64_t seen_by(uint32_t peer, const void* own, const LentAddress& lent) {
    return lent.bases ? load_word(&lent.bases[peer]) + lent.offset : static_cast<uint64_t>(reinterpret_cast<uintptr_t>(own));
  }

  OSSICLE_DEVICE void tell(const Block& block, const Pass& pass, bool ends) const {
    for (uint32_t i = block.thread; i < 2 * (work.ranks - 1); i += block.threads) {
      const bool first = i < work.ranks - 1;
      const uint32_t peer = (work.rank + 1 + i % (work.ranks - 1)) % work.ranks;
      if (first && pass.scatters && (pass.first || is_paced())) {
        if (pass.first) lend(peer);
        publish<Site::DIRECT_SCATTER>(staging.counter(Phase::SCATTER, work.rank, peer), pass.number + 2);
      } else if (!first && pass.reduces && (ends || paces(peer))) {
        publish<Site::DIRECT_REDUCE>(staging.counter(Phase::GATHER, work.rank, peer), pass.number + 1);
      }
    }
  }

  // In pass p the chunks of round p - 1 are reduced; the first pass only scatters, the last only gathers.
  OSSICLE_DEVICE bool begin(const Block& block) const {
    if (!barrier_and<Site::DIRECT_FIRST>(block, !behind_stopped(work.state))) return false;
    if (!lends(LENDS_INPUT)) {
      scatter(block, 0, base);
      barrier<Site::DIRECT_FILLED>(block);
    }
    tell(block, Pass::of(0, count, base), false);
    return barrier_and<Site::DIRECT_MET>(block, wait(block, Pass::of(1, count, base), true));
  }

  OSSICLE_DEVICE void walk_paced(const Block& block, bool aligned) const {
    for (uint64_t number = 1; number < count + 2; ++number) {
      const Pass pass = Pass::of(number, count, base);
      if (number > 1 && !barrier_and<Site::DIRECT_READY>(block, wait(block, pass, false))) break;
      if (pass.scatters) scatter(block, number, pass.number + 1);
      if (pass.reduces) reduce<STAGED_PACKS<T>, Places>(block, number - 1, pass.number, aligned);
      if (pass.gathers) gather(block, number - 2, pass.number - 1);
      barrier<Site::DIRECT_MOVED>(block);
      tell(block, pass, number == count);
    }
  }

  // Where nothing is staged at this rank or by it, nobody waits between the first pass and the last.
  OSSICLE_DEVICE void walk_free(const Block& block, bool aligned) const {
    for (uint64_t round = 0; round < count; ++round) reduce<FREE_PACKS<T>, LentPlaces>(block, round, base + round, aligned);
    barrier<Site::DIRECT_REDUCED_ALL>(block);
    tell(block, Pass::of(count, count, base), true);
    barrier_and<Site::DIRECT_CLOSED>(block, wait(block, Pass::of(count + 1, count, base), false));
  }
};

template <typename T, template <typename> class OpOf> using DirectOf = Direct<T, OpOf<T>>;

// What this rank lends: of a buffer that peers map, it depends on whether they have, and all of a block go by one answer.
// Blocks may differ.
OSSICLE_DEVICE uint32_t lends_now(const Block& block, const TwoShotWork& work, Borrowed& borrowed) {
  const uint64_t *input = work.lent_input.bases, *output = work.lent_output.bases;
  if (!input && !output) return work.lends;
  if (block.thread == 0) {
    uint32_t lends = work.lends;
    if (input && consume<Site::DIRECT_MAPPED>(&input[work.rank]) == 0) lends &= ~LENDS_INPUT;
    if (output && consume<Site::DIRECT_MAPPED>(&output[work.rank]) == 0) lends &= ~LENDS_OUTPUT;
    borrowed.lends = lends;
  }
  barrier<Site::DIRECT_LENDS>(block);
  return borrowed.lends;
}

// The last block of a launch that was stopped.
OSSICLE_DEVICE void park(const State* state, Control* control) {
  publish<Site::DIRECT_OUT>(&control->out, state->ordinal + 1);
  while (!LOSS_STOPS_ALL && (load_word(&control->stop) & STOP_ABORT) == 0) rest();
}

// The first pass and the way of a free rank, out of line: the registers of one walk are not held during the other.
template <typename T, template <typename> class OpOf>
OSSICLE_APART bool begin_direct(const Block block, const TwoShotWork& work, Borrowed& borrowed, uint32_t lends) {
  return DirectOf<T, OpOf>::of(block, work, borrowed, lends).begin(block);
}

template <typename T, template <typename> class OpOf>
OSSICLE_APART void walk_free(const Block block, const TwoShotWork& work, Borrowed& borrowed, uint32_t lends, bool aligned) {
  DirectOf<T, OpOf>::of(block, work, borrowed, lends).walk_free(block, aligned);
}

// Out of line for the same reason: without zero copy a kernel is as if this were not there.
template <typename T, template <typename> class OpOf>
OSSICLE_APART void two_shot_direct(const Block block, const TwoShotWork& work, Borrowed& borrowed) {
  enter(block, work.state, work.started);
  const uint32_t lends = lends_now(block, work, borrowed);
  const DirectOf<T, OpOf> direct = DirectOf<T, OpOf>::of(block, work, borrowed, lends);
  if (direct.count > 0 && begin_direct<T, OpOf>(block, work, borrowed, lends)) {
    const auto [paced, aligned] = direct.meeting();
    if (paced) direct.walk_paced(block, aligned);
    else walk_free<T, OpOf>(block, work, borrowed, lends, aligned);
  }
  // Whether it went through or stopped, the last thing that touched memory was before a barrier.
  if (block.thread != 0) return;
  if (direct.count > 0) work.state->rounds[block.index] = direct.base + direct.count;
  if (!is_last_block(block, work.state)) return;
  if (behind_stopped(work.state)) park(work.state, work.control);
  end_launch(work.state, work.control, false);
}

// The same on all ranks of a communicator.
template <typename T, template <typename> class OpOf>
OSSICLE_DEVICE void two_shot(const Block& block, const TwoShotWork& work) {
  OSSICLE_BLOCK_MEMORY(Borrowed, borrowed);
  if (work.zero_copy == 0) return two_shot_staged<T, OpOf>(block, work);
  two_shot_direct<T, OpOf>(block, work, borrowed);
}

}  // namespace ossicle
