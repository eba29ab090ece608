// The interpreter: a channel's block walks its plan's steps over links of slots.
//
// A channel owns one contiguous part of the data and walks it in iterations; a chunk fills at most one slot. Every rank
// cuts the data alike, from count, channels and slot size alone. Thread 0 waits for a step's slots, the block moves the
// chunk, thread 0 publishes. A move is a program of bytes that reduces nothing.
#pragma once
#include "../core/element.h"
#include "../protocol/slots.h"
#include "pack.h"

namespace ossicle {

template <typename T, typename Op, bool RECV, bool LOAD>
OSSICLE_DEVICE T combine(T received, T own, const Op& op, bool finish) {
  if (!LOAD) return received;
  wide_t<T> value = op.load(widen(own));
  if (RECV) value = op.reduce(widen(received), value);
  return narrow<T>(finish ? op.finish(value) : value);
}

// The operands of one step over one chunk; null where the step has no such part.
template <typename T> struct Operands {
  const T* received;
  const T* own;
  T* send;
  T* store;
};

template <typename T, typename Op, bool RECV, bool LOAD>
OSSICLE_DEVICE void move_elements(const Block& block, const Operands<T>& o, uint64_t first, uint64_t end, const Op& op,
                                  bool finish) {
#if !defined(__CUDACC__)
#pragma GCC ivdep
#endif
  for (uint64_t i = first + block.thread; i < end; i += block.threads) {
    const T value = combine<T, Op, RECV, LOAD>(RECV ? slot_load(o.received + i) : T{}, LOAD ? o.own[i] : T{}, op, finish);
    if (o.send) slot_store(o.send + i, value);
    if (o.store) slot_store(o.store + i, value);
  }
}

#if defined(__CUDACC__) || defined(OSSICLE_ORDER_MODEL)
// Packs of 16 bytes, several in flight a thread; for buffers that are aligned to a pack. Returns elements moved.
template <typename T, typename Op, bool RECV, bool LOAD>
OSSICLE_DEVICE uint64_t move_packs(const Block& block, const Operands<T>& o, uint64_t count, const Op& op, bool finish) {
  constexpr uint32_t N = PACK_BYTES / sizeof(T);
  // Byte elements unpack into many registers; more in flight would spill.
  constexpr uint32_t UNROLL = sizeof(T) == 1 ? 1 : sizeof(T) == 2 ? 2 : 4;
  const uint64_t packs = count / N;
  for (uint64_t base = block.thread; base < packs; base += UNROLL * block.threads) {
    Pack<T> received[UNROLL], own[UNROLL];
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; ++u) {
      const uint64_t i = base + u * block.threads;
      if (i < packs) {
        if (RECV) received[u] = slot_load(reinterpret_cast<const Pack<T>*>(o.received) + i);
        if (LOAD) own[u] = reinterpret_cast<const Pack<T>*>(o.own)[i];
      }
    }
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; ++u) {
      const uint64_t i = base + u * block.threads;
      if (i < packs) {
        Pack<T> value;
#pragma unroll
        for (uint32_t e = 0; e < N; ++e) {
          value.element[e] = combine<T, Op, RECV, LOAD>(received[u].element[e], own[u].element[e], op, finish);
        }
        if (o.send) slot_store(reinterpret_cast<Pack<T>*>(o.send) + i, value);
        if (o.store) slot_store(reinterpret_cast<Pack<T>*>(o.store) + i, value);
      }
    }
  }
  return packs * N;
}
#endif

template <typename T, typename Op, bool RECV, bool LOAD>
OSSICLE_DEVICE void move_chunk(const Block& block, const Operands<T>& o, uint64_t count, const Op& op, bool finish,
                               bool aligned) {
  uint64_t moved = 0;
#if defined(__CUDACC__) || defined(OSSICLE_ORDER_MODEL)
  if (aligned) moved = move_packs<T, Op, RECV, LOAD>(block, o, count, op, finish);
#else
  (void)aligned;  // the compiler's vectors take unaligned data
#endif
  move_elements<T, Op, RECV, LOAD>(block, o, moved, count, op, finish);
}

// Where a step's elements lie, by their numbers, and how many there are.
struct Place {
  uint64_t input, output, count;
};

// What a channel carries through its program.
template <typename T, typename Op> struct Channel {
  const ProgramWork& work;
  Op op;
  uint32_t index;
  bool aligned;

  OSSICLE_DEVICE bool step(const Block& block, uint32_t number, const Place& place) const {
    const Step& step = work.step[number];
    const bool recv = step.flags & STEP_RECV, load = step.flags & STEP_LOAD;
    const bool send = step.flags & STEP_SEND, store = step.flags & STEP_STORE;
    State* state = work.state;
    const SlotRing from = SlotRing::open(work.recv[step.recv], work, index, state->received[step.recv][index]);
    const SlotRing to = SlotRing::open(work.send[step.send], work, index, state->sent[step.send][index]);
    bool ok = true;
    if (block.thread == 0) {
      ok = (!recv || from.wait_filled(work, index, number)) && (!send || to.wait_free(work, index, number));
    }
    if (!barrier_and<Site::PROGRAM_READY>(block, ok)) return false;
    const Operands<T> operands{reinterpret_cast<const T*>(from.slot()), static_cast<const T*>(work.input) + place.input,
                               send ? reinterpret_cast<T*>(to.slot()) : nullptr,
                               store ? static_cast<T*>(work.output) + place.output : nullptr};
    const bool finish = step.flags & STEP_FINISH;
    if (recv && load) move_chunk<T, Op, true, true>(block, operands, place.count, op, finish, aligned);
    else if (recv) move_chunk<T, Op, true, false>(block, operands, place.count, op, finish, aligned);
    else move_chunk<T, Op, false, true>(block, operands, place.count, op, finish, aligned);
    barrier<Site::PROGRAM_MOVED>(block);
    if (block.thread == 0) {
      if (recv) {
        state->received[step.recv][index] = from.position + 1;
        if (from.queue) net::write_flag(*from.queue, from.position + 1);
        else publish<Site::PROGRAM_HEAD>(from.head, from.position + 1);
      }
      if (send) {
        const Link& link = work.send[step.send];
        const uint32_t bytes = static_cast<uint32_t>(place.count * sizeof(T));
        if (link.kind == LINK_PROXY) to.note(link, index, SlotNote{bytes, number, state->ordinal});
        state->sent[step.send][index] = to.position + 1;
        if (to.queue) {
          net::write_slot(*to.queue, to.offset(), bytes);
          net::write_flag(*to.queue, to.position + 1);
        } else {
          publish<Site::PROGRAM_TAIL>(to.tail, to.position + 1);
        }
      }
      net::post(recv ? from.queue : nullptr, send ? to.queue : nullptr);
    }
    // The next step reads the positions that thread 0 has just written.
    barrier<Site::PROGRAM_POSITIONS>(block);
    return true;
  }
};

template <typename T, template <typename> class OpOf>
OSSICLE_DEVICE void program(const Block& block, const ProgramWork& work) {
  constexpr uint64_t N = PACK_BYTES / sizeof(T);
  enter(block, work.state, work.started);
  const uintptr_t buffers = reinterpret_cast<uintptr_t>(work.input) | reinterpret_cast<uintptr_t>(work.output);
  const bool aligned = (buffers | work.stride * sizeof(T)) % PACK_BYTES == 0;
  const Channel<T, OpOf<T>> channel{work, OpOf<T>(work.ranks), block.index, aligned};
  const uint64_t part = ceil_div(ceil_div(work.count, work.channels), N) * N;
  const uint64_t begin = min_of(part * block.index, work.count);
  const uint64_t end = min_of(begin + part, work.count);
  const uint64_t slot_elements = work.slot_bytes / sizeof(T);
  bool ok = true;
  for (uint64_t at = begin; ok && at < end;) {
    const uint64_t chunk = min_of(slot_elements, ceil_div(ceil_div(end - at, work.chunks), N) * N);
    for (uint32_t s = 0; ok && s < work.steps; ++s) {
      const uint32_t named = work.step[s].chunk;
      const uint64_t first = work.stride ? at : min_of(at + chunk * named, end);
      ok = channel.step(block, s, Place{first, first + work.stride * named, min_of(chunk, end - first)});
    }
    at += chunk * work.chunks;
  }
  // Whether the last step went through or stopped, it ended in a barrier.
  leave_together(block, work.state, work.control, false);
}

}  // namespace ossicle
