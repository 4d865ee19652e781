/*
 * Responses of a dictionary of patches, averaged over the cells of an image, and products of rows with a matrix.
 *
 * Patches are read and whitened side by side, one in each lane of a vector. Their whitened coordinates come in two kinds: when
 * an image is mirrored, even ones stay and odd ones change sign. So one sum over the even and one over the odd
 * coordinates, added and subtracted, give the responses of an atom and of its mirror image: two for the price of one.
 * Those of the mirror image are counted in the mirrored cell, and the result is the same for an image and its mirror image.
 *
 * Every image, and every row, is worked on alone and in the same order of operations, whatever stands beside it.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* As wide as registers are, and as many sums as there are registers for. */
#if defined(__AVX512F__)
enum { LANES = 16, TILE = 6 };
#elif defined(__AVX__)
enum { LANES = 8, TILE = 3 };
#else
enum { LANES = 4, TILE = 3 };
#endif
/* Cells are filled up to a multiple of ROWS patches, matrices packed PANEL columns at a time. */
enum { ROWS = 6, PANEL = 32, WIDE = 2, SUMS = 8, ALIGNMENT = 64 };

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t integers __attribute__((vector_size(LANES * sizeof(float))));
typedef float unaligned __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

typedef struct {
    int64_t pixels;              /* numbers of one image, all channels */
    int64_t size;                /* numbers of one patch */
    int64_t patches, cells;
    int64_t even, odd;           /* whitened coordinates */
    int64_t width;               /* even + odd, filled up to a multiple of SUMS */
    int64_t pairs, panels;       /* atoms with their mirror images; PANEL of them each */
    const int64_t *places;       /* [size]: where a patch's numbers stand, from its first */
    const int64_t *starts;       /* [patches]: where a patch begins; negative where a cell is filled up */
    const int64_t *ends;         /* [cells + 1]: the patches of each cell */
    const int64_t *mirrors;      /* [cells]: the cell on the other side */
    const float *factors;        /* [cells]: 1 / (2 * number of patches) */
    const float *whitening;      /* [size][width] */
    const float *dictionary;     /* [panels][even + odd][PANEL] */
    float threshold, floor;      /* of responses; of squared norms */
    float centre, scale;         /* of numbers, where variance_floor < 0 */
    float variance_floor;        /* else patches are centred and divided by sqrt(variance + floor) */
} Block;

static void normalise(const Block *b, lanes *patch) {
    if (b->variance_floor < 0) {
        for (int64_t k = 0; k < b->size; k++) patch[k] = (patch[k] - b->centre) * b->scale;
        return;
    }
    lanes mean = {0}, variance = {0};
    for (int64_t k = 0; k < b->size; k++) mean += patch[k];
    mean /= (float)b->size;
    for (int64_t k = 0; k < b->size; k++) {
        patch[k] -= mean;
        variance += patch[k] * patch[k];
    }
    variance = variance / (float)b->size + b->variance_floor;
    for (int i = 0; i < LANES; i++) variance[i] = 1 / sqrtf(variance[i]);
    for (int64_t k = 0; k < b->size; k++) patch[k] *= variance;
}

/* The whitened coordinates [LANES][even + odd] of LANES patches from `first` on; 0 where there is none. */
static void whiten(const Block *b, const float *image, int64_t first, lanes *patch, lanes *white, float *out) {
    const int64_t coordinates = b->even + b->odd;
    float *entries = (float *)patch;
    int64_t begins[LANES];
    for (int i = 0; i < LANES; i++) begins[i] = first + i < b->patches ? b->starts[first + i] : -1;
    for (int i = 0; i < LANES; i++) {
        if (begins[i] < 0)
            for (int64_t k = 0; k < b->size; k++) entries[k * LANES + i] = 0;
        else
            for (int64_t k = 0; k < b->size; k++) entries[k * LANES + i] = image[begins[i] + b->places[k]];
    }
    normalise(b, patch);
    lanes square = {0};
    for (int64_t j = 0; j < b->width; j += SUMS) {
        lanes sum[SUMS];
        for (int s = 0; s < SUMS; s++) sum[s] = (lanes){0};
        for (int64_t k = 0; k < b->size; k++) {
            const float *weights = b->whitening + k * b->width + j;
            lanes here = patch[k];
            for (int s = 0; s < SUMS; s++) sum[s] += weights[s] * here;
        }
        for (int s = 0; s < SUMS; s++) {
            square += sum[s] * sum[s];
            white[j + s] = sum[s];
        }
    }
    square += b->floor;
    for (int i = 0; i < LANES; i++) square[i] = begins[i] < 0 ? 0 : 1 / sqrtf(square[i]);
    const float *found = (const float *)white;
    for (int i = 0; i < LANES; i++)
        for (int64_t j = 0; j < coordinates; j++)
            out[i * coordinates + j] = begins[i] < 0 ? 0 : found[j * LANES + i] * square[i];
}

/* sum[r][v] += rows[r][k] columns[k][v], over `size` numbers k. */
static inline __attribute__((always_inline)) void multiply(
    int64_t size, const float *rows, int64_t stride, const float *columns, lanes sum[TILE][WIDE]
) {
    for (int64_t k = 0; k < size; k++) {
        lanes here[WIDE];
        for (int v = 0; v < WIDE; v++) here[v] = *(const unaligned *)(columns + k * PANEL + v * LANES);
        for (int r = 0; r < TILE; r++) {
            float factor = rows[r * stride + k];
            for (int v = 0; v < WIDE; v++) sum[r][v] += factor * here[v];
        }
    }
}

/* Twice the positive part, exactly: x + |x|. NaN stays NaN. */
static inline lanes positive(lanes x) { return x + (lanes)((integers)x & 0x7fffffff); }

/* Twice the sums of one cell for WIDE * LANES atoms: [direct +, direct -, mirrored +, mirrored -]. */
static void respond(const Block *b, const float *white, int64_t patches, const float *atoms, lanes total[4][WIDE]) {
    const int64_t coordinates = b->even + b->odd;
    const float threshold = b->threshold;
    for (int i = 0; i < 4; i++)
        for (int v = 0; v < WIDE; v++) total[i][v] = (lanes){0};
    for (int64_t p = 0; p < patches; p += TILE) {
        lanes even[TILE][WIDE], odd[TILE][WIDE];
        for (int r = 0; r < TILE; r++)
            for (int v = 0; v < WIDE; v++) even[r][v] = odd[r][v] = (lanes){0};
        multiply(b->even, white + p * coordinates, coordinates, atoms, even);
        multiply(b->odd, white + p * coordinates + b->even, coordinates, atoms + b->even * PANEL, odd);
        for (int v = 0; v < WIDE; v++)
            for (int r = 0; r < TILE; r++) {
                lanes above = even[r][v] - threshold, below = -even[r][v] - threshold;
                total[0][v] += positive(above + odd[r][v]);
                total[1][v] += positive(below - odd[r][v]);
                total[2][v] += positive(above - odd[r][v]);
                total[3][v] += positive(below + odd[r][v]);
            }
    }
}

static void add(float *to, const lanes *from) {
    for (int v = 0; v < WIDE; v++) *(unaligned *)(to + v * LANES) += from[v];
}

/* out[i], of [cells][2][pairs], for all images. Returns 0, or 1 where memory ran out. */
int patch_responses(const Block *b, int64_t count, const float *images, float *out) {
    const int64_t coordinates = b->even + b->odd, groups = (b->patches + LANES - 1) / LANES, columns = b->panels * PANEL;
    const int64_t sizes[] = {b->size * LANES, b->width * LANES, groups * LANES * coordinates, b->cells * 2 * columns};
    int64_t bytes = ALIGNMENT;
    for (int k = 0; k < 4; k++) bytes += sizes[k] * (int64_t)sizeof(float);
    float *memory = aligned_alloc(ALIGNMENT, (size_t)(bytes / ALIGNMENT * ALIGNMENT));
    if (!memory) return 1;
    lanes *patch = (lanes *)memory, *white = patch + b->size;
    float *all = (float *)(white + b->width), *sums = all + sizes[2];
    for (int64_t i = 0; i < count; i++) {
        for (int64_t g = 0; g < groups; g++)
            whiten(b, images + i * b->pixels, g * LANES, patch, white, all + g * LANES * coordinates);
        memset(sums, 0, (size_t)sizes[3] * sizeof(float));
        for (int64_t column = 0; column < columns; column += WIDE * LANES) {
            const float *atoms = b->dictionary + column / PANEL * PANEL * coordinates + column % PANEL;
            for (int64_t c = 0; c < b->cells; c++) {
                lanes total[4][WIDE];
                respond(b, all + b->ends[c] * coordinates, b->ends[c + 1] - b->ends[c], atoms, total);
                float *here = sums + c * 2 * columns + column, *there = sums + b->mirrors[c] * 2 * columns + column;
                add(here, total[0]), add(here + columns, total[1]);
                add(there, total[2]), add(there + columns, total[3]);
            }
        }
        for (int64_t c = 0; c < b->cells * 2; c++)
            for (int64_t k = 0; k < b->pairs; k++)
                out[(i * b->cells * 2 + c) * b->pairs + k] = sqrtf(sums[c * columns + k] * b->factors[c / 2]);
    }
    free(memory);
    return 0;
}

/* out[i][j] = sum over k of rows[i][k] matrix[k][j]; `matrix` is [columns / PANEL][size][PANEL], count a multiple of ROWS. */
void patch_product(
    int64_t count, int64_t size, int64_t columns, const float *rows, int64_t stride, const float *matrix, float *out,
    int64_t out_stride
) {
    for (int64_t column = 0; column < columns; column += WIDE * LANES)
        for (int64_t i = 0; i < count; i += TILE) {
            lanes sum[TILE][WIDE];
            for (int r = 0; r < TILE; r++)
                for (int v = 0; v < WIDE; v++) sum[r][v] = (lanes){0};
            multiply(size, rows + i * stride, stride, matrix + column / PANEL * PANEL * size + column % PANEL, sum);
            for (int r = 0; r < TILE; r++)
                for (int v = 0; v < WIDE; v++) *(unaligned *)(out + (i + r) * out_stride + column + v * LANES) = sum[r][v];
        }
}
