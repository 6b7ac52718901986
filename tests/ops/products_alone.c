/* Compares the C library's products with sums in double, without Python: products_alone LEVEL, the highest instruction set.
 * Prints the level that is used, the largest error of each kind of weight relative to the largest result, how many sums of
 * 8-bit products are wrong, and a number that depends on every bit of what layers, attention and words come to in 8 bits. */

#include "kernels.c"

#include <stdio.h>

static uint32_t state = 1;

static float any(void) {
  state = state * 1664525u + 1013904223u;
  return (float)(int32_t)state / 2147483648.0f;
}

/* Returns the largest difference from ``output`` where half of the rows have a weight of half the outputs. */
static double compare_owners(const struct weight *w, const float *left, int64_t rows, const float *output) {
  int64_t most = w->outputs + 3, *owners = malloc((size_t)rows * sizeof *owners);
  struct weight weights[2] = {*w, *w};
  float *found = malloc((size_t)(rows * most) * 4);
  double error = 0;
  weights[1].outputs = w->outputs / 2;
  for (int64_t row = 0; row < rows; row++) owners[row] = row >= rows / 2;
  for (int64_t k = 0; k < rows * most; k++) found[k] = NAN;
  struct products_by_owner a = {rows, most, left, w->inputs, weights, owners, found, most};
  econmt_products_by_owner(&a, 1);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t n = 0; n < most; n++) {
      float value = found[row * most + n];
      if (n >= weights[owners[row]].outputs ? value != -INFINITY : value != value) error = INFINITY;
      if (n < weights[owners[row]].outputs) error = fmax(error, fabsf(value - output[row * w->outputs + n]));
    }
  free(owners), free(found);
  return error;
}

static double compare(int kind, int64_t rows, int64_t inputs, int64_t outputs) {
  int64_t wide = WIDE(kind, inputs), groups = (outputs + 15) / 16, size = kind == FLOATS ? 4 : kind == BFLOATS ? 2 : 1;
  int64_t width = kind == FLOATS ? inputs : wide / size, together = kind == FLOATS ? 1 : kind == BFLOATS ? 2 : 4;
  float *left = malloc((size_t)(rows * inputs) * 4), *weight = malloc((size_t)(outputs * inputs) * 4);
  float *output = malloc((size_t)(rows * outputs) * 4), *scales = malloc((size_t)outputs * 4), *bias = malloc((size_t)outputs * 4);
  int64_t *owners = calloc((size_t)rows, sizeof *owners);
  int32_t *totals = calloc((size_t)groups * 16, 4);
  char *values = calloc((size_t)(groups * 16 * width), (size_t)size);
  for (int64_t k = 0; k < rows * inputs; k++) left[k] = any();
  for (int64_t n = 0; n < outputs; n++) {
    scales[n] = 0.01f + 0.001f * (float)(n % 7);
    bias[n] = any();
    for (int64_t k = 0; k < inputs; k++) {
      int64_t at = (n / 16 * (width / together) + k / together) * 16 * together + n % 16 * together + k % together;
      float value = any();
      if (kind == BYTES) {
        int8_t byte = (int8_t)(value * 127.4f);
        values[at] = byte;
        totals[n] += byte;
        value = (float)byte * scales[n];
      } else if (kind == BFLOATS) {
        uint16_t two = narrow_plain(value);
        memcpy(values + at * 2, &two, 2);
        value = widen_plain(two);
      } else {
        memcpy(values + at * 4, &value, 4);
      }
      weight[n * inputs + k] = value;
    }
  }
  struct weight w = {kind, inputs, outputs, values, totals, scales, bias};
  struct products_by_owner a = {rows, outputs, left, inputs, &w, owners, output, outputs};
  econmt_products_by_owner(&a, 1);
  double error = compare_owners(&w, left, rows, output), most = 0;
  for (int64_t row = 0; row < rows; row++) {
    float largest = 0;
    for (int64_t k = 0; k < inputs; k++) largest = fmaxf(largest, fabsf(left[row * inputs + k]));
    for (int64_t n = 0; n < outputs; n++) {
      double expected = bias[n];
      for (int64_t k = 0; k < inputs; k++) {
        double value = left[row * inputs + k];
        if (kind == BYTES) value = nearbyint((float)value * (127.0f / largest)) * (largest / 127.0f);
        if (kind == BFLOATS) value = widen_plain(narrow_plain((float)value));
        expected += value * weight[n * inputs + k];
      }
      error = fmax(error, fabs(expected - output[row * outputs + n]));
      most = fmax(most, fabs(expected));
    }
  }
  free(left), free(weight), free(output), free(scales), free(bias), free(owners), free(totals), free(values);
  return error / most;
}

/* Returns the number of wrong sums of 8-bit products: with scales of 1 the results are the sums themselves. */
static int wrong_sums(int64_t rows, int64_t inputs, int64_t outputs) {
  int64_t wide = WIDE(BYTES, inputs), groups = (outputs + 15) / 16;
  float *left = malloc((size_t)(rows * inputs) * 4), *output = malloc((size_t)(rows * outputs) * 4);
  float *scales = malloc((size_t)outputs * 4);
  int32_t *totals = calloc((size_t)groups * 16, 4);
  int8_t *values = calloc((size_t)(groups * 16 * wide), 1);
  int wrong = 0;
  for (int64_t k = 0; k < rows * inputs; k++) left[k] = k % inputs ? nearbyintf(any() * 127.0f) : k % 2 ? 127.0f : -127.0f;
  for (int64_t n = 0; n < outputs; n++) {
    scales[n] = 1.0f;
    for (int64_t k = 0; k < inputs; k++) {
      int8_t *value = values + (n / 16 * wide + k / 4 * 4) * 16 + n % 16 * 4 + k % 4;
      *value = (int8_t)nearbyintf(any() * 127.0f);
      if (k == n) *value = n % 2 ? 127 : -127;
      totals[n] += *value;
    }
  }
  struct product_int8 a = {rows, inputs, outputs, left, inputs, values, totals, scales, NULL, NULL, 0, output, outputs};
  econmt_product_int8(&a, 1);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t n = 0; n < outputs; n++) {
      int64_t sum = 0;
      for (int64_t k = 0; k < inputs; k++)
        sum += (int64_t)left[row * inputs + k] * values[(n / 16 * wide + k / 4 * 4) * 16 + n % 16 * 4 + k % 4];
      wrong += output[row * outputs + n] != (float)sum;
    }
  free(left), free(output), free(scales), free(totals), free(values);
  return wrong;
}

static uint32_t digest = 2166136261u;

static float *some(int64_t count, float scale) {
  float *values = malloc((size_t)count * 4);
  for (int64_t k = 0; k < count; k++) values[k] = any() * scale;
  return values;
}

static void add(const float *values, int64_t count) {
  for (int64_t k = 0; k < count; k++) {
    uint32_t bits;
    memcpy(&bits, values + k, 4);
    digest = (digest ^ bits) * 16777619u;
  }
}

/* Adds the results of layers of every cell, and of attention and best words with their outputs, of so many hidden units. */
static void add_layers(int64_t hidden) {
  int64_t rows = 7, steps = 5, words = 40, lengths[7] = {5, 4, 4, 3, 2, 1, 1}, places[35], outputs = 4 * hidden;
  int64_t wide = WIDE(BYTES, hidden), groups = (outputs + 15) / 16, owners[7] = {0, 0, 1, 3, 4, 4, 6}, skipped[2] = {0, 2};
  int8_t *values = calloc((size_t)(groups * 16 * wide), 1);
  int32_t *totals = calloc((size_t)groups * 16, 4);
  float *scales = some(outputs, 0.02f), *bias = some(outputs, 1), *table = some(words * outputs, 3), *vectors = some(14 * hidden, 2);
  float *last = malloc((size_t)(rows * hidden) * 4), *keys = calloc((size_t)(rows * steps * hidden), 4);
  for (int64_t n = 0; n < outputs; n++)
    for (int64_t k = 0; k < hidden; k++) {
      int8_t byte = (int8_t)(any() * 127.4f);
      values[(n / 16 * wide + k / 4 * 4) * 16 + n % 16 * 4 + k % 4] = byte;
      totals[n] += byte;
    }
  for (int64_t k = 0; k < rows * steps; k++) places[k] = (int64_t)((any() + 1) * 19.9f);
  for (int cell = 0; cell < 5; cell++) {
    struct weight recurrent = {BYTES, hidden, (cell == GRU ? 3 : 4) * hidden, values, totals, scales, bias};
    struct layer_sequence a = {rows, steps, hidden, cell, cell & 1, cell == SSRU ? NULL : &recurrent, vectors, table, places, lengths,
                               keys, hidden, last, hidden};
    econmt_layer_sequence(&a, 1);
    add(keys, rows * steps * hidden);
    add(last, rows * hidden);
  }
  float weights[35], sums[7 * 64], logits[7 * 256], best[28], ends[7];
  int64_t chosen[28];
  for (int kind = 0; kind < 3; kind++) {
    struct attention_forward look = {rows, steps, hidden, 0, last, hidden, keys, kind ? vectors : NULL, NULL, weights, owners,
                                     kind == 2 ? vectors + hidden : NULL, vectors + 2 * hidden, 0, NULL, NULL};
    struct combine_forward combine = {rows, steps, hidden, 0, last, hidden, weights, steps, keys, sums, hidden, owners, 0};
    econmt_attention_forward(&look, 1);
    econmt_combine_forward(&combine, 1);
    add(weights, rows * steps);
    add(sums, rows * hidden);
  }
  struct product_int8 product = {rows, hidden, outputs, sums, hidden, values, totals, scales, bias, NULL, 0, logits, outputs};
  struct best_words choice = {rows, outputs, 4, logits, outputs, NULL, owners, skipped, best, chosen, ends};
  econmt_product_int8(&product, 1);
  econmt_best_words(&choice, 1);
  add(best, 28);
  add(ends, 7);
  free(values), free(totals), free(scales), free(bias), free(table), free(vectors), free(last), free(keys);
}

int main(int count, char **words) {
  printf("%d\n", econmt_start(NULL, NULL, NULL, count > 1 ? atoi(words[1]) : 3));
  const int64_t sizes[][3] = {{1, 1, 1}, {3, 5, 17}, {16, 64, 16}, {65, 66, 33}, {13, 256, 100}};
  for (int kind = 0; kind < 3; kind++) {
    double worst = 0;
    for (int k = 0; k < 5; k++) worst = fmax(worst, compare(kind, sizes[k][0], sizes[k][1], sizes[k][2]));
    printf("%d %g\n", kind, worst);
  }
  int wrong = 0;
  for (int k = 0; k < 5; k++) wrong += wrong_sums(sizes[k][0], sizes[k][1], sizes[k][2]);
  printf("wrong %d\n", wrong);
  for (int64_t hidden = 5; hidden < 60; hidden += 11) add_layers(hidden);
  printf("digest %08x\n", digest);
  return 0;
}
