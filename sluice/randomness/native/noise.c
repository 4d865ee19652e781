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

#define INFINITE 0x7ff0000000000000 /* the digits of infinity as a double; those of NaN are larger */
#define FEWEST_DIGITS ((int64_t)1 << 32) /* of a radius for which `settled` has a bound */

enum { PAIRS = 256, ROOM = PAIRS + 2 * BLOCKS * BLOCK_NUMBERS };

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

/* What the threads of a call have found. */
typedef struct {
    int64_t listed;
    int broken;                        /* whether an entry was NaN or infinite */
} Found;

enum { FEW = 128 }; /* chunks for which waking another thread does not pay */

/* Entries of one tensor: to = step * (rint(to / step) + noise). Returns whether all were finite. */
#define ADD_ON_GRID(type)                                                                   \
    static int add_to_##type(type *to, const double *noise, int64_t count, double step) {   \
        double steps = 1 / step, most = 0x1p52;                                             \
        int64_t largest = 0; /* of the entries without their signs, by their digits */      \
        for (int64_t i = 0; i < count; i++) {                                               \
            int64_t size = (int64_t)(bits_of((double)to[i]) & INT64_MAX);                   \
            largest = size > largest ? size : largest;                                      \
            double x = (double)to[i] * steps;                                               \
            x = x < -most ? -most : x, x = x > most ? most : x;                             \
            to[i] = (type)((rint(x) + noise[i]) * step);                                    \
        }                                                                                   \
        return largest < INFINITE;                                                          \
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

/* Noise for the entries that begin at one place, whichever tensors they are in; what is beyond the last entry is dropped. Returns whether all were finite. */
static int add(const Vector *vector, int64_t entry, const double *noise, int64_t count, double step) {
    int64_t end = smaller(entry + count, vector->starts[vector->tensors]);
    int finite = 1;
    for (int64_t k = entry < end ? tensor_of(vector, entry) : 0; entry < end; k++) {
        int64_t here = smaller(end, vector->starts[k + 1]) - entry, place = entry - vector->starts[k];
        if (vector->is_double[k]) finite &= add_to_double((double *)vector->data[k] + place, noise, here, step);
        else finite &= add_to_float((float *)vector->data[k] + place, noise, here, step);
        entry += here, noise += here;
    }
    return finite;
}

/*
 * Whether the rounding of a pair is certain by a bound of its own, though it is not by the one for all pairs: for most that is
 * a seventh of it, and in the tails, where it is larger, boundaries are as far away as anywhere.
 */
static int settled(const Draw *draw, int64_t digits, int64_t angle_digits, double *cosine, double *sine) {
    double radius = radius_of(digits), x = radius * draw->scale, y = x;
    Waves waves = waves_of(angle_digits);
    x *= waves.cosine, y *= waves.sine;
    *cosine = x + WHOLE - WHOLE, *sine = y + WHOLE - WHOLE;
    double certain = 0.5 - ((3.5 / radius + 11.5 * radius) * 0x1p-53 + 1.25 / (radius * (double)digits)) * draw->scale;
    return (digits >= FEWEST_DIGITS) & (digits <= draw->largest) & (fabs(x - *cosine) < certain) & (fabs(y - *sine) < certain);
}

/* Some pairs of a block, from its pair `first` on. The block has `pairs` pairs, and its first entry is `entry`. */
static void add_pairs(const Vector *vector, const Draw *draw, int64_t entry, int64_t pairs, int64_t first, Found *found) {
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
        int64_t digits = (int64_t)(radius_digits[i] & INT64_MAX), angle = (int64_t)angle_digits[i];
        if (!open[i] || settled(draw, digits, angle, &cosines[i], &sines[i])) continue;
        /* The caller adds their noise. Until then these entries are rounded to the grid, which makes no difference to that. */
        cosines[i] = sines[i] = 0;
        int64_t place;
#pragma omp atomic capture
        place = found->listed++;
        if (place >= draw->room) continue;
        draw->open[place][0] = entry / 2 + first + i;
        draw->open[place][1] = digits, draw->open[place][2] = angle;
    }
    int finite = add(vector, entry + first, cosines, count, draw->step);
    finite &= add(vector, entry + pairs + first, sines, count, draw->step);
    if (!finite) {
#pragma omp atomic write
        found->broken = 1;
    }
}

/*
 * Returns how many pairs are listed, in no order; if that is more than there is room for, the others are lost.
 * -1 if an entry was NaN or infinite: then what is in the tensors now is of no use.
 */
int64_t add_rounded_normals(const Vector *vector, const Draw *draw) {
    int64_t pairs = (vector->starts[vector->tensors] + 1) / 2;
    Found found = {0, 0};
    int64_t chunks_of_block = (draw->block + PAIRS - 1) / PAIRS;
    int64_t chunks = pairs / draw->block * chunks_of_block + (pairs % draw->block + PAIRS - 1) / PAIRS;
#pragma omp parallel for schedule(dynamic, 4) num_threads(draw->threads) if (chunks > FEW)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        int64_t block = chunk / chunks_of_block * draw->block, first = chunk % chunks_of_block * PAIRS;
        add_pairs(vector, draw, 2 * block, smaller(draw->block, pairs - block), first, &found);
    }
    return found.broken ? -1 : found.listed;
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

/* Whether each pair is settled by the bound of its own, and as which integers. */
void settle_pairs(const Draw *draw, int64_t count, const int64_t (*digits)[2], double (*to)[2], uint8_t *certain) {
    for (int64_t i = 0; i < count; i++) certain[i] = (uint8_t)settled(draw, digits[i][0], digits[i][1], &to[i][0], &to[i][1]);
}
