// One-shot all-gather and broadcast: who has data sends it as lines to every other rank, which copies what arrives.
//
// Bytes, whatever their type. The area, its parity and its clearing are those of the one-shot all-reduce, and so is the
// ground of their reuse: finishing an epoch means that every rank has started it. In a broadcast only the root has data,
// so every block of every other rank sends all peers one empty line, its note, and they wait for it; else a rank could be
// through two broadcasts before a third one read the first, and write over it. A rank that is not the root has no data
// in its region of an area, so its notes lie there, block b's in line b.
#pragma once
#include "one_shot.h"

namespace ossicle {

template <typename T> struct OneShotMove {
  const OneShotWork& work;
  uint64_t count, lines;  // of one rank's data; elements
  uint64_t parity;
  uint32_t flag, notes;  // notes from each rank that has no data

  OSSICLE_DEVICE bool gathers() const { return work.root == NO_ROOT; }
  OSSICLE_DEVICE bool sends() const { return gathers() || work.root == work.rank; }
  OSSICLE_DEVICE uint32_t peer(uint64_t hop) const { return (work.rank + static_cast<uint32_t>(hop)) % work.ranks; }

  OSSICLE_DEVICE Line* region(uint32_t owner, uint32_t source) const {
    return work.area[owner] + parity + source * static_cast<uint64_t>(work.lines);
  }

  // Where the data of a rank goes.
  OSSICLE_DEVICE T* output(uint32_t source) const { return static_cast<T*>(work.output) + (gathers() ? source * count : 0); }

  OSSICLE_DEVICE void store(uint32_t source, uint64_t line, uint64_t payload) const {
    T* to = output(source);
    const bool aligned = reinterpret_cast<uintptr_t>(to) % LINE_BYTES == 0;
    store_payload(to, line * LINE_ELEMENTS<T>, count, aligned, payload);
  }

  OSSICLE_DEVICE void send(const Block& block) const {
    const T* input = static_cast<const T*>(work.input);
    const bool aligned = reinterpret_cast<uintptr_t>(input) % LINE_BYTES == 0;
    const bool in_place = input == output(work.rank);
    const uint64_t stride = static_cast<uint64_t>(block.blocks) * block.threads;
    for (uint64_t i = static_cast<uint64_t>(block.index) * block.threads + block.thread; i < lines; i += stride) {
      const uint64_t payload = load_payload(input, i * LINE_ELEMENTS<T>, count, aligned);
      for (uint32_t hop = 1; hop < work.ranks; ++hop) store_line(region(peer(hop), work.rank) + i, make_line(payload, flag));
      if (!in_place) store(work.rank, i, payload);
    }
  }

  OSSICLE_DEVICE void send_notes(const Block& block) const {
    for (uint32_t hop = 1 + block.thread; hop < work.ranks; hop += block.threads) {
      store_line(region(peer(hop), work.rank) + block.index, make_line(0, flag));
    }
  }

  // What arrives, counted through: the lines with data, then the notes.
  struct Arrival {
    const Line* line;
    uint32_t source;
    uint32_t index;
    bool data, comes;  // whether it is data, and whether anything comes here
  };

  OSSICLE_DEVICE uint64_t data_lines() const { return gathers() ? lines * (work.ranks - 1) : sends() ? 0 : lines; }

  OSSICLE_DEVICE uint64_t arrivals() const { return data_lines() + static_cast<uint64_t>(notes) * (work.ranks - 1); }

  OSSICLE_DEVICE Arrival arrival(uint64_t number) const {
    const bool data = number < data_lines();
    if (!data) number -= data_lines();
    // There are fewer than 2^32 of them, and divisions of 64 bits are slow.
    const uint32_t each = data ? static_cast<uint32_t>(lines) : notes;
    const uint32_t hop = static_cast<uint32_t>(number) / each;
    const uint32_t index = static_cast<uint32_t>(number) - hop * each;
    const uint32_t source = data && !gathers() ? work.root : peer(1 + hop);
    return Arrival{region(work.rank, source) + index, source, index, data, data || source != work.root};
  }

  OSSICLE_DEVICE bool receive(const Block& block) const {
    constexpr uint32_t AT_ONCE = SOURCES_AT_ONCE;
    const uint64_t stride = static_cast<uint64_t>(block.blocks) * block.threads;
    const uint64_t begin = static_cast<uint64_t>(block.index) * block.threads + block.thread;
    for (uint64_t base = begin; base < arrivals(); base += AT_ONCE * stride) {
      Line line[AT_ONCE];
      for (uint32_t k = 0; k < AT_ONCE; ++k) {
        const uint64_t number = base + k * stride;
        if (number < arrivals()) line[k] = load_line(arrival(number).line);
      }
      for (uint32_t k = 0; k < AT_ONCE; ++k) {
        const uint64_t number = base + k * stride;
        if (number >= arrivals()) break;
        const Arrival from = arrival(number);
        if (!from.comes) continue;
        Wait wait = Wait::for_peer(work.control, work.state, from.source, block.index, from.data ? 0 : 1);
        while (!line_ready(line[k], flag)) {
          if (!wait.again()) return false;
          line[k] = load_line(from.line);
        }
        if (from.data) store(from.source, from.index, line_payload(line[k]));
      }
    }
    return true;
  }
};

template <typename T> OSSICLE_DEVICE void one_shot_move_as(const Block& block, const OneShotWork& work, uint64_t epoch) {
  const uint64_t count = work.count / sizeof(T);
  const uint64_t lines = (work.count + LINE_BYTES - 1) / LINE_BYTES;
  const uint64_t parity = (epoch & 1) * work.ranks * static_cast<uint64_t>(work.lines);
  const uint32_t notes = work.root == NO_ROOT || dropped(Site::BROADCAST_STARTED) ? 0 : block.blocks;
  const OneShotMove<T> move{work, count, lines, parity, line_flag(epoch), notes};
  if (move.sends()) move.send(block);
  else move.send_notes(block);
  move.receive(block);
}

OSSICLE_DEVICE void one_shot_move(const Block& block, const OneShotWork& work) {
  enter(block, work.state, work.started);
  const uint64_t epoch = work.state->ll_epoch;
  if (clear_due(epoch)) clear_coming(block, work, epoch);
  // A rank's own choice: lines look the same either way.
  const bool words = (reinterpret_cast<uintptr_t>(work.input) | reinterpret_cast<uintptr_t>(work.output) | work.count) % 4 == 0;
  if (words) one_shot_move_as<uint32_t>(block, work, epoch);
  else one_shot_move_as<uint8_t>(block, work, epoch);
  leave<Site::ONE_SHOT_MOVE_DONE>(block, work.state, work.control, true);
}

}  // namespace ossicle
