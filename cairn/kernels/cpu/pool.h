/* A pool of threads that share the chunks of one piece of work.
 *
 * Whoever is free takes the next chunk, so a thread that the system has set aside holds up one chunk and not the whole
 * piece. A thread without work spins for some microseconds, because the next product of a step follows soon, and then
 * sleeps in the kernel: it takes no CPU time away from other programs.
 */
#ifndef CAIRN_POOL_H
#define CAIRN_POOL_H

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#define WORKER_SPINS 600 /* a pause takes 140 cycles of a recent Intel core: some 30 microseconds */
#define WAIT_SPINS 200
#else
#define PAUSE() __asm__ volatile("yield" ::: "memory")
#define WORKER_SPINS 20000
#define WAIT_SPINS 6000
#endif

typedef void (*Work)(void *arguments, int chunk);

typedef struct {
    int threads;             /* the caller's among them */
    _Atomic uint64_t ticket; /* generation << 48 | chunks << 24 | the next chunk: one value, so it is always consistent */
    _Atomic uint32_t generation;
    _Atomic uint32_t done; /* chunks of this generation that are finished */
    _Atomic int sleepers;  /* workers inside the kernel */
    _Atomic int caller_sleeps;
    _Atomic int stop;
    pthread_mutex_t in_use;
    Work work;
    void *arguments;
    pthread_t workers[];
} Pool;

static void sleep_while(_Atomic uint32_t *value, uint32_t seen) {
#ifdef __linux__
    syscall(SYS_futex, value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
    if (atomic_load(value) == seen) sched_yield();
#endif
}

static void wake_all(_Atomic uint32_t *value) {
#ifdef __linux__
    syscall(SYS_futex, value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    (void)value;
#endif
}

static void take_chunks(Pool *pool) {
    for (;;) {
        uint64_t ticket = atomic_fetch_add(&pool->ticket, 1);
        uint32_t chunks = (uint32_t)(ticket >> 24) & 0xffffff, chunk = (uint32_t)ticket & 0xffffff;
        if (chunk >= chunks) return;
        /* Nobody starts the next piece before this chunk is done, so these two are still its own. */
        pool->work(pool->arguments, (int)chunk);
        if (atomic_fetch_add(&pool->done, 1) + 1 == chunks && atomic_load(&pool->caller_sleeps)) wake_all(&pool->done);
    }
}

static void *worker(void *given) {
    Pool *pool = given;
    uint32_t seen = 0;
    for (;;) {
        int spins = 0;
        while (atomic_load(&pool->generation) == seen) {
            if (++spins < WORKER_SPINS) {
                PAUSE();
                continue;
            }
            atomic_fetch_add(&pool->sleepers, 1);
            sleep_while(&pool->generation, seen);
            atomic_fetch_sub(&pool->sleepers, 1);
        }
        seen = atomic_load(&pool->generation);
        if (atomic_load(&pool->stop)) return NULL;
        take_chunks(pool);
    }
}

static void run(Pool *pool, Work work, void *arguments, int chunks) {
    if (chunks <= 1 || pool->threads <= 1 || pthread_mutex_trylock(&pool->in_use)) {
        for (int chunk = 0; chunk < chunks; chunk++) work(arguments, chunk);
        return;
    }
    pool->work = work, pool->arguments = arguments;
    atomic_store(&pool->done, 0);
    uint64_t generation = atomic_load(&pool->generation) + 1;
    atomic_store(&pool->ticket, (generation & 0xffff) << 48 | (uint64_t)chunks << 24);
    atomic_store(&pool->generation, (uint32_t)generation);
    if (atomic_load(&pool->sleepers)) wake_all(&pool->generation);
    take_chunks(pool);
    int spins = 0;
    uint32_t done;
    while ((done = atomic_load(&pool->done)) < (uint32_t)chunks) {
        if (++spins < WAIT_SPINS) {
            PAUSE();
            continue;
        }
        atomic_store(&pool->caller_sleeps, 1);
        if (atomic_load(&pool->done) == done) sleep_while(&pool->done, done);
        atomic_store(&pool->caller_sleeps, 0);
    }
    pthread_mutex_unlock(&pool->in_use);
}

Pool *cairn_pool_new(int threads) {
    Pool *pool = calloc(1, sizeof(Pool) + sizeof(pthread_t) * (size_t)threads);
    if (!pool) return NULL;
    pthread_mutex_init(&pool->in_use, NULL);
    pool->threads = 1;
    for (int i = 0; i + 1 < threads; i++) {
        if (pthread_create(&pool->workers[i], NULL, worker, pool)) break;
        pool->threads++;
    }
    return pool;
}

void cairn_pool_free(Pool *pool) {
    atomic_store(&pool->stop, 1);
    atomic_fetch_add(&pool->generation, 1);
    wake_all(&pool->generation);
    for (int i = 0; i + 1 < pool->threads; i++) pthread_join(pool->workers[i], NULL);
    free(pool);
}

#endif
