/* The logistic function and tanh of eight floats, to about two units in the last place; NaN stays NaN. */

#ifndef SLUICE_ACTIVATIONS_H
#define SLUICE_ACTIVATIONS_H

#include "tile.h"

static inline floats all(float value) { return (floats){0} + value; }

static inline floats chosen(ints mask, floats yes, floats no) { return (floats)((mask & (ints)yes) | (~mask & (ints)no)); }

/*
 * x = n log 2 + r with a whole n and |r| <= log(2) / 2; gives e^r - 1 and 2^n. The polynomial is a Chebyshev interpolant made
 * for this interval. Beyond +-87, where single precision ends, x counts as +-87.
 */
static inline floats exponential_parts(floats x, floats *power) {
    x = chosen(x > 87.0f, all(87.0f), x);
    x = chosen(x < -87.0f, all(-87.0f), x);
    /* Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits. */
    floats shifted = x * 1.44269504f + 12582912.0f;
    floats n = shifted - 12582912.0f;
    floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    floats p = 1.3926927e-3f * r + 8.363774e-3f;
    p = p * r + 4.166655e-2f;
    p = p * r + 1.6666573e-1f;
    p = p * r + 0.5f;
    *power = (floats)(((ints)shifted << 23) + 0x3f800000);
    return p * r * r + r;
}

static inline floats logistic(floats x) {
    floats power, less_one = exponential_parts(-x, &power);
    return 1.0f / (1.0f + power + less_one * power);
}

/* m / (m + 2) with m = e^(2 x) - 1, which keeps its digits where x is small. */
static inline floats hyperbolic_tangent(floats x) {
    floats power, less_one = exponential_parts(2.0f * x, &power);
    floats m = less_one * power + (power - 1.0f);
    return m / (m + 2.0f);
}

#endif
