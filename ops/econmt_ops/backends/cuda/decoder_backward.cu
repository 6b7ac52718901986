// Backward pass of the attentional LSTM over a block of steps, last one first; see `econmt_ops.backends.cuda.decoder`.
#include "decoder.cuh"

struct BackwardArguments {
  const u16* weights[2];     // of each layer, (4H, 2H): for its input, at the bottom o of the step before; and for h
  long long weights_row[2];  // from one row to the next
  const u16* both;           // (A + H, H): query, and the stack's share of o
  const value* score;          // (A)
  const u16* keys;           // (B, S, A)
  const u16* projected;      // (B, S, H)
  const long long* lengths;  // (B), or null
  const float* units;        // with FLOAT32 of the layers' weights and of both; see Range
  const float* key_units;    // (B), likewise of the keys of each sentence
  const float* projected_units;
  const value* query;          // (K, B, A)
  const value* context;        // (K, B, H)
  long long context_step, context_row;
  const value* outputs;        // (K, B, H)
  const value* attention;      // (K, B, S), its rows attention_row values apart
  long long attention_row;
  const value* doutputs;       // (K, B, H), or null
  long long doutputs_step, doutputs_row;
  const value* gates[2];       // (K, B, 4H) of each layer, before their nonlinearities
  const float* cells[2];     // (K + 1, B, H) of each layer, from c before the first step on
  const unsigned char* mask; // (K, B, H), or null: 1 where the upper layer's input was kept
  long long mask_step, mask_row;
  value* dgates[2];            // (K, B, 4H)
  value* dquery;               // (K, B, A)
  value* da;                   // (K, B, H), of what tanh gave o for
  float* dscores;            // (K, B, S)
  value* state_do;             // (B, H), the gradient of the last step's o by what follows; then of o before the steps
  value* state_dh;             // (L, B, H), likewise of h
  float* state_dc;           // (L, B, H), likewise of c
  float* dbias;              // (groups of rows, L, 4H): the sums of dgates over rows and steps are added
  unsigned char* exchange;
  u32* counters;             // zeros
  u32* slots;                // zeros, see Range
  float scale;
  int steps, batch, positions;
};

// The two blocks of a cluster share each product: a block multiplies its half of the terms by the columns of both, and they
// give each other their sums. Half of the data come in that each would need for its own columns alone.
static_assert(CLUSTER == 2, "pairs of blocks");
constexpr int BOTH_CHUNKS = (A + H) / 64 / 2, GATE_CHUNKS = 4 * H / 64 / 2;  // of a block
static_assert((A + H) / 64 % 2 == 0, "halves");
// Vectors of a group: the gradients of query and share, and of each layer's gates; then rows (64, H), the gradient of o.
constexpr u32 GATES_BYTES = 2 * GATE_CHUNKS * CHUNK_BYTES, GATES_VECTOR = 2 * BOTH_CHUNKS * CHUNK_BYTES;
constexpr u32 FOR_ATTENTION = GATES_VECTOR + L * GATES_BYTES;
constexpr u32 GROUP_BYTES = FOR_ATTENTION + ROWS * H * sizeof(value);
// Exponents of the powers of two, see Range: rows of query and share are known when they are given away; a product makes
// gradients of gates 2^12 times as large as was foreseen at the very most.
constexpr int BOTH_EXPONENT = 14, GATES_EXPONENT = 5;
constexpr u32 BOTH_TILE = 2 * UNITS * 128, LAYER_TILE = 4 * UNITS * 128;

struct BackwardMemory {
  unsigned char *layers, *both, *in;
  float4* partner;  // (2, MULTIPLIERS): the other block's share of the sums
  float* dbias;     // (L, 4 warps, 4 lanes, 8): the sums of dgates, in the order of Cells::Kept::gates
  u64* barriers;
  float *maxima, *scores;

  __device__ BackwardMemory() {
    layers = shared_memory(), both = layers + L * GATE_CHUNKS * LAYER_TILE, in = both + BOTH_CHUNKS * BOTH_TILE;
    partner = reinterpret_cast<float4*>(in + IN_BYTES);
    dbias = reinterpret_cast<float*>(partner + 2 * MULTIPLIERS), barriers = reinterpret_cast<u64*>(dbias + L * 128);
    maxima = reinterpret_cast<float*>(barriers + 2 * SLOTS + WARPS * STAGES + 1), scores = maxima + WARPS;
  }
};

using Slots = Ring<1>;

// Puts eight values of a row k of a matrix into row k of eight columns, n to n + 7, of the tiles of N columns.
template <int N>
__device__ void load_transposed(unsigned char* tiles, uint4 piece, int k, int n) {
  const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    unsigned char* to = tiles + k / 64 * N * 128 + (n + i) / 8 * 1024 + (n + i) % 8 * 128;
    to += ((k % 64 / 8 ^ (n + i) % 8) << 4) + k % 8 * 2;
    *reinterpret_cast<u16*>(to) = static_cast<u16>(words[i / 2] >> i % 2 * 16);
  }
}

// The columns of block ``part`` and of the other one of its pair, half of the terms: of a layer input and h of the even block,
// then of the odd one.
__device__ void load_weights(const BackwardArguments& given, const BackwardMemory& memory, int part) {
  const int pair = part / 2 * 2, first = part % 2 * GATE_CHUNKS * 64, first_of_both = part % 2 * BOTH_CHUNKS * 64;
  for (int layer = 0; layer < L; ++layer)
    for (int i = threadIdx.x; i < GATE_CHUNKS * 64 * 4; i += THREADS) {
      const int k = i / 4, half = i % 2, its_part = pair + i / 2 % 2;
      const long long from = (first + k) * given.weights_row[layer] + half * H + its_part * UNITS;
      load_transposed<4 * UNITS>(memory.layers + layer * GATE_CHUNKS * LAYER_TILE, *piece_of(given.weights[layer], from), k,
                                 (its_part % 2 * 2 + half) * UNITS);
    }
  for (int i = threadIdx.x; i < BOTH_CHUNKS * 64 * 2; i += THREADS) {
    const int k = i / 2, odd = i % 2;
    const long long from = static_cast<long long>(first_of_both + k) * H + (pair + odd) * UNITS;
    load_transposed<2 * UNITS>(memory.both, *piece_of(given.both, from), k, odd * UNITS);
  }
}

// What is known of the sizes of the gradients of gates at the last step.
__device__ void raise_first(const BackwardArguments& given, const Group& group, const Range& range) {
  for (int i = threadIdx.x; i < L * group.rows * UNITS; i += THREADS) {
    const int layer = i / (group.rows * UNITS), row = i / UNITS % group.rows;
    const long long place =
        (static_cast<long long>(layer) * given.batch + group.first_row + row) * H + group.part * UNITS + i % UNITS;
    const float size = fmaxf(fabsf(widened(given.state_dh[place])), fabsf(given.state_dc[place]));
    raise_to(range.slot(given.steps - 1, layer, row), bits_of(size));
  }
}

// Adds the product of a vector of COUNT chunks with its tiles, as it comes in, and gives back the slots.
template <int N, int COUNT>
__device__ inline void multiply_all(float (&result)[N / 2], Slots& ring, const unsigned char* tiles, int warp, int lane) {
  constexpr int AHEAD = COUNT > 1 ? 2 : 1;  // chunks whose products go on while the next one is waited for
  static_assert(COUNT >= AHEAD && SLOTS > AHEAD, "chunks");
  products_begin();
#pragma unroll 1
  for (int first = 0; first < COUNT; first += SLOTS) {
#pragma unroll UNROLLED
    for (int s = 0; s < SLOTS; ++s) {
      if (COUNT % SLOTS && first + s >= COUNT) break;
      multiply_chunk<N>(result, ring.wait(s), tiles + (first + s) * N * 128, true);
      products_commit();
      products_wait<AHEAD>();
      if (s >= AHEAD) ring.release(s - AHEAD, warp, lane);
      else if (first) ring.release(s - AHEAD + SLOTS, warp, lane);
    }
  }
  products_wait<0>();
  hold(result);
#pragma unroll
  for (int i = COUNT - AHEAD; i < COUNT; ++i) ring.release(i % SLOTS, warp, lane);
}

// The layers of a step, for the units and rows of a thread of the first warpgroup: rows 16 warp + lane / 4 and eight further,
// units 2 (lane % 4) and the next one.
struct Cells {
  const BackwardArguments& given;
  const BackwardMemory& memory;
  unsigned char* exchange;
  Slots& ring;
  const Range range;
  int warp, lane, unit;
  float dh[L][4], dc[L][4];
  int exponents[2] = {};     // of the rows of the vector that is multiplied
  float foreseen[2] = {};  // sizes of the rows of the next one
  u32 sums = 0;  // that the other block has sent

  __device__ Cells(const BackwardArguments& given, const BackwardMemory& memory, unsigned char* exchange, Slots& ring,
                   const Range& range, const Group& group, int warp, int lane)
      : given(given), memory(memory), exchange(exchange), ring(ring), range(range), warp(warp), lane(lane) {
    unit = group.part * UNITS + 2 * (lane % 4);
#pragma unroll
    for (int layer = 0; layer < L; ++layer)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float2 h = make_float2(0.f, 0.f), c = h;
        if (row(k) < group.rows) {
          h = unpack(load_pair(given.state_dh + place(group, layer, k)));
          c = *reinterpret_cast<const float2*>(given.state_dc + place(group, layer, k));
        }
        dh[layer][2 * k] = h.x, dh[layer][2 * k + 1] = h.y, dc[layer][2 * k] = c.x, dc[layer][2 * k + 1] = c.y;
      }
  }
  __device__ int row(int k) const { return 16 * warp + lane / 4 + 8 * k; }
  // In a tensor (n, B, H).
  __device__ long long place(const Group& group, int n, int k) const {
    return (static_cast<long long>(n) * given.batch + group.first_row + row(k)) * H + unit;
  }

  // What a layer's cells need, loaded before the gradient of h is there.
  struct Kept {
    Pair gates[2][4];
    float2 before[2], after[2];
  };
  __device__ Kept load(const Group& group, int layer, int number) const {
    Kept kept = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (row(k) >= group.rows) continue;
      const value* gates = given.gates[layer] + (static_cast<long long>(number) * given.batch + group.first_row + row(k)) * 4 * H;
#pragma unroll
      for (int g = 0; g < 4; ++g) kept.gates[k][g] = load_pair(gates + g * H + unit);
      kept.before[k] = *reinterpret_cast<const float2*>(given.cells[layer] + place(group, number, k));
      kept.after[k] = *reinterpret_cast<const float2*>(given.cells[layer] + place(group, number + 1, k));
    }
    return kept;
  }

  // A cell of each row and unit: the gradients of its gates, which replace the gates, given that of its h (``above``, and
  // that of the next step).
  __device__ void step(const Group& group, int layer, int number, Kept& kept, const float (&above)[4]) {
    unsigned char* vector = exchange + GATES_VECTOR + layer * GATES_BYTES;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float made[4][2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sums[4];
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          const float2 pair = unpack(kept.gates[k][g]);
          sums[g] = e ? pair.y : pair.x;
        }
        const float i = sigmoid_of(sums[0]), f = sigmoid_of(sums[1]), g = tanh_of(sums[2]), o = sigmoid_of(sums[3]);
        const float before = e ? kept.before[k].y : kept.before[k].x;
        const float squashed = tanh_of(e ? kept.after[k].y : kept.after[k].x);
        const float whole = above[2 * k + e] + dh[layer][2 * k + e];
        const float total = dc[layer][2 * k + e] + whole * o * (1.f - squashed * squashed);
        made[0][e] = total * g * i * (1.f - i), made[1][e] = total * before * f * (1.f - f);
        made[2][e] = total * i * (1.f - g * g), made[3][e] = whole * squashed * o * (1.f - o);
        dc[layer][2 * k + e] = total * f;
      }
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        kept.gates[k][g] = paired(made[g][0], made[g][1]);
        if (row(k) < group.rows)
          *reinterpret_cast<u32*>(vector + piece_place(row(k), g * PARTS + group.part) + 4 * (lane % 4)) =
              multiplied(kept.gates[k][g], exponents[k]);
      }
      if (FLOAT32 && layer > 0) {  // what the layer below will be given
        float size = 0.f;
#pragma unroll
        for (int g = 0; g < 4; ++g) size = fmaxf(size, fmaxf(fabsf(made[g][0]), fabsf(made[g][1])));
        size *= range.largest_weight(layer);
        if (RESIDUAL) size = fmaxf(size, fmaxf(fabsf(above[2 * k]), fabsf(above[2 * k + 1])));
        range.raise(number, layer - 1, row(k), row(k) < group.rows, MASKED ? size * given.scale : size, lane);
      }
    }
  }
  // Tells what is known of a layer's step before the one that has been made.
  __device__ void raise_next(const Group& group, int layer, int number) const {
    if (!FLOAT32 || number == 0) return;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float *h = dh[layer] + 2 * k, *c = dc[layer] + 2 * k;
      const float size = fmaxf(fmaxf(fabsf(h[0]), fabsf(h[1])), fmaxf(fabsf(c[0]), fabsf(c[1])));
      range.raise(number - 1, layer, row(k), row(k) < group.rows, size, lane);
    }
  }
  // Divides a product by the powers of two of its rows and of its weights, whose place those of the rows to come take.
  template <int N>
  __device__ void unscale(float (&result)[N], int matrix) {
    if (!FLOAT32) return;
    const float unit = range.units[matrix];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float power = power_of_two(-exponents[k]);
#pragma unroll
      for (int i = 0; i < N / 4; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) result[4 * i + 2 * k + e] *= power, result[4 * i + 2 * k + e] *= unit;
      exponents[k] = GATES_EXPONENT - exponent_of(foreseen[k]);
    }
  }
  // Writes the gradients of gates, and adds them up over the rows of the warp.
  __device__ void keep(const Group& group, int layer, int number, const Kept& kept) const {
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float2 pair = unpack(kept.gates[k][g]);
        if (row(k) < group.rows) sum.x += pair.x, sum.y += pair.y;
      }
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sum.x += lane_xor(sum.x, mask), sum.y += lane_xor(sum.y, mask);
      float* total = memory.dbias + ((layer * 4 + warp) * 4 + lane) * 8 + 2 * g;
      if (lane < 4) total[0] += sum.x, total[1] += sum.y;
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (row(k) >= group.rows) continue;
      value* to = given.dgates[layer] + (static_cast<long long>(number) * given.batch + group.first_row + row(k)) * 4 * H + unit;
#pragma unroll
      for (int g = 0; g < 4; ++g) store_pair(to + g * H, kept.gates[k][g]);
    }
  }

  // Tells the group that this block has written.
  __device__ void tell(Group& group) {
    threads_sync(MULTIPLYING, MULTIPLIERS);
    if (warp == 0 && lane == 0) count_up(group.counter);
    ++group.written;
  }

  // Multiplies a vector and returns this block's columns: its own share of the sums and that of the other block.
  template <int N, int COUNT>
  __device__ void multiply_shared(float (&result)[N / 4], const unsigned char* tiles) {
    float both[N / 2] = {};
    multiply_all<N, COUNT>(both, ring, tiles, warp, lane);
    const bool odd = cluster_rank();
    u64* barrier = memory.barriers + 2 * SLOTS + WARPS * STAGES;
    if (warp == 0 && lane == 0) barrier_expect(barrier, MULTIPLIERS * N);
#pragma unroll
    for (int i = 0; i < N / 4; i += 4) {
      const float* other = both + i;
      float4 sent;
      sent.x = odd ? other[0] : other[N / 4], sent.y = odd ? other[1] : other[N / 4 + 1];
      sent.z = odd ? other[2] : other[N / 4 + 2], sent.w = odd ? other[3] : other[N / 4 + 3];
      store_at(memory.partner + i / 4 * MULTIPLIERS + 32 * warp + lane, !odd, sent, barrier);
    }
    barrier_wait_cluster(barrier, sums++ & 1);
#pragma unroll
    for (int i = 0; i < N / 4; i += 4) {
      const float4 got = memory.partner[i / 4 * MULTIPLIERS + 32 * warp + lane];
      result[i] = (odd ? both[N / 4 + i] : both[i]) + got.x, result[i + 1] = (odd ? both[N / 4 + i + 1] : both[i + 1]) + got.y;
      result[i + 2] = (odd ? both[N / 4 + i + 2] : both[i + 2]) + got.z;
      result[i + 3] = (odd ? both[N / 4 + i + 3] : both[i + 3]) + got.w;
    }
  }

  // All steps.
  __device__ void run(Group& group) {
    for (int number = given.steps - 1; number >= 0; --number) {
      Kept kept = load(group, L - 1, number);
      float above[4];
      float size[2] = {};
      if (FLOAT32) {
        ring.wait_for_first();
#pragma unroll
        for (int k = 0; k < 2; ++k) size[k] = range.size(number, L, row(k)), foreseen[k] = range.size(number, L - 1, row(k));
      }
      multiply_shared<2 * UNITS, BOTH_CHUNKS>(above, memory.both);
      if (FLOAT32)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          exponents[k] = BOTH_EXPONENT - exponent_of(size[k]);
          foreseen[k] = fmaxf(foreseen[k], range.largest_weight(L) * size[k]);
        }
      unscale(above, L);
      step(group, L - 1, number, kept, above);
      tell(group);
      keep(group, L - 1, number, kept);
#pragma unroll
      for (int layer = L - 1; layer >= 0; --layer) {
        if (layer > 0) kept = load(group, layer - 1, number);
        float both[8];  // the gradients of the layer's input and of h before the step
        if (FLOAT32 && layer > 0) {
          ring.wait_for_first();
#pragma unroll
          for (int k = 0; k < 2; ++k) foreseen[k] = range.size(number, layer - 1, row(k));
        }
        multiply_shared<4 * UNITS, GATE_CHUNKS>(both, memory.layers + layer * GATE_CHUNKS * LAYER_TILE);
        unscale(both, layer);
#pragma unroll
        for (int i = 0; i < 4; ++i) dh[layer][i] = both[4 + i];
        if (L == 1) raise_next(group, layer, number);
        if (layer > 0) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            float2 pair = make_float2(both[2 * k], both[2 * k + 1]);
            if (RESIDUAL) pair.x += above[2 * k], pair.y += above[2 * k + 1];
            if (MASKED && row(k) < group.rows) {
              const u16 bits = *reinterpret_cast<const u16*>(given.mask + number * given.mask_step +
                                                             (group.first_row + row(k)) * given.mask_row + unit);
              pair.x = bits & 0xff ? pair.x * given.scale : 0.f, pair.y = bits & 0xff00 ? pair.y * given.scale : 0.f;
            }
            above[2 * k] = pair.x, above[2 * k + 1] = pair.y;
          }
          step(group, layer - 1, number, kept, above);
        } else {
          threads_arrive(RING_FREE, WAITING);
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            if (row(k) >= group.rows) continue;
            const Pair pair = paired(both[2 * k], both[2 * k + 1]);
            store_pair(reinterpret_cast<value*>(exchange + FOR_ATTENTION) + row(k) * H + unit, pair);
            if (number == 0) store_pair(given.state_do + place(group, 0, k), pair);
          }
        }
        tell(group);
        if (L > 1) raise_next(group, layer, number);  // which the next count tells, in time
        if (layer > 0) keep(group, layer - 1, number, kept);
      }
      ++group.written;  // by attention
    }
    threads_sync(MULTIPLYING, MULTIPLIERS);
    for (int i = 32 * warp + lane; i < L * 32; i += MULTIPLIERS) {
      const int layer = i / 32, its_lane = i / 8 % 4, g = i / 2 % 4, e = i % 2;
      float sum = 0.f;
      for (int w = 0; w < 4; ++w) sum += memory.dbias[((layer * 4 + w) * 4 + its_lane) * 8 + 2 * g + e];
      given.dbias[(group.first_row / ROWS * L + layer) * 4 * H + g * H + group.part * UNITS + 2 * its_lane + e] += sum;
    }
#pragma unroll
    for (int layer = 0; layer < L; ++layer)
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (row(k) < group.rows) {
          const float *h = dh[layer] + 2 * k, *c = dc[layer] + 2 * k;
          store_pair(given.state_dh + place(group, layer, k), paired(h[0], h[1]));
          *reinterpret_cast<float2*>(given.state_dc + place(group, layer, k)) = make_float2(c[0], c[1]);
        }
  }
};

// Attention of one sentence: the gradients of its scores, of its query and of its share of o.
struct Attention {
  const BackwardArguments& given;
  const BackwardMemory& memory;
  unsigned char* exchange;
  const Range range;
  int warp, lane, thread;
  float key_unit;
  float query[PIECES<A>][8], da[PIECES<H>][8], sum[PIECES<A>][8], delta;

  // This lane's part of da . value.
  __device__ float part_of_weight(const Position& position) const {
    float product = 0.f;
#pragma unroll
    for (int p = 0; p < PIECES<H>; ++p) {
      float value[8];
      unpack_piece(value, position.values[p]);
#pragma unroll
      for (int e = 0; e < 8; ++e) product += da[p][e] * value[e];
    }
    return product;
  }
  // Adds the i-th position of the warp, given the gradient of its weight.
  __device__ void add(const Position& position, float dweight, int i) {
    const float dscore = memory.scores[warp + i * WARPS] * (dweight - delta);
    warp_sync();
    if (lane == 0) memory.scores[warp + i * WARPS] = dscore;
#pragma unroll
    for (int p = 0; p < PIECES<A>; ++p) {
      float key[8];
      unpack_piece(key, position.keys[p]);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float t = fast_tanh(query[p][e] + (FLOAT32 ? key_unit * key[e] : key[e]));
        sum[p][e] += dscore * (1.f - t * t);
      }
    }
  }

  // What a step needs, loaded before the group has written.
  struct Kept {
    Row<H> doutput, output, context;
    Row<A> query;
  };
  __device__ Kept load(const Group& group, int row, int number) {
    const long long place = static_cast<long long>(number) * given.batch + group.first_row + row;
    // With FLOAT32 the gradients of weights are in units of the values.
    const float unit = FLOAT32 ? given.projected_units[group.first_row + row] : 1.f;
    for (int s = thread; s < given.positions; s += ATTENDERS)
      memory.scores[s] = widened(given.attention[place * given.attention_row + s]) * unit;
    Kept kept;
    const long long doutput = number * given.doutputs_step + (group.first_row + row) * given.doutputs_row;
    kept.doutput.load(given.doutputs ? given.doutputs + doutput : given.outputs, lane);
    kept.output.load(given.outputs + place * H, lane);
    kept.context.load(given.context + number * given.context_step + (group.first_row + row) * given.context_row, lane);
    kept.query.load(given.query + place * A, lane);
    key_unit = FLOAT32 ? given.key_units[group.first_row + row] : 1.f;
    return kept;
  }

  // The gradient of the share, into the exchange.
  __device__ void give_da(int row, int exponent) const {
#pragma unroll
    for (int p = 0; p < PIECES<H>; ++p) {
      if (!has_piece<H>(p, lane)) continue;
      float values[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] = FLOAT32 ? da[p][e] * power_of_two(exponent) : da[p][e];
      store_eight(reinterpret_cast<u16*>(exchange + piece_place(row, A / 8 + p * 32 + lane)), values);
    }
  }
  // The largest size in the gradients of query and share, of which each thread has two.
  __device__ float largest_of_row(Pair pair) const {
    const float2 values = unpack(pair);
    float size = fmaxf(fabsf(values.x), fabsf(values.y));
#pragma unroll
    for (int p = 0; p < PIECES<H>; ++p)
#pragma unroll
      for (int e = 0; e < 8; ++e) size = fmaxf(size, fabsf(da[p][e]));
    size = warp_largest(size);
    if (lane == 0) memory.maxima[warp] = size;
    threads_sync(ATTENDING, ATTENDERS);
    for (int w = 0; w < WARPS; ++w) size = fmaxf(size, memory.maxima[w]);
    return size;
  }

  __device__ void run(Positions& positions, const Group& group, const Kept& kept, int row, int number) {
    const long long place = static_cast<long long>(number) * given.batch + group.first_row + row;
    const bool is_last = number + 1 == given.steps;
    const value* next = is_last ? given.state_do + static_cast<long long>(group.first_row + row) * H
                                : reinterpret_cast<const value*>(exchange + FOR_ATTENTION) + row * H;
    delta = 0.f;
#pragma unroll
    for (int p = 0; p < PIECES<H>; ++p) {
      float values[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) da[p][e] = 0.f;
      if (!has_piece<H>(p, lane)) continue;
      load_eight<true>(da[p], next + (p * 32 + lane) * 8);
      if (given.doutputs) {
        kept.doutput.unpack(values, p, lane);
#pragma unroll
        for (int e = 0; e < 8; ++e) da[p][e] += values[e];
      }
      kept.output.unpack(values, p, lane);
#pragma unroll
      for (int e = 0; e < 8; ++e) da[p][e] *= 1.f - values[e] * values[e];
      kept.context.unpack(values, p, lane);
#pragma unroll
      for (int e = 0; e < 8; ++e) delta += da[p][e] * values[e];
    }
    delta = warp_sum(delta);
    if (FLOAT32) delta /= given.projected_units[group.first_row + row];
    if (!FLOAT32 && warp == WARPS - 1) give_da(row, 0);
    if (warp == WARPS - 1)
#pragma unroll
      for (int p = 0; p < PIECES<H>; ++p)
        if (has_piece<H>(p, lane)) store_eight(given.da + place * H + (p * 32 + lane) * 8, da[p]);
#pragma unroll
    for (int p = 0; p < PIECES<A>; ++p) {
#pragma unroll
      for (int e = 0; e < 8; ++e) query[p][e] = sum[p][e] = 0.f;
      if (has_piece<A>(p, lane)) kept.query.unpack(query[p], p, lane);
    }
    int done = 0;
    for (; done + 1 < positions.count; done += 2) {
      const Position first = positions.take(lane), second = positions.take(lane);
      positions.refill(lane);
      float one = part_of_weight(first), other = part_of_weight(second);
      warp_sums(one, other, lane);
      add(first, one, done);
      add(second, other, done + 1);
    }
    if (done < positions.count) {
      const Position position = positions.take(lane);
      add(position, warp_sum(part_of_weight(position)), done);
    }
    threads_sync(ATTENDING, ATTENDERS);  // all stages have been read
    float* sums = reinterpret_cast<float*>(memory.in);
#pragma unroll
    for (int p = 0; p < PIECES<A>; ++p)
      if (has_piece<A>(p, lane))
#pragma unroll
        for (int q = 0; q < 2; ++q)
          *reinterpret_cast<float4*>(sums + warp * A + (p * 32 + lane) * 8 + 4 * q) =
              make_float4(sum[p][4 * q], sum[p][4 * q + 1], sum[p][4 * q + 2], sum[p][4 * q + 3]);
    threads_sync(ATTENDING, ATTENDERS);
    const int column = 2 * thread;
    Pair both = {};
    if (thread < A / 2) {
      float first = 0.f, second = 0.f;
      for (int w = 0; w < WARPS; ++w) {
        const float2 pair = *reinterpret_cast<const float2*>(sums + w * A + column);
        first += pair.x, second += pair.y;
      }
      const float2 weight = unpack(load_pair(given.score + column));
      both = paired(weight.x * first, weight.y * second);
    }
    int exponent = 0;
    if (FLOAT32) {
      const float size = largest_of_row(both);
      exponent = BOTH_EXPONENT - exponent_of(size);
      if (thread == 0) *range.slot(number, L, row) = bits_of(size);
      if (warp == WARPS - 1) give_da(row, exponent);
    }
    if (thread < A / 2) {
      *reinterpret_cast<u32*>(exchange + piece_place(row, column / 8) + column % 8 * 2) = multiplied(both, exponent);
      store_pair(given.dquery + place * A + column, both);
    }
    fence_shared();  // the ring was written by ordinary stores
    threads_sync(ATTENDING, ATTENDERS);
    if (thread == 0 && row + PARTS >= group.rows) count_up(group.counter);
    for (int s = thread; s < given.positions; s += ATTENDERS)
      given.dscores[place * given.positions + s] = s < positions.length ? memory.scores[s] : 0.f;
  }
};

__device__ void attend(const BackwardArguments& given, const BackwardMemory& memory, Group& group, unsigned char* exchange,
                       Slots& ring, const Range& range, int warp, int lane) {
  const bool loads = Slots::fills(warp) && lane == 0, waits = warp == WARPS - 1;
  const int half = cluster_rank();
  Positions positions(memory.in, memory.barriers + 2 * SLOTS, warp);
  Attention attention{given, memory, exchange, range, warp, lane, 32 * warp + lane};
  auto begin = [&](int row) {
    const long long sentence = group.first_row + row;
    int length = given.positions;
    if (given.lengths) length = min(length, static_cast<int>(given.lengths[sentence]));
    positions.begin(given.keys + sentence * given.positions * A, given.projected + sentence * given.positions * H, length,
                    warp, lane);
  };
  for (int number = given.steps - 1; number >= 0; --number) {
    const bool is_first = number + 1 == given.steps;
    if (waits && !is_first) group.wait();
    if (!waits && !is_first) threads_sync(RING_FREE, WAITING);
    for (int row = group.part; row < group.rows; row += PARTS) {
      const Attention::Kept kept = attention.load(group, row, number);
      if (!waits) begin(row);
      threads_sync(ATTENDING, ATTENDERS);
      if (waits) begin(row);
      attention.run(positions, group, kept, row, number);
    }
    // Only by the warp that has waited: a count that comes early would be taken for that of a block that is late.
    if (waits && lane == 0 && group.part >= group.rows) count_up(group.counter);
    ++group.written;
    if (loads) {
      group.wait();
      ring.load(exchange + half * BOTH_CHUNKS * CHUNK_BYTES, BOTH_CHUNKS, warp);
      for (int layer = L - 1; layer >= 0; --layer) {
        ++group.written;
        group.wait();
        ring.load(exchange + GATES_VECTOR + layer * GATES_BYTES + half * GATE_CHUNKS * CHUNK_BYTES, GATE_CHUNKS, warp);
      }
      ++group.written;
    } else {
      group.written += L + 1;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decoder_backward(const __grid_constant__ BackwardArguments given) {
  const BackwardMemory memory;
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  Group group(given.counters, given.batch);
  unsigned char* exchange = given.exchange + static_cast<long long>(group.first_row / ROWS) * GROUP_BYTES;
  Slots ring(memory.in, memory.barriers);
  const Range range(given, group);
  if (threadIdx.x == 0) ring.init(), barrier_init(memory.barriers + 2 * SLOTS + WARPS * STAGES, 1);
  if (warp >= 4 && lane == 0) Positions(memory.in, memory.barriers + 2 * SLOTS, warp - 4).init();
  if (lane == 0) barrier_init_done();
  load_weights(given, memory, group.part);
  if (FLOAT32) raise_first(given, group, range);
  for (int i = threadIdx.x; i < L * 128; i += THREADS) memory.dbias[i] = 0.f;
  fence_shared();
  __syncthreads();
  if (warp < 4 && lane == 0)
    for (int s = 0; s < SLOTS; ++s) ring.announce(s, warp);
  cluster_sync();
  if (warp < 4) Cells(given, memory, exchange, ring, range, group, warp, lane).run(group);
  else attend(given, memory, group, exchange, ring, range, warp - 4, lane);
  cluster_sync();
}
