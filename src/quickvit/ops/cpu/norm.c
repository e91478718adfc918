/* Octic layer norm with the residual sum before it, and its gradient.

   z = x + sample_scale · scale · (branch + bias),  y = gain · (z − z̄) / √(mean(w (z − z̄)²) + ε) + shift
   with z̄ the mean of each block, w = pair_weight on the components of E and 1 elsewhere, bias and shift on A1. */
#include "layout.h"
#include "parallel.h"
#include "vectors.h"
#include <math.h>

/* Tokens of an item of work. The sums of gradients run over items, so they do not depend on the threads. */
#define TOKENS 32
/* Of a token: the mean of each block, and the reciprocal of the standard deviation. */
#define STATISTICS (BLOCKS + 1)

/* The first gain of each block, in units of C/8: the components of E share theirs. */
static const int64_t GAIN[BLOCKS] = {0, 1, 2, 3, 4, 4};

/* What an item sums up for the parameters, in units of C/8. */
enum { GAIN_SUM = 0, SHIFT_SUM = 6, SCALE_SUM = 7, BIAS_SUM = 13, SUMS = 14 };

typedef struct {
    const float *x, *branch, *bias, *scale, *sample_scale, *gain, *shift;
    float *stream, *y, *statistics;
    float eps, pair_weight;
    int64_t tokens, tokens_per_sample, copies;
} norm_job;

/* z of one token. */
static void add_branch(const norm_job *j, int64_t token) {
    int64_t copies = j->copies;
    float sample = j->sample_scale ? j->sample_scale[token / j->tokens_per_sample] : 1;
    for (int b = 0; b < BLOCKS; b++) {
        int64_t at = (8 * token + START[b]) * copies, n = WIDTH[b] * copies;
        const float *scale = j->scale ? j->scale + GAIN[b] * copies : 0, *bias = b ? 0 : j->bias;
        for (int64_t i = 0; i < n; i += LANES) {
            vec v = load(j->branch + at + i, n - i);
            if (bias) v += load(bias + i, n - i);
            if (scale) v *= load(scale + i, n - i);
            store(j->stream + at + i, load(j->x + at + i, n - i) + sample * v, n - i);
        }
    }
}

static void normalise(const norm_job *j, const float *z, float *y, float *statistics) {
    int64_t copies = j->copies;
    float squares = 0;
    for (int b = 0; b < BLOCKS; b++) {
        const float *from = z + START[b] * copies;
        int64_t n = WIDTH[b] * copies;
        vec sum = {0}, square = {0};
        for (int64_t i = 0; i < n; i += LANES) sum += load(from + i, n - i);
        float mean = statistics[b] = total(sum) / n;
        for (int64_t i = 0; i < n; i += LANES) {
            vec centred = keep(load(from + i, n - i) - mean, n - i);
            square += centred * centred;
        }
        squares += (WIDTH[b] == 2 ? j->pair_weight : 1) * total(square);
    }
    /* Squares that overflow would give zeros, which nobody takes for a run that has diverged. */
    float rstd = statistics[BLOCKS] = isfinite(squares) ? 1 / sqrtf(squares / (8 * copies) + j->eps) : NAN;
    for (int b = 0; b < BLOCKS; b++) {
        int64_t at = START[b] * copies, n = WIDTH[b] * copies;
        const float *gain = j->gain + GAIN[b] * copies;
        for (int64_t i = 0; i < n; i += LANES) {
            vec v = load(gain + i, n - i) * ((load(z + at + i, n - i) - statistics[b]) * rstd);
            if (!b) v += load(j->shift + i, n - i);
            store(y + at + i, v, n - i);
        }
    }
}

static void forward(const void *job, int64_t item, float *scratch) {
    (void)scratch;
    const norm_job *j = job;
    int64_t channels = 8 * j->copies, last = least((item + 1) * TOKENS, j->tokens);
    const float *z = j->branch ? j->stream : j->x;
    for (int64_t t = item * TOKENS; t < last; t++) {
        if (j->branch) add_branch(j, t);
        normalise(j, z + t * channels, j->y + t * channels, j->statistics + t * STATISTICS);
    }
}

EXPORT void norm_forward(const float *x, const float *branch, const float *bias, const float *scale,
                         const float *sample_scale, const float *gain, const float *shift, float *stream, float *y,
                         float *statistics, float eps, float pair_weight, int64_t tokens, int64_t tokens_per_sample,
                         int64_t copies, int64_t threads) {
    norm_job job = {x, branch, bias, scale, sample_scale, gain, shift, stream, y, statistics,
                    eps, pair_weight, tokens, tokens_per_sample, copies};
    share(forward, &job, parts(tokens, TOKENS), threads, 0, 0);
}

typedef struct {
    const float *grad, *grad_stream, *stream, *statistics, *gain, *branch, *bias, *scale, *sample_scale;
    float *grad_x, *grad_branch, *sums;
    float pair_weight;
    int64_t tokens, tokens_per_sample, copies;
} norm_grad_job;

INLINE void accumulate(float *sum, vec v, int64_t n) { store(sum, load(sum, n) + v, n); }

/* With g = gain · dy and u = (z − z̄) r:  dz = r (g − ḡ − w u mean(g u)) + what reaches z past the norm. */
static void backward_token(const norm_grad_job *j, int64_t token, float *sums) {
    int64_t copies = j->copies;
    const float *mean = j->statistics + token * STATISTICS;
    float sample = j->sample_scale ? j->sample_scale[token / j->tokens_per_sample] : 1;
    float rstd = mean[BLOCKS], means[BLOCKS], along = 0;
    for (int b = 0; b < BLOCKS; b++) {
        int64_t at = (8 * token + START[b]) * copies, n = WIDTH[b] * copies;
        const float *gain = j->gain + GAIN[b] * copies;
        vec sum = {0}, dot = {0};
        for (int64_t i = 0; i < n; i += LANES) {
            vec u = (load(j->stream + at + i, n - i) - mean[b]) * rstd, dy = load(j->grad + at + i, n - i);
            vec g = load(gain + i, n - i) * dy;
            sum += g;
            dot += g * u;
            accumulate(sums + (GAIN_SUM + GAIN[b]) * copies + i, dy * u, n - i);
            if (!b) accumulate(sums + SHIFT_SUM * copies + i, dy, n - i);
        }
        means[b] = total(sum) / n;
        along += total(dot) / (8 * copies);
    }
    for (int b = 0; b < BLOCKS; b++) {
        int64_t at = (8 * token + START[b]) * copies, n = WIDTH[b] * copies;
        const float *gain = j->gain + GAIN[b] * copies, *scale = j->scale ? j->scale + GAIN[b] * copies : 0;
        const float *bias = b ? 0 : j->bias;
        float weight = along * (WIDTH[b] == 2 ? j->pair_weight : 1);
        for (int64_t i = 0; i < n; i += LANES) {
            vec u = (load(j->stream + at + i, n - i) - mean[b]) * rstd;
            vec d = rstd * (load(gain + i, n - i) * load(j->grad + at + i, n - i) - means[b] - weight * u);
            if (j->grad_stream) d += load(j->grad_stream + at + i, n - i);
            store(j->grad_x + at + i, d, n - i);
            if (!j->branch) continue;
            d *= sample;
            if (scale) {
                vec branch = load(j->branch + at + i, n - i);
                if (bias) branch += load(bias + i, n - i);
                accumulate(sums + (SCALE_SUM + GAIN[b]) * copies + i, d * branch, n - i);
                d *= load(scale + i, n - i);
            }
            store(j->grad_branch + at + i, d, n - i);
            if (bias) accumulate(sums + BIAS_SUM * copies + i, d, n - i);
        }
    }
}

static void backward(const void *job, int64_t item, float *scratch) {
    (void)scratch;
    const norm_grad_job *j = job;
    int64_t last = least((item + 1) * TOKENS, j->tokens), size = SUMS * j->copies;
    float *sums = j->sums + item * size;
    memset(sums, 0, size * sizeof(float));
    for (int64_t t = item * TOKENS; t < last; t++) backward_token(j, t, sums);
}

/* Rows of `sums` [items, 14 C/8], to be added up: gradients of gain, shift, scale and bias. */
EXPORT int64_t norm_items(int64_t tokens) { return parts(tokens, TOKENS); }

EXPORT void norm_backward(const float *grad, const float *grad_stream, const float *stream, const float *statistics,
                          const float *gain, const float *branch, const float *bias, const float *scale,
                          const float *sample_scale, float *grad_x, float *grad_branch, float *sums,
                          float pair_weight, int64_t tokens, int64_t tokens_per_sample, int64_t copies,
                          int64_t threads) {
    norm_grad_job job = {grad, grad_stream, stream, statistics, gain, branch, bias, scale, sample_scale,
                         grad_x, grad_branch, sums, pair_weight, tokens, tokens_per_sample, copies};
    share(backward, &job, parts(tokens, TOKENS), threads, 0, 0);
}
