// LL lines: eight payload bytes with their flag in the same 8-byte stores, so that data needs no second message.
//
// half[i] = flag << 32 | payload word i. A flag is never 0 (fresh memory) and differs from whatever an older operation
// can have left in the line: see clear_due.
#pragma once
#include "../core/element.h"
#include "../core/wait.h"

namespace ossicle {

constexpr uint32_t LINE_BYTES = 8;

// The flag of an epoch: 1 to 2^32 - 1, then again from 1.
OSSICLE_DEVICE uint32_t line_flag(uint64_t epoch) { return static_cast<uint32_t>(epoch % 0xffffffffu) + 1; }

// A line that a long operation wrote may lie untouched under shorter ones until its flag comes round again. Twice in
// 2^30 epochs, once for each parity, the area of the coming epoch is zeroed, long before any flag repeats.
constexpr uint64_t CLEAR_PERIOD = 1ull << 30;
OSSICLE_DEVICE bool clear_due(uint64_t epoch) { return epoch % CLEAR_PERIOD >= CLEAR_PERIOD - 2; }

template <typename T> constexpr uint32_t LINE_ELEMENTS = LINE_BYTES / sizeof(T);

OSSICLE_DEVICE Line make_line(uint64_t payload, uint32_t flag) {
  const uint64_t high = static_cast<uint64_t>(flag) << 32;
  return Line{{high | (payload & 0xffffffffu), high | payload >> 32}};
}

OSSICLE_DEVICE bool line_ready(const Line& line, uint32_t flag) {
  return static_cast<uint32_t>(line.half[0] >> 32) == flag && static_cast<uint32_t>(line.half[1] >> 32) == flag;
}

OSSICLE_DEVICE uint64_t line_payload(const Line& line) { return (line.half[0] & 0xffffffffu) | line.half[1] << 32; }

// Elements [first, first + LINE_ELEMENTS) of a buffer of `count`, as a payload; what lies past the end is zero.
template <typename T>
OSSICLE_DEVICE uint64_t load_payload(const T* data, uint64_t first, uint64_t count, bool aligned) {
  constexpr uint32_t N = LINE_ELEMENTS<T>;
  if (aligned && first + N <= count) return *reinterpret_cast<const uint64_t*>(data + first);
  union { uint64_t payload; T element[N]; } line = {0};
  for (uint32_t i = 0; i < N; ++i) {
    if (first + i < count) line.element[i] = data[first + i];
  }
  return line.payload;
}

template <typename T>
OSSICLE_DEVICE void store_payload(T* data, uint64_t first, uint64_t count, bool aligned, uint64_t payload) {
  constexpr uint32_t N = LINE_ELEMENTS<T>;
  if (aligned && first + N <= count) {
    slot_store(reinterpret_cast<uint64_t*>(data + first), payload);
    return;
  }
  union { uint64_t payload; T element[N]; } line = {payload};
  for (uint32_t i = 0; i < N; ++i) {
    if (first + i < count) slot_store(data + first + i, line.element[i]);
  }
}

}  // namespace ossicle
