// The software HCA's engine: takes work requests from send queues, carries them out, writes completions.
//
//   poster                      engine of the initiator                         peer
//   WQEs, record, doorbell -->  consume the doorbell, check and carry out  -->  payload, then flags, immediates
//   read the CQE           <--  payload first, then the CQE, owner byte last
//
// One source for a thread beside the CPU and for blocks beside the GPU: no allocation, no library, no wait. The initiator
// does the whole transfer. step() serves every QP once; it may be called by one thread at a time. What it relies on:
//   - A WQE is read only after the doorbell, or the record, that covers it was consumed. It is checked strictly, so that a
//     WQE that was not visible by then shows itself by its index.
//   - WQEs of a QP are carried out one after the other, each visible to others before the next: every fence mode holds.
//     Payload of one aligned word of 4 or 8 bytes is one releasing store, as flags need it. Longer payload goes in
//     8-byte words wherever its destination is aligned, as LL lines need it, in no promised order among themselves.
//   - A failed check puts the QP into the error state, and what comes after is flushed, as a card does it. A peer that
//     refused goes into the error state too.
#pragma once
#include "../core/wait.h"
#include "../net/mlx5.h"
#include "message.h"
#include "tables.h"

namespace ossicle::hca {

// WQEs of one QP in one step, so that no QP keeps others waiting.
constexpr uint32_t WQES_A_STEP = 32;

// What a step found: something to do, and a WQE that has to wait, so that further steps are needed.
enum Activity : uint32_t { WORKED = 1, WAITING = 2 };

// What became of a WQE.
struct Outcome {
  uint8_t syndrome;
  uint8_t check;
  bool wait;  // not carried out yet: the peer is not ready
  uint32_t bytes;

  OSSICLE_DEVICE static Outcome done(uint32_t bytes) { return Outcome{mlx5::SYNDROME_NONE, CHECK_NONE, false, bytes}; }
  OSSICLE_DEVICE static Outcome failed(uint8_t syndrome, uint8_t check) { return Outcome{syndrome, check, false, 0}; }
  OSSICLE_DEVICE static Outcome later() { return Outcome{mlx5::SYNDROME_NONE, CHECK_NONE, true, 0}; }
  OSSICLE_DEVICE bool good() const { return syndrome == mlx5::SYNDROME_NONE && !wait; }
};

// A completion before it is given its place.
struct Completion {
  uint8_t kind, opcode, syndrome, check;
  uint32_t qpn, index, bytes, immediate;  // immediate as it stands in the WQE
};

// The record orders nothing: whoever has as many requests under way as the CQ has places reads completions before it posts
// more, and the doorbell of those was consumed.
OSSICLE_DEVICE bool cq_has_room(const View& view, Cq& cq, uint32_t at) {
  if ((cq.flags & IGNORE_OVERRUN) != 0) return true;
  auto* record = reinterpret_cast<mlx5::DoorbellRecord*>(view.segment + cq.record);
  const uint32_t read = mlx5::be32(load_word(&record->word[mlx5::RECORD_CONSUMER]));
  return ((at - read) & 0xffffff) < (1u << cq.log_entries);
}

// False: the CQ overran, now or before, and takes nothing any more.
OSSICLE_DEVICE bool complete(const View& view, Cq& cq, const Completion& completion) {
  uint32_t at;
  do {
    at = load_word(&cq.produced);
    if (load_word(&cq.state) != CQ_GOOD) return false;
    if (!cq_has_room(view, cq, at)) {
      store_word(&cq.state, static_cast<uint32_t>(CQ_OVERRUN));
      return false;
    }
  } while (!take(&cq.produced, at, at + 1));
  const uint32_t owner = (at >> cq.log_entries) & 1;
  const uint32_t entry = at & ((1u << cq.log_entries) - 1);
  auto* words = reinterpret_cast<uint64_t*>(view.segment + cq.entries + entry * sizeof(mlx5::Cqe));
  for (uint32_t i = 0; i < 4; ++i) slot_store(&words[i], uint64_t{0});
  slot_store(&words[4], uint64_t(completion.immediate) << 32);
  slot_store(&words[5], uint64_t(mlx5::be32(completion.bytes)) << 32);
  const uint32_t syndromes = uint32_t(completion.check) << 8 | completion.syndrome;
  slot_store(&words[6], uint64_t(mlx5::be32(syndromes)) << 32);
  const uint32_t tail = (completion.index & 0xffff) << 16 | uint32_t(completion.kind) << 4 | owner;
  const uint32_t source = uint32_t(completion.opcode) << 24 | (completion.qpn & 0xffffff);
  publish<Site::HCA_CQE>(&words[7], uint64_t(mlx5::be32(tail)) << 32 | mlx5::be32(source));
  return true;
}

OSSICLE_DEVICE void into_error(Qp& qp) { store_word(&qp.state, static_cast<uint32_t>(ERROR)); }

OSSICLE_DEVICE void complete_send(const View& own, Qp& qp, uint8_t opcode, const Outcome& outcome) {
  const bool failed = outcome.syndrome != mlx5::SYNDROME_NONE;
  const uint8_t kind = failed ? mlx5::CQE_REQ_ERR : mlx5::CQE_REQ;
  const Completion completion{kind, opcode, outcome.syndrome, outcome.check, qp.number, qp.consumed, outcome.bytes, 0};
  if (!complete(own, cqs(own)[qp.send_cq], completion)) into_error(qp);
}

// A place of the receive queue; false where none is posted.
OSSICLE_DEVICE bool take_receive(const View& view, Qp& qp, uint32_t& index) {
  if (qp.receives == 0) return false;
  auto* record = reinterpret_cast<mlx5::DoorbellRecord*>(view.segment + qp.record);
  do {
    index = load_word(&qp.received);
    const uint32_t posted = mlx5::be32(consume<Site::HCA_RECEIVES>(&record->word[mlx5::RECORD_RECEIVE]));
    const uint32_t free = (posted - index) & 0xffff;
    if (free == 0 || free > qp.receives) return false;
  } while (!take(&qp.received, index, index + 1));
  return true;
}

// Software gets back what it posted on a QP in the error state.
OSSICLE_DEVICE bool flush_receives(const View& own, Qp& qp) {
  bool worked = false;
  for (uint32_t index; take_receive(own, qp, index); worked = true) {
    const Completion flushed{mlx5::CQE_RESP_ERR, 0, mlx5::WR_FLUSH, CHECK_FLUSHED, qp.number, index, 0, 0};
    complete(own, cqs(own)[qp.receive_cq], flushed);
  }
  return worked;
}

// How far an index of 16 bits is ahead of what was consumed; 0 for one that lies behind, -1 for one that is out of reach.
OSSICLE_DEVICE int32_t ahead_of(const Qp& qp, uint32_t index) {
  const uint32_t blocks = 1u << qp.send_log_blocks;
  const uint32_t ahead = (index - qp.consumed) & 0xffff;
  if (ahead <= blocks) return int32_t(ahead);
  return ((qp.consumed - index) & 0xffff) <= blocks ? 0 : -1;
}

// What was published since. A doorbell may carry the next free index or that of the last WQE (rdma-core), so the record
// counts too, where it is further.
OSSICLE_DEVICE Outcome look_at_doorbell(const View& own, Qp& qp) {
  const uint64_t rung = consume<Site::HCA_DOORBELL>(reinterpret_cast<const uint64_t*>(own.segment + qp.doorbell));
  if (rung == qp.seen_doorbell) return Outcome::done(0);
  qp.seen_doorbell = rung;
  auto* record = reinterpret_cast<mlx5::DoorbellRecord*>(own.segment + qp.record);
  const uint32_t recorded = mlx5::be32(consume<Site::HCA_RECORD>(&record->word[mlx5::RECORD_SEND]));
  if (mlx5::be32(uint32_t(rung >> 32)) >> 8 != qp.number) return Outcome::failed(mlx5::LOCAL_QP_OP, CHECK_DOORBELL_QP);
  const int32_t by_doorbell = ahead_of(qp, mlx5::be32(uint32_t(rung)) >> 8);
  const int32_t by_record = ahead_of(qp, recorded);
  if (by_doorbell < 0 || by_record < 0) return Outcome::failed(mlx5::LOCAL_QP_OP, CHECK_DOORBELL_RANGE);
  if ((qp.flags & RECORD_FIRST) != 0 && by_record < by_doorbell) {
    return Outcome::failed(mlx5::LOCAL_QP_OP, CHECK_RECORD_BEHIND);
  }
  const uint32_t ahead = uint32_t(by_record > by_doorbell ? by_record : by_doorbell);
  // A stale doorbell takes nothing back.
  if (ahead > qp.published - qp.consumed) qp.published = qp.consumed + ahead;
  return Outcome::done(0);
}

// Whether the control segment is one of this place, and of an operation that exists.
OSSICLE_DEVICE Outcome check_control(const Qp& qp, const Wqe& wqe) {
  const auto bad = [](uint8_t check) { return Outcome::failed(mlx5::LOCAL_QP_OP, check); };
  if (wqe.index != (qp.consumed & 0xffff)) return bad(CHECK_WQE_INDEX);
  if (wqe.qpn != qp.number) return bad(CHECK_WQE_QP);
  if (wqe.units == 0 || wqe.blocks() > qp.published - qp.consumed) return bad(CHECK_WQE_UNITS);
  if (wqe.opmod != 0) return bad(CHECK_WQE_OPCODE);
  if ((wqe.flags & mlx5::FLAGS_RESERVED) != 0 || (wqe.flags & mlx5::FENCE_MASK) > mlx5::FENCE_SMALL_AND_FENCE) {
    return bad(CHECK_WQE_FLAGS);
  }
  switch (wqe.opcode) {
    case mlx5::NOP:
    case mlx5::RDMA_WRITE:
    case mlx5::RDMA_WRITE_IMM:
    case mlx5::RDMA_READ:
    case mlx5::ATOMIC_FA:
      return Outcome::done(0);
    case mlx5::SEND:
    case mlx5::SEND_IMM:
    case mlx5::ATOMIC_CS:
      return bad(CHECK_NOT_BUILT);
    default:
      return bad(CHECK_WQE_OPCODE);
  }
}

// Waits at most so long since the QP began to wait, then fails.
OSSICLE_DEVICE Outcome wait_or_fail(Qp& qp, uint64_t limit_ns, uint8_t syndrome, uint8_t check) {
  if (limit_ns == FOR_EVER) return Outcome::later();
  const uint64_t now = clock_ns();
  if (qp.waiting_since_ns == 0) qp.waiting_since_ns = now;
  return now - qp.waiting_since_ns >= limit_ns ? Outcome::failed(syndrome, check) : Outcome::later();
}

OSSICLE_DEVICE uint32_t access_of(uint8_t opcode) {
  return opcode == mlx5::RDMA_READ ? REMOTE_READ : opcode == mlx5::ATOMIC_FA ? REMOTE_ATOMIC : REMOTE_WRITE;
}

// A READ, WRITE or atomic whose message and addresses were found good.
OSSICLE_DEVICE void move(const View& own, const Wqe& wqe, uint8_t* remote) {
  if (wqe.opcode == mlx5::ATOMIC_FA) {
    const uint64_t before = fetch_add<Site::HCA_ADD>(reinterpret_cast<uint64_t*>(remote), wqe.number64(2, 0));
    Segments sink(wqe, 3);
    Segment segment{};
    sink.next(segment);
    copy_payload(local_address(own, segment), Value{before}, 8);
    return;
  }
  Segments segments(wqe, 2);
  for (Segment segment{}; segments.next(segment) == Found::DATA; remote += segment.bytes) {
    if (segment.within_wqe) {
      copy_payload(remote, RingBytes{wqe.ring, segment.offset}, segment.bytes);
    } else if (wqe.opcode == mlx5::RDMA_READ) {
      copy_payload(local_address(own, segment), FlatBytes{remote}, segment.bytes);
    } else {
      copy_payload(remote, FlatBytes{local_address(own, segment)}, segment.bytes);
    }
  }
}

// The peer's side: its QP receives, its region is there and allows it. `remote` is where this engine reaches it.
OSSICLE_DEVICE Outcome check_peer(const View& peer, const Qp& target, const Wqe& wqe, uint32_t bytes, uint8_t*& remote) {
  const auto refused = [](uint8_t check) { return Outcome::failed(mlx5::REMOTE_ACCESS, check); };
  const auto invalid = [](uint8_t check) { return Outcome::failed(mlx5::REMOTE_INVALID_REQUEST, check); };
  const uint32_t access = access_of(wqe.opcode);
  if ((slot_load(&target.access) & access) == 0) return invalid(CHECK_PEER_ACCESS);
  remote = nullptr;
  if (bytes == 0) return Outcome::done(0);
  const uint64_t address = wqe.number64(1, 0);
  const uint32_t rkey = wqe.number32(1, 8);
  if (wqe.opcode == mlx5::ATOMIC_FA && address % 8 != 0) return invalid(CHECK_ATOMIC_ALIGNMENT);
  const Region* region = find_region(peer, rkey);
  if (region == nullptr) return refused(CHECK_REMOTE_KEY);
  if (region->domain != target.domain) return refused(CHECK_REMOTE_DOMAIN);
  if ((region->access & access) == 0) return refused(CHECK_REMOTE_ACCESS);
  if (!within(*region, address, bytes)) return refused(CHECK_REMOTE_RANGE);
  uint8_t* memory = memory_of(peer, *region);
  if (memory == nullptr) return Outcome::failed(mlx5::REMOTE_OPERATION, CHECK_UNMAPPED);
  remote = memory + (address - region->address);
  return Outcome::done(bytes);
}

// WRITE, READ and atomics: checks both sides, then moves.
OSSICLE_DEVICE Outcome transfer(const Engine& engine, Qp& qp, const Wqe& wqe) {
  const View& own = engine.view[0];
  const Message message = check_message(own, qp, wqe);
  if (message.syndrome != mlx5::SYNDROME_NONE) return Outcome::failed(message.syndrome, message.check);
  if (qp.peer >= engine.views || engine.view[qp.peer].segment == nullptr) {
    return wait_or_fail(qp, qp.timeout_ns, mlx5::TRANSPORT_RETRY_EXCEEDED, CHECK_PEER_SILENT);
  }
  const View& peer = engine.view[qp.peer];
  Qp* target = find_qp(peer, qp.peer_number);
  const uint32_t state = target == nullptr ? uint32_t(RESET) : consume<Site::HCA_PEER_STATE>(&target->state);
  // A card's packets to such a QP are dropped, and it sends them again until its retries are used up.
  if (state < READY_TO_RECEIVE || state == ERROR || slot_load(&target->peer_number) != qp.number) {
    return wait_or_fail(qp, qp.timeout_ns, mlx5::TRANSPORT_RETRY_EXCEEDED, CHECK_PEER_SILENT);
  }
  uint8_t* remote;
  const Outcome checked = check_peer(peer, *target, wqe, message.bytes, remote);
  if (!checked.good()) {
    into_error(*target);
    return checked;
  }
  uint32_t receive = 0;
  const bool immediate = wqe.opcode == mlx5::RDMA_WRITE_IMM;
  if (immediate && !take_receive(peer, *target, receive)) {
    return wait_or_fail(qp, qp.rnr_timeout_ns, mlx5::RNR_RETRY_EXCEEDED, CHECK_NO_RECEIVE);
  }
  if (message.bytes != 0) move(own, wqe, remote);
  if (immediate) {
    const Completion arrived{mlx5::CQE_RESP_WRITE_IMM, 0, 0, 0, target->number, receive, message.bytes, wqe.immediate};
    if (!complete(peer, cqs(peer)[target->receive_cq], arrived)) {
      into_error(*target);
      return Outcome::failed(mlx5::REMOTE_OPERATION, CHECK_PEER_CQ);
    }
  }
  return Outcome::done(message.bytes);
}

OSSICLE_DEVICE InjectedFault* injected(const Engine& engine, const Qp& qp, uint32_t kind) {
  for (uint32_t i = 0; i < engine.faults; ++i) {
    InjectedFault& fault = engine.fault[i];
    if (fault.qp == qp.number && fault.nth == qp.executed && fault.kind == kind) return &fault;
  }
  return nullptr;
}

OSSICLE_DEVICE Outcome carry_out(const Engine& engine, Qp& qp, const Wqe& wqe) {
  const Outcome control = check_control(qp, wqe);
  if (!control.good()) return control;
  if (InjectedFault* delay = injected(engine, qp, FAULT_DELAY); delay != nullptr && delay->steps > 0) {
    delay->steps -= 1;
    return Outcome::later();
  }
  if (const InjectedFault* fault = injected(engine, qp, FAULT_SYNDROME)) {
    return Outcome::failed(uint8_t(fault->syndrome), uint8_t(fault->vendor_syndrome));
  }
  return wqe.opcode == mlx5::NOP ? Outcome::done(0) : transfer(engine, qp, wqe);
}

OSSICLE_DEVICE void leave_queue(Qp& qp, uint32_t blocks) {
  const uint32_t left = qp.published - qp.consumed;
  qp.consumed += blocks == 0 || blocks > left ? 1 : blocks;
  qp.executed += 1;
  qp.waiting_since_ns = 0;
}

// One QP's share of a step. Each WQE reads the state again: a peer may have refused something, or software flushed it.
OSSICLE_DEVICE uint32_t serve(const Engine& engine, Qp& qp) {
  const View& own = engine.view[0];
  const uint32_t before = load_word(&qp.state);
  if (before != READY_TO_SEND && before != ERROR) return 0;
  uint32_t found = before == ERROR && flush_receives(own, qp) ? uint32_t(WORKED) : 0;
  const Outcome rung = look_at_doorbell(own, qp);
  if (!rung.good() && load_word(&qp.state) != ERROR) {
    into_error(qp);
    complete_send(own, qp, 0, rung);
    found |= WORKED;
  }
  for (uint32_t count = 0; count < WQES_A_STEP && qp.consumed != qp.published; ++count) {
    const Wqe wqe = Wqe::read(own.segment + qp.send_ring, qp.send_log_blocks, qp.consumed);
    const bool flushing = load_word(&qp.state) == ERROR;
    const Outcome outcome =
        flushing ? Outcome::failed(mlx5::WR_FLUSH, CHECK_FLUSHED) : carry_out(engine, qp, wqe);
    if (outcome.wait) return found | WAITING;
    if (!outcome.good()) into_error(qp);
    const uint8_t asked = wqe.flags & mlx5::COMPLETE_MASK;
    const bool told = !outcome.good() || asked == mlx5::COMPLETE_ALWAYS || asked == mlx5::COMPLETE_WITH_EVENT;
    if (told && injected(engine, qp, FAULT_DROP_CQE) == nullptr) complete_send(own, qp, wqe.opcode, outcome);
    leave_queue(qp, wqe.blocks());
    found |= WORKED;
  }
  return found;
}

// Serves every QP once; the sum of what was found.
OSSICLE_DEVICE uint32_t step(const Engine& engine) {
  const View& own = engine.view[0];
  Qp* table = qps(own);
  uint32_t found = 0;
  for (uint32_t place = 0; place < header(own).qps; ++place) found |= serve(engine, table[place]);
  return found;
}

}  // namespace ossicle::hca
