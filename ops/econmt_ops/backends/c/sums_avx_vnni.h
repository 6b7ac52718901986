/* Sums of 8-bit products by AVX-VNNI, one instruction for four products of a lane and their sum, where AVX-512 is absent. */

#define KNOWS_AVX_VNNI KNOWS(11, 13) /* older compilers lack it; has_avx_vnni is 0 there */
#ifndef AVX_VNNI /* tests name instructions of other processors that have the same intrinsic */
#define AVX_VNNI "avx2,avxvnni"
#define HAS_AVX_VNNI cpuid_bit(7, 1, EAX, 4)
#endif

static int has_avx_vnni;

#if KNOWS_AVX_VNNI
static int ask_for_avx_vnni(void) { return HAS_AVX_VNNI; }

BEGIN_TARGET(AVX_VNNI)

/* Sums of up to 6 rows, kept in registers. */
static INLINE void narrow_tile_vnni(const uint8_t *left, int64_t stride, int64_t wide, const int8_t *weight, const int rows,
                                    int32_t (*sums)[16]) {
  __m256i sum[12];
  for (int k = 0; k < 2 * rows; k++) sum[k] = _mm256_setzero_si256();
  for (int64_t k = 0; k < wide; k += 4) {
    __m256i first = _mm256_loadu_si256((const __m256i *)(weight + k * 16));
    __m256i second = _mm256_loadu_si256((const __m256i *)(weight + k * 16 + 32));
    for (int row = 0; row < rows; row++) {
      int32_t four;
      memcpy(&four, left + row * stride + k, sizeof four);
      sum[2 * row] = _mm256_dpbusd_epi32(sum[2 * row], _mm256_set1_epi32(four), first);
      sum[2 * row + 1] = _mm256_dpbusd_epi32(sum[2 * row + 1], _mm256_set1_epi32(four), second);
    }
  }
  for (int row = 0; row < rows; row++)
    for (int n = 0; n < 2; n++) _mm256_storeu_si256((__m256i *)(sums[row] + 8 * n), sum[2 * row + n]);
}

static void sums_of_16_avx_vnni(const uint8_t *restrict left, int64_t stride, int64_t wide, const int8_t *restrict weight,
                                int64_t rows, int32_t (*restrict sums)[16]) {
  int64_t row = 0;
  for (; row + 6 <= rows; row += 6) narrow_tile_vnni(left + row * stride, stride, wide, weight, 6, sums + row);
  for (; row + 2 <= rows; row += 2) narrow_tile_vnni(left + row * stride, stride, wide, weight, 2, sums + row);
  for (; row < rows; row++) narrow_tile_vnni(left + row * stride, stride, wide, weight, 1, sums + row);
}

END_TARGET
#else
static int ask_for_avx_vnni(void) { return 0; }
#define sums_of_16_avx_vnni sums_of_16_signed
#endif
