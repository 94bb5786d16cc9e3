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

#include "half_tiles.h"
#include "pool.h"

#ifdef HAS_FLOAT_TILES

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

/* What one thread needs besides; `longest` is of the texts that it attends to. */
typedef struct {
    float *tiles, *normed, *inner, *keys, *values, *queries, *shares;
} Scratch;

static float *part_of(float **memory, int64_t count) {
    float *at = *memory;
    *memory += (count + 15) / 16 * 16; /* lines of the cache */
    return at;
}

/* The memory to give back afterwards, or NULL. */
static void *scratch_of(const EncoderModel *m, int longest, Scratch *s) {
    const int64_t keys = (longest + SIDE - 1) / SIDE * SIDE, per_head = keys * m->head_dim;
    const int64_t count = BLOCK * (int64_t)(DEPTH + m->hidden + m->inner) + 3 * per_head + keys * SIDE + 7 * 16;
    void *memory;
    if (posix_memalign(&memory, 64, sizeof(float) * (size_t)count)) return NULL;
    float *rest = memory;
    s->tiles = part_of(&rest, BLOCK * DEPTH), s->normed = part_of(&rest, BLOCK * (int64_t)m->hidden);
    s->inner = part_of(&rest, BLOCK * (int64_t)m->inner), s->shares = part_of(&rest, keys * SIDE);
    s->keys = part_of(&rest, per_head), s->values = part_of(&rest, per_head), s->queries = part_of(&rest, per_head);
    return memory;
}

static void multiplied(const EncoderModel *m, const TiledWeights *w, const float *x, int rows, float *y, int onto, float *tiles) {
#ifdef HAS_HALF_TILES
    if (m->is_half) {
        half_product(w, x, w->depth, rows, y, onto, tiles);
        return;
    }
#endif
    product(w, x, w->depth, rows, y, onto, tiles);
}

/* shares[key][8 queries] = exp of the scores less the largest; `sums` of them over the keys. */
static void softmax(float *shares, int keys, float scale, float sums[SIDE]) {
    Four most0 = vdupq_n_f32(-INFINITY), most1 = most0, sum0 = vdupq_n_f32(0.f), sum1 = sum0;
    for (int k = 0; k < keys; k++) {
        most0 = vmaxq_f32(most0, vld1q_f32(shares + k * SIDE));
        most1 = vmaxq_f32(most1, vld1q_f32(shares + k * SIDE + 4));
    }
    for (int k = 0; k < keys; k++) {
        float *at = shares + k * SIDE;
        const Four e0 = exponential(vmulq_n_f32(vsubq_f32(vld1q_f32(at), most0), scale));
        const Four e1 = exponential(vmulq_n_f32(vsubq_f32(vld1q_f32(at + 4), most1), scale));
        sum0 = vaddq_f32(sum0, e0), sum1 = vaddq_f32(sum1, e1);
        vst1q_f32(at, e0), vst1q_f32(at + 4, e1);
    }
    vst1q_f32(sums, sum0), vst1q_f32(sums + 4, sum1);
}

/* 8 queries of one head against all keys of their text. Scores are computed transposed, [key][8 queries]: the softmax
 * needs no sums across a register then, and its result is a tile as the second product reads it. */
static void attend_eight(const EncoderModel *m, const Scratch *s, int query, int length, float *out) {
    const int width = m->head_dim, rows = length - query < SIDE ? length - query : SIDE;
    for (int k = 0; k < length; k += SIDE) {
        Four tile[SIDE][2];
        clear(tile);
        multiply(width, s->keys + (int64_t)k * width, s->queries + (int64_t)query * width, tile);
        for (int r = 0; r < SIDE; r++)
            vst1q_f32(s->shares + (k + r) * SIDE, tile[r][0]), vst1q_f32(s->shares + (k + r) * SIDE + 4, tile[r][1]);
    }
    float sums[SIDE];
    softmax(s->shares, length, m->scale, sums);
    for (int c = 0; c < width; c += SIDE) {
        Four tile[SIDE][2];
        clear(tile);
        multiply(length, s->shares, s->values + (int64_t)c * length, tile);
        for (int r = 0; r < SIDE; r++) { /* as often as the compiler knows: else the tile lies in memory */
            if (r >= rows) break;
            float *at = out + (int64_t)(query + r) * m->heads * width + c;
            vst1q_f32(at, vmulq_n_f32(tile[r][0], 1.f / sums[r])), vst1q_f32(at + 4, vmulq_n_f32(tile[r][1], 1.f / sums[r]));
        }
    }
}

/* One head of one text: qkv [length][3 * heads * head_dim] -> out [length][heads * head_dim]. */
static void attend(const EncoderModel *m, const float *qkv, int head, int length, const Scratch *s, float *out) {
    const int width = m->head_dim, joined = m->heads * width;
    const int64_t stride = 3 * (int64_t)joined;
    const float *q = qkv + head * width, *k = q + joined, *v = k + joined;
    to_tiles(q, stride, length, width, s->queries);
    to_tiles(k, stride, length, width, s->keys);
    for (int c = 0; c < width; c += SIDE)
        for (int t = 0; t < length; t++)
            memcpy(s->values + ((int64_t)c * length + t * SIDE), v + t * stride + c, sizeof(float) * SIDE);
    for (int query = 0; query < length; query += SIDE) attend_eight(m, s, query, length, out + head * width);
}

/* Of at most BLOCK rows: what stands before attention, and what stands behind it. */
static void before(const EncoderModel *m, const EncoderLayer *l, const float *x, int rows, float *qkv, const Scratch *s) {
    if (m->is_pre) {
        layer_norm(x, s->normed, rows, m->hidden, l->attention_norm, l->attention_norm_bias, m->eps);
        x = s->normed;
    }
    multiplied(m, &l->qkv, x, rows, qkv, 0, s->tiles);
}

static void behind(const EncoderModel *m, const EncoderLayer *l, const float *mixed, int rows, float *x, const Scratch *s) {
    float *normed = m->is_pre ? s->normed : x;
    multiplied(m, &l->out, mixed, rows, x, 1, s->tiles);
    if (m->is_pre) layer_norm(x, normed, rows, m->hidden, l->feed_norm, l->feed_norm_bias, m->eps);
    else layer_norm(x, x, rows, m->hidden, l->attention_norm, l->attention_norm_bias, m->eps);
    multiplied(m, &l->up, normed, rows, s->inner, 0, s->tiles);
    gelu(s->inner, (int64_t)rows * m->inner);
    multiplied(m, &l->down, s->inner, rows, x, 1, s->tiles);
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

/* -- from Python ------------------------------------------------------------------------------------------------------ */

int cairn_encodes_half(void) {
#ifdef HAS_HALF_TILES
    return 1;
#else
    return 0;
#endif
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
