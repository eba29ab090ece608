// How a block moves and reduces elements: in packs of 16 bytes where the buffers allow it, else one by one.
#pragma once
#include "../core/element.h"
#include "../core/memory.h"

namespace ossicle {

// Chunk borders fall on multiples of this many bytes, so that slots and aligned buffers are moved in packs.
constexpr uint64_t PACK_BYTES = 16;

OSSICLE_DEVICE uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
OSSICLE_DEVICE uint64_t min_of(uint64_t a, uint64_t b) { return a < b ? a : b; }

template <typename T> constexpr uint64_t PACK_ELEMENTS = PACK_BYTES / sizeof(T);

template <typename T> struct alignas(16) Pack {
  T element[PACK_ELEMENTS<T>];
};

// Which side of a copy is a slot. The slots of all links fit into the L2 cache, and stay there if the user's buffers,
// which are passed over once, do not drive them out: a sixth of the time of 2 ranks with 128 MiB on one H200.
enum class Slot { SOURCE, TARGET };

#if defined(__CUDACC__) || defined(OSSICLE_ORDER_MODEL)
// A pack as it moves, whatever its elements are.
#if defined(__CUDACC__)
using Bits = uint4;
OSSICLE_DEVICE Bits load_bits(const Bits* from, bool slot) { return slot ? __ldcg(from) : __ldcs(from); }
OSSICLE_DEVICE void store_bits(Bits* to, const Bits& bits, bool slot) { slot ? __stcg(to, bits) : __stcs(to, bits); }
#else
struct alignas(16) Bits {
  uint64_t word[2];
};
inline Bits load_bits(const Bits* from, bool) { return slot_load(from); }
inline void store_bits(Bits* to, const Bits& bits, bool) { slot_store(to, bits); }
#endif

// Copies whole packs of 16 bytes.
template <Slot SLOT> OSSICLE_DEVICE void copy_packs(const Block& block, const void* from, void* to, uint64_t packs) {
  constexpr uint32_t UNROLL = 8;
  const Bits* source = static_cast<const Bits*>(from);
  Bits* target = static_cast<Bits*>(to);
  for (uint64_t base = block.thread; base < packs; base += UNROLL * block.threads) {
    Bits bits[UNROLL];
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; ++u) {
      const uint64_t i = base + u * block.threads;
      if (i < packs) bits[u] = load_bits(source + i, SLOT == Slot::SOURCE);
    }
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; ++u) {
      const uint64_t i = base + u * block.threads;
      if (i < packs) store_bits(target + i, bits[u], SLOT == Slot::TARGET);
    }
  }
}
#endif

template <typename T, Slot SLOT>
OSSICLE_DEVICE void copy(const Block& block, const T* from, T* to, uint64_t count, bool aligned) {
  uint64_t moved = 0;
#if defined(__CUDACC__) || defined(OSSICLE_ORDER_MODEL)
  if (aligned) {
    moved = count / PACK_ELEMENTS<T> * PACK_ELEMENTS<T>;
    copy_packs<SLOT>(block, from, to, count / PACK_ELEMENTS<T>);
  }
#else
  (void)aligned;  // the compiler's vectors take unaligned data
#pragma GCC ivdep
#endif
  for (uint64_t i = moved + block.thread; i < count; i += block.threads) {
    slot_store(to + i, slot_load(from + i));
  }
}

#if defined(__CUDACC__) || defined(OSSICLE_ORDER_MODEL)
// Reduces pack i of every rank's source in rank order, with one rounding, into every rank's target. `places` tells
// them, and which are slots. Loads in flight: of UNROLL packs from so many sources.
template <typename T, uint32_t UNROLL, typename Op, typename Places>
OSSICLE_DEVICE void reduce_packs(const Block& block, const Places& places, uint64_t packs, uint32_t ranks, const Op& op) {
  constexpr uint32_t N = PACK_ELEMENTS<T>;
  constexpr uint32_t SOURCES = 2;
  for (uint64_t base = block.thread; base < packs; base += UNROLL * block.threads) {
    wide_t<T> sum[UNROLL][N];
    for (uint32_t first = 0; first < ranks; first += SOURCES) {
      Bits bits[SOURCES][UNROLL];
#pragma unroll
      for (uint32_t k = 0; k < SOURCES; ++k) {
        if (first + k >= ranks) break;
        const Bits* source = places.source(first + k);
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; ++u) {
          const uint64_t i = base + u * block.threads;
          if (i < packs) bits[k][u] = load_bits(source + i, places.from_slot(first + k));
        }
      }
#pragma unroll
      for (uint32_t k = 0; k < SOURCES; ++k) {
        if (first + k >= ranks) break;
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; ++u) {
          const union { Bits bits; Pack<T> pack; } from = {bits[k][u]};
#pragma unroll
          for (uint32_t e = 0; e < N; ++e) {
            const wide_t<T> value = op.load(widen(from.pack.element[e]));
            sum[u][e] = first + k == 0 ? value : op.reduce(sum[u][e], value);
          }
        }
      }
    }
    union { Pack<T> pack; Bits bits; } result[UNROLL];
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (uint32_t e = 0; e < N; ++e) result[u].pack.element[e] = narrow<T>(op.finish(sum[u][e]));
    }
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      Bits* target = places.target(rank);
#pragma unroll
      for (uint32_t u = 0; u < UNROLL; ++u) {
        const uint64_t i = base + u * block.threads;
        if (i < packs) store_bits(target + i, result[u].bits, places.to_slot(rank));
      }
    }
  }
}
#endif

// The same for elements [first, end), which need no alignment.
template <typename T, typename Op, typename Places>
OSSICLE_DEVICE void reduce_elements(const Block& block, const Places& places, uint64_t first, uint64_t end, uint32_t ranks,
                                    const Op& op) {
  // On the host a tile is long enough for vectors and short enough for registers and the nearest cache.
#if defined(__CUDACC__) || defined(OSSICLE_ORDER_MODEL)
  constexpr uint64_t TILE = 1;
#else
  constexpr uint64_t TILE = 64;
#endif
  for (uint64_t at = first + block.thread * TILE; at < end; at += block.threads * TILE) {
    const uint64_t size = min_of(TILE, end - at);
    wide_t<T> sum[TILE];
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const T* source = places.source(rank) + at;
      for (uint64_t i = 0; i < size; ++i) {
        const wide_t<T> value = op.load(widen(slot_load(source + i)));
        sum[i] = rank == 0 ? value : op.reduce(sum[i], value);
      }
    }
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      T* target = places.target(rank) + at;
      for (uint64_t i = 0; i < size; ++i) slot_store(target + i, narrow<T>(op.finish(sum[i])));
    }
  }
}

}  // namespace ossicle
