/* All layers of a text encoder for whole texts: attention to both sides, then a feed-forward with GELU, a norm behind each.
 *
 *     x = norm(x + out(attention(qkv(x))));   x = norm(x + down(gelu(up(x))))        BERT, RoBERTa
 *
 * A thread takes a few texts through all layers before it takes the next ones: threads wait for each other at the end
 * alone, and what a text needs between two layers stays in the caches of one core.
 */
#ifndef CAIRN_ENCODER_H
#define CAIRN_ENCODER_H
#include <math.h>

#include "float_tiles.h"
#include "pool.h"

#ifdef HAS_FLOAT_TILES

typedef struct {
    TiledWeights qkv, out, up, down;
    const float *attention_norm, *attention_norm_bias, *feed_norm, *feed_norm_bias;
} EncoderLayer;

typedef struct {
    const EncoderLayer *layers;
    int32_t count, hidden, inner, heads, head_dim;
    float scale, eps;
} EncoderModel;

typedef struct {
    const EncoderModel *model;
    const int32_t *bounds; /* of texts: text i has the rows bounds[i] to bounds[i + 1] */
    const int32_t (*chunks)[2]; /* the first text of each, and the first behind it */
    float *x;              /* [rows][hidden] */
    _Atomic int failed;
} Encoding;

typedef struct {
    float *qkv, *mixed, *inner, *tiles, *keys, *values, *queries, *shares;
} Scratch;

static int whole_tiles(int rows) { return (rows + SIDE - 1) / SIDE * SIDE; }

/* shares[key][8 queries] = softmax over the keys, without the division; returns the sums of 8 queries. */
static float32x4x2_t softmax(float *shares, int keys, float scale) {
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
    return (float32x4x2_t){{sum0, sum1}};
}

/* 8 queries of one head against all keys of their text. Scores are computed transposed, [key][8 queries]: the softmax
 * needs no sums across a register then, and its result is a tile as the second product reads it. */
static void attend_eight(const EncoderModel *m, const Scratch *s, int query, int length, float *out) {
    const int width = m->head_dim, rows = length - query < SIDE ? length - query : SIDE;
    for (int k = 0; k < length; k += SIDE) {
        Four sums[SIDE][2];
        memset(sums, 0, sizeof sums);
        multiply(width, s->keys + (int64_t)k * width, s->queries + (int64_t)query * width, sums);
        for (int r = 0; r < SIDE; r++)
            vst1q_f32(s->shares + (k + r) * SIDE, sums[r][0]), vst1q_f32(s->shares + (k + r) * SIDE + 4, sums[r][1]);
    }
    const float32x4x2_t total = softmax(s->shares, length, m->scale);
    float sum[SIDE];
    vst1q_f32_x2(sum, total);
    for (int c = 0; c < width; c += SIDE) {
        Four sums[SIDE][2];
        memset(sums, 0, sizeof sums);
        multiply(length, s->shares, s->values + (int64_t)c * length, sums);
        for (int r = 0; r < rows; r++) {
            float *at = out + (int64_t)(query + r) * m->heads * width + c;
            vst1q_f32(at, vmulq_n_f32(sums[r][0], 1.f / sum[r]));
            vst1q_f32(at + 4, vmulq_n_f32(sums[r][1], 1.f / sum[r]));
        }
    }
}

/* One text: qkv [length][3 * heads * head_dim] -> out [length][heads * head_dim]. */
static void attention(const EncoderModel *m, const float *qkv, int length, const Scratch *s, float *out) {
    const int width = m->head_dim, joined = m->heads * width;
    const int64_t stride = 3 * (int64_t)joined;
    for (int head = 0; head < m->heads; head++) {
        const float *q = qkv + head * width, *k = q + joined, *v = k + joined;
        to_tiles(q, stride, length, width, s->queries);
        to_tiles(k, stride, length, width, s->keys);
        for (int c = 0; c < width; c += SIDE)
            for (int t = 0; t < length; t++)
                memcpy(s->values + ((int64_t)c * length + t * SIDE), v + t * stride + c, sizeof(float) * SIDE);
        for (int query = 0; query < length; query += SIDE) attend_eight(m, s, query, length, out + head * width);
    }
}

static void layer(const EncoderModel *m, const EncoderLayer *l, const int32_t *bounds, int texts, float *x, const Scratch *s) {
    const int joined = m->heads * m->head_dim, rows = bounds[texts] - bounds[0];
    for (int t = 0; t < rows; t += BLOCK) {
        const int block = rows - t < BLOCK ? rows - t : BLOCK;
        product(&l->qkv, x + (int64_t)t * m->hidden, m->hidden, block, s->qkv + (int64_t)t * 3 * joined, 0, s->tiles);
    }
    for (int i = 0; i < texts; i++) {
        const int64_t first = bounds[i] - bounds[0];
        attention(m, s->qkv + first * 3 * joined, bounds[i + 1] - bounds[i], s, s->mixed + first * joined);
    }
    for (int t = 0; t < rows; t += BLOCK) {
        const int block = rows - t < BLOCK ? rows - t : BLOCK;
        float *at = x + (int64_t)t * m->hidden;
        product(&l->out, s->mixed + (int64_t)t * joined, joined, block, at, 1, s->tiles);
        layer_norm(at, block, m->hidden, l->attention_norm, l->attention_norm_bias, m->eps);
        product(&l->up, at, m->hidden, block, s->inner, 0, s->tiles);
        gelu(s->inner, (int64_t)block * m->inner);
        product(&l->down, s->inner, m->inner, block, at, 1, s->tiles);
        layer_norm(at, block, m->hidden, l->feed_norm, l->feed_norm_bias, m->eps);
    }
}

static float *part_of(float **memory, int64_t count) {
    float *at = *memory;
    *memory += (count + 15) / 16 * 16; /* lines of the cache */
    return at;
}

static void encode_chunk(void *given, int chunk) {
    Encoding *e = given;
    const EncoderModel *m = e->model;
    const int first = e->chunks[chunk][0], texts = e->chunks[chunk][1] - first, joined = m->heads * m->head_dim;
    const int32_t *bounds = e->bounds + first;
    const int rows = bounds[texts] - bounds[0];
    int longest = 0;
    for (int i = 0; i < texts; i++)
        if (bounds[i + 1] - bounds[i] > longest) longest = bounds[i + 1] - bounds[i];
    longest = whole_tiles(longest);
    const int64_t per_head = (int64_t)longest * m->head_dim;
    const int64_t count = (int64_t)rows * 4 * joined + BLOCK * (int64_t)(m->inner + DEPTH) + 3 * per_head + longest * SIDE;
    void *memory;
    if (posix_memalign(&memory, 64, sizeof(float) * (size_t)(count + 8 * 16))) {
        atomic_store(&e->failed, 1);
        return;
    }
    float *rest = memory;
    Scratch s;
    s.qkv = part_of(&rest, (int64_t)rows * 3 * joined), s.mixed = part_of(&rest, (int64_t)rows * joined);
    s.inner = part_of(&rest, BLOCK * (int64_t)m->inner), s.tiles = part_of(&rest, BLOCK * DEPTH);
    s.keys = part_of(&rest, per_head), s.values = part_of(&rest, per_head), s.queries = part_of(&rest, per_head);
    s.shares = part_of(&rest, longest * SIDE);
    float *x = e->x + (int64_t)bounds[0] * m->hidden;
    for (int i = 0; i < m->count; i++) layer(m, &m->layers[i], bounds, texts, x, &s);
    free(memory);
}

/* x [rows][hidden] in place; -1: there is no memory. */
int cairn_encode(Pool *pool, const EncoderModel *model, const int32_t *bounds, const int32_t (*chunks)[2], int count,
                 float *x) {
    Encoding e = {model, bounds, chunks, x, 0};
    run(pool, encode_chunk, &e, count);
    return atomic_load(&e.failed) ? -1 : 0;
}

#endif
#endif
