/* LSTMs: gates are in the order i, f, o, g. */

#include "recurrent.h"

/* Activations of one step of one sample, from products without bias. */
static void lstm_activate(
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
static void lstm_derive(
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

static void lstm_forward_block(
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
            lstm_activate(
                hidden, l->bias + direction * 4 * hidden, out[r], l->gates + (sample * l->steps + t) * 4 * hidden,
                cell, cell + hidden, l->tanh_cells + (sample * l->steps + t) * hidden,
                l->inputs + (sample * (l->steps + 1) + t + 1) * width + l->features,
                l->y + time_of(l, direction, i, t) * l->y_time + i * l->y_sample + direction * hidden
            );
        }
    }
}

static void lstm_backward_block(
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
            lstm_derive(
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
            if (l->dx) take_dx(l, direction, i, t, out[r]);
        }
    }
}

static int64_t lstm_forward_size(const Layer *l) { return size_packed(l->features + l->hidden, 4 * l->hidden); }

static void lstm_forward_pack(const Layer *l, const float *matrix, float *transposed, float *packed) {
    (void)transposed;
    pack_matrix(l->features + l->hidden, 4 * l->hidden, matrix, 4 * l->hidden, packed);
}

static int64_t lstm_backward_size(const Layer *l) { return size_packed(4 * l->hidden, l->features + l->hidden); }

static void lstm_backward_pack(const Layer *l, const float *matrix, float *transposed, float *packed) {
    int64_t width = l->features + l->hidden, skipped = l->dx ? 0 : l->features;
    transpose(l, matrix, transposed);
    pack_matrix(4 * l->hidden, width - skipped, transposed + skipped, width, packed);
}

/* Both return 0, or 1 where memory ran out. */
int lstm_forward(const Layer *layer) {
    return run(layer, &(Pass){lstm_forward_size, lstm_forward_pack, lstm_forward_block});
}

int lstm_backward(const Layer *layer) {
    return run(layer, &(Pass){lstm_backward_size, lstm_backward_pack, lstm_backward_block});
}
