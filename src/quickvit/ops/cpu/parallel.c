#include "parallel.h"

/* GOMP_parallel(function, argument, threads, flags), the entry that compiled OpenMP code calls: runs the function in
   every thread of a team. It comes from Python, which finds the one that PyTorch uses: with a runtime of its own,
   this library would start a second set of threads, and the two would fight for the cores. */
typedef void (*fork_join)(void (*)(void *), void *, unsigned, unsigned);

static fork_join runtime = 0;

EXPORT void use_runtime(fork_join function) { runtime = function; }

typedef struct {
    work item;
    const void *job;
    int64_t items, next, workers;
    float *scratch;
    int64_t scratch_size;
} team;

static void take_items(void *argument) {
    team *t = argument;
    float *scratch = t->scratch;
    if (scratch) scratch += t->scratch_size * __atomic_fetch_add(&t->workers, 1, __ATOMIC_RELAXED);
    /* Items are taken, not dealt out: the team may be smaller than asked for, and a core slower than another. */
    for (;;) {
        int64_t next = __atomic_fetch_add(&t->next, 1, __ATOMIC_RELAXED);
        if (next >= t->items) return;
        t->item(t->job, next, scratch);
    }
}

void share(work item, const void *job, int64_t items, int64_t threads, float *scratch, int64_t scratch_size) {
    team t = {item, job, items, 0, 0, scratch, scratch_size};
    /* One thread does without the runtime, which in a forked process would wait for the threads of its parent. */
    if (threads < 2 || items < 2)
        take_items(&t);
    else
        runtime(take_items, &t, (unsigned)threads, 0);
}
