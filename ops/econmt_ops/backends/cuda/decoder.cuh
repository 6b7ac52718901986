// What the forward and the backward kernel of the attentional LSTM share: how a launch is divided, the exchange of vectors
// among its blocks, and products with weights that stay in shared memory.
//
// A launch runs all steps of a block of steps. Its rows (sentences) are divided into groups of 64, and the 8 H / 64 blocks of
// a group share the units: block p owns units 8 p to 8 p + 7 of every layer, for all rows of its group, and row p of its
// group in attention. What the others need, a block writes to global memory, counts up the group's counter and goes on when
// the counter shows that all have written. Vectors that are multiplied lie there in chunks of 64 rows x 64 values, laid
// out as the tensor cores read them. The blocks of a cluster load each chunk once, each its share, for all of them.
//
// Compile-time parameters: BFLOAT16 (or float16), HIDDEN, ATTENTION, LAYERS, CLUSTER (blocks), SLOTS (chunks), STAGES
// (positions of a warp) on their way, MASKED (dropout between layers), RESIDUAL, FLOAT32 (see Range; then not BFLOAT16).
#pragma once

#include "device.cuh"

constexpr int H = HIDDEN, A = ATTENTION, L = LAYERS;
constexpr int UNROLLED = UNROLL;
constexpr int ROWS = 64, UNITS = 8, PARTS = H / UNITS, CHUNKS = H / 64;
// Four warps multiply and compute cells; the others compute attention, and load what is multiplied.
constexpr int MULTIPLIERS = 128, WARPS = 12, ATTENDERS = 32 * WARPS, THREADS = MULTIPLIERS + ATTENDERS;
constexpr int RING_FREE = 1, MULTIPLYING = 2, ATTENDING = 3;  // barriers of threads
constexpr int WAITING = THREADS - 32;  // for the ring: all but the warp that waits for the group
constexpr u32 CHUNK_BYTES = ROWS * 128;
constexpr int STAGE_BYTES = 2 * (A + H);
// The ring, and between its uses the positions that come in.
constexpr u32 RING_BYTES = SLOTS * CHUNK_BYTES, STAGES_BYTES = WARPS * STAGES * STAGE_BYTES;
constexpr u32 IN_BYTES = RING_BYTES > STAGES_BYTES ? RING_BYTES : STAGES_BYTES;
constexpr float LOG2_E = 1.4426950408889634f, LOWEST = -1e30f;

static_assert(H % 64 == 0 && A % 64 == 0 && PARTS % CLUSTER == 0, "sizes");
static_assert(CHUNKS <= SLOTS && SLOTS < WARPS && SLOTS % CLUSTER == 0, "slots");
static_assert(WARPS * H * 4 <= IN_BYTES && WARPS * A * 4 <= IN_BYTES && IN_BYTES % 8 == 0, "room");

// The place of the 16 bytes of values 8 j to 8 j + 7 of a row in its vector of chunks.
__device__ inline u32 piece_place(int row, int j) { return j / 8 * CHUNK_BYTES + row * 128 + ((j % 8 ^ row % 8) << 4); }

__device__ inline float sigmoid_of(float x) { return inverse(1.f + exp2_of(-LOG2_E * x)); }

// As `econmt_ops.backends.triton.pointwise.tanh`.
__device__ inline float tanh_of(float x) {
  x = fminf(fmaxf(x, -8.3f), 8.3f) + (x - x);  // NaN stays
  const float z = x * x;
  const float over = 0.999999991f + z * (0.134258768f + z * (3.54917643e-3f + z * (2.15086093e-5f + z * 1.46484067e-8f)));
  const float under = 1.f + z * (0.467592016f + z * (0.0260799778f + z * (3.37396208e-4f + z * 8.2951709e-7f)));
  return x * over * inverse(under);
}

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) value += lane_xor(value, mask);
  return value;
}
__device__ inline float warp_largest(float value) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) value = fmaxf(value, lane_xor(value, mask));
  return value;
}
// The sums of two values over the lanes, by half as many exchanges as of one after the other.
__device__ inline void warp_sums(float& one, float& other, int lane) {
  const bool upper = lane >= 16;
  float sum = (upper ? other : one) + lane_xor(upper ? one : other, 16);
#pragma unroll
  for (int mask = 8; mask; mask /= 2) sum += lane_xor(sum, mask);
  const float across = lane_xor(sum, 16);
  one = upper ? across : sum, other = upper ? sum : across;
}

// Values of tensors, and pairs of them.
#if FLOAT32
using value = float;
using Pair = float2;
__device__ inline float2 unpack(float2 pair) { return pair; }
__device__ inline float2 paired(float first, float second) { return make_float2(first, second); }
#else
using value = u16;
using Pair = u32;
__device__ inline u32 paired(float first, float second) { return pack(first, second); }
#endif
__device__ inline Pair load_pair(const value* from) { return *reinterpret_cast<const Pair*>(from); }
__device__ inline void store_pair(value* to, Pair pair) { *reinterpret_cast<Pair*>(to) = pair; }
__device__ inline void store_one(float* to, float number) { *to = number; }
__device__ inline void store_one(u16* to, float number) { *to = static_cast<u16>(pack(number, 0.f)); }
__device__ inline float widened(float number) { return number; }
__device__ inline float widened(u16 number) { return unpack(u32(number)).x; }

// Eight 16-bit values as floats.
__device__ inline void unpack_piece(float (&values)[8], uint4 piece) {
  const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack(words[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}

__device__ inline const uint4* piece_of(const u16* values, long long index) {
  return reinterpret_cast<const uint4*>(values + index);
}

// Eight values of a tensor, from float32 or 16 bits; FRESH: other blocks have written them.
template <bool FRESH = false>
__device__ inline void load_eight(float (&values)[8], const float* from) {
  const float4* pieces = reinterpret_cast<const float4*>(from);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 piece = FRESH ? load_fresh(pieces + i) : pieces[i];
    values[4 * i] = piece.x, values[4 * i + 1] = piece.y, values[4 * i + 2] = piece.z, values[4 * i + 3] = piece.w;
  }
}
template <bool FRESH = false>
__device__ inline void load_eight(float (&values)[8], const u16* from) {
  unpack_piece(values, FRESH ? load_fresh(piece_of(from, 0)) : *piece_of(from, 0));
}

__device__ inline void store_eight(float* to, const float (&v)[8]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
__device__ inline void store_eight(u16* to, const float (&v)[8]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

// Place of a launch's blocks, and the group's counter of what has been written.
struct Group {
  int part, first_row, rows;
  u32* counter;
  u32 written = 0;  // times that all blocks of the group have counted up

  __device__ Group(u32* counters, int batch) {
    const int group = blockIdx.x / PARTS;
    part = blockIdx.x % PARTS, first_row = group * ROWS;
    rows = min(ROWS, batch - first_row), counter = counters + 32 * group;
  }
  // Waits for what the blocks wrote before they last counted; copies of this thread then see it, too.
  __device__ void wait() const {
    wait_for_count(counter, written * PARTS);
    fence_global();
  }
};

// With FLOAT32, tensors are float32 and what is multiplied is float16, which has the mantissa of TF32: matrices in units of
// a power of two, and each row of a vector times one of its own, so that values of any size keep their digits. Slots, zero
// at first, hold for each row of each vector of each step the bits of a number that is at least about as large as the row's
// values. Blocks raise them by what they know before the row is made.
struct Range {
  u32* const& slots;
  const float* const& units;  // of the matrices of the layers, and of the last one: their values are up to 2^14 units
  int first;                  // vector of the group

  template <class Arguments>
  __device__ Range(const Arguments& given, const Group& group)
      : slots(given.slots), units(given.units), first(group.first_row / ROWS * (given.steps + 1) * (L + 1)) {}

  // Eight rows, which a warp raises at once, share 32 bytes of a cache line.
  __device__ u32* slot(int number, int vector, int row) const {
    return slots + ((first + number * (L + 1) + vector) * 8 + row / 8) * 32 + row % 8;
  }
  // By the four lanes that hold the row's units; ``there``: the row exists.
  __device__ void raise(int number, int vector, int row, bool there, float size, int lane) const {
    size = fmaxf(size, lane_xor(size, 1));
    size = fmaxf(size, lane_xor(size, 2));
    if (there && lane % 4 == 0) raise_to(slot(number, vector, row), bits_of(size));
  }
  __device__ float size(int number, int vector, int row) const { return float_of(load_fresh(slot(number, vector, row))); }
  // The largest that a product may make of a value 1, but for the number of its terms.
  __device__ float largest_weight(int matrix) const { return 16384.f * units[matrix]; }
};

// The least exponent of a power of two that a size does not exceed; zero counts as 2^-110.
__device__ inline int exponent_of(float size) {
  return min(max(static_cast<int>((bits_of(size) + 0x7fffff) >> 23) - 127, -110), 110);
}
__device__ inline float power_of_two(int exponent) { return float_of(static_cast<u32>(127 + exponent) << 23); }

// Values as they are multiplied: with FLOAT32 times a power of two, in float16.
__device__ inline u32 multiplied(u32 pair, int) { return pair; }
__device__ inline u32 multiplied(float2 pair, int exponent) {
  const float power = power_of_two(exponent);
  return pack(pair.x * power, pair.y * power);
}

// Slots in shared memory through which the chunks of a vector come in, the first one through slot 0; the same ones in SHARERS
// blocks of the cluster. Slot s is filled by block s % SHARERS, by its s-th attending warp. Four warps consume them.
template <int SHARERS>
struct Ring {
  unsigned char* slots;
  u64 *full, *empty;
  u32 parities = 0;  // of the slots' next phases, a bit each, in consuming warps
  u32 uses = 0;      // of its slot, in a warp that fills one

  __device__ Ring(unsigned char* slots, u64* barriers) : slots(slots), full(barriers), empty(barriers + SLOTS) {}

  __device__ void init() {  // by one thread
    for (int s = 0; s < SLOTS; ++s) barrier_init(full + s, 4), barrier_init(empty + s, 4 * SHARERS);
  }
  // Announces the bytes of a slot's next chunk, by one thread of each consuming warp.
  __device__ void announce(int s, int warp) {
    if (warp == 0) barrier_expect(full + s, CHUNK_BYTES);
    else barrier_arrive(full + s);
  }
  // True if a warp fills a slot.
  __device__ static bool fills(int warp) { return warp < SLOTS && (SHARERS == 1 || warp % SHARERS == cluster_rank()); }
  // Loads those of the chunks that go through the slot of a warp, by one of its threads.
  __device__ void load(const unsigned char* chunks, int count, int warp) {
    for (int i = warp; i < count; i += SLOTS, ++uses) {
      if (uses) barrier_wait(empty + warp, (uses - 1) & 1);
      unsigned char* to = slots + warp * CHUNK_BYTES;
      const unsigned char* from = chunks + i * CHUNK_BYTES;
      if (SHARERS == 1) copy_in(to, from, CHUNK_BYTES, full + warp);
      else copy_to_all(to, from, CHUNK_BYTES, full + warp, (1u << SHARERS) - 1);
    }
  }
  // Waits until the first chunk has come in; what other blocks had written before it can then be read.
  __device__ void wait_for_first() const { barrier_wait(full, parities & 1); }
  __device__ const unsigned char* wait(int s) {
    barrier_wait(full + s, parities >> s & 1);
    parities ^= 1u << s;
    return slots + s * CHUNK_BYTES;
  }
  __device__ void release(int s, int warp, int lane) {
    if (lane) return;
    announce(s, warp);
    if (SHARERS == 1) barrier_arrive(empty + s);
    else barrier_arrive_at(empty + s, s % SHARERS);
  }
};

// Adds the product of a chunk with N columns of weights, ``tile``, without waiting for it.
template <int N>
__device__ inline void multiply_chunk(float (&result)[N / 2], const unsigned char* chunk, const unsigned char* tile,
                                      bool adds) {
  const u64 a = operand(chunk), b = operand(tile);
#pragma unroll
  for (int k = 0; k < 4; ++k) multiply<N>(result, a + 2 * k, b + 2 * k, adds || k);
}

// Values of a row of N that a lane holds: pieces of eight, 32 pieces apart.
template <int N>
constexpr int PIECES = (N + 255) / 256;

template <int N>
__device__ inline bool has_piece(int piece, int lane) {
  return N % 256 == 0 || (piece * 32 + lane) * 8 < N;
}
template <int N>
__device__ inline void load_row(uint4 (&row)[PIECES<N>], const void* from, int lane) {
#pragma unroll
  for (int p = 0; p < PIECES<N>; ++p)
    row[p] = has_piece<N>(p, lane) ? static_cast<const uint4*>(from)[p * 32 + lane] : make_uint4(0, 0, 0, 0);
}

// A lane's part of a row of a tensor, which is on its way until its values are needed.
#if FLOAT32
template <int N>
struct Row {
  const float* from;
  __device__ void load(const float* row, int lane) {
    from = row;
    if (lane < N / 32) prefetch(row + 32 * lane);
  }
  __device__ void unpack(float (&values)[8], int piece, int lane) const { load_eight(values, from + (piece * 32 + lane) * 8); }
};
#else
template <int N>
struct Row {
  uint4 pieces[PIECES<N>];
  __device__ void load(const u16* row, int lane) { load_row<N>(pieces, row, lane); }
  __device__ void unpack(float (&values)[8], int piece, int) const { unpack_piece(values, pieces[piece]); }
};
#endif

// Keys and values of a position.
struct Position {
  uint4 keys[PIECES<A>], values[PIECES<H>];
};

// One warp's keys and values of a sentence, at positions warp, warp + WARPS, ..., which come in ahead of their use.
struct Positions {
  unsigned char* stages;
  u64* barriers;
  const u16 *keys, *values;
  int next, count, length;
  u32 used = 0;  // stages since the kernel began

  __device__ Positions(unsigned char* ring, u64* barriers, int warp)
      : stages(ring + warp * STAGES * STAGE_BYTES), barriers(barriers + warp * STAGES) {}
  __device__ void init() {
    for (int i = 0; i < STAGES; ++i) barrier_init(barriers + i, 1);
  }
  // Begins a sentence with keys (S, A) and values (S, H).
  __device__ void begin(const u16* its_keys, const u16* its_values, int its_length, int warp, int lane) {
    keys = its_keys, values = its_values, length = its_length;
    count = length > warp ? (length - warp + WARPS - 1) / WARPS : 0;
    if (lane < STAGES && lane < count) load(used + lane, warp + lane * WARPS);
    next = warp + STAGES * WARPS;
  }
  __device__ void load(u32 use, int position) {
    const u32 stage = use % STAGES;
    barrier_expect(barriers + stage, STAGE_BYTES);
    copy_in(stages + stage * STAGE_BYTES, keys + static_cast<long long>(position) * A, 2 * A, barriers + stage);
    copy_in(stages + stage * STAGE_BYTES + 2 * A, values + static_cast<long long>(position) * H, 2 * H, barriers + stage);
  }
  // Reads the oldest position that has come in.
  __device__ Position take(int lane) {
    barrier_wait(barriers + used % STAGES, used / STAGES & 1);
    const unsigned char* stage = stages + used++ % STAGES * STAGE_BYTES;
    Position position;
    load_row<A>(position.keys, stage, lane);
    load_row<H>(position.values, stage + 2 * A, lane);
    return position;
  }
  // Gives the places of the last two positions that were taken to those after the ones on their way.
  __device__ void refill(int lane) {
    fence_shared();  // the reads come before the copies
    warp_sync();
#pragma unroll
    for (int i = 0; i < 2; ++i, next += WARPS)
      if (lane == 0 && next < length) load(used - 2 + i + STAGES, next);
  }
};
