/* The equivariant linear map y_ρ = W_ρ x_ρ, and two of them with GELU in between, the perceptron of a block. */
#include "gelu.h"
#include "layout.h"
#include "products.h"

/* Tokens of an item of work, at most. Its panel of the weights stays in the cache while it meets them. */
#define TILE 64
/* Floats of hidden features that an item of the perceptron keeps in the cache, about. */
#define HIDDEN (1 << 17)

/* Weights of the one-dimensional irreps, [4, out, in], and of E, [2 out, 2 in], with their strides; in and out are
   counted in copies of ρ_iso. */
typedef struct {
    const float *one, *two;
    int64_t one_irrep, one_row, one_column, two_row, two_column, in, out;
} weights;

/* Floats of packed weights. */
EXPORT int64_t linear_packed_size(int64_t in, int64_t out) {
    return 4 * packed_size(in, out) + packed_size(2 * in, 2 * out);
}

/* Where a block's weight begins among them: the components of E share the last. */
static int64_t packed_start(int64_t block, int64_t in, int64_t out) { return least(block, 4) * packed_size(in, out); }

typedef struct {
    weights maps[2];
    float *packed[2];
} pack_job;

/* Items 0 … 4 are the weights of the first map, 5 … 9 those of the second. */
static void pack_weight(const void *job, int64_t item, float *scratch) {
    (void)scratch;
    const pack_job *j = job;
    const weights *w = &j->maps[item / 5];
    int64_t block = 4 - item % 5;
    float *packed = j->packed[item / 5] + packed_start(block, w->in, w->out);
    if (block == 4)
        pack(w->two, w->two_column, w->two_row, 2 * w->in, 2 * w->out, packed);
    else
        pack(w->one + block * w->one_irrep, w->one_column, w->one_row, w->in, w->out, packed);
}

/* One block of y for some tokens. */
static void map(int64_t block, int64_t tokens, const float *x, int64_t x_row, int64_t in, const float *packed, float *y,
                int64_t y_row, int64_t out) {
    left a = {x + START[block] * in, x_row, 1};
    right b = {packed + packed_start(block, in, out), PACKED};
    multiply(false, tokens, WIDTH[block] * out, WIDTH[block] * in, a, b, y + START[block] * out, y_row);
}

typedef struct {
    const float *x, *bias, *packed[2];
    float *y;
    int64_t x_row, tokens, in, hidden, out, tiles;
} linear_job;

/* Tiles of at most `size` tokens, as many for each thread. */
static int64_t count_tiles(int64_t tokens, int64_t size, int64_t threads) {
    return least(parts(tokens, ROWS), parts(parts(tokens, size), threads) * threads);
}

static int64_t first_token(const linear_job *j, int64_t tile) {
    return least(j->tokens, cut(parts(j->tokens, ROWS), j->tiles, tile) * ROWS);
}

static void linear_item(const void *job, int64_t item, float *scratch) {
    (void)scratch;
    const linear_job *j = job;
    /* Tiles of a block follow each other, so that its weight stays in the cache; the smallest blocks come last. */
    int64_t block = BLOCKS - 1 - item / j->tiles, tile = item % j->tiles, row = 8 * j->out;
    int64_t first = first_token(j, tile), tokens = first_token(j, tile + 1) - first;
    float *y = j->y + first * row;
    map(block, tokens, j->x + first * j->x_row, j->x_row, j->in, j->packed[0], y, row, j->out);
    if (j->bias && block == 0)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t n = 0; n < j->out; n++) y[t * row + n] += j->bias[n];
}

EXPORT void linear_forward(const float *x, int64_t x_row, const float *one, int64_t one_irrep, int64_t one_row,
                           int64_t one_column, const float *two, int64_t two_row, int64_t two_column,
                           const float *bias, float *y, float *packed, int64_t tokens, int64_t in, int64_t out,
                           int64_t threads) {
    weights w = {one, two, one_irrep, one_row, one_column, two_row, two_column, in, out};
    pack_job weights = {{w}, {packed}};
    share(pack_weight, &weights, 5, threads, 0, 0);
    linear_job job = {x, bias, {packed}, y, x_row, tokens, in, 0, out, count_tiles(tokens, TILE, threads)};
    share(linear_item, &job, BLOCKS * job.tiles, threads, 0, 0);
}

/* Tokens of an item of the perceptron, at most, and the distance of their hidden features: not a power of two, or all
   of them would compete for the same places of the cache. */
static int64_t mlp_tile(int64_t hidden) { return most(1, HIDDEN / (8 * hidden * ROWS)) * ROWS; }
static int64_t hidden_row(int64_t hidden) { return 8 * hidden + LANES; }

/* Floats of scratch per thread. */
EXPORT int64_t mlp_scratch(int64_t hidden) { return mlp_tile(hidden) * hidden_row(hidden); }

static void mlp_item(const void *job, int64_t item, float *hidden) {
    const linear_job *j = job;
    int64_t first = first_token(j, item), tokens = first_token(j, item + 1) - first, row = hidden_row(j->hidden);
    for (int64_t b = 0; b < BLOCKS; b++)
        map(b, tokens, j->x + first * j->x_row, j->x_row, j->in, j->packed[0], hidden, row, j->hidden);
    gelu_tokens(hidden, j->bias, hidden, row, tokens, j->hidden);
    for (int64_t b = 0; b < BLOCKS; b++)
        map(b, tokens, hidden, row, j->hidden, j->packed[1], j->y + first * 8 * j->out, 8 * j->out, j->out);
}

/* y = W₂ GELU(W₁ x + bias on A1), with contiguous weights. */
EXPORT void mlp_forward(const float *x, int64_t x_row, const float *first_one, const float *first_two,
                        const float *bias, const float *second_one, const float *second_two, float *y, float *packed,
                        float *scratch, int64_t tokens, int64_t in, int64_t hidden, int64_t out, int64_t threads) {
    float *second = packed + linear_packed_size(in, hidden);
    weights up = {first_one, first_two, hidden * in, in, 1, 2 * in, 1, in, hidden};
    weights down = {second_one, second_two, out * hidden, hidden, 1, 2 * hidden, 1, hidden, out};
    pack_job weights = {{up, down}, {packed, second}};
    share(pack_weight, &weights, 10, threads, 0, 0);
    int64_t tiles = count_tiles(tokens, mlp_tile(hidden), threads);
    linear_job job = {x, bias, {packed, second}, y, x_row, tokens, in, hidden, out, tiles};
    share(mlp_item, &job, job.tiles, threads, scratch, mlp_scratch(hidden));
}
