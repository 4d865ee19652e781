/* Stored records, gathered by index and converted on the way, so that they are written once. */

#include "tile.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

enum { NO_SUCH_TYPE = 1, NO_SUCH_ROW = 2 };

enum { ROWS_AHEAD = 2 }; /* whose memory is on its way */

#ifdef __FLT16_MAX__
/* Compilers do not find the instruction that converts eight numbers by themselves. */
static void from_half(int64_t count, const _Float16 *from, const _Float16 *soon, float *to) {
    int64_t k = 0;
#ifdef __F16C__
    for (; k + 2 * LINE <= count; k += 2 * LINE) {
        __builtin_prefetch(soon + k);
        for (int64_t j = k; j < k + 2 * LINE; j += LANES)
            *(floats *)(to + j) = (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + j)));
    }
#endif
    for (; k < count; k++) to[k] = (float)from[k];
}
#endif

/* to[i] = stored[indices[i]] in single precision, for rows of width numbers that have 2 or 4 bytes each; stored has so many rows. */
int gather_rows(
    int64_t n, int64_t width, int64_t rows, const void *stored, int bytes, const int64_t *indices, float *to, int threads
) {
    for (int64_t i = 0; i < n; i++)
        if (indices[i] < 0 || indices[i] >= rows) return NO_SUCH_ROW;
#ifndef __FLT16_MAX__
    if (bytes == 2) return NO_SUCH_TYPE;
#endif
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < n; i++) {
        int64_t from = indices[i] * width, soon = indices[smaller(i + ROWS_AHEAD, n - 1)] * width;
#ifdef __FLT16_MAX__
        if (bytes == 2) from_half(width, (const _Float16 *)stored + from, (const _Float16 *)stored + soon, to + i * width);
#endif
        if (bytes == 4) {
            soon_read((const float *)stored + soon, width);
            memcpy(to + i * width, (const float *)stored + from, (size_t)width * sizeof(float));
        }
    }
    return 0;
}
