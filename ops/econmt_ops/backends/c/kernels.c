/* Pointwise work and reductions of a step on the CPU, each kernel in one pass over memory and one call.
 *
 * Compiling this requires neither Python nor PyTorch; econmt_ops.backends.c calls it through ctypes. The library starts no
 * threads: it uses those of the OpenMP runtime that PyTorch has loaded, because a second thread pool would compete with
 * the first for the processors.
 */

#define _DEFAULT_SOURCE /* madvise */

#include "kernels.h"

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define CHUNK 256
#define TWICE -2.88539008f /* -2 log2 e: 2^(TWICE x) = e^(-2x) */
#define STREAMED (1 << 23) /* values from which a result exceeds the caches */
#define AHEAD 1024 /* prefetch distance, in values of a tensor */
#define MOST_PARTS 5 /* maximum parts of a scan cell's products */
#define INLINE inline __attribute__((always_inline))
#define PRAGMA(x) _Pragma(#x)
#define SIMD PRAGMA(omp simd)
#define SUM(...) PRAGMA(omp simd reduction(+ : __VA_ARGS__))
#define MAXIMUM(x) PRAGMA(omp simd reduction(max : x))

#define ROWS_AT_ONCE 64 /* rows of a product whose sums stay in the L1 cache */
#define GROUPS_AT_ONCE 4
#define ROW_BYTES(wide) ((wide) % 128 ? (wide) : (wide) + 64) /* an even number of cache lines per row would use few cache sets */
#define FILLED 64       /* a row's bytes in a product are padded to a multiple of this */
/* Bytes of a row, or of an output's weights, by the kind of weight; and floats of scratch of a product with ``rows`` rows. */
#define WIDE(kind, inputs) \
  (((((kind) == FLOATS ? 4 : (kind) == BFLOATS ? 2 : 1) * (inputs)) + FILLED - 1) / FILLED * FILLED)
#define PRODUCT_SCRATCH(rows, wide) ((rows) + ((rows) + ROWS_AT_ONCE) * ROW_BYTES(wide) / 4 + 16)

typedef void kernel(const void *given, int64_t begin, int64_t end, float *scratch);

/* What sums of 8-bit products have added to each value of a row: 128, see round_row, or 0 if they take signed values. */
static int32_t offset = 128;

#if defined(__x86_64__) && defined(__GNUC__)
#define VARIANTS 1
#else
#define VARIANTS 0
#endif
#include "targets.h"

#include "search_room.h"

#if defined(__aarch64__)
#include "sums_neon.h"
#define SUMS_OF_16 (has_dot ? sums_of_16_dot : sums_of_16_widening)
#elif defined(__wasm_simd128__)
#include "sums_wasm.h"
#define SUMS_OF_16 sums_of_16_wasm
#else
#define SUMS_OF_16 sums_of_16_plain
#endif
#define NARROW_SUMS_OF_16(x) x
#define BEGIN_SUMS
#define END_SUMS
#define NAME(x) x##_plain
#define LANES 0 /* floats per non-temporal store */
#include "variant.h"
#undef LANES
#undef NAME

#if VARIANTS
#include <immintrin.h>
#include "sums_avx_vnni.h"
BEGIN_TARGET("avx2,fma")
#include "sums_avx2.h"
#undef SUMS_OF_16
#define SUMS_OF_16 (has_avx_vnni ? sums_of_16_avx_vnni : sums_of_16_signed)
#define NAME(x) x##_avx2
#define LANES 8
#include "variant.h"
#undef LANES
#undef NAME
END_TARGET

#include "vnni.h"
#include "products.h"
#undef SUMS_OF_16
#undef NARROW_SUMS_OF_16
#undef BEGIN_SUMS
#undef END_SUMS
#define NARROW_SUMS_OF_16(x) (has_amx_narrow ? narrow_sums_of_16_amx : has_narrow ? narrow_sums_of_16_dot : x)
#define SUMS_OF_16 (has_amx ? sums_of_16_amx : has_vnni ? sums_of_16_vnni : sums_of_16_signed)
#define BEGIN_SUMS if (has_amx) begin_tiles()
#define END_SUMS if (has_amx) end_tiles()
BEGIN_TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl" WIDEST)
#define NAME(x) x##_avx512
#define LANES 16
#include "variant.h"
#undef LANES
#undef NAME
END_TARGET
#else
#define HAS_PRODUCTS 0
#endif

typedef void parallel_function(void (*body)(void *), void *given, unsigned threads, unsigned flags);
typedef int thread_function(void);

static parallel_function *parallel;
static thread_function *thread_number, *thread_count;
static int level;

/* Sets the addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads, and the highest instruction set to use:
 * 0 the baseline of the architecture, 1 AVX2 with AVX-VNNI or Arm's dot products, 2 AVX-512, 3 AMX too. Returns the one that is used, of the
 * first three. */
EXPORT int econmt_start(void *start, void *number, void *count, int most) {
  /* A caller without threads keeps those that another part of the process has set. */
  if (!start && parallel) return level;
  parallel = (parallel_function *)start;
  thread_number = (thread_function *)number;
  thread_count = (thread_function *)count;
  level = 0;
#if VARIANTS
  if (has_avx2_and_fma()) level = has_avx512() ? 2 : 1;
  if (level > most) level = most;
  has_avx_vnni = level == 1 && ask_for_avx_vnni();
  has_vnni = level == 2 && has_avx512_vnni();
  offset = level && !has_vnni && !has_avx_vnni ? 0 : 128;
  has_narrow = KNOWS_NARROW && has_vnni && has_avx512_bf16();
  /* MKL is slower than these there; on a Xeon (Emerald Rapids) it is faster, except with few rows. The code has bfloat16
   * instructions too. */
  has_floats = has_narrow && is_amd();
  has_amx = most > 2 && has_vnni && ask_for_amx();
  has_amx_narrow = has_amx && has_narrow && amx_is_narrow();
#elif defined(__aarch64__)
  level = has_dot = most > 0 && ask_for_dot();
  offset = 0;
#else
  (void)most;
#endif
  return level;
}

/* Incremented here, in library.py and in econmt_runtime when the meaning of a function or field changes, so that a library built
 * earlier is not called. */
EXPORT int econmt_version(void) { return 11; }

/* Returns the bytes of a structure, 0 for an unknown name. */
EXPORT int64_t econmt_size(const char *name) {
#define SIZE(x) \
  if (strcmp(name, #x) == 0) return (int64_t)sizeof(struct x)
  SIZE(lstm_forward);
  SIZE(lstm_backward);
  SIZE(gru_cell_forward);
  SIZE(gru_cell_backward);
  SIZE(attention_forward);
  SIZE(combine_forward);
  SIZE(attention_backward);
  SIZE(weight_gradient);
  SIZE(product_int8);
  SIZE(products_by_owner);
  SIZE(best_words);
  SIZE(weight);
  SIZE(pack_weight);
  SIZE(product_tiles);
  SIZE(layer_sequence);
  SIZE(beam_search);
  SIZE(search_step);
  SIZE(losses);
  SIZE(add_rows);
  SIZE(recurrence_forward);
  SIZE(recurrence_backward);
  SIZE(scan_cell_forward);
  SIZE(scan_cell_backward);
#undef SIZE
  return 0;
}

/* Scratch that is kept from call to call: memory given back to the system would have to be faulted in again. */
struct block {
  int64_t floats, unused; /* the values are aligned as those of malloc */
  float values[];
};

#define KEPT (1 << 20) /* most floats of a block that is kept, one in a process */

static _Atomic(struct block *) kept_block;

/* Returns scratch of at least so many floats, or NULL if out of memory. */
static struct block *take_block(int64_t floats) {
  struct block *block = atomic_exchange(&kept_block, NULL);
  if (block && block->floats >= floats) return block;
  free(block);
  block = malloc(sizeof *block + (size_t)floats * sizeof *block->values);
  if (block) block->floats = floats;
  return block;
}

static void give_block(struct block *block) {
  if (block && block->floats <= KEPT) block = atomic_exchange(&kept_block, block);
  free(block);
}

struct job {
  kernel *run;
  const void *given;
  int64_t rows, parts, stride; /* stride: floats of scratch per part */
  float *scratch;
};

static void work(void *given) {
  const struct job *job = given;
  int64_t count = thread_count(); /* may be fewer than the parts, for which scratch was allocated */
  for (int64_t part = thread_number(); part < job->parts; part += count)
    job->run(job->given, job->rows * part / job->parts, job->rows * (part + 1) / job->parts,
             job->scratch + part * job->stride);
}

/* Runs a kernel on all rows. The first ``kept`` floats of each thread's scratch are initialised to zero, and their sum over
 * the threads is added to ``total``. Returns 0, or 1 if out of memory. */
static int spread(kernel *run, const void *given, int64_t rows, int64_t threads, int64_t kept, int64_t more,
                  float *total) {
  float few[2048];
  if (!parallel || threads < 1) threads = 1;
  int64_t stride = (kept + more + 15) / 16 * 16, needed = stride * threads;
  struct block *block = needed <= (int64_t)(sizeof few / sizeof *few) ? NULL : take_block(needed);
  float *scratch = block ? block->values : few;
  if (scratch == few && needed > (int64_t)(sizeof few / sizeof *few)) return 1;
  for (int64_t thread = 0; thread < threads; thread++)
    memset(scratch + thread * stride, 0, (size_t)kept * sizeof *scratch);
  struct job job = {run, given, rows, threads, stride, scratch};
  if (threads == 1)
    run(given, 0, rows, scratch);
  else
    parallel(work, &job, (unsigned)threads, 0);
  if (total)
    for (int64_t thread = 0; thread < threads; thread++)
      for (int64_t k = 0; k < kept; k++) total[k] += scratch[thread * stride + k];
  give_block(block);
  return 0;
}

#if VARIANTS
#define PICK(x) (level == 2 ? x##_avx512 : level == 1 ? x##_avx2 : x##_plain)
#else
#define PICK(x) x##_plain
#endif

EXPORT int econmt_lstm_forward(const struct lstm_forward *a, int64_t threads) {
  return spread(PICK(lstm_forward), a, a->rows, threads, 0, 0, NULL);
}

EXPORT int econmt_lstm_backward(const struct lstm_backward *a, int64_t threads) {
  return spread(PICK(lstm_backward), a, a->rows, threads, 0, 0, NULL);
}

EXPORT int econmt_gru_cell_forward(const struct gru_cell_forward *a, int64_t threads) {
  return spread(PICK(gru_cell_forward), a, a->rows, threads, 0, 0, NULL);
}

EXPORT int econmt_gru_cell_backward(const struct gru_cell_backward *a, int64_t threads) {
  return spread(PICK(gru_cell_backward), a, a->rows, threads, 0, 0, NULL);
}

EXPORT int econmt_attention_forward(const struct attention_forward *a, int64_t threads) {
  return spread(PICK(attention_forward), a, a->rows, threads, 0, 5 * a->size, NULL);
}

EXPORT int econmt_combine_forward(const struct combine_forward *a, int64_t threads) {
  return spread(PICK(combine_forward), a, a->rows, threads, 0, 5 * a->size, NULL);
}

EXPORT int econmt_product_int8(const struct product_int8 *a, int64_t threads) {
  int64_t rows = threads > 1 ? a->rows / threads + 1 : a->rows, wide = WIDE(BYTES, a->inputs);
  return spread(PICK(product_int8), a, a->rows, threads, 0, PRODUCT_SCRATCH(rows, wide), NULL);
}

EXPORT int econmt_products_by_owner(const struct products_by_owner *a, int64_t threads) {
  int64_t rows = threads > 1 ? a->rows / threads + 1 : a->rows, wide = WIDE(a->weights->kind, a->weights->inputs);
  return spread(PICK(products_by_owner), a, a->rows, threads, 0, PRODUCT_SCRATCH(rows, wide), NULL);
}

EXPORT int econmt_best_words(const struct best_words *a, int64_t threads) {
  return spread(PICK(best_words), a, a->rows, threads, 0, a->vocabulary, NULL);
}

/* Requests 2 MB pages for memory that is about to be overwritten: faulting in pages of 4 KB would take as long as writing it.
 * Partial pages at both ends are left unchanged. */
static void in_large_pages(void *memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = (uintptr_t)1 << 21;
  uintptr_t begin = ((uintptr_t)memory + page - 1) & ~(page - 1), end = ((uintptr_t)memory + (uintptr_t)bytes) & ~(page - 1);
  if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* a hint only */
#else
  (void)memory, (void)bytes;
#endif
}

#if HAS_PRODUCTS
EXPORT int econmt_has_products(int exact) { return exact ? has_floats : has_narrow; }

EXPORT int econmt_pack_weight(const struct pack_weight *a, int64_t threads) {
  in_large_pages(a->tiles, UP(a->outputs, SIDE) * UP(a->inputs, 32) * (a->exact ? 4 : 2));
  return spread(pack_weight_dot, a, UP(a->outputs, SIDE) / SIDE, threads, 0, 0, NULL);
}

/* Threads divide the rows, or the outputs if there are few rows. */
EXPORT int econmt_product_tiles(const struct product_tiles *a, int64_t threads) {
  struct shared_product shared = {a, a->rows >= threads * 2 * SIDE};
  int64_t squares = UP(shared.by_rows ? a->rows : a->outputs, SIDE) / SIDE;
  return spread(product_tiles, &shared, squares, threads < squares ? threads : squares, 0, product_scratch(a), NULL);
}
#else
EXPORT int econmt_has_products(int exact) { return (void)exact, 0; }

EXPORT int econmt_pack_weight(const struct pack_weight *a, int64_t threads) { return (void)a, (void)threads, 1; }

EXPORT int econmt_product_tiles(const struct product_tiles *a, int64_t threads) { return (void)a, (void)threads, 1; }
#endif

/* Each thread handles some rows. */
EXPORT int econmt_layer_sequence(const struct layer_sequence *a, int64_t threads) {
  if (a->rows < 1) return 0;
  if (!parallel || threads < 1) threads = 1;
  if (threads > a->rows) threads = a->rows;
  int64_t rows = a->rows / threads + 1, wide = a->recurrent ? WIDE(a->recurrent->kind, a->recurrent->inputs) : 0;
  int64_t floats = rows * (10 * a->hidden + 2) + PRODUCT_SCRATCH(rows, wide) + 2048; /* 2048: so that it is not on the stack */
  return spread(PICK(layer_sequence), a, a->rows, threads, 0, floats, NULL);
}

/* Each thread translates some sentences. */
EXPORT int econmt_beam_search(const struct beam_search *a, int64_t threads) {
  if (a->sentences < 1) return 0;
  if (!parallel || threads < 1) threads = 1;
  if (threads > a->sentences) threads = a->sentences;
  struct search_room room;
  int64_t bytes = make_search_room(a, &room, a->sentences / threads + 1, NULL);
  return spread(PICK(beam_search), a, a->sentences, threads, 0, bytes / 4 + 16, NULL);
}

/* Each thread handles some rows. */
EXPORT int econmt_search_step(const struct search_step *a, int64_t threads) {
  if (a->rows < 1) return 0;
  if (!parallel || threads < 1) threads = 1;
  if (threads > a->rows) threads = a->rows;
  struct search_room room;
  int64_t bytes = make_search_room(a->search, &room, a->rows / threads + 1, NULL);
  return spread(PICK(search_step), a, a->rows, threads, 0, bytes / 4 + 16, NULL);
}

EXPORT int econmt_attention_backward(const struct attention_backward *a, int64_t threads) {
  return spread(PICK(attention_backward), a, a->rows, threads, a->size, 3 * a->size, a->dscore);
}

EXPORT int econmt_weight_gradient(const struct weight_gradient *a, int64_t threads) {
  return spread(PICK(weight_gradient), a, a->rows, threads, 0, a->size, NULL);
}

EXPORT int econmt_losses(const struct losses *a, int64_t threads) {
  for (int64_t row = 0; row < a->rows; row++)
    if (a->targets[row] < 0 || a->targets[row] >= a->vocabulary) return 2;
  return spread(PICK(losses), a, a->rows, threads, a->dbias ? a->vocabulary : 0, a->vocabulary, a->dbias);
}

EXPORT int econmt_add_rows(const struct add_rows *a, int64_t threads) {
  return spread(PICK(add_rows), a, a->size, threads, 0, 0, NULL);
}

/* Returns the number of tasks; a task is a range of columns of a row. */
static int64_t tasks_of(int64_t rows, int64_t hidden, int64_t width) { return rows * ((hidden + width - 1) / width); }

EXPORT int econmt_recurrence_forward(const struct recurrence_forward *a, int64_t threads) {
  int64_t tasks = tasks_of(a->rows, a->hidden, a->width);
  in_large_pages(a->outputs, a->rows * a->positions * a->hidden * (a->narrow ? 2 : 4));
  return spread(PICK(recurrence_forward), a, tasks, threads, 0, a->width, NULL);
}

EXPORT int econmt_recurrence_backward(const struct recurrence_backward *a, int64_t threads) {
  int64_t tasks = tasks_of(a->rows, a->hidden, a->width);
  int64_t bytes = a->rows * a->positions * a->hidden * (a->narrow ? 2 : 4);
  in_large_pages(a->ddecay, bytes);
  in_large_pages(a->dinputs, bytes);
  return spread(PICK(recurrence_backward), a, tasks, threads, 0, 4 * a->width, NULL);
}

EXPORT int econmt_scan_cell_forward(const struct scan_cell_forward *a, int64_t threads) {
  return spread(PICK(scan_cell_forward), a, tasks_of(a->rows, a->hidden, a->width), threads, 0, 0, NULL);
}

EXPORT int econmt_scan_cell_backward(const struct scan_cell_backward *a, int64_t threads) {
  return spread(PICK(scan_cell_backward), a, tasks_of(a->rows, a->hidden, a->width), threads, 0, 0, NULL);
}
