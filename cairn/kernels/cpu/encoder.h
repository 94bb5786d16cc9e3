/* All layers of an encoder of whole texts or windows of sound: attention to both sides, then a feed-forward with GELU.
 *
 *     post   x = norm(x + out(attention(qkv(x))));   x = norm(x + down(gelu(up(x))))        BERT, RoBERTa
 *     pre    x = x + out(attention(qkv(norm(x))));   x = x + down(gelu(up(norm(x))))        Whisper
 *
 * Of many texts a thread takes a few through all layers before it takes the next ones: threads wait for each other at
 * the end alone, and what lies between two layers stays in the caches of one core. Of few texts the threads share each
 * layer, by blocks of rows and by heads.
 */
#ifndef CAIRN_ENCODER_H
#define CAIRN_ENCODER_H
#include <math.h>

#include "encoder_attention.h"
#include "pool.h"

#ifdef HAS_VECTORS

typedef struct {
    TiledWeights qkv, out, up, down;
    const float *attention_norm, *attention_norm_bias, *feed_norm, *feed_norm_bias;
} EncoderLayer;

typedef struct {
    const EncoderLayer *layers;
    int32_t count, hidden, inner, heads, head_dim, is_pre, is_half;
    float scale, eps;
} EncoderModel;

typedef struct {
    const EncoderModel *model;
    const int32_t *bounds;      /* of texts: text i has the rows bounds[i] to bounds[i + 1] */
    const int32_t (*chunks)[2]; /* the first text of each, and the first behind it */
    float *x;                   /* [rows][hidden] */
    float *qkv, *mixed;         /* of all rows, where threads share a layer */
    const EncoderLayer *layer;
    int rows, longest; /* in all; of a text */
    _Atomic int failed;
} Encoding;

/* What one thread needs besides. */
typedef struct {
    float *tiles, *normed, *inner;
    HeadTiles heads;
} Scratch;

static float *part_of(float **memory, int64_t count) {
    float *at = *memory;
    *memory += (count + 15) / 16 * 16; /* lines of the cache */
    return at;
}

/* The memory to give back afterwards, or NULL; `longest` is of the texts that are attended to. */
static void *scratch_of(const EncoderModel *m, int longest, Scratch *s) {
    const int64_t keys = whole_tiles(longest), per_head = keys * m->head_dim, wide = 16 * m->head_dim;
    const int64_t count = BLOCK * (int64_t)(DEPTH + m->hidden + m->inner) + 3 * per_head + keys * PANEL + wide + 8 * 16;
    void *memory;
    if (posix_memalign(&memory, 64, sizeof(float) * (size_t)count)) return NULL;
    float *rest = memory;
    s->tiles = part_of(&rest, BLOCK * DEPTH), s->normed = part_of(&rest, BLOCK * (int64_t)m->hidden);
    s->inner = part_of(&rest, BLOCK * (int64_t)m->inner);
    HeadTiles *h = &s->heads;
    h->heads = m->heads, h->width = m->head_dim, h->scale = m->scale;
    h->shares = part_of(&rest, keys * PANEL), h->room = part_of(&rest, wide);
    h->keys = part_of(&rest, per_head), h->values = part_of(&rest, per_head), h->queries = part_of(&rest, per_head);
    return memory;
}

static void multiplied(int is_half, const TiledWeights *w, const float *x, int64_t stride, int rows, float *y, int onto, float *tiles) {
#ifdef HAS_HALF
    if (is_half) {
        half_product(w, x, stride, rows, y, onto, tiles);
        return;
    }
#endif
    (void)is_half;
    product(w, x, stride, rows, y, onto, tiles);
}

static void attend(const EncoderModel *m, const float *qkv, int head, int length, const Scratch *s, float *out) {
#ifdef HAS_HALF_PRODUCTS
    if (m->is_half) {
        attend_halves(&s->heads, qkv, head, length, out);
        return;
    }
#endif
    (void)m;
    attend_floats(&s->heads, qkv, head, length, out);
}

/* Of at most BLOCK rows: what stands before attention, and what stands behind it. */
static void before(const EncoderModel *m, const EncoderLayer *l, const float *x, int rows, float *qkv, const Scratch *s) {
    if (m->is_pre) {
        layer_norm(x, s->normed, rows, m->hidden, l->attention_norm, l->attention_norm_bias, m->eps);
        x = s->normed;
    }
    multiplied(m->is_half, &l->qkv, x, m->hidden, rows, qkv, 0, s->tiles);
}

static void behind(const EncoderModel *m, const EncoderLayer *l, const float *mixed, int rows, float *x, const Scratch *s) {
    float *normed = m->is_pre ? s->normed : x;
    multiplied(m->is_half, &l->out, mixed, l->out.depth, rows, x, 1, s->tiles);
    if (m->is_pre) layer_norm(x, normed, rows, m->hidden, l->feed_norm, l->feed_norm_bias, m->eps);
    else layer_norm(x, x, rows, m->hidden, l->attention_norm, l->attention_norm_bias, m->eps);
    multiplied(m->is_half, &l->up, normed, m->hidden, rows, s->inner, 0, s->tiles);
    gelu(s->inner, (int64_t)rows * m->inner);
    multiplied(m->is_half, &l->down, s->inner, m->inner, rows, x, 1, s->tiles);
    if (!m->is_pre) layer_norm(x, x, rows, m->hidden, l->feed_norm, l->feed_norm_bias, m->eps);
}

static int block_at(int row, int rows) { return rows - row < BLOCK ? rows - row : BLOCK; }

/* -- many texts: one thread, all layers ---------------------------------------------------------------------------- */

static void encode_chunk(void *given, int chunk) {
    Encoding *e = given;
    const EncoderModel *m = e->model;
    const int first = e->chunks[chunk][0], texts = e->chunks[chunk][1] - first, joined = m->heads * m->head_dim;
    const int32_t *bounds = e->bounds + first;
    const int rows = bounds[texts] - bounds[0];
    Scratch s;
    void *memory = scratch_of(m, e->longest, &s);
    float *qkv = malloc(sizeof(float) * (size_t)rows * 4 * (size_t)joined), *mixed = qkv + (int64_t)rows * 3 * joined;
    if (!memory || !qkv) atomic_store(&e->failed, 1);
    float *x = e->x + (int64_t)bounds[0] * m->hidden;
    for (int i = 0; memory && qkv && i < m->count; i++) {
        const EncoderLayer *l = &m->layers[i];
        for (int t = 0; t < rows; t += BLOCK)
            before(m, l, x + (int64_t)t * m->hidden, block_at(t, rows), qkv + (int64_t)t * 3 * joined, &s);
        for (int text = 0; text < texts; text++) {
            const int64_t at = bounds[text] - bounds[0];
            for (int head = 0; head < m->heads; head++)
                attend(m, qkv + at * 3 * joined, head, bounds[text + 1] - bounds[text], &s, mixed + at * joined);
        }
        for (int t = 0; t < rows; t += BLOCK)
            behind(m, l, mixed + (int64_t)t * joined, block_at(t, rows), x + (int64_t)t * m->hidden, &s);
    }
    free(qkv), free(memory);
}

/* -- few texts: all threads, one layer ------------------------------------------------------------------------------ */

static void shared_before(void *given, int chunk) {
    Encoding *e = given;
    Scratch s;
    void *memory = scratch_of(e->model, 0, &s);
    const int64_t t = (int64_t)chunk * BLOCK, joined = e->model->heads * e->model->head_dim;
    if (memory) before(e->model, e->layer, e->x + t * e->model->hidden, block_at((int)t, e->rows), e->qkv + t * 3 * joined, &s);
    else atomic_store(&e->failed, 1);
    free(memory);
}

static void shared_attend(void *given, int chunk) {
    Encoding *e = given;
    Scratch s;
    void *memory = scratch_of(e->model, e->longest, &s);
    const int text = chunk / e->model->heads, head = chunk % e->model->heads;
    const int64_t t = e->bounds[text], joined = e->model->heads * e->model->head_dim;
    const int length = e->bounds[text + 1] - e->bounds[text];
    if (memory) attend(e->model, e->qkv + t * 3 * joined, head, length, &s, e->mixed + t * joined);
    else atomic_store(&e->failed, 1);
    free(memory);
}

static void shared_behind(void *given, int chunk) {
    Encoding *e = given;
    Scratch s;
    void *memory = scratch_of(e->model, 0, &s);
    const int64_t t = (int64_t)chunk * BLOCK, joined = e->model->heads * e->model->head_dim;
    if (memory) behind(e->model, e->layer, e->mixed + t * joined, block_at((int)t, e->rows), e->x + t * e->model->hidden, &s);
    else atomic_store(&e->failed, 1);
    free(memory);
}

static void encode_together(Pool *pool, Encoding *e, int texts) {
    const EncoderModel *m = e->model;
    const size_t joined = (size_t)m->heads * (size_t)m->head_dim;
    const int blocks = (e->rows + BLOCK - 1) / BLOCK;
    e->qkv = malloc(sizeof(float) * (size_t)e->rows * 4 * joined);
    if (!e->qkv) atomic_store(&e->failed, 1);
    e->mixed = e->qkv + (size_t)e->rows * 3 * joined;
    for (int i = 0; !atomic_load(&e->failed) && i < m->count; i++) {
        e->layer = &m->layers[i];
        run(pool, shared_before, e, blocks);
        run(pool, shared_attend, e, texts * m->heads);
        run(pool, shared_behind, e, blocks);
    }
    free(e->qkv);
}

/* -- one product: all threads --------------------------------------------------------------------------------------- */

typedef struct {
    const TiledWeights *w;
    const float *x;
    float *y;
    int64_t stride; /* of x: rows may overlap, as those of a convolution do */
    int is_half, rows, gelu;
    _Atomic int failed;
} AffineWork;

static void affine_block(void *given, int chunk) {
    AffineWork *a = given;
    const int64_t t = (int64_t)chunk * BLOCK;
    const int rows = block_at((int)t, a->rows);
    float *tiles = malloc(sizeof(float) * BLOCK * DEPTH), *y = a->y + t * a->w->columns;
    if (!tiles) atomic_store(&a->failed, 1);
    else {
        multiplied(a->is_half, a->w, a->x + t * a->stride, a->stride, rows, y, 0, tiles);
        if (a->gelu) gelu(y, (int64_t)rows * a->w->columns);
    }
    free(tiles);
}

/* -- from Python ------------------------------------------------------------------------------------------------------ */

/* Columns of weights that lie together, of float32 or of 16 bits; 0: there are no kernels for them. */
int cairn_tile_side(int is_half) {
#ifdef HAS_HALF
    if (is_half) return HALF_SIDE;
#endif
    return is_half ? 0 : SIDE;
}

/* y [rows][columns] = x @ weights.T + bias, or its GELU; -1: there is no memory. */
int cairn_affine(Pool *pool, const TiledWeights *weights, int is_half, const float *x, int64_t stride, int rows, int gelu, float *y) {
    AffineWork work = {.w = weights, .x = x, .y = y, .stride = stride, .is_half = is_half, .rows = rows, .gelu = gelu};
    run(pool, affine_block, &work, (rows + BLOCK - 1) / BLOCK);
    return atomic_load(&work.failed) ? -1 : 0;
}

/* x [rows][hidden] in place; -1: there is no memory. Without chunks the threads share each layer. */
int cairn_encode(Pool *pool, const EncoderModel *model, const int32_t *bounds, int texts, const int32_t (*chunks)[2],
                 int count, float *x) {
    Encoding e = {.model = model, .bounds = bounds, .chunks = chunks, .x = x, .rows = bounds[texts]};
    for (int i = 0; i < texts; i++)
        if (bounds[i + 1] - bounds[i] > e.longest) e.longest = bounds[i + 1] - bounds[i];
    if (count) run(pool, encode_chunk, &e, count);
    else encode_together(pool, &e, texts);
    return atomic_load(&e.failed) ? -1 : 0;
}

#endif
#endif
