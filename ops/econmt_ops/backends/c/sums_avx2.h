/* Sums of 8-bit products by AVX2. Its instruction for bytes adds two products in 16 bits, too few for unsigned bytes of up to
 * 255. Rows are therefore made signed, of at most 127 in size, and their signs are moved to the weights. */

/* Sums of up to 4 rows, kept in registers. */
static INLINE void signed_tile(const uint8_t *left, int64_t stride, int64_t wide, const int8_t *weight, const int rows,
                               int32_t (*sums)[16]) {
  const __m256i ones = _mm256_set1_epi16(1), half = _mm256_set1_epi8(-128);
  __m256i sum[8];
  for (int k = 0; k < 2 * rows; k++) sum[k] = _mm256_setzero_si256();
  for (int64_t k = 0; k < wide; k += 4) {
    __m256i w[2];
    for (int n = 0; n < 2; n++) w[n] = _mm256_loadu_si256((const __m256i *)(weight + k * 16 + n * 32));
    for (int row = 0; row < rows; row++) {
      float four; /* bytes */
      memcpy(&four, left + row * stride + k, sizeof four);
      __m256i values = _mm256_xor_si256(_mm256_castps_si256(_mm256_set1_ps(four)), half), sizes = _mm256_abs_epi8(values);
      for (int n = 0; n < 2; n++) {
        __m256i two = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(w[n], values));
        sum[2 * row + n] = _mm256_add_epi32(sum[2 * row + n], _mm256_madd_epi16(two, ones));
      }
    }
  }
  for (int row = 0; row < rows; row++)
    for (int n = 0; n < 2; n++) _mm256_storeu_si256((__m256i *)(sums[row] + 8 * n), sum[2 * row + n]);
}

/* As sums_of_16_plain, of signed values: without 128 times the sums of the weights. */
static void sums_of_16_signed(const uint8_t *restrict left, int64_t stride, int64_t wide, const int8_t *restrict weight,
                              int64_t rows, int32_t (*restrict sums)[16]) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) signed_tile(left + row * stride, stride, wide, weight, 4, sums + row);
  for (; row < rows; row++) signed_tile(left + row * stride, stride, wide, weight, 1, sums + row);
}
