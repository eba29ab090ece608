// A work request's segments, the memory that they name, and how payload is copied.
#pragma once
#include "../core/memory.h"
#include "../net/mlx5.h"
#include "tables.h"

namespace ossicle::hca {

OSSICLE_DEVICE Header& header(const View& view) { return *reinterpret_cast<Header*>(view.segment); }
OSSICLE_DEVICE Qp* qps(const View& view) { return reinterpret_cast<Qp*>(view.segment + header(view).qp_table); }
OSSICLE_DEVICE Cq* cqs(const View& view) { return reinterpret_cast<Cq*>(view.segment + header(view).cq_table); }

OSSICLE_DEVICE Qp* find_qp(const View& view, uint32_t number) {
  const uint32_t place = number & QP_PLACE_MASK;
  if (place >= header(view).qps) return nullptr;
  Qp* qp = qps(view) + place;
  return load_word(&qp->number) == number ? qp : nullptr;
}

OSSICLE_DEVICE const Region* find_region(const View& view, uint32_t key) {
  const uint32_t place = key >> KEY_PLACE_SHIFT;
  if (key == 0 || place >= header(view).regions) return nullptr;
  const Region* region = reinterpret_cast<const Region*>(view.segment + header(view).region_table) + place;
  return load_word(&region->key) == key ? region : nullptr;
}

OSSICLE_DEVICE bool within(const Region& region, uint64_t address, uint64_t bytes) {
  return address >= region.address && address - region.address <= region.bytes &&
         bytes <= region.bytes - (address - region.address);
}

// Where this engine reaches a region; NULL if it does not.
OSSICLE_DEVICE uint8_t* memory_of(const View& view, const Region& region) {
  if (region.offset != OUTSIDE) return view.segment + region.offset;
  return view.outside == nullptr ? nullptr : view.outside[region.key >> KEY_PLACE_SHIFT];
}

// A ring of blocks, read at offsets that wrap.
struct Ring {
  const uint8_t* base;
  uint32_t mask;
  OSSICLE_DEVICE uint32_t load32(uint32_t offset) const {
    return slot_load(reinterpret_cast<const uint32_t*>(base + (offset & mask)));
  }
  OSSICLE_DEVICE uint8_t load8(uint32_t offset) const {
    return uint8_t(load32(offset & ~3u) >> (offset & 3) * 8);
  }
};

// A WQE's control segment, in native numbers, and where the rest is.
struct Wqe {
  Ring ring;
  uint32_t start;  // offset in the ring
  uint32_t qpn, immediate;
  uint16_t index;
  uint8_t opcode, opmod, units, flags;

  OSSICLE_DEVICE static Wqe read(const uint8_t* base, uint32_t log_blocks, uint32_t block) {
    const uint32_t mask = (mlx5::BLOCK_BYTES << log_blocks) - 1;
    Wqe wqe{Ring{base, mask}, block * mlx5::BLOCK_BYTES & mask, 0, 0, 0, 0, 0, 0, 0};
    const uint32_t first = wqe.number32(0, 0), second = wqe.number32(0, 4);
    wqe.opmod = uint8_t(first >> 24);
    wqe.index = uint16_t(first >> 8);
    wqe.opcode = uint8_t(first);
    wqe.qpn = second >> 8;
    wqe.units = second & mlx5::MAX_UNITS;
    wqe.flags = wqe.ring.load8(wqe.start + 11);
    wqe.immediate = wqe.ring.load32(wqe.start + 12);
    return wqe;
  }

  OSSICLE_DEVICE uint32_t blocks() const {
    return (units * mlx5::UNIT_BYTES + mlx5::BLOCK_BYTES - 1) / mlx5::BLOCK_BYTES;
  }
  OSSICLE_DEVICE uint32_t number32(uint32_t unit, uint32_t offset) const {
    return mlx5::be32(ring.load32(start + unit * mlx5::UNIT_BYTES + offset));
  }
  OSSICLE_DEVICE uint64_t number64(uint32_t unit, uint32_t offset) const {
    return uint64_t(number32(unit, offset)) << 32 | number32(unit, offset + 4);
  }
};

struct Segment {
  uint32_t bytes;
  bool within_wqe;
  uint32_t offset;  // in the ring, where the payload is within the WQE
  uint32_t lkey;
  uint64_t address;
};

enum class Found : uint8_t { DATA, END, BROKEN };

// Walks data segments and inline payload from a unit on to the WQE's end.
struct Segments {
  const Wqe& wqe;
  uint32_t unit;
  OSSICLE_DEVICE Segments(const Wqe& of, uint32_t from) : wqe(of), unit(from) {}

  OSSICLE_DEVICE Found next(Segment& segment) {
    if (unit >= wqe.units) return Found::END;
    const uint32_t bytes = wqe.number32(unit, 0);
    segment.within_wqe = (bytes & mlx5::INLINE_BIT) != 0;
    if (segment.within_wqe) {
      segment.bytes = bytes & mlx5::INLINE_MASK;
      segment.offset = wqe.start + unit * mlx5::UNIT_BYTES + sizeof(mlx5::InlineHeader);
      unit += (sizeof(mlx5::InlineHeader) + segment.bytes + mlx5::UNIT_BYTES - 1) / mlx5::UNIT_BYTES;
      return unit > wqe.units ? Found::BROKEN : Found::DATA;
    }
    segment.bytes = bytes;
    segment.lkey = wqe.number32(unit, 4);
    segment.address = wqe.number64(unit, 8);
    unit += 1;
    return Found::DATA;
  }
};

// Of a segment that was found good.
OSSICLE_DEVICE uint8_t* local_address(const View& own, const Segment& segment) {
  const Region* region = find_region(own, segment.lkey);
  return memory_of(own, *region) + (segment.address - region->address);
}

// What the local side of a WQE comes to.
struct Message {
  uint8_t syndrome, check;
  uint32_t bytes;
};

OSSICLE_DEVICE uint8_t check_local(const View& own, const Qp& qp, const Segment& segment, bool written) {
  const Region* region = find_region(own, segment.lkey);
  if (region == nullptr) return CHECK_LOCAL_KEY;
  if (region->domain != qp.domain) return CHECK_LOCAL_DOMAIN;
  if (!within(*region, segment.address, segment.bytes)) return CHECK_LOCAL_RANGE;
  if (written && (region->access & LOCAL_WRITE) == 0) return CHECK_LOCAL_ACCESS;
  return memory_of(own, *region) == nullptr ? CHECK_UNMAPPED : CHECK_NONE;
}

// Checks every segment of a WRITE, READ or atomic before any byte moves.
OSSICLE_DEVICE Message check_message(const View& own, const Qp& qp, const Wqe& wqe) {
  const auto bad = [](uint8_t check) { return Message{mlx5::LOCAL_QP_OP, check, 0}; };
  const bool atomic = wqe.opcode == mlx5::ATOMIC_FA;
  const bool reads = atomic || wqe.opcode == mlx5::RDMA_READ;
  if (wqe.units < (atomic ? 4u : 2u) || (atomic && wqe.units > 4)) return bad(CHECK_WQE_SEGMENTS);
  Segments segments(wqe, atomic ? 3 : 2);
  Segment segment{};
  uint64_t total = 0;
  for (Found found; (found = segments.next(segment)) != Found::END;) {
    if (found == Found::BROKEN || (segment.within_wqe && reads)) return bad(CHECK_INLINE);
    total += segment.bytes;
    if (segment.within_wqe) continue;
    if (segment.bytes == 0 || total > mlx5::MAX_MESSAGE || (atomic && segment.bytes != 8)) {
      return Message{mlx5::LOCAL_LENGTH, CHECK_MESSAGE_LENGTH, 0};
    }
    const uint8_t check = check_local(own, qp, segment, reads);
    if (check != CHECK_NONE) return Message{mlx5::LOCAL_PROTECTION, check, 0};
  }
  return Message{mlx5::SYNDROME_NONE, CHECK_NONE, uint32_t(total)};
}

// Where payload comes from: plain memory, a WQE, a number. `load` gives the 8 bytes at an offset, whatever its alignment.
struct FlatBytes {
  const uint8_t* base;
  OSSICLE_DEVICE uint8_t load8(uint64_t offset) const { return slot_load(base + offset); }
  OSSICLE_DEVICE uint64_t load64(uint64_t offset) const {
    const uint8_t* from = base + offset;
    const uintptr_t place = reinterpret_cast<uintptr_t>(from);
    if (place % 8 == 0) return load_word(reinterpret_cast<const uint64_t*>(from));
    if (place % 4 == 0) {
      const uint64_t low = load_word(reinterpret_cast<const uint32_t*>(from));
      return low | uint64_t(load_word(reinterpret_cast<const uint32_t*>(from + 4))) << 32;
    }
    uint64_t value = 0;
    for (uint32_t i = 0; i < 8; ++i) value |= uint64_t(load8(offset + i)) << i * 8;
    return value;
  }
  // A word that may be a flag.
  OSSICLE_DEVICE uint64_t flag64() const {
    return reinterpret_cast<uintptr_t>(base) % 8 == 0 ? consume<Site::HCA_SOURCE>(reinterpret_cast<const uint64_t*>(base))
                                                      : load64(0);
  }
  OSSICLE_DEVICE uint32_t flag32() const {
    if (reinterpret_cast<uintptr_t>(base) % 4 == 0) return consume<Site::HCA_SOURCE>(reinterpret_cast<const uint32_t*>(base));
    return load8(0) | uint32_t(load8(1)) << 8 | uint32_t(load8(2)) << 16 | uint32_t(load8(3)) << 24;
  }
};

// Inline payload begins on a multiple of 4, and the ring ends on one.
struct RingBytes {
  Ring ring;
  uint32_t start;
  OSSICLE_DEVICE uint8_t load8(uint64_t offset) const { return ring.load8(start + uint32_t(offset)); }
  OSSICLE_DEVICE uint64_t load64(uint64_t offset) const {
    if (offset % 4 == 0) {
      const uint64_t low = ring.load32(start + uint32_t(offset));
      return low | uint64_t(ring.load32(start + uint32_t(offset) + 4)) << 32;
    }
    uint64_t value = 0;
    for (uint32_t i = 0; i < 8; ++i) value |= uint64_t(load8(offset + i)) << i * 8;
    return value;
  }
  OSSICLE_DEVICE uint64_t flag64() const { return load64(0); }
  OSSICLE_DEVICE uint32_t flag32() const { return ring.load32(start); }
};

// What an atomic returns, in native order as ConnectX cards do it.
struct Value {
  uint64_t value;
  OSSICLE_DEVICE uint8_t load8(uint64_t offset) const { return uint8_t(value >> offset * 8); }
  OSSICLE_DEVICE uint64_t load64(uint64_t) const { return value; }
  OSSICLE_DEVICE uint64_t flag64() const { return value; }
  OSSICLE_DEVICE uint32_t flag32() const { return uint32_t(value); }
};

template <typename Source> OSSICLE_DEVICE void copy_payload(uint8_t* to, const Source& from, uint32_t bytes) {
  const uintptr_t place = reinterpret_cast<uintptr_t>(to);
  if (bytes == 8 && place % 8 == 0) return publish<Site::HCA_FLAG>(reinterpret_cast<uint64_t*>(to), from.flag64());
  if (bytes == 4 && place % 4 == 0) return publish<Site::HCA_FLAG>(reinterpret_cast<uint32_t*>(to), from.flag32());
  order_before_lines<Site::HCA_PAYLOAD>();
  uint32_t at = 0;
  for (; at < bytes && (place + at) % 8 != 0; ++at) slot_store(to + at, from.load8(at));
  for (; at + 8 <= bytes; at += 8) slot_store_whole(reinterpret_cast<uint64_t*>(to + at), from.load64(at));
  for (; at < bytes; ++at) slot_store(to + at, from.load8(at));
}

}  // namespace ossicle::hca
