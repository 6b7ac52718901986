// Forward pass of the attentional LSTM over a block of steps; see `econmt_ops.backends.cuda.decoder`.
#include "decoder.cuh"

struct ForwardArguments {
  const u16* weights[2];     // of each layer, (4H, 2H): for its input, at the bottom o of the step before; and for h
  long long weights_row[2];  // from one row to the next
  const u16* both;           // (A + H, H): query, and the stack's share of o
  const value* bias;           // (4H) of the upper layer
  const value* combine_bias;   // (H), or null
  const value* score;          // (A)
  const u16* keys;           // (B, S, A)
  const u16* projected;      // (B, S, H)
  const long long* lengths;  // (B), or null
  const float* units;        // with FLOAT32 of the layers' weights and of both; see Range
  const float* key_units;    // (B), likewise of the keys of each sentence
  const float* projected_units;
  const value* sums;           // (K, B, 4H), the inputs' share of the bottom gates, with bias
  const value* first_output;   // (B, H)
  value* outputs;              // (K, B, H)
  value* attention;            // (K, B, S), its rows attention_row values apart
  long long attention_row;
  value* h[2];                 // (K, B, H) of each layer, or null
  value* state_h;              // (L, B, H), before and after the steps
  float* state_c;            // (L, B, H)
  const unsigned char* mask; // (K, B, H), or null: 1 where the upper layer's input is kept
  long long mask_step, mask_row;
  unsigned char* exchange;
  u32* counters;             // zeros
  u32* slots;                // zeros, see Range
  float scale;
  int steps, batch, positions;
};

// Columns of the last product: its share of the queries, and of o.
constexpr int QUERY = A / PARTS, QUERY_COLUMNS = (QUERY + 7) / 8 * 8, BOTH = QUERY_COLUMNS + UNITS;
static_assert(A % PARTS == 0 && QUERY % 2 == 0, "queries are shared in pairs");

// True if what a layer shows to the next one, or to attention, is not its h.
__device__ constexpr bool shows_other(int layer) { return layer < L - 1 ? MASKED : RESIDUAL && layer > 0; }

constexpr u32 VECTOR = CHUNKS * CHUNK_BYTES;
// Vectors of a group: o, then of each layer two of h, which blocks may write and read at the same time, and what it shows;
// then rows (64, A + H) for attention.
__device__ inline u32 h_vector(int layer, int step) {
  return VECTOR * (1 + 3 * layer + (shows_other(layer) ? step & 1 : step < 0));
}
__device__ inline u32 shown_vector(int layer, int step) {
  return shows_other(layer) ? VECTOR * (3 + 3 * layer) : h_vector(layer, step);
}
constexpr u32 FOR_ATTENTION = VECTOR * (1 + 3 * L);
constexpr u32 GROUP_BYTES = FOR_ATTENTION + ROWS * (A + H) * sizeof(value);
// Exponents of the powers of two, see Range: rows of o are known when they are given away, those of h may be 2^12 times as
// large as was foreseen, and are not beyond 64 but in the state before the steps.
constexpr int O_EXPONENT = 14, H_EXPONENT = 4, LEAST_EXPONENT = 10;
__device__ inline int exponent_of_h(float size, bool is_first) {
  return max(H_EXPONENT - exponent_of(size), is_first ? -200 : LEAST_EXPONENT);
}

constexpr u32 GATES_TILE = 4 * UNITS * 128, BOTH_TILE = BOTH * 128;
constexpr u32 LAYER_BYTES = 2 * CHUNKS * GATES_TILE;

struct ForwardMemory {
  unsigned char *gates, *both, *ring;
  u64* barriers;
  float *parts, *maxima, *scores;

  __device__ ForwardMemory() {
    gates = shared_memory(), both = gates + L * LAYER_BYTES, ring = both + CHUNKS * BOTH_TILE;
    barriers = reinterpret_cast<u64*>(ring + IN_BYTES);
    parts = reinterpret_cast<float*>(barriers + 2 * SLOTS + WARPS * STAGES), maxima = parts + 2 * WARPS;
    scores = maxima + WARPS;
  }
};

__device__ void load_weights(const ForwardArguments& given, const ForwardMemory& memory, int part) {
  for (int layer = 0; layer < L; ++layer)
    for (int i = threadIdx.x; i < 2 * CHUNKS * 4 * UNITS * 8; i += THREADS) {
      const int j = i % 8, n = i / 8 % (4 * UNITS), chunk = i / (8 * 4 * UNITS);
      const long long row = n / UNITS * H + part * UNITS + n % UNITS;
      const uint4 piece = *piece_of(given.weights[layer], row * given.weights_row[layer] + chunk * 64 + j * 8);
      *reinterpret_cast<uint4*>(memory.gates + layer * LAYER_BYTES + chunk * GATES_TILE + n * 128 + ((j ^ n % 8) << 4)) =
          piece;
    }
  for (int i = threadIdx.x; i < CHUNKS * BOTH * 8; i += THREADS) {
    const int j = i % 8, n = i / 8 % BOTH, chunk = i / (8 * BOTH);
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (n < QUERY || n >= QUERY_COLUMNS) {
      const long long row = n < QUERY ? part * QUERY + n : A + part * UNITS + n - QUERY_COLUMNS;
      piece = *piece_of(given.both, row * H + chunk * 64 + j * 8);
    }
    *reinterpret_cast<uint4*>(memory.both + chunk * BOTH_TILE + n * 128 + ((j ^ n % 8) << 4)) = piece;
  }
}

// What is known of the sizes of the states before the first step, and of that step.
__device__ void raise_first(const ForwardArguments& given, const Group& group, const Range& range) {
  for (int i = threadIdx.x; i < L * group.rows * UNITS; i += THREADS) {
    const int layer = i / (group.rows * UNITS), row = i / UNITS % group.rows, unit = group.part * UNITS + i % UNITS;
    const long long sentence = group.first_row + row, place = (layer * given.batch + sentence) * H + unit;
    const float h = fabsf(widened(given.state_h[place])), c = fabsf(given.state_c[place]);
    const float share = fabsf(widened(layer ? given.bias[2 * H + unit] : given.sums[sentence * 4 * H + 2 * H + unit]));
    raise_to(range.slot(0, layer, row), bits_of(h));
    raise_to(range.slot(1, layer, row), bits_of(fmaxf(fmaxf(c, share), range.largest_weight(layer) * h)));
  }
  for (int row = group.part; row < group.rows; row += PARTS)
    for (int unit = threadIdx.x; unit < H; unit += THREADS) {
      const float o = widened(given.first_output[static_cast<long long>(group.first_row + row) * H + unit]);
      raise_to(range.slot(0, L, row), bits_of(fabsf(o)));
    }
}

// The states before the first step, into the exchange.
__device__ void give_states(const ForwardArguments& given, const Group& group, const Range& range, unsigned char* exchange) {
  for (int i = threadIdx.x; i < L * group.rows * UNITS / 2; i += THREADS) {
    const int layer = i / (group.rows * UNITS / 2), row = i / (UNITS / 2) % group.rows, unit = i % (UNITS / 2) * 2;
    const long long from = (static_cast<long long>(layer) * given.batch + group.first_row + row) * H + group.part * UNITS;
    const int exponent = FLOAT32 ? exponent_of_h(range.size(0, layer, row), true) : 0;
    *reinterpret_cast<u32*>(exchange + h_vector(layer, -1) + piece_place(row, group.part) + 2 * unit) =
        multiplied(load_pair(given.state_h + from + unit), exponent);
  }
  for (int row = group.part; row < group.rows; row += PARTS) {
    const int exponent = FLOAT32 ? O_EXPONENT - exponent_of(range.size(0, L, row)) : 0;
    for (int unit = 2 * threadIdx.x; unit < H; unit += 2 * THREADS)
      *reinterpret_cast<u32*>(exchange + piece_place(row, unit / 8) + unit % 8 * 2) =
          multiplied(load_pair(given.first_output + static_cast<long long>(group.first_row + row) * H + unit), exponent);
  }
}

// The layers and the last product of a step, for the units and rows of a thread of the first warpgroup: rows
// 16 warp + lane / 4 and eight further, units 2 (lane % 4) and the next one.
struct Cells {
  const ForwardArguments& given;
  const ForwardMemory& memory;
  unsigned char* exchange;
  Ring<CLUSTER>& ring;
  const Range range;
  int warp, lane, unit;
  float gates[L][16], c[L][4], shown[4];
  Pair bias[4], combine_bias, h[L][2];
  int exponents[L][2] = {};        // of the rows of h and of what a layer shows
  float foreseen[2] = {}, o[2] = {};  // sizes of rows of h to come, and of o

  __device__ Cells(const ForwardArguments& given, const ForwardMemory& memory, unsigned char* exchange, Ring<CLUSTER>& ring,
                   const Range& range, const Group& group, int warp, int lane)
      : given(given), memory(memory), exchange(exchange), ring(ring), range(range), warp(warp), lane(lane) {
    unit = group.part * UNITS + 2 * (lane % 4);
    combine_bias = given.combine_bias ? load_pair(given.combine_bias + unit) : Pair{};
    for (int gate = 0; L > 1 && gate < 4; ++gate)
      bias[gate] = load_pair(given.bias + gate * H + unit);
    for (int layer = 0; layer < L; ++layer)
      for (int k = 0; k < 2; ++k) {
        float2 pair = make_float2(0.f, 0.f);
        if (row(k) < group.rows) pair = *reinterpret_cast<const float2*>(given.state_c + state(group, layer, k));
        c[layer][2 * k] = pair.x, c[layer][2 * k + 1] = pair.y;
      }
  }
  __device__ int row(int k) const { return 16 * warp + lane / 4 + 8 * k; }
  __device__ long long state(const Group& group, int layer, int k) const {
    return (static_cast<long long>(layer) * given.batch + group.first_row + row(k)) * H + unit;
  }
  __device__ const unsigned char* tiles(int layer, bool of_h) const {
    return memory.gates + layer * LAYER_BYTES + (of_h ? CHUNKS * GATES_TILE : 0);
  }

  // Waits for a vector in the ring and multiplies it.
  template <int N>
  __device__ void multiply_vector(float (&result)[N / 2], const unsigned char* its_tiles, bool adds) {
    products_begin();
#pragma unroll UNROLLED
    for (int i = 0; i < CHUNKS; ++i) multiply_chunk<N>(result, ring.wait(i), its_tiles + i * N * 128, adds || i);
    products_commit();
    products_wait<0>();
    hold(result);
  }
  // Divides a product by the powers of two of its rows and of its weights.
  template <int N>
  __device__ void unscale(float (&result)[N], int first_exponent, int second_exponent, int matrix) const {
    if (!FLOAT32) return;
    const float unit = range.units[matrix];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float power = power_of_two(k ? -second_exponent : -first_exponent);
#pragma unroll
      for (int i = 0; i < N / 4; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) result[4 * i + 2 * k + e] *= power, result[4 * i + 2 * k + e] *= unit;
    }
  }
  // Adds the product of a vector to the gates of a layer, if ``adds``; ``of_row``: the exponent of its k-th row.
  template <class Exponent>
  __device__ void add_vector(int layer, bool of_h, bool adds, Exponent of_row) {
    if (!FLOAT32) return multiply_vector<32>(gates[layer], tiles(layer, of_h), adds);
    float product[16];
    multiply_vector<32>(product, tiles(layer, of_h), false);
    unscale(product, of_row(0), of_row(1), layer);
#pragma unroll
    for (int i = 0; i < 16; ++i) gates[layer][i] = adds ? gates[layer][i] + product[i] : product[i];
  }
  // Begins to read what is known of the sizes of o, and of what a layer will make of it.
  __device__ void read_sizes(int layer, int number) {
    if (!FLOAT32) return;
    ring.wait_for_first();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      foreseen[k] = range.size(number + 1, layer, row(k));
      if (layer == 0) o[k] = range.size(number, L, row(k));
    }
  }
  // Gives the vector back; before, if it is the layer's h, multiplies it for the layer's next step.
  template <int LAYER>
  __device__ void finish() {
    if (!shows_other(LAYER)) {
      products_begin();
#pragma unroll UNROLLED
      for (int i = 0; i < CHUNKS; ++i)
        multiply_chunk<32>(gates[LAYER], ring.slots + i * CHUNK_BYTES, tiles(LAYER, true) + i * GATES_TILE, i);
      products_commit();
      products_wait<0>();
      hold(gates[LAYER]);
      unscale(gates[LAYER], exponents[LAYER][0], exponents[LAYER][1], LAYER);
    }
    release();
  }
  __device__ void release() {
#pragma unroll 1
    for (int i = 0; i < CHUNKS; ++i) ring.release(i, warp, lane);
  }

  // A cell of each row and unit; ``sums``: what is added to the product. Writes h and what the layer shows.
  __device__ void step(const Group& group, int layer, int number, const Pair (&sums)[2][4]) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float made[2];
      if (FLOAT32) {
        const float size = layer ? foreseen[k] : fmaxf(foreseen[k], range.largest_weight(0) * o[k]);
        exponents[layer][k] = exponent_of_h(size, false);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float gate[4];
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          const float2 pair = unpack(sums[k][g]);
          gate[g] = gates[layer][4 * g + 2 * k + e];
          if (!FLOAT32) gate[g] += e ? pair.y : pair.x;
        }
        float& cell = c[layer][2 * k + e];
        cell = sigmoid_of(gate[1]) * cell + sigmoid_of(gate[0]) * tanh_of(gate[2]);
        made[e] = sigmoid_of(gate[3]) * tanh_of(cell);
      }
      const Pair rounded = paired(made[0], made[1]);
      h[layer][k] = rounded;
      const u32 place = piece_place(row(k), group.part) + 4 * (lane % 4);
      if (row(k) < group.rows)
        *reinterpret_cast<u32*>(exchange + h_vector(layer, number) + place) = multiplied(rounded, exponents[layer][k]);
      if (!shows_other(layer)) continue;
      float2 pair = unpack(rounded);
      if (layer < L - 1) {
        u16 kept = 0;
        if (row(k) < group.rows)
          kept = *reinterpret_cast<const u16*>(given.mask + number * given.mask_step +
                                               (group.first_row + row(k)) * given.mask_row + unit);
        pair.x = kept & 0xff ? pair.x * given.scale : 0.f, pair.y = kept & 0xff00 ? pair.y * given.scale : 0.f;
      } else {
        pair.x += shown[2 * k], pair.y += shown[2 * k + 1];
      }
      const Pair other = paired(pair.x, pair.y);
      if (row(k) < group.rows)
        *reinterpret_cast<u32*>(exchange + shown_vector(layer, number) + place) = multiplied(other, exponents[layer][k]);
      pair = unpack(other);
      shown[2 * k] = pair.x, shown[2 * k + 1] = pair.y;
    }
    if (!shows_other(layer) && layer < L - 1)
      for (int k = 0; k < 2; ++k) {
        const float2 pair = unpack(h[layer][k]);
        shown[2 * k] = pair.x, shown[2 * k + 1] = pair.y;
      }
    if (FLOAT32 && layer < L - 1)
      for (int k = 0; k < 2; ++k) {
        const float size = fmaxf(fabsf(shown[2 * k]), fabsf(shown[2 * k + 1])) * fmaxf(1.f, range.largest_weight(layer + 1));
        range.raise(number + 1, layer + 1, row(k), row(k) < group.rows, size, lane);
      }
  }
  // Tells what is known of a layer's next step.
  __device__ void raise_next(const Group& group, int layer, int number) const {
    if (!FLOAT32 || number + 1 == given.steps) return;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float2 share = unpack(bias[2]);
      const float2 made = unpack(h[layer][k]);
      if (layer == 0 && row(k) < group.rows) share = unpack(load_pair(its_sums(group, number + 1, k) + 2 * H));
      const float size = fmaxf(fabsf(made.x), fabsf(made.y)) * range.largest_weight(layer);
      const float other = fmaxf(fmaxf(fabsf(c[layer][2 * k]), fabsf(c[layer][2 * k + 1])), fmaxf(fabsf(share.x), fabsf(share.y)));
      range.raise(number + 2, layer, row(k), row(k) < group.rows, fmaxf(size, other), lane);
    }
  }
  __device__ const value* its_sums(const Group& group, int number, int k) const {
    return given.sums + (static_cast<long long>(number) * given.batch + group.first_row + row(k)) * 4 * H + unit;
  }

  __device__ void keep(const Group& group, int layer, int number) {
    raise_next(group, layer, number);
    for (int k = 0; k < 2; ++k)
      if (row(k) < group.rows) {
        const long long place = static_cast<long long>(number) * given.batch * H + state(group, 0, k);
        if (given.h[layer]) store_pair(given.h[layer] + place, h[layer][k]);
        if (number + 1 < given.steps) continue;
        store_pair(given.state_h + state(group, layer, k), h[layer][k]);
        *reinterpret_cast<float2*>(given.state_c + state(group, layer, k)) =
            make_float2(c[layer][2 * k], c[layer][2 * k + 1]);
      }
  }

  // Tells the group that this block has written.
  __device__ void tell(Group& group) {
    threads_sync(MULTIPLYING, MULTIPLIERS);
    if (warp == 0 && lane == 0) count_up(group.counter);
    ++group.written;
  }

  // All steps.
  __device__ void run(Group& group) {
#pragma unroll
    for (int layer = 0; layer < L; ++layer)
      {
        for (int k = 0; FLOAT32 && k < 2; ++k) exponents[layer][k] = exponent_of_h(range.size(0, layer, row(k)), true);
        if (!shows_other(layer)) add_vector(layer, true, false, [&](int k) { return exponents[layer][k]; }), release();
      }
    for (int number = 0; number < given.steps; ++number) {
      run_step(group, number);
      threads_arrive(RING_FREE, WAITING);
      ++group.written;
    }
  }
  // With FLOAT32 the gates are sums already, to which products are added.
  __device__ void begin_gates(int layer, const Pair (&sums)[2][4]) {
    if (!FLOAT32) return;
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const float2 pair = unpack(sums[k][g]);
        float* gate = gates[layer] + 4 * g + 2 * k;
        gate[0] = shows_other(layer) ? pair.x : gate[0] + pair.x, gate[1] = shows_other(layer) ? pair.y : gate[1] + pair.y;
      }
  }
  __device__ void run_step(Group& group, int number) {
    Pair sums[2][4] = {};
    for (int k = 0; k < 2; ++k)
      for (int g = 0; g < 4 && row(k) < group.rows; ++g) sums[k][g] = load_pair(its_sums(group, number, k) + g * H);
    begin_gates(0, sums);
    read_sizes(0, number);
    add_vector(0, false, FLOAT32 || !shows_other(0), [&](int k) { return O_EXPONENT - exponent_of(o[k]); });
    release();
    if (shows_other(0)) add_vector(0, true, true, [&](int k) { return exponents[0][k]; }), release();
    step(group, 0, number, sums);
    tell(group);
    keep(group, 0, number);
    if (L > 1) {
      for (int g = 0; g < 4; ++g) sums[0][g] = sums[1][g] = bias[g];
      begin_gates(L - 1, sums);
      read_sizes(L - 1, number);
      add_vector(L - 1, false, FLOAT32 || !shows_other(L - 1), [&](int k) { return exponents[0][k]; });
      if (shows_other(L - 1)) {
        finish<0>();
        add_vector(L - 1, true, true, [&](int k) { return exponents[L - 1][k]; }), release();
      }
      step(group, L - 1, number, sums);
      tell(group);
      if (!shows_other(L - 1)) finish<0>();
      keep(group, L - 1, number);
    }
    float both[BOTH / 2];
    multiply_vector<BOTH>(both, memory.both, false);
    unscale(both, exponents[L - 1][0], exponents[L - 1][1], L);
    for (int k = 0; k < 2; ++k) {
      if (row(k) >= group.rows) continue;
      value* to = reinterpret_cast<value*>(exchange + FOR_ATTENTION) + row(k) * (A + H);
      for (int j = 0; j < QUERY_COLUMNS / 8; ++j)
        if (8 * j + 2 * (lane % 4) < QUERY)
          store_pair(to + group.part * QUERY + 8 * j + 2 * (lane % 4), paired(both[4 * j + 2 * k], both[4 * j + 2 * k + 1]));
      const float2 added = unpack(combine_bias);
      const float* share = both + QUERY_COLUMNS / 2 + 2 * k;
      store_pair(to + A + unit, paired(share[0] + added.x, share[1] + added.y));
    }
    tell(group);
    finish<L - 1>();
  }
};

// Loads what `Cells::run` multiplies before the first step; see `Ring::load`.
__device__ void load_states(Group& group, Ring<CLUSTER>& ring, const unsigned char* exchange, int warp) {
  group.wait();
  for (int layer = 0; layer < L; ++layer)
    if (!shows_other(layer)) ring.load(exchange + h_vector(layer, -1), CHUNKS, warp);
}

// Loads what `Cells::run_step` multiplies; by one warp.
__device__ void load_step(Group& group, Ring<CLUSTER>& ring, const unsigned char* exchange, int number, int warp) {
  group.wait();
  ring.load(exchange, CHUNKS, warp);
  if (shows_other(0)) ring.load(exchange + h_vector(0, number - 1), CHUNKS, warp);
  for (int layer = 0; layer < L; ++layer) {
    ++group.written;
    group.wait();
    ring.load(exchange + shown_vector(layer, number), CHUNKS, warp);
    if (layer + 1 < L && shows_other(layer + 1)) ring.load(exchange + h_vector(layer + 1, number - 1), CHUNKS, warp);
  }
}

// Attention of one sentence: its weights, and o.
struct Attention {
  const ForwardArguments& given;
  const ForwardMemory& memory;
  unsigned char* exchange;
  const Range range;
  int warp, lane, thread;
  float key_unit = 1.f, value_unit = 1.f;
  float query[PIECES<A>][8];
  float weight[PIECES<A>][8], sum[PIECES<H>][8], highest, total;
  bool bounded;

  __device__ Attention(const ForwardArguments& given, const ForwardMemory& memory, unsigned char* exchange, const Range& range,
                       int warp, int lane)
      : given(given), memory(memory), exchange(exchange), range(range), warp(warp), lane(lane), thread(32 * warp + lane) {
    float most = 0.f;
#pragma unroll
    for (int p = 0; p < PIECES<A>; ++p) {
#pragma unroll
      for (int e = 0; e < 8; ++e) weight[p][e] = 0.f;
      if (has_piece<A>(p, lane)) load_eight(weight[p], given.score + (p * 32 + lane) * 8);
#pragma unroll
      for (int e = 0; e < 8; ++e) weight[p][e] *= LOG2_E, most += fabsf(weight[p][e]);
    }
    // exp2 of scores that small, summed over the positions, is finite, and so is its inverse.
    bounded = warp_sum(most) <= 100.f;
  }
  // This lane's part of a position's score, in base 2.
  __device__ float part_of_score(const Position& position) const {
    float score = 0.f;
#pragma unroll
    for (int p = 0; p < PIECES<A>; ++p) {
      float key[8];
      unpack_piece(key, position.keys[p]);
#pragma unroll
      for (int e = 0; e < 8; ++e) score += weight[p][e] * fast_tanh(query[p][e] + (FLOAT32 ? key_unit * key[e] : key[e]));
    }
    return score;
  }
  __device__ void add(const Position& position, float score) {
    if (!bounded && score > highest) {
      const float shrink = exp2_of(highest - score);
      total *= shrink, highest = score;
#pragma unroll
      for (int p = 0; p < PIECES<H>; ++p)
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[p][e] *= shrink;
    }
    const float part = exp2_of(score - highest);
    total += part;
#pragma unroll
    for (int p = 0; p < PIECES<H>; ++p) {
      float value[8];
      unpack_piece(value, position.values[p]);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[p][e] += part * value[e];
    }
  }
  // Adds a position, the i-th one of the warp.
  __device__ void add_one(const Position& position, int i) {
    const float score = warp_sum(part_of_score(position));
    if (lane == 0) memory.scores[warp + i * WARPS] = score;
    add(position, score);
  }
  // Adds the i-th position and the next one.
  __device__ void add_two(const Position& first, const Position& second, int i) {
    float one = part_of_score(first), other = part_of_score(second);
    warp_sums(one, other, lane);
    if (lane == 0) memory.scores[warp + i * WARPS] = one, memory.scores[warp + (i + 1) * WARPS] = other;
    add(first, one);
    add(second, other);
  }

  // The largest size in all pairs of the block's threads.
  __device__ float largest_of_block(Pair pair) const {
    const float2 values = unpack(pair);
    const float size = warp_largest(fmaxf(fabsf(values.x), fabsf(values.y)));
    if (lane == 0) memory.maxima[warp] = size;
    threads_sync(ATTENDING, ATTENDERS);
    float largest = 0.f;
    for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, memory.maxima[w]);
    return largest;
  }
  __device__ void run(Positions& positions, const Group& group, int row, int number) {
    const value* own = reinterpret_cast<const value*>(exchange + FOR_ATTENTION) + row * (A + H);
    if (FLOAT32)
      key_unit = given.key_units[group.first_row + row], value_unit = given.projected_units[group.first_row + row];
#pragma unroll
    for (int p = 0; p < PIECES<A>; ++p) {
#pragma unroll
      for (int e = 0; e < 8; ++e) query[p][e] = 0.f;
      if (has_piece<A>(p, lane)) load_eight<true>(query[p], own + (p * 32 + lane) * 8);
    }
#pragma unroll
    for (int p = 0; p < PIECES<H>; ++p)
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[p][e] = 0.f;
    Pair share = {};
    if (thread < H / 2) share = load_fresh(reinterpret_cast<const Pair*>(own + A) + thread);
    highest = bounded ? 0.f : LOWEST, total = 0.f;
    int done = 0;
    for (; done + 1 < positions.count; done += 2) {
      const Position first = positions.take(lane), second = positions.take(lane);
      positions.refill(lane);
      add_two(first, second, done);
    }
    if (done < positions.count) add_one(positions.take(lane), done);
    threads_sync(ATTENDING, ATTENDERS);  // all stages have been read
    float* sums = reinterpret_cast<float*>(memory.ring);
    for (int p = 0; p < PIECES<H>; ++p)
      if (has_piece<H>(p, lane))
        for (int q = 0; q < 2; ++q)
          *reinterpret_cast<float4*>(sums + warp * H + (p * 32 + lane) * 8 + 4 * q) =
              make_float4(sum[p][4 * q], sum[p][4 * q + 1], sum[p][4 * q + 2], sum[p][4 * q + 3]);
    if (lane == 0) memory.parts[warp] = highest, memory.parts[WARPS + warp] = total;
    threads_sync(ATTENDING, ATTENDERS);
    total = 0.f;
    if (!bounded)
      for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, memory.parts[w]);
    for (int w = 0; w < WARPS; ++w)
      total += memory.parts[WARPS + w] * (bounded ? 1.f : exp2_of(memory.parts[w] - highest));
    const float normal = positions.length > 0 ? 1.f / total : 0.f, of_values = FLOAT32 ? normal * value_unit : normal;
    const long long place = static_cast<long long>(number) * given.batch + group.first_row + row;
    const int unit = 2 * thread;
    Pair output = {};
    if (thread < H / 2) {
      float first = 0.f, second = 0.f;
      for (int w = 0; w < WARPS; ++w) {
        const float factor = bounded ? 1.f : exp2_of(memory.parts[w] - highest);
        const float2 pair = *reinterpret_cast<const float2*>(sums + w * H + unit);
        first += factor * pair.x, second += factor * pair.y;
      }
      const float2 added = unpack(share);
      output = paired(tanh_of(added.x + first * of_values), tanh_of(added.y + second * of_values));
    }
    int exponent = 0;
    if (FLOAT32) {
      const float size = largest_of_block(output);
      exponent = O_EXPONENT - exponent_of(size);
      if (thread == 0) *range.slot(number + 1, L, row) = bits_of(size);
    }
    if (thread < H / 2) {
      *reinterpret_cast<u32*>(exchange + piece_place(row, unit / 8) + unit % 8 * 2) = multiplied(output, exponent);
      store_pair(given.outputs + place * H + unit, output);
    }
    fence_shared();  // the ring was written by ordinary stores
    threads_sync(ATTENDING, ATTENDERS);
    if (thread == 0 && row + PARTS >= group.rows) count_up(group.counter);
    for (int s = thread; s < given.positions; s += ATTENDERS) {
      const float weight = s < positions.length ? exp2_of(memory.scores[s] - highest) * normal : 0.f;
      store_one(given.attention + place * given.attention_row + s, weight);
    }
  }
};

__device__ void attend(const ForwardArguments& given, const ForwardMemory& memory, Group& group, unsigned char* exchange,
                       Ring<CLUSTER>& ring, const Range& range, int warp, int lane) {
  const bool loads = Ring<CLUSTER>::fills(warp) && lane == 0, waits = warp == WARPS - 1;
  Positions positions(memory.ring, memory.barriers + 2 * SLOTS, warp);
  Attention attention(given, memory, exchange, range, warp, lane);
  auto begin = [&](int row) {
    const long long sentence = group.first_row + row;
    int length = given.positions;
    if (given.lengths) length = min(length, static_cast<int>(given.lengths[sentence]));
    positions.begin(given.keys + sentence * given.positions * A, given.projected + sentence * given.positions * H, length,
                    warp, lane);
  };
  if (loads) load_states(group, ring, exchange, warp);
  for (int number = 0; number < given.steps; ++number) {
    if (loads) load_step(group, ring, exchange, number, warp);
    else group.written += L;
    ++group.written;
    if (waits) group.wait();
    else threads_sync(RING_FREE, WAITING);
    for (int row = group.part; row < group.rows; row += PARTS) {
      if (!waits) begin(row);
      threads_sync(ATTENDING, ATTENDERS);
      if (waits) begin(row);
      attention.run(positions, group, row, number);
    }
    // Only by the warp that has waited: a count that comes early would be taken for that of a block that is late.
    if (waits && lane == 0 && group.part >= group.rows) count_up(group.counter);
    ++group.written;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decoder_forward(const __grid_constant__ ForwardArguments given) {
  const ForwardMemory memory;
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  Group group(given.counters, given.batch);
  unsigned char* exchange = given.exchange + static_cast<long long>(group.first_row / ROWS) * GROUP_BYTES;
  Ring<CLUSTER> ring(memory.ring, memory.barriers);
  const Range range(given, group);
  if (threadIdx.x == 0) ring.init();
  if (warp >= 4 && lane == 0) Positions(memory.ring, memory.barriers + 2 * SLOTS, warp - 4).init();
  if (lane == 0) barrier_init_done();
  if (FLOAT32) {
    raise_first(given, group, range);
    __syncthreads();
    if (threadIdx.x == 0) count_up(group.counter);
    ++group.written;
  }
  load_weights(given, memory, group.part);
  if (FLOAT32) {
    if (threadIdx.x == 0) group.wait();
    __syncthreads();
  }
  give_states(given, group, range, exchange);
  fence_shared();
  __syncthreads();
  if (warp < 4 && lane == 0)
    for (int s = 0; s < SLOTS; ++s) ring.announce(s, warp);
  cluster_sync();
  if (threadIdx.x == 0) count_up(group.counter);
  ++group.written;
  if (warp < 4) Cells(given, memory, exchange, ring, range, group, warp, lane).run(group);
  else attend(given, memory, group, exchange, ring, range, warp - 4, lane);
  cluster_sync();
}
