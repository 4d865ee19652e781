/* Per-sample gradients of linear maps that are applied at many positions: convolutions, layers on sequences. */

#include "tile.h"

static double squares_of(const Tile *tile, int64_t first, int64_t end) {
    floats sum = {0};
    for (int64_t r = first; r < end; r++) sum += tile->row[r][0] * tile->row[r][0] + tile->row[r][1] * tile->row[r][1];
    double total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    return total;
}

/* The next sample's memory, a little of it with each group of rows of this one. */
static void soon_read_share(const float *from, int64_t count, int64_t first, int64_t rows) {
    int64_t groups = (rows + TILE_ROWS - 1) / TILE_ROWS, share = count / groups + 1;
    soon_read(from + first / TILE_ROWS * share, share);
}

/*
 * For each sample i, gradient[w][o] = sum over positions t of image[i][windows[w] + places[t]] * maps[i][t][o].
 *
 * squares[i] is the squared norm of its first rows, w < split, and squares[n + i] that of the others. The gradients
 * themselves are written where asked for, gradient_step apart. With several groups, each has its own outputs, side by side,
 * and an image group_step after that of the group before.
 * Returns 0, or 1 where memory ran out (nothing useful is written then).
 */
int correlate(
    int64_t n, int64_t positions, int64_t inputs, int64_t outputs, int64_t groups, int64_t group_step,
    const float *image, int64_t image_step, const int64_t *windows, const int64_t *places,
    const float *maps, int64_t maps_step, int64_t position_step,
    float *gradients, int64_t gradient_step, int64_t split, float *squares, int threads
) {
    int64_t tiles = tiles_in(outputs), tile_size = positions * TILE_COLUMNS, steps = groups * inputs;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *packed = aligned_floats(tiles * tile_size);
        if (!packed) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n; i++) {
            if (!packed) continue;
            double above = 0, below = 0;
            for (int64_t g = 0; g < groups; g++) {
                const float *from = maps + i * maps_step + g * outputs;
                for (int64_t j = 0; j < tiles; j++)
                    pack_tile(positions, outputs, j * TILE_COLUMNS, from, position_step, packed + j * tile_size);
                for (int64_t first = 0; first < inputs; first += TILE_ROWS) {
                    int64_t here = smaller(inputs - first, TILE_ROWS);
                    int64_t before = split <= first ? 0 : smaller(split - first, here);
                    const float *rows[TILE_ROWS];
                    for (int64_t r = 0; r < TILE_ROWS; r++)
                        rows[r] = image + i * image_step + g * group_step + windows[first + (r < here ? r : 0)];
                    soon_read_share(image + (i + 1) * image_step, image_step, g * inputs + first, steps);
                    soon_read_share(maps + (i + 1) * maps_step, maps_step, g * inputs + first, steps);
                    for (int64_t j = 0; j < tiles; j++) {
                        int64_t column = j * TILE_COLUMNS;
                        Tile tile = tile_product(rows, places, positions, packed + j * tile_size);
                        if (before) above += squares_of(&tile, 0, before);
                        if (before < here) below += squares_of(&tile, before, here);
                        for (int64_t r = 0; gradients && r < here; r++) {
                            float *to = gradients + i * gradient_step + ((first + r) * groups + g) * outputs + column;
                            store_row(tile.row[r], outputs - column, to);
                        }
                    }
                }
            }
            squares[i] = (float)above;
            if (split < inputs) squares[n + i] = (float)below;
        }
        free(packed);
    }
    return failed;
}
