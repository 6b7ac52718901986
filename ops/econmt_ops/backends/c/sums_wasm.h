/* Sums of 8-bit products by WebAssembly's 128-bit vectors, exactly: bytes are widened to 16 bits, and the instruction for them
 * adds two products in 32 bits. */

#include <wasm_simd128.h>

#define WIDENED 512 /* inputs of a row that are widened at a time */

/* Adds the sums of a few rows, widened, for four groups of four outputs; those of four outputs stay in registers. */
static INLINE void wasm_tile(const int16_t (*left)[WIDENED], int64_t wide, const int8_t *weight, const int rows,
                             int32_t (*sums)[16]) {
  for (int n = 0; n < 4; n++) {
    const int8_t *from = weight + 16 * n;
    v128_t low[4], high[4];
    for (int row = 0; row < rows; row++) low[row] = high[row] = wasm_i32x4_const_splat(0);
    for (int32_t k = 0; k < (int32_t)wide; k += 4, from += 64) {
      v128_t first = wasm_i16x8_load8x8(from), second = wasm_i16x8_load8x8(from + 8);
      for (int row = 0; row < rows; row++) {
        v128_t values = wasm_v128_load64_splat(left[row] + k);
        low[row] = wasm_i32x4_add(low[row], wasm_i32x4_dot_i16x8(first, values));
        high[row] = wasm_i32x4_add(high[row], wasm_i32x4_dot_i16x8(second, values));
      }
    }
    for (int row = 0; row < rows; row++) {
      v128_t even = wasm_i32x4_shuffle(low[row], high[row], 0, 2, 4, 6);
      v128_t odd = wasm_i32x4_shuffle(low[row], high[row], 1, 3, 5, 7);
      v128_t before = wasm_v128_load(sums[row] + 4 * n);
      wasm_v128_store(sums[row] + 4 * n, wasm_i32x4_add(before, wasm_i32x4_add(even, odd)));
    }
  }
}

/* As sums_of_16_plain. */
static void sums_of_16_wasm(const uint8_t *restrict left, int64_t stride, int64_t wide, const int8_t *restrict weight, int64_t rows,
                            int32_t (*restrict sums)[16]) {
  int16_t widened[4][WIDENED];
  memset(sums, 0, (size_t)rows * sizeof *sums);
  for (int64_t begin = 0; begin < wide; begin += WIDENED) {
    int64_t some = wide - begin < WIDENED ? wide - begin : WIDENED;
    for (int64_t row = 0, count; row < rows; row += count) {
      count = rows - row < 4 ? 1 : 4;
      for (int64_t k = 0; k < count; k++)
        for (int64_t at = 0; at < some; at += 8)
          wasm_v128_store(widened[k] + at, wasm_u16x8_load8x8(left + (row + k) * stride + begin + at));
      if (count == 4)
        wasm_tile(widened, some, weight + begin * 16, 4, sums + row);
      else
        wasm_tile(widened, some, weight + begin * 16, 1, sums + row);
    }
  }
}

#undef WIDENED
