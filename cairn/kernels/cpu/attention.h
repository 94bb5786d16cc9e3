/* Attention of a step's tokens over keys and values in pages, from the joined projection to the output.
 *
 *     qkv [T, heads + 2 kv_heads, size] -norm, rotate-> q, k    k, v -> their slots    q . k -softmax-> v -> out [T, H * C]
 *
 * A sequence has one token, or several that see each other as far as they stand before: drafts, a piece of a prompt. All
 * keys are stored before anybody attends: a sequence may read pages that another fills in the same step. A few tokens with
 * the queries of one head of keys are one chunk of work. Keys are read in blocks of KEYS, which begin at multiples of it,
 * with a running maximum: what a token sums up and in which order depends on its own place alone, so it has the same bits
 * whether it comes alone or with others. Numbers are float32.
 */
#ifndef CAIRN_ATTENTION_H
#define CAIRN_ATTENTION_H

#include <math.h>
#include <string.h>

#include "pool.h"
#include "vectors.h"

#define KEYS 32         /* whose scores are computed before they are used */
#define TILE_TOKENS 4   /* of a sequence, that read the same keys */
#define MOST_QUERIES 64 /* of a tile with several tokens: they are on the stack */

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Heads of one layer; the same for every step. */
typedef struct {
    int32_t heads, kv_heads, size, window; /* window 0: all keys are seen */
    float scale, eps;
    const float *norm; /* [heads + kv_heads, size], or NULL */
} Heads;

/* Sequences of one step in one cache group. */
typedef struct {
    const int32_t *slots, *lengths, *tables; /* [T], [B] with the tokens of this step, [B, pages] */
    const int32_t *bounds;                   /* [B + 1]: whose tokens they are; NULL: one of each sequence */
    int32_t count, page_size;                /* B */
    int64_t table_stride;
} Sequences;

typedef struct {
    const Heads *heads;
    const Sequences *sequences;
    float *qkv, *keys, *values;  /* keys and values by slot: [slots, kv_heads, size] */
    const float *cosine, *sine;  /* [T, size], or NULL; the sine of the lower half is negative */
    float *out;
    int tile_tokens;
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

static void store_token(void *given, int token) {
    const Attention *a = given;
    const Heads *h = a->heads;
    const int32_t slot = a->sequences->slots[token];
    const int64_t width = (int64_t)h->kv_heads * h->size, at = width * (slot < 0 ? 0 : slot); /* padding: the null page */
    const int every = h->heads + 2 * h->kv_heads;
    for (int head = 0; head < h->kv_heads; head++)
        placed_head(a, token, h->heads + head, 1.f, a->keys + at + (int64_t)head * h->size);
    const float *values = a->qkv + ((int64_t)token * every + h->heads + h->kv_heads) * h->size;
    memcpy(a->values + at, values, sizeof(float) * (size_t)width);
}

static inline int larger(int a, int b) { return a > b ? a : b; }
static inline int smaller(int a, int b) { return a < b ? a : b; }

/* -- a block of keys ----------------------------------------------------------------------------------------------- */

typedef float Quarter __attribute__((vector_size(16), aligned(4), may_alias));

/* a0 + a1, a2 + a3, b0 + b1, b2 + b3 */
static inline Quarter sums_of_pairs(Quarter a, Quarter b) {
#if defined(__aarch64__)
    return vpaddq_f32(a, b);
#elif defined(__SSE3__)
    return _mm_hadd_ps(a, b);
#else
    return (Quarter){a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]};
#endif
}

#if defined(__AVX512F__) && defined(HAS_VECTORS)

/* The sums of the lanes of four vectors. */
static inline Quarter sums_of_lanes(const Lanes *v) {
    return (Quarter)four_sums((Vec)v[0], (Vec)v[1], (Vec)v[2], (Vec)v[3]);
}

#else

static inline Quarter folded(Lanes lanes) {
    Quarter part[LANES / 4];
    memcpy(part, &lanes, sizeof lanes);
    for (int count = LANES / 8; count; count /= 2)
        for (int i = 0; i < count; i++) part[i] += part[i + count];
    return part[0];
}

/* The sums of the lanes of four vectors. */
static inline Quarter sums_of_lanes(const Lanes *v) {
    return sums_of_pairs(sums_of_pairs(folded(v[0]), folded(v[1])), sums_of_pairs(folded(v[2]), folded(v[3])));
}

#endif

/* `queries`, a constant up to four, with four keys: score [queries, KEYS]. */
static inline __attribute__((always_inline)) void score_tile(const float *q, int queries, const float *const *key,
                                                             int size, float *score) {
    Lanes sum[4][4] = {0};
    const int whole = size / LANES * LANES;
    for (int k = 0; k < whole; k += LANES)
        for (int n = 0; n < 4; n++)
            for (int g = 0; g < queries; g++)
                sum[g][n] += *(const Lanes *)(q + (int64_t)g * size + k) * *(const Lanes *)(key[n] + k);
    for (int g = 0; g < queries; g++) *(Quarter *)(score + g * KEYS) = sums_of_lanes(sum[g]);
    if (whole == size) return;
    for (int g = 0; g < queries; g++)
        for (int n = 0; n < 4; n++)
            for (int k = whole; k < size; k++) score[g * KEYS + n] += q[(int64_t)g * size + k] * key[n][k];
}

/* Every query with `count` keys; those that fill up the last tile are the last key again. */
static void score_keys(const float *q, int queries, int size, const float *keys, const int64_t *offset, int count,
                        float *score) {
    for (int n = 0; n < count; n += 4) {
        const float *key[4];
        for (int i = 0; i < 4; i++) key[i] = keys + offset[n + i < count ? n + i : count - 1];
        for (int g = 0; g < queries; g += 4) {
            const float *here = q + (int64_t)g * size;
            float *found = score + g * KEYS + n;
            switch (queries - g) {
            case 1: score_tile(here, 1, key, size, found); break;
            case 2: score_tile(here, 2, key, size, found); break;
            case 3: score_tile(here, 3, key, size, found); break;
            default: score_tile(here, 4, key, size, found);
            }
        }
    }
}

/* What the queries of a tile have summed up so far, and which keys of a block each of them sees. */
typedef struct {
    float *sum;              /* [queries, size]: values, weighted */
    float *largest, *total;  /* [queries] */
    float *factor;           /* [queries]: what the sums so far count for, now that a larger score is known */
    int *from, *to;          /* [queries] */
    int queries, size;
} Running;

/* Scores [queries, KEYS] become weights; those of keys that a query does not see are 0. */
static void weigh_keys(float *score, Running r) {
    float top[r.queries];
    for (int g = 0; g < r.queries; g++) {
        float *of = score + g * KEYS, most = r.largest[g];
        for (int n = 0; n < r.from[g]; n++) of[n] = -INFINITY;
        for (int n = r.to[g]; n < KEYS; n++) of[n] = -INFINITY;
#pragma omp simd reduction(max : most)
        for (int n = 0; n < KEYS; n++) most = larger_of(of[n], most);
        top[g] = most;
    }
    for (int g = 0; g < r.queries; g++) r.factor[g] = power_of_e(r.largest[g] - top[g]), r.largest[g] = top[g];
    for (int g = 0; g < r.queries; g++) {
        float *of = score + g * KEYS, total = 0;
#pragma omp simd reduction(+ : total)
        for (int n = 0; n < KEYS; n++) {
            const float power = power_of_e(of[n] - top[g]); /* for all keys, or the loop is not vectorised */
            total += of[n] = of[n] < -1e30f ? 0.f : power;
        }
        r.total[g] = r.total[g] * r.factor[g] + total;
    }
}

/* `queries`, a constant up to four, from `g` on: sum = factor * sum + the values from..to, weighted. The sums of some
 * columns stay in registers; a query that does not see one of the keys has no weight for it. */
static inline __attribute__((always_inline)) void add_tile(Running r, int g, int queries, const float *weight, int from,
                                                           int to, const float *values, const int64_t *offset) {
    const int size = r.size, whole = size / (4 * LANES) * (4 * LANES);
    float *sum = r.sum + (int64_t)g * size;
    weight += g * KEYS;
    for (int k = 0; k < whole; k += 4 * LANES) {
        Lanes here[4][4];
        for (int q = 0; q < queries; q++)
            for (int i = 0; i < 4; i++) here[q][i] = r.factor[g + q] * *(const Lanes *)(sum + (int64_t)q * size + k + i * LANES);
        for (int n = from; n < to; n++)
            for (int i = 0; i < 4; i++) {
                const Lanes value = *(const Lanes *)(values + offset[n] + k + i * LANES);
                for (int q = 0; q < queries; q++) here[q][i] += weight[q * KEYS + n] * value;
            }
        for (int q = 0; q < queries; q++)
            for (int i = 0; i < 4; i++) *(Lanes *)(sum + (int64_t)q * size + k + i * LANES) = here[q][i];
    }
    for (int q = 0; whole < size && q < queries; q++) {
        float *restrict rest = sum + (int64_t)q * size;
        for (int c = whole; c < size; c++) rest[c] *= r.factor[g + q];
        for (int n = from; n < to; n++)
            for (int c = whole; c < size; c++) rest[c] += weight[q * KEYS + n] * values[offset[n] + c];
    }
}

static void add_values(Running r, const float *weight, const float *values, const int64_t *offset) {
    for (int g = 0; g < r.queries; g += 4) {
        int from = KEYS, to = 0;
        for (int q = g; q < r.queries && q < g + 4; q++) {
            from = smaller(from, r.from[q]);
            to = larger(to, r.to[q]);
        }
        switch (r.queries - g) {
        case 1: add_tile(r, g, 1, weight, from, to, values, offset); break;
        case 2: add_tile(r, g, 2, weight, from, to, values, offset); break;
        case 3: add_tile(r, g, 3, weight, from, to, values, offset); break;
        default: add_tile(r, g, 4, weight, from, to, values, offset);
        }
    }
}

/* -- a sequence ---------------------------------------------------------------------------------------------------- */

/* A few neighbouring tokens of a sequence. */
typedef struct {
    int sequence, token, tokens, length; /* length: keys that the first token sees, its own included */
} Tile;

static int tiles_of(const Attention *a, int sequence) {
    const int32_t *bounds = a->sequences->bounds;
    return bounds ? (bounds[sequence + 1] - bounds[sequence] + a->tile_tokens - 1) / a->tile_tokens : 1;
}

static Tile find_tile(const Attention *a, int number) {
    const Sequences *s = a->sequences;
    if (!s->bounds) return (Tile){number, number, 1, s->lengths[number]};
    int sequence = 0;
    for (int tiles; number >= (tiles = tiles_of(a, sequence)); sequence++) number -= tiles;
    const int first = s->bounds[sequence] + number * a->tile_tokens, left = s->bounds[sequence + 1] - first;
    return (Tile){sequence, first, smaller(left, a->tile_tokens), s->lengths[sequence] - left + 1};
}

static void write_head(const Attention *a, int token, int head, const float *sum, float total) {
    const int size = a->heads->size;
    float *restrict out = a->out + ((int64_t)token * a->heads->heads + head) * size;
    const float inverse = total > 0 ? 1.f / total : 0.f; /* padding has no keys */
    for (int k = 0; k < size; k++) out[k] = sum[k] * inverse;
}

/* Which keys of a block each query sees; the first token of the tile sees `length`. */
static void see_keys(const Heads *h, const Tile *tile, int start, int count, Running r) {
    const int group = h->heads / h->kv_heads;
    for (int g = 0; g < r.queries; g++) {
        const int length = tile->length + g / group - start;
        r.to[g] = larger(smaller(length, count), 0);
        r.from[g] = h->window ? smaller(larger(length - h->window, 0), r.to[g]) : 0;
    }
}

/* One head of keys of a tile of tokens, with all its queries. */
static void attend_tile(void *given, int chunk) {
    const Attention *a = given;
    const Heads *h = a->heads;
    const Sequences *s = a->sequences;
    const Tile tile = find_tile(a, chunk / h->kv_heads);
    const int head = chunk % h->kv_heads, group = h->heads / h->kv_heads, queries = group * tile.tokens, size = h->size;
    const int32_t *table = s->tables + s->table_stride * tile.sequence;
    float q[queries * size], sum[queries * size], score[queries * KEYS], largest[queries], total[queries], factor[queries];
    int from[queries], to[queries];
    const Running r = {sum, largest, total, factor, from, to, queries, size};
    for (int g = 0; g < queries; g++) {
        placed_head(a, tile.token + g / group, head * group + g % group, h->scale, q + (int64_t)g * size);
        largest[g] = -1e30f, total[g] = 0;
    }
    memset(sum, 0, sizeof sum);
    const int end = tile.length + tile.tokens - 1, first = h->window ? larger(tile.length - h->window, 0) : 0;
    for (int start = first / KEYS * KEYS; start < end; start += KEYS) {
        const int count = smaller(end - start, KEYS);
        int64_t offset[KEYS];
        int page = start / s->page_size, at = start % s->page_size; /* one division for all keys of the block */
        for (int n = 0; n < count; n++) {
            const int64_t slot = (int64_t)table[page] * s->page_size + at;
            offset[n] = (slot * h->kv_heads + head) * size;
            if (++at == s->page_size) at = 0, page++;
        }
        see_keys(h, &tile, start, count, r);
        score_keys(q, queries, size, a->keys, offset, count, score);
        weigh_keys(score, r);
        add_values(r, score, a->values, offset);
    }
    for (int g = 0; g < queries; g++)
        write_head(a, tile.token + g / group, head * group + g % group, sum + (int64_t)g * size, total[g]);
}

/* Store keys and values of a step's tokens, and attend: out [T, heads * size]. */
void cairn_attend(Pool *pool, const Heads *heads, const Sequences *sequences, float *qkv, float *keys, float *values,
                  const float *cosine, const float *sine, float *out) {
    const int fitting = larger(1, MOST_QUERIES / (heads->heads / heads->kv_heads));
    Attention attention = {heads, sequences, qkv, keys, values, cosine, sine, out, smaller(TILE_TOKENS, fitting)};
    int tiles = 0;
    for (int b = 0; b < sequences->count; b++) tiles += tiles_of(&attention, b);
    const int tokens = sequences->bounds ? sequences->bounds[sequences->count] : sequences->count;
    if (tokens < 16) for (int token = 0; token < tokens; token++) store_token(&attention, token);
    else run(pool, store_token, &attention, tokens);
    run(pool, attend_tile, &attention, tiles * heads->kv_heads);
}

#endif
