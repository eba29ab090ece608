// Memory order, as named primitives; algorithms never write a bare fence.
//
// What moves: payload goes through slots and lines that other blocks, devices or processes write. Who may read it is
// said by flags. The rules:
//   - publish(flag, v): everything that this thread wrote, or that its block wrote before the last barrier, is visible
//     to whoever consumes v. consume(flag): what was published before v may be read from here on, by this thread and,
//     after a barrier, by its block. Both are `.sys`: between processes and devices nothing narrower is allowed.
//   - A line carries flag and data in one 8-byte store, so it needs neither: load_line and store_line are relaxed.
//   - Payload that another thread, block or rank reads or writes meanwhile goes through slot_load and slot_store: slots,
//     staging areas, fault records, outputs. They are plain accesses, as wide as their type. Slot memory is never read
//     through ld.nc, __ldg or const __restrict__: it changes while the kernel runs.
//   - Reading counts too: before a place may be written again, its readers publish that they are done (a head, or the
//     end of an operation), and the writer consumes that.
//   - Between blocks of one kernel launch on one device `.gpu` is enough (arrive).
//   - Each publish, consume, barrier, fence and arrival names its site: publish<Site::X>(flag, v). What nobody misses
//     when it is dropped (ci/mutate) is taken out.
// The proof of order (tests/order/) puts a weak memory behind these same primitives: OSSICLE_ORDER_MODEL.
#pragma once
#include "../layout.h"
#include "block.h"
#if defined(OSSICLE_ORDER_MODEL)
#include "order_primitives.h"
#else

namespace ossicle {

// Payload that others read or write while a kernel runs: slots, staging areas, and outputs, which the host may read as
// soon as the launch has left.
template <typename T> OSSICLE_DEVICE T slot_load(const T* from) { return *from; }
template <typename T> OSSICLE_DEVICE void slot_store(T* to, const T& value) { *to = value; }

// The same in a word that others may poll, such as half a line: it is never torn.
OSSICLE_DEVICE void slot_store_whole(uint64_t* to, uint64_t value) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
#else
  __atomic_store_n(to, value, __ATOMIC_RELAXED);
#endif
}

template <Site SITE> OSSICLE_DEVICE void publish(uint64_t* flag, uint64_t value) {
#if defined(__CUDACC__)
  if (dropped(SITE)) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
    return;
  }
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
#else
  __atomic_store_n(flag, value, dropped(SITE) ? __ATOMIC_RELAXED : __ATOMIC_RELEASE);
#endif
}

template <Site SITE> OSSICLE_DEVICE uint64_t consume(const uint64_t* flag) {
#if defined(__CUDACC__)
  uint64_t value;
  if (dropped(SITE)) {
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
  }
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
#else
  return __atomic_load_n(flag, dropped(SITE) ? __ATOMIC_RELAXED : __ATOMIC_ACQUIRE);
#endif
}

// The same for the words of four bytes that a NIC's queues have.
template <Site SITE> OSSICLE_DEVICE void publish(uint32_t* flag, uint32_t value) {
#if defined(__CUDACC__)
  if (dropped(SITE)) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
    return;
  }
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
#else
  __atomic_store_n(flag, value, dropped(SITE) ? __ATOMIC_RELAXED : __ATOMIC_RELEASE);
#endif
}

template <Site SITE> OSSICLE_DEVICE uint32_t consume(const uint32_t* flag) {
#if defined(__CUDACC__)
  uint32_t value;
  if (dropped(SITE)) {
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
  }
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
#else
  return __atomic_load_n(flag, dropped(SITE) ? __ATOMIC_RELAXED : __ATOMIC_ACQUIRE);
#endif
}

// A word that the host changes while kernels run.
OSSICLE_DEVICE uint32_t load_word(const uint32_t* word) {
#if defined(__CUDACC__)
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

OSSICLE_DEVICE uint64_t load_word(const uint64_t* word) {
#if defined(__CUDACC__)
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

// Tells others a number and nothing else: it orders no other memory, for the compiler neither.
OSSICLE_DEVICE void store_word(uint64_t* word, uint64_t value) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value));
#else
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

OSSICLE_DEVICE void store_word(uint32_t* word, uint32_t value) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value));
#else
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

OSSICLE_DEVICE Line load_line(const Line* line) {
  Line value;
#if defined(__CUDACC__)
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(value.half[0]), "=l"(value.half[1]) : "l"(line) : "memory");
#else
  value.half[0] = __atomic_load_n(&line->half[0], __ATOMIC_RELAXED);
  value.half[1] = __atomic_load_n(&line->half[1], __ATOMIC_RELAXED);
#endif
  return value;
}

OSSICLE_DEVICE void store_line(Line* line, const Line& value) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(line), "l"(value.half[0]), "l"(value.half[1]) : "memory");
#else
  __atomic_store_n(&line->half[0], value.half[0], __ATOMIC_RELAXED);
  __atomic_store_n(&line->half[1], value.half[1], __ATOMIC_RELAXED);
#endif
}

// What this thread wrote so far is visible before any line or word that it stores from here on.
template <Site SITE> OSSICLE_DEVICE void order_before_lines() {
  if (dropped(SITE)) return;
#if defined(__CUDACC__)
  __threadfence_system();
#else
  __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

// Of two that each store a word, call this, and load the other's word, at least one sees the other's. The host has the like.
template <Site SITE> OSSICLE_DEVICE void order_before_loads() {
  if (dropped(SITE)) return;
#if defined(__CUDACC__)
  asm volatile("fence.sc.sys;" ::: "memory");
#else
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

// Counts a block of this launch; returns how many came before.
template <Site SITE> OSSICLE_DEVICE uint32_t arrive(uint32_t* counter) {
#if defined(__CUDACC__)
  uint32_t before;
  if (dropped(SITE)) {
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
  }
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
#else
  return __atomic_fetch_add(counter, 1, dropped(SITE) ? __ATOMIC_RELAXED : __ATOMIC_ACQ_REL);
#endif
}

// Adds to a word that other devices and processes may be adding to; returns what it was.
template <Site SITE> OSSICLE_DEVICE uint64_t fetch_add(uint64_t* word, uint64_t value) {
#if defined(__CUDACC__)
  uint64_t before;
  if (dropped(SITE)) {
    asm volatile("atom.relaxed.sys.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
    return before;
  }
  asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
  return before;
#else
  return __atomic_fetch_add(word, value, dropped(SITE) ? __ATOMIC_RELAXED : __ATOMIC_ACQ_REL);
#endif
}

// Takes a place by moving a counter that others move too; whether it was still `expected`. It orders nothing else.
OSSICLE_DEVICE bool take(uint32_t* counter, uint32_t expected, uint32_t desired) {
#if defined(__CUDACC__)
  uint32_t before;
  asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;" : "=r"(before) : "l"(counter), "r"(expected), "r"(desired) : "memory");
  return before == expected;
#else
  return __atomic_compare_exchange_n(counter, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
#endif
}

// Puts `value` in place of the old one and returns that.
OSSICLE_DEVICE uint64_t exchange(uint64_t* word, uint64_t value) {
#if defined(__CUDACC__)
  return atomicExch(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
#else
  return __atomic_exchange_n(word, value, __ATOMIC_RELAXED);
#endif
}

}  // namespace ossicle
#endif

namespace ossicle {

// The beginning of a block's part in a launch: the first block tells whoever may wait for this rank that the operation
// has started, by the number of operations that have. Its last thread does it, whose warp is not the one that polls.
OSSICLE_DEVICE void enter(const Block& block, const State* state, uint64_t* started) {
  if (block.index == 0 && block.thread == block.threads - 1) store_word(started, state->ordinal + 1);
}

// A count that only the CPU reads, to give memory back later. A GPU does not fence for it, since a release to host memory
// holds up the end of every kernel by about 1 us. So by the letter of the memory model a last store of the kernel could
// land after the count; what makes it safe is time: memory is given back at the end of a communicator, and its next
// holder begins with a memset, which the driver launches microseconds after the CPU has read the count over the bus.
template <Site SITE> OSSICLE_DEVICE void tell_host(uint64_t* count, uint64_t value) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(count), "l"(value) : "memory");
#else
  publish<SITE>(count, value);
#endif
}

// Whether this is the last block of a launch, in its first thread, that is done. Every block has read the counters of
// State before it arrives.
OSSICLE_DEVICE bool is_last_block(const Block& block, State* state) {
  if (block.blocks == 1) return true;
  if (arrive<Site::LEAVE_ARRIVE>(&state->arrivals) + 1 < block.blocks) return false;
  state->arrivals = 0;
  return true;
}

// The end of a launch, by that thread: advances the operation's number, and the line epoch if the launch used lines, and
// tells the host that nothing of this launch touches memory any more.
OSSICLE_DEVICE void end_launch(State* state, Control* control, bool used_lines) {
  const uint64_t left = state->ordinal + 1;
  state->ordinal = left;
  if (used_lines) state->ll_epoch += 1;
  tell_host<Site::LEAVE_LEFT>(&control->left, left);
}

// The end of a block's part in a launch, on every path, for a block whose threads passed a barrier after they last
// touched memory.
OSSICLE_DEVICE void leave_together(const Block& block, State* state, Control* control, bool used_lines) {
  if (block.thread == 0 && is_last_block(block, state)) end_launch(state, control, used_lines);
}

// The same for a block whose threads come one by one.
template <Site SITE>
OSSICLE_DEVICE void leave(const Block& block, State* state, Control* control, bool used_lines) {
  barrier<SITE>(block);
  leave_together(block, state, control, used_lines);
}

}  // namespace ossicle
