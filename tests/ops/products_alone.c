/* Compares the C library's products with sums in double, without Python: products_alone LEVEL, the highest instruction set.
 * Prints the level that is used, the largest error of each kind of weight relative to the largest result, and how many sums of
 * 8-bit products are wrong. */

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
  return 0;
}
