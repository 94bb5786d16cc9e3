/* Attention of whole texts or windows of sound to themselves, one head at a time, by one thread.
 *
 *     queries, keys, values  --tiles-->  scores [key][queries]  --softmax over keys-->  shares  --times values-->  out
 *
 * Scores are computed transposed: the softmax needs no sums across a register then, and its result is a tile as the
 * second product reads it. Where 16 bits are multiplied scores and shares are rounded; exponentials and their sums are in
 * float32.
 */
#ifndef CAIRN_ENCODER_ATTENTION_H
#define CAIRN_ENCODER_ATTENTION_H
#include "half_tiles.h"

#ifdef HAS_VECTORS

/* Heads of a layer, and the memory of one thread: of keys, values and queries as many rows as `whole_tiles` says. */
typedef struct {
    int heads, width;
    float scale;
    float *keys, *values, *queries, *shares, *room; /* room: 16 * width */
} HeadTiles;

/* shares[key][PANEL queries] = exp of the scores less the largest; `sums` of them over the keys. `vecs` is a constant. */
INLINE void softmax_of(const int vecs, float *shares, int keys, float scale, float sums[PANEL]) {
    Vec most[2], sum[2];
    for (int v = 0; v < vecs; v++) most[v] = vec_all(-INFINITY), sum[v] = vec_all(0.f);
    for (int k = 0; k < keys; k++)
        for (int v = 0; v < vecs; v++) most[v] = vec_max(most[v], vec_load(shares + k * PANEL + v * LANES));
    for (int k = 0; k < keys; k++)
        for (int v = 0; v < vecs; v++) {
            float *at = shares + k * PANEL + v * LANES;
            const Vec e = exponential((vec_load(at) - most[v]) * vec_all(scale));
            sum[v] = sum[v] + e;
            vec_store(at, e);
        }
    for (int v = 0; v < vecs; v++) vec_store(sums + v * LANES, sum[v]);
}

/* A panel of queries of one head against all keys of their text; `out` begins at the first of them. */
static void attend_panel(const HeadTiles *h, Left keys, int query, int length, float *out) {
    const int width = h->width, rows = length - query < PANEL ? length - query : PANEL;
    const float *queries = h->queries + (int64_t)query * width;
    for (int k = 0; k < length; k += TILE_ROWS) {
        const Target to = {h->shares + (int64_t)k * PANEL, PANEL, NULL, NULL, 0};
        tile(rows_from(keys, k), length - k, rows, width, queries, apart_of(width), &to);
    }
    float sums[PANEL], inverse[PANEL];
    if (PANEL > SIDE && rows <= SIDE) softmax_of(1, h->shares, length, h->scale, sums);
    else softmax_of(2, h->shares, length, h->scale, sums);
    for (int r = 0; r < rows; r++) inverse[r] = 1.f / sums[r];
    const int64_t stride = (int64_t)h->heads * width;
    for (int c = 0; c < width; c += PANEL)
        for (int r = 0; r < rows; r += TILE_ROWS) {
            const Target to = {out + r * stride + c, stride, NULL, inverse + r, 0};
            const Left shares = {h->shares + r, 1, PANEL};
            tile(shares, rows - r, width - c, length, h->values + (int64_t)c * length, apart_of(length), &to);
        }
}

/* One head of one text: qkv [length][3 * heads * width] -> out [length][heads * width]. */
static void attend_floats(const HeadTiles *h, const float *qkv, int head, int length, float *out) {
    const int width = h->width, joined = h->heads * width;
    const int64_t stride = 3 * (int64_t)joined;
    const float *q = qkv + head * width, *k = q + joined, *v = k + joined;
    to_tiles(q, stride, length, width, h->queries);
    const Left keys = packed_rows(k, stride, length, width, h->keys);
    for (int c = 0; c < width; c += SIDE)
        for (int t = 0; t < length; t++)
            memcpy(h->values + ((int64_t)c * length + t * SIDE), v + t * stride + c, sizeof(float) * SIDE);
    for (int query = 0; query < length; query += PANEL)
        attend_panel(h, keys, query, length, out + (int64_t)query * joined + head * width);
}

#ifdef HAS_HALF_PRODUCTS

/* As `softmax`, of 16 queries and in 16 bits. */
static void softmax_half(float16_t *shares, int keys, float scale, float sums[HALF_SIDE]) {
    float16x8_t most[2] = {vdupq_n_f16(-INFINITY), vdupq_n_f16(-INFINITY)};
    for (int k = 0; k < keys; k++)
        for (int i = 0; i < 2; i++) most[i] = vmaxq_f16(most[i], vld1q_f16(shares + k * HALF_SIDE + 8 * i));
    for (int i = 0; i < 2; i++) {
        Vec low = vdupq_n_f32(0.f), high = low;
        for (int k = 0; k < keys; k++) {
            float16_t *at = shares + k * HALF_SIDE + 8 * i;
            const float16x8_t below = vsubq_f16(vld1q_f16(at), most[i]);
            const Vec e0 = exponential(vmulq_n_f32(vcvt_f32_f16(vget_low_f16(below)), scale));
            const Vec e1 = exponential(vmulq_n_f32(vcvt_high_f32_f16(below), scale));
            low = vaddq_f32(low, e0), high = vaddq_f32(high, e1);
            vst1q_f16(at, vcvt_high_f16_f32(vcvt_f16_f32(e0), e1));
        }
        vst1q_f32(sums + 8 * i, low), vst1q_f32(sums + 8 * i + 4, high);
    }
}

/* 16 queries of one head against all keys; `out` begins at the first of them. */
static void attend_sixteen(const HeadTiles *h, const float16_t *queries, int rows, int length, float *out) {
    const float16_t *keys = (const float16_t *)h->keys, *values = (const float16_t *)h->values;
    float16_t *shares = (float16_t *)h->shares;
    const int width = h->width, stride = h->heads * width;
    for (int k = 0; k < length; k += SIDE)
        multiply_half(width, keys + (int64_t)k * width, SIDE, queries, (float16_t(*)[HALF_SIDE])(shares + k * HALF_SIDE));
    float sums[HALF_SIDE];
    softmax_half(shares, length, h->scale, sums);
    for (int at = 0; at < length; at += HALF_DEPTH)
        for (int c = 0; c < width; c += HALF_SIDE)
            for (int first = 0; first < rows; first += SIDE) {
                const int depth = length - at < HALF_DEPTH ? length - at : HALF_DEPTH, left = rows - first < SIDE ? rows - first : SIDE;
                HalfTile tile;
                multiply_half(depth, shares + at * HALF_SIDE + first, HALF_SIDE, values + ((int64_t)c * length + at * HALF_SIDE), tile);
                store_half(tile, NULL, left, out + (int64_t)first * stride + c, stride, at > 0);
            }
    for (int r = 0; r < rows; r++, out += stride)
        for (int c = 0; c < width; c += 4) vst1q_f32(out + c, vmulq_n_f32(vld1q_f32(out + c), 1.f / sums[r]));
}

/* As `attend_floats`, in 16 bits. */
static void attend_halves(const HeadTiles *h, const float *qkv, int head, int length, float *out) {
    const int width = h->width, joined = h->heads * width;
    const int64_t stride = 3 * (int64_t)joined;
    const float *q = qkv + head * width, *k = q + joined, *v = k + joined;
    float16_t *queries = (float16_t *)h->queries, *values = (float16_t *)h->values;
    to_wide_half(q, stride, length, width, queries, h->room);
    to_tiles(k, stride, length, width, h->keys);
    to_half(h->keys, length, width);
    for (int c = 0; c < width; c += HALF_SIDE)
        for (int t = 0; t < length; t++, values += HALF_SIDE) {
            vst1q_f16(values, halves_of(v + t * stride + c));
            vst1q_f16(values + 8, halves_of(v + t * stride + c + 8));
        }
    for (int query = 0; query < length; query += HALF_SIDE) {
        const int rows = length - query < HALF_SIDE ? length - query : HALF_SIDE;
        attend_sixteen(h, queries + (int64_t)query * width, rows, length, out + (int64_t)query * joined + head * width);
    }
}

#endif
#endif
#endif
