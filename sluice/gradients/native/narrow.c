/* Linear layers with many inputs and few outputs, such as a classifier on stored features: memory is read once. */

#include "tile.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

/* Sixteen floats anywhere in memory, a register where there are such. */
typedef float wide __attribute__((vector_size(64), aligned(4), may_alias));

enum {
    WIDE = 16,
    FEW_ROWS = 4,    /* samples that share a load of the weights */
    FEW_OUTPUTS = 5, /* outputs that share a load of the inputs */
    PART = 512       /* squares that single precision adds up without losing digits */
};

/* Inputs are stored in single precision (4 bytes each) or in half precision (2), which is converted as it is read. */
#ifdef __FLT16_MAX__
typedef _Float16 half;
#else
typedef uint16_t half; /* never read: see `reads_half` */
#endif

int reads_half(void) {
#ifdef __FLT16_MAX__
    return 1;
#else
    return 0;
#endif
}

static inline __attribute__((always_inline)) const void *input(const void *a, int bytes, int64_t k) {
    return (const char *)a + k * bytes;
}

static inline __attribute__((always_inline)) float one_input(const void *a, int bytes, int64_t k) {
    return bytes == 2 ? (float)((const half *)a)[k] : ((const float *)a)[k];
}

static inline __attribute__((always_inline)) wide wide_input(const void *a, int bytes, int64_t k) {
    if (bytes == 4) return *(const wide *)((const float *)a + k);
    const half *from = (const half *)a + k;
#if defined(__AVX512F__)
    return (wide)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    floats parts[2];
    for (int p = 0; p < 2; p++) parts[p] = (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + p * LANES)));
    return *(const wide *)parts;
#else
    wide x;
    for (int lane = 0; lane < WIDE; lane++) x[lane] = (float)from[lane];
    return x;
#endif
}

static inline float total_of(wide lanes) {
    float sum = 0;
    for (int lane = 0; lane < WIDE; lane++) sum += lanes[lane];
    return sum;
}

/* Products of FEW_ROWS inputs with FEW_OUTPUTS rows of the weights, and, if wanted, the squares of the inputs. */
static inline __attribute__((always_inline)) void few_products(
    int64_t inputs, const void *const a[FEW_ROWS], int bytes, const float *const weights[FEW_OUTPUTS],
    float products[FEW_ROWS][FEW_OUTPUTS], double squares[FEW_ROWS], int with_squares
) {
    wide sums[FEW_ROWS][FEW_OUTPUTS] = {{{0}}};
    int64_t whole = inputs / WIDE * WIDE;
    for (int64_t part = 0; part < whole; part += PART) {
        int64_t end = smaller(part + PART, whole);
        wide square[FEW_ROWS] = {{0}};
        for (int64_t k = part; k < end; k += WIDE) {
            wide x[FEW_ROWS];
            for (int r = 0; r < FEW_ROWS; r++) x[r] = wide_input(a[r], bytes, k);
            for (int o = 0; o < FEW_OUTPUTS; o++) {
                wide w = *(const wide *)(weights[o] + k);
                for (int r = 0; r < FEW_ROWS; r++) sums[r][o] += x[r] * w;
            }
            for (int r = 0; with_squares && r < FEW_ROWS; r++) square[r] += x[r] * x[r];
        }
        for (int r = 0; with_squares && r < FEW_ROWS; r++) squares[r] += total_of(square[r]);
    }
    for (int r = 0; r < FEW_ROWS; r++) {
        for (int o = 0; o < FEW_OUTPUTS; o++) {
            float product = total_of(sums[r][o]);
            for (int64_t k = whole; k < inputs; k++) product += one_input(a[r], bytes, k) * weights[o][k];
            products[r][o] = product;
        }
        for (int64_t k = whole; with_squares && k < inputs; k++) {
            float x = one_input(a[r], bytes, k);
            squares[r] += (double)x * x;
        }
    }
}

/* out[i][o] = a[i] . weights[o] + bias[o] (no bias if null), and squares[i] = |a[i]|^2. A sample's bits do not depend on its place. */
void narrow_forward(
    int64_t n, int64_t inputs, int64_t outputs, const void *a, int bytes, int64_t a_step, const float *weights, const float *bias,
    float *out, double *squares, int threads
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t first = 0; first < n; first += FEW_ROWS) {
        int64_t rows = smaller(n - first, FEW_ROWS);
        const void *inputs_of[FEW_ROWS];
        double square[FEW_ROWS] = {0};
        for (int64_t r = 0; r < FEW_ROWS; r++) inputs_of[r] = input(a, bytes, (first + (r < rows ? r : 0)) * a_step);
        for (int64_t start = 0; start < outputs; start += FEW_OUTPUTS) {
            int64_t here = smaller(outputs - start, FEW_OUTPUTS);
            const float *weights_of[FEW_OUTPUTS];
            float products[FEW_ROWS][FEW_OUTPUTS];
            for (int64_t o = 0; o < FEW_OUTPUTS; o++) weights_of[o] = weights + (start + (o < here ? o : 0)) * inputs;
            if (bytes == 2 && start == 0) few_products(inputs, inputs_of, 2, weights_of, products, square, 1);
            else if (bytes == 2) few_products(inputs, inputs_of, 2, weights_of, products, square, 0);
            else if (start == 0) few_products(inputs, inputs_of, 4, weights_of, products, square, 1);
            else few_products(inputs, inputs_of, 4, weights_of, products, square, 0);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t o = 0; o < here; o++)
                    out[(first + r) * outputs + start + o] = products[r][o] + (bias ? bias[start + o] : 0);
        }
        for (int64_t r = 0; r < rows; r++) squares[first + r] = square[r];
    }
}

/* to[o][k] += sum over r of b[r][o] * a[r][k], for FEW_ROWS samples and up to FEW_OUTPUTS outputs; missing rows have b = 0. */
static inline __attribute__((always_inline)) void add_few(
    int64_t count, const void *const a[FEW_ROWS], int bytes, float b[FEW_ROWS][FEW_OUTPUTS], float *const to[FEW_OUTPUTS]
) {
    int64_t whole = count / WIDE * WIDE;
    for (int64_t k = 0; k < whole; k += WIDE) {
        wide x[FEW_ROWS];
        for (int r = 0; r < FEW_ROWS; r++) x[r] = wide_input(a[r], bytes, k);
        for (int o = 0; o < FEW_OUTPUTS; o++) {
            wide sum = b[0][o] * x[0];
            for (int r = 1; r < FEW_ROWS; r++) sum += b[r][o] * x[r];
            *(wide *)(to[o] + k) += sum;
        }
    }
    for (int64_t k = whole; k < count; k++)
        for (int o = 0; o < FEW_OUTPUTS; o++) {
            float sum = 0;
            for (int r = 0; r < FEW_ROWS; r++) sum += b[r][o] * one_input(a[r], bytes, k);
            to[o][k] += sum;
        }
}

/* to[o][k] = sum over samples i of b[i][o] * a[i][k], for some columns and up to FEW_OUTPUTS of the outputs. */
static void sum_of_few(
    int64_t n, int64_t columns, const void *a, int bytes, int64_t a_step, int64_t outputs, const float *b, int64_t b_step,
    float to[FEW_OUTPUTS][PART]
) {
    float *rows_of[FEW_OUTPUTS];
    for (int o = 0; o < FEW_OUTPUTS; o++) rows_of[o] = to[o];
    memset(to, 0, sizeof(float[FEW_OUTPUTS][PART]));
    for (int64_t first = 0; first < n; first += FEW_ROWS) {
        int64_t rows = smaller(n - first, FEW_ROWS);
        const void *from[FEW_ROWS];
        float factors[FEW_ROWS][FEW_OUTPUTS] = {{0}};
        for (int64_t r = 0; r < FEW_ROWS; r++) from[r] = input(a, bytes, (first + (r < rows ? r : 0)) * a_step);
        int any = 0;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t o = 0; o < outputs; o++) any |= (factors[r][o] = b[(first + r) * b_step + o]) != 0;
        if (!any) continue; /* such as rows that only fill up a chunk */
        for (int64_t r = 0; r < rows && first + r + FEW_ROWS < n; r++)
            soon_read(input(from[r], bytes, FEW_ROWS * a_step), columns * bytes / 4);
        if (bytes == 2) add_few(columns, from, 2, factors, rows_of);
        else add_few(columns, from, 4, factors, rows_of);
    }
}

/*
 * into[o][k] = sum over samples i of b[i][o] * a[i][k]: the weight gradient, as a sum of sums over block samples each. Each
 * thread sees to its own columns.
 */
void narrow_sum(
    int64_t n, int64_t inputs, int64_t outputs, int64_t block, const void *a, int bytes, int64_t a_step, const float *b, float *into,
    int threads
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t column = 0; column < inputs; column += PART) {
        int64_t columns = smaller(inputs - column, PART);
        for (int64_t o = 0; o < outputs; o++) memset(into + o * inputs + column, 0, (size_t)columns * sizeof(float));
        /* All outputs of a block before the next one: its inputs are still in the cache for the second of them. */
        for (int64_t first = 0; first < n; first += block) {
            int64_t rows = smaller(n - first, block);
            const void *from = input(a, bytes, first * a_step + column);
            for (int64_t start = 0; start < outputs; start += FEW_OUTPUTS) {
                int64_t here = smaller(outputs - start, FEW_OUTPUTS);
                float *to = into + start * inputs + column, sum[FEW_OUTPUTS][PART] __attribute__((aligned(64)));
                sum_of_few(rows, columns, from, bytes, a_step, here, b + first * outputs + start, outputs, sum);
                for (int64_t o = 0; o < here; o++)
                    for (int64_t k = 0; k < columns; k++) to[o * inputs + k] += sum[o][k];
            }
        }
    }
}
