/* Sums of 8-bit products by AVX-512 VNNI, one instruction for four products of a lane and their sum, and by AMX, one
 * instruction for 16 rows times 16 outputs. */

static int has_vnni, has_narrow, has_floats, has_amx, has_amx_narrow;

BEGIN_TARGET("avx512f,avx512bw,avx512vnni")

/* Sums of up to 12 rows, kept in registers. */
static INLINE void tile_vnni(const uint8_t *left, int64_t stride, int64_t wide, const int8_t *weight, const int rows,
                             int32_t (*sums)[16]) {
  __m512i sum[12];
  for (int row = 0; row < rows; row++) sum[row] = _mm512_setzero_si512();
  for (int64_t k = 0; k < wide; k += 4) {
    __m512i w = _mm512_loadu_si512(weight + k * 16);
    for (int row = 0; row < rows; row++) {
      int32_t four;
      memcpy(&four, left + row * stride + k, sizeof four);
      sum[row] = _mm512_dpbusd_epi32(sum[row], _mm512_set1_epi32(four), w);
    }
  }
  for (int row = 0; row < rows; row++) _mm512_storeu_si512(sums[row], sum[row]);
}

static void sums_of_16_vnni(const uint8_t *restrict left, int64_t stride, int64_t wide, const int8_t *restrict weight,
                            int64_t rows, int32_t (*restrict sums)[16]) {
  int64_t row = 0;
  for (; row + 12 <= rows; row += 12) tile_vnni(left + row * stride, stride, wide, weight, 12, sums + row);
  for (; row + 4 <= rows; row += 4) tile_vnni(left + row * stride, stride, wide, weight, 4, sums + row);
  for (; row < rows; row++) tile_vnni(left + row * stride, stride, wide, weight, 1, sums + row);
}

END_TARGET

#define KNOWS_NARROW KNOWS(10, 12) /* older compilers lack these instructions; has_narrow is 0 there */
#if KNOWS_NARROW
BEGIN_TARGET("avx512f,avx512bw,avx512bf16")

/* As tile_vnni for bfloat16, two products of a lane and their sum at a time. */
static INLINE void tile_narrow(const uint8_t *left, int64_t stride, int64_t wide, const uint16_t *weight, const int rows,
                               float (*sums)[16]) {
  __m512 sum[12];
  for (int row = 0; row < rows; row++) sum[row] = _mm512_setzero_ps();
  for (int64_t k = 0; k < wide; k += 2) {
    __m512bh w = (__m512bh)_mm512_loadu_si512(weight + k * 16);
    for (int row = 0; row < rows; row++) {
      int32_t two;
      memcpy(&two, left + row * stride + 2 * k, sizeof two);
      sum[row] = _mm512_dpbf16_ps(sum[row], (__m512bh)_mm512_set1_epi32(two), w);
    }
  }
  for (int row = 0; row < rows; row++) _mm512_storeu_ps(sums[row], sum[row]);
}

static void narrow_sums_of_16_dot(const uint8_t *left, int64_t stride, int64_t wide, const uint16_t *weight, int64_t rows,
                                  float (*sums)[16]) {
  int64_t row = 0;
  for (; row + 12 <= rows; row += 12) tile_narrow(left + row * stride, stride, wide, weight, 12, sums + row);
  for (; row + 4 <= rows; row += 4) tile_narrow(left + row * stride, stride, wide, weight, 4, sums + row);
  for (; row < rows; row++) tile_narrow(left + row * stride, stride, wide, weight, 1, sums + row);
}

END_TARGET
#else
static void narrow_sums_of_16_dot(const uint8_t *left, int64_t stride, int64_t wide, const uint16_t *weight, int64_t rows,
                                  float (*sums)[16]) {
  (void)left, (void)stride, (void)wide, (void)weight, (void)rows, (void)sums;
}
#endif

#if defined(__linux__) && KNOWS(11, 13)
#include <sys/syscall.h>
#include <unistd.h>

/* Returns 1 if the processor has AMX tiles and the system lets this process use them. */
static int ask_for_amx(void) {
  if (!cpuid_bit(7, 0, EDX, 24) || !cpuid_bit(7, 0, EDX, 25)) return 0;
  const long permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
  return syscall(SYS_arch_prctl, permission, tile_data) == 0;
}

static int amx_is_narrow(void) { return cpuid_bit(7, 0, EDX, 22); }

BEGIN_TARGET("amx-tile,amx-int8,amx-bf16")

/* Tile configuration: palette 1; from byte 16 on the row bytes of each tile (16 bits), from byte 48 on its rows. It is static,
 * because of a local variable the compiler keeps only the first bytes. */
static const uint8_t TILES[64] __attribute__((aligned(64))) = {
    [0] = 1,   [16] = 64, [18] = 64, [20] = 64, [22] = 64, [24] = 64, [26] = 64, [28] = 64, [30] = 64,
    [48] = 16, [49] = 16, [50] = 16, [51] = 16, [52] = 16, [53] = 16, [54] = 16, [55] = 16,
};

static void begin_tiles(void) { _tile_loadconfig(TILES); }

static void end_tiles(void) { _tile_release(); }

/* As sums_of_16, with rows padded to a multiple of 16 by arbitrary values. ``wide`` is in bytes. */
#define SUMS_BY_TILES(dot)                                                          \
  int64_t tiles = (rows + 15) / 16;                                                 \
  const uint8_t *second = left + 16 * stride, *third = left + 32 * stride, *fourth = left + 48 * stride; \
  _tile_zero(0);                                                                    \
  _tile_zero(1);                                                                    \
  _tile_zero(2);                                                                    \
  _tile_zero(3);                                                                    \
  for (int64_t k = 0; k < wide; k += 64) {                                          \
    _tile_loadd(7, weight + k * 16, 64);                                            \
    _tile_loadd(4, left + k, stride);                                               \
    dot(0, 4, 7);                                                                   \
    if (tiles > 1) {                                                                \
      _tile_loadd(5, second + k, stride);                                           \
      dot(1, 5, 7);                                                                 \
    }                                                                               \
    if (tiles > 2) {                                                                \
      _tile_loadd(6, third + k, stride);                                            \
      dot(2, 6, 7);                                                                 \
    }                                                                               \
    if (tiles > 3) {                                                                \
      _tile_loadd(4, fourth + k, stride);                                           \
      dot(3, 4, 7);                                                                 \
    }                                                                               \
  }                                                                                 \
  _tile_stored(0, sums, 64);                                                        \
  if (tiles > 1) _tile_stored(1, sums + 16, 64);                                    \
  if (tiles > 2) _tile_stored(2, sums + 32, 64);                                    \
  if (tiles > 3) _tile_stored(3, sums + 48, 64);

static void sums_of_16_amx(const uint8_t *left, int64_t stride, int64_t wide, const int8_t *weight, int64_t rows,
                           int32_t (*sums)[16]) {
  SUMS_BY_TILES(_tile_dpbusd)
}

static void narrow_sums_of_16_amx(const uint8_t *left, int64_t stride, int64_t inputs, const uint16_t *values, int64_t rows,
                                  float (*sums)[16]) {
  const uint8_t *weight = (const uint8_t *)values;
  int64_t wide = 2 * inputs;
  SUMS_BY_TILES(_tile_dpbf16ps)
}

END_TARGET
#else
static int ask_for_amx(void) { return 0; }
static void begin_tiles(void) {}
static void end_tiles(void) {}
static int amx_is_narrow(void) { return 0; }
#define sums_of_16_amx sums_of_16_vnni
#define narrow_sums_of_16_amx narrow_sums_of_16_dot
#endif
