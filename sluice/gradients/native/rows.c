/* Weighted sums of the rows of an embedding's gradient. */

#include "tile.h"

/*
 * into[tokens[k]] += weights[samples[k]] * rows[k] for k = 0, 1, ... in this order. Each thread sees to its own tokens, so no
 * two write to the same row, and the result does not depend on their number.
 */
void add_rows(
    int64_t count, int64_t width, const float *rows, const int64_t *tokens, const int64_t *samples, const float *weights,
    float *into, int threads
) {
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int part = 0; part < threads; part++) {
        for (int64_t k = 0; k < count; k++) {
            if (tokens[k] % threads != part) continue;
            const float *row = rows + k * width;
            float *to = into + tokens[k] * width, weight = weights[samples[k]];
            for (int64_t j = 0; j < width; j++) to[j] += weight * row[j];
        }
    }
}
