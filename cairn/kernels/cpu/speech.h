/* A decoder of speech: what it reads of a window of sound, and a step through all its layers in one call.
 *
 *     x = x + out(attention(qkv(norm(x))))                            to the texts so far, which grow by these tokens
 *     x = x + look_out(attention(look(norm(x)), keys, values))        to the places of the window of sound
 *     x = x + down(gelu(up(norm(x))))
 *
 * Keys and values of a window are tiles of `few_rows.h`: attention to them is a product, a softmax and a product. Numbers
 * are float32; weights, keys and values may be stored in 16 bits. Plain form: `models/speech/model.py`, by torch.
 */
#ifndef CAIRN_SPEECH_H
#define CAIRN_SPEECH_H
#include "few_rows.h"

#ifdef HAS_VECTORS

typedef struct {
    TiledWeights qkv, out, look, look_out, up, down;
    const float *norm, *norm_bias, *look_norm, *look_norm_bias, *feed_norm, *feed_norm_bias;
} SpeechLayer;

typedef struct {
    const SpeechLayer *layers;
    TiledWeights vocabulary;
    const float *positions, *norm, *norm_bias;
    int32_t count, hidden, inner, heads, width, context, places, is_half;
    float scale, eps;
} SpeechModel;

/* Rows of one step: each has `tokens` tokens behind the `length` that it has read. */
typedef struct {
    float *const *texts;       /* of each layer: [2][slots][heads][context][width] */
    const char *const *sounds; /* of each row: [layers][heads][keys, values] */
    const int32_t *slots;      /* of each row, in `texts` */
    int32_t all_slots, rows, tokens, length;
} SpeechRows;

typedef struct {
    const SpeechModel *model;
    const SpeechRows *rows;
    int layer;
    float *x, *normed, *joined, *mixed, *inner;
} SpeechStep;

/* -- a window of sound ----------------------------------------------------------------------------------------------------- */

static int64_t head_numbers(const SpeechModel *m) { return 2 * whole_tiles(m->places) * m->width; }

typedef struct {
    const SpeechModel *model;
    const float *kv; /* [places][2 * hidden] */
    char *sound;     /* of this layer */
    _Atomic int failed;
} SoundWork;

/* Rows [rows][stride] as tiles whose depth is the rows, [width / side][rows][side]. */
static void to_depth(const SpeechModel *m, const float *rows, int64_t stride, char *tiles) {
    const int side = m->is_half ? 16 : SIDE, bytes = side * (m->is_half ? 2 : 4);
    for (int c = 0; c < m->width; c += side)
        for (int t = 0; t < m->places; t++, tiles += bytes) {
            const float *from = rows + t * stride + c;
#ifdef HAS_HALF
            if (m->is_half) {
                halve_side(from, (Half *)tiles);
                continue;
            }
#endif
            memcpy(tiles, from, sizeof(float) * SIDE);
        }
}

static void sound_head(void *given, int head) {
    SoundWork *s = given;
    const SpeechModel *m = s->model;
    const int64_t stride = 2 * (int64_t)m->hidden, bytes = m->is_half ? 2 : 4;
    const float *keys = s->kv + head * m->width;
    char *to = s->sound + head * head_numbers(m) * bytes;
    float *room = malloc(sizeof(float) * 16 * (size_t)m->width);
    if (!room) atomic_store(&s->failed, 1);
#ifdef HAS_HALF
    else if (m->is_half) to_wide_half(keys, stride, m->places, m->width, (Half *)to, room);
#endif
    else to_tiles(keys, stride, m->places, m->width, (float *)to);
    to_depth(m, keys + m->hidden, stride, to + head_numbers(m) / 2 * bytes);
    free(room);
}

/* Keys and values of one layer, kv [places][2 * hidden], as its heads read them; -1: there is no memory. */
int cairn_speech_sound(Pool *pool, const SpeechModel *model, const float *kv, char *sound) {
    SoundWork work = {.model = model, .kv = kv, .sound = sound};
    run(pool, sound_head, &work, model->heads);
    return atomic_load(&work.failed) ? -1 : 0;
}

/* -- a step ------------------------------------------------------------------------------------------------------------------ */

/* exp(scale * (score - largest)) in place, and the inverse of their sum. */
static float softmax_row(float *scores, int count, float scale) {
    const int whole = count / LANES * LANES;
    float rest[LANES]; /* those beyond whole registers, which are filled up */
    for (int i = 0; i < LANES; i++) rest[i] = whole + i < count ? scores[whole + i] : -INFINITY;
    Vec top = vec_load(rest), sums = vec_all(0.f);
    for (int k = 0; k < whole; k += LANES) top = vec_max(top, vec_load(scores + k));
    const Vec most = vec_all(vec_top(top));
    for (int k = 0; k < whole; k += LANES) {
        const Vec e = exponential((vec_load(scores + k) - most) * vec_all(scale));
        vec_store(scores + k, e), sums = sums + e;
    }
    vec_store(rest, exponential((vec_load(rest) - most) * vec_all(scale)));
    float sum = vec_sum(sums);
    for (int i = 0; whole + i < count; i++) sum += scores[whole + i] = rest[i];
    return 1.f / sum;
}

static inline float dot_product(const float *a, const float *b, int count) {
    Vec sum = vec_all(0.f), more = sum;
    int i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        sum = vec_fma(sum, vec_load(a + i), vec_load(b + i));
        more = vec_fma(more, vec_load(a + i + LANES), vec_load(b + i + LANES));
    }
    if (i < count) sum = vec_fma(sum, vec_load(a + i), vec_load(b + i));
    return vec_sum(sum + more);
}

/* One head of one row: its keys and values are stored, and its queries see those up to their own. */
static void read_texts(void *given, int chunk) {
    const SpeechStep *s = given;
    const SpeechModel *m = s->model;
    const SpeechRows *r = s->rows;
    const int row = chunk / m->heads, head = chunk % m->heads, width = m->width;
    const int64_t per_slot = (int64_t)m->context * width, slot = (int64_t)r->slots[row] * m->heads + head;
    float *keys = r->texts[s->layer] + slot * per_slot, *values = keys + (int64_t)r->all_slots * m->heads * per_slot;
    for (int t = 0; t < r->tokens; t++) {
        const int64_t at = (int64_t)row * r->tokens + t;
        const float *q = s->joined + at * 3 * m->hidden + head * width;
        float *out = s->mixed + at * m->hidden + head * width, scores[m->context];
        const int seen = r->length + t + 1;
        memcpy(keys + (int64_t)(seen - 1) * width, q + m->hidden, sizeof(float) * (size_t)width);
        memcpy(values + (int64_t)(seen - 1) * width, q + 2 * m->hidden, sizeof(float) * (size_t)width);
        for (int k = 0; k < seen; k++) scores[k] = dot_product(q, keys + (int64_t)k * width, width);
        const float inverse = softmax_row(scores, seen, m->scale);
        for (int c = 0; c < width; c += LANES * few_vecs(1, 0, width - c)) { /* values are tiles as wide as the head */
            const FewTile f = {scores, values + c, NULL, out + c, 0, 0, LANES, 1, seen, width, 0};
            few_tile(&f, 0, width - c);
        }
        for (int c = 0; c < width; c++) out[c] *= inverse;
    }
}

/* One head of one row, and all places of its window. */
static void read_sound(void *given, int chunk) {
    const SpeechStep *s = given;
    const SpeechModel *m = s->model;
    const int row = chunk / m->heads, head = chunk % m->heads, columns = (int)whole_tiles(m->places);
    const int64_t numbers = head_numbers(m), bytes = m->is_half ? 2 : 4;
    const char *keys = s->rows->sounds[row] + ((int64_t)s->layer * m->heads + head) * numbers * bytes;
    const TiledWeights by_key = {keys, NULL, m->width, columns};
    const TiledWeights by_value = {keys + numbers / 2 * bytes, NULL, m->places, m->width};
    float scores[FEW * columns], inverse[FEW];
    for (int t = 0; t < s->rows->tokens; t += FEW) {
        const int left = s->rows->tokens - t < FEW ? s->rows->tokens - t : FEW;
        const int64_t at = ((int64_t)row * s->rows->tokens + t) * m->hidden + head * m->width;
        few_product(&by_key, m->is_half, s->joined + at, m->hidden, left, scores, columns, 0, 0, columns);
        for (int r = 0; r < left; r++) inverse[r] = softmax_row(scores + r * columns, m->places, m->scale);
        few_product(&by_value, m->is_half, scores, columns, left, s->mixed + at, m->hidden, 0, 0, m->width);
        for (int r = 0; r < left; r++)
            for (int c = 0; c < m->width; c++) s->mixed[at + r * m->hidden + c] *= inverse[r];
    }
}

static void speech_layer(Pool *pool, SpeechStep *s) {
    const SpeechModel *m = s->model;
    const SpeechLayer *l = &m->layers[s->layer];
    const int rows = s->rows->rows * s->rows->tokens, heads = s->rows->rows * m->heads, half = m->is_half;
    layer_norm(s->x, s->normed, rows, m->hidden, l->norm, l->norm_bias, m->eps);
    few_shared(pool, (FewProduct){&l->qkv, s->normed, s->joined, half, rows, 0, 0, 0});
    run(pool, read_texts, s, heads);
    few_shared(pool, (FewProduct){&l->out, s->mixed, s->x, half, rows, 1, 0, 0});
    layer_norm(s->x, s->normed, rows, m->hidden, l->look_norm, l->look_norm_bias, m->eps);
    few_shared(pool, (FewProduct){&l->look, s->normed, s->joined, half, rows, 0, 0, 0});
    run(pool, read_sound, s, heads);
    few_shared(pool, (FewProduct){&l->look_out, s->mixed, s->x, half, rows, 1, 0, 0});
    layer_norm(s->x, s->normed, rows, m->hidden, l->feed_norm, l->feed_norm_bias, m->eps);
    few_shared(pool, (FewProduct){&l->up, s->normed, s->inner, half, rows, 0, 1, 0});
    few_shared(pool, (FewProduct){&l->down, s->inner, s->x, half, rows, 1, 0, 0});
}

/* The row of a token, out of the tiles that its logits are multiplied with, and its position. */
static void embed_token(const SpeechModel *m, int64_t token, const float *position, float *x) {
    const int side = m->is_half ? 16 : SIDE;
    const int64_t first = token / side * side * m->hidden + token % side;
    for (int k = 0; k < m->hidden; k++) {
        const int64_t at = first + (int64_t)k * side;
#ifdef HAS_HALF
        if (m->is_half) {
            x[k] = float_of(((const Half *)m->vocabulary.tiles)[at]) + position[k];
            continue;
        }
#endif
        x[k] = ((const float *)m->vocabulary.tiles)[at] + position[k];
    }
}

/* Logits behind each token [rows * tokens][columns of the vocabulary], or behind the last of each row; -1: no memory. */
int cairn_speech_read(Pool *pool, const SpeechModel *m, const SpeechRows *r, const int64_t *tokens, int last_alone, float *logits) {
    const int64_t all = (int64_t)r->rows * r->tokens, hidden = m->hidden;
    float *memory = malloc(sizeof(float) * (size_t)(all * (6 * hidden + m->inner)));
    if (!memory) return -1;
    SpeechStep s = {m, r, 0, memory, memory + all * hidden, memory + 2 * all * hidden, memory + 5 * all * hidden,
                    memory + 6 * all * hidden};
    for (int64_t i = 0; i < all; i++)
        embed_token(m, tokens[i], m->positions + (r->length + i % r->tokens) * hidden, s.x + i * hidden);
    for (; s.layer < m->count; s.layer++) speech_layer(pool, &s);
    const int64_t step = last_alone ? r->tokens : 1, count = all / step;
    for (int64_t i = 0; i < count; i++)
        layer_norm(s.x + (i * step + step - 1) * hidden, s.normed + i * hidden, 1, m->hidden, m->norm, m->norm_bias, m->eps);
    few_shared(pool, (FewProduct){&m->vocabulary, s.normed, logits, m->is_half, (int)count, 0, 0, 0});
    free(memory);
    return 0;
}

#endif
#endif
