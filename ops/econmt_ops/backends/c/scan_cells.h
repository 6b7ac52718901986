/* Layers of a linear recurrence without their products; included by variant.h. Nonlinearities, recurrence and output in one
 * pass per direction. A task is at most CHUNK columns of a row, so that all data of a step stay in the L1 cache. The equations
 * are those of econmt_ops.cells.scan.
 */

/* Replaces the sums f and i of two gates by the powers e^-f and e^-i, from which f / (f + i) of the gates is
 * (1 + e^-i) / (2 + e^-f + e^-i). If a sum is below -60, both powers are scaled so that the larger is e^60: the terms 1 and 2,
 * which would be scaled too, are then negligible, and no power is infinite. A sum of -inf closes its gate. */
static INLINE void NAME(powers)(float *f, float *i, int64_t count) {
  SIMD for (int64_t k = 0; k < count; k++) {
    float least = f[k] < i[k] ? f[k] : i[k];
    least = least < 0.0f ? least : 0.0f;
    least = least < -1e30f ? -1e30f : least;
    float most = -least < 60.0f ? -least : 60.0f;
    f[k] = NAME(exponential)(most + (least - f[k]));
    i[k] = NAME(exponential)(most + (least - i[k]));
  }
}

/* Loads the parts of a step and applies their nonlinearities: u, the gates, and further parts unchanged. The gates of a shared
 * recurrence become powers. */
static INLINE void NAME(activate)(float parts[MOST_PARTS][CHUNK], const void *products, int64_t place, int64_t hidden,
                                  int64_t count, const struct scan_cell *cell) {
  int64_t powers = cell->recurrence == SHARED ? 2 : 0;
  for (int64_t part = 0; part < cell->parts; part++) {
    float *values = parts[part];
    NAME(load)(values, products, place + part * hidden, count, cell->narrow);
    if (part == 0 && cell->squashes) {
      SIMD for (int64_t k = 0; k < count; k++) values[k] = NAME(squash)(values[k]);
    } else if (part > powers && part <= cell->gates) {
      SIMD for (int64_t k = 0; k < count; k++) values[k] = NAME(sigmoid)(values[k]);
    }
  }
  if (powers) NAME(powers)(parts[1], parts[2], count);
}

/* Returns the input of a highway: a part of the products, or the layer's input, loaded into room. */
static INLINE const float *NAME(through)(float parts[MOST_PARTS][CHUNK], float *room, const void *read, int64_t at,
                                         int64_t count, const struct scan_cell *cell) {
  if (cell->output != HIGHWAY || cell->parts > cell->gates + 1) return parts[cell->parts - 1];
  NAME(load)(room, read, at, count, cell->narrow);
  return room;
}

static void NAME(scan_cell_forward)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct scan_cell_forward *a = given;
  const struct scan_cell *cell = &a->cell;
  int64_t tasks = (a->hidden + a->width - 1) / a->width;
  (void)scratch;
  float parts[MOST_PARTS][CHUNK], room[CHUNK], c[CHUNK], h[CHUNK];
  float *u = parts[0], *f = parts[1], *i = parts[2], *o = parts[cell->gates];
  for (int64_t task = begin; task < end; task++) {
    int64_t row = task / tasks, at = task % tasks * a->width;
    int64_t count = a->hidden - at < a->width ? a->hidden - at : a->width;
    int64_t length = a->lengths ? a->lengths[row] : a->positions;
    size_t bytes = (size_t)count * sizeof *c;
    memcpy(c, a->initial + row * a->hidden + at, bytes);
    for (int64_t t = 0; t < length; t++) {
      NAME(activate)(parts, a->products, (row * a->positions + t) * cell->parts * a->hidden + at, a->hidden, count, cell);
      int64_t place = row * a->read_batch + t * a->read_step + at;
      const float *x = NAME(through)(parts, room, a->read, place, count, cell);
      if (cell->recurrence == GATED) {
        SIMD for (int64_t k = 0; k < count; k++) c[k] = f[k] * c[k] + i[k] * u[k];
      } else if (cell->recurrence == SHARED) {
        SIMD for (int64_t k = 0; k < count; k++) c[k] = u[k] + (1.0f + i[k]) / (2.0f + f[k] + i[k]) * (c[k] - u[k]);
      } else {
        SIMD for (int64_t k = 0; k < count; k++) c[k] = u[k] + f[k] * (c[k] - u[k]);
      }
      if (a->cells) memcpy(a->cells + row * a->cells_batch + t * a->cells_step + at, c, bytes);
      if (cell->output == RELU) {
        SIMD for (int64_t k = 0; k < count; k++) h[k] = c[k] > 0.0f ? c[k] : 0.0f * c[k]; /* keeps NaN */
      } else if (cell->output == GATE) {
        SIMD for (int64_t k = 0; k < count; k++) h[k] = o[k] * c[k];
      } else if (cell->output == HIGHWAY) {
        SIMD for (int64_t k = 0; k < count; k++) h[k] = x[k] + o[k] * (NAME(squash)(c[k]) - x[k]);
      } else {
        memcpy(h, c, bytes);
      }
      NAME(store)(a->outputs, row * a->outputs_batch + t * a->outputs_step + at, h, count, cell->narrow);
    }
    for (int64_t t = length; t < a->positions; t++)
      NAME(zero)(a->outputs, row * a->outputs_batch + t * a->outputs_step + at, count, cell->narrow);
    memcpy(a->last + row * a->hidden + at, c, bytes);
  }
}

static void NAME(scan_cell_backward)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct scan_cell_backward *a = given;
  const struct scan_cell *cell = &a->cell;
  int64_t tasks = (a->hidden + a->width - 1) / a->width;
  int has_gate = cell->output == GATE || cell->output == HIGHWAY, is_part = cell->parts > cell->gates + 1;
  (void)scratch;
  float parts[MOST_PARTS][CHUNK], room[CHUNK], carried[CHUNK], dh[CHUNK], dx[CHUNK], dgate[CHUNK];
  float *u = parts[0], *f = parts[1], *i = parts[2], *o = parts[cell->gates];
  for (int64_t task = begin; task < end; task++) {
    int64_t row = task / tasks, at = task % tasks * a->width;
    int64_t count = a->hidden - at < a->width ? a->hidden - at : a->width;
    int64_t length = a->lengths ? a->lengths[row] : a->positions, wide = cell->parts * a->hidden;
    size_t bytes = (size_t)count * sizeof *carried;
    const float *first = a->initial + row * a->initial_stride + at;
    float *dfirst = a->dfirst + row * a->hidden + at;
    memcpy(carried, dfirst, bytes);
    for (int64_t t = length - 1; t >= 0; t--) {
      int64_t place = (row * a->positions + t) * wide + at;
      NAME(activate)(parts, a->products, place, a->hidden, count, cell);
      const float *x = NAME(through)(parts, room, a->read, row * a->read_batch + t * a->read_step + at, count, cell);
      const float *c = a->cells + row * a->cells_batch + t * a->cells_step + at;
      const float *before = t ? c - a->cells_step : first;
      if (a->doutputs)
        NAME(load)(dh, a->doutputs, row * a->doutputs_batch + t * a->doutputs_step + at, count, cell->narrow);
      else
        memset(dh, 0, bytes);
      if (cell->output == RELU) {
        SIMD for (int64_t k = 0; k < count; k++) dh[k] = c[k] > 0.0f ? dh[k] : 0.0f;
      } else if (cell->output == GATE) {
        SIMD for (int64_t k = 0; k < count; k++) {
          dgate[k] = dh[k] * c[k] * o[k] * (1.0f - o[k]);
          dh[k] *= o[k];
        }
      } else if (cell->output == HIGHWAY) {
        SIMD for (int64_t k = 0; k < count; k++) {
          float squashed = NAME(squash)(c[k]), passed = dh[k] * o[k];
          dx[k] = dh[k] - passed;
          dgate[k] = passed * (squashed - x[k]) * (1.0f - o[k]);
          dh[k] = passed * (1.0f - squashed * squashed);
        }
      }
      if (cell->recurrence == GATED) {
        SIMD for (int64_t k = 0; k < count; k++) {
          float delta = dh[k] + carried[k], decay = f[k], share = i[k];
          carried[k] = decay * delta;
          f[k] = delta * before[k] * decay * (1.0f - decay);
          i[k] = delta * u[k] * share * (1.0f - share);
          u[k] = delta * share * (cell->squashes ? 1.0f - u[k] * u[k] : 1.0f);
        }
      } else if (cell->recurrence == SHARED) {
        SIMD for (int64_t k = 0; k < count; k++) {
          float inverse = 1.0f / (2.0f + f[k] + i[k]), keep = (1.0f + i[k]) * inverse, take = (1.0f + f[k]) * inverse;
          float delta = dh[k] + carried[k], slope = delta * (before[k] - u[k]) * inverse;
          carried[k] = keep * delta;
          f[k] *= slope * keep;
          i[k] *= -slope * take;
          u[k] = delta * take * (cell->squashes ? 1.0f - u[k] * u[k] : 1.0f);
        }
      } else {
        SIMD for (int64_t k = 0; k < count; k++) {
          float delta = dh[k] + carried[k], decay = f[k];
          carried[k] = decay * delta;
          f[k] = delta * (before[k] - u[k]) * decay * (1.0f - decay);
          u[k] = delta * (1.0f - decay) * (cell->squashes ? 1.0f - u[k] * u[k] : 1.0f);
        }
      }
      for (int64_t part = 0; part < cell->parts; part++) {
        const float *made = is_part && part == cell->parts - 1 ? dx : has_gate && part == cell->gates ? dgate : parts[part];
        NAME(store)(a->dproducts, place + part * a->hidden, made, count, cell->narrow);
      }
      if (a->dread) NAME(store)(a->dread, (row * a->positions + t) * a->hidden + at, dx, count, cell->narrow);
    }
    for (int64_t t = length; t < a->positions; t++) {
      for (int64_t part = 0; part < cell->parts; part++)
        NAME(zero)(a->dproducts, (row * a->positions + t) * wide + part * a->hidden + at, count, cell->narrow);
      if (a->dread) NAME(zero)(a->dread, (row * a->positions + t) * a->hidden + at, count, cell->narrow);
    }
    memcpy(dfirst, carried, bytes);
  }
}
