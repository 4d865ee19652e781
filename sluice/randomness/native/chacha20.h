/* The ChaCha20 keystream (RFC 8439), as many blocks at once as a vector register has lanes. */

#ifndef SLUICE_CHACHA20_H
#define SLUICE_CHACHA20_H

#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the keystream's bytes are read as little-endian numbers"
#endif

#ifdef __AVX512F__
enum { BLOCKS = 16 };
#define LOW_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
enum { BLOCKS = 8 };
#define LOW_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#endif

enum { BLOCK_WORDS = 16, BLOCK_NUMBERS = 8 }; /* of 32 and of 64 bits */

/* One word of each block. */
typedef uint32_t words __attribute__((vector_size(4 * BLOCKS)));

#ifdef __clang__
#define INTERLEAVED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define INTERLEAVED(a, b, ...) __builtin_shuffle(a, b, (words){__VA_ARGS__})
#endif

typedef struct {
    uint32_t key[8], nonce[3];
} Stream;

#define ROTATED(x, bits) (((x) << (bits)) | ((x) >> (32 - (bits))))
#define QUARTER_ROUND(a, b, c, d)            \
    a += b, d ^= a, d = ROTATED(d, 16);      \
    c += d, b ^= c, b = ROTATED(b, 12);      \
    a += b, d ^= a, d = ROTATED(d, 8);       \
    c += d, b ^= c, b = ROTATED(b, 7)

/* Rows become columns. Each pass interleaves the first half of the rows with the second. */
static inline __attribute__((always_inline)) void transpose(words rows[BLOCKS]) {
    for (int pass = 1; pass < BLOCKS; pass *= 2) {
        words next[BLOCKS];
        for (int i = 0; i < BLOCKS / 2; i++) {
            next[2 * i] = INTERLEAVED(rows[i], rows[i + BLOCKS / 2], LOW_HALVES);
            next[2 * i + 1] = INTERLEAVED(rows[i], rows[i + BLOCKS / 2], HIGH_HALVES);
        }
        memcpy(rows, next, sizeof next);
    }
}

/* Blocks first .. first + BLOCKS - 1 of the stream, one after the other. */
static void keystream_blocks(const Stream *stream, uint32_t first, uint64_t to[BLOCKS * BLOCK_NUMBERS]) {
    words start[BLOCK_WORDS] = {
        (words){0} + 0x61707865u, (words){0} + 0x3320646eu, (words){0} + 0x79622d32u, (words){0} + 0x6b206574u
    };
    for (int i = 0; i < 8; i++) start[4 + i] = (words){0} + stream->key[i];
    start[12] = (words){0} + first;
    for (uint32_t i = 0; i < BLOCKS; i++) start[12][i] += i;
    for (int i = 0; i < 3; i++) start[13 + i] = (words){0} + stream->nonce[i];

    words w[BLOCK_WORDS];
    memcpy(w, start, sizeof w);
    for (int round = 0; round < 20; round += 2) {
        QUARTER_ROUND(w[0], w[4], w[8], w[12]);
        QUARTER_ROUND(w[1], w[5], w[9], w[13]);
        QUARTER_ROUND(w[2], w[6], w[10], w[14]);
        QUARTER_ROUND(w[3], w[7], w[11], w[15]);
        QUARTER_ROUND(w[0], w[5], w[10], w[15]);
        QUARTER_ROUND(w[1], w[6], w[11], w[12]);
        QUARTER_ROUND(w[2], w[7], w[8], w[13]);
        QUARTER_ROUND(w[3], w[4], w[9], w[14]);
    }
    for (int i = 0; i < BLOCK_WORDS; i++) w[i] += start[i];
    /* Row i of the matrix holds word i of all blocks. Where there are fewer blocks than words, two matrices lie one above the other. */
    for (int part = 0; part < BLOCK_WORDS / BLOCKS; part++) {
        transpose(w + part * BLOCKS);
        for (int block = 0; block < BLOCKS; block++)
            memcpy((uint32_t *)to + block * BLOCK_WORDS + part * BLOCKS, w + part * BLOCKS + block, sizeof(words));
    }
}

/* Numbers of 64 bits from any place of the stream; there must be room for 2 * BLOCKS * BLOCK_NUMBERS more. Returns where the first one is. */
static const uint64_t *keystream_numbers(const Stream *stream, int64_t place, int64_t count, uint64_t *to) {
    int64_t first = place / BLOCK_NUMBERS, end = place + count;
    for (int64_t block = first; block * BLOCK_NUMBERS < end; block += BLOCKS)
        keystream_blocks(stream, (uint32_t)block, to + (block - first) * BLOCK_NUMBERS);
    return to + place % BLOCK_NUMBERS;
}

#endif
