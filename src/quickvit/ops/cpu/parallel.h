/* Work shared by the threads of the OpenMP runtime that PyTorch runs on. */
#pragma once
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* One item of a job. `scratch` is memory that no other thread touches meanwhile. */
typedef void (*work)(const void *job, int64_t item, float *scratch);

/* Does the items 0 … items − 1 in any order, with scratch_size floats of scratch for each of the threads. */
void share(work item, const void *job, int64_t items, int64_t threads, float *scratch, int64_t scratch_size);

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* How many parts of this size hold the total. */
static inline int64_t parts(int64_t total, int64_t size) { return (total + size - 1) / size; }

/* Where part i begins if the total is cut into `count` parts of almost equal size. */
static inline int64_t cut(int64_t total, int64_t count, int64_t i) { return total * i / count; }
