/* The passes of an EAGLE-3 head behind a step: `models/eagle.py` has the form to read first.
 *
 *     norm x, norm g | q, k, v | rotate, store, attend | out, add | norm, gate, up, down, add | norm, scores | likeliest
 *
 * The first pass takes every token of the step, which leaves its key and value; only the last of each sequence that holds
 * goes on. Every further pass takes the newest draft of each sequence. A head is so small that calls from Python between
 * its operations take longer than its products.
 */
#ifndef CAIRN_DRAFT_HEAD_H
#define CAIRN_DRAFT_HEAD_H

typedef struct {
    const Layer *layer;                            /* its joined heads read both norms side by side */
    const Matrix *fuse, *scores;                   /* of hidden states; of the head's own vocabulary */
    const Norm *of_token, *of_hidden, *last;
    const Part *packed_tokens;                     /* the embedding: packed, */
    const float *tokens;                           /* or in float32 */
    const int32_t *token_of;                       /* of the target's vocabulary, for each of the head's own */
    const float *frequency, *of_cosine, *of_sine;  /* [size]: of rotary positions and what their waves are multiplied with, or NULL */
    int32_t width, normed_residual, vocabulary;
} DraftHead;

/* What the passes share. */
typedef struct {
    float *x, *g, *both, *qkv, *attended, *inner, *cosine, *sine, *scores;
    int64_t *rows;
} DraftRoom;

/* The sequences of a step behind the tokens of theirs that hold. */
typedef struct {
    const int32_t *following, *positions; /* [T]: the token behind each of the step, and where each stands */
    const int32_t *ends, *lengths;        /* [B]: the newest token that holds, and tokens with it */
    const float *const *tapped;           /* hidden states of each tap, [T, width] */
    int32_t taps, tokens, passes;
} Drafted;

static int64_t room_of_drafts(const DraftHead *h, int tokens, int sequences, int taps) {
    const Heads *heads = h->layer->heads;
    const int64_t size = heads->size, wide = taps > 2 ? taps : 2, inner = h->layer->inner->parts[0].rows;
    const int64_t each = (2 + wide) * h->width + 2 * (heads->heads + heads->kv_heads) * size + inner + 2 * size;
    return tokens * each + (int64_t)sequences * h->vocabulary;
}

static void divide_room(const DraftHead *h, int tokens, int taps, float *at, DraftRoom *room) {
    const Heads *heads = h->layer->heads;
    const int64_t size = heads->size, wide = taps > 2 ? taps : 2;
    room->x = at, at += (int64_t)tokens * h->width;
    room->g = at, at += (int64_t)tokens * h->width;
    room->both = at, at += tokens * wide * h->width; /* first all that is tapped */
    room->qkv = at, at += tokens * (heads->heads + 2 * heads->kv_heads) * size;
    room->attended = at, at += tokens * heads->heads * size;
    room->inner = at, at += (int64_t)tokens * h->layer->inner->parts[0].rows;
    room->cosine = at, at += tokens * size;
    room->sine = at, at += tokens * size;
    room->scores = at;
}

static void look_up_tokens(const DraftHead *h, const int32_t *tokens, int count, DraftRoom *room) {
    for (int t = 0; t < count; t++) {
        room->rows[t] = tokens[t];
        if (h->tokens) memcpy(room->x + (int64_t)t * h->width, h->tokens + (int64_t)tokens[t] * h->width, sizeof(float) * (size_t)h->width);
    }
    Lookup lookup = {h->packed_tokens, h->width, room->rows, room->x};
    if (!h->tokens) for (int t = 0; t < count; t++) look_up(&lookup, t);
}

static void find_angles(const DraftHead *h, const int32_t *positions, int count, DraftRoom *room) {
    const int size = h->layer->heads->size;
    for (int t = 0; h->frequency && t < count; t++)
        for (int k = 0; k < size; k++) {
            const float angle = (float)positions[t] * h->frequency[k];
            room->cosine[t * size + k] = cosf(angle) * h->of_cosine[k];
            room->sine[t * size + k] = sinf(angle) * h->of_sine[k];
        }
}

/* One pass of `rows` tokens in room->x and room->g, of which `ends` go on: their hidden states are in room->g then. */
static int pass(Pool *pool, const DraftHead *h, const Sequences *sequences, int rows, const int32_t *ends, int count,
                DraftRoom *room) {
    const Layer *l = h->layer;
    const Norm none = {NULL, 0};
    const int width = h->width, out = l->heads->heads * l->heads->size;
    const float *cosine = h->frequency ? room->cosine : NULL, *sine = h->frequency ? room->sine : NULL;
    for (int t = 0; t < rows; t++) {
        float *both = room->both + (int64_t)t * 2 * width;
        norm_row(room->x + (int64_t)t * width, width, h->of_token, both);
        norm_row(room->g + (int64_t)t * width, width, h->of_hidden, both + width);
    }
    if (cairn_product(pool, l->qkv, &none, room->both, rows, room->qkv)) return -1;
    cairn_attend(pool, l->heads, sequences, room->qkv, l->keys, l->values, cosine, sine, room->attended);
    for (int b = 0; b < count; b++) { /* ends ascend, so what is read was not written over */
        const int64_t end = ends ? ends[b] : b;
        const float *from = h->normed_residual ? room->both + (2 * end + 1) * width : room->g + end * width;
        memmove(room->g + (int64_t)b * width, from, sizeof(float) * (size_t)width);
        memmove(room->attended + (int64_t)b * out, room->attended + end * out, sizeof(float) * (size_t)out);
    }
    if (cairn_product(pool, l->out, &none, room->attended, count, room->g)) return -1;
    if (cairn_product(pool, l->inner, l->before_inner, room->g, count, room->inner)) return -1;
    return cairn_product(pool, l->down, &none, room->inner, count, room->g);
}

/* The likeliest token of each of `count` rows, and its chance among those that the head knows. */
static int guess(Pool *pool, const DraftHead *h, int count, int stride, DraftRoom *room, int32_t *draft, float *chance) {
    if (cairn_product(pool, h->scores, h->last, room->g, count, room->scores)) return -1;
    for (int b = 0; b < count; b++) {
        const float *restrict score = room->scores + (int64_t)b * h->vocabulary;
        float most = score[0], total = 0;
        int best = 0;
#pragma omp simd reduction(max : most)
        for (int n = 0; n < h->vocabulary; n++) most = larger_of(score[n], most);
#pragma omp simd reduction(+ : total)
        for (int n = 0; n < h->vocabulary; n++) total += power_of_e(score[n] - most);
        while (best < h->vocabulary - 1 && score[best] != most) best++;
        draft[b * stride] = h->token_of[best], chance[b * stride] = 1.f / total;
    }
    return 0;
}

/* The newest drafts as tokens behind the `number` before them. Where they would leave the pages that a sequence has, they
 * write to the null page and see no more keys: only drafts can suffer. */
static void place_newest(const Sequences *s, const int32_t *lengths, int number, int32_t *positions, int32_t *slots,
                         int32_t *seen) {
    for (int b = 0; b < s->count; b++) {
        const int32_t space = (s->lengths[b] + s->page_size - 1) / s->page_size * s->page_size, next = lengths[b] + number;
        const int fits = next < space;
        positions[b] = fits ? next : 0;
        slots[b] = fits ? s->tables[s->table_stride * b + next / s->page_size] * s->page_size + next % s->page_size : 0;
        seen[b] = fits ? next + 1 : space;
    }
}

/* Further passes are made while the largest chance that all drafts of a sequence hold is at least `least` of their number. */
static int further_passes(Pool *pool, const DraftHead *h, const Sequences *s, const Drafted *d, const float *least,
                          DraftRoom *room, int32_t *drafts, float *chances) {
    const int count = s->count;
    int32_t positions[count], slots[count], seen[count], newest[count];
    float held[count];
    for (int b = 0; b < count; b++) held[b] = 1.f;
    for (int made = 1; made < d->passes; made++) {
        float best = 0;
        for (int b = 0; b < count; b++) {
            held[b] *= chances[b * d->passes + made - 1];
            best = held[b] > best ? held[b] : best;
            newest[b] = drafts[b * d->passes + made - 1];
        }
        if (least && best < least[made - 1]) return made;
        place_newest(s, d->lengths, made - 1, positions, slots, seen);
        const Sequences rows = {slots, seen, s->tables, NULL, count, s->page_size, s->table_stride};
        look_up_tokens(h, newest, count, room);
        find_angles(h, positions, count, room);
        if (pass(pool, h, &rows, count, NULL, count, room)) return -1;
        if (guess(pool, h, count, d->passes, room, drafts + made, chances + made)) return -1;
    }
    return d->passes;
}

/* Drafts and their chances [B, passes]; returns how many of each were made, or -1 where memory is missing. */
int cairn_draft(Pool *pool, const DraftHead *head, const Sequences *groups, const Drafted *d, const float *least,
                int32_t *drafts, float *chances) {
    const Sequences *s = groups + head->layer->group;
    const Norm none = {NULL, 0};
    const int wide = d->taps * head->width;
    float *held = malloc(sizeof(float) * (size_t)room_of_drafts(head, d->tokens, s->count, d->taps));
    DraftRoom room = {.rows = malloc(sizeof(int64_t) * (size_t)d->tokens)};
    int made = -1;
    if (held && room.rows) {
        divide_room(head, d->tokens, d->taps, held, &room);
        for (int t = 0; t < d->tokens; t++)
            for (int i = 0; i < d->taps; i++)
                memcpy(room.both + (int64_t)t * wide + i * head->width, d->tapped[i] + (int64_t)t * head->width, sizeof(float) * (size_t)head->width);
        look_up_tokens(head, d->following, d->tokens, &room);
        find_angles(head, d->positions, d->tokens, &room);
        if (!cairn_product(pool, head->fuse, &none, room.both, d->tokens, room.g) &&
            !pass(pool, head, s, d->tokens, d->ends, s->count, &room) &&
            !guess(pool, head, s->count, d->passes, &room, drafts, chances))
            made = further_passes(pool, head, s, d, least, &room, drafts, chances);
    }
    free(held), free(room.rows);
    return made;
}

#endif
