// Litmus tests of the weak memory itself: what it must show sooner or later, and what it must never show.
#pragma once
#include "order_primitives.h"

namespace ossicle::model {

// Words that threads share, and what they read.
struct Cells {
  alignas(128) uint64_t x = 0, y = 0, z = 0;
  uint32_t counter = 0;
  uint64_t read[2] = {0, 0};
};

struct Litmus {
  const char* name;
  // Threads with the block that each belongs to.
  std::vector<std::pair<uint32_t, std::function<void(Cells&)>>> threads;
  bool (*weak)(const Cells&);
  bool allowed;
};

inline void put(uint64_t* word, Kind kind) { memory->store(word, 8, 1, kind); }
inline uint64_t get(const uint64_t* word, Kind kind = Kind::RELAXED) { return memory->load(word, 8, kind); }
inline void await(const uint64_t* word, Kind kind) {
  while (get(word, kind) == 0) pause();
}

inline std::vector<Litmus> litmus_tests() {
  constexpr Kind RELAXED = Kind::RELAXED, ORDERED = Kind::ORDERED;
  const auto write_both = [](Kind kind) {
    return [kind](Cells& c) { put(&c.x, RELAXED), put(&c.y, kind); };
  };
  const auto read_both = [](Kind kind) {
    return [kind](Cells& c) { await(&c.y, kind), c.read[0] = get(&c.x); };
  };
  const auto stale = [](const Cells& c) { return c.read[0] == 0; };
  return {
      {"a message, published and consumed", {{0, write_both(ORDERED)}, {1, read_both(ORDERED)}}, stale, false},
      {"a message, not published", {{0, write_both(RELAXED)}, {1, read_both(ORDERED)}}, stale, true},
      {"a message, not consumed", {{0, write_both(ORDERED)}, {1, read_both(RELAXED)}}, stale, true},
      {"a message between fences",
       {{0, [](Cells& c) { put(&c.x, RELAXED), memory->fence(), put(&c.y, RELAXED); }},
        {1, [](Cells& c) { await(&c.y, RELAXED), memory->fence(), c.read[0] = get(&c.x); }}},
       stale, false},
      {"a message handed on",
       {{0, write_both(ORDERED)},
        {1, [](Cells& c) { await(&c.y, ORDERED), put(&c.z, ORDERED); }},
        {2, [](Cells& c) { await(&c.z, ORDERED), c.read[0] = get(&c.x); }}},
       stale, false},
      {"a message of another thread, behind a barrier",
       {{0, [](Cells& c) { put(&c.x, RELAXED), memory->barrier(true); }},
        {0, [](Cells& c) { memory->barrier(true), put(&c.y, ORDERED); }},
        {1, read_both(ORDERED)}},
       stale, false},
      {"a message of another thread, without a barrier",
       {{0, [](Cells& c) { put(&c.x, RELAXED); }}, {0, [](Cells& c) { put(&c.y, ORDERED); }}, {1, read_both(ORDERED)}},
       stale, true},
      {"consumed by one thread, read by another behind a barrier",
       {{0, write_both(ORDERED)},
        {1, [](Cells& c) { await(&c.y, ORDERED), memory->barrier(true); }},
        {1, [](Cells& c) { memory->barrier(true), c.read[0] = get(&c.x); }}},
       stale, false},
      {"within a block, behind a barrier",
       {{0, [](Cells& c) { put(&c.x, RELAXED), memory->barrier(true); }},
        {0, [](Cells& c) { memory->barrier(true), c.read[0] = get(&c.x); }}},
       stale, false},
      {"a thread's own store", {{0, [](Cells& c) { put(&c.x, RELAXED), c.read[0] = get(&c.x); }}}, stale, false},
      {"one word read twice",
       {{0, [](Cells& c) { put(&c.x, RELAXED); }},
        {1, [](Cells& c) { c.read[0] = get(&c.x), c.read[1] = get(&c.x); }}},
       [](const Cells& c) { return c.read[0] > c.read[1]; }, false},
      {"two stores, each before a load of the other",
       {{0, [](Cells& c) { put(&c.x, ORDERED), c.read[0] = get(&c.y, ORDERED); }},
        {1, [](Cells& c) { put(&c.y, ORDERED), c.read[1] = get(&c.x, ORDERED); }}},
       [](const Cells& c) { return c.read[0] == 0 && c.read[1] == 0; }, true},
      {"two stores, each before a load of the other, with fences in turn between",
       {{0, [](Cells& c) { put(&c.x, RELAXED), memory->fence_in_turn(), c.read[0] = get(&c.y); }},
        {1, [](Cells& c) { put(&c.y, RELAXED), memory->fence_in_turn(), c.read[1] = get(&c.x); }}},
       [](const Cells& c) { return c.read[0] == 0 && c.read[1] == 0; }, false},
      {"two stores, each before a load of the other, with other fences between",
       {{0, [](Cells& c) { put(&c.x, RELAXED), memory->fence(), c.read[0] = get(&c.y); }},
        {1, [](Cells& c) { put(&c.y, RELAXED), memory->fence(), c.read[1] = get(&c.x); }}},
       [](const Cells& c) { return c.read[0] == 0 && c.read[1] == 0; }, true},
      {"a message by an atomic count",
       {{0, [](Cells& c) { put(&c.x, RELAXED), memory->change(&c.counter, ORDERED, [&] { ++c.counter; }); }},
        {1,
         [](Cells& c) {
           for (uint32_t seen = 0; seen == 0; pause()) memory->change(&c.counter, ORDERED, [&] { seen = c.counter; });
           c.read[0] = get(&c.x);
         }}},
       stale, false},
      {"a message by a relaxed atomic count",
       {{0, [](Cells& c) { put(&c.x, RELAXED), memory->change(&c.counter, RELAXED, [&] { ++c.counter; }); }},
        {1,
         [](Cells& c) {
           for (uint32_t seen = 0; seen == 0; pause()) memory->change(&c.counter, ORDERED, [&] { seen = c.counter; });
           c.read[0] = get(&c.x);
         }}},
       stale, true},
  };
}

inline bool shows_weak(const Litmus& test, uint64_t number) {
  Memory model;
  memory = &model;
  model.schedule.random = Random{number};
  Cells cells;
  for (uint32_t t = 0; t < test.threads.size(); ++t) {
    const auto& [block, body] = test.threads[t];
    while (model.buffers() <= block) model.add_buffer();
    Buffer* buffer = model.buffer(block);
    ++buffer->threads;
    model.agents[t].rank = block;
    model.agents[t].buffer = buffer;
    model.schedule.start(t, [&cells, &body = body] { body(cells); });
  }
  model.schedule.run();
  return test.weak(cells);
}

// Whether every test shows what it must and nothing else.
inline bool litmus_passes() {
  constexpr uint32_t SEEDS = 500;
  bool passes = true;
  for (const Litmus& test : litmus_tests()) {
    uint32_t weak = 0;
    for (seed = 0; seed < SEEDS; ++seed) weak += shows_weak(test, seed);
    const bool right = test.allowed == (weak > 0);
    printf("%s: weak in %u of %u runs, %s\n", test.name, weak, SEEDS, right ? "as it must be" : "WRONG");
    passes = passes && right;
  }
  return passes;
}

}  // namespace ossicle::model
