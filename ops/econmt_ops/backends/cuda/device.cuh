// What the kernels of this folder use of a Hopper GPU beyond C++: barriers in shared memory, bulk copies to all blocks of
// a cluster, tensor core products from shared memory, barriers among blocks of a grid. PTX ISA 8.0, sm_90a.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

__device__ inline u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

__device__ inline u32 bits_of(float value) { return __float_as_uint(value); }
__device__ inline float float_of(u32 bits) { return __uint_as_float(bits); }

// ---- Types: pairs of 16-bit floats in a word, the first value in the low half.

#if BFLOAT16
__device__ inline float2 unpack(u32 pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
__device__ inline u32 pack(float first, float second) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
#define OPERANDS "bf16.bf16"
#else
__device__ inline float2 unpack(u32 pair) {
  float2 values;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(values.x), "=f"(values.y) : "r"(pair));
  return values;
}
__device__ inline u32 pack(float first, float second) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
#define OPERANDS "f16.f16"
#endif

// ---- Memory that other blocks have written, read from the L2 cache.

__device__ inline u32 load_fresh(const u32* from) { return __ldcg(from); }
__device__ inline uint4 load_fresh(const uint4* from) { return __ldcg(from); }
__device__ inline float2 load_fresh(const float2* from) { return __ldcg(from); }
__device__ inline float4 load_fresh(const float4* from) { return __ldcg(from); }
__device__ inline void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
__device__ inline void raise_to(u32* place, u32 number) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(place), "r"(number) : "memory");
}

// ---- Functions.

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Error 5e-4, which 16-bit values do not show.
__device__ inline float fast_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float lane_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
// A value that is the same in all lanes, for the compiler to know.
__device__ inline int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
__device__ inline void warp_sync() { __syncwarp(); }

// ---- Barriers in shared memory. A phase ends when all arrivals and all announced bytes are there.

__device__ inline void barrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Makes initialised barriers known to the cluster and to copies.
__device__ inline void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void barrier_expect(u64* barrier, u32 bytes) {  // arrives, too
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ inline void barrier_arrive_at(u64* barrier, u32 block) {  // the same barrier of another block of the cluster
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(
          shared_address(barrier)),
      "r"(block)
      : "memory");
}

// Waits that last some seconds are a fault, which ends the kernel. The loops are assembly, since ptxas delays the products
// of tensor cores where it sees that threads may diverge.
#define WAIT_LOOP(condition)                                                                                           \
  "{.reg .pred done, more; .reg .b32 tries; mov.b32 tries, 0;\n"                                                       \
  "again_%=: " condition "@done bra there_%=; add.u32 tries, tries, 1; setp.lt.u32 more, tries, 0x4000000;\n"          \
  "@more bra again_%=; trap; there_%=:}"

__device__ inline void barrier_wait(u64* barrier, u32 parity) {
  asm volatile(WAIT_LOOP("mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;") ::"r"(shared_address(barrier)),
               "r"(parity)
               : "memory");
}

// Stores into the same place of another block of the cluster; its barrier counts the bytes.
__device__ inline void store_at(float4* to, u32 block, float4 values, u64* barrier) {
  asm volatile(
      "{.reg .b32 there, counts; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 counts, %1, %2;"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counts];}" ::"r"(
          shared_address(to)),
      "r"(shared_address(barrier)), "r"(block), "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w)
      : "memory");
}
// As barrier_wait, for what other blocks have stored.
__device__ inline void barrier_wait_cluster(u64* barrier, u32 parity) {
  asm volatile(WAIT_LOOP("mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;") ::"r"(
                   shared_address(barrier)),
               "r"(parity)
               : "memory");
}

// ---- Bulk copies from global to shared memory.

__device__ inline void copy_in(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// To the same place in every block of the cluster that has a bit in ``blocks``; each one's barrier counts the bytes.
__device__ inline void copy_to_all(void* to, const void* from, u32 bytes, u64* barrier, u16 blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"(blocks)
      : "memory");
}
// Between ordinary accesses to memory and later ones of copies and tensor cores: to global memory, that of other blocks
// included of which this thread knows, or to the block's shared memory.
__device__ inline void fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ inline void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Clusters and grids.

__device__ inline u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline void threads_sync(int number, int threads) {  // of the warps that name this number
  warp_sync();
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// As threads_sync for the others, who wait; this thread does not.
__device__ inline void threads_arrive(int number, int threads) {
  warp_sync();
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ inline void count_up(u32* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline void wait_for_count(const u32* counter, u32 count) {
  asm volatile(
      "{.reg .u32 seen;" WAIT_LOOP("ld.acquire.gpu.global.u32 seen, [%0]; setp.ge.u32 done, seen, %1;") "}" ::"l"(counter),
      "r"(count)
      : "memory");
}

// ---- Products of a warpgroup: 64 rows of 16-bit values by N columns, 16 terms at a time. Both operands lie in shared
// memory as rows of 64 values (128 bytes, the 16-byte pieces of row r exchanged by XOR with r % 8), eight rows after
// eight. Thread t of the warpgroup holds in result[4 j + 2 k + e] row 16 (t / 32) + t % 32 / 4 + 8 k, column
// 8 j + 2 (t % 4) + e.

__device__ inline u64 operand(const void* tile) {
  const u64 address = shared_address(tile);
  return (address & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Results may be read after products_wait and hold, which keeps the compiler from reading them earlier.
template <int N>
__device__ inline void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N>
__device__ inline void multiply(float (&d)[N / 2], u64 a, u64 b, bool adds);

template <>
__device__ inline void multiply<8>(float (&d)[4], u64 a, u64 b, bool adds) {
  asm volatile("{.reg .pred adds; setp.ne.b32 adds, %6, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32." OPERANDS
               " {%0, %1, %2, %3}, %4, %5, adds, 1, 1, 0, 0;}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "l"(a), "l"(b), "r"(int(adds)));
}
template <>
__device__ inline void multiply<16>(float (&d)[8], u64 a, u64 b, bool adds) {
  asm volatile("{.reg .pred adds; setp.ne.b32 adds, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32." OPERANDS
               " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, adds, 1, 1, 0, 0;}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "l"(a), "l"(b), "r"(int(adds)));
}
template <>
__device__ inline void multiply<24>(float (&d)[12], u64 a, u64 b, bool adds) {
  asm volatile("{.reg .pred adds; setp.ne.b32 adds, %14, 0; wgmma.mma_async.sync.aligned.m64n24k16.f32." OPERANDS
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, %12, %13, adds, 1, 1, 0, 0;}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
               : "l"(a), "l"(b), "r"(int(adds)));
}
template <>
__device__ inline void multiply<32>(float (&d)[16], u64 a, u64 b, bool adds) {
  asm volatile(
      "{.reg .pred adds; setp.ne.b32 adds, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." OPERANDS
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, adds, 1, 1, 0, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(int(adds)));
}
