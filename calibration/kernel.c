/* One pass over a tensor: histogram of |x|, minimum, maximum, zeros.
 *
 * A plain shared library, called through ctypes (calibration/kernel.py): it needs a C compiler and no Python headers.
 * Where it cannot be built, numpy does the same with the same counts, more slowly:
 * `python -m benchmarks.histogram`.
 */
#include <stdint.h>
#include <string.h>

#define BINS 2048
/* Values that fall into one bin again and again (the zeros behind a ReLU) would wait for the counter that was just
 * written; neighbouring values therefore count in different tables. */
#define TABLES 4
#define BLOCK 256

/* Baseline builds must run anywhere; the loop over a block is for the widest vectors there are. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

/* The order of floats as the order of integers: NaN beyond the infinities of its sign. Compilers turn integer minima into
 * vector instructions; of floats only under -ffast-math, which would take NaN for granted to be absent. */
static inline int32_t rank_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

static float value_of(int32_t rank) {
    float value;
    rank ^= (rank >> 31) & 0x7fffffff;
    memcpy(&value, &rank, sizeof value);
    return value;
}

/* Bin of each of `count` values, BINS for what lies beyond the range or is no number. */
WIDE static void sort_block(const float *restrict values, int count, float factor, int32_t *restrict bins,
                            int32_t *lowest, int32_t *highest, int32_t *zeros) {
    int32_t low = *lowest, high = *highest, none = 0;
    for (int i = 0; i < count; i++) {
        int32_t rank = rank_of(values[i]);
        float scaled = __builtin_fabsf(values[i]) * factor;
        /* NaN fails the comparison and counts as beyond */
        scaled = scaled < (float)BINS ? scaled : (float)BINS;
        bins[i] = (int32_t)scaled;
        low = rank < low ? rank : low;
        high = rank > high ? rank : high;
        none += values[i] == 0.0f;
    }
    *lowest = low;
    *highest = high;
    *zeros += none;
}

/* Add `count` values to `counts` (BINS of them, each `1 / factor` wide).
 *
 * minimum and maximum are of these values, NaN if one of them is; zeros counts values that are exactly zero. Returns
 * the number of values beyond the range, infinite ones and NaN included; if there are any, `counts` is left as it was.
 */
int64_t edge_histogram(const float *values, int64_t count, float factor, int64_t *counts, float *minimum,
                       float *maximum, int64_t *zeros) {
    uint32_t tables[TABLES][BINS + 1];
    int32_t bins[BLOCK];
    int64_t done = 0, beyond = 0;
    int64_t sums[BINS];
    memset(sums, 0, sizeof sums);
    int32_t lowest = INT32_MAX, highest = INT32_MIN;
    *zeros = 0;
    while (done < count) {
        /* the tables hold 32-bit counters */
        int64_t end = count - done > (1 << 30) ? done + (1 << 30) : count;
        memset(tables, 0, sizeof tables);
        while (done < end) {
            int size = end - done < BLOCK ? (int)(end - done) : BLOCK;
            int32_t none = 0;
            int i = 0;
            sort_block(values + done, size, factor, bins, &lowest, &highest, &none);
            *zeros += none;
            for (; i + TABLES <= size; i += TABLES)
                for (int k = 0; k < TABLES; k++)
                    tables[k][bins[i + k]]++;
            for (; i < size; i++)
                tables[0][bins[i]]++;
            done += size;
        }
        for (int k = 0; k < TABLES; k++) {
            for (int bin = 0; bin < BINS; bin++)
                sums[bin] += tables[k][bin];
            beyond += tables[k][BINS];
        }
    }
    *minimum = value_of(lowest);
    *maximum = value_of(highest);
    if (beyond == 0)
        for (int bin = 0; bin < BINS; bin++)
            counts[bin] += sums[bin];
    return beyond;
}
