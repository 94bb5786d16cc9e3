/* Attention of sequences with one token each over keys and values in pages, from the joined projection to the output.
 *
 *     qkv [T, heads + 2 kv_heads, size] -norm, rotate-> q, k    k, v -> their slots    q . k -softmax-> v -> out [T, H * C]
 *
 * All keys are stored before anybody attends: a sequence may read pages that another fills in the same step. A head of
 * keys with all its queries is one chunk of work; keys are read in blocks of KEYS with a running maximum, in an order that
 * depends on the sequence alone. Plain C that compilers vectorise; numbers are float32.
 */
#ifndef CAIRN_ATTENTION_H
#define CAIRN_ATTENTION_H

#include <math.h>
#include <string.h>

#include "pool.h"

#define KEYS 32 /* whose scores are computed before they are used */

/* Heads of one layer; the same for every step. */
typedef struct {
    int32_t heads, kv_heads, size, window; /* window 0: all keys are seen */
    float scale, eps;
    const float *norm; /* [heads + kv_heads, size], or NULL */
} Heads;

/* Sequences of one step in one cache group. */
typedef struct {
    const int32_t *slots, *lengths, *tables; /* [T], [T], [T, pages] */
    int32_t count, page_size;
    int64_t table_stride;
} Sequences;

typedef struct {
    const Heads *heads;
    const Sequences *sequences;
    float *qkv, *keys, *values;  /* keys and values by slot: [slots, kv_heads, size] */
    const float *cosine, *sine;  /* [T, size], or NULL; the sine of the lower half is negative */
    float *out;
} Attention;

/* exp(x) of x <= 0 within 2 units in the last place; vectorises, which the library's does not. */
static inline float power_of_e(float x) {
    x = x < -87.f ? -87.f : x;
    float whole = __builtin_rintf(x * 1.44269504f);
    float rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    float sum = 1.f / 720;
    sum = sum * rest + 1.f / 120;
    sum = sum * rest + 1.f / 24;
    sum = sum * rest + 1.f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.f;
    sum = sum * rest + 1.f;
    union { int32_t bits; float value; } scale = {.bits = ((int32_t)whole + 127) << 23};
    return sum * scale.value;
}

/* A head of q or k, normed and rotated. */
static void placed_head(const Attention *a, int token, int head, float factor, float *restrict to) {
    const Heads *h = a->heads;
    const int size = h->size, half = size / 2, every = h->heads + 2 * h->kv_heads;
    const float *restrict from = a->qkv + ((int64_t)token * every + head) * size;
    float squares = 0;
    if (h->norm) {
        const float *restrict weight = h->norm + (int64_t)head * size;
#pragma omp simd reduction(+ : squares)
        for (int k = 0; k < size; k++) squares += from[k] * from[k];
        const float inverse = 1.f / sqrtf(squares / (float)size + h->eps);
        for (int k = 0; k < size; k++) to[k] = from[k] * inverse * weight[k] * factor;
    } else
        for (int k = 0; k < size; k++) to[k] = from[k] * factor;
    if (!a->cosine) return;
    const float *restrict cosine = a->cosine + (int64_t)token * size, *restrict sine = a->sine + (int64_t)token * size;
    for (int k = 0; k < half; k++) {
        const float low = to[k], high = to[half + k];
        to[k] = low * cosine[k] + high * sine[k];
        to[half + k] = high * cosine[half + k] + low * sine[half + k];
    }
}

static void store_token(const Attention *a, int token) {
    const Heads *h = a->heads;
    const int32_t slot = a->sequences->slots[token];
    const int64_t width = (int64_t)h->kv_heads * h->size, at = width * (slot < 0 ? 0 : slot); /* padding: the null page */
    const int every = h->heads + 2 * h->kv_heads;
    for (int head = 0; head < h->kv_heads; head++)
        placed_head(a, token, h->heads + head, 1.f, a->keys + at + (int64_t)head * h->size);
    const float *values = a->qkv + ((int64_t)token * every + h->heads + h->kv_heads) * h->size;
    memcpy(a->values + at, values, sizeof(float) * (size_t)width);
}

/* What the queries of one head have summed up so far. */
typedef struct {
    float *sum;            /* [queries, size]: values, weighted */
    float *largest, *total; /* [queries] */
} Running;

static inline float dot_of_floats(const float *restrict a, const float *restrict b, int size) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int k = 0; k < size; k++) sum += a[k] * b[k];
    return sum;
}

/* `count` keys, at `offset` floats each. */
static void attend_block(const Attention *a, const float *q, int queries, const int64_t *offset, int count, Running r) {
    const int size = a->heads->size;
    for (int g = 0; g < queries; g++) {
        float score[KEYS], top = r.largest[g], total = 0, *restrict sum = r.sum + (int64_t)g * size;
        for (int n = 0; n < count; n++) score[n] = dot_of_floats(q + (int64_t)g * size, a->keys + offset[n], size);
        for (int n = 0; n < count; n++) top = score[n] > top ? score[n] : top;
        for (int n = count; n < KEYS; n++) score[n] = -INFINITY;
        const float before = power_of_e(r.largest[g] - top);
#pragma omp simd reduction(+ : total)
        for (int n = 0; n < KEYS; n++) total += score[n] = score[n] < -1e30f ? 0.f : power_of_e(score[n] - top);
        for (int k = 0; k < size; k++) sum[k] *= before;
        for (int n = 0; n < count; n++) {
            const float *restrict value = a->values + offset[n], weight = score[n];
#pragma omp simd
            for (int k = 0; k < size; k++) sum[k] += weight * value[k];
        }
        r.largest[g] = top, r.total[g] = r.total[g] * before + total;
    }
}

/* One head of keys of one sequence, with all its queries. */
static void attend_head(void *given, int chunk) {
    const Attention *a = given;
    const Heads *h = a->heads;
    const Sequences *s = a->sequences;
    const int token = chunk / h->kv_heads, head = chunk % h->kv_heads, queries = h->heads / h->kv_heads, size = h->size;
    const int32_t length = s->lengths[token], *table = s->tables + s->table_stride * token;
    float q[queries * size], sum[queries * size], largest[queries], total[queries];
    for (int g = 0; g < queries; g++) {
        placed_head(a, token, head * queries + g, h->scale, q + (int64_t)g * size);
        largest[g] = -1e30f, total[g] = 0;
    }
    memset(sum, 0, sizeof sum);
    const int first = h->window && length > h->window ? length - h->window : 0;
    for (int start = first; start < length; start += KEYS) {
        const int count = length - start < KEYS ? length - start : KEYS;
        int64_t offset[KEYS];
        for (int n = 0; n < count; n++) {
            const int64_t slot = (int64_t)table[(start + n) / s->page_size] * s->page_size + (start + n) % s->page_size;
            offset[n] = (slot * h->kv_heads + head) * size;
        }
        attend_block(a, q, queries, offset, count, (Running){sum, largest, total});
    }
    float *out = a->out + ((int64_t)token * h->heads + (int64_t)head * queries) * size;
    for (int g = 0; g < queries; g++) {
        const float inverse = total[g] > 0 ? 1.f / total[g] : 0.f; /* padding has no keys */
        for (int k = 0; k < size; k++) out[(int64_t)g * size + k] = sum[(int64_t)g * size + k] * inverse;
    }
}

/* Store keys and values of a step's tokens, and attend: out [T, heads * size]. */
void cairn_attend(Pool *pool, const Heads *heads, const Sequences *sequences, float *qkv, float *keys, float *values,
                  const float *cosine, const float *sine, float *out) {
    Attention attention = {heads, sequences, qkv, keys, values, cosine, sine, out};
    for (int token = 0; token < sequences->count; token++) store_token(&attention, token);
    run(pool, attend_head, &attention, sequences->count * heads->kv_heads);
}

#endif
