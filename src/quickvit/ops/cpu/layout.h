/* The blocks of a packed feature of C channels: A1, A2, B1, B2 and the two components of E. */
#pragma once
#include <stdint.h>

#define BLOCKS 6

/* Their first channel and their width, in units of C/8. */
static const int64_t START[BLOCKS] = {0, 1, 2, 3, 4, 6}, WIDTH[BLOCKS] = {1, 1, 1, 1, 2, 2};
