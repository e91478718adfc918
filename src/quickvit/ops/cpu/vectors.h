/* Vectors as wide as the processor's, and functions of their elements. */
#pragma once
#include <stdint.h>
#include <string.h>

/* Floats per vector, and vector registers. */
#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 32
#elif defined(__AVX__)
#define LANES 8
#define REGISTERS 16
#elif defined(__aarch64__)
#define LANES 4
#define REGISTERS 32
#else
#define LANES 4
#define REGISTERS 16
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
/* A vector in memory, at any address. */
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define LOG2E 1.44269504088896340736f
#define LN2 0.69314718055994530942f

/* Vectors that hold so many floats. */
static inline int64_t vectors(int64_t floats) { return (floats + LANES - 1) / LANES; }

INLINE vec all(float x) { return x - (vec){0}; }

/* The first n floats at p, or as many as a vector has, with zeros behind them. */
INLINE vec load(const float *p, int64_t n) {
    if (n >= LANES) return *(const loose *)p;
    vec v = {0};
    if (n > 0) memcpy(&v, p, n * sizeof(float));
    return v;
}

INLINE void store(float *p, vec v, int64_t n) {
    if (n >= LANES)
        *(loose *)p = v;
    else if (n > 0)
        memcpy(p, &v, n * sizeof(float));
}

/* The first n elements, with zeros behind them. */
INLINE vec keep(vec v, int64_t n) {
    if (n >= LANES) return v;
    vec kept = {0};
    if (n > 0) memcpy(&kept, &v, n * sizeof(float));
    return kept;
}

INLINE float total(vec v) {
    float sum = 0;
    UNROLL for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

INLINE vec choose(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }
INLINE vec magnitude(vec x) { return (vec)((ivec)x & 0x7fffffff); }

/* 2^x for x ≤ 127; 2^−125 for everything below −125. */
INLINE vec power_of_two(vec x) {
    /* A float of this size has no digits for fractions: the last bits of the sum are those of the nearest integer. */
    const float rounder = 0x1.8p23f;
    x = larger(all(-125), x);
    vec whole = x + rounder, f = x - (whole - rounder);
    /* The Taylor series of 2^f for |f| ≤ 1/2, to within 6e-9. */
    const float c1 = LN2, c2 = LN2 / 2 * c1, c3 = LN2 / 3 * c2, c4 = LN2 / 4 * c3, c5 = LN2 / 5 * c4,
                c6 = LN2 / 6 * c5, c7 = LN2 / 7 * c6;
    vec y = ((((((c7 * f + c6) * f + c5) * f + c4) * f + c3) * f + c2) * f + c1) * f + 1;
    return (vec)((ivec)y + ((ivec)whole << 23));
}

/* Φ(−a) for a ≥ 0, the tail of the normal distribution, as 2^p(a).
   Of the polynomials of degree 8 with p(0) = −1, p has the least maximum of max(1, a) |Φ(−a) − 2^p(a)|: 1.5e-8. */
INLINE vec normal_tail(vec a) {
    vec p = all(-2.33494869e-6f);
    p = p * a + 3.37378128e-5f;
    p = p * a - 1.61293819e-4f;
    p = p * a - 1.91703582e-4f;
    p = p * a + 7.12686520e-3f;
    p = p * a - 5.25336132e-2f;
    p = p * a - 4.59198282e-1f;
    p = p * a - 1.15110604f;
    return power_of_two(p * a - 1);
}

/* x Φ(x) */
INLINE vec gelu(vec x) {
    vec a = magnitude(x);
    return 0.5f * (x + a) - a * normal_tail(a);
}

/* The derivative of GELU, Φ(x) + x φ(x). */
INLINE vec gelu_slope(vec x) {
    const float log2_of_peak = -1.32574806473615883f; /* log2(1/√(2π)) */
    vec tail = normal_tail(magnitude(x)), density = power_of_two(log2_of_peak - 0.5f * LOG2E * x * x);
    return choose(x > 0, 1 - tail, tail) + x * density;
}
