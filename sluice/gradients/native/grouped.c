/* Per-sample gradients of convolutions in small groups of channels, of which a depthwise convolution is the extreme. */

#include "tile.h"

enum { MOST_SUMS = 9 }; /* kernel offsets that are summed together: their sums and a map fit into 16 registers */

typedef struct {
    int64_t n, pixels, padded_pixels, positions, kernel; /* of an image without and with padding, of maps, of a weight */
    int64_t groups, image_channels, map_channels;        /* channels of all groups together */
    const int64_t *inside;          /* where each pixel is in the padded image */
    const int64_t *windows;         /* where each entry of the kernel is, from the first pixel of a window */
    const int64_t *places;          /* where windows start: in row_length of them, then as many again */
    int64_t row_length;
    const float *image;             /* [n][pixels][image_channels] */
    const float *maps;              /* [n][positions][map_channels], any steps */
    int64_t maps_step, position_step, channel_step;
    float *gradients;               /* [n][kernel][image_channels / groups][map_channels]; null where not wanted */
    float *squares;                 /* [n] */
    int threads;
} Grouped;

/* Eight maps, side by side; zero beyond the last. */
static void pack_maps(const Grouped *g, int64_t sample, int64_t first, float *to) {
    int64_t width = smaller(g->map_channels - first, LANES);
    const float *from = g->maps + sample * g->maps_step + first * g->channel_step;
    for (int64_t t = 0; t < g->positions; t++, from += g->position_step, to += LANES) {
        if (width == LANES && g->channel_step == 1) memcpy(to, from, LANES * sizeof(float));
        else for (int64_t l = 0; l < LANES; l++) to[l] = l < width ? from[l * g->channel_step] : 0;
    }
}

/* For each of eight maps, the channel of its group that is the given one within the group. Padding stays as it is: zero. */
static void pack_image(const Grouped *g, int64_t sample, int64_t first, int64_t within, float *to) {
    int64_t each_map = g->map_channels / g->groups, each = g->image_channels / g->groups;
    int64_t width = smaller(g->map_channels - first, LANES), channel[LANES];
    const float *from = g->image + sample * g->pixels * g->image_channels;
    for (int64_t l = 0; l < LANES; l++) channel[l] = (first + (l < width ? l : 0)) / each_map * each + within;
    for (int64_t p = 0; p < g->pixels; p++, from += g->image_channels) {
        float *pixel = to + g->inside[p] * LANES;
        if (width == LANES && each_map == 1 && each == 1) memcpy(pixel, from + first, LANES * sizeof(float));
        else for (int64_t l = 0; l < LANES; l++) pixel[l] = from[channel[l]];
    }
}

/* sums[k] = sum over positions t of image[windows[k] + places[t]] * maps[t], row by row so that sums stay short. */
static inline __attribute__((always_inline)) void sum_windows(
    const int count, const Grouped *g, const int64_t *windows, const float *image, const float *maps, floats *sums
) {
    const float *at[MOST_SUMS];
    floats total[MOST_SUMS];
    for (int k = 0; k < count; k++) at[k] = image + windows[k] * LANES, total[k] = (floats){0};
    for (int64_t start = 0; start < g->positions; start += g->row_length) {
        floats row[MOST_SUMS];
        for (int k = 0; k < count; k++) row[k] = (floats){0};
        for (int64_t t = start; t < start + g->row_length; t++) {
            floats map = *(const floats *)(maps + t * LANES);
            int64_t place = g->places[t] * LANES;
            for (int k = 0; k < count; k++) row[k] += *(const floats *)(at[k] + place) * map;
        }
        for (int k = 0; k < count; k++) total[k] += row[k];
    }
    for (int k = 0; k < count; k++) sums[k] = total[k];
}

static void sum_some_windows(
    int64_t count, const Grouped *g, const int64_t *windows, const float *image, const float *maps, floats *sums
) {
    switch (count) {
        case 1: sum_windows(1, g, windows, image, maps, sums); break;
        case 2: sum_windows(2, g, windows, image, maps, sums); break;
        case 3: sum_windows(3, g, windows, image, maps, sums); break;
        case 4: sum_windows(4, g, windows, image, maps, sums); break;
        case 5: sum_windows(5, g, windows, image, maps, sums); break;
        case 6: sum_windows(6, g, windows, image, maps, sums); break;
        case 7: sum_windows(7, g, windows, image, maps, sums); break;
        case 8: sum_windows(8, g, windows, image, maps, sums); break;
        default: sum_windows(9, g, windows, image, maps, sums);
    }
}

/* Returns 0, or 1 where memory ran out (nothing useful is written then). */
int correlate_groups(const Grouped *g) {
    int64_t each = g->image_channels / g->groups, image_size = g->padded_pixels * LANES;
    int failed = 0;
#pragma omp parallel num_threads(g->threads)
    {
        float *image = aligned_floats(image_size + g->positions * LANES);
        if (image) {
            memset(image, 0, (size_t)image_size * sizeof(float));
        } else {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < g->n; i++) {
            if (!image) continue;
            float *maps = image + image_size;
            double squares = 0;
            for (int64_t first = 0; first < g->map_channels; first += LANES) {
                int64_t width = smaller(g->map_channels - first, LANES);
                pack_maps(g, i, first, maps);
                for (int64_t c = 0; c < each; c++) {
                    pack_image(g, i, first, c, image);
                    for (int64_t k = 0; k < g->kernel; k += MOST_SUMS) {
                        int64_t count = smaller(g->kernel - k, MOST_SUMS);
                        floats sums[MOST_SUMS], squared = {0};
                        sum_some_windows(count, g, g->windows + k, image, maps, sums);
                        for (int64_t s = 0; s < count; s++) {
                            squared += sums[s] * sums[s];
                            if (!g->gradients) continue;
                            float *to = g->gradients + (((i * g->kernel + k + s) * each + c) * g->map_channels + first);
                            memcpy(to, &sums[s], (size_t)width * sizeof(float));
                        }
                        for (int lane = 0; lane < LANES; lane++) squares += squared[lane];
                    }
                }
            }
            g->squares[i] = (float)squares;
        }
        free(image);
    }
    return failed;
}
