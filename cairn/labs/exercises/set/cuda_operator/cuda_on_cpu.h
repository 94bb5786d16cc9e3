// Runs a CUDA C++ kernel on a CPU, one thread of a block after the other, so that a missing barrier shows every time.
//
//   thread 0 runs to its first __syncthreads, then thread 1, ... ; when all wait there, thread 0 goes on
//
// Blocks run one after the other. What a GPU does at once happens here in a fixed order: a thread that reads what
// another has yet to write reads the old value. A barrier that only some threads reach is an error, as it hangs a GPU.
// It includes little of C++'s library: the compiler reads it for every answer.
#include <math.h>
#include <ucontext.h>

#define __global__ static
#define __device__ static
#define __shared__ static

struct Index {
    unsigned x, y = 0, z = 0;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {
constexpr int STACK = 64 << 10;
struct Thread {
    ucontext_t context;
    char stack[STACK];
    bool ended = false;
};
static ucontext_t scheduler;
static Thread *current;
static void (*kernel)(const void *);
static const void *arguments;

static void body() {
    kernel(arguments);
    current->ended = true;
    swapcontext(&current->context, &scheduler);
}

// 0; 1 when some threads of a block wait at a barrier and the others have ended.
static int run_block(Thread *all, unsigned threads) {
    for (unsigned number = 0; number < threads; number++) {
        Thread &one = all[number];
        one.ended = false;
        getcontext(&one.context);
        one.context.uc_stack.ss_sp = one.stack;
        one.context.uc_stack.ss_size = STACK;
        one.context.uc_link = &scheduler;
        makecontext(&one.context, body, 0);
    }
    for (;;) {
        unsigned ended = 0;
        for (unsigned number = 0; number < threads; number++) {
            current = &all[number];
            threadIdx.x = number;
            if (!current->ended) swapcontext(&scheduler, &current->context);
            ended += current->ended;
        }
        if (ended == threads) return 0;
        if (ended) return 1;
    }
}

template <class Kernel>
static int launch(unsigned blocks, unsigned threads, Kernel given) {
    kernel = [](const void *it) { (*static_cast<const Kernel *>(it))(); };
    arguments = &given;
    gridDim.x = blocks;
    blockDim.x = threads;
    Thread *all = new Thread[threads];
    int wrong = 0;
    for (blockIdx.x = 0; blockIdx.x < blocks && !wrong; blockIdx.x++) wrong = run_block(all, threads);
    delete[] all;
    return wrong;
}
} // namespace on_cpu

static void __syncthreads() {
    swapcontext(&on_cpu::current->context, &on_cpu::scheduler);
}
static inline float reciprocal_root(float x) { return 1.0f / sqrtf(x); }
#define rsqrtf reciprocal_root
