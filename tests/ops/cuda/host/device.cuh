// The functions of ops/econmt_ops/backends/cuda/device.cuh on a CPU: blocks and threads are coroutines of one process, run
// in an order drawn at random. Those of one block, or one warp of every block, may be late: they run only when no other
// thread can. Or all others are. Products and copies take place at once. What waits for ever ends the process.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using std::max;
using std::min;
using std::fabs;

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

inline u32 bits_of(float value) { u32 bits; std::memcpy(&bits, &value, 4); return bits; }
inline float float_of(u32 bits) { float value; std::memcpy(&value, &bits, 4); return value; }

// ---- Coroutines.

struct Meeting {  // a barrier of threads
  int arrived = 0;
  long long passed = 0;
};

struct Block {
  std::unique_ptr<unsigned char[]> room;
  unsigned char* memory;
  Meeting meetings[16];
  std::vector<Meeting> warps;
  std::vector<float> lanes;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack;
  std::function<bool()> may_go;
  bool ended = false;
  int block, number;
};

struct Machine {
  int cluster = 1, threads_of_block = 0;
  std::vector<Block> blocks;
  std::vector<Meeting> clusters;
  std::vector<Thread> threads;
  ucontext_t scheduler;
  Thread* current = nullptr;
  std::function<void()> kernel;
  std::mt19937 draw;
};
inline Machine machine;

struct BlockIndex { struct { operator int() const { return machine.current->block; } } x; };
struct ThreadIndex { struct { operator int() const { return machine.current->number; } } x; };
inline BlockIndex blockIdx;
inline ThreadIndex threadIdx;

inline Block& this_block() { return machine.blocks[machine.current->block]; }
inline void wait_until(std::function<bool()> condition) {
  if (condition()) return;
  machine.current->may_go = std::move(condition);
  swapcontext(&machine.current->context, &machine.scheduler);
}
inline void meet(Meeting& meeting, int threads, bool waits = true) {
  const long long now = meeting.passed;
  if (++meeting.arrived == threads) {
    meeting.arrived = 0, ++meeting.passed;
    return;
  }
  if (waits) wait_until([&meeting, now] { return meeting.passed > now; });
}
inline void enter() {
  machine.kernel();
  machine.current->ended = true;
  swapcontext(&machine.current->context, &machine.scheduler);
}

// Runs a kernel. ``block`` and ``warp``: which are late, -1: none; or, if ``others``, which are not. Returns 0, or 1 if its
// threads wait for each other for ever, or 2 if one has written beyond the shared memory.
inline int run_grid(int blocks, int threads, int cluster, size_t shared_bytes, u32 seed, int block, int warp, int others,
                    std::function<void()> kernel) {
  constexpr size_t STACK = 64 << 10, GUARD = 4096;
  machine = Machine();
  machine.cluster = cluster, machine.threads_of_block = threads, machine.kernel = std::move(kernel);
  machine.draw.seed(seed);
  machine.blocks.resize(blocks), machine.clusters.resize(blocks / cluster);
  for (Block& block : machine.blocks) {
    block.room.reset(new unsigned char[shared_bytes + 1024 + GUARD]);
    std::memset(block.room.get(), 0xff, shared_bytes + 1024 + GUARD);
    block.memory = reinterpret_cast<unsigned char*>((reinterpret_cast<size_t>(block.room.get()) + 1023) / 1024 * 1024);
    block.warps.resize(threads / 32), block.lanes.resize(threads);
  }
  machine.threads.resize(blocks * threads);
  for (size_t i = 0; i < machine.threads.size(); ++i) {
    Thread& thread = machine.threads[i];
    thread.block = i / threads, thread.number = i % threads;
    thread.stack.reset(new unsigned char[STACK]);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get(), thread.context.uc_stack.ss_size = STACK;
    makecontext(&thread.context, enter, 0);
  }
  std::vector<int> alive(machine.threads.size());
  for (size_t i = 0; i < alive.size(); ++i) alive[i] = i;
  // Lets all threads that are late, or all others, run until they wait; returns whether one could.
  const auto run_those = [&](bool late) {
    bool moved = false;
    const size_t first = machine.draw() % alive.size();
    for (size_t i = 0; i < alive.size(); ++i) {
      Thread& thread = machine.threads[alive[(first + i) % alive.size()]];
      const bool named = thread.block == block || thread.number / 32 == warp;
      if ((named != bool(others)) != late || thread.ended || (thread.may_go && !thread.may_go())) continue;
      thread.may_go = nullptr, moved = true, machine.current = &thread;
      swapcontext(&machine.scheduler, &thread.context);
    }
    return moved;
  };
  while (!alive.empty()) {
    if (!run_those(false) && !run_those(true)) return 1;
    alive.erase(std::remove_if(alive.begin(), alive.end(), [](int i) { return machine.threads[i].ended; }), alive.end());
  }
  for (Block& block : machine.blocks)
    for (size_t i = 0; i < GUARD; ++i)
      if (block.memory[shared_bytes + i] != 0xff) return 2;
  return 0;
}

// ---- Values and functions.

inline unsigned char* shared_memory() { return this_block().memory; }

#if BFLOAT16
inline float2 unpack(u32 pair) {
  float2 values;
  const u32 low = pair << 16, high = pair & 0xffff0000u;
  std::memcpy(&values.x, &low, 4), std::memcpy(&values.y, &high, 4);
  return values;
}
inline u32 rounded(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack(float first, float second) { return rounded(first) | rounded(second) << 16; }
#else
inline float2 unpack(u32 pair) {
  _Float16 values[2];
  std::memcpy(values, &pair, 4);
  return {float(values[0]), float(values[1])};
}
inline u32 pack(float first, float second) {
  const _Float16 values[2] = {_Float16(first), _Float16(second)};
  u32 pair;
  std::memcpy(&pair, values, 4);
  return pair;
}
#endif

template <typename T>
T load_fresh(const T* from) { return *from; }
inline void prefetch(const void*) {}
inline void raise_to(u32* place, u32 number) { *place = max(*place, number); }
inline float exp2_of(float x) { return std::exp2(x); }
inline float inverse(float x) { return 1.f / x; }
inline float fast_tanh(float x) { return std::tanh(x); }
inline int uniform(int value) { return value; }
inline void warp_sync() { meet(this_block().warps[threadIdx.x / 32], 32); }
inline float lane_xor(float value, int mask) {
  Block& block = this_block();
  const int thread = threadIdx.x;
  block.lanes[thread] = value;
  warp_sync();
  const float other = block.lanes[thread ^ mask];
  warp_sync();
  return other;
}

// ---- Barriers in shared memory: arrivals of a phase, those still missing, and bytes still missing, in eight bytes.

struct SharedBarrier { unsigned phase : 1, arrivals : 15; short missing; int bytes; };
static_assert(sizeof(SharedBarrier) == 8);
inline SharedBarrier& barrier_at(u64* barrier) { return *reinterpret_cast<SharedBarrier*>(barrier); }
inline void end_phase(SharedBarrier& barrier) {
  if (barrier.missing < 0) std::fprintf(stderr, "too many arrivals at a barrier\n"), std::abort();
  if (barrier.missing == 0 && barrier.bytes == 0) barrier.phase ^= 1, barrier.missing = barrier.arrivals;
}
inline void barrier_init(u64* barrier, u32 arrivals) { barrier_at(barrier) = {0, arrivals, short(arrivals), 0}; }
inline void barrier_init_done() {}
inline void arrive(u64* barrier, int bytes) {
  SharedBarrier& its = barrier_at(barrier);
  its.bytes += bytes, --its.missing;
  end_phase(its);
}
inline void barrier_arrive(u64* barrier) { arrive(barrier, 0); }
inline void barrier_expect(u64* barrier, u32 bytes) { arrive(barrier, bytes); }
template <typename T>
T* in_block(T* pointer, int rank) {
  const int block = machine.current->block / machine.cluster * machine.cluster + rank;
  return reinterpret_cast<T*>(machine.blocks[block].memory + (reinterpret_cast<unsigned char*>(pointer) - this_block().memory));
}
inline void barrier_arrive_at(u64* barrier, u32 block) { arrive(in_block(barrier, block), 0); }
inline void barrier_wait(u64* barrier, u32 parity) {
  wait_until([barrier, parity] { return barrier_at(barrier).phase != parity; });
}

inline void copy_to(void* to, const void* from, u32 bytes, u64* barrier) {
  std::memcpy(to, from, bytes);
  SharedBarrier& its = barrier_at(barrier);
  its.bytes -= bytes;
  end_phase(its);
}
inline void copy_in(void* to, const void* from, u32 bytes, u64* barrier) { copy_to(to, from, bytes, barrier); }
inline void copy_to_all(void* to, const void* from, u32 bytes, u64* barrier, u16 blocks) {
  for (int rank = 0; rank < machine.cluster; ++rank)
    if (blocks >> rank & 1) copy_to(in_block(to, rank), from, bytes, in_block(barrier, rank));
}
inline void store_at(float4* to, u32 block, float4 values, u64* barrier) {
  copy_to(in_block(to, block), &values, sizeof values, in_block(barrier, block));
}
inline void barrier_wait_cluster(u64* barrier, u32 parity) { barrier_wait(barrier, parity); }
inline void fence_global() {}
inline void fence_shared() {}

inline u32 cluster_rank() { return machine.current->block % machine.cluster; }
inline void cluster_sync() {
  meet(machine.clusters[machine.current->block / machine.cluster], machine.cluster * machine.threads_of_block);
}
inline void threads_sync(int number, int threads) { meet(this_block().meetings[number], threads); }
inline void threads_arrive(int number, int threads) { meet(this_block().meetings[number], threads, false); }
inline void __syncthreads() { threads_sync(0, machine.threads_of_block); }
inline void count_up(u32* counter) { ++*counter; }
inline void wait_for_count(const u32* counter, u32 count) {
  wait_until([counter, count] { return *counter >= count; });
}

// ---- Products.

inline u64 operand(const void* tile) { return reinterpret_cast<u64>(tile) >> 4; }
inline void products_begin() {}
inline void products_commit() {}
template <int PENDING>
void products_wait() { warp_sync(); }  // a warp multiplies as one
template <int N>
void hold(float (&)[N]) {}
inline float element(u64 start, int row, int k) {
  u64 address = (start << 4) + row / 8 * 1024 + row % 8 * 128 + k * 2;
  address ^= (address >> 7 & 7) << 4;
  return unpack(*reinterpret_cast<const u16*>(address)).x;
}
template <int N>
void multiply(float (&d)[N / 2], u64 a, u64 b, bool adds) {
  const int thread = threadIdx.x, row = thread % 128 / 32 * 16 + thread % 32 / 4;
  for (int i = 0; i < N / 2; ++i) {
    const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
    float sum = adds ? d[i] : 0.f;
    for (int k = 0; k < 16; ++k) sum += element(a, row + i / 2 % 2 * 8, k) * element(b, column, k);
    d[i] = sum;
  }
}
