/*
 * Rounded normals, added to the entries of tensors on a grid: the arithmetic of sluice/randomness/rounded_normal.py, in one
 * pass over a few hundred pairs at a time. Where double precision does not settle a pair, it is listed and the caller goes on.
 * Nothing is kept between calls; the key is on the caller's side only.
 */

#include <float.h>

#if FLT_EVAL_METHOD == 2
#error "results are kept with more digits than a double has"
#endif

#include "box_muller.h"
#include "chacha20.h"

enum { PAIRS = 512, ROOM = PAIRS + 2 * BLOCKS * BLOCK_NUMBERS };

/* All entries of some tensors, as one vector. */
typedef struct {
    int64_t tensors;
    const int64_t *starts;             /* [tensors + 1]: the first entry of each, and the number of all */
    void *const *data;
    const uint8_t *is_double;          /* else float */
} Vector;

typedef struct {
    Stream stream;
    int32_t threads;
    int64_t block;                     /* pairs whose radii, and then angles, lie together in the stream */
    double scale, step;
    double certain;                    /* rounding is, where an integer is nearer than this */
    int64_t smallest, largest;         /* digits of a radius for which that holds */
    int64_t room, (*open)[3];          /* what is listed: number of the pair, digits of radius and angle */
} Draw;

enum { FEW = 64 }; /* chunks for which waking another thread does not pay */

/* Entries of one tensor: to = step * (rint(to / step) + noise). */
#define ADD_ON_GRID(type)                                                                   \
    static void add_to_##type(type *to, const double *noise, int64_t count, double step) {  \
        double steps = 1 / step, most = 0x1p52;                                             \
        for (int64_t i = 0; i < count; i++) {                                               \
            double x = (double)to[i] * steps;                                               \
            x = x < -most ? -most : x, x = x > most ? most : x;                             \
            to[i] = (type)((rint(x) + noise[i]) * step);                                    \
        }                                                                                   \
    }
ADD_ON_GRID(float)
ADD_ON_GRID(double)

/* The tensor that holds an entry; among empty ones the last. */
static int64_t tensor_of(const Vector *vector, int64_t entry) {
    int64_t low = 0, high = vector->tensors;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (vector->starts[middle] <= entry) low = middle;
        else high = middle;
    }
    return low;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Noise for the entries that begin at one place, whichever tensors they are in; what is beyond the last entry is dropped. */
static void add(const Vector *vector, int64_t entry, const double *noise, int64_t count, double step) {
    int64_t end = smaller(entry + count, vector->starts[vector->tensors]);
    for (int64_t k = entry < end ? tensor_of(vector, entry) : 0; entry < end; k++) {
        int64_t here = smaller(end, vector->starts[k + 1]) - entry, place = entry - vector->starts[k];
        if (vector->is_double[k]) add_to_double((double *)vector->data[k] + place, noise, here, step);
        else add_to_float((float *)vector->data[k] + place, noise, here, step);
        entry += here, noise += here;
    }
}

/* Some pairs of a block, from its pair `first` on. The block has `pairs` pairs, and its first entry is `entry`. */
static void add_pairs(const Vector *vector, const Draw *draw, int64_t entry, int64_t pairs, int64_t first, int64_t *listed) {
    uint64_t radius_room[ROOM], angle_room[ROOM];
    double cosines[PAIRS], sines[PAIRS];
    uint8_t open[PAIRS];
    int64_t count = smaller(PAIRS, pairs - first);
    const uint64_t *radius_digits = keystream_numbers(&draw->stream, entry + first, count, radius_room);
    const uint64_t *angle_digits = keystream_numbers(&draw->stream, entry + pairs + first, count, angle_room);
    int any = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t digits = (int64_t)(radius_digits[i] & INT64_MAX);
        double radius = radius_of(digits) * draw->scale;
        Waves waves = waves_of((int64_t)angle_digits[i]);
        double x = radius * waves.cosine, y = radius * waves.sine;
        cosines[i] = x + WHOLE - WHOLE, sines[i] = y + WHOLE - WHOLE;
        int certain = (fabs(x - cosines[i]) < draw->certain) & (fabs(y - sines[i]) < draw->certain);
        open[i] = !(certain & (digits >= draw->smallest) & (digits <= draw->largest));
        any |= open[i];
    }
    for (int64_t i = 0; any && i < count; i++) {
        if (!open[i]) continue;
        /* The caller adds their noise. Until then these entries are rounded to the grid, which makes no difference to that. */
        cosines[i] = sines[i] = 0;
        int64_t place;
#pragma omp atomic capture
        place = (*listed)++;
        if (place >= draw->room) continue;
        draw->open[place][0] = entry / 2 + first + i;
        draw->open[place][1] = (int64_t)(radius_digits[i] & INT64_MAX), draw->open[place][2] = (int64_t)angle_digits[i];
    }
    add(vector, entry + first, cosines, count, draw->step);
    add(vector, entry + pairs + first, sines, count, draw->step);
}

/* Returns how many pairs are listed, in no order; if that is more than there is room for, the others are lost. */
int64_t add_rounded_normals(const Vector *vector, const Draw *draw) {
    int64_t pairs = (vector->starts[vector->tensors] + 1) / 2, listed = 0;
    int64_t chunks_of_block = (draw->block + PAIRS - 1) / PAIRS;
    int64_t chunks = pairs / draw->block * chunks_of_block + (pairs % draw->block + PAIRS - 1) / PAIRS;
#pragma omp parallel for schedule(dynamic, 4) num_threads(draw->threads) if (chunks > FEW)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        int64_t block = chunk / chunks_of_block * draw->block, first = chunk % chunks_of_block * PAIRS;
        add_pairs(vector, draw, 2 * block, smaller(draw->block, pairs - block), first, &listed);
    }
    return listed;
}

/* Whether no entry is NaN or infinite. */
int all_finite(const Vector *vector) {
    for (int64_t k = 0; k < vector->tensors; k++) {
        int64_t count = vector->starts[k + 1] - vector->starts[k];
        int finite = 1;
        if (vector->is_double[k]) {
            const double *from = vector->data[k];
            for (int64_t i = 0; i < count; i++) finite &= fabs(from[i]) <= DBL_MAX;
        } else {
            const float *from = vector->data[k];
            for (int64_t i = 0; i < count; i++) finite &= fabsf(from[i]) <= FLT_MAX;
        }
        if (!finite) return 0;
    }
    return 1;
}

/* The parts by themselves, for their tests. */

void keystream(const Stream *stream, int64_t place, int64_t count, uint64_t *to) {
    uint64_t room[ROOM];
    for (int64_t done = 0; done < count; done += PAIRS) {
        int64_t here = smaller(PAIRS, count - done);
        memcpy(to + done, keystream_numbers(stream, place + done, here, room), (size_t)here * sizeof(uint64_t));
    }
}

void radii(int64_t count, const int64_t *digits, double *to) {
    for (int64_t i = 0; i < count; i++) to[i] = radius_of(digits[i]);
}

void waves(int64_t count, const int64_t *digits, double *cosines, double *sines) {
    for (int64_t i = 0; i < count; i++) {
        Waves both = waves_of(digits[i]);
        cosines[i] = both.cosine, sines[i] = both.sine;
    }
}
