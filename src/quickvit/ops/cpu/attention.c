/* Attention on packed channels, softmax(q kᵀ / √D) v for every head, and its gradient.

   A packed token holds some features (q, k and v, or one) in every block, which runs over (feature, head, channel). A
   head of size D = 8c has c channels of each one-dimensional irrep and 2c of each component of E. Its features are
   copied to rows of D floats, with zeros behind them up to whole vectors, and the results copied back. */
#include "layout.h"
#include "products.h"
#include <math.h>

/* Queries whose logits stay in the cache between the products. */
#define QUERIES 32
/* Neighbouring heads of an item of work, where there are enough for all threads: they share lines of the cache. */
#define GROUP 2
/* How many tokens ahead to fetch: a token's pieces lie too far apart for the processor to foresee the next. */
#define AHEAD 4

typedef struct {
    const float *qkv, *bias, *out, *grad;
    float *result, *lse;
    int64_t images, tokens, heads, c, group;
} attention_job;

/* A feature of a head in packed tokens. */
typedef struct {
    int64_t head, feature, features;
} place;

static inline int64_t row_size(int64_t c) { return vectors(8 * c) * LANES; }
static inline int64_t logits_size(int64_t tokens) { return vectors(tokens) * LANES; }

/* Where the channels of a block begin in a token. */
INLINE int64_t piece(place p, int block, int64_t heads, int64_t c) {
    return c * (START[block] * p.features * heads + WIDTH[block] * (p.feature * heads + p.head));
}

INLINE void gather_pieces(const attention_job *j, int64_t c, const float *packed, place p, const float *bias,
                          float factor, float *rows) {
    int64_t token = 8 * c * j->heads * p.features, size = row_size(c);
    if (bias) bias += piece(p, 0, j->heads, c);
    for (int64_t t = 0; t < j->tokens; t++, packed += token, rows += size) {
        UNROLL for (int b = 0; b < BLOCKS; b++) {
            const float *from = packed + piece(p, b, j->heads, c);
            __builtin_prefetch(from + AHEAD * token);
            for (int64_t i = 0; i < WIDTH[b] * c; i++) rows[START[b] * c + i] = factor * from[i];
        }
        if (bias)
            for (int64_t i = 0; i < c; i++) rows[i] += factor * bias[i];
        for (int64_t i = 8 * c; i < size; i++) rows[i] = 0;
    }
}

/* Rows of a feature, times a factor, after adding the bias to A1. */
static void gather(const attention_job *j, const float *packed, place p, const float *bias, float factor,
                   float *rows) {
    /* Heads of the usual size 64 get a loop with constant widths. */
    if (j->c == 8)
        gather_pieces(j, 8, packed, p, bias, factor, rows);
    else
        gather_pieces(j, j->c, packed, p, bias, factor, rows);
}

INLINE void scatter_pieces(const attention_job *j, int64_t c, const float *rows, float factor, const float *factors,
                           int64_t tokens, float *packed, place p) {
    int64_t token = 8 * c * j->heads * p.features;
    for (int64_t t = 0; t < tokens; t++, packed += token, rows += row_size(c)) {
        float f = factors ? factor * factors[t] : factor;
        UNROLL for (int b = 0; b < BLOCKS; b++) {
            float *to = packed + piece(p, b, j->heads, c);
            for (int64_t i = 0; i < WIDTH[b] * c; i++) to[i] = f * rows[START[b] * c + i];
        }
    }
}

/* The inverse of gather: rows times a factor, and one factor per row if there are `factors`. */
static void scatter(const attention_job *j, const float *rows, float factor, const float *factors, int64_t tokens,
                    float *packed, place p) {
    if (j->c == 8)
        scatter_pieces(j, 8, rows, factor, factors, tokens, packed, p);
    else
        scatter_pieces(j, j->c, rows, factor, factors, tokens, packed, p);
}

/* Replaces n logits (base 2) by 2^(logit − largest). Returns the largest; `sum` is that of the results. */
static float exponentials(float *logits, int64_t n, float *sum) {
    for (int64_t i = n; i < logits_size(n); i++) logits[i] = -INFINITY;
    vec largest = load(logits, LANES), sums = {0};
    for (int64_t i = LANES; i < n; i += LANES) largest = larger(load(logits + i, LANES), largest);
    float top = largest[0];
    for (int i = 1; i < LANES; i++) top = largest[i] > top ? largest[i] : top;
    for (int64_t i = 0; i < n; i += LANES) {
        vec e = power_of_two(load(logits + i, LANES) - top);
        store(logits + i, e, LANES);
        sums += e;
    }
    *sum = total(sums);
    return top;
}

/* Floats of scratch per thread, forward. */
EXPORT int64_t attention_scratch(int64_t tokens, int64_t c) {
    return 3 * tokens * row_size(c) + packed_size(8 * c, tokens) + QUERIES * (logits_size(tokens) + row_size(c));
}

static void forward_head(const attention_job *j, int64_t image, int64_t head, float *scratch) {
    int64_t n = j->tokens, dim = 8 * j->c, row = row_size(j->c), width = logits_size(n), token = dim * j->heads;
    const float *qkv = j->qkv + image * n * 3 * token;
    float *out = j->result + image * n * token, *lse = j->lse + (image * j->heads + head) * n;
    float *q = scratch, *k = q + n * row, *v = k + n * row, *keys = v + n * row;
    float *logits = keys + packed_size(dim, n), *sums = logits + QUERIES * width;
    gather(j, qkv, (place){head, 0, 3}, j->bias, LOG2E / sqrtf(dim), q);
    gather(j, qkv, (place){head, 1, 3}, j->bias, 1, k);
    gather(j, qkv, (place){head, 2, 3}, j->bias, 1, v);
    pack(k, 1, row, dim, n, keys);
    for (int64_t first = 0; first < n; first += QUERIES) {
        int64_t some = least(QUERIES, n - first);
        float sum, factors[QUERIES];
        multiply(false, some, n, dim, (left){q + first * row, row, 1}, (right){keys, PACKED}, logits, width);
        for (int64_t i = 0; i < some; i++) {
            float largest = exponentials(logits + i * width, n, &sum);
            lse[first + i] = largest + log2f(sum);
            factors[i] = 1 / sum;
        }
        multiply(false, some, row, n, (left){logits, width, 1}, (right){v, row}, sums, row);
        scatter(j, sums, 1, factors, some, out + first * token, (place){head, 0, 1});
    }
}

static void forward(const void *job, int64_t item, float *scratch) {
    const attention_job *j = job;
    int64_t groups = parts(j->heads, j->group), first = item % groups * j->group;
    for (int64_t h = first; h < least(first + j->group, j->heads); h++) forward_head(j, item / groups, h, scratch);
}

static void share_heads(work item, attention_job job, int64_t threads, float *scratch, int64_t scratch_size) {
    job.group = job.images * job.heads < 2 * GROUP * threads ? 1 : GROUP;
    share(item, &job, job.images * parts(job.heads, job.group), threads, scratch, scratch_size);
}

/* out [images, tokens, C]; lse [images, heads, tokens] is log2 Σ 2^logit of the logits in base 2. */
EXPORT void attention_forward(const float *qkv, const float *bias, float *out, float *lse, float *scratch,
                              int64_t images, int64_t tokens, int64_t heads, int64_t c, int64_t threads) {
    attention_job job = {qkv, bias, 0, 0, out, lse, images, tokens, heads, c, 0};
    share_heads(forward, job, threads, scratch, attention_scratch(tokens, c));
}

/* Floats of scratch per thread, backward. */
EXPORT int64_t attention_grad_scratch(int64_t tokens, int64_t c) {
    return 7 * tokens * row_size(c) + 2 * packed_size(8 * c, tokens) +
           QUERIES * (2 * logits_size(tokens) + row_size(c));
}

/* Weights P and δ = Σ dO ∘ O of one query; then `slopes`, which hold dP = dO Vᵀ, become dS = P ∘ (dP − δ). */
static void slope(float *weights, float *slopes, int64_t n, float lse, const float *grad, const float *out,
                  int64_t row) {
    vec dot = {0};
    for (int64_t i = 0; i < row; i += LANES) dot += load(grad + i, LANES) * load(out + i, LANES);
    float delta = total(dot);
    for (int64_t i = 0; i < n; i += LANES) {
        vec p = power_of_two(load(weights + i, n - i) - lse);
        store(weights + i, p, n - i);
        store(slopes + i, p * (load(slopes + i, n - i) - delta), n - i);
    }
}

/* dV = Pᵀ dO, dQ = dS K / √D, dK = dSᵀ Q / √D. */
static void backward_head(const attention_job *j, int64_t image, int64_t head, float *scratch) {
    int64_t n = j->tokens, dim = 8 * j->c, row = row_size(j->c), width = logits_size(n), token = dim * j->heads;
    const float *qkv = j->qkv + image * n * 3 * token, *lse = j->lse + (image * j->heads + head) * n;
    float *result = j->result + image * n * 3 * token, scale = 1 / sqrtf(dim);
    float *q = scratch, *k = q + n * row, *v = k + n * row, *out = v + n * row, *grad = out + n * row;
    float *grad_k = grad + n * row, *grad_v = grad_k + n * row;
    float *keys = grad_v + n * row, *values = keys + packed_size(dim, n), *weights = values + packed_size(dim, n);
    float *slopes = weights + QUERIES * width, *grad_q = slopes + QUERIES * width;
    gather(j, qkv, (place){head, 0, 3}, j->bias, LOG2E * scale, q);
    gather(j, qkv, (place){head, 1, 3}, j->bias, 1, k);
    gather(j, qkv, (place){head, 2, 3}, j->bias, 1, v);
    gather(j, j->out + image * n * token, (place){head, 0, 1}, 0, 1, out);
    gather(j, j->grad + image * n * token, (place){head, 0, 1}, 0, 1, grad);
    pack(k, 1, row, dim, n, keys);
    pack(v, 1, row, dim, n, values);
    memset(grad_k, 0, 2 * n * row * sizeof(float));
    for (int64_t first = 0; first < n; first += QUERIES) {
        int64_t some = least(QUERIES, n - first), at = first * row;
        multiply(false, some, n, dim, (left){q + at, row, 1}, (right){keys, PACKED}, weights, width);
        multiply(false, some, n, dim, (left){grad + at, row, 1}, (right){values, PACKED}, slopes, width);
        for (int64_t i = 0; i < some; i++)
            slope(weights + i * width, slopes + i * width, n, lse[first + i], grad + at + i * row, out + at + i * row,
                  row);
        multiply(false, some, row, n, (left){slopes, width, 1}, (right){k, row}, grad_q, row);
        scatter(j, grad_q, scale, 0, some, result + first * 3 * token, (place){head, 0, 3});
        multiply(true, n, row, some, (left){slopes, 1, width}, (right){q + at, row}, grad_k, row);
        multiply(true, n, row, some, (left){weights, 1, width}, (right){grad + at, row}, grad_v, row);
    }
    /* q came with the factor log2(e) / √D. */
    scatter(j, grad_k, LN2, 0, n, result, (place){head, 1, 3});
    scatter(j, grad_v, 1, 0, n, result, (place){head, 2, 3});
}

static void backward(const void *job, int64_t item, float *scratch) {
    const attention_job *j = job;
    int64_t groups = parts(j->heads, j->group), first = item % groups * j->group;
    for (int64_t h = first; h < least(first + j->group, j->heads); h++) backward_head(j, item / groups, h, scratch);
}

EXPORT void attention_backward(const float *grad, const float *qkv, const float *bias, const float *out, float *lse,
                               float *grad_qkv, float *scratch, int64_t images, int64_t tokens, int64_t heads,
                               int64_t c, int64_t threads) {
    attention_job job = {qkv, bias, out, grad, grad_qkv, lse, images, tokens, heads, c, 0};
    share_heads(backward, job, threads, scratch, attention_grad_scratch(tokens, c));
}
