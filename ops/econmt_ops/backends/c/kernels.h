/* Arguments of the kernels. All sizes and strides are in elements; matrices have contiguous rows.
 *
 * A pointer to void, marked "any", points to float, or to bfloat16 if the struct's narrow is 1. Sizes: B rows of a batch, H hidden,
 * S source positions, A attention size, C rows of a chunk, V vocabulary. The equations are in econmt_ops.cells and
 * econmt_ops.backends.losses.
 *
 * econmt_ops.backends.c.library reads the structs from this file: what a pointer to const points to is only read; NAME_stride, or
 * NAME_batch and NAME_step, are the strides of NAME's first axes; pointers without strides point to contiguous memory.
 */

#ifndef ECONMT_KERNELS_H
#define ECONMT_KERNELS_H

#include <stdint.h>

/* One step of an LSTM. */
struct lstm_forward {
  int64_t rows, hidden, narrow;
  void *gates; /* any (B, 4H), the gates before their nonlinearities, in the order i, f, g, o */
  int64_t gates_stride;
  const void *recurrent; /* any (B, 4H), added to the gates, which the sum overwrites; or NULL */
  int64_t recurrent_stride;
  const float *before; /* (B, H) the cell state before the step */
  int64_t before_stride;
  void *h; /* any (B, H), is written */
  int64_t h_stride;
  float *after; /* (B, H), is written; may be before */
  int64_t after_stride;
  float *kept; /* (B, 4H), receives the gates after their nonlinearities; may be gates; or NULL */
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
  const void *incoming, *dh; /* any (B, H), two gradients of h; the first may be NULL */
  int64_t incoming_stride, dh_stride;
  const float *dc; /* (B, H) */
  int64_t dc_stride;
  void *dgates; /* any (B, 4H), is written; may be gates */
  int64_t dgates_stride;
  float *dbefore; /* (B, H), is written */
  int64_t dbefore_stride;
};

/* One step of a GRU, whose products with inputs and h belong to r, z and n. */
struct gru_cell_forward {
  int64_t rows, hidden, narrow;
  const void *read, *recurrent; /* any (B, 3H), the products of the inputs and of h */
  int64_t read_stride, recurrent_stride;
  const uint8_t *padding; /* (B), 1 at rows whose state passes by the step; or NULL */
  const void *before;     /* any (B, H), h before the step */
  int64_t before_stride;
  void *after; /* any (B, H), h after the step, is written; may be before */
  int64_t after_stride;
  void *output; /* any (B, H), is written: h after the step, zero at padded rows */
  int64_t output_stride;
};

/* Backward of one step of a GRU, with the arguments of the step. */
struct gru_cell_backward {
  int64_t rows, hidden, narrow;
  const void *read, *recurrent;
  int64_t read_stride, recurrent_stride;
  const uint8_t *padding;
  const void *before;
  int64_t before_stride;
  const void *incoming; /* any (B, H), gradient of the output; or NULL */
  int64_t incoming_stride;
  void *dh; /* any (B, H), gradient of h after the step; overwritten by that before it, without the product's share */
  int64_t dh_stride;
  void *dread, *drecurrent; /* any (B, 3H), are written; zero at padded rows */
  int64_t dread_stride, drecurrent_stride;
};

/* The weights of additive or dot attention. */
struct attention_forward {
  int64_t rows, positions, size, narrow;
  const void *query; /* any (B, A) */
  int64_t query_stride;
  const void *keys;       /* any (B, S, A) */
  const float *score;     /* (A); or NULL: scores are the products of query and key */
  const uint8_t *padding; /* (B, S), 1 at padded positions; or NULL */
  float *weights;         /* (B, S), is written; zero at padded positions */
  const int64_t *owners;  /* (B) index of a row's keys and padding, if rows share them; or NULL */
  const float *gain, *shift; /* (A) of the layer normalization of query + key in additive attention; or NULL */
  int64_t width;             /* W, numbers of the coverage of a position */
  const float *coverage;     /* (B, S, W), whose product with its key is added to query + key; or NULL */
  const float *coverage_key; /* (W, A) */
};

/* tanh(share + sum_s weight_s projected_s). */
struct combine_forward {
  int64_t rows, positions, size, narrow;
  const void *share; /* any (B, H); or NULL: zeros */
  int64_t share_stride;
  const void *attention; /* any (B, S) */
  int64_t attention_stride;
  const void *projected; /* any (B, S, H) */
  void *output;          /* any (B, H), is written */
  int64_t output_stride;
  const int64_t *owners; /* (B) index of a row's projected values; or NULL */
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
  const void *values; /* any (B, S, E) */
  int64_t values_batch, values_step;
  const void *dcontext; /* any (B, E) */
  int64_t dcontext_stride;
  const void *incoming; /* any (B, S), another gradient of the weights, added; or NULL */
  int64_t incoming_stride;
  const uint8_t *padding;
  float *dweights; /* (B, S), is written; zero at padded positions */
};

/* left weight^T + bias + start with an 8-bit weight; each row of left is rounded to 8 bits too, scaled by its largest value.
 * N outputs in groups of 16, K inputs in groups of 4, zero-padded to a multiple of 16 outputs and of 64 inputs. */
struct product_int8 {
  int64_t rows, inputs, outputs;
  const float *left; /* (B, K) */
  int64_t left_stride;
  const int8_t *weight; /* (N / 16, K / 4, 16, 4), from -127 to 127 */
  const int32_t *sums;  /* (N / 16, 16) sum of each output's weights */
  const float *scales;  /* (N) scale of each output's weights */
  const float *bias;    /* (N); or NULL */
  const float *start;   /* (B, N); or NULL; may be output */
  int64_t start_stride;
  float *output; /* (B, N), is written */
  int64_t output_stride;
};

/* The most probable words of each row, highest first, and their log-probabilities; ties are ordered by word id. */
struct best_words {
  int64_t rows, vocabulary;
  int64_t count; /* words per row, at most 64 and at most V */
  const float *logits; /* (B, V) */
  int64_t logits_stride;
  const float *barred;   /* (., V), masks added to the logits of their rows; or NULL */
  const int64_t *owners; /* (B) index of a row's mask */
  const int64_t *skipped; /* two words that are excluded */
  float *values;  /* (B, count), is written */
  int64_t *words; /* (B, count), is written */
  float *end;     /* (B) the log-probability of word 3, is written */
};

/* A weight (N, K) in the layout for products of few rows: outputs in groups of 16, inputs in groups of 4 bytes; both are
 * zero-padded, inputs to a multiple of 64 bytes unless they are floats. */
struct weight {
  int64_t kind; /* of the enum below */
  int64_t inputs, outputs;
  const void *values;   /* (N / 16, K / n, 16, n) with n = 1, 2 or 4 */
  const int32_t *sums;  /* of bytes: sum of each output's weights, padded; or NULL */
  const float *scales;  /* (N) of bytes: scale of each output; or NULL */
  const float *bias;    /* (N); or NULL */
};

enum { FLOATS, BFLOATS, BYTES };

/* Brings a weight into the tiles that product_tiles reads: N outputs in groups of 32, K inputs in groups of 32, zero-padded. */
struct pack_weight {
  int64_t outputs, inputs, narrow, exact; /* exact: 1 for tiles of floats, of values that are floats */
  const void *values;                     /* any (N, K) */
  int64_t output_stride, input_stride;    /* strides of values, one of them 1 */
  /* bfloat16 (N / 16, K / 32, 16, 16, 2): outputs, inputs, pairs of inputs, outputs, pair; or float (N / 16, K / 32, 32, 16). */
  void *tiles;
};

/* left weight^T + bias, summed in float32: in bfloat16, or exact, in float32. */
struct product_tiles {
  int64_t rows, inputs, outputs, narrow; /* narrow: 1 if the output is bfloat16, else it is float */
  int64_t adds;                          /* 1: the product is added to the output */
  int64_t left_narrow, exact;            /* exact: the left factor and the tiles have floats */
  const void *left;                      /* any (M, K), rounded to bfloat16 unless exact */
  int64_t left_row, left_input;          /* its strides, one of them 1 */
  const void *weight;                    /* as written by pack_weight */
  const float *bias;                     /* (N); or NULL */
  void *output;                          /* any (M, N), is written */
  int64_t output_stride;
};

/* left weight^T + bias, with a weight for each owner of rows: the words that a sentence may use, for its hypotheses. */
struct products_by_owner {
  int64_t rows, most; /* most: N, at least the outputs of each weight */
  const float *left;  /* (B, K) */
  int64_t left_stride;
  const struct weight *weights; /* of one kind, with K inputs each */
  const int64_t *owners;        /* (B) index of each row's weight; those with the same weight are neighbours */
  float *output;                /* (B, N), is written; -inf beyond the outputs of a row's weight */
  int64_t output_stride;
};

/* All steps of a layer in one direction, over B rows of T steps at most; G gates of its cell: 4, 3 and 2, then 4 and 4. */
struct layer_sequence {
  int64_t rows, positions, hidden, cell; /* cell: of the enum below */
  int64_t backwards;              /* 1: from a row's last position to its first */
  const struct weight *recurrent; /* (G H, H), without bias where its product is added to the table's; NULL for SSRU */
  const float *vectors;           /* of the cell, see the enum; or NULL */
  const float *table;             /* (M, G H) the inputs' share of the gates */
  const int64_t *places;          /* (T, B) row index into table of each position */
  const int64_t *lengths;         /* (B), at least 1 */
  float *outputs;                 /* (T, B, H), is written at a row's own positions */
  int64_t outputs_stride;         /* stride between rows; a position is B rows */
  float *last;                    /* (B, H), receives h after the last step */
  int64_t last_stride;
};

/* Cells of layers. The products with inputs and h are added in LSTM and LNGLSTM, and separate in GRU and LNLSTM, whose layers
 * are normalized (econmt_ops.cells.lnlstm). Their vectors, one after the other: LNLSTM (4H) bias, gains of inputs and of h;
 * LNGLSTM (4H) gain and shift of the gates; then (H) gain and shift of c. */
enum { LSTM, GRU, SSRU, LNLSTM, LNGLSTM };

/* Updates of the coverage of a position, in econmt_ops.cells.coverage; FERTILITY divides the attention by 2 sigmoid(share). */
enum { NO_COVERAGE, COVER_COUNT, COVER_FERTILITY, COVER_TANH, COVER_SIGMOID, COVER_RELU, COVER_SOFTRELU, COVER_GRU };

/* Beam search of B sentences with a decoder of layers, attention and output: all steps, until no growing hypothesis can exceed
 * the finished ones. A GRU has no c; the h of an SSRU is not read by the next step. K beam size, T maximum steps, N words of the output layer, V words of the vocabulary; a word is a number below N.
 */
struct beam_search {
  int64_t sentences, positions, beam, steps, nbest;
  int64_t layers, size, compared, summed; /* layers, H and A; values per position that the attention sums, see values */
  int64_t cell;               /* of the layers */
  int64_t fed, residual;      /* 1: the bottom layer reads o; an upper layer adds its input */
  int64_t contexts;           /* 1: upper layers read the context of the bottom layer's attention */
  int64_t asked;              /* query values before the state's share of o in one product; 0: none */
  int64_t embedded, watched;  /* embedding size; steps between two calls of watch */
  int64_t coverage, width;    /* update of the coverage; W, its numbers for a position */
  const struct weight *weights; /* in the order below */
  const float *vectors;         /* (layers, .) of the cells; or NULL */
  const float *embedding;       /* (V, I); or NULL */
  const int8_t *bytes;          /* (V, I), the embedding in 8 bits instead */
  const float *scales;          /* (V) their scales */
  float *shares;                /* (V, G H), cache of the words' shares of the bottom layer's gates; or NULL */
  uint8_t *known;               /* (V), 1 for cached words */
  const int64_t *ids;           /* (N) the words' ids in the vocabulary; or NULL: the same numbers */
  const float *barred;          /* (B, N), masks added to logits; or NULL */
  const float *keys;            /* (B, S, A) */
  const float *score;           /* (A); or NULL: dot attention */
  const float *gain, *shift;    /* (A) of the attention's layer normalization; or NULL */
  const float *coverage_key;    /* (W, A); of the coverage, or NULL, as the next three */
  const float *coverage_shares; /* (B, S, P) shares of the encoder's outputs in the update; P: 1, W or 3W */
  const float *coverage_attention, *coverage_recurrent; /* (P) and (P, W) factors of attention and coverage in the update */
  const float *values; /* (B, S, summed): their share of o (H), or of gate and o (2H); then the context if upper layers read it */
  const float *context_bias; /* (H) of the context in the output, if a gate weighs context and state; or NULL */
  const float *output_gain, *output_shift; /* (H) of the layer normalization before the tanh of o; or NULL */
  const uint8_t *padding;       /* (B, S) */
  const float *first;           /* (layers, 2, B, H) h and c before the first step */
  const int64_t *limits;        /* (B) maximum words before the end */
  const double *penalties;      /* (T + 1) divisor of a translation's log-probability, by its length including the end */
  int64_t (*watch)(void);       /* returns 0 to continue; or NULL */
  int64_t *stopped;             /* set to 1 if watch returned another value */
  double *ended;  /* (B, K, 2) finished hypotheses, in order: log-probability, and length times K plus the place extended */
  int64_t *count; /* (B) number of finished hypotheses */
  int64_t *grown; /* (B, T, K) per step and place, the word times K plus the place that it extends */
  float *seen;    /* (B, T, K, S) attention weights of each step; or NULL */
};

/* One decoder step for hypotheses that the caller selects, with bitwise the same arithmetic as beam_search. */
struct search_step {
  int64_t rows;
  const struct beam_search *search; /* sizes, with a beam of 1, weights, and sentences */
  const int64_t *owners, *tokens;   /* (R) sentence and last word of each row */
  float *h, *c, *output, *coverage; /* (layers, R, H) twice, (R, H), and (R, S, W) or NULL, are read and written */
  float *seen;                      /* (R, S), the attention, is written */
  float *log_probs;                 /* (R, N), of the next word, is written; or NULL */
};

/* The weights of a decoder. COVERAGE multiplies the top layer's output in the update of the coverage. From LAYERS on each layer
 * has two, bottom first: of its inputs without the word, followed by h where both are added; and of h, where they are not. */
enum { WORDS, OWN, QUERY, READOUT, OUTPUT, COVERAGE, LAYERS };

/* Cross entropies of logits with smoothed labels. */
struct losses {
  int64_t rows, vocabulary, narrow;
  void *logits; /* any (C, V); overwritten by their gradient if gradient is 1 */
  int64_t logits_stride;
  const int64_t *targets; /* (C) */
  float smoothing;
  int64_t gradient;     /* 1: compute it */
  const float *factors; /* (C) factor of each row's gradient; or NULL */
  float *losses;        /* (C), is written */
  float *dbias;         /* (V), the sum of the gradients is added; or NULL */
};

/* Adds rows to one row, or to the rows of a table. */
struct add_rows {
  int64_t rows, size, narrow;
  const void *values; /* any (R, N) */
  int64_t values_stride;
  const int64_t *places; /* (R), the row of total that each is added to; NULL: the first */
  float *total;          /* (M, N) */
  int64_t total_stride;
};

/* h_t = decay_t h_{t-1} + inputs_t. A task is a range of columns of a row, with all of its steps. */
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
};

/* Backward pass of recurrence_forward: the recurrence in the other direction. */
struct recurrence_backward {
  int64_t rows, positions, hidden, narrow;
  int64_t width, backwards; /* as in the forward pass */
  const void *decay;        /* any (B, T, H) */
  int64_t decay_batch, decay_step;
  const void *kept;         /* any (B, T, H), the outputs */
  int64_t kept_batch, kept_step;
  const void *doutputs;     /* any (B, T, H) */
  int64_t doutputs_batch, doutputs_step;
  const float *initial;     /* (B, H); or NULL: zeros */
  const int64_t *lengths;   /* (B); or NULL */
  void *ddecay, *dinputs;   /* any (B, T, H), contiguous except for the batch, are written */
  int64_t gradients_batch, gradients_step;
  float *dinitial;          /* (B, H), is written */
};

/* One recurrence with its nonlinearities and output. */
struct scan_cell {
  int64_t narrow, parts, gates; /* parts of the products; how many after the first pass the sigmoid */
  int64_t recurrence, output;   /* of the enums below */
  int64_t squashes;             /* 1: the first part passes tanh */
};

enum { COUPLED, GATED, SHARED };
enum { PLAIN, RELU, GATE, HIGHWAY };

/* Products to outputs. A task is a range of columns of a row, with all of its steps. */
struct scan_cell_forward {
  struct scan_cell cell;
  int64_t rows, positions, hidden;
  int64_t width;          /* columns of a task, at most 256 */
  const void *products;   /* (B, T, parts H) */
  const void *read;       /* any (B, T, H), input of a highway; or NULL */
  int64_t read_batch, read_step;
  const float *initial;   /* (B, H) */
  const int64_t *lengths; /* (B), from 0 to T; or NULL */
  void *outputs;          /* any (B, T, H), is written; zero at and past a row's length */
  int64_t outputs_batch, outputs_step;
  float *cells;           /* (B, T, H), receives c after each step of a row; or NULL */
  int64_t cells_batch, cells_step;
  float *last;            /* (B, H), receives c after the last step */
};

/* Backward pass of scan_cell_forward: the recurrence in the other direction. */
struct scan_cell_backward {
  struct scan_cell cell;
  int64_t rows, positions, hidden;
  int64_t width;
  const void *products; /* as in the forward pass */
  const void *read;
  int64_t read_batch, read_step;
  const float *initial; /* (B, H) */
  int64_t initial_stride;
  const int64_t *lengths;
  const float *cells;   /* (B, T, H) */
  int64_t cells_batch, cells_step;
  const void *doutputs; /* any (B, T, H); or NULL: zeros */
  int64_t doutputs_batch, doutputs_step;
  void *dproducts;      /* (B, T, parts H), is written; may be the products */
  void *dread;          /* (B, T, H), is written; or NULL */
  float *dfirst;        /* (B, H), the gradient of c after the last step; overwritten by that of the initial c */
};

#endif
