/* Embedding tables: sums of the rows that a sample uses, norms of its gradient, and weighted sums over samples. */

#include "tile.h"

enum { FAILED_MEMORY = 1, FAILED_RANGE = 2 };
enum {
    AHEAD = 8,          /* lookups whose memory is on its way */
    SMALL_TABLE = 1 << 16 /* entries */
};

/*
 * The entries of a matrix of n rows, those that are padding left out, as one list: the values, the row of each, and where each row
 * begins in the list (offsets, n + 1 of them). Entries have 4 or 8 bytes.
 */
void list_entries(
    int64_t n, int64_t columns, const void *matrix, int bytes, int64_t padding, int64_t *values, int64_t *rows, int64_t *offsets
) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        offsets[i] = count;
        for (int64_t k = i * columns; k < (i + 1) * columns; k++) {
            int64_t value = bytes == 4 ? ((const int32_t *)matrix)[k] : ((const int64_t *)matrix)[k];
            values[count] = value, rows[count] = i, count += value != padding;
        }
    }
    offsets[n] = count;
}

/* The lists values[offsets[indices[i]]] ... of n indices as rows of one length, filled up with -1. */
void pad_lists(
    int64_t n, int64_t length, const int32_t *values, const int64_t *offsets, const int64_t *indices, int32_t *rows
) {
    for (int64_t i = 0; i < n; i++) {
        int64_t first = offsets[indices[i]], count = offsets[indices[i] + 1] - first;
        memcpy(rows + i * length, values + first, (size_t)count * sizeof(int32_t));
        memset(rows + i * length + count, -1, (size_t)(length - count) * sizeof(int32_t));
    }
}

/* to = the sum of factors[k] * table[ids[k]]; ids are known up to readable, which is beyond count. */
static void add_whole_rows(
    int64_t count, int64_t width, const float *table, int64_t row_step, const int64_t *ids, const float *factors,
    int64_t readable, float *to
) {
    memset(to, 0, (size_t)width * sizeof(float));
    for (int64_t k = 0; k < count; k++) {
        const float *row = table + ids[k] * row_step;
        float factor = factors ? factors[k] : 1;
        if (k + AHEAD < readable) soon_read(table + ids[k + AHEAD] * row_step, width);
        for (int64_t j = 0; j < width; j++) to[j] += factor * row[j];
    }
}

/* The sum of factors[k] * column[ids[k]] of one column of a table, four parts of it at a time. */
static float column_sum(
    int64_t count, const float *column, int64_t row_step, const int64_t *ids, const float *factors
) {
    float sums[4] = {0};
    int64_t whole = count / 4 * 4;
    for (int64_t k = 0; k < whole; k += 4)
        for (int64_t part = 0; part < 4; part++)
            sums[part] += column[ids[k + part] * row_step] * (factors ? factors[k + part] : 1);
    for (int64_t k = whole; k < count; k++) sums[0] += column[ids[k] * row_step] * (factors ? factors[k] : 1);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/*
 * For each sample i, scales[i] times the sum of factors[k] * table[ids[k]] over its lookups k = offsets[i] ... offsets[i + 1] - 1.
 * factors and scales may be null, for ones.
 *
 * squares[i] is the sum, over the distinct ids, of the square of what the row is multiplied with: the squared norm of the sample's
 * gradient over that of the derivative at its output.
 */
int bag_forward(
    int64_t n, int64_t width, int64_t table_rows, const float *table, int64_t row_step, int64_t column_step,
    const int64_t *ids, const int64_t *offsets, const float *factors, const float *scales,
    float *out, double *squares, int threads
) {
    int failed = 0;
    for (int64_t k = 0; k < offsets[n]; k++)
        if (ids[k] < 0 || ids[k] >= table_rows) return FAILED_RANGE;
#pragma omp parallel num_threads(threads)
    {
        double *uses = calloc((size_t)table_rows + 1, sizeof(double)); /* of each row by the present sample */
        if (!uses) {
#pragma omp atomic write
            failed = FAILED_MEMORY;
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n; i++) {
            if (!uses) continue;
            float *to = out + i * width;
            int64_t count = offsets[i + 1] - offsets[i];
            const int64_t *own = ids + offsets[i];
            const float *factor = factors ? factors + offsets[i] : 0;
            if (column_step == 1) add_whole_rows(count, width, table, row_step, own, factor, offsets[n] - offsets[i], to);
            else
                for (int64_t j = 0; j < width; j++) to[j] = column_sum(count, table + j * column_step, row_step, own, factor);
            double square = 0, scale = scales ? scales[i] : 1;
            for (int64_t k = 0; k < count; k++) uses[own[k]] += factor ? factor[k] : 1;
            for (int64_t k = 0; k < count; k++) {
                square += uses[own[k]] * uses[own[k]];
                uses[own[k]] = 0; /* what was used twice counts once */
            }
            for (int64_t j = 0; scales && j < width; j++) to[j] *= scales[i];
            squares[i] = square * scale * scale;
        }
        free(uses);
    }
    return failed;
}

static double square_of(int64_t width, const double *row) {
    double parts[LANES] = {0}, square = 0;
    int64_t whole = width / LANES * LANES;
    for (int64_t j = 0; j < whole; j += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) parts[lane] += row[j + lane] * row[j + lane];
    for (int64_t j = whole; j < width; j++) square += row[j] * row[j];
    for (int64_t lane = 0; lane < LANES; lane++) square += parts[lane];
    return square;
}

/*
 * squares[i] = the squared norm of sample i's gradient: the sum of |sum of rows with the same id|^2 over its distinct ids. Its
 * lookups are k = offsets[i] ... offsets[i + 1] - 1, and rows[k] is the derivative at lookup k.
 */
int row_norms(
    int64_t n, int64_t width, int64_t table_rows, const float *rows, const int64_t *ids, const int64_t *offsets,
    double *squares, int threads
) {
    int failed = 0;
    int64_t *before = malloc((size_t)(offsets[n] + 1) * sizeof(int64_t)); /* one more than the last lookup with the same id, or 0 */
    if (!before) return FAILED_MEMORY;
#pragma omp parallel num_threads(threads)
    {
        int64_t *last = calloc((size_t)table_rows + 1, sizeof(int64_t)); /* one more than the last lookup of each id, or 0 */
        double *sum = malloc((size_t)width * sizeof(double));
        int ready = last && sum;
        if (!ready) {
#pragma omp atomic write
            failed = FAILED_MEMORY;
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n; i++) {
            if (!ready) continue;
            double square = 0;
            for (int64_t k = offsets[i]; k < offsets[i + 1]; k++) before[k] = last[ids[k]], last[ids[k]] = k + 1;
            for (int64_t k = offsets[i]; k < offsets[i + 1]; k++) {
                int64_t next = last[ids[k]];
                if (!next) continue; /* all lookups of this id have been added up */
                last[ids[k]] = 0;
                memset(sum, 0, (size_t)width * sizeof(double));
                for (; next; next = before[next - 1])
                    for (int64_t j = 0; j < width; j++) sum[j] += rows[(next - 1) * width + j];
                square += square_of(width, sum);
            }
            squares[i] = square;
        }
        free(last), free(sum);
    }
    free(before);
    return failed;
}

/* `add_rows` for a table whose sums fit into the cache, where lookups need not be sorted first. */
static int add_to_small_table(
    int64_t count, int64_t width, int64_t table_rows, const float *rows, const int64_t *sources, const int64_t *ids,
    const float *scales, float *into, int64_t row_step, int64_t column_step, int fresh
) {
    double *sums = calloc((size_t)(table_rows * width) + 1, sizeof(double));
    if (!sums) return FAILED_MEMORY;
    for (int64_t k = 0; k < count; k++) {
        const float *from = rows + (sources ? sources[k] : k) * width;
        double *to = sums + ids[k] * width, scale = scales ? scales[k] : 1;
        for (int64_t j = 0; j < width; j++) to[j] += scale * from[j];
    }
    for (int64_t j = 0; j < width; j++)
        for (int64_t row = 0; row < table_rows; row++) {
            float *to = into + row * row_step + j * column_step;
            *to = (float)(fresh ? sums[row * width + j] : *to + sums[row * width + j]);
        }
    free(sums);
    return 0;
}

/* The lookups in the order of their ids, those of row r from starts[r] on; null where memory ran out. */
static int64_t *sorted(int64_t count, int64_t table_rows, const int64_t *ids, int64_t *starts) {
    int64_t *order = malloc((size_t)(count + 1) * sizeof(int64_t));
    if (!order) return order;
    for (int64_t k = 0; k < count; k++) starts[ids[k] + 1]++;
    for (int64_t row = 0; row < table_rows; row++) starts[row + 1] += starts[row];
    for (int64_t k = 0; k < count; k++) order[starts[ids[k]]++] = k;
    for (int64_t row = table_rows; row > 0; row--) starts[row] = starts[row - 1];
    starts[0] = 0;
    return order;
}

/*
 * into[ids[k]] += scales[k] * rows[sources[k]] for all k; sources may be null, for k itself, and scales, for ones. All that goes to
 * one row of the table is added up in double precision first, in the order of k, and rounded once. Each thread sees to its own
 * rows of the table, so the result does not depend on their number. Entry (r, j) of the table is at
 * r * row_step + j * column_step. If fresh is set, the table has nothing in it yet, and rows that nothing goes to become zero.
 */
int add_rows(
    int64_t count, int64_t width, int64_t table_rows, const float *rows, const int64_t *sources, const int64_t *ids,
    const float *scales, float *into, int64_t row_step, int64_t column_step, int fresh, int threads
) {
    if (table_rows * width <= SMALL_TABLE)
        return add_to_small_table(
            count, width, table_rows, rows, sources, ids, scales, into, row_step, column_step, fresh
        );
    int64_t *starts = calloc((size_t)table_rows + 2, sizeof(int64_t));
    int64_t *order = starts ? sorted(count, table_rows, ids, starts) : 0;
    int failed = order ? 0 : FAILED_MEMORY;
#pragma omp parallel num_threads(threads)
    {
        double *sum = malloc((size_t)width * sizeof(double));
        if (!sum) {
#pragma omp atomic write
            failed = FAILED_MEMORY;
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < table_rows; row++) {
            if (!order || !sum) continue;
            float *to = into + row * row_step;
            if (starts[row] == starts[row + 1] && !fresh) continue;
            for (int64_t j = 0; j < width; j++) sum[j] = fresh ? 0 : to[j * column_step];
            for (int64_t place = starts[row]; place < starts[row + 1]; place++) {
                int64_t k = order[place], later = order[smaller(place + AHEAD, count - 1)];
                const float *from = rows + (sources ? sources[k] : k) * width;
                soon_read(rows + (sources ? sources[later] : later) * width, width);
                double scale = scales ? scales[k] : 1;
                for (int64_t j = 0; j < width; j++) sum[j] += scale * from[j];
            }
            if (column_step == 1)
                for (int64_t j = 0; j < width; j++) to[j] = (float)sum[j];
            else
                for (int64_t j = 0; j < width; j++) to[j * column_step] = (float)sum[j];
        }
        free(sum);
    }
    free(starts), free(order);
    return failed;
}
