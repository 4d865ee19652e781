/*
 * What LSTMs and GRUs share: a whole layer, forward or backward, for a few samples at a time. They go through all steps while
 * their states are in the cache, and no thread waits for another.
 *
 * Memory is [direction][sample][step][...]. Samples are sorted by decreasing length. The second direction sees each
 * sample from its own end. There are four blocks of gates. Steps after a sample's end are neither read nor written.
 */

#ifndef SLUICE_RECURRENT_H
#define SLUICE_RECURRENT_H

#include "activations.h"

enum { BLOCK = 4 * TILE_ROWS };

typedef struct {
    int64_t n, steps, features, hidden, directions;
    const int64_t *lengths;            /* of each sample; null where all have all steps */
    const float *weights, *bias;       /* [direction][features + hidden][4 hidden], [direction][4 hidden] */
    float *inputs;                     /* [steps + 1][features + hidden]: x and the state before each step */
    float *gates;                      /* [steps][4 hidden]: activations, after the backward pass their derivatives */
    float *cells, *tanh_cells;         /* of LSTMs: [steps + 1][hidden], [steps][hidden] */
    const float *x;
    int64_t x_time, x_sample;
    float *y;                          /* [directions * hidden] at each time of each sample */
    int64_t y_time, y_sample;
    const float *dy;                   /* as y; null for zero */
    int64_t dy_time, dy_sample;
    float *dx;                         /* as x; null where not wanted */
    int64_t dx_time, dx_sample;
    float *dh, *dc;                    /* [direction][n][hidden]: of the states after the last step, then before the first */
    int threads;
} Layer;

static int64_t length_of(const Layer *l, int64_t i) { return l->lengths ? l->lengths[i] : l->steps; }

static int64_t time_of(const Layer *l, int64_t direction, int64_t i, int64_t t) {
    return direction ? length_of(l, i) - 1 - t : t;
}

/* How many of the block's samples have step t; they are its first ones. */
static int64_t running(const Layer *l, int64_t first, int64_t count, int64_t t) {
    while (count && length_of(l, first + count - 1) <= t) count--;
    return count;
}

static inline floats part_of(const float *from, int64_t width) {
    floats v = {0};
    if (width >= LANES) return *(const floats *)from;
    memcpy(&v, from, (size_t)width * sizeof(float));
    return v;
}

static inline void put(floats v, float *to, int64_t width) {
    if (width >= LANES) *(floats *)to = v;
    else memcpy(to, &v, (size_t)width * sizeof(float));
}

/* out[r][...] = rows[r] times a packed matrix, for any number of rows and columns. */
static void product(
    int64_t rows, int64_t inner, int64_t columns,
    const float *const *row, const int64_t *count_up, const float *packed, float *const *out
) {
    for (int64_t j = 0; j < tiles_in(columns); j++) {
        for (int64_t first = 0; first < rows; first += TILE_ROWS) {
            int64_t here = smaller(rows - first, TILE_ROWS);
            const float *some[TILE_ROWS];
            for (int64_t r = 0; r < TILE_ROWS; r++) some[r] = row[first + (r < here ? r : 0)];
            Tile tile = tile_product(some, count_up, inner, packed + j * inner * TILE_COLUMNS);
            for (int64_t r = 0; r < here; r++)
                store_row(tile.row[r], columns - j * TILE_COLUMNS, out[first + r] + j * TILE_COLUMNS);
        }
    }
}

/* One direction of a layer, forward or backward. */
typedef struct {
    int64_t (*packed_size)(const Layer *l);
    /* The weights in the form that products take. transposed is memory for them the other way round. */
    void (*pack)(const Layer *l, const float *matrix, float *transposed, float *packed);
    /* All steps of some samples. count_up is 0, 1, 2, ... for each entry of the longest row. */
    void (*block)(
        const Layer *l, int64_t direction, int64_t first, int64_t count,
        const float *packed, const int64_t *count_up, float *scratch
    );
} Pass;

static void pack_matrix(int64_t rows, int64_t columns, const float *matrix, int64_t step, float *packed) {
    for (int64_t j = 0; j < tiles_in(columns); j++)
        pack_tile(rows, columns, j * TILE_COLUMNS, matrix, step, packed + j * rows * TILE_COLUMNS);
}

static int64_t size_packed(int64_t rows, int64_t columns) { return tiles_in(columns) * rows * TILE_COLUMNS; }

static void transpose(const Layer *l, const float *matrix, float *transposed) {
    int64_t width = l->features + l->hidden, columns = 4 * l->hidden;
    for (int64_t i = 0; i < width; i++)
        for (int64_t j = 0; j < columns; j++) transposed[j * width + i] = matrix[i * columns + j];
}

/* The derivatives at the state before and, if wanted, at the input. Those of the second direction are added. */
static void take_dx(const Layer *l, int64_t direction, int64_t i, int64_t t, const float *derivatives) {
    float *dx = l->dx + time_of(l, direction, i, t) * l->dx_time + i * l->dx_sample;
    if (direction) for (int64_t k = 0; k < l->features; k++) dx[k] += derivatives[k];
    else memcpy(dx, derivatives, (size_t)l->features * sizeof(float));
}

/* Returns 0, or 1 where memory ran out. */
static int run(const Layer *l, const Pass *pass) {
    int64_t width = l->features + l->hidden, gates = 4 * l->hidden, longest = width > gates ? width : gates;
    int64_t packed_size = pass->packed_size(l), blocks = (l->n + BLOCK - 1) / BLOCK;
    float *packed = aligned_floats(l->directions * packed_size + width * gates);
    int64_t *count_up = malloc((size_t)longest * sizeof(int64_t));
    float *scratch = aligned_floats(l->threads * BLOCK * longest);
    int failed = !packed || !count_up || !scratch;
    if (!failed) {
        float *transposed = packed + l->directions * packed_size;
        for (int64_t d = 0; d < l->directions; d++)
            pass->pack(l, l->weights + d * width * gates, transposed, packed + d * packed_size);
        for (int64_t k = 0; k < longest; k++) count_up[k] = k;
#pragma omp parallel for schedule(static, 1) num_threads(l->threads)
        for (int part = 0; part < l->threads; part++) {
            float *own = scratch + part * BLOCK * longest;
            for (int64_t b = part; b < blocks; b += l->threads) { /* by turns: lengths decrease */
                int64_t first = b * BLOCK, count = smaller(l->n - first, BLOCK);
                for (int64_t d = 0; d < l->directions; d++)
                    pass->block(l, d, first, count, packed + d * packed_size, count_up, own);
            }
        }
    }
    free(packed), free(count_up), free(scratch);
    return failed;
}

#endif
