/* Products with float sums: of bfloat16 matrices by AMX or by AVX-512's bfloat16 instructions, and of float matrices by AVX-512.
 *
 * Both factors are brought into tiles of 16 rows (or outputs) and 32 inputs: those of the left factor row by row, those of the
 * weight input by input, or pair of inputs by pair of inputs, as the instructions read them. No code is made for a shape, so
 * that a new shape costs nothing.
 */

#if KNOWS_NARROW && (!defined(__linux__) || KNOWS(11, 13))
#define HAS_PRODUCTS 1

#define TILE 512       /* values of a tile */
#define SIDE 32        /* rows and outputs of a square of two times two tiles */
#define ROWS_PACKED 256 /* rows whose tiles stay in the L2 cache */
/* Inputs whose tiles of one square of the weight stay in the L2 cache beside those of the rows. */
#define DEEP(value) (2048 / (int64_t)sizeof(value))
#define UP(x, multiple) (((x) + (multiple) - 1) / (multiple) * (multiple))

BEGIN_TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16" WIDEST)

/* Transposes 16 times 16 values of 32 bits. */
static INLINE void transpose_16(__m512i *rows) {
  __m512i other[16];
UNROLL(8)
  for (int i = 0; i < 16; i += 2) {
    other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
UNROLL(4)
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(other[i], other[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(other[i], other[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(other[i + 1], other[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(other[i + 1], other[i + 3]);
  }
UNROLL(4)
  for (int i = 0; i < 4; i++) {
    __m512i a = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x88), b = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xdd);
    __m512i c = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x88);
    __m512i d = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xdd);
    rows[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    rows[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
    rows[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
    rows[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

/* Loads up to 16 values as bfloat16; the others are zero. */
static INLINE __m256i load_16(const void *values, int64_t at, int64_t count, int64_t narrow) {
  __mmask16 mask = (__mmask16)(count >= 16 ? 0xffff : count > 0 ? (1u << count) - 1 : 0);
  if (narrow) return _mm256_maskz_loadu_epi16(mask, (const uint16_t *)values + at);
  return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, (const float *)values + at));
}

/* Brings up to 16 rows and 32 inputs of a matrix, whose strides are given and one of them 1, into a tile. */
static INLINE void pack_tile(uint16_t *to, const void *values, int64_t row_stride, int64_t input_stride, int64_t rows,
                             int64_t inputs, int64_t narrow, int paired) {
  __m512i lines[16];
  int by_rows = input_stride == 1;
  for (int64_t i = 0; i < 16; i++) {
    if (by_rows) { /* a row's inputs */
      __m256i low = _mm256_setzero_si256(), high = low;
      if (i < rows) {
        low = load_16(values, i * row_stride, inputs, narrow);
        high = load_16(values, i * row_stride + 16, inputs - 16, narrow);
      }
      lines[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    } else { /* two inputs of all rows */
      __m256i first = _mm256_setzero_si256(), second = first;
      if (2 * i < inputs) first = load_16(values, 2 * i * input_stride, rows, narrow);
      if (2 * i + 1 < inputs) second = load_16(values, (2 * i + 1) * input_stride, rows, narrow);
      lines[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
    }
  }
  if (by_rows == paired) transpose_16(lines);
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * 32, lines[i]);
}

/* As pack_tile, in float; ``paired``: input by input. */
static INLINE void pack_float_tile(float *to, const float *values, int64_t row_stride, int64_t input_stride, int64_t rows,
                                   int64_t inputs, int paired) {
  int by_rows = input_stride == 1;
  int64_t lines_there = by_rows ? rows : inputs, values_there = by_rows ? inputs : rows;
  for (int64_t half = 0; half < 2; half++) {
    __m512i lines[16];
    int64_t first = by_rows ? 0 : 16 * half, at = by_rows ? 16 * half : 0, count = values_there - at;
    __mmask16 mask = (__mmask16)(count >= 16 ? 0xffff : count > 0 ? (1u << count) - 1 : 0);
    for (int64_t i = 0; i < 16; i++) {
      const float *line = values + (first + i) * (by_rows ? row_stride : input_stride) + at;
      lines[i] = first + i < lines_there ? _mm512_maskz_loadu_epi32(mask, line) : _mm512_setzero_si512();
    }
    if (by_rows == paired) transpose_16(lines);
    for (int64_t i = 0; i < 16; i++) _mm512_storeu_si512(to + (paired ? (16 * half + i) * 16 : i * 32 + 16 * half), lines[i]);
  }
}

/* Brings a matrix into tiles of bfloat16 (or, if they are exact, float); those of 16 rows follow each other. */
static INLINE void pack(void *tiles, const void *values, int64_t row_stride, int64_t input_stride, int64_t rows,
                        int64_t inputs, int64_t narrow, int paired, const int exact) {
  int64_t size = narrow ? 2 : 4, high = UP(rows, 16) / 16, wide = UP(inputs, 32) / 32, count = high * wide;
  int by_rows = input_stride == 1;
  for (int64_t i = 0; i < count; i++) { /* in the order in which the values lie in memory */
    int64_t row = by_rows ? i / wide : i % high, k = by_rows ? i % wide : i / high;
    const char *from = (const char *)values + (16 * row * row_stride + 32 * k * input_stride) * size;
    int64_t rows_left = rows - 16 * row, inputs_left = inputs - 32 * k, at = (row * wide + k) * TILE;
    if (exact)
      pack_float_tile((float *)tiles + at, (const float *)from, row_stride, input_stride, rows_left, inputs_left, paired);
    else
      pack_tile((uint16_t *)tiles + at, from, row_stride, input_stride, rows_left, inputs_left, narrow, paired);
  }
}

/* Handles squares of outputs begin to end. */
static void pack_weight_dot(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct pack_weight *a = given;
  (void)scratch;
  int64_t wide = UP(a->inputs, 32), size = a->narrow ? 2 : 4, tile = a->exact ? 4 : 2;
  int64_t at = begin * SIDE, count = a->outputs - at < (end - begin) * SIDE ? a->outputs - at : (end - begin) * SIDE;
  char *to = (char *)a->tiles + at * wide * tile;
  const char *from = (const char *)a->values + at * a->output_stride * size;
  pack(to, from, a->output_stride, a->input_stride, count, a->inputs, a->narrow, 1, a->exact != 0);
  if (count % SIDE && count % SIDE <= 16) memset(to + UP(count, 16) * wide * tile, 0, (size_t)(16 * wide * tile));
}

/* Adds the product of ``tiles`` tiles of two times 16 rows and two times 16 outputs to the sums, (2, 2, 16, 16). A line of a
 * weight's tile has ``width`` values, 32 bits of an output; ``add`` multiplies and adds. */
#define SQUARE(name, value, width, add)                                                                                \
  static INLINE void name(const value *left, int64_t left_stride, const value *weight, int64_t weight_stride,          \
                          int64_t tiles, int64_t rows_left, int fresh, float *sums) {                                  \
    for (int part = 0; part < 4 && 8 * part < rows_left; part++) {                                                     \
      const value *rows = left + (part / 2) * left_stride + part % 2 * 8 * 32;                                         \
      float *first = sums + part / 2 * 512 + part % 2 * 128, *second = first + 256;                                    \
      __m512 a[8], b[8];                                                                                               \
      UNROLL(8) for (int row = 0; row < 8; row++) {                                                      \
        a[row] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(first + row * 16);                                      \
        b[row] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(second + row * 16);                                     \
      }                                                                                                                \
      for (int64_t k = 0; k < tiles * TILE; k += TILE)                                                                 \
        for (int line = 0; line < TILE / width; line++) {                                                              \
          __m512i w = _mm512_loadu_si512(weight + k + line * width);                                                   \
          __m512i v = _mm512_loadu_si512(weight + weight_stride + k + line * width);                                   \
          UNROLL(8) for (int row = 0; row < 8; row++) {                                                  \
            __m512i x = spread_32_bits(rows + k + row * 32 + line * (width / 16));                                     \
            a[row] = add(a[row], x, w);                                                                                \
            b[row] = add(b[row], x, v);                                                                                \
          }                                                                                                            \
        }                                                                                                              \
      UNROLL(8) for (int row = 0; row < 8; row++) {                                                      \
        _mm512_storeu_ps(first + row * 16, a[row]);                                                                    \
        _mm512_storeu_ps(second + row * 16, b[row]);                                                                   \
      }                                                                                                                \
    }                                                                                                                  \
  }

static INLINE __m512i spread_32_bits(const void *values) {
  int32_t bits;
  memcpy(&bits, values, sizeof bits);
  return _mm512_set1_epi32(bits);
}

static INLINE __m512 add_pairs(__m512 sum, __m512i x, __m512i w) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }

static INLINE __m512 add_floats(__m512 sum, __m512i x, __m512i w) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum);
}

SQUARE(square_dot, uint16_t, 32, add_pairs)
SQUARE(square_float, float, 16, add_floats)

/* Writes a square of sums to the output, from a row and an output on. */
static INLINE void finish_square(const struct product_tiles *a, int64_t row, int64_t at, const float *sums) {
  int64_t rows = a->rows - row < SIDE ? a->rows - row : SIDE;
  for (int half = 0; half < 2 && at + 16 * half < a->outputs; half++) {
    int64_t from = at + 16 * half, count = a->outputs - from;
    __mmask16 mask = (__mmask16)(count >= 16 ? 0xffff : (1u << count) - 1);
    __m512 bias = a->bias ? _mm512_maskz_loadu_ps(mask, a->bias + from) : _mm512_setzero_ps();
    for (int64_t i = 0; i < rows; i++) {
      __m512 value = _mm512_loadu_ps(sums + i / 16 * 512 + half * 256 + i % 16 * 16);
      int64_t place = (row + i) * a->output_stride + from;
      if (a->bias) value = _mm512_add_ps(value, bias);
      if (a->narrow) {
        uint16_t *to = (uint16_t *)a->output + place;
        if (a->adds) {
          __m512i before = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, to)), 16);
          value = _mm512_add_ps(value, _mm512_castsi512_ps(before));
        }
        _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
      } else {
        float *to = (float *)a->output + place;
        if (a->adds) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, to));
        _mm512_mask_storeu_ps(to, mask, value);
      }
    }
  }
}

END_TARGET

#if defined(__linux__)
BEGIN_TARGET("amx-tile,amx-int8,amx-bf16")

static INLINE void square_amx(const uint16_t *left, int64_t left_stride, const uint16_t *weight, int64_t weight_stride,
                              int64_t tiles, int64_t rows_left, int fresh, float *sums) {
  (void)rows_left;
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    _tile_loadd(2, sums + 512, 64);
    _tile_loadd(3, sums + 768, 64);
  }
  for (int64_t k = 0; k < tiles * TILE; k += TILE) {
    _tile_loadd(4, left + k, 64);
    _tile_loadd(6, weight + k, 64);
    _tile_loadd(5, left + left_stride + k, 64);
    _tile_loadd(7, weight + weight_stride + k, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

END_TARGET
#else
#define square_amx square_dot
#endif

/* Floats of scratch: tiles of a block of rows and, if the inputs are divided, its sums. */
static int64_t product_scratch(const struct product_tiles *a) {
  int64_t rows = UP(a->rows < ROWS_PACKED ? a->rows : ROWS_PACKED, SIDE), most = a->exact ? DEEP(float) : DEEP(uint16_t);
  int64_t deep = a->inputs < most ? UP(a->inputs, 32) : most;
  return rows * deep / (a->exact ? 1 : 2) + (a->inputs > most ? rows * UP(a->outputs, SIDE) : 0) + 1024 + 32;
}

/* Computes rows and outputs in squares. */
#define PRODUCT(name, value, exact, square)                                                                            \
  static void name(const struct product_tiles *a, int64_t first_row, int64_t last_row, int64_t first, int64_t last,    \
                   float *scratch) {                                                                                   \
    float *sums = (float *)UP((uintptr_t)scratch, 64);                                                                 \
    value *tiles = (value *)(sums + 1024);                                                                             \
    const value *weight = a->weight;                                                                                   \
    int64_t wide = UP(a->inputs, 32), size = a->left_narrow ? 2 : 4, most = DEEP(value);                               \
    for (int64_t row = first_row; row < last_row; row += ROWS_PACKED) {                                                \
      int64_t rows = last_row - row < ROWS_PACKED ? last_row - row : ROWS_PACKED;                                      \
      int64_t some = a->rows - row < rows ? a->rows - row : rows;                                                      \
      float *totals = (float *)(tiles + rows * (wide < most ? wide : most));                                           \
      for (int64_t k = 0; k < wide; k += most) {                                                                       \
        int64_t deep = wide - k < most ? wide - k : most, inputs = a->inputs - k < most ? a->inputs - k : most;        \
        const char *from = (const char *)a->left + (row * a->left_row + k * a->left_input) * size;                     \
        pack(tiles, from, a->left_row, a->left_input, some, inputs, a->left_narrow, 0, exact);                         \
        if (some % SIDE && some % SIDE <= 16) memset(tiles + UP(some, 16) * deep, 0, (size_t)(16 * deep) * sizeof(value)); \
        int ends = k + most >= wide;                                                                                   \
        for (int64_t at = first; at < last; at += SIDE)                                                                \
          for (int64_t i = 0; i < some; i += SIDE) {                                                                   \
            float *to = wide > most ? totals + (at - first) * rows + i * SIDE : sums;                                  \
            square(tiles + i * deep, 16 * deep, weight + at * wide + k * 16, 16 * wide, deep / 32, some - i, k == 0, to); \
            if (ends) finish_square(a, row + i, at, to);                                                               \
          }                                                                                                            \
      }                                                                                                                \
    }                                                                                                                  \
  }

BEGIN_TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16" WIDEST)
PRODUCT(product_by_dot, uint16_t, 0, square_dot)
PRODUCT(product_of_floats, float, 1, square_float)
#if defined(__linux__)
END_TARGET
BEGIN_TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-int8,amx-bf16" WIDEST)
PRODUCT(product_by_amx, uint16_t, 0, square_amx)
#endif
END_TARGET

struct shared_product {
  const struct product_tiles *product;
  int by_rows;
};

static void product_tiles(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct shared_product *shared = given;
  const struct product_tiles *a = shared->product;
  int64_t rows[2] = {0, UP(a->rows, SIDE)}, outputs[2] = {0, UP(a->outputs, SIDE)};
  int64_t *part = shared->by_rows ? rows : outputs;
  part[0] = begin * SIDE;
  part[1] = end * SIDE;
  if (a->exact) {
    product_of_floats(a, rows[0], rows[1], outputs[0], outputs[1], scratch);
    return;
  }
#if defined(__linux__)
  if (has_amx_narrow) {
    begin_tiles();
    product_by_amx(a, rows[0], rows[1], outputs[0], outputs[1], scratch);
    end_tiles();
    return;
  }
#endif
  product_by_dot(a, rows[0], rows[1], outputs[0], outputs[1], scratch);
}

#else
#define HAS_PRODUCTS 0
#endif
