/* GELU through the regular domain, y = Qᵀ GELU(Q x), and its gradient. */
#include "gelu.h"
#include "parallel.h"
#include "vectors.h"

/* Tokens of an item of work. */
#define TOKENS 16
#define SQRT2_OVER_4 0.35355339059327376220f

/* The eight sub-tokens of a few channels. */
typedef struct {
    vec at[8];
} octet;

/* √2/4 (x + bias on A1), for the next n channels. */
INLINE octet load_octet(const float *x, const float *bias, int64_t copies, int64_t n) {
    octet o;
    UNROLL for (int i = 0; i < 8; i++) o.at[i] = load(x + i * copies, n);
    if (bias) o.at[0] += load(bias, n);
    UNROLL for (int i = 0; i < 8; i++) o.at[i] *= SQRT2_OVER_4;
    return o;
}

INLINE void store_octet(float *y, octet o, int64_t copies, int64_t n) {
    UNROLL for (int i = 0; i < 8; i++) store(y + i * copies, SQRT2_OVER_4 * o.at[i], n);
}

/* The inverse Fourier transform Q without its factor √2/4. */
INLINE octet to_regular(octet x) {
    vec a = x.at[0] + x.at[1], b = x.at[0] - x.at[1], c = x.at[2] + x.at[3], d = x.at[2] - x.at[3];
    vec e = x.at[4] + x.at[6], f = x.at[4] - x.at[6], g = x.at[5] + x.at[7], h = x.at[5] - x.at[7];
    vec apc = a + c, amc = a - c, bpd = b + d, bmd = b - d;
    vec eph = e + h, emh = e - h, fpg = f + g, fmg = f - g;
    return (octet){{apc + eph, amc + fmg, apc - eph, amc - fmg, bpd - fpg, bmd - emh, bpd + fpg, bmd + emh}};
}

/* Its transpose. */
INLINE octet to_isotypic(octet r) {
    vec apc = r.at[0] + r.at[2], eph = r.at[0] - r.at[2], amc = r.at[1] + r.at[3], fmg = r.at[1] - r.at[3];
    vec bpd = r.at[4] + r.at[6], fpg = r.at[6] - r.at[4], bmd = r.at[5] + r.at[7], emh = r.at[7] - r.at[5];
    vec a = apc + amc, c = apc - amc, b = bpd + bmd, d = bpd - bmd;
    vec e = eph + emh, h = eph - emh, f = fpg + fmg, g = fpg - fmg;
    return (octet){{a + b, a - b, c + d, c - d, e + f, g + h, e - f, g - h}};
}

void gelu_tokens(const float *x, const float *bias, float *y, int64_t row, int64_t tokens, int64_t copies) {
    for (int64_t t = 0; t < tokens; t++, x += row, y += row) {
        for (int64_t i = 0; i < copies; i += LANES) {
            octet o = to_regular(load_octet(x + i, bias ? bias + i : 0, copies, copies - i));
            UNROLL for (int k = 0; k < 8; k++) o.at[k] = gelu(o.at[k]);
            store_octet(y + i, to_isotypic(o), copies, copies - i);
        }
    }
}

typedef struct {
    const float *grad, *x, *bias;
    float *result;
    int64_t tokens, copies;
} gelu_job;

static void forward(const void *job, int64_t item, float *scratch) {
    (void)scratch;
    const gelu_job *j = job;
    int64_t first = item * TOKENS, row = 8 * j->copies, tokens = least(TOKENS, j->tokens - first);
    gelu_tokens(j->x + first * row, j->bias, j->result + first * row, row, tokens, j->copies);
}

EXPORT void gelu_forward(const float *x, const float *bias, float *y, int64_t tokens, int64_t copies, int64_t threads) {
    gelu_job job = {0, x, bias, y, tokens, copies};
    share(forward, &job, parts(tokens, TOKENS), threads, 0, 0);
}

static void backward(const void *job, int64_t item, float *scratch) {
    (void)scratch;
    const gelu_job *j = job;
    int64_t copies = j->copies, last = least((item + 1) * TOKENS, j->tokens);
    for (int64_t t = item * TOKENS; t < last; t++) {
        for (int64_t i = 0; i < copies; i += LANES) {
            int64_t at = 8 * copies * t + i, n = copies - i;
            octet o = to_regular(load_octet(j->x + at, j->bias ? j->bias + i : 0, copies, n));
            octet grad = to_regular(load_octet(j->grad + at, 0, copies, n));
            UNROLL for (int k = 0; k < 8; k++) o.at[k] = grad.at[k] * gelu_slope(o.at[k]);
            store_octet(j->result + at, to_isotypic(o), copies, n);
        }
    }
}

EXPORT void gelu_backward(const float *grad, const float *x, const float *bias, float *grad_x, int64_t tokens,
                          int64_t copies, int64_t threads) {
    gelu_job job = {grad, x, bias, grad_x, tokens, copies};
    share(backward, &job, parts(tokens, TOKENS), threads, 0, 0);
}
