// The primitives of cuda/core over the weak memory of memory_model.h; cuda/core/memory.h includes this in place of its
// own where OSSICLE_ORDER_MODEL is defined. What a dropped site becomes is the same there and here.
#pragma once
#include "core/block.h"
#include "memory_model.h"

namespace ossicle {

namespace model {
using Kind = Memory::Kind;
inline Kind kind_at(Site site) { return dropped(site) ? Kind::RELAXED : Kind::ORDERED; }
inline void pause() { memory->schedule.yield(); }

// Memory of the block that the running thread belongs to. Barriers order it; a wrong one shows as what an earlier
// operation or nobody wrote there.
template <typename T> T& block_memory() {
  static_assert(sizeof(T) <= sizeof(Buffer::memory), "more than a block has");
  return *reinterpret_cast<T*>(memory->me().buffer->memory);
}
}  // namespace model

template <Site SITE> void barrier(const Block&) {
  if (!dropped(SITE)) model::memory->barrier(true);
}

template <Site SITE> bool barrier_and(const Block&, bool ok) { return dropped(SITE) ? ok : model::memory->barrier(ok); }

// Larger than a word: words that drain apart.
template <typename T> T slot_load(const T* from) {
  constexpr uint32_t BYTES = sizeof(T) < 8 ? sizeof(T) : 8;
  T value;
  for (uint32_t at = 0; at < sizeof(T); at += BYTES) {
    const uint64_t word = model::memory->load(reinterpret_cast<const char*>(from) + at, BYTES, model::Kind::PAYLOAD);
    memcpy(reinterpret_cast<char*>(&value) + at, &word, BYTES);
  }
  return value;
}

template <typename T> void slot_store(T* to, const T& value) {
  constexpr uint32_t BYTES = sizeof(T) < 8 ? sizeof(T) : 8;
  for (uint32_t at = 0; at < sizeof(T); at += BYTES) {
    uint64_t word = 0;
    memcpy(&word, reinterpret_cast<const char*>(&value) + at, BYTES);
    model::memory->store(reinterpret_cast<char*>(to) + at, BYTES, word, model::Kind::PAYLOAD);
  }
}

template <Site SITE> void publish(uint64_t* flag, uint64_t value) {
  model::memory->store(flag, 8, value, model::kind_at(SITE));
}

template <Site SITE> uint64_t consume(const uint64_t* flag) { return model::memory->load(flag, 8, model::kind_at(SITE)); }

inline void slot_store_whole(uint64_t* to, uint64_t value) { model::memory->store(to, 8, value, model::Kind::PAYLOAD); }

template <Site SITE> void publish(uint32_t* flag, uint32_t value) {
  model::memory->store(flag, 4, value, model::kind_at(SITE));
}

template <Site SITE> uint32_t consume(const uint32_t* flag) {
  return uint32_t(model::memory->load(flag, 4, model::kind_at(SITE)));
}

inline uint32_t load_word(const uint32_t* word) {
  model::memory->schedule.maybe_yield();
  return *static_cast<const volatile uint32_t*>(word);
}

inline void store_word(uint32_t* word, uint32_t value) { *static_cast<volatile uint32_t*>(word) = value; }
inline uint64_t load_word(const uint64_t* word) { return model::memory->load(word, 8, model::Kind::RELAXED); }
inline void store_word(uint64_t* word, uint64_t value) { model::memory->store(word, 8, value, model::Kind::RELAXED); }

inline Line load_line(const Line* line) {
  Line value;
  for (uint32_t i = 0; i < 2; ++i) value.half[i] = model::memory->load(&line->half[i], 8, model::Kind::RELAXED);
  return value;
}

inline void store_line(Line* line, const Line& value) {
  for (uint32_t i = 0; i < 2; ++i) model::memory->store(&line->half[i], 8, value.half[i], model::Kind::RELAXED);
}

template <Site SITE> void order_before_lines() {
  if (!dropped(SITE)) model::memory->fence();
}

template <Site SITE> void order_before_loads() {
  if (!dropped(SITE)) model::memory->fence_in_turn();
}

template <Site SITE> uint32_t arrive(uint32_t* counter) {
  uint32_t before = 0;
  model::memory->change(counter, model::kind_at(SITE), [&] { before = (*counter)++; });
  return before;
}

template <Site SITE> uint64_t fetch_add(uint64_t* word, uint64_t value) {
  uint64_t before = 0;
  model::memory->change(word, model::kind_at(SITE), [&] {
    before = *word;
    *word += value;
  });
  return before;
}

inline bool take(uint32_t* counter, uint32_t expected, uint32_t desired) {
  bool taken = false;
  model::memory->change(counter, model::Kind::RELAXED, [&] {
    taken = *counter == expected;
    if (taken) *counter = desired;
  });
  return taken;
}

inline uint64_t exchange(uint64_t* word, uint64_t value) {
  uint64_t before = 0;
  model::memory->change(word, model::Kind::RELAXED, [&] {
    before = *word;
    *word = value;
  });
  return before;
}

// A microsecond a scheduling step.
inline uint64_t clock_ns() { return model::memory->schedule.steps * 1000; }

}  // namespace ossicle
