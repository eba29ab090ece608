// A weak memory, as weak as the PTX model where the kernels could tell.
//
// Stores go into the store buffer of their block and drain in random order; loads may be early and return what a place
// held before. What may not happen is decided by vector clocks: every thread has a view, the stores of each thread that
// happened before. The rules:
//   - A store drains after earlier ones of the block to the same word, and, if it releases (a publish, or any store
//     after a fence), after all that happened before the release. Nothing else orders it.
//   - A load sees its thread's own stores, those of its block that a barrier put before it, and of memory any version
//     that is no older than the newest in its view, nor than what its rank has read there. (A GPU's threads could
//     disagree on the latter; no kernel reads one word from two.)
//   - An acquiring load that returns a released version joins that release's view. A relaxed one joins it at the next
//     fence, as PTX's acquire pattern does. A barrier joins the views of the block's threads.
//   - Until a barrier no thread sees buffered stores of another thread of its block: PTX promises nothing there, and
//     this shows a missing barrier best. They become visible when they drain.
//   - A load may also be late: a store to a word that another thread read, unless the reading happened before the store,
//     could have been what it read. That is reported where it happens, since the value has been used already.
//   - A launch begins and ends with a fence of all its threads, and ends when its buffers are empty.
//   - Fences in turn (PTX's fence.sc) have one order: each joins the views of the earlier ones, and what its thread stored
//     before is in memory.
//   - Counters that only one rank's kernels touch (State) and inputs that peers do not read are plain memory. Hosts write
//     straight into memory, as versions: inputs and outputs before a launch, stop words and rows of addresses at any time.
#pragma once
#include <string.h>
#include <algorithm>
#include <array>
#include <deque>
#include <unordered_map>
#include <utility>
#include "layout.h"
#include "schedule.h"

namespace ossicle::model {

constexpr uint32_t MAX_AGENTS = 64;

struct View {
  std::array<uint32_t, MAX_AGENTS> seen{};
  bool has(uint32_t agent, uint32_t number) const { return number <= seen[agent]; }
  void join(const View& other) {
    for (uint32_t a = 0; a < MAX_AGENTS; ++a) seen[a] = std::max(seen[a], other.seen[a]);
  }
};
using Release = std::shared_ptr<const View>;

struct Version {
  uint64_t value;
  uint32_t agent, number;  // number 0: from before everything
  Release release;
};

struct Access {
  uint32_t agent, number;
  uint64_t where;  // bits of the word
};

struct Word {
  std::vector<Version> versions;
  uint64_t first = 0;  // index of versions[0]
  std::array<uint64_t, MAX_RANKS> read{};
  std::vector<Access> readers;  // of payload, since the last store
};

struct Pending {
  uintptr_t address;
  uint32_t bytes;
  uint64_t value;
  uint32_t agent, number;
  Release release;
  // Unless it must, it does not drain before this step.
  uint64_t lingers_until;
};

struct Buffer {
  std::deque<Pending> stores;
  uint32_t threads = 0, arrived = 0;
  bool all = true, result = true;
  View joined;
  std::vector<uint32_t> waiting;
  // What its threads share: plain memory.
  alignas(16) char memory[512] = {};
};

// A thread of a block, or a rank's host.
struct Agent {
  uint32_t rank = 0;
  Buffer* buffer = nullptr;
  View view, relaxed;
  Release fence;
};

class Memory {
 public:
  Schedule schedule{MAX_AGENTS};
  std::array<Agent, MAX_AGENTS> agents;
  // One in so many scheduling steps drains a store; one in so many loads is stale where it may be.
  uint32_t drain_rate = 4, stale_rate = 2, longest_linger = 1;

  Memory() {
    schedule.between = [this] { drain_some(); };
  }

  Agent& me() { return agents[schedule.current()]; }

  size_t buffers() const { return buffers_.size(); }
  Buffer* buffer(size_t i) { return buffers_[i].get(); }
  Buffer* add_buffer() {
    buffers_.push_back(std::make_unique<Buffer>());
    return buffers_.back().get();
  }

  enum class Kind { PAYLOAD, RELAXED, ORDERED };

  uint64_t load(const void* from, uint32_t bytes, Kind kind) {
    schedule.maybe_yield();
    Agent& agent = me();
    const uintptr_t address = reinterpret_cast<uintptr_t>(from);
    Word& word = word_of(address);
    const uint32_t number = act(agent);
    uint64_t oldest = std::max(word.read[agent.rank], word.first);
    for (uint64_t i = word.versions.size(); i-- > 0;) {
      const Version& version = word.versions[i];
      if (!agent.view.has(version.agent, version.number)) continue;
      oldest = std::max(oldest, word.first + i);
      break;
    }
    const uint64_t newest = word.first + word.versions.size() - 1;
    const bool stale = oldest < newest && schedule.random.one_in(stale_rate);
    const uint64_t chosen = stale ? oldest + schedule.random.below(uint32_t(newest - oldest)) : newest;
    word.read[agent.rank] = chosen;
    const Version& version = word.versions[chosen - word.first];
    uint64_t value = version.value;
    if (version.release) (kind == Kind::ORDERED ? agent.view : agent.relaxed).join(*version.release);
    if (kind == Kind::PAYLOAD) {
      note_reader(word, Access{schedule.current(), number, mask(bytes) << address % 8 * 8});
      schedule.progress();
    }
    if (agent.buffer) {
      for (const Pending& store : agent.buffer->stores) {
        if ((store.address & ~uintptr_t(7)) == (address & ~uintptr_t(7)) && agent.view.has(store.agent, store.number)) {
          value = merged(value, store);
        }
      }
    }
    return value >> address % 8 * 8 & mask(bytes);
  }

  void store(void* to, uint32_t bytes, uint64_t value, Kind kind) {
    schedule.maybe_yield();
    Agent& agent = me();
    const uintptr_t address = reinterpret_cast<uintptr_t>(to);
    const uint32_t number = act(agent);
    Word& word = word_of(address);
    if (kind == Kind::PAYLOAD) check_readers(word, mask(bytes) << address % 8 * 8);
    const Release release = kind == Kind::ORDERED ? std::make_shared<const View>(agent.view) : agent.fence;
    agent.buffer->stores.push_back(Pending{address, bytes, value, schedule.current(), number, release, lingering()});
    schedule.progress();
  }

  // By a rank's host: in memory at once.
  void write(void* to, uint32_t bytes, uint64_t value, Kind kind = Kind::RELAXED) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(to);
    const uint32_t number = act(me());
    Word& word = word_of(address);
    check_readers(word, mask(bytes) << address % 8 * 8);
    const Release release = kind == Kind::ORDERED ? std::make_shared<const View>(me().view) : nullptr;
    add_version(word, Pending{address, bytes, value, schedule.current(), number, release, 0});
  }

  // An atomic change of a word that nothing but such changes touches: `change` reads and writes the memory itself.
  template <typename Change> void change(void* word, Kind kind, Change change) {
    schedule.maybe_yield();
    Agent& agent = me();
    act(agent);
    View& released = changed_[reinterpret_cast<uintptr_t>(word)];
    (kind == Kind::ORDERED ? agent.view : agent.relaxed).join(released);
    if (kind == Kind::ORDERED) released.join(agent.view);
    else if (agent.fence) released.join(*agent.fence);
    for (size_t i = 0; i < agent.buffer->stores.size();) {
      const Pending& store = agent.buffer->stores[i];
      if (!released.has(store.agent, store.number)) {
        ++i;
        continue;
      }
      drain(*agent.buffer, i);
      i = 0;
    }
    change();
    schedule.progress();
  }

  void fence() {
    schedule.maybe_yield();
    Agent& agent = me();
    act(agent);
    agent.view.join(agent.relaxed);
    agent.fence = std::make_shared<const View>(agent.view);
  }

  void fence_in_turn() {
    schedule.maybe_yield();
    Agent& agent = me();
    act(agent);
    agent.view.join(agent.relaxed);
    agent.view.join(in_turn_);
    for (size_t i = 0; agent.buffer && i < agent.buffer->stores.size();) {
      const Pending& store = agent.buffer->stores[i];
      if (!agent.view.has(store.agent, store.number)) {
        ++i;
        continue;
      }
      drain(*agent.buffer, i);
      i = 0;
    }
    in_turn_.join(agent.view);
    agent.fence = std::make_shared<const View>(agent.view);
  }

  bool barrier(bool ok) {
    schedule.maybe_yield();
    Agent& agent = me();
    Buffer& block = *agent.buffer;
    act(agent);
    block.joined.join(agent.view);
    block.all = block.all && ok;
    if (++block.arrived == block.threads) {
      block.arrived = 0;
      block.result = block.all;
      block.all = true;
      for (uint32_t id : block.waiting) {
        agents[id].view.join(block.joined);
        schedule.wake(id);
      }
      block.waiting.clear();
      agent.view.join(block.joined);
      schedule.progress();
      const bool result = block.result;
      schedule.maybe_yield();
      return result;
    }
    block.waiting.push_back(schedule.current());
    schedule.block();
    // No thread completes the next barrier before this one has come to it.
    return block.result;
  }

 private:
  static constexpr size_t MAX_VERSIONS = 8;

  static uint64_t mask(uint32_t bytes) { return bytes == 8 ? ~0ull : (1ull << bytes * 8) - 1; }

  static uint64_t merged(uint64_t value, const Pending& store) {
    const uint32_t shift = store.address % 8 * 8;
    const uint64_t where = mask(store.bytes) << shift;
    return (value & ~where) | (store.value << shift & where);
  }

  Word& word_of(uintptr_t address) {
    Word& word = words_[address & ~uintptr_t(7)];
    if (word.versions.empty()) {
      uint64_t value;
      memcpy(&value, reinterpret_cast<const void*>(address & ~uintptr_t(7)), 8);
      word.versions.push_back(Version{value, 0, 0, nullptr});
    }
    return word;
  }

  // Numbers what an agent does; its own acts are in its view.
  uint32_t act(Agent& agent) { return ++agent.view.seen[&agent - agents.data()]; }

  static void note_reader(Word& word, Access reader) {
    for (Access& known : word.readers) {
      if (known.agent == reader.agent && known.where == reader.where) {
        known = reader;
        return;
      }
    }
    word.readers.push_back(reader);
  }

  // What is about to be overwritten was read by nobody, or before.
  void check_readers(Word& word, uint64_t where) {
    for (size_t i = 0; i < word.readers.size();) {
      const Access& reader = word.readers[i];
      if ((reader.where & where) == 0) {
        ++i;
        continue;
      }
      if (!me().view.has(reader.agent, reader.number)) found("payload overwritten that another may still read");
      word.readers.erase(word.readers.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  static void add_version(Word& word, const Pending& store) {
    word.versions.push_back(Version{merged(word.versions.back().value, store), store.agent, store.number, store.release});
    if (word.versions.size() > MAX_VERSIONS) {
      word.versions.erase(word.versions.begin());
      ++word.first;
    }
    memcpy(reinterpret_cast<void*>(store.address), &store.value, store.bytes);
  }

  // Now and then a store stays for the length of an operation.
  uint64_t lingering() {
    return schedule.random.one_in(32) ? schedule.steps + schedule.random.below(longest_linger) : 0;
  }

  // The first store that must drain before store i, or i.
  static size_t first_before(const Buffer& buffer, size_t i) {
    const Pending& store = buffer.stores[i];
    for (size_t j = 0; j < i; ++j) {
      const Pending& earlier = buffer.stores[j];
      const bool same = (earlier.address & ~uintptr_t(7)) == (store.address & ~uintptr_t(7));
      if (same || (store.release && store.release->has(earlier.agent, earlier.number))) return j;
    }
    return i;
  }

  // Drains store i, or one that must go first.
  void drain(Buffer& buffer, size_t i) {
    for (size_t j; (j = first_before(buffer, i)) != i;) i = j;
    const Pending store = buffer.stores[i];
    buffer.stores.erase(buffer.stores.begin() + static_cast<std::ptrdiff_t>(i));
    add_version(word_of(store.address), store);
    schedule.progress();
  }

  void drain_some() {
    if (buffers_.empty() || !schedule.random.one_in(drain_rate)) return;
    const size_t begin = schedule.random.below(uint32_t(buffers_.size()));
    for (size_t i = 0; i < buffers_.size(); ++i) {
      Buffer& buffer = *buffers_[(begin + i) % buffers_.size()];
      if (buffer.stores.empty()) continue;
      const size_t store = schedule.random.below(uint32_t(buffer.stores.size()));
      if (buffer.stores[store].lingers_until <= schedule.steps) drain(buffer, store);
      return;
    }
  }

  std::unordered_map<uintptr_t, Word> words_;
  std::unordered_map<uintptr_t, View> changed_;
  View in_turn_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

// The memory of the run in progress.
inline Memory* memory = nullptr;

}  // namespace ossicle::model
