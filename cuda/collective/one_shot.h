// One-shot all-reduce: every rank sends all of its data to every other rank as lines and reduces what arrives.
//
// One hop, so it wins where latency rules. Every rank reduces in rank order, with one rounding at the end, so the bits
// are equal on all of them. An area is used by parity: finishing epoch e means that all ranks started e, hence that
// all had finished e - 1, so epoch e + 1 may overwrite what e - 1 left.
#pragma once
#include "../protocol/line.h"

namespace ossicle {

template <typename T> struct Accumulator {
  wide_t<T> value[LINE_ELEMENTS<T>];
};

template <typename T, typename Op>
OSSICLE_DEVICE void accumulate(Accumulator<T>& sum, uint64_t payload, const Op& op, bool first) {
  constexpr uint32_t N = LINE_ELEMENTS<T>;
  union { uint64_t payload; T element[N]; } line = {payload};
  for (uint32_t i = 0; i < N; ++i) {
    const wide_t<T> value = op.load(widen(line.element[i]));
    sum.value[i] = first ? value : op.reduce(sum.value[i], value);
  }
}

template <typename T, typename Op>
OSSICLE_DEVICE uint64_t finish(const Accumulator<T>& sum, const Op& op) {
  constexpr uint32_t N = LINE_ELEMENTS<T>;
  union { uint64_t payload; T element[N]; } line = {0};
  for (uint32_t i = 0; i < N; ++i) line.element[i] = narrow<T>(op.finish(sum.value[i]));
  return line.payload;
}

// Zeroes this block's share of the rank's own area of the coming epoch; see clear_due. It happens before this rank
// sends anything for the running epoch, and peers write for the coming one only after they had all of that.
OSSICLE_DEVICE void clear_coming(const Block& block, const OneShotWork& work, uint64_t epoch) {
  Line* area = work.area[work.rank] + ((epoch + 1) & 1) * work.ranks * static_cast<uint64_t>(work.lines);
  const uint64_t lines = work.ranks * static_cast<uint64_t>(work.lines);
  for (uint64_t i = block.index * block.threads + block.thread; i < lines; i += block.blocks * block.threads) {
    store_line(area + i, Line{{0, 0}});
  }
  barrier<Site::CLEAR_DONE>(block);
  order_before_lines<Site::CLEAR_FIRST>();
}

// Sources are polled in groups of this size: their loads are in flight together.
constexpr uint32_t SOURCES_AT_ONCE = 4;

template <typename T, typename Op>
OSSICLE_DEVICE bool reduce_line(const OneShotWork& work, const Line* area, uint64_t i, uint32_t flag, uint64_t own,
                                const Op& op, uint32_t channel, Accumulator<T>& sum) {
  for (uint32_t base = 0; base < work.ranks; base += SOURCES_AT_ONCE) {
    Line line[SOURCES_AT_ONCE];
    for (uint32_t k = 0; k < SOURCES_AT_ONCE; ++k) {
      const uint32_t source = base + k;
      if (source < work.ranks && source != work.rank) line[k] = load_line(area + source * uint64_t(work.lines) + i);
    }
    for (uint32_t k = 0; k < SOURCES_AT_ONCE; ++k) {
      const uint32_t source = base + k;
      if (source >= work.ranks) break;
      uint64_t payload = own;
      if (source != work.rank) {
        const Line* from = area + source * uint64_t(work.lines) + i;
        Wait wait = Wait::for_peer(work.control, work.state, source, channel, 0);
        while (!line_ready(line[k], flag)) {
          if (!wait.again()) return false;
          line[k] = load_line(from);
        }
        payload = line_payload(line[k]);
      }
      accumulate<T>(sum, payload, op, source == 0);
    }
  }
  return true;
}

template <typename T, template <typename> class OpOf>
OSSICLE_DEVICE void one_shot(const Block& block, const OneShotWork& work) {
  const OpOf<T> op(work.ranks);
  const T* input = static_cast<const T*>(work.input);
  T* output = static_cast<T*>(work.output);
  const bool aligned_in = reinterpret_cast<uintptr_t>(input) % LINE_BYTES == 0;
  const bool aligned_out = reinterpret_cast<uintptr_t>(output) % LINE_BYTES == 0;
  enter(block, work.state, work.started);
  const uint64_t epoch = work.state->ll_epoch;
  const uint32_t flag = line_flag(epoch);
  const uint64_t parity = (epoch & 1) * work.ranks * static_cast<uint64_t>(work.lines);
  const uint64_t lines = (work.count + LINE_ELEMENTS<T> - 1) / LINE_ELEMENTS<T>;
  const uint64_t stride = static_cast<uint64_t>(block.blocks) * block.threads;
  const uint64_t begin = static_cast<uint64_t>(block.index) * block.threads + block.thread;

  if (clear_due(epoch)) clear_coming(block, work, epoch);
  for (uint64_t i = begin; i < lines; i += stride) {
    const Line line = make_line(load_payload(input, i * LINE_ELEMENTS<T>, work.count, aligned_in), flag);
    for (uint32_t hop = 1; hop < work.ranks; ++hop) {
      const uint32_t peer = (work.rank + hop) % work.ranks;
      store_line(work.area[peer] + parity + work.rank * static_cast<uint64_t>(work.lines) + i, line);
    }
  }
  bool ok = true;
  const Line* area = work.area[work.rank] + parity;
  for (uint64_t i = begin; ok && i < lines; i += stride) {
    const uint64_t own = load_payload(input, i * LINE_ELEMENTS<T>, work.count, aligned_in);
    Accumulator<T> sum{};
    ok = reduce_line<T>(work, area, i, flag, own, op, block.index, sum);
    if (ok) store_payload(output, i * LINE_ELEMENTS<T>, work.count, aligned_out, finish<T>(sum, op));
  }
  leave<Site::ONE_SHOT_DONE>(block, work.state, work.control, true);
}

}  // namespace ossicle
