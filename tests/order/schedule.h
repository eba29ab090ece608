// A seeded scheduler: threads of blocks, and the ranks' hosts, as coroutines of one thread.
//
// Every primitive of cuda/core may hand over to another coroutine, chosen by the seed, so a run is the same every time
// and a failing seed is a bug report. A hang is found by counting: nothing changes any more, however long all poll.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>
#include <unistd.h>
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
  std::unique_ptr<char[]> stack;
  ucontext_t context;
  uint64_t sleeps_until = 0;
  bool blocked = false, finished = true;
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
    for (auto& c : coroutines_) c.stack.reset(new char[STACK_BYTES]);
  }

  void start(uint32_t id, std::function<void()> body) {
    Coroutine& c = coroutines_[id];
    c.body = std::move(body);
    c.finished = c.blocked = false;
    c.sleeps_until = 0;
    getcontext(&c.context);
    c.context.uc_stack.ss_sp = c.stack.get();
    c.context.uc_stack.ss_size = STACK_BYTES;
    c.context.uc_link = &main_;
    makecontext(&c.context, reinterpret_cast<void (*)()>(&Schedule::enter), 0);
    progress();
  }

  // To the end of all coroutines.
  void run() {
    std::vector<uint32_t> ready;
    for (;;) {
      ++steps;
      ready.clear();
      bool sleeping = false, alive = false;
      for (uint32_t id = 0; id < coroutines_.size(); ++id) {
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
      self = this;
      swapcontext(&main_, &coroutines_[current_].context);
    }
  }

  uint32_t current() const { return current_; }
  bool finished(uint32_t id) const { return coroutines_[id].finished; }
  void progress() { progressed_ = steps; }
  void sleep(uint64_t for_steps) {
    coroutines_[current_].sleeps_until = steps + for_steps;
    yield();
  }
  void yield() { swapcontext(&coroutines_[current_].context, &main_); }
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
  // Above the longest sleep, and long enough for any store to drain.
  static constexpr uint64_t STEPS_TO_HANG = 20000;

  static void enter() {
    Coroutine& c = self->coroutines_[self->current_];
    c.body();
    c.finished = true;
    self->progress();
  }

  static inline Schedule* self = nullptr;
  std::vector<Coroutine> coroutines_;
  ucontext_t main_;
  uint32_t current_ = 0;
  uint64_t progressed_ = 0;
};

}  // namespace ossicle::model
