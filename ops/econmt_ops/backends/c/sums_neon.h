/* Sums of 8-bit products by Arm's vectors: by dot products, of four signed bytes for each of four lanes, which processors have from
 * Cortex-A75 and Apple M1 on, and elsewhere by products of 16 bits, of which two of at most 127 * 127 add up without overflow. */

#include <arm_neon.h>

/* Sums of up to 4 rows for eight outputs, kept in registers. */
static INLINE void widening_tile(const uint8_t *left, int64_t stride, int64_t wide, const int8_t *weight, const int rows,
                                 int32_t (*sums)[16]) {
  int32x4_t sum[16]; /* each of an output's first and last inputs of four */
  for (int n = 0; n < 4 * rows; n++) sum[n] = vdupq_n_s32(0);
  for (int64_t k = 0; k < wide; k += 8) {
    int8x16_t w[2][2];
    for (int n = 0; n < 2; n++)
      for (int part = 0; part < 2; part++) w[n][part] = vld1q_s8(weight + (k + 4 * part) * 16 + n * 16);
    for (int row = 0; row < rows; row++) {
      int32x2_t eight = vreinterpret_s32_u8(veor_u8(vld1_u8(left + row * stride + k), vdup_n_u8(128)));
      int8x16_t first = vreinterpretq_s8_s32(vdupq_lane_s32(eight, 0)), second = vreinterpretq_s8_s32(vdupq_lane_s32(eight, 1));
      for (int n = 0; n < 2; n++) {
        int16x8_t low = vmull_s8(vget_low_s8(w[n][0]), vget_low_s8(first)), high = vmull_high_s8(w[n][0], first);
        low = vmlal_s8(low, vget_low_s8(w[n][1]), vget_low_s8(second));
        high = vmlal_high_s8(high, w[n][1], second);
        sum[4 * row + 2 * n] = vpadalq_s16(sum[4 * row + 2 * n], low);
        sum[4 * row + 2 * n + 1] = vpadalq_s16(sum[4 * row + 2 * n + 1], high);
      }
    }
  }
  for (int row = 0; row < rows; row++)
    for (int n = 0; n < 2; n++) vst1q_s32(sums[row] + 4 * n, vpaddq_s32(sum[4 * row + 2 * n], sum[4 * row + 2 * n + 1]));
}

/* As sums_of_16_plain, of signed values: without 128 times the sums of the weights. */
static void sums_of_16_widening(const uint8_t *restrict left, int64_t stride, int64_t wide, const int8_t *restrict weight,
                                int64_t rows, int32_t (*restrict sums)[16]) {
  for (int half = 0; half < 2; half++) {
    const int8_t *from = weight + 32 * half;
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4)
      widening_tile(left + row * stride, stride, wide, from, 4, (int32_t(*)[16])(sums[row] + 8 * half));
    for (; row < rows; row++) widening_tile(left + row * stride, stride, wide, from, 1, (int32_t(*)[16])(sums[row] + 8 * half));
  }
}

static int has_dot;

#if defined(__ARM_FEATURE_DOTPROD)
#define HAS_DOT 1
static int ask_for_dot(void) { return 1; }
#elif defined(__linux__) && KNOWS(8, 16)
#include <sys/auxv.h>

#define HAS_DOT 1
#define RESTORED 1
static int ask_for_dot(void) { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; } /* HWCAP_ASIMDDP */
#if defined(__clang__)
BEGIN_TARGET("dotprod")
#else
BEGIN_TARGET("arch=armv8.2-a+dotprod")
#endif
#else
#define HAS_DOT 0
static int ask_for_dot(void) { return 0; }
#define sums_of_16_dot sums_of_16_widening
#endif

#if HAS_DOT
/* Sums of up to 5 rows, kept in registers. */
static INLINE void dot_tile(const uint8_t *left, int64_t stride, int64_t wide, const int8_t *weight, const int rows,
                            int32_t (*sums)[16]) {
  int32x4_t sum[20];
  int8x16_t values[5];
  for (int n = 0; n < 4 * rows; n++) sum[n] = vdupq_n_s32(0);
  for (int64_t k = 0; k < wide; k += 16) {
    for (int row = 0; row < rows; row++)
      values[row] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(left + row * stride + k), vdupq_n_u8(128)));
#define FOUR_INPUTS(lane)                                                                \
  for (int n = 0; n < 4; n++) {                                                          \
    int8x16_t w = vld1q_s8(weight + (k + 4 * lane) * 16 + n * 16);                       \
    for (int row = 0; row < rows; row++)                                                 \
      sum[4 * row + n] = vdotq_laneq_s32(sum[4 * row + n], w, values[row], lane);        \
  }
    FOUR_INPUTS(0)
    FOUR_INPUTS(1)
    FOUR_INPUTS(2)
    FOUR_INPUTS(3)
#undef FOUR_INPUTS
  }
  for (int row = 0; row < rows; row++)
    for (int n = 0; n < 4; n++) vst1q_s32(sums[row] + 4 * n, sum[4 * row + n]);
}

/* As sums_of_16_widening. */
static void sums_of_16_dot(const uint8_t *restrict left, int64_t stride, int64_t wide, const int8_t *restrict weight,
                           int64_t rows, int32_t (*restrict sums)[16]) {
  int64_t row = 0;
  for (; row + 5 <= rows; row += 5) dot_tile(left + row * stride, stride, wide, weight, 5, sums + row);
  for (; row < rows; row++) dot_tile(left + row * stride, stride, wide, weight, 1, sums + row);
}

#ifdef RESTORED
END_TARGET
#undef RESTORED
#endif
#endif
