/* What the kernels are given. All sizes and strides are counted in elements; matrices have contiguous rows.
 *
 * A pointer named "any" points to float, or to bfloat16 where the struct's narrow is 1. B rows of a batch, H hidden,
 * S source positions, A attention size, C rows of a chunk, V vocabulary. The mathematics stands beside the same
 * functions of tensors, in steps.py and scores.py.
 */

#ifndef ECONMT_KERNELS_H
#define ECONMT_KERNELS_H

#include <stdint.h>

/* One step of an LSTM. */
struct lstm_forward {
  int64_t rows, hidden, narrow;
  void *gates; /* any (B, 4H), the gates before their nonlinearities, in the order i, f, g, o */
  int64_t gates_stride;
  const void *recurrent; /* any (B, 4H), added to the gates, whose place the sum takes; or NULL */
  int64_t recurrent_stride;
  const float *before; /* (B, H) the cell state before the step */
  int64_t before_stride;
  void *h; /* any (B, H), is written */
  int64_t h_stride;
  float *after; /* (B, H), is written; may be before */
  int64_t after_stride;
  float *kept; /* (B, 4H), gets the gates after their nonlinearities; may be gates; or NULL */
  int64_t kept_stride;
};

/* Backward of one step of an LSTM. */
struct lstm_backward {
  int64_t rows, hidden, narrow;
  int64_t sums;      /* 1: the gates are any, before their nonlinearities; 0: float, after them */
  const void *gates; /* (B, 4H) */
  int64_t gates_stride;
  const float *before, *after; /* (B, H) the cell state before and after the step */
  int64_t before_stride, after_stride;
  const void *incoming, *dh; /* any (B, H), two gradients of h */
  int64_t incoming_stride, dh_stride;
  const float *dc; /* (B, H) */
  int64_t dc_stride;
  void *dgates; /* any (B, 4H), is written; may be gates */
  int64_t dgates_stride;
  float *dbefore; /* (B, H), is written */
  int64_t dbefore_stride;
};

/* The weights of additive attention, and what they make of projected values. */
struct attention_forward {
  int64_t rows, positions, size, narrow;
  const void *query; /* any (B, A) */
  int64_t query_stride;
  const void *keys;       /* any (B, S, A) */
  const float *score;     /* (A); or NULL: scores are the products of query and key */
  const uint8_t *padding; /* (B, S), 1 at padded positions; or NULL */
  float *weights;         /* (B, S), is written; zero at padded positions */
  const int64_t *owners;  /* (B) which of the keys and paddings a row has, where rows share them; or NULL */
};

/* tanh(share + sum_s weight_s projected_s). */
struct combine_forward {
  int64_t rows, positions, size, narrow;
  const void *share; /* any (B, H) */
  int64_t share_stride;
  const void *attention; /* any (B, S) */
  int64_t attention_stride;
  const void *projected; /* any (B, S, H) */
  void *output;          /* any (B, H), is written */
  int64_t output_stride;
  const int64_t *owners; /* (B) which of the projected values a row has; or NULL */
  int64_t plain;         /* 1: without tanh */
};

/* Backward of the weights of additive attention. */
struct attention_backward {
  int64_t rows, positions, size, narrow;
  const void *query; /* any (B, A) */
  int64_t query_stride;
  const void *keys; /* any (B, S, A) */
  const float *score;
  const uint8_t *padding;
  const float *weights;  /* (B, S) */
  const float *dweights; /* (B, S) */
  float *dkeys;          /* (B, S, A) accumulates de_s (s - s^2) */
  float *dscore;         /* (A) accumulates 2 sum de_s s */
  void *dquery;          /* any (B, A), is written */
  int64_t dquery_stride;
};

/* The gradient of the attention weights: values_s . dcontext. */
struct weight_gradient {
  int64_t rows, positions, size, narrow;
  const void *values; /* any (B, S, E), its batches and positions by strides */
  int64_t batch_stride, position_stride;
  const void *dcontext; /* any (B, E) */
  int64_t dcontext_stride;
  const void *incoming; /* any (B, S), another gradient of the weights, added; or NULL */
  int64_t incoming_stride;
  const uint8_t *padding;
  float *dweights; /* (B, S), is written; zero at padded positions */
};

/* left weight^T + bias + start with a weight of 8 bits; the rows of left are rounded to 8 bits as well, each by its largest
 * value. N outputs in groups of 16, K inputs in groups of 4; outputs are filled up to a
 * multiple of 16, inputs to one of 64, with zeros. */
struct product_int8 {
  int64_t rows, inputs, outputs;
  const float *left; /* (B, K) */
  int64_t left_stride;
  const int8_t *weight; /* (N / 16, K / 4, 16, 4) */
  const int32_t *sums;  /* (N / 16, 16) of each output's weights */
  const float *scales;  /* (N) of each output's weights */
  const float *bias;    /* (N); or NULL */
  const float *start;   /* (B, N); or NULL; may be output */
  int64_t start_stride;
  float *output; /* (B, N), is written */
  int64_t output_stride;
};

/* The most probable words of each row, highest first, and their log-probabilities; equal ones by their numbers. */
struct best_words {
  int64_t rows, vocabulary;
  int64_t count; /* of words of a row, at most 64 and at most V */
  const float *logits; /* (B, V) */
  int64_t logits_stride;
  const float *barred;   /* (., V), added to the logits of the rows that own it; or NULL */
  const int64_t *owners; /* (B) */
  const int64_t *skipped; /* two words that are never taken */
  float *values;  /* (B, count), is written */
  int64_t *words; /* (B, count), is written */
  float *end;     /* (B) the log-probability of word 3, is written */
};

/* A weight (N, K) as products of few rows read it: outputs in groups of 16, inputs in groups of as many as fill 4 bytes; both are
 * filled up with zeros, inputs to a multiple of 64 bytes where they are not floats. */
struct weight {
  int64_t kind; /* of those below */
  int64_t inputs, outputs;
  const void *values;   /* (N / 16, K / n, 16, n), n being 1, 2 or 4 */
  const int32_t *sums;  /* of bytes those of each output, filled up; or NULL */
  const float *scales;  /* (N) of bytes; or NULL */
  const float *bias;    /* (N); or NULL */
};

enum { FLOATS, BFLOATS, BYTES };

/* All steps of an LSTM layer in one direction, over B rows of T steps at most. */
struct lstm_sequence {
  int64_t rows, positions, hidden, backwards; /* 1: from a row's last position to its first */
  const struct weight *recurrent; /* (4H, H), without bias */
  const float *table;             /* (M, 4H) what inputs add to the gates */
  const int64_t *places;          /* (T, B) which of them a position has */
  const int64_t *lengths;         /* (B), at least 1 */
  float *outputs;                 /* (T, B, H), is written at a row's own positions */
  int64_t outputs_stride;         /* from a row to the next; positions are B rows */
  float *last;                    /* (B, H), gets h after the last step */
  int64_t last_stride;
};

/* Beam search of B sentences by a decoder of LSTM layers: every step of it, until no hypothesis can become better than what has
 * ended. K places of a sentence, T steps at most, N words of the output layer, of V in the vocabulary; a word is a number below N.
 */
struct beam_search {
  int64_t sentences, positions, beam, steps, nbest;
  int64_t layers, size, compared, summed; /* H and A; values that the attention sums of a position: H, or H + E */
  int64_t fed, residual;      /* 1: the lowest layer reads o; a layer above adds what it reads */
  int64_t contexts;           /* 1: layers above read what the attention sums for the lowest */
  int64_t asked;              /* queries that come before the state's share of o in one product; 0: they do not */
  int64_t embedded, watched;  /* the width of a word's vector; steps between two calls of watch */
  const struct weight *weights; /* in the order below */
  const float *embedding;       /* (V, I); or NULL */
  const int8_t *bytes;          /* (V, I) in its place */
  const float *scales;          /* (V) of those */
  float *shares;                /* (V, 4H), gets what a word adds to the lowest layer's gates when it comes first; or NULL */
  uint8_t *known;               /* (V), which of them are there */
  const int64_t *ids;           /* (N) the words' numbers in the vocabulary; or NULL: they are theirs */
  const float *barred;          /* (B, N), added to logits; or NULL */
  const float *keys;            /* (B, S, A) */
  const float *score;           /* (A); or NULL: scores are products */
  const float *values;          /* (B, S, summed): their share of o, and after it the context where it is read */
  const uint8_t *padding;       /* (B, S) */
  const float *first;           /* (layers, 2, B, H) h and c before the first step */
  const int64_t *limits;        /* (B) most words before the end */
  const double *penalties;      /* (T + 1) what a translation's log-probability is divided by, by its length with the end */
  int64_t (*watch)(void);       /* 0: go on; or NULL */
  int64_t *stopped;             /* gets 1 if watch said so */
  double *ended;  /* (B, K, 2) what has ended, in that order: log-probability, and its length times K plus the place extended */
  int64_t *count; /* (B) how many */
  int64_t *grown; /* (B, T, K) each step's word of a place times K, plus the place that it extends */
  float *seen;    /* (B, T, K, S) the attention of each step's rows; or NULL */
};

/* One step of a search that chooses its hypotheses elsewhere: the arithmetic is that of beam_search, to the last bit. */
struct search_step {
  int64_t rows;
  const struct beam_search *search; /* its sizes, of one place a sentence, its weights, and what it knows of the sentences */
  const int64_t *owners, *tokens;   /* (R) the sentence of each row, and its newest word */
  float *h, *c, *output;            /* (layers, R, H), (layers, R, H) and (R, H), are read and written */
  float *seen;                      /* (R, S), the attention, is written */
  float *log_probs;                 /* (R, N) of the next word, is written */
};

enum { WORDS, LOWEST, OWN, QUERY, READOUT, OUTPUT, UPPER }; /* after which one comes for each layer above the lowest */

/* Cross entropies of logits with smoothed labels. */
struct losses {
  int64_t rows, vocabulary, narrow;
  void *logits; /* any (C, V); their gradient takes their place, if it is wanted */
  int64_t logits_stride;
  const int64_t *targets; /* (C) */
  float smoothing;
  int64_t gradient;     /* 1: wanted */
  const float *factors; /* (C) of each row's gradient; or NULL */
  float *losses;        /* (C), is written */
  float *dbias;         /* (V), the gradients' sum is added; or NULL */
};

/* Adds rows to one row, or to the rows of a table. */
struct add_rows {
  int64_t rows, size, narrow;
  const void *values; /* any (R, N) */
  int64_t values_stride;
  const int64_t *places; /* (R), the row of total that each is added to; NULL: all to the first */
  float *total;          /* (M, N) */
  int64_t total_stride;
};

/* h = decay h + inputs, step by step; all steps of a row one after the other. A task is some columns of a row. */
struct recurrence_forward {
  int64_t rows, positions, hidden, narrow;
  int64_t width, backwards;  /* columns of a task; 1: from a row's last position to its first */
  const void *decay;         /* any (B, T, H) */
  int64_t decay_batch, decay_step;
  const void *inputs;        /* any (B, T, H) */
  int64_t inputs_batch, inputs_step;
  const float *initial;      /* (B, H); or NULL: zeros */
  const int64_t *lengths;    /* (B), from 0 to T; or NULL */
  void *outputs;             /* any (B, T, H), is written; zero at and past a row's length */
  int64_t outputs_batch, outputs_step;
  int64_t block;
  float *carries;            /* (B, N, H), gets the state before every block of a row's own steps; or NULL */
  float *last;               /* (B, H), gets the state after the last step; or NULL */
};

/* Its backward pass, which walks the other way. */
struct recurrence_backward {
  int64_t rows, positions, hidden, narrow;
  int64_t width, backwards; /* as of the forward pass */
  const void *decay;        /* any (B, T, H) */
  int64_t decay_batch, decay_step;
  const void *kept;         /* any (B, T, H), the outputs; with carries, the inputs */
  int64_t kept_batch, kept_step;
  const void *doutputs;     /* any (B, T, H) */
  int64_t doutputs_batch, doutputs_step;
  const float *initial;     /* (B, H); or NULL: zeros */
  const int64_t *lengths;   /* (B); or NULL */
  int64_t block;
  const float *carries;     /* (B, N, H); or NULL */
  const float *after;       /* (B, H), the gradient of the state after the last step; or NULL: zeros */
  void *ddecay, *dinputs;   /* any (B, T, H), contiguous but for the batch, are written */
  int64_t gradients_batch, gradients_step;
  float *dinitial;          /* (B, H), is written */
};

/* What a row's steps make of a state: h -> product h + end. */
struct recurrence_summary {
  int64_t rows, positions, hidden, narrow;
  int64_t width, backwards;
  int64_t gradient; /* 1: of the steps h = decay (h + inputs), which the backward pass takes */
  const void *decay, *inputs; /* any (B, T, H) */
  int64_t decay_batch, decay_step, inputs_batch, inputs_step;
  float *products, *ends; /* (B, H), are written */
};

/* One recurrence with what is around it. */
struct scan_cell {
  int64_t narrow, parts, gates; /* of the products; those behind the first that pass the sigmoid */
  int64_t recurrence, output;   /* of those below */
  int64_t squashes;             /* 1: the first part passes tanh */
};

enum { COUPLED, GATED, SHARED };
enum { PLAIN, RELU, GATE, HIGHWAY };

/* Products to outputs, all steps of a row one after the other. A task is some columns of a row. */
struct scan_cell_forward {
  struct scan_cell cell;
  int64_t rows, positions, hidden;
  int64_t width;          /* columns of a task, at most 256 */
  const void *products;   /* (B, T, parts H) */
  const void *read;       /* any (B, T, H), which a highway lets through; or NULL */
  int64_t read_batch, read_step;
  const float *initial;   /* (B, H) */
  const int64_t *lengths; /* (B), from 0 to T; or NULL */
  void *outputs;          /* any (B, T, H), is written; zero at and past a row's length */
  int64_t outputs_batch, outputs_step;
  float *cells;           /* any (B, T, H), gets c at each step of a row; or NULL */
  int64_t cells_batch, cells_step;
  float *last;            /* (B, H), gets c after the last step */
};

/* Its backward pass, which walks the other way. */
struct scan_cell_backward {
  struct scan_cell cell;
  int64_t rows, positions, hidden;
  int64_t width;
  const void *products; /* as of the forward pass */
  const void *read;
  int64_t read_batch, read_step;
  const float *initial; /* any (B, H) */
  int64_t initial_stride;
  const int64_t *lengths;
  const float *cells;   /* any (B, T, H) */
  int64_t cells_batch, cells_step;
  const void *doutputs; /* any (B, T, H); or NULL: zeros */
  int64_t doutputs_batch, doutputs_step;
  void *dproducts;      /* (B, T, parts H), is written; may be the products */
  void *dread;          /* (B, T, H), is written; or NULL */
  float *dfirst;        /* (B, H), the gradient of c after the last step; that of the initial one takes its place */
};

#endif
