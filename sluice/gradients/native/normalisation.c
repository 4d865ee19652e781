/*
 * Backward passes of normalisations with a scale and a shift. The derivatives of these two for each sample are sums that the
 * input's derivative needs in any case.
 *
 * With xn the normalised input, M the numbers that are normalised together, and sums over these,
 *   dx = rstd (scale dy - sum(scale dy) / M - xn sum(scale dy xn) / M).
 * Sums for a channel are taken over a few positions at a time, and then in double precision.
 */

#include "tile.h"

enum { STRIP = 32 }; /* positions */

typedef struct {
    int64_t n, positions, channels, groups; /* groups of channels; unused for rows */
    const float *x, *dy, *scale;
    const float *mean, *rstd;               /* [n][groups], or [n][positions] for rows */
    float *dx;                              /* null where not wanted */
    float *dscale, *dshift;                 /* [n][channels] */
    int threads;
} Norm;

static inline float sum_of(floats v) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += v[lane];
    return total;
}

/* sums[c] += dy, sums[channels + c] += dy (x - mean[c]) over some positions of [positions][channels]. */
static void add_strip(int64_t count, int64_t channels, const float *x, const float *dy, const float *mean, double *sums) {
    int64_t c = 0;
    for (; c + LANES <= channels; c += LANES) {
        floats shift = {0}, scale = {0}, middle = *(const floats *)(mean + c);
        for (int64_t t = 0; t < count; t++) {
            floats d = *(const floats *)(dy + t * channels + c);
            shift += d;
            scale += d * (*(const floats *)(x + t * channels + c) - middle);
        }
        for (int lane = 0; lane < LANES; lane++) sums[c + lane] += shift[lane], sums[channels + c + lane] += scale[lane];
    }
    for (; c < channels; c++) {
        float shift = 0, scale = 0;
        for (int64_t t = 0; t < count; t++) {
            float d = dy[t * channels + c];
            shift += d, scale += d * (x[t * channels + c] - mean[c]);
        }
        sums[c] += shift, sums[channels + c] += scale;
    }
}

/* The same for one channel whose positions lie side by side. */
static void sum_channel(int64_t count, const float *x, const float *dy, float mean, double *shift, double *scale) {
    for (int64_t first = 0; first < count; first += STRIP * LANES) {
        int64_t here = smaller(count - first, STRIP * LANES), t = 0;
        floats shifts = {0}, scales = {0};
        for (; t + LANES <= here; t += LANES) {
            floats d = *(const floats *)(dy + first + t);
            shifts += d, scales += d * (*(const floats *)(x + first + t) - mean);
        }
        float more_shift = 0, more_scale = 0;
        for (; t < here; t++) more_shift += dy[first + t], more_scale += dy[first + t] * (x[first + t] - mean);
        *shift += sum_of(shifts) + more_shift, *scale += sum_of(scales) + more_scale;
    }
}

/* dx = a dy + b (x - mean) + c for each channel: own = [4][channels] holds the channels' means, a, b and c. */
static void coefficients(const Norm *l, int64_t i, const double *sums, float *own) {
    int64_t channels = l->channels, each = channels / l->groups;
    double count = (double)l->positions * (double)each;
    for (int64_t g = 0; g < l->groups; g++) {
        double rstd = l->rstd[i * l->groups + g], first = 0, second = 0;
        for (int64_t c = g * each; c < (g + 1) * each; c++)
            first += l->scale[c] * sums[c], second += l->scale[c] * sums[channels + c] * rstd;
        for (int64_t c = g * each; c < (g + 1) * each; c++) {
            own[channels + c] = (float)(rstd * l->scale[c]);
            own[2 * channels + c] = (float)(-rstd * rstd * second / count);
            own[3 * channels + c] = (float)(-rstd * first / count);
            l->dshift[i * channels + c] = (float)sums[c];
            l->dscale[i * channels + c] = (float)(sums[channels + c] * rstd);
        }
    }
}

static void group_sample(const Norm *l, int64_t i, int channels_last, double *sums, float *own) {
    int64_t channels = l->channels, positions = l->positions, each = channels / l->groups, size = positions * channels;
    const float *x = l->x + i * size, *dy = l->dy + i * size;
    float *dx = l->dx ? l->dx + i * size : 0;
    memset(sums, 0, (size_t)(2 * channels) * sizeof(double));
    for (int64_t c = 0; c < channels; c++) own[c] = l->mean[i * l->groups + c / each];
    if (channels_last)
        for (int64_t t = 0; t < positions; t += STRIP)
            add_strip(smaller(positions - t, STRIP), channels, x + t * channels, dy + t * channels, own, sums);
    else
        for (int64_t c = 0; c < channels; c++)
            sum_channel(positions, x + c * positions, dy + c * positions, own[c], sums + c, sums + channels + c);
    coefficients(l, i, sums, own);
    const float *a = own + channels, *b = own + 2 * channels, *shift = own + 3 * channels;
    if (!dx) return;
    if (channels_last) {
        for (int64_t t = 0; t < positions; t++, x += channels, dy += channels, dx += channels)
            for (int64_t c = 0; c < channels; c++) dx[c] = a[c] * dy[c] + (b[c] * (x[c] - own[c]) + shift[c]);
    } else {
        for (int64_t c = 0; c < channels; c++, x += positions, dy += positions, dx += positions)
            for (int64_t t = 0; t < positions; t++) dx[t] = a[c] * dy[t] + (b[c] * (x[t] - own[c]) + shift[c]);
    }
}

/* Each position's channels are normalised by themselves. */
static void row_sample(const Norm *l, int64_t i, double *sums, float *own) {
    int64_t channels = l->channels, positions = l->positions;
    memset(sums, 0, (size_t)(2 * channels) * sizeof(double));
    memset(own, 0, (size_t)(2 * channels) * sizeof(float));
    for (int64_t t = 0; t < positions; t++) {
        int64_t at = i * positions + t, c = 0;
        const float *x = l->x + at * channels, *dy = l->dy + at * channels;
        float *dx = l->dx ? l->dx + at * channels : 0, mean = l->mean[at], rstd = l->rstd[at];
        floats firsts = {0}, seconds = {0};
        float first = 0, second = 0;
        for (; c + LANES <= channels; c += LANES) {
            floats d = *(const floats *)(dy + c), normal = (*(const floats *)(x + c) - mean) * rstd;
            *(floats *)(own + c) += d;
            *(floats *)(own + channels + c) += d * normal;
            d *= *(const floats *)(l->scale + c);
            firsts += d, seconds += d * normal;
        }
        for (; c < channels; c++) {
            float d = dy[c], normal = (x[c] - mean) * rstd;
            own[c] += d, own[channels + c] += d * normal;
            first += d * l->scale[c], second += d * l->scale[c] * normal;
        }
        first = (first + sum_of(firsts)) / (float)channels, second = (second + sum_of(seconds)) / (float)channels;
        for (c = 0; dx && c < channels; c++) dx[c] = rstd * (l->scale[c] * dy[c] - first - (x[c] - mean) * rstd * second);
        if ((t + 1) % STRIP && t + 1 < positions) continue;
        for (c = 0; c < 2 * channels; c++) sums[c] += own[c], own[c] = 0;
    }
    for (int64_t c = 0; c < channels; c++) {
        l->dshift[i * channels + c] = (float)sums[c];
        l->dscale[i * channels + c] = (float)sums[channels + c];
    }
}

enum { ROWS = 2 }; /* in place of whether channels come last */

/* Returns 0, or 1 where memory ran out (nothing useful is written then). */
static int each_sample(const Norm *l, int kind) {
    int failed = 0;
#pragma omp parallel num_threads(l->threads)
    {
        double *sums = malloc((size_t)(2 * l->channels) * sizeof(double));
        float *own = aligned_floats(4 * l->channels);
        if (!sums || !own) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < l->n; i++) {
            if (!sums || !own) continue;
            if (kind == ROWS) row_sample(l, i, sums, own);
            else group_sample(l, i, kind, sums, own);
        }
        free(sums), free(own);
    }
    return failed;
}

int rows_norm_backward(const Norm *layer) { return each_sample(layer, ROWS); }

int group_norm_backward(const Norm *layer) { return each_sample(layer, 0); }

int group_norm_backward_channels_last(const Norm *layer) { return each_sample(layer, 1); }
