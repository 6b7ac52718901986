/* Sums of 8-bit products by the dot products of Arm's processors, of four signed bytes for each of four lanes. Processors from
 * Cortex-A75 and Apple M1 on have them. */

#include <arm_neon.h>

static int has_dot;

#if defined(__ARM_FEATURE_DOTPROD)
static int ask_for_dot(void) { return 1; }
#else
#include <sys/auxv.h>

static int ask_for_dot(void) { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; } /* HWCAP_ASIMDDP */
#if defined(__clang__)
BEGIN_TARGET("dotprod")
#else
BEGIN_TARGET("arch=armv8.2-a+dotprod")
#endif
#define RESTORED 1
#endif

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

/* As sums_of_16_plain, of signed values: without 128 times the sums of the weights. */
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
