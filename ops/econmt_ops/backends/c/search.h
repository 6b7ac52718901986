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

/* Runs a step of a layer. gates: (R, G H), of GRU and LNLSTM without the product of h, which is in recurrent (R, G H). Both may
 * be overwritten. */
static void NAME(advance)(int64_t cell, int64_t size, const float *vectors, float *gates, float *recurrent, float *h, float *c,
                          int64_t rows) {
  if (cell == SSRU) {
    for (int64_t row = 0; row < rows; row++, gates += 2 * size, c += size, h += size)
      SIMD for (int64_t k = 0; k < size; k++) {
        c[k] = gates[k] + NAME(sigmoid)(gates[size + k]) * (c[k] - gates[k]);
        h[k] = c[k] < 0.0f ? 0.0f : c[k];
      }
    return;
  }
  if (cell == GRU) {
    struct gru_cell_forward step = {rows, size, 0, gates, recurrent, 3 * size, 3 * size, NULL, h, size, h, size, h, size};
    NAME(gru_cell_forward)(&step, 0, rows, NULL);
    return;
  }
  int64_t wide = 4 * size;
  for (int64_t row = 0; row < rows && cell != LSTM; row++) {
    float *sums = gates + row * wide;
    for (int64_t gate = 0; cell == LNGLSTM && gate < 4; gate++)
      NAME(normalize)(sums + gate * size, size, vectors + gate * size, vectors + wide + gate * size);
    if (cell == LNGLSTM) continue;
    NAME(normalize)(sums, wide, vectors + wide, vectors);
    NAME(normalize)(recurrent + row * wide, wide, vectors + 2 * wide, sums);
  }
  if (cell == LNLSTM) gates = recurrent;
  float *kept = cell == LSTM ? NULL : gates;
  struct lstm_forward step = {rows, size, 0, gates, wide, NULL, 0, c, size, h, size, c, size, kept, wide};
  NAME(lstm_forward)(&step, 0, rows, NULL);
  const float *gain = vectors + (cell == LNLSTM ? 3 : 2) * wide;
  for (int64_t row = 0; row < rows && kept; row++, h += size) {
    const float *o = kept + row * wide + 3 * size;
    memcpy(h, c + row * size, (size_t)size * sizeof *h);
    NAME(normalize)(h, size, gain, gain + size);
    SIMD for (int64_t k = 0; k < size; k++) h[k] = o[k] * NAME(squash)(h[k]);
  }
}

/* Rows are sorted by length, longest first, so that active rows are contiguous. scratch: 10 H + 2 floats per row, and that of
 * products. */
static void NAME(layer_sequence)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct layer_sequence *a = given;
  int64_t rows = end - begin, size = a->hidden, *order = (int64_t *)scratch;
  int64_t width = size * (a->cell == GRU ? 3 : a->cell == SSRU ? 2 : 4);
  int adds = a->cell == LSTM || a->cell == LNGLSTM;
  float *h = scratch + 2 * rows, *c = h + rows * size, *gates = c + rows * size;
  float *recurrent = gates + 4 * rows * size, *product = recurrent + 4 * rows * size;
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
    if (a->recurrent && (step || !adds)) /* h is zero in the first step */
      NAME(apply)(a->recurrent, h, rows, adds ? gates : NULL, adds ? gates : recurrent, product);
    NAME(advance)(a->cell, size, a->vectors, gates, recurrent, h, c, rows);
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
  int64_t gates = w->outputs, *words = m->parents, unknown = 0;
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

/* First part of a step: updates the h and c of a layer and the top. The words' share of the bottom layer is in the gates. */
static void NAME(run_layer)(const struct beam_search *a, const struct search_room *m, int64_t layer, int64_t rows) {
  const struct weight *read = a->weights + LAYERS + 2 * layer, *recur = read + 1;
  int64_t size = a->size, most = rows * size, wide = read->inputs;
  float *h = m->h + layer * most, *c = m->c + layer * most;
  const float *below = layer ? m->top : a->fed ? m->output : NULL;
  int64_t context = layer && a->contexts ? a->summed - size : 0, other = (below ? size : 0) + context;
  for (int64_t row = 0; row < rows && wide; row++) {
    float *to = m->joined + row * wide;
    if (below) memcpy(to, below + row * size, (size_t)size * sizeof *to);
    if (context) memcpy(to + size, m->sums + row * a->summed + size, (size_t)context * sizeof *to);
    if (wide > other) memcpy(to + other, h + row * size, (size_t)size * sizeof *to);
  }
  if (wide) NAME(apply)(read, m->joined, rows, layer ? NULL : m->gates, m->gates, m->product);
  if (recur->outputs) NAME(apply)(recur, h, rows, NULL, m->recurrent, m->product);
  const float *vectors = a->vectors ? a->vectors + layer * (a->cell == LNLSTM ? 14 : 10) * size : NULL;
  NAME(advance)(a->cell, size, vectors, m->gates, m->recurrent, h, c, rows);
  if (layer && a->residual) {
    SIMD for (int64_t k = 0; k < most; k++) m->top[k] += h[k];
  } else {
    memcpy(m->top, h, (size_t)most * sizeof(float));
  }
}

/* log(1 + e^x) */
static INLINE float NAME(softrelu)(float x) {
  double e = NAME(exponential)(x > 0.0f ? -x : x);
  return (x > 0.0f ? x : 0.0f) + (float)NAME(twice_atanh)(e / (2 + e));
}

/* Updates the coverage of all positions, given their attention. */
static void NAME(cover)(const struct beam_search *a, const struct search_room *m, int64_t rows) {
  const struct weight *w = a->weights + COVERAGE;
  int64_t width = a->width, parts = w->outputs, shared = a->coverage == COVER_FERTILITY ? 1 : parts;
  float *u = m->product, *v = u + parts;
  if (parts) NAME(apply)(w, m->top, rows, NULL, m->covered, m->product);
  for (int64_t at = 0; at < rows * a->positions; at++) {
    int64_t row = at / a->positions, place = m->now.owners[row] * a->positions + at % a->positions;
    float seen = m->weights[at], *to = m->coverage + at * width;
    const float *shares = a->coverage_shares + place * shared;
    if (a->padding[place]) continue;
    if (a->coverage == COVER_FERTILITY) seen /= 2.0f * NAME(sigmoid)(*shares);
    if (!parts) {
      for (int64_t k = 0; k < width; k++) to[k] += seen;
      continue;
    }
    for (int64_t k = 0; k < parts; k++) {
      u[k] = shares[k] + a->coverage_attention[k] * seen + m->covered[row * parts + k];
      v[k] = 0.0f;
      for (int64_t n = 0; n < width; n++) v[k] += to[n] * a->coverage_recurrent[k * width + n];
    }
    if (a->coverage == COVER_GRU) {
      struct gru_cell_forward step = {1, width, 0, u, v, parts, parts, NULL, to, width, to, width, to, width};
      NAME(gru_cell_forward)(&step, 0, 1, NULL);
      continue;
    }
    for (int64_t k = 0; k < width; k++) {
      float x = u[k] + v[k];
      to[k] = a->coverage == COVER_TANH      ? NAME(squash)(x)
              : a->coverage == COVER_SIGMOID ? NAME(sigmoid)(x)
              : a->coverage == COVER_RELU    ? (x > 0.0f ? x : 0.0f)
                                             : NAME(softrelu)(x);
    }
  }
}

/* Second part: attends with the rows' queries, sums the weighted values, and updates the coverage. */
static void NAME(look)(const struct beam_search *a, const struct search_room *m, const float *query, int64_t stride, int64_t rows) {
  struct attention_forward attention = {rows,     a->positions, a->compared, 0, query,   stride,     a->keys,     a->score, a->padding,
                                        m->weights, m->now.owners, a->gain,  a->shift, a->width, a->coverage ? m->coverage : NULL,
                                        a->coverage_key};
  NAME(attention_forward)(&attention, 0, rows, m->product);
  struct combine_forward combine = {rows,         a->positions, a->summed, 0,         NULL,           0, m->weights,
                                    a->positions, a->values,    m->sums,   a->summed, m->now.owners, 1};
  NAME(combine_forward)(&combine, 0, rows, m->product);
  if (a->coverage) NAME(cover)(a, m, rows);
}

/* Third part: computes o from the state's shares and the sums of the values. */
static void NAME(combine)(const struct beam_search *a, const struct search_room *m, int64_t rows) {
  int64_t size = a->size;
  for (int64_t row = 0; row < rows; row++) {
    const float *share = m->own + row * a->weights[OWN].outputs + a->asked, *sums = m->sums + row * a->summed;
    float *to = m->output + row * size;
    if (a->context_bias) {
      SIMD for (int64_t k = 0; k < size; k++) {
        float context = sums[size + k] + a->context_bias[k];
        to[k] = context + NAME(sigmoid)(share[k] + sums[k]) * (share[size + k] - context);
      }
    } else {
      SIMD for (int64_t k = 0; k < size; k++) to[k] = share[k] + sums[k];
    }
    if (a->output_gain) NAME(normalize)(to, size, a->output_gain, a->output_shift);
    SIMD for (int64_t k = 0; k < size; k++) to[k] = NAME(squash)(to[k]);
  }
}

/* One decoder step: updates the rows' h, c, o and coverage, given their last words, and writes the attention weights. */
static void NAME(decode)(const struct beam_search *a, const struct search_room *m, int64_t rows) {
  int64_t size = a->size;
  NAME(read_words)(a, m, rows);
  for (int64_t layer = 0; layer < a->layers; layer++) {
    NAME(run_layer)(a, m, layer, rows);
    if (layer || !a->contexts) continue;
    const float *query = m->top;
    if (a->weights[QUERY].outputs) {
      NAME(apply)(a->weights + QUERY, m->top, rows, NULL, m->query, m->product);
      query = m->query;
    }
    NAME(look)(a, m, query, a->compared, rows);
  }
  NAME(apply)(a->weights + OWN, m->top, rows, NULL, m->own, m->product);
  if (!a->contexts) NAME(look)(a, m, a->asked ? m->own : m->top, a->asked ? a->weights[OWN].outputs : size, rows);
  NAME(combine)(a, m, rows);
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

/* Copies the rows with the given numbers. */
static void NAME(move)(float *to, const float *from, const int64_t *places, int64_t rows, int64_t size) {
  for (int64_t row = 0; row < rows; row++) memcpy(to + row * size, from + places[row] * size, (size_t)size * sizeof *to);
}

/* Searches sentences begin to end, with all memory in the scratch. */
static void NAME(beam_search)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct beam_search *a = given;
  int64_t rows = end - begin, size = a->size, vocabulary = a->weights[OUTPUT].outputs;
  int64_t width = a->beam < vocabulary ? a->beam : vocabulary, covered = a->positions * a->width;
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
  memset(m.coverage, 0, (size_t)(rows * covered) * sizeof(float));
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
      NAME(move)(m.next_h + layer * made * size, m.h + layer * rows * size, m.parents, made, size);
      NAME(move)(m.next_c + layer * made * size, m.c + layer * rows * size, m.parents, made, size);
    }
    NAME(move)(m.next_output, m.output, m.parents, made, size);
    NAME(move)(m.next_coverage, m.coverage, m.parents, made, covered);
    float *h = m.h, *c = m.c, *output = m.output, *coverage = m.coverage;
    m.h = m.next_h, m.c = m.next_c, m.output = m.next_output, m.coverage = m.next_coverage;
    m.next_h = h, m.next_c = c, m.next_output = output, m.next_coverage = coverage;
    rows = made;
  }
}

/* Runs rows begin to end of a step, with all memory in the scratch. */
static void NAME(search_step)(const void *given, int64_t begin, int64_t end, float *scratch) {
  const struct search_step *s = given;
  const struct beam_search *a = s->search;
  const struct weight *w = a->weights + OUTPUT;
  int64_t rows = end - begin, size = a->size, words = w->outputs, covered = a->positions * a->width;
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
  if (covered) memcpy(m.coverage, s->coverage + begin * covered, (size_t)(rows * covered) * sizeof *s->coverage);
  NAME(decode)(a, &m, rows);
  for (int64_t layer = 0; layer < a->layers; layer++) {
    memcpy(s->h + (layer * s->rows + begin) * size, m.h + layer * rows * size, (size_t)(rows * size) * sizeof *s->h);
    memcpy(s->c + (layer * s->rows + begin) * size, m.c + layer * rows * size, (size_t)(rows * size) * sizeof *s->c);
  }
  memcpy(s->output + begin * size, m.output, (size_t)(rows * size) * sizeof *s->output);
  if (covered) memcpy(s->coverage + begin * covered, m.coverage, (size_t)(rows * covered) * sizeof *s->coverage);
  memcpy(s->seen + begin * a->positions, m.weights, (size_t)(rows * a->positions) * sizeof *s->seen);
  if (!s->log_probs) return;
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
