// A ring for one producer and one consumer. Returns 1 when it did something, 0 when full or empty.
#include <stdatomic.h>
#include <stdint.h>

#define SLOTS 8

typedef struct {
    _Atomic uint64_t head;  // pushes so far
    _Atomic uint64_t tail;  // pops so far
    int64_t slot[SLOTS];
} Ring;

int ring_bytes(void) { return (int)sizeof(Ring); }

int ring_push(Ring *ring, int64_t value) {
    // begin answer: (void)ring; (void)value; return 0;
    uint64_t h = atomic_load_explicit(&ring->head, memory_order_relaxed);
    uint64_t t = atomic_load_explicit(&ring->tail, memory_order_acquire);
    if (h - t == SLOTS) return 0;
    ring->slot[h % SLOTS] = value;
    atomic_store_explicit(&ring->head, h + 1, memory_order_release);
    return 1;
    // end answer
}

int ring_pop(Ring *ring, int64_t *value) {
    // begin answer: (void)ring; (void)value; return 0;
    uint64_t t = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    uint64_t h = atomic_load_explicit(&ring->head, memory_order_acquire);
    if (t == h) return 0;
    *value = ring->slot[t % SLOTS];
    atomic_store_explicit(&ring->tail, t + 1, memory_order_release);
    return 1;
    // end answer
}
