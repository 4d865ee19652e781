/* Embedding tables: sums of the rows that a sample uses, norms of its gradient, and weighted sums over samples. */

#include "tile.h"

#include <math.h>

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

/* counts[i] = how many entries of row i of a matrix are not padding. Returns whether these are the first ones in every row. */
int count_entries(int64_t n, int64_t columns, const void *matrix, int bytes, int64_t padding, int64_t *counts) {
    int64_t elsewhere = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t first = i * columns, end = first + columns;
        int64_t here = bytes == 4 ? count_others(matrix, 4, first, end, padding) : count_others(matrix, 8, first, end, padding);
        elsewhere += here - (bytes == 4 ? count_others(matrix, 4, first, first + here, padding)
                                        : count_others(matrix, 8, first, first + here, padding));
        counts[i] = here;
    }
    return elsewhere == 0;
}

/*
 * The lists values[offsets[indices[i]]] ... of n indices as rows of one length, filled up with -1. There are so many lists, and so many
 * values in all of them.
 */
int pad_lists(
    int64_t n, int64_t length, int64_t lists, int64_t all, const int32_t *values, const int64_t *offsets, const int64_t *indices,
    int32_t *rows
) {
    for (int64_t i = 0; i < n; i++)
        if (indices[i] < 0 || indices[i] >= lists) return FAILED_RANGE;
    for (int64_t i = 0; i < n; i++) {
        int64_t soon = indices[smaller(i + AHEAD, n - 1)];
        __builtin_prefetch(offsets + indices[smaller(i + 2 * AHEAD, n - 1)]);
        int64_t first = offsets[indices[i]], end = offsets[indices[i] + 1], count = end - first;
        if (first < 0 || end > all || count < 0 || count > length) return FAILED_RANGE;
        for (int64_t k = offsets[soon]; k < offsets[soon + 1]; k += LINE) __builtin_prefetch(values + k);
        memcpy(rows + i * length, values + first, (size_t)count * sizeof(int32_t));
        memset(rows + i * length + count, -1, (size_t)(length - count) * sizeof(int32_t));
    }
    return 0;
}

/* to = the sum of factors[k] * table[ids[k]]. */
static inline __attribute__((always_inline)) void add_whole_rows(
    int64_t count, int64_t width, const float *table, int64_t row_step, const void *ids, int bytes, const float *factors, float *to
) {
    memset(to, 0, (size_t)width * sizeof(float));
    for (int64_t k = 0; k < count; k++) {
        const float *row = table + entry(ids, bytes, k) * row_step;
        float factor = factors ? factors[k] : 1;
        if (k + AHEAD < count) soon_read(table + entry(ids, bytes, k + AHEAD) * row_step, width);
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

static inline __attribute__((always_inline)) int within(int64_t count, const void *ids, int bytes, int64_t end) {
    int64_t outside = 0;
    for (int64_t k = 0; k < count; k++) outside += entry(ids, bytes, k) < 0 || entry(ids, bytes, k) >= end;
    return outside == 0;
}

/* The rows of a table that each of n samples uses: the first counts[i] entries of row i of a matrix. */
typedef struct {
    int64_t n, columns;
    const void *ids; /* the matrix */
    int64_t bytes;   /* of an id */
    const int64_t *counts;
    const float *factors; /* what each of these rows is multiplied with, beside the ids; null for ones */
} Bags;

static inline const void *ids_of(const Bags *bags, int64_t i) { return (const char *)bags->ids + i * bags->columns * bags->bytes; }

/* Whether all samples have as many ids as a row can hold, and all of these are rows of the table. */
static int usable(const Bags *bags, int64_t table_rows) {
    int good = 1;
    for (int64_t i = 0; good && i < bags->n; i++) {
        int64_t count = bags->counts[i];
        if (count < 0 || count > bags->columns) return 0;
        good = bags->bytes == 4 ? within(count, ids_of(bags, i), 4, table_rows) : within(count, ids_of(bags, i), 8, table_rows);
    }
    return good;
}

/* The least part of the square without cancellation that a square counts as: DOUBLE^-2 of contributions.py. */
#define LEAST 0x1p-40

/* The larger of two numbers; a, if it is none. */
static inline double larger(double a, double b) { return b > a ? b : a; }

/* The sum, over distinct ids, of the square of all their factors together (ones, if null), or of the factors' sizes. */
static inline __attribute__((always_inline)) double square_of_sums(
    int64_t count, const void *ids, int bytes, const float *factors, int of_sizes, double *sums
) {
    double square = 0;
    for (int64_t k = 0; k < count; k++) {
        double factor = factors ? factors[k] : 1;
        sums[entry(ids, bytes, k)] += of_sizes && factor < 0 ? -factor : factor;
    }
    for (int64_t k = 0; k < count; k++) {
        double *sum = sums + entry(ids, bytes, k);
        square += *sum * *sum;
        *sum = 0; /* what was used twice counts once */
    }
    return square;
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
    square = square_of_sums(count, ids, bytes, factors, 0, uses);
    return factors ? larger(square, LEAST * square_of_sums(count, ids, bytes, factors, 1, uses)) : square;
}

/* Sample i of `bag_forward`, for ids of one size. */
static inline __attribute__((always_inline)) void forward_one(
    const Bags *bags, int bytes, int64_t i, int64_t width, const float *table, int64_t row_step, int64_t column_step,
    const float *bias, const float *scales, double *uses, float *to, double *square
) {
    int64_t count = bags->counts[i];
    const void *ids = ids_of(bags, i);
    const float *factors = bags->factors ? bags->factors + i * bags->columns : 0;
    double scale = scales ? scales[i] : 1;
    if (column_step == 1) {
        for (int64_t k = 0; i + 1 < bags->n && k < smaller(bags->counts[i + 1], AHEAD); k++)
            soon_read(table + entry(ids_of(bags, i + 1), bytes, k) * row_step, width);
        add_whole_rows(count, width, table, row_step, ids, bytes, factors, to);
    } else
        for (int64_t j = 0; j < width; j++) to[j] = column_sum(count, table + j * column_step, row_step, ids, bytes, factors);
    for (int64_t j = 0; scales && j < width; j++) to[j] *= scales[i];
    for (int64_t j = 0; bias && j < width; j++) to[j] += bias[j];
    *square = square_of_uses(count, ids, bytes, factors, uses) * scale * scale;
}

/*
 * For each sample i, scales[i] times the sum of factor * table[id] over its lookups, plus bias. bias and scales may be null, for zeros
 * and ones.
 *
 * squares[i] is the sum, over the distinct ids, of the square of what the row is multiplied with: the squared norm of the sample's
 * gradient over that of the derivative at its output.
 */
int bag_forward(
    const Bags *bags, int64_t width, int64_t table_rows, const float *table, int64_t row_step, int64_t column_step,
    const float *bias, const float *scales, float *out, double *squares, int threads
) {
    int failed = 0;
    if (!usable(bags, table_rows)) return FAILED_RANGE;
#pragma omp parallel num_threads(threads)
    {
        double *uses = calloc((size_t)table_rows + 1, sizeof(double)); /* of each row by the present sample */
        if (!uses) {
#pragma omp atomic write
            failed = FAILED_MEMORY;
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < bags->n; i++) {
            if (!uses) continue;
            float *to = out + i * width;
            if (bags->bytes == 4)
                forward_one(bags, 4, i, width, table, row_step, column_step, bias, scales, uses, to, squares + i);
            else forward_one(bags, 8, i, width, table, row_step, column_step, bias, scales, uses, to, squares + i);
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

static double row_length(int64_t width, const float *row) {
    double parts[LANES] = {0}, square = 0;
    int64_t whole = width / LANES * LANES;
    for (int64_t j = 0; j < whole; j += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) parts[lane] += (double)row[j + lane] * row[j + lane];
    for (int64_t j = whole; j < width; j++) square += (double)row[j] * row[j];
    for (int64_t lane = 0; lane < LANES; lane++) square += parts[lane];
    return sqrt(square);
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
                int is_several = before[next - 1] != 0;
                double length = 0;
                for (; next; next = before[next - 1]) {
                    const float *row = rows + (next - 1) * width;
                    for (int64_t j = 0; j < width; j++) sum[j] += row[j];
                    if (is_several) length += row_length(width, row);
                }
                square += larger(square_of(width, sum), LEAST * length * length);
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
 * sources[k], and without sources k itself.
 */
typedef struct {
    int64_t count, width, table_rows;
    const float *rows;
    const int64_t *sources;
    const void *ids;
    int64_t bytes; /* of an id */
    const float *scales;
    float *into; /* entry (r, j) is at r * row_step + j * column_step */
    int64_t row_step, column_step;
    int64_t fresh, threads;
} Addition;

static inline __attribute__((always_inline)) void add_each(const Addition *a, int bytes, double *sums) {
    int64_t width = a->width;
    for (int64_t k = 0; k < a->count; k++) {
        const float *from = a->rows + (a->sources ? a->sources[k] : k) * width;
        double *to = sums + entry(a->ids, bytes, k) * width, scale = a->scales ? a->scales[k] : 1;
        for (int64_t j = 0; j < width; j++) to[j] += scale * from[j];
    }
}

/* Sums of a table that fit into the cache, where lookups need not be sorted first, all zero; null where memory ran out. */
static double *small_sums(const Addition *a) { return calloc((size_t)(a->table_rows * a->width) + 1, sizeof(double)); }

static void add_small_sums(const Addition *a, const double *sums) {
    int64_t width = a->width;
    for (int64_t j = 0; j < width; j++)
        for (int64_t row = 0; row < a->table_rows; row++) {
            float *to = a->into + row * a->row_step + j * a->column_step;
            *to = (float)(a->fresh ? sums[row * width + j] : *to + sums[row * width + j]);
        }
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
int add_rows(const Addition *a) {
    int bytes = (int)a->bytes;
    if (!(bytes == 4 ? within(a->count, a->ids, 4, a->table_rows) : within(a->count, a->ids, 8, a->table_rows))) return FAILED_RANGE;
    if (a->table_rows * a->width > SMALL_TABLE) return add_to_large_table(a);
    double *sums = small_sums(a);
    if (!sums) return FAILED_MEMORY;
    if (bytes == 4) add_each(a, 4, sums);
    else add_each(a, 8, sums);
    add_small_sums(a, sums);
    free(sums);
    return 0;
}

/* What bag i gives to each of its rows goes to sums; `scaled` is that without the factors. */
static inline __attribute__((always_inline)) void add_bag(
    const Bags *bags, int bytes, int64_t i, int64_t width, const float *scaled, double *sums
) {
    const void *ids = ids_of(bags, i);
    const float *factors = bags->factors ? bags->factors + i * bags->columns : 0;
    for (int64_t k = 0; k < bags->counts[i]; k++) {
        double *to = sums + entry(ids, bytes, k) * width, factor = factors ? factors[k] : 1;
        for (int64_t j = 0; j < width; j++) to[j] += factor * scaled[j];
    }
}

/* Lookups of bags one by one, for `add_to_large_table`. */
static int add_bags_to_large_table(const Bags *bags, Addition a) {
    for (int64_t i = 0; i < bags->n; i++) a.count += bags->counts[i];
    int64_t *ids = malloc((size_t)(2 * a.count + 1) * sizeof(int64_t)), *sources = ids + a.count, count = 0;
    float *factors = bags->factors ? malloc((size_t)(a.count + 1) * sizeof(float)) : 0;
    int failed = !ids || (bags->factors && !factors) ? FAILED_MEMORY : 0;
    for (int64_t i = 0; !failed && i < bags->n; i++)
        for (int64_t k = i * bags->columns; k < i * bags->columns + bags->counts[i]; k++, count++) {
            ids[count] = entry(bags->ids, (int)bags->bytes, k), sources[count] = i;
            if (factors) factors[count] = bags->factors[k];
        }
    a.ids = ids, a.bytes = 8, a.sources = sources, a.scales = factors;
    if (!failed) failed = add_to_large_table(&a);
    free(ids), free(factors);
    return failed;
}

/*
 * `add_rows` for bags: what goes to the rows of bag i is rows[i], in single precision times scales[i] and then times weights[i] (ones, if
 * null), times each lookup's factor. The addition has neither ids nor scales of its own.
 */
int add_bags(const Bags *bags, const Addition *given, const float *scales, const float *weights) {
    Addition a = *given;
    int64_t width = a.width;
    if (!usable(bags, a.table_rows)) return FAILED_RANGE;
    float *scaled = malloc((size_t)(bags->n * width + 1) * sizeof(float));
    if (!scaled) return FAILED_MEMORY;
    for (int64_t i = 0; i < bags->n; i++)
        for (int64_t j = 0; j < width; j++)
            scaled[i * width + j] = a.rows[i * width + j] * (scales ? scales[i] : 1) * (weights ? weights[i] : 1);
    a.rows = scaled;
    int failed = 0;
    if (a.table_rows * width > SMALL_TABLE) failed = add_bags_to_large_table(bags, a);
    else {
        double *sums = small_sums(&a);
        failed = sums ? 0 : FAILED_MEMORY;
        for (int64_t i = 0; sums && i < bags->n; i++) {
            const float *from = scaled + i * width;
            if (bags->bytes == 4 && width == 2) add_bag(bags, 4, i, 2, from, sums); /* two classes */
            else if (bags->bytes == 4) add_bag(bags, 4, i, width, from, sums);
            else add_bag(bags, 8, i, width, from, sums);
        }
        if (sums) add_small_sums(&a, sums);
        free(sums);
    }
    free(scaled);
    return failed;
}
