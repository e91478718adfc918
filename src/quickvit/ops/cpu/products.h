/* Products of matrices that fit into a cache, at the speed of the processor's multipliers.

   The columns of the right factor are cut into panels of a few vectors, the rows of the left one into groups. The sums
   of a group and a panel, a tile of the result, stay in registers while they run over the depth. */
#pragma once
#include "parallel.h"
#include "vectors.h"
#include <stdbool.h>

/* Vectors of a panel, and rows of a group: ROWS × PANEL sums and PANEL vectors of the right factor in registers. */
#define PANEL 3
#define ROWS (REGISTERS / 4)
/* Floats of the right factor that meet all rows before the next ones do: they stay in the cache. */
#define CHUNK (1 << 16)

/* A left factor: rows `row` floats apart, their elements `step` apart. */
typedef struct {
    const float *at;
    int64_t row, step;
} left;

/* A right factor: rows `row` floats apart, with whole vectors of columns; or packed into panels, row = PACKED. */
typedef struct {
    const float *at;
    int64_t row;
} right;

#define PACKED 0

static inline int64_t packed_size(int64_t depth, int64_t columns) { return depth * vectors(columns) * LANES; }

/* The first vector of a panel. */
static inline int64_t panel_start(int64_t columns, int64_t panel) {
    return cut(vectors(columns), parts(vectors(columns), PANEL), panel);
}

/* Packs b[depth, columns]: panel after panel, each a matrix of whole vectors, with zeros behind the last column. */
static void pack(const float *b, int64_t row, int64_t column, int64_t depth, int64_t columns, float *packed) {
    for (int64_t panel = 0; panel < parts(vectors(columns), PANEL); panel++) {
        int64_t first = panel_start(columns, panel) * LANES, last = panel_start(columns, panel + 1) * LANES;
        for (int64_t k = 0; k < depth; k++)
            for (int64_t n = first; n < last; n++) *packed++ = n < columns ? b[k * row + n * column] : 0;
    }
}

/* A tile c[rows ≤ ROWS, columns ≤ width · LANES] = a b, or c += a b. */
INLINE void tile(int width, bool add, int64_t rows, int64_t columns, int64_t depth, left a, right b, float *c,
                 int64_t c_row) {
    vec sum[ROWS][PANEL];
    const float *row[ROWS];
    UNROLL for (int m = 0; m < ROWS; m++) {
        /* Rows that are not there repeat the last, and are not stored. */
        row[m] = a.at + least(m, rows - 1) * a.row;
        UNROLL for (int v = 0; v < width; v++) sum[m][v] = (vec){0};
    }
    for (int64_t k = 0; k < depth; k++) {
        vec line[PANEL];
        UNROLL for (int v = 0; v < width; v++) line[v] = load(b.at + k * b.row + v * LANES, LANES);
        UNROLL for (int m = 0; m < ROWS; m++) {
            float x = row[m][k * a.step];
            UNROLL for (int v = 0; v < width; v++) sum[m][v] += x * line[v];
        }
    }
    UNROLL for (int m = 0; m < ROWS; m++) {
        if (m >= rows) break;
        UNROLL for (int v = 0; v < width; v++) {
            float *to = c + m * c_row + v * LANES;
            int64_t some = columns - v * LANES;
            store(to, add ? load(to, some) + sum[m][v] : sum[m][v], some);
        }
    }
}

/* One group of rows with one panel; constant widths, so that each has a loop of its own. */
INLINE void group_with_panel(bool add, int64_t width, int64_t rows, int64_t columns, int64_t depth, left a, right b,
                             float *c, int64_t c_row) {
    switch (width) {
    case 1: tile(1, add, rows, columns, depth, a, b, c, c_row); break;
    case 2: tile(2, add, rows, columns, depth, a, b, c, c_row); break;
    case PANEL: tile(PANEL, add, rows, columns, depth, a, b, c, c_row); break;
    }
}

/* c[rows, columns] = a[rows, depth] b[depth, columns], or c += a b. */
INLINE void multiply(bool add, int64_t rows, int64_t columns, int64_t depth, left a, right b, float *c,
                     int64_t c_row) {
    int64_t panels = parts(vectors(columns), PANEL), chunk = most(1, CHUNK / (depth * PANEL * LANES));
    for (int64_t start = 0; start < panels; start += chunk) {
        int64_t stop = least(start + chunk, panels);
        for (int64_t m = 0; m < rows; m += ROWS) {
            left group = {a.at + m * a.row, a.row, a.step};
            for (int64_t p = start; p < stop; p++) {
                int64_t first = panel_start(columns, p), width = panel_start(columns, p + 1) - first;
                right panel = {b.at + first * LANES, b.row};
                if (b.row == PACKED) panel = (right){b.at + first * LANES * depth, width * LANES};
                group_with_panel(add, width, least(rows - m, ROWS), columns - first * LANES, depth, group, panel,
                                 c + m * c_row + first * LANES, c_row);
            }
        }
    }
}
