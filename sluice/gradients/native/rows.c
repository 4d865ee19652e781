/* Embedding tables: sums of the rows that a sample uses, norms of its gradient, and weighted sums over samples. */

#include "tile.h"

/* The ids of one sample, each with a number of its own: a hash table that is cleared for the next sample. */
typedef struct {
    int64_t size, count; /* places, a power of two; ids so far */
    int64_t *ids, *numbers, *used; /* used: the places that hold an id */
} Ids;

static int make_ids(Ids *table, int64_t most) {
    table->size = 16, table->count = 0;
    while (table->size < 2 * most) table->size *= 2;
    table->ids = malloc((size_t)table->size * sizeof(int64_t));
    table->numbers = malloc((size_t)table->size * sizeof(int64_t));
    table->used = malloc((size_t)(most + 1) * sizeof(int64_t));
    if (table->ids) memset(table->ids, -1, (size_t)table->size * sizeof(int64_t));
    return table->ids && table->numbers && table->used;
}

static void free_ids(Ids *table) { free(table->ids), free(table->numbers), free(table->used); }

/* The number of an id, which is the count of ids before it; a new one gets the next. */
static inline int64_t number_of(Ids *table, int64_t id) {
    int64_t place = (int64_t)((uint64_t)id * 0x9E3779B97F4A7C15u >> 32) & (table->size - 1);
    while (table->ids[place] != id) {
        if (table->ids[place] < 0) {
            table->ids[place] = id, table->numbers[place] = table->count, table->used[table->count] = place;
            return table->count++;
        }
        place = (place + 1) & (table->size - 1);
    }
    return table->numbers[place];
}

static inline void clear_ids(Ids *table) {
    for (int64_t k = 0; k < table->count; k++) table->ids[table->used[k]] = -1;
    table->count = 0;
}

static int64_t longest(int64_t n, const int64_t *offsets) {
    int64_t most = 1;
    for (int64_t i = 0; i < n; i++)
        if (offsets[i + 1] - offsets[i] > most) most = offsets[i + 1] - offsets[i];
    return most;
}

enum { FAILED_MEMORY = 1, FAILED_RANGE = 2 };
enum { AHEAD = 8 }; /* lookups whose memory is on its way */

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
    int64_t most = longest(n, offsets);
#pragma omp parallel num_threads(threads)
    {
        Ids seen;
        double *uses = malloc((size_t)most * sizeof(double));
        int ready = make_ids(&seen, most) && uses;
        if (!ready) {
#pragma omp atomic write
            failed = FAILED_MEMORY;
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n; i++) {
            if (!ready) continue;
            float *to = out + i * width;
            memset(to, 0, (size_t)width * sizeof(float));
            for (int64_t k = offsets[i]; k < offsets[i + 1]; k++) {
                int64_t id = ids[k];
                if (id < 0 || id >= table_rows) {
#pragma omp atomic write
                    failed = FAILED_RANGE;
                    continue;
                }
                if (k + AHEAD < offsets[n]) soon_read(table + ids[k + AHEAD] * row_step, column_step == 1 ? width : 1);
                float factor = factors ? factors[k] : 1;
                const float *row = table + id * row_step;
                if (column_step == 1)
                    for (int64_t j = 0; j < width; j++) to[j] += factor * row[j];
                else
                    for (int64_t j = 0; j < width; j++) to[j] += factor * row[j * column_step];
                int64_t before = seen.count, number = number_of(&seen, id);
                if (number == before) uses[number] = 0;
                uses[number] += factor;
            }
            double square = 0;
            for (int64_t k = 0; k < seen.count; k++) square += uses[k] * uses[k];
            clear_ids(&seen);
            double scale = scales ? scales[i] : 1;
            for (int64_t j = 0; scales && j < width; j++) to[j] *= scales[i];
            squares[i] = square * scale * scale;
        }
        free_ids(&seen);
        free(uses);
    }
    return failed;
}

/*
 * squares[i] = the squared norm of sample i's gradient: the sum of |sum of rows with the same id|^2 over its distinct ids. Its
 * lookups are k = offsets[i] ... offsets[i + 1] - 1, and rows[k] is the derivative at lookup k.
 */
int row_norms(
    int64_t n, int64_t width, const float *rows, const int64_t *ids, const int64_t *offsets, double *squares, int threads
) {
    int failed = 0;
    int64_t most = longest(n, offsets);
#pragma omp parallel num_threads(threads)
    {
        Ids seen;
        int64_t *last = malloc((size_t)most * sizeof(int64_t)), *previous = malloc((size_t)most * sizeof(int64_t));
        double *sum = malloc((size_t)width * sizeof(double));
        int ready = make_ids(&seen, most) && last && previous && sum;
        if (!ready) {
#pragma omp atomic write
            failed = FAILED_MEMORY;
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n; i++) {
            if (!ready) continue;
            const float *own = rows + offsets[i] * width;
            for (int64_t k = 0; k < offsets[i + 1] - offsets[i]; k++) {
                int64_t before = seen.count, number = number_of(&seen, ids[offsets[i] + k]);
                previous[k] = number == before ? -1 : last[number];
                last[number] = k;
            }
            double square = 0;
            for (int64_t number = 0; number < seen.count; number++) {
                const float *row = own + last[number] * width;
                for (int64_t j = 0; j < width; j++) sum[j] = row[j];
                for (int64_t k = previous[last[number]]; k >= 0; k = previous[k]) {
                    row = own + k * width;
                    for (int64_t j = 0; j < width; j++) sum[j] += row[j];
                }
                double part[LANES] = {0};
                int64_t whole = width / LANES * LANES;
                for (int64_t j = 0; j < whole; j += LANES)
                    for (int64_t lane = 0; lane < LANES; lane++) part[lane] += sum[j + lane] * sum[j + lane];
                for (int64_t j = whole; j < width; j++) part[0] += sum[j] * sum[j];
                for (int64_t lane = 0; lane < LANES; lane++) square += part[lane];
            }
            clear_ids(&seen);
            squares[i] = square;
        }
        free_ids(&seen);
        free(last), free(previous), free(sum);
    }
    return failed;
}

/*
 * into[ids[k]] += scales[k] * rows[sources[k]] for all k; sources may be null, for k itself. All that goes to one row of the table
 * is added up in double precision first, in the order of k, and rounded once. Each thread sees to its own rows of the table, so
 * the result does not depend on their number. Entry (r, j) of the table is at r * row_step + j * column_step. If fresh is set, the
 * table has nothing in it yet, and rows that nothing goes to become zero.
 */
int add_rows(
    int64_t count, int64_t width, int64_t table_rows, const float *rows, const int64_t *sources, const int64_t *ids,
    const float *scales, float *into, int64_t row_step, int64_t column_step, int fresh, int threads
) {
    int failed = 0;
    int64_t *starts = calloc((size_t)table_rows + 1, sizeof(int64_t)), *order = malloc((size_t)(count + 1) * sizeof(int64_t));
    if (!starts || !order) {
        free(starts), free(order);
        return FAILED_MEMORY;
    }
    for (int64_t k = 0; k < count; k++) starts[ids[k]]++;
    for (int64_t row = 0, before = 0; row <= table_rows; row++) {
        int64_t here = starts[row];
        starts[row] = before, before += here;
    }
    for (int64_t k = 0; k < count; k++) order[starts[ids[k]]++] = k; /* starts[row] is now the end of the row's lookups */
#pragma omp parallel num_threads(threads)
    {
        double *sum = malloc((size_t)width * sizeof(double));
        if (!sum) {
#pragma omp atomic write
            failed = FAILED_MEMORY;
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < table_rows; row++) {
            int64_t first = row ? starts[row - 1] : 0, end = starts[row];
            float *to = into + row * row_step;
            if (!sum) continue;
            if (fresh && column_step == 1) memset(to, 0, (size_t)width * sizeof(float));
            for (int64_t j = 0; fresh && column_step != 1 && j < width; j++) to[j * column_step] = 0;
            if (first == end) continue;
            memset(sum, 0, (size_t)width * sizeof(double));
            for (int64_t place = first; place < end; place++) {
                int64_t k = order[place], next = order[smaller(place + AHEAD, count - 1)];
                soon_read(rows + (sources ? sources[next] : next) * width, width);
                const float *from = rows + (sources ? sources[k] : k) * width;
                double scale = scales[k];
                for (int64_t j = 0; j < width; j++) sum[j] += scale * from[j];
            }
            if (column_step == 1)
                for (int64_t j = 0; j < width; j++) to[j] = (float)(to[j] + sum[j]);
            else
                for (int64_t j = 0; j < width; j++) to[j * column_step] = (float)(to[j * column_step] + sum[j]);
        }
        free(sum);
    }
    free(starts), free(order);
    return failed;
}
