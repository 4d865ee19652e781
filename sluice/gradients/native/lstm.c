/*
 * A whole LSTM layer, forward and backward, for a few samples at a time: they go through all steps while their states are
 * in the cache, and no thread waits for another.
 *
 * Memory is [direction][sample][step][...]. Samples are sorted by decreasing length. The second direction sees each
 * sample from its own end. Gates are in the order i, f, o, g. Steps after a sample's end are neither read nor written.
 */

#include "activations.h"

enum { BLOCK = 4 * TILE_ROWS };

typedef struct {
    int64_t n, steps, features, hidden, directions;
    const int64_t *lengths;            /* of each sample; null where all have all steps */
    const float *weights, *bias;       /* [direction][features + hidden][4 hidden], [direction][4 hidden] */
    float *inputs;                     /* [steps + 1][features + hidden]: x and the state before each step */
    float *gates;                      /* [steps][4 hidden]: activations, after the backward pass their derivatives */
    float *cells, *tanh_cells;         /* [steps + 1][hidden], [steps][hidden] */
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

/* Activations of one step of one sample, from products without bias. */
static void activate(
    int64_t hidden, const float *bias, const float *product, float *z,
    const float *before, float *c, float *tanh_c, float *h, float *y
) {
    for (int64_t k = 0; k < hidden; k += LANES) {
        int64_t width = hidden - k;
        floats gate[4];
        for (int g = 0; g < 4; g++) {
            floats a = part_of(product + g * hidden + k, width) + part_of(bias + g * hidden + k, width);
            gate[g] = g == 3 ? hyperbolic_tangent(a) : logistic(a);
        }
        floats cell = gate[1] * part_of(before + k, width) + gate[0] * gate[3];
        floats squashed = hyperbolic_tangent(cell), state = gate[2] * squashed;
        for (int g = 0; g < 4; g++) put(gate[g], z + g * hidden + k, width);
        put(cell, c + k, width);
        put(squashed, tanh_c + k, width);
        put(state, h + k, width);
        put(state, y + k, width);
    }
}

/* Pre-activation derivatives of one step of one sample, over its activations. dc is taken on to the step before. */
static void derive(
    int64_t hidden, float *z, const float *before, const float *tanh_c, const float *dh, const float *dy, float *dc
) {
    for (int64_t k = 0; k < hidden; k += LANES) {
        int64_t width = hidden - k;
        floats i = part_of(z + k, width), f = part_of(z + hidden + k, width);
        floats o = part_of(z + 2 * hidden + k, width), g = part_of(z + 3 * hidden + k, width);
        floats squashed = part_of(tanh_c + k, width), d = part_of(dh + k, width);
        if (dy) d += part_of(dy + k, width);
        floats cell = part_of(dc + k, width) + d * o * (1.0f - squashed * squashed);
        put(cell * g * i * (1.0f - i), z + k, width);
        put(cell * part_of(before + k, width) * f * (1.0f - f), z + hidden + k, width);
        put(d * squashed * o * (1.0f - o), z + 2 * hidden + k, width);
        put(cell * i * (1.0f - g * g), z + 3 * hidden + k, width);
        put(cell * f, dc + k, width);
    }
}

static void forward_block(
    const Layer *l, int64_t direction, int64_t first, int64_t count,
    const float *packed, const int64_t *count_up, float *scratch
) {
    int64_t hidden = l->hidden, width = l->features + hidden;
    for (int64_t t = 0; t < l->steps; t++) {
        int64_t rows = running(l, first, count, t);
        const float *row[BLOCK];
        float *out[BLOCK];
        for (int64_t r = 0; r < rows; r++) {
            int64_t i = first + r, sample = direction * l->n + i;
            float *input = l->inputs + (sample * (l->steps + 1) + t) * width;
            const float *x = l->x + time_of(l, direction, i, t) * l->x_time + i * l->x_sample;
            memcpy(input, x, (size_t)l->features * sizeof(float));
            row[r] = input;
            out[r] = scratch + r * 4 * hidden;
            soon_written(input + 2 * width, width);
            soon_written(l->gates + (sample * l->steps + t + 1) * 4 * hidden, 4 * hidden);
        }
        product(rows, width, 4 * hidden, row, count_up, packed, out);
        for (int64_t r = 0; r < rows; r++) {
            int64_t i = first + r, sample = direction * l->n + i;
            float *cell = l->cells + (sample * (l->steps + 1) + t) * hidden;
            activate(
                hidden, l->bias + direction * 4 * hidden, out[r], l->gates + (sample * l->steps + t) * 4 * hidden,
                cell, cell + hidden, l->tanh_cells + (sample * l->steps + t) * hidden,
                l->inputs + (sample * (l->steps + 1) + t + 1) * width + l->features,
                l->y + time_of(l, direction, i, t) * l->y_time + i * l->y_sample + direction * hidden
            );
        }
    }
}

static void backward_block(
    const Layer *l, int64_t direction, int64_t first, int64_t count,
    const float *packed, const int64_t *count_up, float *scratch
) {
    int64_t hidden = l->hidden, features = l->dx ? l->features : 0, width = features + hidden;
    for (int64_t t = l->steps - 1; t >= 0; t--) {
        int64_t rows = running(l, first, count, t);
        const float *row[BLOCK];
        float *out[BLOCK];
        for (int64_t r = 0; r < rows; r++) {
            int64_t i = first + r, sample = direction * l->n + i;
            float *gates = l->gates + (sample * l->steps + t) * 4 * hidden;
            const float *dy = l->dy;
            if (dy) dy += time_of(l, direction, i, t) * l->dy_time + i * l->dy_sample + direction * hidden;
            derive(
                hidden, gates, l->cells + (sample * (l->steps + 1) + t) * hidden,
                l->tanh_cells + (sample * l->steps + t) * hidden, l->dh + sample * hidden, dy, l->dc + sample * hidden
            );
            row[r] = gates;
            soon_read(gates - 4 * hidden, 4 * hidden);
            soon_read(l->cells + (sample * (l->steps + 1) + t - 1) * hidden, hidden);
            soon_read(l->tanh_cells + (sample * l->steps + t - 1) * hidden, hidden);
            out[r] = scratch + r * width;
        }
        product(rows, 4 * hidden, width, row, count_up, packed, out);
        for (int64_t r = 0; r < rows; r++) {
            int64_t i = first + r;
            memcpy(l->dh + (direction * l->n + i) * hidden, out[r] + features, (size_t)hidden * sizeof(float));
            if (!l->dx) continue;
            float *dx = l->dx + time_of(l, direction, i, t) * l->dx_time + i * l->dx_sample;
            if (direction) for (int64_t k = 0; k < features; k++) dx[k] += out[r][k];
            else memcpy(dx, out[r], (size_t)features * sizeof(float));
        }
    }
}

/* One direction's weights in the form that products take, transposed for the backward pass. */
static void pack_weights(const Layer *l, int64_t direction, int backward, float *transposed, float *packed) {
    int64_t width = l->features + l->hidden, columns = 4 * l->hidden, inner = width, skipped = 0;
    const float *matrix = l->weights + direction * width * columns;
    if (backward) {
        for (int64_t i = 0; i < width; i++)
            for (int64_t j = 0; j < columns; j++) transposed[j * width + i] = matrix[i * columns + j];
        skipped = l->dx ? 0 : l->features;
        matrix = transposed + skipped;
        inner = columns, columns = width - skipped;
    }
    int64_t step = backward ? width : columns;
    for (int64_t j = 0; j < tiles_in(columns); j++)
        pack_tile(inner, columns, j * TILE_COLUMNS, matrix, step, packed + j * inner * TILE_COLUMNS);
}

static int run(const Layer *l, int backward) {
    int64_t width = l->features + l->hidden, gates = 4 * l->hidden;
    int64_t inner = backward ? gates : width, columns = backward ? width : gates;
    int64_t packed_size = tiles_in(columns) * inner * TILE_COLUMNS, blocks = (l->n + BLOCK - 1) / BLOCK;
    float *packed = aligned_floats(l->directions * packed_size + width * gates);
    int64_t *count_up = malloc((size_t)inner * sizeof(int64_t));
    float *scratch = aligned_floats(l->threads * BLOCK * columns);
    int failed = !packed || !count_up || !scratch;
    if (!failed) {
        for (int64_t d = 0; d < l->directions; d++)
            pack_weights(l, d, backward, packed + l->directions * packed_size, packed + d * packed_size);
        for (int64_t k = 0; k < inner; k++) count_up[k] = k;
#pragma omp parallel for schedule(static, 1) num_threads(l->threads)
        for (int part = 0; part < l->threads; part++) {
            float *own = scratch + part * BLOCK * columns;
            for (int64_t b = part; b < blocks; b += l->threads) { /* by turns: lengths decrease */
                int64_t first = b * BLOCK, count = smaller(l->n - first, BLOCK);
                for (int64_t d = 0; d < l->directions; d++) {
                    const float *weights = packed + d * packed_size;
                    if (backward) backward_block(l, d, first, count, weights, count_up, own);
                    else forward_block(l, d, first, count, weights, count_up, own);
                }
            }
        }
    }
    free(packed), free(count_up), free(scratch);
    return failed;
}

/* Both return 0, or 1 where memory ran out. */
int lstm_forward(const Layer *layer) { return run(layer, 0); }

int lstm_backward(const Layer *layer) { return run(layer, 1); }
