#pragma once
#include <stdint.h>

/* GELU of tokens [8 copies] that lie `row` floats apart, after adding `bias` [copies] to A1; y may be x. */
void gelu_tokens(const float *x, const float *bias, float *y, int64_t row, int64_t tokens, int64_t copies);
