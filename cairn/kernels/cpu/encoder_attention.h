/* Attention of whole texts or windows of sound to themselves, one head at a time, by one thread.
 *
 *     queries, keys, values  --tiles-->  scores [key][queries]  --softmax over keys-->  shares  --times values-->  out
 *
 * Scores are computed transposed: the softmax needs no sums across a register then, and its result is a tile as the
 * second product reads it. In 16 bits scores and shares are rounded; exponentials and their sums are in float32.
 */
#ifndef CAIRN_ENCODER_ATTENTION_H
#define CAIRN_ENCODER_ATTENTION_H
#include "half_tiles.h"

#ifdef HAS_FLOAT_TILES

/* Heads of a layer, and the memory of one thread: of keys, values and queries as many rows as `whole_tiles` says. */
typedef struct {
    int heads, width;
    float scale;
    float *keys, *values, *queries, *shares, *room; /* room: 16 * width */
} HeadTiles;

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

/* 8 queries of one head against all keys of their text. */
static void attend_eight(const HeadTiles *h, int query, int length, float *out) {
    const int width = h->width, rows = length - query < SIDE ? length - query : SIDE;
    for (int k = 0; k < length; k += SIDE) {
        Four tile[SIDE][2];
        clear(tile);
        multiply(width, h->keys + (int64_t)k * width, h->queries + (int64_t)query * width, tile);
        for (int r = 0; r < SIDE; r++)
            vst1q_f32(h->shares + (k + r) * SIDE, tile[r][0]), vst1q_f32(h->shares + (k + r) * SIDE + 4, tile[r][1]);
    }
    float sums[SIDE];
    softmax(h->shares, length, h->scale, sums);
    for (int c = 0; c < width; c += SIDE) {
        Four tile[SIDE][2];
        clear(tile);
        multiply(length, h->shares, h->values + (int64_t)c * length, tile);
        for (int r = 0; r < SIDE; r++) { /* as often as the compiler knows: else the tile lies in memory */
            if (r >= rows) break;
            float *at = out + (int64_t)(query + r) * h->heads * width + c;
            vst1q_f32(at, vmulq_n_f32(tile[r][0], 1.f / sums[r])), vst1q_f32(at + 4, vmulq_n_f32(tile[r][1], 1.f / sums[r]));
        }
    }
}

/* One head of one text: qkv [length][3 * heads * width] -> out [length][heads * width]. */
static void attend_floats(const HeadTiles *h, const float *qkv, int head, int length, float *out) {
    const int width = h->width, joined = h->heads * width;
    const int64_t stride = 3 * (int64_t)joined;
    const float *q = qkv + head * width, *k = q + joined, *v = k + joined;
    to_tiles(q, stride, length, width, h->queries);
    to_tiles(k, stride, length, width, h->keys);
    for (int c = 0; c < width; c += SIDE)
        for (int t = 0; t < length; t++)
            memcpy(h->values + ((int64_t)c * length + t * SIDE), v + t * stride + c, sizeof(float) * SIDE);
    for (int query = 0; query < length; query += SIDE) attend_eight(h, query, length, out + head * width);
}

#ifdef HAS_HALF_TILES

/* As `softmax`, of 16 queries and in 16 bits. */
static void softmax_half(float16_t *shares, int keys, float scale, float sums[HALF_SIDE]) {
    float16x8_t most[2] = {vdupq_n_f16(-INFINITY), vdupq_n_f16(-INFINITY)};
    for (int k = 0; k < keys; k++)
        for (int i = 0; i < 2; i++) most[i] = vmaxq_f16(most[i], vld1q_f16(shares + k * HALF_SIDE + 8 * i));
    for (int i = 0; i < 2; i++) {
        Four low = vdupq_n_f32(0.f), high = low;
        for (int k = 0; k < keys; k++) {
            float16_t *at = shares + k * HALF_SIDE + 8 * i;
            const float16x8_t below = vsubq_f16(vld1q_f16(at), most[i]);
            const Four e0 = exponential(vmulq_n_f32(vcvt_f32_f16(vget_low_f16(below)), scale));
            const Four e1 = exponential(vmulq_n_f32(vcvt_high_f32_f16(below), scale));
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
