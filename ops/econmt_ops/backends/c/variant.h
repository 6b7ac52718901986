/* Loops of the kernels, compiled once per instruction set: kernels.c defines NAME(x) and includes this file.
 *
 * Each function handles rows begin to end. Rows pass through buffers of CHUNK floats, so that both value types share
 * the same loop and intermediate values stay in the L1 cache.
 */

#if LANES
#define WIDTH LANES
#else
#define WIDTH 4
#endif
#define VECTORS (16 / WIDTH)

typedef float NAME(vector) __attribute__((vector_size(4 * WIDTH)));

static INLINE float NAME(widen)(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

/* Rounds to the nearest bfloat16, ties to even; NaN stays NaN. */
static INLINE uint16_t NAME(narrow)(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)(value != value ? 0x7fc0u : rounded);
}

static INLINE void NAME(load)(float *restrict to, const void *from, int64_t at, int64_t count, int64_t narrow) {
  if (narrow) {
    const uint16_t *values = (const uint16_t *)from + at;
    SIMD for (int64_t k = 0; k < count; k++) to[k] = NAME(widen)(values[k]);
  } else {
    memcpy(to, (const float *)from + at, (size_t)count * sizeof *to);
  }
}

static INLINE void NAME(store)(void *to, int64_t at, const float *restrict from, int64_t count, int64_t narrow) {
  if (narrow) {
    uint16_t *values = (uint16_t *)to + at;
    SIMD for (int64_t k = 0; k < count; k++) values[k] = NAME(narrow)(from[k]);
  } else {
    memcpy((float *)to + at, from, (size_t)count * sizeof *from);
  }
}

/* 2^x = 2^(n + f) with |f| <= 1/2; the polynomial's relative error is 9e-8. x is at most 125.5, and at least -125.5 is
 * taken, so that neither 2^x nor 1 / (1 + 2^x) is denormal, which is slow to multiply. NaN gives NaN. */
static INLINE float NAME(power_of_2)(float x) {
  x = x < -125.5f ? -125.5f : x;
  float shifted = x + 12582912.0f; /* 1.5 2^23: the sum's last bits are the nearest integer */
  float f = x - (shifted - 12582912.0f);
  float p = 0.0013264724f;
  p = p * f + 0.009671513f;
  p = p * f + 0.055507336f;
  p = p * f + 0.24022242f;
  p = p * f + 0.693147f;
  p = p * f + 1.0f;
  uint32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3f800000u;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

static INLINE float NAME(exponential)(float x) { return NAME(power_of_2)(x > 87.0f ? 125.5f : x * 1.44269504f); }

/* 1 / (1 + 2^x), exactly 0 and 1 for large |x|, where the power is not used: padded positions close their gates by large sums. */
static INLINE float NAME(gate)(float x) {
  float result = 1.0f / (1.0f + NAME(power_of_2)(x));
  return x > 124.0f ? 0.0f : result;
}

static INLINE float NAME(sigmoid)(float x) { return NAME(gate)(x * -1.44269504f); }

static INLINE float NAME(squash)(float x) { return 2.0f * NAME(gate)(x * TWICE) - 1.0f; }

static void NAME(lstm_forward)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct lstm_forward *a = given;
  (void)scratch;
  float gates[4][CHUNK], other[CHUNK], h[CHUNK];
  for (int64_t row = begin; row < end; row++) {
    for (int64_t at = 0; at < a->hidden; at += CHUNK) {
      int64_t count = a->hidden - at < CHUNK ? a->hidden - at : CHUNK;
      for (int64_t gate = 0; gate < 4; gate++) {
        int64_t place = row * a->gates_stride + gate * a->hidden + at;
        NAME(load)(gates[gate], a->gates, place, count, a->narrow);
        if (!a->recurrent) continue;
        NAME(load)(other, a->recurrent, row * a->recurrent_stride + gate * a->hidden + at, count, a->narrow);
        SIMD for (int64_t k = 0; k < count; k++) gates[gate][k] += other[k];
        NAME(store)(a->gates, place, gates[gate], count, a->narrow);
        /* The backward pass reads the rounded sum. */
        NAME(load)(gates[gate], a->gates, place, count, a->narrow);
      }
      const float *before = a->before + row * a->before_stride + at;
      float *after = a->after + row * a->after_stride + at;
      float *i = gates[0], *f = gates[1], *g = gates[2], *o = gates[3];
      SIMD for (int64_t k = 0; k < count; k++) {
        i[k] = NAME(sigmoid)(i[k]);
        f[k] = NAME(sigmoid)(f[k]);
        g[k] = NAME(squash)(g[k]);
        o[k] = NAME(sigmoid)(o[k]);
        float c = f[k] * before[k] + i[k] * g[k];
        other[k] = c;
        h[k] = o[k] * NAME(squash)(c);
      }
      memcpy(after, other, (size_t)count * sizeof *after);
      NAME(store)(a->h, row * a->h_stride + at, h, count, a->narrow);
      if (!a->kept) continue;
      for (int64_t gate = 0; gate < 4; gate++) {
        float *kept = a->kept + row * a->kept_stride + gate * a->hidden + at;
        memcpy(kept, gates[gate], (size_t)count * sizeof *kept);
      }
    }
  }
}

static void NAME(lstm_backward)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct lstm_backward *a = given;
  (void)scratch;
  float gates[4][CHUNK], dh[CHUNK], other[CHUNK];
  for (int64_t row = begin; row < end; row++) {
    for (int64_t at = 0; at < a->hidden; at += CHUNK) {
      int64_t count = a->hidden - at < CHUNK ? a->hidden - at : CHUNK;
      float *i = gates[0], *f = gates[1], *g = gates[2], *o = gates[3];
      for (int64_t gate = 0; gate < 4; gate++) {
        int64_t place = row * a->gates_stride + gate * a->hidden + at;
        NAME(load)(gates[gate], a->gates, place, count, a->sums && a->narrow);
      }
      if (a->sums) {
        SIMD for (int64_t k = 0; k < count; k++) {
          i[k] = NAME(sigmoid)(i[k]);
          f[k] = NAME(sigmoid)(f[k]);
          g[k] = NAME(squash)(g[k]);
          o[k] = NAME(sigmoid)(o[k]);
        }
      }
      NAME(load)(dh, a->dh, row * a->dh_stride + at, count, a->narrow);
      if (a->incoming)
        NAME(load)(other, a->incoming, row * a->incoming_stride + at, count, a->narrow);
      else
        memset(other, 0, sizeof other);
      const float *before = a->before + row * a->before_stride + at;
      const float *after = a->after + row * a->after_stride + at;
      const float *dc = a->dc + row * a->dc_stride + at;
      float *dbefore = a->dbefore + row * a->dbefore_stride + at;
      SIMD for (int64_t k = 0; k < count; k++) {
        float squashed = NAME(squash)(after[k]);
        float d = dh[k] + other[k];
        float total = dc[k] + d * o[k] * (1.0f - squashed * squashed);
        float di = total * g[k] * i[k] * (1.0f - i[k]);
        float df = total * before[k] * f[k] * (1.0f - f[k]);
        float dg = total * i[k] * (1.0f - g[k] * g[k]);
        float output = d * squashed * o[k] * (1.0f - o[k]);
        dbefore[k] = total * f[k];
        i[k] = di;
        f[k] = df;
        g[k] = dg;
        o[k] = output;
      }
      for (int64_t gate = 0; gate < 4; gate++) {
        int64_t place = row * a->dgates_stride + gate * a->hidden + at;
        NAME(store)(a->dgates, place, gates[gate], count, a->narrow);
      }
    }
  }
}

/* Loads a part of the products of a GRU's row, from `at` on, and activates r, z and n; the fourth is the product of h in n. */
static INLINE void NAME(gru_gates)(float (*gates)[CHUNK], const void *read, int64_t read_at, const void *recurrent,
                                   int64_t recurrent_at, int64_t hidden, int64_t count, int64_t narrow) {
  float other[CHUNK];
  float *r = gates[0], *n = gates[2], *v = gates[3];
  for (int64_t gate = 0; gate < 3; gate++) {
    NAME(load)(gates[gate], read, read_at + gate * hidden, count, narrow);
    NAME(load)(gate < 2 ? other : v, recurrent, recurrent_at + gate * hidden, count, narrow);
    if (gate == 2) break;
    SIMD for (int64_t k = 0; k < count; k++) gates[gate][k] = NAME(sigmoid)(gates[gate][k] + other[k]);
  }
  SIMD for (int64_t k = 0; k < count; k++) n[k] = NAME(squash)(n[k] + r[k] * v[k]);
}

static void NAME(gru_cell_forward)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct gru_cell_forward *a = given;
  (void)scratch;
  float gates[4][CHUNK], h[CHUNK], output[CHUNK];
  for (int64_t row = begin; row < end; row++) {
    int padded = a->padding && a->padding[row];
    for (int64_t at = 0; at < a->hidden; at += CHUNK) {
      int64_t count = a->hidden - at < CHUNK ? a->hidden - at : CHUNK;
      NAME(load)(h, a->before, row * a->before_stride + at, count, a->narrow);
      if (padded) {
        memset(output, 0, (size_t)count * sizeof *output);
      } else {
        NAME(gru_gates)(gates, a->read, row * a->read_stride + at, a->recurrent, row * a->recurrent_stride + at, a->hidden,
                        count, a->narrow);
        SIMD for (int64_t k = 0; k < count; k++) output[k] = h[k] = gates[2][k] + gates[1][k] * (h[k] - gates[2][k]);
      }
      NAME(store)(a->after, row * a->after_stride + at, h, count, a->narrow);
      NAME(store)(a->output, row * a->output_stride + at, output, count, a->narrow);
    }
  }
}

static void NAME(gru_cell_backward)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct gru_cell_backward *a = given;
  (void)scratch;
  float gates[4][CHUNK], h[CHUNK], dh[CHUNK], other[CHUNK];
  float *r = gates[0], *z = gates[1], *n = gates[2], *v = gates[3];
  for (int64_t row = begin; row < end; row++) {
    int padded = a->padding && a->padding[row];
    for (int64_t at = 0; at < a->hidden; at += CHUNK) {
      int64_t count = a->hidden - at < CHUNK ? a->hidden - at : CHUNK;
      int64_t read = row * a->dread_stride + at, recurrent = row * a->drecurrent_stride + at;
      if (padded) {
        memset(other, 0, (size_t)count * sizeof *other);
        for (int64_t gate = 0; gate < 3; gate++) {
          NAME(store)(a->dread, read + gate * a->hidden, other, count, a->narrow);
          NAME(store)(a->drecurrent, recurrent + gate * a->hidden, other, count, a->narrow);
        }
        continue;
      }
      NAME(load)(dh, a->dh, row * a->dh_stride + at, count, a->narrow);
      if (a->incoming) {
        NAME(load)(other, a->incoming, row * a->incoming_stride + at, count, a->narrow);
        SIMD for (int64_t k = 0; k < count; k++) dh[k] += other[k];
      }
      NAME(load)(h, a->before, row * a->before_stride + at, count, a->narrow);
      NAME(gru_gates)(gates, a->read, row * a->read_stride + at, a->recurrent, row * a->recurrent_stride + at, a->hidden,
                      count, a->narrow);
      SIMD for (int64_t k = 0; k < count; k++) {
        float dn = dh[k] * (1.0f - z[k]) * (1.0f - n[k] * n[k]);
        float dr = dn * v[k] * r[k] * (1.0f - r[k]);
        float dz = dh[k] * (h[k] - n[k]) * z[k] * (1.0f - z[k]);
        dh[k] *= z[k];
        v[k] = dn * r[k];
        r[k] = dr;
        z[k] = dz;
        n[k] = dn;
      }
      NAME(store)(a->dh, row * a->dh_stride + at, dh, count, a->narrow);
      for (int64_t gate = 0; gate < 3; gate++) {
        NAME(store)(a->dread, read + gate * a->hidden, gates[gate], count, a->narrow);
        NAME(store)(a->drecurrent, recurrent + gate * a->hidden, gates[gate < 2 ? gate : 3], count, a->narrow);
      }
    }
  }
}

/* Sums that a translation depends on are of 16 parts, the k-th value in part k % 16, so that vectors of every width give the
 * same: a last bit may change how a value is rounded to 8 bits. */
static INLINE float NAME(sum_of_parts)(float *parts) {
  for (int half = 8; half; half /= 2)
    for (int n = 0; n < half; n++) parts[n] += parts[n + half];
  return parts[0];
}

static INLINE float NAME(sum)(const float *values, int64_t count) {
  NAME(vector) sums[VECTORS] = {{0}}, some;
  float parts[16];
  int64_t k = 0;
  for (; k + 16 <= count; k += 16)
    for (int n = 0; n < VECTORS; n++) {
      memcpy(&some, values + k + n * WIDTH, sizeof some);
      sums[n] += some;
    }
  memcpy(parts, sums, sizeof parts);
  for (; k < count; k++) parts[k % 16] += values[k];
  return NAME(sum_of_parts)(parts);
}

/* Writes the products of a query with ``count`` consecutive keys, whose sums the processor computes together. */
static INLINE void NAME(dots)(const float *query, const float *keys, const int count, int64_t size, float *scores) {
  NAME(vector) sums[4 * VECTORS], q, key;
  float parts[16];
  int64_t whole = size / 16 * 16;
  for (int n = 0; n < count * VECTORS; n++) sums[n] = (NAME(vector)){0};
  for (int64_t k = 0; k < whole; k += WIDTH * VECTORS)
    for (int n = 0; n < VECTORS; n++) {
      memcpy(&q, query + k + n * WIDTH, sizeof q);
      for (int s = 0; s < count; s++) {
        memcpy(&key, keys + s * size + k + n * WIDTH, sizeof key);
        sums[s * VECTORS + n] += q * key;
      }
    }
  for (int s = 0; s < count; s++) {
    memcpy(parts, sums + s * VECTORS, sizeof parts);
    for (int64_t k = whole; k < size; k++) parts[k % 16] += query[k] * keys[s * size + k];
    scores[s] = NAME(sum_of_parts)(parts);
  }
}

static INLINE float NAME(dot)(const float *left, const float *right, int64_t size) {
  float product;
  NAME(dots)(left, right, 1, size, &product);
  return product;
}

static INLINE void NAME(dot_scores)(const float *query, const float *keys, int64_t count, int64_t size, float *scores) {
  int64_t s = 0;
  for (; LANES && s + 4 <= count; s += 4) NAME(dots)(query, keys + s * size, 4, size, scores + s);
  for (; s + 2 <= count; s += 2) NAME(dots)(query, keys + s * size, 2, size, scores + s); /* all that few registers hold */
  if (s < count) NAME(dots)(query, keys + s * size, 1, size, scores + s);
}

/* Subtracts the mean of values from them; returns the reciprocal of their standard deviation. */
static INLINE float NAME(center)(float *values, int64_t size) {
  float mean = NAME(sum)(values, size) / (float)size;
  SIMD for (int64_t k = 0; k < size; k++) values[k] -= mean;
  return 1.0f / sqrtf(NAME(dot)(values, values, size) / (float)size + 1e-5f); /* as LAYER_NORM_EPSILON */
}

/* Normalizes values to mean 0 and variance 1, then multiplies by the gain and adds the shift. */
static void NAME(normalize)(float *values, int64_t size, const float *gain, const float *shift) {
  float inverse = NAME(center)(values, size);
  SIMD for (int64_t k = 0; k < size; k++) values[k] = values[k] * inverse * gain[k] + shift[k];
}

/* Returns the score of query + key, with the layer normalization if there is one. sums: A floats, which may be the keys. */
static INLINE float NAME(additive_score)(const struct attention_forward *a, const float *query, const float *keys, float *sums) {
  const float *score = a->score, *gain = a->gain, *shift = a->shift;
  if (!gain) {
    float parts[16] = {0};
    int64_t k = 0;
    for (; k + 16 <= a->size; k += 16)
      SIMD for (int64_t n = 0; n < 16; n++) parts[n] += score[k + n] * NAME(gate)(TWICE * (query[k + n] + keys[k + n]));
    for (; k < a->size; k++) parts[k % 16] += score[k] * NAME(gate)(TWICE * (query[k] + keys[k]));
    return 2.0f * NAME(sum_of_parts)(parts);
  }
  SIMD for (int64_t k = 0; k < a->size; k++) sums[k] = query[k] + keys[k];
  float inverse = NAME(center)(sums, a->size);
  SIMD for (int64_t k = 0; k < a->size; k++) sums[k] = NAME(squash)(sums[k] * inverse * gain[k] + shift[k]);
  return NAME(dot)(score, sums, a->size);
}

/* Writes the keys of a row's position plus the product of its coverage to sums, which may be the keys. */
static INLINE void NAME(add_coverage)(const struct attention_forward *a, int64_t place, const float *keys, float *sums) {
  for (int64_t w = 0; w < a->width; w++, keys = sums) {
    const float share = a->coverage[place * a->width + w], *covered = a->coverage_key + w * a->size;
    SIMD for (int64_t k = 0; k < a->size; k++) sums[k] = keys[k] + share * covered[k];
  }
}

/* scratch: A floats, and A more with additive scores or 4 A if values are narrow. */
static void NAME(attention_forward)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct attention_forward *a = given;
  float *restrict query = scratch, *wide = scratch + a->size;
  const float *score = a->score;
  int64_t at_once = score ? 1 : a->narrow ? 4 : a->positions;
  for (int64_t row = begin; row < end; row++) {
    NAME(load)(query, a->query, row * a->query_stride, a->size, a->narrow);
    int64_t owner = a->owners ? a->owners[row] : row;
    const uint8_t *padding = a->padding ? a->padding + owner * a->positions : NULL;
    float *weights = a->weights + row * a->positions;
    for (int64_t s = 0, some; s < a->positions; s += some) {
      some = a->positions - s < at_once ? a->positions - s : at_once;
      if (score && padding && padding[s]) continue;
      int64_t place = (owner * a->positions + s) * a->size;
      const float *keys = wide;
      if (a->narrow)
        NAME(load)(wide, a->keys, place, some * a->size, 1);
      else
        keys = (const float *)a->keys + place;
      if (!score) {
        NAME(dot_scores)(query, keys, some, a->size, weights + s);
        continue;
      }
      if (a->coverage) {
        NAME(add_coverage)(a, row * a->positions + s, keys, wide);
        keys = wide;
      }
      weights[s] = NAME(additive_score)(a, query, keys, wide);
    }
    float top = -INFINITY, sum = 0.0f;
    for (int64_t s = 0; s < a->positions; s++) {
      if (padding && padding[s]) continue;
      top = weights[s] > top || weights[s] != weights[s] ? weights[s] : top;
    }
    for (int64_t s = 0; s < a->positions; s++) {
      weights[s] = padding && padding[s] ? 0.0f : NAME(exponential)(weights[s] - top);
      sum += weights[s];
    }
    for (int64_t s = 0; s < a->positions; s++) weights[s] = sum == 0.0f ? 0.0f : weights[s] / sum;
  }
}

/* scratch: H floats, and 4 H if values are narrow. */
static void NAME(combine_forward)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct combine_forward *a = given;
  float *restrict sum = scratch;
  int64_t size = a->size;
  for (int64_t row = begin; row < end; row++) {
    int64_t owner = a->owners ? a->owners[row] : row;
    if (a->share)
      NAME(load)(sum, a->share, row * a->share_stride, size, a->narrow);
    else
      memset(sum, 0, (size_t)size * sizeof *sum);
    for (int64_t s = 0; s < a->positions; s += 4) {
      int64_t place = (owner * a->positions + s) * size, some = a->positions - s < 4 ? a->positions - s : 4;
      float w[4];
      NAME(load)(w, a->attention, row * a->attention_stride + s, some, a->narrow);
      const float *restrict first = scratch + size;
      if (a->narrow)
        NAME(load)(scratch + size, a->projected, place, some * size, 1);
      else
        first = (const float *)a->projected + place;
      if (some == 4) {
        const float *restrict second = first + size, *restrict third = second + size, *restrict fourth = third + size;
        SIMD for (int64_t k = 0; k < size; k++) {
          float all = sum[k];
          all += w[0] * first[k];
          all += w[1] * second[k];
          all += w[2] * third[k];
          sum[k] = all + w[3] * fourth[k];
        }
      } else {
        for (int64_t n = 0; n < some; n++)
          SIMD for (int64_t k = 0; k < size; k++) sum[k] += w[n] * first[n * size + k];
      }
    }
    if (!a->plain) SIMD for (int64_t k = 0; k < size; k++) sum[k] = NAME(squash)(sum[k]);
    NAME(store)(a->output, row * a->output_stride, sum, size, a->narrow);
  }
}

/* scratch: A kept floats, the sum of dscore over these rows, and 3 A floats. */
static void NAME(attention_backward)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct attention_backward *a = given;
  float *restrict dscore = scratch, *restrict query = scratch + a->size, *restrict dquery = scratch + 2 * a->size;
  float *restrict keys = scratch + 3 * a->size;
  const float *restrict score = a->score;
  for (int64_t row = begin; row < end; row++) {
    NAME(load)(query, a->query, row * a->query_stride, a->size, a->narrow);
    SIMD for (int64_t k = 0; k < a->size; k++) dquery[k] = 0.0f;
    const float *weights = a->weights + row * a->positions, *dweights = a->dweights + row * a->positions;
    const uint8_t *padding = a->padding ? a->padding + row * a->positions : NULL;
    float mean = 0.0f;
    for (int64_t s = 0; s < a->positions; s++) mean += padding && padding[s] ? 0.0f : weights[s] * dweights[s];
    for (int64_t s = 0; s < a->positions; s++) {
      if (padding && padding[s]) continue;
      float de = weights[s] * (dweights[s] - mean);
      NAME(load)(keys, a->keys, (row * a->positions + s) * a->size, a->size, a->narrow);
      float *restrict dkeys = a->dkeys + (row * a->positions + s) * a->size;
      SIMD for (int64_t k = 0; k < a->size; k++) {
        float hidden = NAME(sigmoid)(2.0f * (query[k] + keys[k]));
        float share = de * (hidden - hidden * hidden);
        dscore[k] += 2.0f * de * hidden;
        dkeys[k] += share;
        dquery[k] += share;
      }
    }
    SIMD for (int64_t k = 0; k < a->size; k++) dquery[k] *= 4.0f * score[k];
    NAME(store)(a->dquery, row * a->dquery_stride, dquery, a->size, a->narrow);
  }
}

/* scratch: E floats. */
static void NAME(weight_gradient)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct weight_gradient *a = given;
  float *restrict dcontext = scratch;
  for (int64_t row = begin; row < end; row++) {
    NAME(load)(dcontext, a->dcontext, row * a->dcontext_stride, a->size, a->narrow);
    const uint8_t *padding = a->padding ? a->padding + row * a->positions : NULL;
    for (int64_t s = 0; s < a->positions; s++) {
      float *dweight = a->dweights + row * a->positions + s, sum = 0.0f;
      *dweight = 0.0f;
      if (padding && padding[s]) continue;
      int64_t place = row * a->values_batch + s * a->values_step;
      if (a->narrow) {
        const uint16_t *restrict values = (const uint16_t *)a->values + place;
        SUM(sum) for (int64_t k = 0; k < a->size; k++) sum += NAME(widen)(values[k]) * dcontext[k];
      } else {
        const float *restrict values = (const float *)a->values + place;
        SUM(sum) for (int64_t k = 0; k < a->size; k++) sum += values[k] * dcontext[k];
      }
      if (a->incoming) {
        float more;
        NAME(load)(&more, a->incoming, row * a->incoming_stride + s, 1, a->narrow);
        sum += more;
      }
      *dweight = sum;
    }
  }
}

/* scratch: with dbias V kept floats, its sum over these rows; and V floats. */
static void NAME(losses)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct losses *a = given;
  int64_t size = a->vocabulary;
  float *restrict dbias = scratch, *restrict values = scratch + (a->dbias ? size : 0);
  float share = a->smoothing / (float)size;
  for (int64_t row = begin; row < end; row++) {
    NAME(load)(values, a->logits, row * a->logits_stride, size, a->narrow);
    int64_t target = a->targets[row];
    float wanted = values[target], top = -INFINITY, mean = 0.0f, sum = 0.0f;
    MAXIMUM(top) for (int64_t k = 0; k < size; k++) top = values[k] > top ? values[k] : top;
    SUM(mean, sum) for (int64_t k = 0; k < size; k++) {
      mean += values[k];
      values[k] = NAME(exponential)(values[k] - top);
      sum += values[k];
    }
    float lse = top + logf(sum);
    float loss = lse - (1.0f - a->smoothing) * wanted;
    a->losses[row] = a->smoothing == 0.0f ? loss : loss - a->smoothing * (mean / (float)size);
    if (!a->gradient) continue;
    float factor = a->factors ? a->factors[row] : 1.0f, scale = factor / sum, constant = factor * share;
    SIMD for (int64_t k = 0; k < size; k++) values[k] = values[k] * scale - constant;
    values[target] -= factor * (1.0f - a->smoothing);
    NAME(store)(a->logits, row * a->logits_stride, values, size, a->narrow);
    if (!a->dbias) continue;
    SIMD for (int64_t k = 0; k < size; k++) dbias[k] += values[k];
  }
}

/* Handles columns begin to end of all rows, so that each sum is computed by one thread, in the order of the rows. */
static void NAME(add_rows)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct add_rows *a = given;
  (void)scratch;
  for (int64_t row = 0; row < a->rows; row++) {
    float *restrict total = a->total + (a->places ? a->places[row] : 0) * a->total_stride;
    if (a->narrow) {
      const uint16_t *restrict values = (const uint16_t *)a->values + row * a->values_stride;
      SIMD for (int64_t k = begin; k < end; k++) total[k] += NAME(widen)(values[k]);
    } else {
      const float *restrict values = (const float *)a->values + row * a->values_stride;
      SIMD for (int64_t k = begin; k < end; k++) total[k] += values[k];
    }
  }
}

/* Loads one value of either type. */
static INLINE float NAME(value)(const void *from, int64_t at, int64_t narrow) {
  return narrow ? NAME(widen)(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

static INLINE void NAME(zero)(void *to, int64_t at, int64_t count, int64_t narrow) {
  size_t size = narrow ? sizeof(uint16_t) : sizeof(float);
  memset((char *)to + (size_t)at * size, 0, (size_t)count * size);
}

/* Prefetches values that will be read or written some steps later. */
static INLINE void NAME(expect)(const void *values, int64_t at, int64_t count, int64_t narrow) {
  const char *first = (const char *)values + at * (narrow ? 2 : 4);
  for (int64_t byte = 0; byte < count * (narrow ? 2 : 4); byte += 64) __builtin_prefetch(first + byte);
}

/* Returns 1 if rows of a tensor are written with non-temporal stores: the tensor exceeds the caches, so caching it is useless,
 * and so is reading a line before overwriting it. */
static INLINE int NAME(streams)(const void *to, int64_t values, int64_t batch, int64_t step, int64_t at, int64_t count) {
  return LANES && values >= STREAMED && (uintptr_t)to % 64 == 0 && (batch | step | at | count) % 16 == 0;
}

static INLINE void NAME(stream)(float *to, const float *from, int64_t count) {
#if LANES == 16
  for (int64_t k = 0; k < count; k += 16) _mm512_stream_ps(to + k, _mm512_loadu_ps(from + k));
#elif LANES == 8
  for (int64_t k = 0; k < count; k += 8) _mm256_stream_ps(to + k, _mm256_loadu_ps(from + k));
#else
  memcpy(to, from, (size_t)count * sizeof *to);
#endif
}

static INLINE void NAME(end_of_streams)(void) {
#if LANES
  _mm_sfence();
#endif
}

/* ``narrow`` is a constant in each of the two calls, so that the compiler specialises the loops. */
static INLINE void NAME(recurrence_forward_as)(const struct recurrence_forward *a, int64_t begin, int64_t end,
                                               float *restrict h, const int64_t narrow) {
  int64_t tasks = (a->hidden + a->width - 1) / a->width;
  for (int64_t task = begin; task < end; task++) {
    int64_t row = task / tasks, at = task % tasks * a->width;
    int64_t count = a->hidden - at < a->width ? a->hidden - at : a->width;
    int64_t length = a->lengths ? a->lengths[row] : a->positions;
    size_t bytes = (size_t)count * sizeof *h;
    int64_t ahead = AHEAD / count + 1, values = a->rows * a->positions * a->hidden;
    int streams = !narrow && NAME(streams)(a->outputs, values, a->outputs_batch, a->outputs_step, at, count);
    if (a->initial)
      memcpy(h, a->initial + row * a->hidden + at, bytes);
    else
      memset(h, 0, bytes);
    for (int64_t i = 0; i < length; i++) {
      int64_t t = a->backwards ? length - 1 - i : i;
      int64_t from = row * a->decay_batch + t * a->decay_step + at;
      int64_t other = row * a->inputs_batch + t * a->inputs_step + at;
      int64_t to = row * a->outputs_batch + t * a->outputs_step + at;
      if (i + ahead < length) {
        int64_t later = a->backwards ? -ahead : ahead;
        NAME(expect)(a->decay, from + later * a->decay_step, count, narrow);
        NAME(expect)(a->inputs, other + later * a->inputs_step, count, narrow);
        if (!streams) NAME(expect)(a->outputs, to + later * a->outputs_step, count, narrow);
      }
      if (narrow) {
        const uint16_t *decay = (const uint16_t *)a->decay + from, *inputs = (const uint16_t *)a->inputs + other;
        uint16_t *restrict outputs = (uint16_t *)a->outputs + to;
        SIMD for (int64_t k = 0; k < count; k++) {
          h[k] = NAME(widen)(decay[k]) * h[k] + NAME(widen)(inputs[k]);
          outputs[k] = NAME(narrow)(h[k]);
        }
      } else {
        const float *decay = (const float *)a->decay + from, *inputs = (const float *)a->inputs + other;
        float *restrict outputs = (float *)a->outputs + to;
        SIMD for (int64_t k = 0; k < count; k++) h[k] = decay[k] * h[k] + inputs[k];
        if (streams)
          NAME(stream)(outputs, h, count);
        else
          memcpy(outputs, h, bytes);
      }
    }
    for (int64_t t = length; t < a->positions; t++)
      NAME(zero)(a->outputs, row * a->outputs_batch + t * a->outputs_step + at, count, narrow);
  }
  NAME(end_of_streams)();
}

static void NAME(recurrence_forward)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct recurrence_forward *a = given;
  if (a->narrow)
    NAME(recurrence_forward_as)(a, begin, end, scratch, 1);
  else
    NAME(recurrence_forward_as)(a, begin, end, scratch, 0);
}

static INLINE void NAME(recurrence_backward_as)(const struct recurrence_backward *a, int64_t begin, int64_t end,
                                                float *restrict scratch, const int64_t narrow) {
  int64_t tasks = (a->hidden + a->width - 1) / a->width;
  float *restrict carry = scratch, *restrict before = scratch + a->width;
  float *restrict deltas = scratch + 2 * a->width, *restrict of_decay = scratch + 3 * a->width;
  for (int64_t task = begin; task < end; task++) {
    int64_t row = task / tasks, at = task % tasks * a->width;
    int64_t count = a->hidden - at < a->width ? a->hidden - at : a->width;
    int64_t length = a->lengths ? a->lengths[row] : a->positions;
    size_t bytes = (size_t)count * sizeof *carry;
    int64_t ahead = AHEAD / count + 1, values = a->rows * a->positions * a->hidden;
    int streams = !narrow && NAME(streams)(a->ddecay, values, a->gradients_batch, a->gradients_step, at, count) &&
                  (uintptr_t)a->dinputs % 64 == 0;
    memset(carry, 0, bytes);
    for (int64_t i = length - 1; i >= 0; i--) {
      int64_t t = a->backwards ? length - 1 - i : i;
      int64_t from = row * a->decay_batch + t * a->decay_step + at;
      int64_t other = row * a->doutputs_batch + t * a->doutputs_step + at;
      int64_t to = row * a->gradients_batch + t * a->gradients_step + at;
      int64_t previous = row * a->kept_batch + (a->backwards ? t + 1 : t - 1) * a->kept_step + at;
      if (i > ahead) {
        int64_t later = a->backwards ? ahead : -ahead;
        NAME(expect)(a->decay, from + later * a->decay_step, count, narrow);
        NAME(expect)(a->doutputs, other + later * a->doutputs_step, count, narrow);
        NAME(expect)(a->kept, previous + later * a->kept_step, count, narrow);
        if (!streams) {
          NAME(expect)(a->ddecay, to + later * a->gradients_step, count, narrow);
          NAME(expect)(a->dinputs, to + later * a->gradients_step, count, narrow);
        }
      }
      const float *known = NULL;
      if (i == 0) {
        if (a->initial)
          memcpy(before, a->initial + row * a->hidden + at, bytes);
        else
          memset(before, 0, bytes);
        if (narrow) SIMD for (int64_t k = 0; k < count; k++) before[k] = NAME(widen)(NAME(narrow)(before[k]));
        known = before;
      }
      if (!known && narrow) {
        NAME(load)(before, a->kept, previous, count, 1);
        known = before;
      }
      if (narrow) {
        const uint16_t *decay = (const uint16_t *)a->decay + from, *incoming = (const uint16_t *)a->doutputs + other;
        uint16_t *restrict ddecay = (uint16_t *)a->ddecay + to, *restrict dinputs = (uint16_t *)a->dinputs + to;
        SIMD for (int64_t k = 0; k < count; k++) {
          float delta = NAME(widen)(incoming[k]) + carry[k];
          dinputs[k] = NAME(narrow)(delta);
          ddecay[k] = NAME(narrow)(delta * known[k]);
          carry[k] = NAME(widen)(decay[k]) * delta;
        }
      } else {
        const float *decay = (const float *)a->decay + from, *incoming = (const float *)a->doutputs + other;
        float *ddecay = (float *)a->ddecay + to, *dinputs = (float *)a->dinputs + to;
        float *restrict first = streams ? deltas : dinputs, *restrict second = streams ? of_decay : ddecay;
        if (!known) known = (const float *)a->kept + previous;
        SIMD for (int64_t k = 0; k < count; k++) {
          float delta = incoming[k] + carry[k];
          first[k] = delta;
          second[k] = delta * known[k];
          carry[k] = decay[k] * delta;
        }
        if (streams) {
          NAME(stream)(dinputs, deltas, count);
          NAME(stream)(ddecay, of_decay, count);
        }
      }
    }
    for (int64_t t = length; t < a->positions; t++) {
      int64_t to = row * a->gradients_batch + t * a->gradients_step + at;
      NAME(zero)(a->ddecay, to, count, narrow);
      NAME(zero)(a->dinputs, to, count, narrow);
    }
    memcpy(a->dinitial + row * a->hidden + at, carry, bytes);
  }
  NAME(end_of_streams)();
}

static void NAME(recurrence_backward)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct recurrence_backward *a = given;
  if (a->narrow)
    NAME(recurrence_backward_as)(a, begin, end, scratch, 1);
  else
    NAME(recurrence_backward_as)(a, begin, end, scratch, 0);
}

#include "scan_cells.h"

/* Rounds a row to 8 bits, scaled by its largest value, and adds 128; padding becomes 128, which means 0. Returns the scale of
 * a rounding step, or NaN for a row with values that are not finite, which 8 bits cannot represent. */
static float NAME(round_row)(const float *restrict row, int64_t size, uint8_t *restrict to, int64_t wide) {
  float largest = 0.0f;
  MAXIMUM(largest) for (int64_t k = 0; k < size; k++) largest = fabsf(row[k]) > largest ? fabsf(row[k]) : largest;
  float odd = 0.0f;
  SUM(odd) for (int64_t k = 0; k < size; k++) odd += row[k] - row[k];
  float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
  /* The last bits of the sum are the nearest integer plus 128. */
  SIMD for (int64_t k = 0; k < size; k++) {
    float shifted = row[k] * inverse + (12582912.0f + 128.0f);
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    to[k] = (uint8_t)bits;
  }
  for (int64_t k = size; k < wide; k++) to[k] = 128;
  return odd == 0.0f ? largest / 127.0f : odd;
}

#if LANES == 0
/* Sums of 16 outputs for a few rows, reading the group's weights once for all of them. */
static void sums_of_16_plain(const uint8_t *restrict left, int64_t stride, int64_t wide, const int8_t *restrict weight,
                             int64_t rows, int32_t (*restrict sums)[16]) {
  for (int64_t row = 0; row < rows; row++) {
    int32_t sum[16] = {0};
    const uint8_t *restrict values = left + row * stride;
    for (int64_t k = 0; k < wide; k += 4) {
      const int8_t *restrict w = weight + k * 16;
      SIMD for (int64_t n = 0; n < 16; n++) {
        sum[n] += values[k] * w[4 * n] + values[k + 1] * w[4 * n + 1] + values[k + 2] * w[4 * n + 2] +
                  values[k + 3] * w[4 * n + 3];
      }
    }
    memcpy(sums[row], sum, sizeof sum);
  }
}
#endif

/* As sums_of_16, in bfloat16. */
static void NAME(sums_of_16_narrow)(const uint8_t *left, int64_t stride, int64_t wide, const uint16_t *weight, int64_t rows,
                                    float (*sums)[16]) {
  for (int64_t row = 0; row < rows; row++) {
    float sum[16] = {0};
    const uint16_t *values = (const uint16_t *)(left + row * stride);
    for (int64_t k = 0; k < wide; k += 2) {
      const uint16_t *restrict w = weight + k * 16;
      float one = NAME(widen)(values[k]), two = NAME(widen)(values[k + 1]);
      SIMD for (int64_t n = 0; n < 16; n++) sum[n] += one * NAME(widen)(w[2 * n]) + two * NAME(widen)(w[2 * n + 1]);
    }
    memcpy(sums[row], sum, sizeof sum);
  }
}

/* Of floats alone the product and its sum are rounded once where the processor can: twice the speed, but other last bits. */
#if LANES == 16
#define MULTIPLY_ADD(w, value, sum) _mm512_fmadd_ps(w, _mm512_set1_ps(value), sum)
#elif LANES == 8
#define MULTIPLY_ADD(w, value, sum) _mm256_fmadd_ps(w, _mm256_set1_ps(value), sum)
#elif defined(__aarch64__)
#include <arm_neon.h>
#define MULTIPLY_ADD(w, value, sum) vfmaq_n_f32(sum, w, value)
#else
#define MULTIPLY_ADD(w, value, sum) ((sum) + (w) * (value))
#endif

/* Sums of a few rows of floats and one or two groups of 16 outputs, kept in registers: the compiler keeps vectors that are
 * wider than those in memory. */
static INLINE void NAME(tile)(const float *left, int64_t stride, int64_t inputs, const float *weight, const int rows,
                              const int groups, float (*sums)[16]) {
  NAME(vector) sum[40], w[2 * VECTORS];
  const int each = groups * VECTORS;
  for (int k = 0; k < rows * each; k++) sum[k] = (NAME(vector)){0};
  for (int64_t k = 0; k < inputs; k++) {
    for (int n = 0; n < each; n++) memcpy(&w[n], weight + (n / VECTORS * inputs + k) * 16 + n % VECTORS * WIDTH, sizeof w[n]);
    for (int row = 0; row < rows; row++)
      for (int n = 0; n < each; n++) sum[row * each + n] = MULTIPLY_ADD(w[n], left[row * stride + k], sum[row * each + n]);
  }
  for (int row = 0; row < rows; row++)
    for (int n = 0; n < each; n++)
      memcpy(sums[n / VECTORS * ROWS_AT_ONCE + row] + n % VECTORS * WIDTH, &sum[row * each + n], sizeof sum[0]);
}

/* Sums of all rows; those of the second group are ROWS_AT_ONCE rows after those of the first. */
static INLINE void NAME(sums_of_groups)(const float *left, int64_t stride, int64_t inputs, const float *weight, int64_t rows,
                                        const int groups, float (*sums)[16]) {
  int64_t row = 0;
#define TILES(count)                        \
  for (; row + count <= rows; row += count) \
  NAME(tile)(left + row * stride, stride, inputs, weight, count, groups, sums + row)
#if WIDTH == 16
  TILES(12);
#endif
#if WIDTH > 4 || defined(__aarch64__) /* others have too few registers */
  TILES(5);
  TILES(4);
#endif
  TILES(2);
  TILES(1);
#undef TILES
}

#undef MULTIPLY_ADD

static void NAME(sums_of_16_floats)(const float *left, int64_t stride, int64_t inputs, const float *weight, int64_t rows,
                                    float (*sums)[16]) {
  NAME(sums_of_groups)(left, stride, inputs, weight, rows, 1, sums);
}

/* Uses each loaded value of a row for two groups of outputs. */
static void NAME(sums_of_32_floats)(const float *left, int64_t stride, int64_t inputs, const float *weight, int64_t rows,
                                    float (*sums)[16]) {
  NAME(sums_of_groups)(left, stride, inputs, weight, rows, 2, sums);
}

/* Computes up to 16 outputs of a row from their sums: scales, bias and start. */
static INLINE void NAME(finish)(const struct weight *w, int64_t at, int64_t count, const void *sums, float step,
                                const float *start, float *output) {
  float values[16];
  if (w->kind == BYTES) {
    const int32_t *restrict sum = sums, *restrict shift = w->sums + at, more = offset;
    const float *restrict scales = w->scales + at;
    if (count == 16) {
      SIMD for (int64_t k = 0; k < 16; k++) values[k] = (float)(sum[k] - more * shift[k]) * (step * scales[k]);
    } else {
      for (int64_t k = 0; k < count; k++) values[k] = (float)(sum[k] - more * shift[k]) * (step * scales[k]);
    }
  } else {
    memcpy(values, sums, sizeof values);
  }
  if (w->bias) {
    const float *restrict bias = w->bias + at;
    for (int64_t k = 0; k < count; k++) values[k] += bias[k];
  }
  if (start)
    for (int64_t k = 0; k < count; k++) values[k] += start[k];
  if (count == 16)
    memcpy(output, values, sizeof values);
  else
    memcpy(output, values, (size_t)count * sizeof *values);
}

/* Computes left weight^T + bias + start; start may be NULL or the output.
 *
 * scratch: PRODUCT_SCRATCH floats, the rows converted to the weight's kind and their scales. Weights are read once for all
 * rows, and a few groups of a row are written at a time. The result of a row does not depend on other rows. */
static void NAME(multiply)(const struct weight *w, const float *left, int64_t left_stride, int64_t rows, const float *start,
                           int64_t start_stride, float *output, int64_t output_stride, float *scratch) {
  int64_t bytes = WIDE(w->kind, w->inputs), stride = ROW_BYTES(bytes);
  int64_t wide = w->kind == FLOATS ? w->inputs : w->kind == BFLOATS ? bytes / 2 : bytes; /* padding included */
  float *restrict steps = scratch;
  uint8_t *restrict rounded = (uint8_t *)(((uintptr_t)(scratch + rows) + 63) / 64 * 64); /* rows aligned to cache lines */
  union {
    int32_t whole[GROUPS_AT_ONCE][ROWS_AT_ONCE][16];
    float floats[GROUPS_AT_ONCE][ROWS_AT_ONCE][16];
  } sums;
  if (w->kind != FLOATS) BEGIN_SUMS;
  for (int64_t row = 0; row < rows; row++) {
    uint8_t *to = rounded + row * stride;
    if (w->kind == FLOATS) {
      memcpy(to, left + row * left_stride, (size_t)w->inputs * sizeof *left);
    } else if (w->kind == BYTES) {
      steps[row] = NAME(round_row)(left + row * left_stride, w->inputs, to, wide);
    } else {
      NAME(store)(to, 0, left + row * left_stride, w->inputs, 1);
      memset((uint16_t *)to + w->inputs, 0, (size_t)(wide - w->inputs) * sizeof(uint16_t));
    }
  }
  for (int64_t at = 0; at < w->outputs; at += 16 * GROUPS_AT_ONCE) {
    int64_t all = w->outputs - at < 16 * GROUPS_AT_ONCE ? w->outputs - at : 16 * GROUPS_AT_ONCE;
    for (int64_t first = 0; first < rows; first += ROWS_AT_ONCE) {
      int64_t some = rows - first < ROWS_AT_ONCE ? rows - first : ROWS_AT_ONCE;
      const uint8_t *own = rounded + first * stride;
      for (int64_t n = 0, groups; n < all; n += 16 * groups) {
        groups = LANES == 16 && w->kind == FLOATS && all - n > 16 ? 2 : 1;
        if (w->kind == BYTES)
          SUMS_OF_16(own, stride, wide, (const int8_t *)w->values + (at + n) * wide, some, sums.whole[n / 16]);
        else if (w->kind == BFLOATS)
          NARROW_SUMS_OF_16(NAME(sums_of_16_narrow))
          (own, stride, wide, (const uint16_t *)w->values + (at + n) * wide, some, sums.floats[n / 16]);
        else
          (groups == 2 ? NAME(sums_of_32_floats) : NAME(sums_of_16_floats))(
              (const float *)own, stride / 4, wide, (const float *)w->values + (at + n) * wide, some, sums.floats[n / 16]);
      }
      for (int64_t row = 0; row < some; row++) {
        for (int64_t n = 0; n < all; n += 16) {
          const float *from = start ? start + (first + row) * start_stride + at + n : NULL;
          NAME(finish)(w, at + n, all - n < 16 ? all - n : 16, sums.whole[n / 16][row], w->kind == BYTES ? steps[first + row] : 1.0f,
                       from, output + (first + row) * output_stride + at + n);
        }
      }
    }
  }
  if (w->kind != FLOATS) END_SUMS;
}

static void NAME(product_int8)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct product_int8 *a = given;
  struct weight w = {BYTES, a->inputs, a->outputs, a->weight, a->sums, a->scales, a->bias};
  const float *start = a->start ? a->start + begin * a->start_stride : NULL;
  NAME(multiply)(&w, a->left + begin * a->left_stride, a->left_stride, end - begin, start, a->start_stride,
                 a->output + begin * a->output_stride, a->output_stride, scratch);
}

static void NAME(products_by_owner)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct products_by_owner *a = given;
  for (int64_t row = begin, next; row < end; row = next) {
    const struct weight *w = a->weights + a->owners[row];
    float *output = a->output + row * a->output_stride;
    for (next = row + 1; next < end && a->owners[next] == a->owners[row]; next++) continue;
    NAME(multiply)(w, a->left + row * a->left_stride, a->left_stride, next - row, NULL, 0, output, a->output_stride, scratch);
    for (int64_t k = 0; k < next - row; k++)
      for (int64_t n = w->outputs; n < a->most; n++) output[k * a->output_stride + n] = -INFINITY;
  }
}

/* 2 atanh(s) for |s| <= 1/3, to 1e-9. Unlike log, it is the same with every library of C. */
static INLINE double NAME(twice_atanh)(double s) {
  double q = s * s, sum = 1.0 / 17;
  for (int odd = 15; odd > 0; odd -= 2) sum = sum * q + 1.0 / odd;
  return 2 * s * sum;
}

/* log x of x >= 1 */
static INLINE float NAME(logarithm)(float x) {
  if (!(x < INFINITY)) return x;
  int exponent;
  double part = frexp(x, &exponent), s = (part - 0.70710678118654752) / (part + 0.70710678118654752);
  return (float)((exponent - 0.5) * 0.69314718055994531 + NAME(twice_atanh)(s));
}

/* Returns log sum exp of the logits: logits minus this are log-probabilities. */
static INLINE float NAME(log_sum)(const float *restrict logits, int64_t count) {
  float top = -INFINITY, sum = 0.0f, powers[CHUNK];
  MAXIMUM(top) for (int64_t k = 0; k < count; k++) top = logits[k] > top ? logits[k] : top;
  for (int64_t at = 0; at < count; at += CHUNK) {
    int64_t some = count - at < CHUNK ? count - at : CHUNK;
    SIMD for (int64_t k = 0; k < some; k++) {
      float power = NAME(exponential)(logits[at + k] - top);
      powers[k] = logits[at + k] == -INFINITY ? 0.0f : power;
    }
    sum += NAME(sum)(powers, some);
  }
  return top + NAME(logarithm)(sum);
}

/* Ties are ordered by word id. scratch: V floats. */
static void NAME(best_words)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct best_words *a = given;
  float *restrict logits = scratch;
  for (int64_t row = begin; row < end; row++) {
    memcpy(logits, a->logits + row * a->logits_stride, (size_t)a->vocabulary * sizeof *logits);
    if (a->barred) {
      const float *restrict barred = a->barred + a->owners[row] * a->vocabulary;
      SIMD for (int64_t k = 0; k < a->vocabulary; k++) logits[k] += barred[k];
    }
    float total = NAME(log_sum)(logits, a->vocabulary);
    a->end[row] = logits[3] - total;
    logits[a->skipped[0]] = logits[a->skipped[1]] = -INFINITY;
    float *values = a->values + row * a->count;
    int64_t *words = a->words + row * a->count, held = 0;
    /* Few words exceed the lowest of the best so far: whole blocks are skipped. */
    for (int64_t at = 0; at < a->vocabulary; at += 64) {
      int64_t last = at + 64 < a->vocabulary ? at + 64 : a->vocabulary;
      float most = -INFINITY;
      MAXIMUM(most) for (int64_t k = at; k < last; k++) most = logits[k] > most ? logits[k] : most;
      if (held == a->count && !(most - total > values[held - 1])) continue;
      for (int64_t k = at; k < last; k++) {
        float value = logits[k] - total;
        if (held == a->count && !(value > values[held - 1])) continue;
        int64_t place = held < a->count ? held++ : held - 1;
        for (; place > 0 && value > values[place - 1]; place--) {
          values[place] = values[place - 1];
          words[place] = words[place - 1];
        }
        values[place] = value;
        words[place] = k;
      }
    }
  }
}

#include "search.h"

#undef VECTORS
#undef WIDTH
