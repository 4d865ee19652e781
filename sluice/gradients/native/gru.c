/*
 * GRUs: gates are in the order n, r, z, s, where s is what the state gives to the new gate: n = tanh(.. + r s). The input has a
 * part in the first three and the state in the last three, and no products are made for the others.
 */

#include "recurrent.h"

/* Activations of one step of one sample, from products without bias. */
static void gru_activate(
    int64_t hidden, const float *bias, const float *product, float *gates, const float *before, float *h, float *y
) {
    for (int64_t k = 0; k < hidden; k += LANES) {
        int64_t width = hidden - k;
        floats a[4];
        for (int g = 0; g < 4; g++) a[g] = part_of(product + g * hidden + k, width) + part_of(bias + g * hidden + k, width);
        floats reset = logistic(a[1]), update = logistic(a[2]), fresh = hyperbolic_tangent(a[0] + reset * a[3]);
        floats state = fresh + update * (part_of(before + k, width) - fresh);
        put(fresh, gates + k, width);
        put(reset, gates + hidden + k, width);
        put(update, gates + 2 * hidden + k, width);
        put(a[3], gates + 3 * hidden + k, width);
        put(state, h + k, width);
        put(state, y + k, width);
    }
}

/* Pre-activation derivatives of one step of one sample, over its activations. dh keeps what passes the cell by. */
static void gru_derive(int64_t hidden, float *gates, const float *before, const float *dy, float *dh) {
    for (int64_t k = 0; k < hidden; k += LANES) {
        int64_t width = hidden - k;
        floats fresh = part_of(gates + k, width), reset = part_of(gates + hidden + k, width);
        floats update = part_of(gates + 2 * hidden + k, width), from_state = part_of(gates + 3 * hidden + k, width);
        floats d = part_of(dh + k, width);
        if (dy) d += part_of(dy + k, width);
        floats inner = d * (1.0f - update) * (1.0f - fresh * fresh);
        put(inner, gates + k, width);
        put(inner * from_state * reset * (1.0f - reset), gates + hidden + k, width);
        put(d * (part_of(before + k, width) - fresh) * update * (1.0f - update), gates + 2 * hidden + k, width);
        put(inner * reset, gates + 3 * hidden + k, width);
        put(d * update, dh + k, width);
    }
}

static void gru_forward_block(
    const Layer *l, int64_t direction, int64_t first, int64_t count,
    const float *packed, const int64_t *count_up, float *scratch
) {
    int64_t hidden = l->hidden, features = l->features, width = features + hidden;
    const float *both = packed, *input_only = both + size_packed(width, 2 * hidden);
    const float *state_only = input_only + size_packed(features, hidden);
    for (int64_t t = 0; t < l->steps; t++) {
        int64_t rows = running(l, first, count, t);
        const float *row[BLOCK], *state[BLOCK];
        float *out[BLOCK], *middle[BLOCK], *last[BLOCK];
        for (int64_t r = 0; r < rows; r++) {
            int64_t i = first + r, sample = direction * l->n + i;
            float *input = l->inputs + (sample * (l->steps + 1) + t) * width;
            const float *x = l->x + time_of(l, direction, i, t) * l->x_time + i * l->x_sample;
            memcpy(input, x, (size_t)features * sizeof(float));
            row[r] = input, state[r] = input + features;
            out[r] = scratch + r * 4 * hidden, middle[r] = out[r] + hidden, last[r] = out[r] + 3 * hidden;
            soon_written(input + 2 * width, width);
            soon_written(l->gates + (sample * l->steps + t + 1) * 4 * hidden, 4 * hidden);
        }
        product(rows, width, 2 * hidden, row, count_up, both, middle);
        product(rows, features, hidden, row, count_up, input_only, out);
        product(rows, hidden, hidden, state, count_up, state_only, last);
        for (int64_t r = 0; r < rows; r++) {
            int64_t i = first + r, sample = direction * l->n + i;
            gru_activate(
                hidden, l->bias + direction * 4 * hidden, out[r], l->gates + (sample * l->steps + t) * 4 * hidden,
                state[r], l->inputs + (sample * (l->steps + 1) + t + 1) * width + features,
                l->y + time_of(l, direction, i, t) * l->y_time + i * l->y_sample + direction * hidden
            );
        }
    }
}

static void gru_backward_block(
    const Layer *l, int64_t direction, int64_t first, int64_t count,
    const float *packed, const int64_t *count_up, float *scratch
) {
    int64_t hidden = l->hidden, features = l->features, width = features + hidden;
    const float *to_state = packed, *to_input = packed + size_packed(3 * hidden, hidden);
    for (int64_t t = l->steps - 1; t >= 0; t--) {
        int64_t rows = running(l, first, count, t);
        const float *of_input[BLOCK], *of_state[BLOCK];
        float *out[BLOCK], *dx[BLOCK];
        for (int64_t r = 0; r < rows; r++) {
            int64_t i = first + r, sample = direction * l->n + i;
            float *gates = l->gates + (sample * l->steps + t) * 4 * hidden;
            const float *dy = l->dy;
            if (dy) dy += time_of(l, direction, i, t) * l->dy_time + i * l->dy_sample + direction * hidden;
            const float *before = l->inputs + (sample * (l->steps + 1) + t) * width + features;
            gru_derive(hidden, gates, before, dy, l->dh + sample * hidden);
            of_input[r] = gates, of_state[r] = gates + hidden;
            soon_read(gates - 4 * hidden, 4 * hidden);
            soon_read(before - width, hidden);
            out[r] = scratch + r * width, dx[r] = out[r] + hidden;
        }
        product(rows, 3 * hidden, hidden, of_state, count_up, to_state, out);
        if (l->dx) product(rows, 3 * hidden, features, of_input, count_up, to_input, dx);
        for (int64_t r = 0; r < rows; r++) {
            float *dh = l->dh + (direction * l->n + first + r) * hidden;
            for (int64_t k = 0; k < hidden; k++) dh[k] += out[r][k];
            if (l->dx) take_dx(l, direction, first + r, t, dx[r]);
        }
    }
}

static int64_t gru_forward_size(const Layer *l) {
    int64_t hidden = l->hidden, features = l->features;
    return size_packed(features + hidden, 2 * hidden) + size_packed(features, hidden) + size_packed(hidden, hidden);
}

static void gru_forward_pack(const Layer *l, const float *matrix, float *transposed, float *packed) {
    int64_t hidden = l->hidden, features = l->features, columns = 4 * hidden;
    (void)transposed;
    pack_matrix(features + hidden, 2 * hidden, matrix + hidden, columns, packed);
    packed += size_packed(features + hidden, 2 * hidden);
    pack_matrix(features, hidden, matrix, columns, packed);
    packed += size_packed(features, hidden);
    pack_matrix(hidden, hidden, matrix + features * columns + 3 * hidden, columns, packed);
}

static int64_t gru_backward_size(const Layer *l) {
    return size_packed(3 * l->hidden, l->hidden) + size_packed(3 * l->hidden, l->features);
}

static void gru_backward_pack(const Layer *l, const float *matrix, float *transposed, float *packed) {
    int64_t hidden = l->hidden, width = l->features + hidden;
    transpose(l, matrix, transposed);
    pack_matrix(3 * hidden, hidden, transposed + hidden * width + l->features, width, packed);
    pack_matrix(3 * hidden, l->features, transposed, width, packed + size_packed(3 * hidden, hidden));
}

/* Both return 0, or 1 where memory ran out. */
int gru_forward(const Layer *layer) { return run(layer, &(Pass){gru_forward_size, gru_forward_pack, gru_forward_block}); }

int gru_backward(const Layer *layer) {
    return run(layer, &(Pass){gru_backward_size, gru_backward_pack, gru_backward_block});
}
