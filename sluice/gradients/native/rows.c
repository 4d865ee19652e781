/* Embedding tables: sums of the rows that a sample uses, norms of its gradient, and weighted sums over samples. */

#include "tile.h"

enum { FAILED_MEMORY = 1, FAILED_RANGE = 2 };
enum {
    AHEAD = 8,          /* lookups whose memory is on its way */
    SMALL_TABLE = 1 << 16 /* entries */
};

/* Entry k of a list of integers that have 4 or 8 bytes each; where bytes does not change, compilers decide outside of loops. */
static inline __attribute__((always_inline)) int64_t entry(const void *list, int bytes, int64_t k) {
    return bytes == 4 ? ((const int32_t *)list)[k] : ((const int64_t *)list)[k];
}

static inline __attribute__((always_inline)) int64_t count_others(const void *list, int bytes, int64_t first, int64_t end, int64_t padding) {
    int64_t count = 0;
    for (int64_t k = first; k < end; k++) count += entry(list, bytes, k) != padding;
    return count;
}

/* `list_entries` for entries of one size. */
static inline __attribute__((always_inline)) void list_entries_of(
    int64_t n, int64_t columns, const void *matrix, int bytes, int64_t padding, void *values, int64_t *offsets
) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t first = i * columns, here = count_others(matrix, bytes, first, first + columns, padding);
        offsets[i] = count;
        if (count_others(matrix, bytes, first, first + here, padding) == here) { /* all padding stands at the end */
            memcpy((char *)values + count * bytes, (const char *)matrix + first * bytes, (size_t)(here * bytes));
            count += here;
            continue;
        }
        for (int64_t k = first; k < first + columns; k++) {
            int64_t value = entry(matrix, bytes, k);
            if (value == padding) continue;
            if (bytes == 4) ((int32_t *)values)[count++] = (int32_t)value;
            else ((int64_t *)values)[count++] = value;
        }
    }
    offsets[n] = count;
}

/*
 * The entries of a matrix of n rows, those that are padding left out, as one list: the values, and where each row begins in the list
 * (offsets, n + 1 of them). Entries have 4 or 8 bytes.
 */
void list_entries(
    int64_t n, int64_t columns, const void *matrix, int bytes, int64_t padding, void *values, int64_t *offsets
) {
    if (bytes == 4) list_entries_of(n, columns, matrix, 4, padding, values, offsets);
    else list_entries_of(n, columns, matrix, 8, padding, values, offsets);
}

/*
 * The lists values[offsets[indices[i]]] ... of n indices as rows of one length, filled up with -1. There are so many lists, and so many
 * values in all of them.
 */
int pad_lists(
    int64_t n, int64_t length, int64_t lists, int64_t all, const int32_t *values, const int64_t *offsets, const int64_t *indices,
    int32_t *rows
) {
    for (int64_t i = 0; i < n; i++) {
        if (indices[i] < 0 || indices[i] >= lists) return FAILED_RANGE;
        int64_t first = offsets[indices[i]], end = offsets[indices[i] + 1], count = end - first;
        if (first < 0 || end > all || count < 0 || count > length) return FAILED_RANGE;
        memcpy(rows + i * length, values + first, (size_t)count * sizeof(int32_t));
        memset(rows + i * length + count, -1, (size_t)(length - count) * sizeof(int32_t));
    }
    return 0;
}

/* to = the sum of factors[k] * table[ids[k]]; ids are known up to readable, which is beyond count. */
static void add_whole_rows(
    int64_t count, int64_t width, const float *table, int64_t row_step, const void *ids, int bytes, const float *factors,
    int64_t readable, float *to
) {
    memset(to, 0, (size_t)width * sizeof(float));
    for (int64_t k = 0; k < count; k++) {
        const float *row = table + entry(ids, bytes, k) * row_step;
        float factor = factors ? factors[k] : 1;
        if (k + AHEAD < readable) soon_read(table + entry(ids, bytes, k + AHEAD) * row_step, width);
        for (int64_t j = 0; j < width; j++) to[j] += factor * row[j];
    }
}

/* The sum of factors[k] * column[ids[k]] of one column of a table, four parts of it at a time. */
static inline __attribute__((always_inline)) float column_sum(
    int64_t count, const float *column, int64_t row_step, const void *ids, int bytes, const float *factors
) {
    float sums[4] = {0};
    int64_t whole = count / 4 * 4;
    for (int64_t k = 0; k < whole; k += 4)
        for (int64_t part = 0; part < 4; part++)
            sums[part] += column[entry(ids, bytes, k + part) * row_step] * (factors ? factors[k + part] : 1);
    for (int64_t k = whole; k < count; k++) sums[0] += column[entry(ids, bytes, k) * row_step] * (factors ? factors[k] : 1);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* Whether each id is larger than the one before it, so that none is there twice. */
static inline __attribute__((always_inline)) int ascending(int64_t count, const void *ids, int bytes) {
    int64_t wrong = 0;
    for (int64_t k = 1; k < count; k++) wrong += entry(ids, bytes, k) <= entry(ids, bytes, k - 1);
    return wrong == 0;
}

/* The sum of the squares of what distinct rows are multiplied with; uses, of all rows, is zero before and after. */
static inline __attribute__((always_inline)) double square_of_uses(
    int64_t count, const void *ids, int bytes, const float *factors, double *uses
) {
    double square = 0;
    if (ascending(count, ids, bytes)) {
        if (!factors) return (double)count;
        for (int64_t k = 0; k < count; k++) square += (double)factors[k] * factors[k];
        return square;
    }
    for (int64_t k = 0; k < count; k++) uses[entry(ids, bytes, k)] += factors ? factors[k] : 1;
    for (int64_t k = 0; k < count; k++) {
        double *use = uses + entry(ids, bytes, k);
        square += *use * *use;
        *use = 0; /* what was used twice counts once */
    }
    return square;
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
    const void *ids, int bytes, const int64_t *offsets, const float *factors, const float *scales,
    float *out, double *squares, int threads
) {
    int failed = 0;
    for (int64_t k = 0; k < offsets[n]; k++) failed |= entry(ids, bytes, k) < 0 || entry(ids, bytes, k) >= table_rows;
    if (failed) return FAILED_RANGE;
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
            const void *own = (const char *)ids + offsets[i] * bytes;
            const float *factor = factors ? factors + offsets[i] : 0;
            double scale = scales ? scales[i] : 1;
            if (column_step == 1)
                add_whole_rows(count, width, table, row_step, own, bytes, factor, offsets[n] - offsets[i], to);
            else
                for (int64_t j = 0; j < width; j++)
                    to[j] = column_sum(count, table + j * column_step, row_step, own, bytes, factor);
            for (int64_t j = 0; scales && j < width; j++) to[j] *= scales[i];
            squares[i] = square_of_uses(count, own, bytes, factor, uses) * scale * scale;
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

/*
 * What goes to which row of a table: ids[k] is the row, scales[k] (one, if null) times rows[source of k] what goes there. That source is
 * sources[k]; without sources it is the i for which k lies in offsets[i] ... offsets[i + 1] - 1, and without these k itself.
 */
typedef struct {
    int64_t count, width, table_rows;
    const float *rows;
    const int64_t *sources, *offsets;
    int64_t bags; /* offsets has one more */
    const void *ids;
    int64_t bytes; /* of an id */
    const float *scales;
    float *into; /* entry (r, j) is at r * row_step + j * column_step */
    int64_t row_step, column_step;
    int64_t fresh, threads;
} Addition;

/* Lookups first ... end - 1, which all have one source, or each its own. */
static inline __attribute__((always_inline)) void add_span(
    const Addition *a, int bytes, int64_t width, int64_t first, int64_t end, const float *one, double *sums
) {
    for (int64_t k = first; k < end; k++) {
        const float *from = one ? one : a->rows + (a->sources ? a->sources[k] : k) * width;
        double *to = sums + entry(a->ids, bytes, k) * width, scale = a->scales ? a->scales[k] : 1;
        for (int64_t j = 0; j < width; j++) to[j] += scale * from[j];
    }
}

static inline __attribute__((always_inline)) void add_spans(const Addition *a, int bytes, int64_t width, double *sums) {
    if (a->sources || !a->offsets) add_span(a, bytes, width, 0, a->count, 0, sums);
    else
        for (int64_t i = 0; i < a->bags; i++)
            add_span(a, bytes, width, a->offsets[i], a->offsets[i + 1], a->rows + i * width, sums);
}

/* `add_rows` for a table whose sums fit into the cache, where lookups need not be sorted first. */
static int add_to_small_table(const Addition *a) {
    int64_t width = a->width;
    double *sums = calloc((size_t)(a->table_rows * width) + 1, sizeof(double));
    if (!sums) return FAILED_MEMORY;
    if (a->bytes == 4 && width == 2) add_spans(a, 4, 2, sums); /* two classes */
    else if (a->bytes == 4) add_spans(a, 4, width, sums);
    else add_spans(a, 8, width, sums);
    for (int64_t j = 0; j < width; j++)
        for (int64_t row = 0; row < a->table_rows; row++) {
            float *to = a->into + row * a->row_step + j * a->column_step;
            *to = (float)(a->fresh ? sums[row * width + j] : *to + sums[row * width + j]);
        }
    free(sums);
    return 0;
}

/* The lookups in the order of their ids, those of row r from starts[r] on; null where memory ran out. */
static int64_t *sorted(const Addition *a, int bytes, int64_t *starts) {
    int64_t *order = malloc((size_t)(a->count + 1) * sizeof(int64_t));
    if (!order) return order;
    for (int64_t k = 0; k < a->count; k++) starts[entry(a->ids, bytes, k) + 1]++;
    for (int64_t row = 0; row < a->table_rows; row++) starts[row + 1] += starts[row];
    for (int64_t k = 0; k < a->count; k++) order[starts[entry(a->ids, bytes, k)]++] = k;
    for (int64_t row = a->table_rows; row > 0; row--) starts[row] = starts[row - 1];
    starts[0] = 0;
    return order;
}

/* The source of each lookup, one after the other; null where memory ran out. */
static int64_t *listed_sources(const Addition *a) {
    int64_t *sources = malloc((size_t)(a->count + 1) * sizeof(int64_t));
    for (int64_t i = 0; sources && i < a->bags; i++)
        for (int64_t k = a->offsets[i]; k < a->offsets[i + 1]; k++) sources[k] = i;
    return sources;
}

static int add_to_large_table(const Addition *a) {
    const int64_t *sources = a->sources;
    int64_t width = a->width, *starts = calloc((size_t)a->table_rows + 2, sizeof(int64_t));
    int64_t *order = starts ? sorted(a, (int)a->bytes, starts) : 0;
    int failed = order ? 0 : FAILED_MEMORY;
#pragma omp parallel num_threads((int)a->threads)
    {
        double *sum = malloc((size_t)width * sizeof(double));
        if (!sum) {
#pragma omp atomic write
            failed = FAILED_MEMORY;
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a->table_rows; row++) {
            if (!order || !sum) continue;
            float *to = a->into + row * a->row_step;
            if (starts[row] == starts[row + 1] && !a->fresh) continue;
            for (int64_t j = 0; j < width; j++) sum[j] = a->fresh ? 0 : to[j * a->column_step];
            for (int64_t place = starts[row]; place < starts[row + 1]; place++) {
                int64_t k = order[place], later = order[smaller(place + AHEAD, a->count - 1)];
                const float *from = a->rows + (sources ? sources[k] : k) * width;
                soon_read(a->rows + (sources ? sources[later] : later) * width, width);
                double scale = a->scales ? a->scales[k] : 1;
                for (int64_t j = 0; j < width; j++) sum[j] += scale * from[j];
            }
            if (a->column_step == 1)
                for (int64_t j = 0; j < width; j++) to[j] = (float)sum[j];
            else
                for (int64_t j = 0; j < width; j++) to[j * a->column_step] = (float)sum[j];
        }
        free(sum);
    }
    free(starts), free(order);
    return failed;
}

/*
 * into[ids[k]] += scales[k] * rows[source of k] for all k. All that goes to one row of the table is added up in double precision first,
 * in the order of k, and rounded once. Each thread sees to its own rows of the table, so the result does not depend on their
 * number. If fresh is set, the table has nothing in it yet, and rows that nothing goes to become zero.
 */
int add_rows(const Addition *given) {
    Addition a = *given;
    int outside = 0;
    for (int64_t k = 0; k < a.count; k++)
        outside |= entry(a.ids, (int)a.bytes, k) < 0 || entry(a.ids, (int)a.bytes, k) >= a.table_rows;
    if (outside) return FAILED_RANGE;
    if (a.table_rows * a.width <= SMALL_TABLE) return add_to_small_table(&a);
    if (a.sources || !a.offsets) return add_to_large_table(&a);
    int64_t *sources = listed_sources(&a);
    a.sources = sources;
    int failed = sources ? add_to_large_table(&a) : FAILED_MEMORY;
    free(sources);
    return failed;
}
