// The one wait primitive.
//
// A wait ends with the value or with the stop word. Whoever waits constructs a Wait that says for whom (operation,
// peer, channel, step) and asks `again()` after every poll that failed; false means: stop, give up the operation.
//
//   Wait wait = Wait::for_peer(control, state, peer, channel, step);
//   while (consume<Site::X>(flag) < wanted) if (!wait.again()) return false;
//
// The stop word lies in host memory, where a load costs the GPU about 1.1 us: it is read every POLLS_A_CHECK polls,
// and so is the clock. A wait that passes the clock bound writes one fault record an operation, so that a hang has a
// name, and goes on (or parks until it is stopped, if the host asked for that); it never lets a stream run past an
// unfinished collective. A work request that failed is recorded apart from that, once for good, and always parks.
#pragma once
#include "memory.h"
#if !defined(__CUDACC__) && !defined(OSSICLE_ORDER_MODEL)
#include <sched.h>
#include <time.h>
#endif

namespace ossicle {

#if !defined(OSSICLE_ORDER_MODEL)
OSSICLE_DEVICE uint64_t clock_ns() {
#if defined(__CUDACC__)
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
#endif
}
#endif

// Whether an operation of this rank before the running one was stopped. Nothing that the ranks know of each other's
// staging holds behind it, so a kernel that would write there before its first wait asks this first.
OSSICLE_DEVICE bool behind_stopped(const State* state) { return load_word(&state->stopped) != 0; }

// Only a kernel that can hold up its stream afterwards may leave an operation because a peer is lost, since a stream must not
// run past an unfinished collective; on the host device, where there is no such stream, every kernel does.
#if defined(__CUDACC__) || defined(OSSICLE_ORDER_MODEL)
constexpr bool LOSS_STOPS_ALL = false;
#else
constexpr bool LOSS_STOPS_ALL = true;
#endif

// Whether a kernel must give up its operation; `parks`: it can hold up its stream. Kernels that are queued behind a stopped
// one still run, see behind_stopped.
OSSICLE_DEVICE bool told_to_stop(const Control* control, State* state, bool parks) {
  const uint64_t stop = load_word(&control->stop);
  if (stop == STOP_NONE) return false;
  const bool lost = (parks || LOSS_STOPS_ALL) && (stop & STOP_PEER_LOST) != 0 && state->ordinal >= stop >> STOP_FROM_SHIFT;
  if ((stop & STOP_ABORT) == 0 && !lost) return false;
  store_word(&state->stopped, 1u);
  return true;
}

// Between two polls of a word that may stay as it is for long.
OSSICLE_DEVICE void rest() {
#if defined(__CUDACC__)
  __nanosleep(2000);
#elif defined(OSSICLE_ORDER_MODEL)
  model::pause();
#else
  constexpr long NAP_NS = 100000;
  const timespec nap{0, NAP_NS};
  nanosleep(&nap, nullptr);
#endif
}

struct Wait {
  Control* control;
  State* state;
  uint32_t peer, channel, step;
  uint32_t polls;
  uint64_t since_ns;
  bool reported, late;
  bool parks;  // see told_to_stop

#if defined(__CUDACC__)
  static constexpr uint32_t POLLS_A_CHECK = 1024;
#elif defined(OSSICLE_ORDER_MODEL)
  static constexpr uint32_t POLLS_A_CHECK = 4;
#else
  // On the host the stop word is an ordinary cached load.
  static constexpr uint32_t POLLS_A_CHECK = 64;
#endif

  OSSICLE_DEVICE static Wait for_peer(Control* control, State* state, uint32_t peer, uint32_t channel, uint32_t step,
                                      bool parks = false) {
    return Wait{control, state, peer, channel, step, 0, 0, false, false, parks};
  }

  OSSICLE_DEVICE bool again() {
    if (++polls % POLLS_A_CHECK == 0 && !check()) return false;
    pace();
    return true;
  }

  // Out of line on purpose: it runs once in POLLS_A_CHECK polls.
#if defined(__CUDACC__)
  __device__ __noinline__
#endif
      bool check() {
    if (told_to_stop(control, state, parks)) return false;
    const uint64_t now = clock_ns();
    if (since_ns == 0) since_ns = now;
    late = now - since_ns > YIELD_NS;
    const uint64_t bound = control->report_after_ns;
    if (bound == 0 || reported || now - since_ns < bound) return true;
    reported = true;
    report(now - since_ns);
    return !control->park_after_report || park();
  }

  // Whether the stop word has just been looked at. Who waits for more than one thing looks at the others then too.
  OSSICLE_DEVICE bool due() const { return polls % POLLS_A_CHECK == 0; }

  // Until it is stopped.
  OSSICLE_DEVICE bool park() {
    while (!told_to_stop(control, state, parks)) rest();
    return false;
  }

  // Whether a work request of this rank failed, by any of its kernels; see fail.
  OSSICLE_DEVICE bool failed() const { return load_word(&state->failed) != 0; }

  // A work request to `of` failed: says so, the first of the rank that does, and parks.
  OSSICLE_DEVICE bool fail(uint32_t of, uint32_t vendor) {
    if (take(&state->failed, 0, 1)) write(control->failure, FAULT_COMPLETION, of, vendor, 0);
    return park();
  }

  OSSICLE_DEVICE void report(uint64_t waited_ns) {
    const uint64_t ordinal = state->ordinal;
    if (exchange(&state->fault_claim, ordinal + 1) == ordinal + 1) return;
    write(control->fault, FAULT_LATE, peer, 0, waited_ns);
  }

  OSSICLE_DEVICE void write(FaultRecord& fault, FaultCause cause, uint32_t of, uint32_t vendor, uint64_t waited_ns) {
    const uint64_t ordinal = state->ordinal;
    slot_store(&fault.ordinal, ordinal);
    slot_store(&fault.waited_ns, waited_ns);
    const uint64_t* started = control->started[of];
    slot_store(&fault.peer_started, started ? load_word(started) : STARTED_UNKNOWN);
    slot_store(&fault.cause, static_cast<uint32_t>(cause));
    slot_store(&fault.peer, of);
    slot_store(&fault.channel, channel);
    slot_store(&fault.step, step);
    slot_store(&fault.vendor, vendor);
    publish<Site::FAULT_SEQUENCE>(&fault.sequence, ordinal + 1);
  }

  // A host wait pauses at most 64 times before it first yields (more spoils every other rank as soon as threads
  // outnumber cores), yields for some milliseconds, then sleeps, so that a rank that waits for a late peer costs
  // little.
  OSSICLE_DEVICE void pace() {
#if defined(OSSICLE_ORDER_MODEL)
    model::pause();
#elif !defined(__CUDACC__)
    if (polls > POLLS_BEFORE_YIELD) {
      late ? rest() : static_cast<void>(sched_yield());
      return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
#endif
  }

  static constexpr uint32_t POLLS_BEFORE_YIELD = 64;
  static constexpr uint64_t YIELD_NS = 5000000;
};

}  // namespace ossicle
