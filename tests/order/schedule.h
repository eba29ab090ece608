// A seeded scheduler: threads of blocks, and the ranks' hosts, as coroutines of one thread.
//
// Every primitive of cuda/core may hand over to another coroutine, chosen by the seed, so a run is the same every time
// and a failing seed is a bug report. A hang is found by counting: nothing changes any more, however long all poll.
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>
#include <unistd.h>
#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

namespace ossicle::model {

struct Random {
  uint64_t state;
  uint64_t next() {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>(next() % bound); }
  bool one_in(uint32_t n) { return below(n) == 0; }
};

// What a run found, if anything; the first finding ends the program, since coroutines cannot be unwound.
inline uint64_t seed = 0;
[[noreturn]] inline void found(const char* what) {
  printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), what);
  fflush(stdout);
  _exit(1);
}

struct Coroutine {
  std::function<void()> body;
  // Where it begins; from then on where it left off, since a jump needs no system call.
  ucontext_t begin;
  jmp_buf left_off;
  uint64_t sleeps_until = 0;
  bool begun = false, blocked = false, finished = true, slow = false;
};

class Schedule {
 public:
  Random random{0};
  // One in so many primitives hands over; one in so many of those sleeps. Drawn anew for each seed.
  uint32_t switch_rate = 4, sleep_rate = 64;
  uint64_t steps = 0;
  // Runs between two coroutines: stores drain.
  std::function<void()> between;

  explicit Schedule(uint32_t coroutines) : coroutines_(coroutines) {
    // Runs follow each other and leave no coroutine behind.
    while (stacks.size() < coroutines) stacks.emplace_back(new char[STACK_BYTES]);
  }

  void start(uint32_t id, std::function<void()> body) {
    Coroutine& c = coroutines_[id];
    started_ = std::max(started_, id + 1);
    c.body = std::move(body);
    c.begun = c.finished = c.blocked = false;
    c.sleeps_until = 0;
    getcontext(&c.begin);
    c.begin.uc_stack.ss_sp = stacks[id].get();
    c.begin.uc_stack.ss_size = STACK_BYTES;
    c.begin.uc_link = nullptr;
    makecontext(&c.begin, &Schedule::enter, 0);
    progress();
  }

  // To the end of all coroutines.
  void run() {
    std::vector<uint32_t> ready;
    for (;;) {
      ++steps;
      ready.clear();
      bool sleeping = false, alive = false;
      for (uint32_t id = 0; id < started_; ++id) {
        const Coroutine& c = coroutines_[id];
        alive |= !c.finished;
        if (c.finished || c.blocked) continue;
        if (c.sleeps_until > steps) sleeping = true;
        else ready.push_back(id);
      }
      if (!alive) return;
      between();
      if (steps - progressed_ > STEPS_TO_HANG || (ready.empty() && !sleeping)) found("a hang: nothing changes any more");
      if (ready.empty()) continue;
      current_ = ready[random.below(static_cast<uint32_t>(ready.size()))];
      if (coroutines_[current_].slow && !random.one_in(SLOWNESS)) continue;
      resume(coroutines_[current_]);
    }
  }

  // Makes a coroutine lag far behind the others, over whole operations.
  void slow_down(uint32_t id) { coroutines_[id].slow = true; }
  uint32_t current() const { return current_; }
  bool finished(uint32_t id) const { return coroutines_[id].finished; }
  void progress() { progressed_ = steps; }
  void sleep(uint64_t for_steps) {
    coroutines_[current_].sleeps_until = steps + for_steps;
    yield();
  }
  void yield() {
    if (_setjmp(coroutines_[current_].left_off) == 0) _longjmp(main_, 1);
  }
  void maybe_yield() {
    if (!random.one_in(switch_rate)) return;
    if (random.one_in(sleep_rate)) sleep(random.below(400));
    else yield();
  }
  // Until another coroutine wakes this one.
  void block() {
    coroutines_[current_].blocked = true;
    yield();
  }
  void wake(uint32_t id) { coroutines_[id].blocked = false; }

 private:
  static constexpr size_t STACK_BYTES = 128 << 10;
  static constexpr uint32_t SLOWNESS = 64;
  // Long enough for the slowest to poll often, and for any store to drain.
  static constexpr uint64_t STEPS_TO_HANG = 200000;

  static void enter() {
    Coroutine& c = self->coroutines_[self->current_];
    c.body();
    c.finished = true;
    self->progress();
    _longjmp(self->main_, 1);
  }

  void resume(Coroutine& c) {
    self = this;
    if (_setjmp(main_) != 0) return;
    if (c.begun) _longjmp(c.left_off, 1);
    c.begun = true;
    setcontext(&c.begin);
  }

  static inline Schedule* self = nullptr;
  static inline std::vector<std::unique_ptr<char[]>> stacks;
  std::vector<Coroutine> coroutines_;
  jmp_buf main_;
  uint32_t current_ = 0, started_ = 0;
  uint64_t progressed_ = 0;
};

}  // namespace ossicle::model
