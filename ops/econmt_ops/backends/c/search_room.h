/* Memory of a search's steps. R rows: the growing hypotheses of some sentences, grouped by sentence. */

#define LOGITS_AT_ONCE 32 /* rows whose logits stay in the L2 cache */
#define MOST_PLACES 64    /* maximum beam size */

/* Sentence and place of each row, its last word and its log-probability: (R) each. */
struct hypotheses {
  int64_t *owners, *places, *tokens;
  double *totals;
};

struct search_room {
  struct hypotheses now, next;
  int64_t *parents, *words;                            /* (R) parents of the next rows; (R, K) best words of each row */
  int64_t *free;                                       /* (B) places that are not finished */
  double *best;                                        /* (B, nbest) scores of finished hypotheses, descending */
  float *h, *c, *output, *coverage;                    /* (layers, R, H) twice, (R, H) and (R, S, W) */
  float *next_h, *next_c, *next_output, *next_coverage;
  float *gates, *recurrent, *joined, *top, *own, *query, *sums, *weights, *covered, *read, *logits, *found, *end, *product;
};

/* Places the arrays for ``sentences`` from ``base`` on, which may be NULL; returns their size in bytes. */
static int64_t make_search_room(const struct beam_search *a, struct search_room *m, int64_t sentences, char *base) {
  int64_t rows = sentences * a->beam, at = 0, words = a->weights[OUTPUT].outputs;
  int64_t wide = 64, joined = a->embedded;
  for (int64_t k = 0; k < LAYERS + 2 * a->layers; k++) {
    int64_t inputs = a->weights[k].inputs, own = WIDE(a->weights[k].kind, inputs);
    wide = own > wide ? own : wide;
    joined = inputs > joined ? inputs : joined;
  }
#define ROOM(field, count)                                                   \
  m->field = base ? (void *)(base + at) : NULL;                              \
  at += ((int64_t)sizeof *m->field * (count) + 63) / 64 * 64
  ROOM(now.owners, rows);
  ROOM(now.places, rows);
  ROOM(now.tokens, rows);
  ROOM(now.totals, rows);
  ROOM(next.owners, rows);
  ROOM(next.places, rows);
  ROOM(next.tokens, rows);
  ROOM(next.totals, rows);
  ROOM(parents, rows);
  ROOM(words, rows * a->beam);
  ROOM(free, sentences);
  ROOM(best, sentences * a->nbest);
  ROOM(h, a->layers * rows * a->size);
  ROOM(c, a->layers * rows * a->size);
  ROOM(output, rows * a->size);
  ROOM(coverage, rows * a->positions * a->width);
  ROOM(next_h, a->layers * rows * a->size);
  ROOM(next_c, a->layers * rows * a->size);
  ROOM(next_output, rows * a->size);
  ROOM(next_coverage, rows * a->positions * a->width);
  ROOM(gates, rows * 4 * a->size);
  ROOM(recurrent, rows * 4 * a->size);
  ROOM(joined, rows * joined);
  ROOM(top, rows * a->size);
  ROOM(own, rows * a->weights[OWN].outputs);
  ROOM(query, rows * a->compared);
  ROOM(sums, rows * a->summed);
  ROOM(weights, rows * a->positions);
  ROOM(covered, rows * a->weights[COVERAGE].outputs);
  ROOM(read, rows * a->weights[READOUT].outputs);
  ROOM(logits, LOGITS_AT_ONCE * words);
  ROOM(found, rows * a->beam);
  ROOM(end, rows);
  int64_t scratch = PRODUCT_SCRATCH(rows, wide);
  if (scratch < words) scratch = words;
  if (scratch < 2 * a->compared) scratch = 2 * a->compared;
  if (scratch < a->summed) scratch = a->summed;
  if (scratch < 6 * a->width) scratch = 6 * a->width;
  ROOM(product, scratch);
#undef ROOM
  return at + 4096; /* also more than the stack buffer for small scratch holds */
}
