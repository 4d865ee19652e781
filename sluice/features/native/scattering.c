/*
 * The scattering transform of a few planes at a time, one in each lane of a vector, from pixels to coefficients without
 * leaving the cache. No lane ever meets another, so a plane's coefficients depend on that plane alone, bit for bit.
 *
 * Signals are written in cosines and sines, along the rows and along the columns. Cosines are even and sines odd, so
 * a transform of N points needs products for half of them only: sums and differences give the rest. A filter whose spectrum is
 * real is, at each pair of frequencies, eight numbers made of four by sixteen products (see `mix`), and
 * keeping every second point only adds up the frequencies that look alike on the coarser grid.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* As wide as registers are, and as many sums as there are registers for. */
#if defined(__AVX512F__)
enum { LANES = 16, MOST_ROWS = 6, MOST_COLUMNS = 4 };
#elif defined(__AVX__)
enum { LANES = 8, MOST_ROWS = 5, MOST_COLUMNS = 2 };
#else
enum { LANES = 4, MOST_ROWS = 5, MOST_COLUMNS = 2 };
#endif
enum { ANGLES = 8, ALIGNMENT = 64 };

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));

/* Cosines cos(2 pi f k / points) for f, k from 0 to half, and sines for those between: products with either end are 0. */
typedef struct {
    int64_t points;
    const float *cosines, *sines;
} Axis;

typedef struct {
    int64_t height, width;                /* of a plane */
    int64_t out_height, out_width;
    Axis rows, columns;                   /* of the padded plane */
    Axis coarse_rows, coarse_columns;     /* with every second point of it */
    const int64_t *row_places, *column_places; /* which row, and column, of the plane each padded one is */
    const float *fine, *coarse;           /* [angle][row frequency][column frequency][4], see `mix` */
    const float *fine_row_averages, *fine_column_averages;     /* [output][point] */
    const float *coarse_row_averages, *coarse_column_averages;
} Transform;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* out[m][j] = sum over k of matrix[m][k] in[k][j] for a block that stays in registers; both sizes are constants. */
static inline __attribute__((always_inline)) void block(
    const int rows, const int columns, const float *matrix, int64_t size, const lanes *in, int64_t in_k, int64_t in_j,
    lanes *out, int64_t out_m, int64_t out_j
) {
    lanes sum[MOST_ROWS][MOST_COLUMNS];
    for (int m = 0; m < rows; m++)
        for (int j = 0; j < columns; j++) sum[m][j] = (lanes){0};
    for (int64_t k = 0; k < size; k++) {
        lanes here[MOST_COLUMNS];
        for (int j = 0; j < columns; j++) here[j] = in[k * in_k + j * in_j];
        for (int m = 0; m < rows; m++) {
            float factor = matrix[m * size + k];
            for (int j = 0; j < columns; j++) sum[m][j] += factor * here[j];
        }
    }
    for (int m = 0; m < rows; m++)
        for (int j = 0; j < columns; j++) out[m * out_m + j * out_j] = sum[m][j];
}

static inline __attribute__((always_inline)) void rows_of_blocks(
    const int columns, int64_t rows, const float *matrix, int64_t size, const lanes *in, int64_t in_k, int64_t in_j,
    lanes *out, int64_t out_m, int64_t out_j
) {
    while (rows > 0) {
        /* As even as possible: a block of one row would wait for memory. */
        int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS, here = (rows + blocks - 1) / blocks;
#define BLOCK(count) case count: block(count, columns, matrix, size, in, in_k, in_j, out, out_m, out_j); break
        switch (here) {
            BLOCK(1);
            BLOCK(2);
            BLOCK(3);
            BLOCK(4);
            BLOCK(5);
#ifdef __AVX512F__
            BLOCK(6);
#endif
        }
#undef BLOCK
        matrix += here * size, out += here * out_m, rows -= here;
    }
}

/* The product of a matrix [rows][size] with in[size][columns]; up to MOST_COLUMNS columns. */
static void product(
    int64_t columns, int64_t rows, const float *matrix, int64_t size, const lanes *in, int64_t in_k, int64_t in_j,
    lanes *out, int64_t out_m, int64_t out_j
) {
#define COLUMNS(count) case count: rows_of_blocks(count, rows, matrix, size, in, in_k, in_j, out, out_m, out_j); break
    switch (columns) {
        COLUMNS(1);
        COLUMNS(2);
#ifdef __AVX512F__
        COLUMNS(3);
        COLUMNS(4);
#endif
    }
#undef COLUMNS
}

/* From points to cosines, then sines, for each of `count` signals; a point is in_k, a signal in_j from the next. */
static void analyse(
    const Axis *axis, int64_t count, const lanes *in, int64_t in_k, int64_t in_j, lanes *out, int64_t out_m, int64_t out_j,
    lanes *folded
) {
    int64_t half = axis->points / 2;
    for (int64_t first = 0; first < count; first += MOST_COLUMNS) {
        int64_t columns = smaller(count - first, MOST_COLUMNS);
        lanes *even = folded, *odd = folded + (half + 1) * columns;
        for (int64_t j = 0; j < columns; j++) {
            const lanes *signal = in + (first + j) * in_j;
            even[j] = signal[0];
            even[half * columns + j] = signal[half * in_k];
            for (int64_t k = 1; k < half; k++) {
                lanes a = signal[k * in_k], b = signal[(axis->points - k) * in_k];
                even[k * columns + j] = a + b;
                odd[(k - 1) * columns + j] = a - b;
            }
        }
        lanes *to = out + first * out_j;
        product(columns, half + 1, axis->cosines, half + 1, even, columns, 1, to, out_m, out_j);
        product(columns, half - 1, axis->sines, half - 1, odd, columns, 1, to + (half + 1) * out_m, out_m, out_j);
    }
}

/* From cosines, then sines, back to points. */
static void synthesise(
    const Axis *axis, int64_t count, const lanes *in, int64_t in_k, int64_t in_j, lanes *out, int64_t out_m, int64_t out_j,
    lanes *folded
) {
    int64_t half = axis->points / 2;
    for (int64_t first = 0; first < count; first += MOST_COLUMNS) {
        int64_t columns = smaller(count - first, MOST_COLUMNS);
        const lanes *from = in + first * in_j;
        lanes *even = folded, *odd = folded + (half + 1) * columns;
        product(columns, half + 1, axis->cosines, half + 1, from, in_k, in_j, even, columns, 1);
        product(columns, half - 1, axis->sines, half - 1, from + (half + 1) * in_k, in_k, in_j, odd, columns, 1);
        for (int64_t j = 0; j < columns; j++) {
            lanes *signal = out + (first + j) * out_j;
            signal[0] = even[j];
            signal[half * out_m] = even[half * columns + j];
            for (int64_t k = 1; k < half; k++) {
                lanes a = even[k * columns + j], b = odd[(k - 1) * columns + j];
                signal[k * out_m] = a + b;
                signal[(axis->points - k) * out_m] = a - b;
            }
        }
    }
}

/*
 * One wavelet. With x's products CC, CS, SC, SS with cosine or sine along the rows and along the columns, the
 * filtered signal has at the same frequencies
 *
 *     real:       cc = ee CC - oo SS    ss = ee SS - oo CC    sc = ee SC + oo CS    cs = ee CS + oo SC
 *     imaginary:  cc = -oe SC - eo CS   ss = oe CS + eo SC    sc = oe CC - eo SS    cs = eo CC - oe SS
 *
 * where ee, oo, oe and eo, in this order in `spectrum`, are the spectrum's parts that are even or odd in the row's and in the
 * column's frequency. Where only every second point is kept (`step` is 2), frequency f and half - f are one; the sines of
 * the latter turn the other way, which is why they change their sign here, and oo, oe and eo theirs in `spectrum`.
 */
static inline __attribute__((always_inline)) void mix(
    const int step, const Axis *rows, const Axis *columns, const float *spectrum, const lanes *in, lanes *real, lanes *imaginary
) {
    int64_t half_rows = rows->points / 2, half_columns = columns->points / 2;
    int64_t last_row = half_rows / step, last_column = half_columns / step, width = columns->points / step;
    const lanes zero = {0};
    for (int64_t f = 0; f <= last_row; f++)
        for (int64_t g = 0; g <= last_column; g++) {
            lanes re[4] = {{0}}, im[4] = {{0}}; /* cc, cs, sc, ss */
            for (int a = 0; a < step; a++) {
                if (a && 2 * f == half_rows) continue;
                int64_t row = a ? half_rows - f : f, row_sine = half_rows + row;
                int has_row_sine = row > 0 && row < half_rows;
                for (int b = 0; b < step; b++) {
                    if (b && 2 * g == half_columns) continue;
                    int64_t column = b ? half_columns - g : g, column_sine = half_columns + column;
                    int has_column_sine = column > 0 && column < half_columns;
                    const lanes *cosine_row = in + row * columns->points, *sine_row = in + row_sine * columns->points;
                    lanes cc = cosine_row[column];
                    lanes cs = has_column_sine ? cosine_row[column_sine] : zero;
                    lanes sc = has_row_sine ? sine_row[column] : zero;
                    lanes ss = has_row_sine && has_column_sine ? sine_row[column_sine] : zero;
                    if (b) cs = -cs, ss = -ss;
                    if (a) sc = -sc, ss = -ss;
                    const float *part = spectrum + 4 * (row * (half_columns + 1) + column);
                    float ee = part[0], oo = part[1], oe = part[2], eo = part[3];
                    re[0] += ee * cc - oo * ss, re[1] += ee * cs + oo * sc;
                    re[2] += ee * sc + oo * cs, re[3] += ee * ss - oo * cc;
                    im[0] -= oe * sc + eo * cs, im[1] += eo * cc - oe * ss;
                    im[2] += oe * cc - eo * ss, im[3] += oe * cs + eo * sc;
                }
            }
            int row_sine = f > 0 && f < last_row, column_sine = g > 0 && g < last_column;
            int64_t upper = f * width, lower = (last_row + f) * width;
            real[upper + g] = re[0], imaginary[upper + g] = im[0];
            if (column_sine) real[upper + last_column + g] = re[1], imaginary[upper + last_column + g] = im[1];
            if (row_sine) real[lower + g] = re[2], imaginary[lower + g] = im[2];
            if (row_sine && column_sine) real[lower + last_column + g] = re[3], imaginary[lower + last_column + g] = im[3];
        }
}

static void modulus(int64_t count, const lanes *real, const lanes *imaginary, lanes *out) {
    const float *re = (const float *)real, *im = (const float *)imaginary;
    float *to = (float *)out;
    for (int64_t i = 0; i < count * LANES; i++) to[i] = sqrtf(re[i] * re[i] + im[i] * im[i]);
}

/* Memory of one group of planes. */
typedef struct {
    lanes *signal, *analysed, *real, *imaginary, *between, *folded, *coefficients;
} Work;

/* The moduli of a signal's transform after one wavelet, in w->signal or wherever `out` is. */
static void wave(
    const Transform *t, int step, const float *spectrum, const lanes *analysed, const Work *w, lanes *out
) {
    const Axis *rows = step == 1 ? &t->rows : &t->coarse_rows, *columns = step == 1 ? &t->columns : &t->coarse_columns;
    if (step == 1) mix(1, &t->rows, &t->columns, spectrum, analysed, w->real, w->imaginary);
    else mix(2, &t->rows, &t->columns, spectrum, analysed, w->real, w->imaginary);
    int64_t width = columns->points;
    for (int part = 0; part < 2; part++) {
        lanes *plane = part ? w->imaginary : w->real;
        synthesise(columns, rows->points, plane, 1, width, w->between, 1, width, w->folded);
        synthesise(rows, width, w->between, width, 1, plane, width, 1, w->folded);
    }
    modulus(rows->points * width, w->real, w->imaginary, out);
}

static void analyse_plane(const Transform *t, const lanes *in, lanes *out, const Work *w) {
    int64_t width = t->columns.points;
    analyse(&t->columns, t->rows.points, in, 1, width, w->between, 1, width, w->folded);
    analyse(&t->rows, width, w->between, width, 1, out, width, 1, w->folded);
}

/* Local averages: rows first, then columns. */
static void average(const Transform *t, int step, const lanes *in, lanes *out, const Work *w) {
    int64_t rows = t->rows.points / step, columns = t->columns.points / step;
    const float *by_row = step == 1 ? t->fine_row_averages : t->coarse_row_averages;
    const float *by_column = step == 1 ? t->fine_column_averages : t->coarse_column_averages;
    for (int64_t j = 0; j < columns; j += MOST_COLUMNS)
        product(smaller(columns - j, MOST_COLUMNS), t->out_height, by_row, rows, in + j, columns, 1, w->between + j, columns, 1);
    for (int64_t i = 0; i < t->out_height; i += MOST_COLUMNS)
        product(
            smaller(t->out_height - i, MOST_COLUMNS), t->out_width, by_column, columns,
            w->between + i * columns, 1, columns, out + i * t->out_width, 1, t->out_width
        );
}

static void load(const Transform *t, int64_t count, const float *planes, lanes *padded) {
    for (int64_t r = 0; r < t->rows.points; r++)
        for (int64_t c = 0; c < t->columns.points; c++) {
            const float *pixel = planes + t->row_places[r] * t->width + t->column_places[c];
            lanes values = {0};
            for (int64_t i = 0; i < count; i++) values[i] = pixel[i * t->height * t->width];
            padded[r * t->columns.points + c] = values;
        }
}

static void transform_group(const Transform *t, int64_t count, const float *planes, float *out, const Work *w) {
    int64_t size = t->out_height * t->out_width, frequencies = (t->rows.points / 2 + 1) * (t->columns.points / 2 + 1);
    int64_t points = t->rows.points * t->columns.points;
    lanes *first = w->coefficients + size, *second = first + 2 * ANGLES * size;
    lanes *image = w->analysed + points; /* the image's own transform, beside that of its waves */
    load(t, count, planes, w->signal);
    average(t, 1, w->signal, w->coefficients, w);
    analyse_plane(t, w->signal, image, w);
    for (int64_t a = 0; a < ANGLES; a++) {
        wave(t, 2, t->coarse + 4 * frequencies * a, image, w, w->signal);
        average(t, 2, w->signal, first + (ANGLES + a) * size, w);
    }
    for (int64_t a = 0; a < ANGLES; a++) {
        wave(t, 1, t->fine + 4 * frequencies * a, image, w, w->signal);
        average(t, 1, w->signal, first + a * size, w);
        analyse_plane(t, w->signal, w->analysed, w);
        for (int64_t b = 0; b < ANGLES; b++) {
            wave(t, 2, t->coarse + 4 * frequencies * b, w->analysed, w, w->signal);
            average(t, 2, w->signal, second + (ANGLES * a + b) * size, w);
        }
    }
    int64_t all = (1 + 2 * ANGLES + ANGLES * ANGLES) * size;
    const float *found = (const float *)w->coefficients;
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < all; k++) out[i * all + k] = found[k * LANES + i];
}

/* coefficients[i] of planes[i] for all of them, each contiguous. Returns 0, or 1 where memory ran out. */
int scattering(const Transform *t, int64_t count, const float *planes, float *coefficients) {
    int64_t points = t->rows.points * t->columns.points, longer = t->rows.points > t->columns.points ? t->rows.points : t->columns.points;
    int64_t all = (1 + 2 * ANGLES + ANGLES * ANGLES) * t->out_height * t->out_width;
    int64_t sizes[] = {points, 2 * points, points, points, points, longer * MOST_COLUMNS, all}, total = 0;
    for (int k = 0; k < 7; k++) total += sizes[k];
    lanes *memory = aligned_alloc(ALIGNMENT, (size_t)total * sizeof(lanes) + ALIGNMENT - (size_t)total * sizeof(lanes) % ALIGNMENT);
    if (!memory) return 1;
    lanes *starts[7];
    for (int k = 0; k < 7; k++) starts[k] = k ? starts[k - 1] + sizes[k - 1] : memory;
    Work w = {starts[0], starts[1], starts[2], starts[3], starts[4], starts[5], starts[6]};
    for (int64_t i = 0; i < count; i += LANES)
        transform_group(t, smaller(count - i, LANES), planes + i * t->height * t->width, coefficients + i * all, &w);
    free(memory);
    return 0;
}
