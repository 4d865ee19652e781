/*
 * Box and Muller's pair of normals in double precision, from the first 63 digits of one uniform and 64 of another.
 * docs/noise.md, section 2, bounds the errors: each line below has its row there. They hold with and without fused
 * multiply-adds. Loops over these functions are turned into vector instructions by the compiler.
 */

#ifndef SLUICE_BOX_MULLER_H
#define SLUICE_BOX_MULLER_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ROOT_HALF_BITS 0x3fe6a09e667f3bcd /* of sqrt(1/2) as a double */
#define ROOT_HALF_DIGITS 0x5a827999fcef3242 /* of sqrt(1/2) as a uniform */
#define LN_2 0x1.62e42fefa39efp-1
#define HALF_PI 0x1.921fb54442d18p0
#define WHOLE 0x1.8p52 /* doubles of this size are integers */

static inline double double_of(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* A number below 2^63, rounded once: both halves are put into the mantissa of a power of two, which is taken off again. */
static inline double rounded(uint64_t number) {
    double high = double_of(number >> 32 | 0x4530000000000000); /* 2^84 + 2^32 (number / 2^32) */
    double low = double_of((number & 0xffffffff) | 0x4330000000000000); /* 2^52 + number % 2^32 */
    return high - 0x1.00000001p84 + low;
}

/* One of two, by a mask of ones or zeros: compilers make branches of conditions, and then no vectors. */
static inline double either(uint64_t mask, double a, double b) {
    return double_of((bits_of(a) & mask) | (bits_of(b) & ~mask));
}

/* sqrt(-2 ln U) for U = digits / 2^63 > 0. */
static inline double radius_of(int64_t digits) {
    /* Near one it is 1 - U whose digits count. */
    uint64_t near_one = -(uint64_t)(digits >= ROOT_HALF_DIGITS), whole = (uint64_t)1 << 63;
    double u = rounded(((uint64_t)digits ^ near_one) + (near_one & (whole + 1)));
    /* U = 2^exponent (1 + f), with 1 + f between sqrt(1/2) and sqrt(2). */
    uint64_t power = (bits_of(u) - ROOT_HALF_BITS) >> 52;
    double far_f = double_of(bits_of(u) - (power << 52)) - 1, near_f = u * -0x1p-63;
    double far_exponent = double_of(power | 0x4330000000000000) - (0x1p52 + 63);
    double f = either(near_one, near_f, far_f), exponent = either(near_one, 0, far_exponent);
    /* ln(1 + f) = 2 artanh(s) = 2 s (1 + s^2 / 3 + s^4 / 5 + ...) */
    double s = f / (2 + f), z = s * s, twice = s + s;
    double p = 1.0 / 21;
    p = p * z + 1.0 / 19, p = p * z + 1.0 / 17, p = p * z + 1.0 / 15, p = p * z + 1.0 / 13;
    p = p * z + 1.0 / 11, p = p * z + 1.0 / 9, p = p * z + 1.0 / 7, p = p * z + 1.0 / 5, p = p * z + 1.0 / 3;
    double logarithm = exponent * LN_2 + (twice + twice * (z * p));
    return sqrt(-2 * logarithm);
}

typedef struct {
    double cosine, sine;
} Waves;

/* Cosine and sine of pi * digits / 2^63. */
static inline Waves waves_of(int64_t digits) {
    /* Multiples of pi/2 are taken off exactly; what is left is between -1/2 and 1/2 of pi/2, in the middle of what its first 52 digits allow. */
    uint64_t turned = (uint64_t)digits + ((uint64_t)1 << 61), quadrant = turned >> 62;
    double t = double_of((turned >> 10 & 0xfffffffffffff) | 0x3ff0000000000000) - 1.5 + 0x1p-53;
    double x = t * HALF_PI, z = x * x;
    double p = -1.0 / 1307674368000, q = 1.0 / 20922789888000; /* 15!, 16! */
    p = p * z + 1.0 / 6227020800, q = q * z - 1.0 / 87178291200;
    p = p * z - 1.0 / 39916800, q = q * z + 1.0 / 479001600;
    p = p * z + 1.0 / 362880, q = q * z - 1.0 / 3628800;
    p = p * z - 1.0 / 5040, q = q * z + 1.0 / 40320;
    p = p * z + 1.0 / 120, q = q * z - 1.0 / 720;
    p = p * z - 1.0 / 6, q = q * z + 1.0 / 24;
    double sine = x + x * (z * p), cosine = 1 + z * (z * q - 0.5);
    uint64_t odd = -(quadrant & 1);
    Waves waves = {either(odd, sine, cosine), either(odd, cosine, sine)};
    waves.cosine = double_of(bits_of(waves.cosine) ^ (quadrant + 1) >> 1 << 63);
    waves.sine = double_of(bits_of(waves.sine) ^ quadrant >> 1 << 63);
    return waves;
}

#endif
