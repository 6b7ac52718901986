/* All steps of a layer, and of a beam search, in one call; included by variant.h. The same computations in Python are
 * econmt.decoding.search.beam and econmt.model.inference.encoder.
 *
 * The values of a row depend on no other row, so a translation does not depend on the rest of its batch; with shortlists this
 * holds up to rounding, because the sum over the words of all lists of the batch adds zeros in between.
 */

/* Product of all rows, with contiguous output rows. */
static INLINE void NAME(apply)(const struct weight *w, const float *left, int64_t rows, const float *start, float *output,
                               float *scratch) {
  NAME(multiply)(w, left, w->inputs, rows, start, w->outputs, output, w->outputs, scratch);
}

static void NAME(gru_forward)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct gru_forward *a = given;
  (void)scratch;
  int64_t size = a->hidden;
  for (int64_t row = begin; row < end; row++) {
    const float *gates = a->gates + row * a->gates_stride, *before = a->before + row * size;
    float *h = a->h + row * size;
    SIMD for (int64_t k = 0; k < size; k++) {
      float r = NAME(sigmoid)(gates[k]), z = NAME(sigmoid)(gates[size + k]);
      float n = NAME(squash)(gates[2 * size + k] + r * gates[3 * size + k]);
      h[k] = n + z * (before[k] - n);
    }
  }
}

static void NAME(ssru_forward)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct ssru_forward *a = given;
  (void)scratch;
  int64_t size = a->hidden;
  for (int64_t row = begin; row < end; row++) {
    const float *u = a->sums + row * a->sums_stride, *f = u + size, *before = a->before + row * size;
    float *after = a->after + row * size, *restrict h = a->h + row * size;
    SIMD for (int64_t k = 0; k < size; k++) {
      float c = u[k] + NAME(sigmoid)(f[k]) * (before[k] - u[k]);
      after[k] = c;
      h[k] = c < 0.0f ? 0.0f : c;
    }
  }
}

/* Rows are sorted by length, longest first, so that active rows are contiguous. scratch: 9 H + 2 floats per row, and that of
 * products. */
static void NAME(layer_sequence)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct layer_sequence *a = given;
  int64_t rows = end - begin, size = a->hidden, *order = (int64_t *)scratch;
  int64_t width = size * (a->cell == LSTM ? 4 : a->cell == GRU ? 3 : 2);
  float *h = scratch + 2 * rows, *c = h + rows * size, *gates = c + rows * size;
  float *recurrent = gates + 4 * rows * size, *product = recurrent + 3 * rows * size;
  for (int64_t row = 0; row < rows; row++) {
    int64_t place = row;
    for (; place > 0 && a->lengths[begin + row] > a->lengths[order[place - 1]]; place--) order[place] = order[place - 1];
    order[place] = begin + row;
  }
  memset(h, 0, (size_t)(2 * rows * size) * sizeof *h);
  for (int64_t step = 0; rows; step++) {
    for (int64_t k = 0; k < rows; k++) {
      int64_t row = order[k], t = a->backwards ? a->lengths[row] - 1 - step : step;
      memcpy(gates + k * width, a->table + a->places[t * a->rows + row] * width, (size_t)width * sizeof *gates);
    }
    if (a->cell == LSTM) {
      if (step) NAME(apply)(a->recurrent, h, rows, gates, gates, product);
      struct lstm_forward next = {rows, size, 0, gates, width, NULL, 0, c, size, h, size, c, size, NULL, 0};
      NAME(lstm_forward)(&next, 0, rows, NULL);
    } else if (a->cell == GRU) {
      NAME(apply)(a->recurrent, h, rows, NULL, recurrent, product);
      struct gru_cell_forward next = {rows, size, 0, gates, recurrent, width, width, NULL, h, size, h, size, h, size};
      NAME(gru_cell_forward)(&next, 0, rows, NULL);
    } else {
      struct ssru_forward next = {rows, size, gates, width, c, c, h};
      NAME(ssru_forward)(&next, 0, rows, NULL);
    }
    for (int64_t k = 0; k < rows; k++) {
      int64_t row = order[k], t = a->backwards ? a->lengths[row] - 1 - step : step;
      memcpy(a->outputs + (t * a->rows + row) * a->outputs_stride, h + k * size, (size_t)size * sizeof *h);
      if (step == a->lengths[row] - 1) memcpy(a->last + row * a->last_stride, h + k * size, (size_t)size * sizeof *h);
    }
    while (rows && a->lengths[order[rows - 1]] <= step + 1) rows--;
  }
}

/* Embeds words into consecutive vectors. */
static void NAME(embed)(const struct beam_search *a, const int64_t *words, int64_t count, float *to) {
  int64_t width = a->embedded;
  for (int64_t row = 0; row < count; row++, to += width) {
    if (a->bytes) {
      const int8_t *from = a->bytes + words[row] * width;
      for (int64_t k = 0; k < width; k++) to[k] = (float)from[k] * a->scales[words[row]];
    } else {
      memcpy(to, a->embedding + words[row] * width, (size_t)width * sizeof *to);
    }
  }
}

/* Computes the words' shares of the bottom layer's gates. Threads may cache the same word at once, with the same values. */
static void NAME(read_words)(const struct beam_search *a, const struct search_room *m, int64_t rows) {
  const struct weight *w = a->weights + WORDS;
  int64_t gates = (a->cell == SSRU ? 2 : 4) * a->size, *words = m->parents, unknown = 0;
  for (int64_t row = 0; row < rows; row++) {
    int64_t word = a->ids ? a->ids[m->now.tokens[row]] : m->now.tokens[row], at = 0;
    if (a->shares) {
      if (__atomic_load_n(a->known + word, __ATOMIC_ACQUIRE)) continue;
      while (at < unknown && words[at] != word) at++;
    } else {
      at = unknown;
    }
    words[at] = word;
    if (at == unknown) unknown++;
  }
  if (unknown) {
    NAME(embed)(a, words, unknown, m->joined);
    NAME(apply)(w, m->joined, unknown, NULL, m->gates, m->product);
  }
  if (!a->shares) return;
  for (int64_t at = 0; at < unknown; at++) {
    memcpy(a->shares + words[at] * gates, m->gates + at * gates, (size_t)gates * sizeof(float));
    __atomic_store_n(a->known + words[at], 1, __ATOMIC_RELEASE);
  }
  for (int64_t row = 0; row < rows; row++) {
    int64_t word = a->ids ? a->ids[m->now.tokens[row]] : m->now.tokens[row];
    memcpy(m->gates + row * gates, a->shares + word * gates, (size_t)gates * sizeof(float));
  }
}

/* Concatenates the rows of two matrices. */
static void NAME(join)(float *to, const float *one, int64_t wide, const float *two, int64_t stride, int64_t other, int64_t rows) {
  for (int64_t row = 0; row < rows; row++) {
    memcpy(to + row * (wide + other), one + row * wide, (size_t)wide * sizeof *to);
    memcpy(to + row * (wide + other) + wide, two + row * stride, (size_t)other * sizeof *to);
  }
}

static void NAME(advance)(const struct beam_search *a, float *gates, float *h, float *c, int64_t rows) {
  if (a->cell == LSTM) {
    struct lstm_forward step = {rows, a->size, 0, gates, 4 * a->size, NULL, 0, c, a->size, h, a->size, c, a->size, NULL, 0};
    NAME(lstm_forward)(&step, 0, rows, NULL);
  } else if (a->cell == GRU) {
    struct gru_forward step = {rows, a->size, gates, 4 * a->size, h, h};
    NAME(gru_forward)(&step, 0, rows, NULL);
  } else {
    struct ssru_forward step = {rows, a->size, gates, 2 * a->size, c, c, h};
    NAME(ssru_forward)(&step, 0, rows, NULL);
  }
}

/* Attends with the rows' queries and adds the weighted values to the rows' share, followed by tanh unless plain. */
static void NAME(look)(const struct beam_search *a, const struct search_room *m, const float *query, int64_t query_stride,
                       const float *share, int64_t share_stride, float *output, int64_t plain, int64_t rows) {
  struct attention_forward attention = {rows,    a->positions, a->compared, 0,          query,    query_stride,
                                        a->keys, a->score,     a->padding,  m->weights, m->now.owners, a->gain, a->shift};
  NAME(attention_forward)(&attention, 0, rows, m->product);
  struct combine_forward combine = {rows,         a->positions, a->summed, 0,         share,     share_stride, m->weights,
                                    a->positions, a->values,    output,    a->summed, m->now.owners, plain};
  NAME(combine_forward)(&combine, 0, rows, m->product);
}

/* One decoder step: updates the rows' h, c and o, given their last words, and writes the attention weights. */
static void NAME(decode)(const struct beam_search *a, const struct search_room *m, int64_t rows) {
  int64_t size = a->size, most = rows * size, asked = a->asked;
  NAME(read_words)(a, m, rows);
  const float *read = m->h;
  if (a->fed) {
    NAME(join)(m->joined, m->output, size, m->h, size, size, rows);
    read = m->joined;
  }
  if (a->cell != SSRU) NAME(apply)(a->weights + LOWEST, read, rows, m->gates, m->gates, m->product);
  NAME(advance)(a, m->gates, m->h, m->c, rows);
  memcpy(m->top, m->h, (size_t)most * sizeof(float));
  if (a->contexts) {
    const float *query = m->top;
    if (a->weights[QUERY].outputs) {
      NAME(apply)(a->weights + QUERY, m->top, rows, NULL, m->query, m->product);
      query = m->query;
    }
    memset(m->sums, 0, (size_t)(rows * a->summed) * sizeof(float));
    NAME(look)(a, m, query, a->compared, m->sums, a->summed, m->sums, 1, rows);
  }
  for (int64_t layer = 1; layer < a->layers; layer++) {
    const struct weight *w = a->weights + UPPER + layer - 1;
    float *h = m->h + layer * most, *c = m->c + layer * most;
    int64_t context = a->contexts ? a->summed - size : 0, wide = w->inputs;
    for (int64_t row = 0; row < rows; row++) {
      float *to = m->joined + row * wide;
      memcpy(to, m->top + row * size, (size_t)size * sizeof *to);
      if (context) memcpy(to + size, m->sums + row * a->summed + size, (size_t)context * sizeof *to);
      if (a->cell != SSRU) memcpy(to + size + context, h + row * size, (size_t)size * sizeof *to);
    }
    NAME(apply)(w, m->joined, rows, NULL, m->gates, m->product);
    NAME(advance)(a, m->gates, h, c, rows);
    if (a->residual) {
      SIMD for (int64_t k = 0; k < most; k++) m->top[k] += h[k];
    } else {
      memcpy(m->top, h, (size_t)most * sizeof(float));
    }
  }
  NAME(apply)(a->weights + OWN, m->top, rows, NULL, m->own, m->product);
  if (!a->contexts) {
    const float *query = asked ? m->own : m->top;
    int64_t stride = asked + size;
    NAME(look)(a, m, query, asked ? stride : size, m->own + asked, stride, m->output, 0, rows);
    return;
  }
  for (int64_t row = 0; row < rows; row++) {
    float *to = m->output + row * size;
    const float *own = m->own + row * size, *sums = m->sums + row * a->summed;
    SIMD for (int64_t k = 0; k < size; k++) to[k] = NAME(squash)(own[k] + sums[k]);
  }
}

/* Returns the rows' inputs of the output layer. */
static const float *NAME(read_out)(const struct beam_search *a, const struct search_room *m, int64_t rows) {
  if (!a->weights[READOUT].outputs) return m->output;
  NAME(apply)(a->weights + READOUT, m->output, rows, NULL, m->read, m->product);
  return m->read;
}

/* Finds the best words of each row; for rows at their length limit only the end. */
static void NAME(choose_words)(const struct beam_search *a, const struct search_room *m, int64_t rows, int64_t width,
                               int64_t position) {
  const struct weight *w = a->weights + OUTPUT;
  const int64_t skipped[2] = {0, 2};
  const float *read = NAME(read_out)(a, m, rows);
  for (int64_t first = 0; first < rows; first += LOGITS_AT_ONCE) {
    int64_t some = rows - first < LOGITS_AT_ONCE ? rows - first : LOGITS_AT_ONCE;
    NAME(apply)(w, read + first * w->inputs, some, NULL, m->logits, m->product);
    struct best_words best = {some,       w->outputs, width,     m->logits, w->outputs, a->barred, m->now.owners + first,
                              skipped,    m->found + first * width, m->words + first * width, m->end + first};
    NAME(best_words)(&best, 0, some, m->product);
  }
  for (int64_t row = 0; row < rows; row++) {
    if (position <= a->limits[m->now.owners[row]]) continue;
    for (int64_t k = 0; k < width; k++) m->found[row * width + k] = -INFINITY;
    m->found[row * width] = m->end[row];
    m->words[row * width] = 3;
  }
}

/* Finds the highest totals of a sentence's rows and their words, in descending order; ties in the order of rows and words. */
static int64_t NAME(choose_places)(const struct search_room *m, int64_t first, int64_t last, int64_t width, int64_t beam,
                                   double *totals, int64_t *whence) {
  int64_t held = 0;
  for (int64_t row = first; row < last; row++) {
    for (int64_t k = row * width; k < (row + 1) * width; k++) {
      double total = m->now.totals[row] + m->found[k];
      if (!(total > -INFINITY) || (held == beam && !(total > totals[held - 1]))) continue; /* skips NaN */
      int64_t place = held < beam ? held++ : held - 1;
      for (; place > 0 && total > totals[place - 1]; place--) {
        totals[place] = totals[place - 1];
        whence[place] = whence[place - 1];
      }
      totals[place] = total;
      whence[place] = k;
    }
  }
  return held;
}

/* Records the finished and the growing hypotheses of one sentence, rows first to last; returns the number of its next rows,
 * which begin at ``at``. */
static int64_t NAME(grow)(const struct beam_search *a, const struct search_room *m, int64_t first, int64_t last, int64_t width,
                          int64_t position, int64_t begin, int64_t at) {
  double totals[MOST_PLACES], reach = -INFINITY;
  int64_t whence[MOST_PLACES], beam = a->beam, sentence = m->now.owners[first], own = sentence - begin, made = 0;
  int64_t held = NAME(choose_places)(m, first, last, width, beam, totals, whence);
  double *best = m->best + own * a->nbest;
  if (held > m->free[own]) held = m->free[own];
  int64_t growing[MOST_PLACES], count = 0;
  for (int64_t k = 0; k < held; k++) {
    if (m->words[whence[k]] != 3) {
      growing[count++] = k;
      continue;
    }
    double *ended = a->ended + (sentence * beam + a->count[sentence]++) * 2, score = totals[k] / a->penalties[position];
    ended[0] = totals[k];
    ended[1] = (double)(position * beam + m->now.places[whence[k] / width]);
    m->free[own]--;
    if (!(score > best[a->nbest - 1])) continue;
    int64_t place = a->nbest - 1;
    for (; place > 0 && score > best[place - 1]; place--) best[place] = best[place - 1];
    best[place] = score;
  }
  for (int64_t k = 0; k < count; k++) {
    double highest = totals[growing[k]] / a->penalties[a->limits[sentence] + 1];
    reach = highest > reach ? highest : reach;
  }
  /* Totals only decrease as a hypothesis grows, and penalties only increase with its length. */
  if (!(best[a->nbest - 1] < reach)) return 0;
  for (; made < count; made++) {
    int64_t k = growing[made], row = whence[k] / width;
    m->parents[at + made] = row;
    m->next.owners[at + made] = sentence;
    m->next.places[at + made] = made;
    m->next.tokens[at + made] = m->words[whence[k]];
    m->next.totals[at + made] = totals[k];
    a->grown[(sentence * a->steps + position - 1) * beam + made] = m->words[whence[k]] * beam + m->now.places[row];
  }
  return made;
}

/* Searches sentences begin to end, with all memory in the scratch. */
static void NAME(beam_search)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct beam_search *a = given;
  int64_t rows = end - begin, size = a->size, vocabulary = a->weights[OUTPUT].outputs;
  int64_t width = a->beam < vocabulary ? a->beam : vocabulary;
  struct search_room m;
  if (!rows) return;
  make_search_room(a, &m, rows, (char *)(((uintptr_t)scratch + 63) / 64 * 64));
  for (int64_t row = 0; row < rows; row++) {
    m.now.owners[row] = begin + row;
    m.now.places[row] = 0;
    m.now.tokens[row] = 2;
    m.now.totals[row] = 0.0;
    m.free[row] = a->beam;
    for (int64_t k = 0; k < a->nbest; k++) m.best[row * a->nbest + k] = -INFINITY;
    a->count[begin + row] = 0;
  }
  for (int64_t layer = 0; layer < a->layers; layer++) {
    const float *first = a->first + (2 * layer * a->sentences + begin) * size;
    memcpy(m.h + layer * rows * size, first, (size_t)(rows * size) * sizeof *first);
    memcpy(m.c + layer * rows * size, first + a->sentences * size, (size_t)(rows * size) * sizeof *first);
  }
  memset(m.output, 0, (size_t)(rows * size) * sizeof(float));
  for (int64_t position = 1; rows; position++) {
    if (a->watch && begin == 0 && position % a->watched == 1 % a->watched && a->watch())
      __atomic_store_n(a->stopped, 1, __ATOMIC_RELAXED);
    if (a->stopped && __atomic_load_n(a->stopped, __ATOMIC_RELAXED)) return;
    NAME(decode)(a, &m, rows);
    if (a->seen) {
      for (int64_t row = 0; row < rows; row++) {
        int64_t place = (m.now.owners[row] * a->steps + position - 1) * a->beam + m.now.places[row];
        memcpy(a->seen + place * a->positions, m.weights + row * a->positions, (size_t)a->positions * sizeof(float));
      }
    }
    NAME(choose_words)(a, &m, rows, width, position);
    int64_t made = 0;
    for (int64_t first = 0, last; first < rows; first = last) {
      for (last = first + 1; last < rows && m.now.owners[last] == m.now.owners[first];) last++;
      made += NAME(grow)(a, &m, first, last, width, position, begin, made);
    }
    struct hypotheses before = m.now;
    m.now = m.next, m.next = before;
    for (int64_t layer = 0; layer < a->layers; layer++) {
      for (int64_t row = 0; row < made; row++) {
        int64_t from = (layer * rows + m.parents[row]) * size, to = (layer * made + row) * size;
        memcpy(m.next_h + to, m.h + from, (size_t)size * sizeof(float));
        memcpy(m.next_c + to, m.c + from, (size_t)size * sizeof(float));
      }
    }
    for (int64_t row = 0; row < made; row++)
      memcpy(m.next_output + row * size, m.output + m.parents[row] * size, (size_t)size * sizeof(float));
    float *h = m.h, *c = m.c, *output = m.output;
    m.h = m.next_h, m.c = m.next_c, m.output = m.next_output;
    m.next_h = h, m.next_c = c, m.next_output = output;
    rows = made;
  }
}

/* Runs rows begin to end of a step, with all memory in the scratch. */
static void NAME(search_step)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct search_step *s = given;
  const struct beam_search *a = s->search;
  const struct weight *w = a->weights + OUTPUT;
  int64_t rows = end - begin, size = a->size, words = w->outputs;
  struct search_room m;
  if (!rows) return;
  make_search_room(a, &m, rows, (char *)(((uintptr_t)scratch + 63) / 64 * 64));
  memcpy(m.now.owners, s->owners + begin, (size_t)rows * sizeof *s->owners);
  memcpy(m.now.tokens, s->tokens + begin, (size_t)rows * sizeof *s->tokens);
  for (int64_t layer = 0; layer < a->layers; layer++) {
    memcpy(m.h + layer * rows * size, s->h + (layer * s->rows + begin) * size, (size_t)(rows * size) * sizeof *s->h);
    memcpy(m.c + layer * rows * size, s->c + (layer * s->rows + begin) * size, (size_t)(rows * size) * sizeof *s->c);
  }
  memcpy(m.output, s->output + begin * size, (size_t)(rows * size) * sizeof *s->output);
  NAME(decode)(a, &m, rows);
  for (int64_t layer = 0; layer < a->layers; layer++) {
    memcpy(s->h + (layer * s->rows + begin) * size, m.h + layer * rows * size, (size_t)(rows * size) * sizeof *s->h);
    memcpy(s->c + (layer * s->rows + begin) * size, m.c + layer * rows * size, (size_t)(rows * size) * sizeof *s->c);
  }
  memcpy(s->output + begin * size, m.output, (size_t)(rows * size) * sizeof *s->output);
  memcpy(s->seen + begin * a->positions, m.weights, (size_t)(rows * a->positions) * sizeof *s->seen);
  const float *read = NAME(read_out)(a, &m, rows);
  for (int64_t row = 0; row < rows; row++) {
    float *logits = s->log_probs + (begin + row) * words;
    if (row % LOGITS_AT_ONCE == 0) {
      int64_t some = rows - row < LOGITS_AT_ONCE ? rows - row : LOGITS_AT_ONCE;
      NAME(apply)(w, read + row * w->inputs, some, NULL, logits, m.product);
    }
    if (a->barred) {
      const float *restrict barred = a->barred + m.now.owners[row] * words;
      SIMD for (int64_t k = 0; k < words; k++) logits[k] += barred[k];
    }
    float total = NAME(log_sum)(logits, words);
    SIMD for (int64_t k = 0; k < words; k++) logits[k] -= total;
  }
}
