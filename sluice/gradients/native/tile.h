/* The one loop in which all the time goes: a small block of a matrix product, kept in registers. */

#ifndef SLUICE_TILE_H
#define SLUICE_TILE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Eight floats anywhere in memory; compilers split them in two where registers hold only four. */
typedef float floats __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(32), aligned(4), may_alias));

enum { LANES = 8, TILE_ROWS = 6, TILE_COLUMNS = 2 * LANES };

typedef struct {
    floats row[TILE_ROWS][2];
} Tile;

enum { LINE = 16 }; /* floats in a line of the cache */

/* Ask for memory that will be read, or written, soon. It may lie beyond the end of an array. */
static inline void soon_read(const float *from, int64_t count) {
    for (int64_t k = 0; k < count; k += LINE) __builtin_prefetch(from + k, 0);
}

static inline void soon_written(const float *from, int64_t count) {
    for (int64_t k = 0; k < count; k += LINE) __builtin_prefetch(from + k, 1);
}

/* Memory that starts with a line of the cache, so that no load needs two; null where there is none. */
static inline float *aligned_floats(int64_t count) {
    int64_t lines = count / LINE + 1;
    return aligned_alloc(LINE * sizeof(float), (size_t)lines * LINE * sizeof(float));
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t tiles_in(int64_t columns) { return (columns + TILE_COLUMNS - 1) / TILE_COLUMNS; }

/* Columns first..first+15 of a row-major matrix as one contiguous block, zeros beyond the last. */
static inline void pack_tile(int64_t rows, int64_t columns, int64_t first, const float *from, int64_t step, float *to) {
    int64_t width = smaller(columns - first, TILE_COLUMNS);
    for (int64_t i = 0; i < rows; i++, from += step, to += TILE_COLUMNS) {
        if (width == TILE_COLUMNS) {
            memcpy(to, from + first, TILE_COLUMNS * sizeof(float));
        } else {
            memset(to, 0, TILE_COLUMNS * sizeof(float));
            memcpy(to, from + first, (size_t)width * sizeof(float));
        }
    }
}

/* The product, summed over k, of rows whose entry k is rows[r][offsets[k]] with a packed block of a matrix. */
static inline __attribute__((always_inline)) Tile tile_product(
    const float *const rows[TILE_ROWS], const int64_t *offsets, int64_t count, const float *packed
) {
    Tile sum;
    const float *r0 = rows[0], *r1 = rows[1], *r2 = rows[2], *r3 = rows[3], *r4 = rows[4], *r5 = rows[5];
    floats a0 = {0}, a1 = {0}, b0 = {0}, b1 = {0}, c0 = {0}, c1 = {0};
    floats d0 = {0}, d1 = {0}, e0 = {0}, e1 = {0}, f0 = {0}, f1 = {0};
    for (int64_t k = 0; k < count; k++, packed += TILE_COLUMNS) {
        int64_t at = offsets[k];
        floats left = *(const floats *)packed, right = *(const floats *)(packed + LANES);
        a0 += r0[at] * left, a1 += r0[at] * right;
        b0 += r1[at] * left, b1 += r1[at] * right;
        c0 += r2[at] * left, c1 += r2[at] * right;
        d0 += r3[at] * left, d1 += r3[at] * right;
        e0 += r4[at] * left, e1 += r4[at] * right;
        f0 += r5[at] * left, f1 += r5[at] * right;
    }
    sum.row[0][0] = a0, sum.row[0][1] = a1, sum.row[1][0] = b0, sum.row[1][1] = b1;
    sum.row[2][0] = c0, sum.row[2][1] = c1, sum.row[3][0] = d0, sum.row[3][1] = d1;
    sum.row[4][0] = e0, sum.row[4][1] = e1, sum.row[5][0] = f0, sum.row[5][1] = f1;
    return sum;
}

/* The first columns of one row of a tile. */
static inline void store_row(const floats row[2], int64_t columns, float *to) {
    if (columns >= TILE_COLUMNS) memcpy(to, row, TILE_COLUMNS * sizeof(float));
    else memcpy(to, row, (size_t)columns * sizeof(float));
}

#endif
