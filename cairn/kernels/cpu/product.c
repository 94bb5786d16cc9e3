/* Products with matrices whose rows stay packed as a checkpoint has them.
 *
 *     y = x @ w.T + bias        a norm before it, a gate behind it or a sum onto the residual in the same pass
 *
 * A row of weights is unpacked into the first-level cache once and multiplied with every row of x. Threads share the rows
 * of the weights in chunks.
 */
#include <math.h>

#include "attention.h"
#include "pool.h"

#include "dot512.h"
#include "dot_neon.h"
#include "encoder.h"
#include "tiles_amx.h"

typedef struct {
    const uint8_t *data;
    int32_t type, rows;
    int64_t row_bytes;
    int32_t group; /* values that share a scale, where the type does not say so */
} Part;

#define ROWS_IN_CACHE 128   /* of x: they are read once for every few rows of weights */
#define BYTES_IN_CACHE 655360 /* of them, where each row of weights goes through all of them: the second-level cache of x86 */

enum { NO_GATE, SILU, GELU, GELU_TANH, RELU };

typedef struct {
    const Part *parts;
    int32_t count, columns;
    const float *bias; /* of all parts side by side, or NULL */
    int32_t gate;      /* the first part goes through an activation and is multiplied with the second */
    int32_t add;       /* y holds the residual */
} Matrix;

typedef struct {
    const float *weight; /* NULL: no norm */
    float eps;
} Norm;

typedef struct {
    const Matrix *matrix;
    const Activations *x;
    int rows_of_x, rows_of_chunk, outputs, by_tiles;
    float *y;
} Product;

static int padded(int columns) { return pieces_of(columns) * STRIDE; }

/* Memory of one unpacked row. */
#define ROW_OF(name, columns)                                                                       \
    _Alignas(64) uint8_t name##_level[padded(columns)];                                             \
    _Alignas(64) float name##_scale[padded(columns) / GROUP], name##_offset[padded(columns) / GROUP]; \
    Row name = {name##_level, name##_scale, name##_offset}

/* The groups beyond the last are zero. */
static void clear_row(Row row, int columns) {
    const int values = padded(columns);
    memset(row.level, 0, (size_t)values);
    memset(row.scale, 0, sizeof(float) * (size_t)values / GROUP);
    memset(row.offset, 0, sizeof(float) * (size_t)values / GROUP);
}

/* Whether rows of these weights go through such memory, or from their blocks into registers. */
static int are_unpacked(const Matrix *m) {
#if defined(HAS_DOT512)
    int through_memory = 0;
    for (int i = 0; i < m->count; i++) through_memory |= !has_pieces(m->parts[i].type);
    return through_memory;
#else
    return (void)m, 1;
#endif
}

/* 1 / (1 + exp(-x)) */
static inline float sigmoid(float x) {
    const float power = power_of_e(-__builtin_fabsf(x));
    return (x < 0 ? power : 1.f) / (1.f + power);
}

/* x becomes activation(x) * y. */
static void activate(int gate, int count, float *restrict x, const float *restrict y) {
    switch (gate) {
    case SILU:
#pragma omp simd
        for (int i = 0; i < count; i++) x[i] = x[i] * sigmoid(x[i]) * y[i];
        break;
    case GELU_TANH: /* (1 + tanh(u)) / 2 = sigmoid(2 u) */
#pragma omp simd
        for (int i = 0; i < count; i++)
            x[i] = x[i] * sigmoid(1.59576912f * (x[i] + 0.044715f * x[i] * x[i] * x[i])) * y[i];
        break;
    case GELU:
        for (int i = 0; i < count; i++) x[i] = 0.5f * x[i] * (1.f + erff(x[i] * 0.70710678f)) * y[i];
        break;
    default:
        for (int i = 0; i < count; i++) x[i] = (x[i] > 0 ? x[i] : 0) * y[i];
    }
}

/* `count` rows of one part with all rows of x: y [count, M]. */
static void multiply_rows(const Product *p, int part_number, int row, int count, int first_of_part, Row room,
                          float *y) {
    const Matrix *m = p->matrix;
    const Part *part = m->parts + part_number;
    const uint8_t *packed = part->data + part->row_bytes * row;
#if defined(HAS_DOT_NEON)
    Weights w = {packed, room, part->group};
    dots_of_rows(part->type, w, part->row_bytes, count, p->x, p->rows_of_x, m->columns, y);
#else
#if defined(HAS_TILES)
    if (p->by_tiles)
        tiles_dot(part->type, packed, part->row_bytes, count, (const TileOfX *)p->x, p->rows_of_x, m->columns, y);
#endif
#if defined(HAS_DOT512)
    const Rows w = {0, part->type, part->group, packed, part->row_bytes, room};
    if (!p->by_tiles) dots_of_rows(w, count, p->x, p->rows_of_x, m->columns, y);
#else
    for (int r = 0; r < count; r++, packed += part->row_bytes) {
        ask_ahead(packed, part->row_bytes, AHEAD_BYTES);
        unpack(part->type, packed, m->columns, part->group, room);
        dot(room, p->x, p->rows_of_x, m->columns, signed_levels(part->type), y + (int64_t)r * p->rows_of_x);
    }
#endif
#endif
    for (int r = 0; m->bias && r < count; r++)
        for (int t = 0; t < p->rows_of_x; t++) y[r * p->rows_of_x + t] += m->bias[first_of_part + row + r];
}

/* found [count, M] to the columns of y from n on. */
static void write_columns(const Product *p, int n, int count, const float *restrict found) {
    const int rows = p->rows_of_x, add = p->matrix->add;
    for (int t = 0; t < rows; t++) {
        float *restrict y = p->y + (int64_t)t * p->outputs + n;
        if (add)
            for (int r = 0; r < count; r++) y[r] += found[(int64_t)r * rows + t];
        else
            for (int r = 0; r < count; r++) y[r] = found[(int64_t)r * rows + t];
    }
}

static void multiply_chunk(void *given, int chunk) {
    const Product *p = given;
    const Matrix *m = p->matrix;
    ROW_OF(room, m->columns);
    if (are_unpacked(m)) clear_row(room, m->columns);
    int first = chunk * p->rows_of_chunk, last = first + p->rows_of_chunk;
    if (last > p->outputs) last = p->outputs;
    float found[(last - first) * p->rows_of_x], gated[m->gate ? (last - first) * p->rows_of_x : 1];
    int part = 0, start = 0; /* of the part that the rows belong to */
    for (int n = first, count; n < last; n += count) {
        while (!m->gate && n >= start + m->parts[part].rows) start += m->parts[part++].rows;
        int end = start + m->parts[part].rows < last ? start + m->parts[part].rows : last;
        count = end - n;
        multiply_rows(p, part, n - start, count, start, room, found);
        if (m->gate) multiply_rows(p, 1, n, count, m->parts[0].rows, room, gated);
        if (m->gate) activate(m->gate, count * p->rows_of_x, found, gated);
        write_columns(p, n, count, found);
    }
}

/* x / sqrt(mean(x^2) + eps) * weight */
static void norm_row(const float *restrict x, int columns, const Norm *norm, float *restrict y) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int k = 0; k < columns; k++) squares += x[k] * x[k];
    float factor = 1.f / sqrtf(squares / (float)columns + norm->eps);
#pragma omp simd
    for (int k = 0; k < columns; k++) y[k] = x[k] * factor * norm->weight[k];
}

typedef struct {
    const float *x;
    int columns, rows;
    const Norm *norm;
    Activations *out;
    int by_tiles;
} Rounding;

static void round_chunk(void *given, int t) {
    const Rounding *r = given;
    const float *x = r->x + (int64_t)t * r->columns;
    float normed[r->norm->weight ? r->columns : 1];
    if (r->norm->weight) norm_row(x, r->columns, r->norm, normed), x = normed;
#if defined(HAS_TILES)
    if (r->by_tiles) {
        split_row(x, r->columns, r->rows, t, (TileOfX *)r->out);
        return;
    }
#endif
    round_row(x, r->columns, r->rows, t, r->out);
}

static size_t bytes_of_x(int columns, int rows, int by_tiles) {
#if defined(HAS_TILES)
    if (by_tiles) return tile_bytes(columns, rows);
#endif
    return by_tiles ? 0 : activation_bytes(columns, rows);
}

static int goes_by_tiles(const Matrix *matrix, int rows_of_x) {
    int all = rows_of_x >= TILES_FROM && tiles_are_used();
    for (int i = 0; all && i < matrix->count; i++) all = has_tile_form(matrix->parts[i].type);
    return all;
}

static int rows_of_chunk(int outputs, int columns, int rows_of_x, int threads, int by_tiles) {
    const int together = by_tiles ? 32 : rows_of_x >= 32 ? 16 : 4, work = by_tiles ? rows_of_x / 8 + 2 : rows_of_x;
    int64_t fine = 262144 / ((int64_t)columns * (work + 1)) + 1; /* tens of microseconds of work */
    int64_t even = outputs / (threads * 4) + 1;
    int64_t rows = fine < even ? fine : even;
    return (int)(rows + together - 1) / together * together;
}

static int product_of(Pool *pool, const Matrix *matrix, const Norm *norm, const float *x, int rows_of_x, float *y) {
    int columns = matrix->columns, outputs = 0, by_tiles = goes_by_tiles(matrix, rows_of_x);
    Activations *rounded = NULL;
    if (posix_memalign((void **)&rounded, 64, bytes_of_x(columns, rows_of_x, by_tiles))) return -1;
    Rounding rounding = {x, columns, rows_of_x, norm, rounded, by_tiles};
    if (rows_of_x < 4) for (int t = 0; t < rows_of_x; t++) round_chunk(&rounding, t);
    else run(pool, round_chunk, &rounding, rows_of_x);
    for (int i = 0; i < matrix->count; i++) outputs += matrix->parts[i].rows;
    if (matrix->gate) outputs = matrix->parts[0].rows;
    Product product = {matrix, rounded, rows_of_x, 0, outputs, by_tiles, y};
    product.rows_of_chunk = rows_of_chunk(outputs, columns, rows_of_x, pool->threads, by_tiles);
    run(pool, multiply_chunk, &product, (outputs + product.rows_of_chunk - 1) / product.rows_of_chunk);
    free(rounded);
    return 0;
}

/* Rows of x that go through a matrix together. Where rows of weights are longer than what is multiplied at once, sums that
 * are kept from some columns to the next share the cache with x. */
static int rows_in_cache(const Matrix *matrix, int rows_of_x) {
#if defined(HAS_DOT512)
    const int fit = (int)(BYTES_IN_CACHE / activation_bytes(matrix->columns, 1)) / 8 * 8;
    if (goes_by_tiles(matrix, rows_of_x) || fit >= ROWS_IN_CACHE) return ROWS_IN_CACHE;
    if (!are_unpacked(matrix)) return ROWS_IN_CACHE / 2;
    return fit < 8 ? 8 : fit;
#else
    return (void)matrix, (void)rows_of_x, ROWS_IN_CACHE;
#endif
}

/* x [M, K] in rows without gaps, y [M, N] likewise. Returns 0, or -1 where memory is missing. */
int cairn_product(Pool *pool, const Matrix *matrix, const Norm *norm, const float *x, int rows_of_x, float *y) {
    const int parts = matrix->gate ? 1 : matrix->count, together = rows_in_cache(matrix, rows_of_x);
    int64_t outputs = 0;
    for (int i = 0; i < parts; i++) outputs += matrix->parts[i].rows;
    for (int t = 0; t < rows_of_x; t += together) {
        const int rows = rows_of_x - t < together ? rows_of_x - t : together;
        if (product_of(pool, matrix, norm, x + (int64_t)t * matrix->columns, rows, y + t * outputs)) return -1;
    }
    return 0;
}

#ifdef HAS_DOT_NEON
/* The kernel of a type, before the first product with it. */
void cairn_use_kernel(int slot, RowsDot *kernel) { kernels[slot] = kernel; }
#endif

/* Rows of y, normed, are added to the residual. */
void cairn_add_normed(const Norm *norm, const float *y, int rows, int columns, float *residual) {
    float normed[columns];
    for (int t = 0; t < rows; t++) {
        float *restrict onto = residual + (int64_t)t * columns;
        norm_row(y + (int64_t)t * columns, columns, norm, normed);
        for (int k = 0; k < columns; k++) onto[k] += normed[k];
    }
}

/* One layer of a decoder: norm, heads, output, norm, gate, down. */
typedef struct {
    const Matrix *qkv, *out, *inner, *down;
    const Norm *before_heads, *before_inner, *behind_out, *behind_down; /* of the last two NULL: the product adds to x */
    const Heads *heads;
    float *keys, *values;
    int32_t group, angle; /* which sequences and which angles of the step are its own */
} Layer;

/* What a block adds to the residual x [M, D], through a norm if it has one. */
static int add_block(Pool *pool, const Matrix *matrix, const Norm *behind, const float *input, int rows, int width,
                     float *x, float *room) {
    const Norm none = {NULL, 0};
    if (cairn_product(pool, matrix, &none, input, rows, behind ? room : x)) return -1;
    if (behind) cairn_add_normed(behind, room, rows, width, x);
    return 0;
}

/* A step through the layers, x [M, D] in place. `room` is as large as what a layer holds at once beside x, its heads and
 * what they attended to, or its gate, and what a block adds: what is read and what is written never share memory, because
 * rows are computed some at a time. */
int cairn_layers(Pool *pool, const Layer *layers, int count, const Sequences *groups, const float *const *cosines,
                 const float *const *sines, float *x, int rows, int width, float *room) {
    for (const Layer *l = layers; l < layers + count; l++) {
        const Heads *h = l->heads;
        float *attended = room + (int64_t)rows * (h->heads + 2 * h->kv_heads) * h->size;
        float *inner = room, *behind = room + (int64_t)rows * l->inner->parts[0].rows;
        float *added = attended + (int64_t)rows * h->heads * h->size;
        if (cairn_product(pool, l->qkv, l->before_heads, x, rows, room)) return -1;
        cairn_attend(pool, h, groups + l->group, room, l->keys, l->values, l->angle < 0 ? NULL : cosines[l->angle],
                     l->angle < 0 ? NULL : sines[l->angle], attended);
        if (add_block(pool, l->out, l->behind_out, attended, rows, width, x, added)) return -1;
        if (cairn_product(pool, l->inner, l->before_inner, x, rows, inner)) return -1;
        if (add_block(pool, l->down, l->behind_down, inner, rows, width, x, behind)) return -1;
    }
    return 0;
}

typedef struct {
    const Part *part;
    int columns;
    const int64_t *rows;
    float *out;
} Lookup;

static void look_up(void *given, int i) {
    const Lookup *l = given;
    const uint8_t *packed = l->part->data + l->part->row_bytes * l->rows[i];
    float *out = l->out + (int64_t)i * l->columns;
#ifdef HAS_DOT512
    if (packed_floats(l->part->type, packed, l->columns, out)) return;
#endif
    ROW_OF(room, l->columns);
    clear_row(room, l->columns);
    unpack(l->part->type, packed, l->columns, l->part->group, room);
    for (int group = 0; group < l->columns / GROUP; group++) {
        float scale = room.scale[group], offset = room.offset[group];
        const uint8_t *level = room.level + GROUP * group;
        if (signed_levels(l->part->type))
            for (int k = 0; k < GROUP; k++) out[GROUP * group + k] = scale * (float)(int8_t)level[k];
        else
            for (int k = 0; k < GROUP; k++) out[GROUP * group + k] = scale * (float)level[k] + offset;
    }
}

#include "draft_head.h"

/* The given rows in float32, [count, K]. */
void cairn_rows(Pool *pool, const Part *part, int columns, const int64_t *rows, int count, float *out) {
    Lookup lookup = {part, columns, rows, out};
    run(pool, look_up, &lookup, count);
}

/* Rows of x in two digits of 8 bits, as floats [2, M, K]: whole steps of a row's largest value over `most`, pins beside
 * them, and what is left over in steps that are `lower` times as small. `inlier` is 0 for columns that are left out. */
void cairn_digits(const float *x, const float *inlier, const float *pins, int rows, int columns, float most,
                  float lower, float *digits, float *step) {
    for (int t = 0; t < rows; t++) {
        const float *row = x + (int64_t)t * columns;
        float *high = digits + (int64_t)t * columns, *low = high + (int64_t)rows * columns, largest = 0;
#pragma omp simd reduction(max : largest)
        for (int k = 0; k < columns; k++) largest = larger_of(__builtin_fabsf(row[k] * inlier[k]), largest);
        step[t] = largest / most + __FLT_MIN__;
        float inverse = 1.f / step[t];
#pragma omp simd
        for (int k = 0; k < columns; k++) {
            float steps = row[k] * inlier[k] * inverse, whole = __builtin_rintf(steps);
            high[k] = whole + pins[k], low[k] = (steps - whole) * lower;
        }
    }
}

/* y [M, N] in place of the first half: (high + low / lower) * step + outliers of x times their columns of w [O, N]. */
void cairn_join_digits(float *products, const float *step, const float *x, int columns, const int64_t *outliers,
                       int count, const float *apart, int rows, int outputs, float lower) {
    for (int t = 0; t < rows; t++) {
        float *y = products + (int64_t)t * outputs, factor = step[t];
        const float *low = y + (int64_t)rows * outputs;
#pragma omp simd
        for (int n = 0; n < outputs; n++) y[n] = (y[n] + low[n] / lower) * factor;
        for (int o = 0; o < count; o++) {
            float value = x[(int64_t)t * columns + outliers[o]];
            const float *w = apart + (int64_t)o * outputs;
#pragma omp simd
            for (int n = 0; n < outputs; n++) y[n] += value * w[n];
        }
    }
}

/* Whether products of many rows of x with matrices of this type are faster here than in float32. */
int cairn_suits_many_rows(int type) {
#if defined(HAS_DOT512) && defined(__AVX512VNNI__)
    if (has_pieces(type)) return 1;
#endif
    return tiles_are_used() && has_tile_form(type);
}
