/* Native kernels of the codecs: optional, called through ctypes (which releases the GIL). numpy_kernel.py is their
 * specification; results are bit-identical.
 *
 * One body is compiled three times: this file includes itself under `#pragma GCC target`, for AVX-512, for AVX2 and for
 * the compiler's default target (the only copy on aarch64). `DS_NAME` names the copies, `ds_isa` selects one at load
 * time. The code uses vectors of 16 floats; the compiler splits them if registers are narrower. Range searches map rows
 * to lanes: sixteen rows are transposed into a tile, so all sums of a pass stay in registers, without reductions across
 * lanes.
 *
 * Rules that keep all copies bit-identical: no contraction (-ffp-contract=off in setup.py and below), sums in column
 * order, __builtin_fmaf for the only fused multiply-add, `x > y ? x : y` with the reference's operand order (NaN).
 */
#ifndef DS_BODY

#pragma GCC diagnostic ignored "-Wpsabi" /* wide vectors never cross a call: helpers are always inlined */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the format is little-endian; use the numpy kernels on this machine"
#endif

#define ABI 3
#define LANES 16
#define MAGIC 12582912.0f /* 1.5 * 2**23: adding it rounds to an integer, ties to even */
#define AROUND_FROM (1 << 19) /* bytes: a frame has up to 1 MiB of weights */
#define AHEAD 16 /* rows: prefetch distance of selected rows */
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint64_t vq __attribute__((vector_size(64)));
typedef float vfu __attribute__((vector_size(64), aligned(4)));
typedef uint8_t vb16 __attribute__((vector_size(16), aligned(1)));
typedef uint8_t vb64 __attribute__((vector_size(64), aligned(1)));

enum { AS_IS32, AS_HALF, AS_BFLOAT, AS_IS64 };

static uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

static uint16_t half_bits(float x) {
    uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    if (a >= 0x47800000) return (uint16_t)(sign | (a > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (a < 0x38800000) return (uint16_t)(sign | (bits_of(float_of(a) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((a + 0xfff + ((a >> 13) & 1) - 0x38000000) >> 13));
}

static float half_value(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 0x3ff;
    if (e == 31) return float_of(sign | 0x7f800000 | (m << 13));
    if (e == 0) return float_of(sign | bits_of((float)m * 0x1p-24f));
    return float_of(sign | ((e + 112) << 23) | (m << 13));
}

static uint16_t bfloat_bits(float x) {
    uint32_t u = bits_of(x);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

/* ---- the copies ---- */
#define DS_BODY
#define DS_LEVEL 0
#define DS_NAME(x) x##_base
#include "_native.c"
#undef DS_NAME
#undef DS_LEVEL
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DS_X86 1
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,popcnt")
#define DS_LEVEL 1
#define DS_NAME(x) x##_avx2
#include "_native.c"
#undef DS_NAME
#undef DS_LEVEL
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi,bmi2,popcnt,prefer-vector-width=512")
#define DS_LEVEL 2
#define DS_NAME(x) x##_avx512
#include "_native.c"
#undef DS_NAME
#undef DS_LEVEL
#pragma GCC pop_options
#endif

/* ---- dispatch ---- */
static int level;

/* Selects the best supported copy, at most level `most`; returns its level (0 default, 1 AVX2, 2 AVX-512). */
int ds_isa(int most) {
    level = 0;
#ifdef DS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) level = 1;
    if (level && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        level = 2;
#endif
    if (level > most) level = most;
    return level;
}

int ds_abi(void) { return ABI; }

#ifdef DS_X86
#define DISPATCH(f, ...) (level == 2 ? f##_avx512(__VA_ARGS__) : level == 1 ? f##_avx2(__VA_ARGS__) : f##_base(__VA_ARGS__))
#else
#define DISPATCH(f, ...) f##_base(__VA_ARGS__)
#endif

int64_t ds_encode(const float *x, int64_t n, int64_t d, int bits, float unit, int given, float *lo, float *hi,
                  void *scales, void *biases, uint8_t *codes) {
    return DISPATCH(encode, x, n, d, bits, unit, given, lo, hi, scales, biases, codes);
}

void ds_ranges(const float *x, int64_t n, int64_t d, float *lo, float *hi) { DISPATCH(ranges, x, n, d, lo, hi); }

int ds_greedy(const float *x, int64_t n, int64_t d, int bits, int bins, int steps, float *lo, float *hi) {
    return DISPATCH(greedy, x, n, d, bits, bins, steps, lo, hi);
}

int ds_refit(const float *x, int64_t n, int64_t d, int bits, const float *trims, int starts, int passes, float *lo, float *hi) {
    return DISPATCH(refit, x, n, d, bits, trims, starts, passes, lo, hi);
}

void ds_decode(const uint8_t *codes, int64_t width, const void *scales, const void *biases, int bits, float unit,
               int64_t first, char *out, int64_t stride, int64_t d, int store, const int64_t *rows, const uint8_t *take,
               int64_t n) {
    DISPATCH(decode, codes, width, scales, biases, bits, unit, first, out, stride, d, store, rows, take, n);
}

void ds_hash(const uint32_t *words, int64_t k, const uint64_t *weights, const int64_t *rows, int64_t n, uint64_t *out) {
    DISPATCH(hash, words, k, weights, rows, n, out);
}

int64_t ds_check_rows(const int64_t *rows, const uint8_t *take, int64_t n, int64_t limit) {
    for (int64_t i = 0; i < n; i++)
        if ((!take || take[i]) && (uint64_t)rows[i] >= (uint64_t)limit) return i;
    return -1;
}

void ds_copy(const char *values, int64_t from, char *out, int64_t stride, int64_t width, const int64_t *rows,
             const uint8_t *take, int64_t n) {
    DISPATCH(copy, values, from, out, stride, width, rows, take, n);
}

void ds_gather(const char *values, int64_t stride, int64_t width, const int64_t *rows, int64_t n, char *out,
               const int64_t *places) {
    DISPATCH(gather, values, stride, width, rows, n, out, places);
}

int64_t ds_find(const uint8_t *flags, int64_t n, int mask, int64_t *rows) { return DISPATCH(find, flags, n, mask, rows); }

void ds_move_flags(uint8_t *flags, int64_t n, int bits, int left) { DISPATCH(move_flags, flags, n, bits, left); }

int64_t ds_delta_bytes(const int64_t *ids, int64_t n) {
    int64_t total = 0, last = -1;
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] <= last) return -1;
        uint64_t gap = (uint64_t)(ids[i] - last - 1);
        total += (63 - __builtin_clzll(gap | 1)) / 7 + 1;
        last = ids[i];
    }
    return total;
}

void ds_write_deltas(const int64_t *ids, int64_t n, uint8_t *out) {
    int64_t last = -1;
    for (int64_t i = 0; i < n; i++) {
        uint64_t gap = (uint64_t)(ids[i] - last - 1);
        for (; gap >= 128; gap >>= 7) *out++ = (uint8_t)(gap | 0x80);
        *out++ = (uint8_t)gap;
        last = ids[i];
    }
}

int ds_read_deltas(const uint8_t *data, int64_t size, int64_t low, int64_t high, int64_t *ids, int64_t n) {
    int64_t at = 0, last = -1;
    for (int64_t i = 0; i < n; i++) {
        uint64_t gap = 0;
        for (int shift = 0;; shift += 7) {
            if (at >= size) return 1;
            uint8_t byte = data[at++];
            if (shift > 56) return 2;
            gap |= (uint64_t)(byte & 0x7f) << shift;
            if (byte < 128) {
                if (byte == 0 && shift > 0) return 2;
                break;
            }
        }
        if (gap >= (uint64_t)high) return 3;
        int64_t value = last + 1 + (int64_t)gap;
        if (value < low || value >= high) return 3;
        ids[i] = last = value;
    }
    return at == size ? 0 : 4;
}

void ds_write_bitmap(const int64_t *ids, int64_t n, int64_t first, uint8_t *out) {
    for (int64_t i = 0; i < n; i++) {
        int64_t k = ids[i] - first;
        out[k >> 3] |= (uint8_t)(1 << (k & 7));
    }
}

int64_t ds_read_bitmap(const uint8_t *data, int64_t size, int64_t first, int64_t *ids, int64_t n) {
    int64_t count = 0;
    for (int64_t at = 0; at < size; at += 8) {
        uint64_t word = 0;
        memcpy(&word, data + at, (size_t)(size - at < 8 ? size - at : 8));
        for (; word; word &= word - 1, count++)
            if (count < n) ids[count] = first + at * 8 + __builtin_ctzll(word);
    }
    return count;
}

#else /* ======================================================================= one copy of the vector kernels */

#define splat DS_NAME(splat)
#define load DS_NAME(load)
#define load_some DS_NAME(load_some)
#define vmax DS_NAME(vmax)
#define vmin DS_NAME(vmin)
#define pick DS_NAME(pick)
#define rows_to_lanes DS_NAME(rows_to_lanes)
#define pack_block DS_NAME(pack_block)
#define half_round DS_NAME(half_round)
#define row_pairs DS_NAME(row_pairs)
#define encode_as DS_NAME(encode_as)
#define write_around DS_NAME(write_around)
#define settle DS_NAME(settle)
#define narrow DS_NAME(narrow)
#define row_block_ranges DS_NAME(row_block_ranges)
#define load_tile DS_NAME(load_tile)
#define two_losses DS_NAME(two_losses)
#define fit DS_NAME(fit)
#define codes16 DS_NAME(codes16)
#define decode_row DS_NAME(decode_row)
#define rounded DS_NAME(rounded)
#define ask_for DS_NAME(ask_for)
#define raised DS_NAME(raised)

INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vf load(const float *p) { return *(const vfu *)p; }
INLINE vf pick(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
#if DS_LEVEL == 2
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); } /* a > b ? a : b */
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif DS_LEVEL == 1
#define HALVES(f, a, b) \
    __m256 a0, a1, b0, b1; \
    memcpy(&a0, &a, 32), memcpy(&a1, (char *)&a + 32, 32), memcpy(&b0, &b, 32), memcpy(&b1, (char *)&b + 32, 32); \
    a0 = f(a0, b0), a1 = f(a1, b1); \
    memcpy(&a, &a0, 32), memcpy((char *)&a + 32, &a1, 32); \
    return a;
INLINE vf vmax(vf a, vf b) { HALVES(_mm256_max_ps, a, b) }
INLINE vf vmin(vf a, vf b) { HALVES(_mm256_min_ps, a, b) }
#undef HALVES
#else
INLINE vf vmax(vf a, vf b) { return pick(a > b, a, b); }
INLINE vf vmin(vf a, vf b) { return pick(a < b, a, b); }
#endif
INLINE vf rounded(vf x) { return (x + splat(MAGIC)) - splat(MAGIC); }

/* Loads the first `some` < 16 values and fills the rest with `fill`. */
INLINE vf load_some(const float *p, int64_t some, float fill) {
    float t[LANES];
    for (int l = 0; l < LANES; l++) t[l] = fill;
    memcpy(t, p, (size_t)some * 4);
    return load(t);
}

#define LO1 (vi){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}
#define HI1 (vi){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31}
#define LO2 (vi){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}
#define HI2 (vi){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31}
#define LO4 (vi){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}
#define HI4 (vi){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31}
#define LO8 (vi){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}
#define HI8 (vi){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}

/* 16 x 16 transpose in place. */
INLINE void rows_to_lanes(vf r[LANES]) {
#define STEP(s, LO, HI) \
    for (int i = 0; i < LANES; i++) \
        if (!(i & s)) { \
            vf a = r[i], b = r[i + s]; \
            r[i] = __builtin_shuffle(a, b, LO); \
            r[i + s] = __builtin_shuffle(a, b, HI); \
        }
    STEP(1, LO1, HI1)
    STEP(2, LO2, HI2)
    STEP(4, LO4, HI4)
    STEP(8, LO8, HI8)
#undef STEP
}

/* The minimum (maximum) of each of 16 vectors, as one vector: a tournament that merges two vectors at a time. */
#define MERGE(f, r) \
    do { \
        for (int i = 0; i < 16; i += 2) r[i] = f(__builtin_shuffle(r[i], r[i + 1], LO1), __builtin_shuffle(r[i], r[i + 1], HI1)); \
        for (int i = 0; i < 16; i += 4) r[i] = f(__builtin_shuffle(r[i], r[i + 2], LO2), __builtin_shuffle(r[i], r[i + 2], HI2)); \
        for (int i = 0; i < 16; i += 8) r[i] = f(__builtin_shuffle(r[i], r[i + 4], LO4), __builtin_shuffle(r[i], r[i + 4], HI4)); \
        r[0] = f(__builtin_shuffle(r[0], r[8], LO8), __builtin_shuffle(r[0], r[8], HI8)); \
    } while (0)

/* lo, hi of `live` <= 16 rows; both NaN where a row has a NaN. */
INLINE void row_block_ranges(const float *x, int64_t d, int live, float *lo, float *hi) {
    vf a[LANES], b[LANES], sum = splat(0.0f);
    for (int r = 0; r < LANES; r++) {
        const float *p = x + (r < live ? r : 0) * d;
        vf v = d >= LANES ? load(p) : load_some(p, d, p[0]);
        a[r] = b[r] = v;
        sum += v;
        int64_t j = LANES;
        for (; j + LANES <= d; j += LANES) {
            v = load(p + j);
            a[r] = vmin(v, a[r]);
            b[r] = vmax(v, b[r]);
            sum += v;
        }
        if (j < d) {
            v = load_some(p + j, d - j, p[0]);
            a[r] = vmin(v, a[r]);
            b[r] = vmax(v, b[r]);
            sum += v;
        }
    }
    /* Comparisons drop NaNs, a sum keeps them: search row by row only if the sum is NaN (or infinities cancelled). */
    vi odd = sum != sum;
    int64_t w[8], seen = 0;
    memcpy(w, &odd, sizeof w);
    for (int i = 0; i < 8; i++) seen |= w[i];
    if (__builtin_expect(seen != 0, 0))
        for (int r = 0; r < live; r++)
            for (int64_t j = 0; j < d; j++)
                if (x[r * d + j] != x[r * d + j]) a[r] = b[r] = splat(NAN);
    MERGE(vmin, a);
    MERGE(vmax, b);
    a[0] += splat(0.0f); /* -0 as 0, independent of the tournament's order */
    b[0] += splat(0.0f);
    memcpy(lo, &a[0], (size_t)live * 4);
    memcpy(hi, &b[0], (size_t)live * 4);
}

static void DS_NAME(ranges)(const float *x, int64_t n, int64_t d, float *lo, float *hi) {
    for (int64_t i = 0; i < n; i += LANES)
        row_block_ranges(x + i * d, d, n - i < LANES ? (int)(n - i) : LANES, lo + i, hi + i);
}

/* 64 codes in 32-bit lanes as 64 bytes. */
INLINE vb64 narrow(const vi c[4]) {
#if DS_LEVEL == 2
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i low = _mm512_packs_epi32((__m512i)c[0], (__m512i)c[1]), high = _mm512_packs_epi32((__m512i)c[2], (__m512i)c[3]);
    return (vb64)_mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high));
#elif DS_LEVEL == 1
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i h[8], b[2];
    memcpy(h, c, 256);
    for (int i = 0; i < 2; i++) {
        __m256i low = _mm256_packs_epi32(h[4 * i], h[4 * i + 1]), high = _mm256_packs_epi32(h[4 * i + 2], h[4 * i + 3]);
        b[i] = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
    }
    vb64 bytes;
    memcpy(&bytes, b, 64);
    return bytes;
#else
    vb16 b[4];
    for (int i = 0; i < 4; i++) b[i] = __builtin_convertvector(c[i], vb16);
    vb64 bytes;
    memcpy(&bytes, b, 64);
    return bytes;
#endif
}

/* Packs 64 codes, one per byte, into 8 * bits bytes. */
INLINE void pack_block(vb64 c, int bits, uint8_t *out) {
    if (bits == 8) {
        memcpy(out, &c, 64);
    } else if (bits == 4) {
        typedef uint16_t vh __attribute__((vector_size(64)));
        typedef uint8_t vb32 __attribute__((vector_size(32)));
        vh w = (vh)c;
        w = (w | (w >> 4)) & 0xff;
        vb32 b = __builtin_convertvector(w, vb32);
        memcpy(out, &b, 32);
    } else if (bits == 2) {
        typedef uint8_t vb __attribute__((vector_size(16)));
        vu w = (vu)c;
        w |= w >> 6;
        w = (w | (w >> 12)) & 0xff;
        vb b = __builtin_convertvector(w, vb);
        memcpy(out, &b, 16);
    } else {
        vq w = (vq)c;
        w = (w | (w >> 5)) & 0x003f003f003f003full;
        w = (w | (w >> 10)) & 0x00000fff00000fffull;
        w = (w | (w >> 20)) & 0xffffffull;
        for (int i = 0; i < 4; i++) {
            uint64_t six = w[2 * i] | w[2 * i + 1] << 24;
            memcpy(out + 6 * i, &six, i < 3 ? 8 : 6);
        }
    }
}

/* x rounded to float16: its bits, and its value. Lanes are finite. */
INLINE vf half_round(vf x, uint16_t bits[LANES]) {
#if DS_LEVEL == 2
    __m256i h = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    memcpy(bits, &h, 32);
    return (vf)_mm512_cvtph_ps(h);
#else
    for (int l = 0; l < LANES; l++) {
        bits[l] = half_bits(x[l]);
        x[l] = half_value(bits[l]);
    }
    return x;
#endif
}

/* Computes scales, biases and inverses of 16 rows from their ranges; counts special rows among the first `live`. */
INLINE int row_pairs(vf a, vf b, int bits, float unit, int live, vf *bias, vf *inverse, float *units, void *scales,
                     void *biases) {
    const vf zero = splat(0.0f), one = splat(1.0f), largest = splat(3.4028234663852886e38f);
    const vi positive = {0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff,
                         0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff};
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vi sane = (vf)((vi)(b - a) & positive) <= largest;
    const vi constant = a == b;
    vi special;
    if (bits == 8) {
        vf span = pick(sane, b - a, zero), scale = span / splat(255.0f);
        *bias = pick(sane, a, zero);
        vf inv = splat(255.0f) / pick(span >= splat(0x1p-14f), span + splat(1e-8f), span);
        *inverse = pick(inv <= largest, inv, zero);
        memcpy(biases, bias, (size_t)live * 4);
        const vi tiny = (inv > largest) & (span > zero);
        int64_t w[8], seen = 0;
        memcpy(w, &tiny, sizeof w);
        memcpy(units, &one, sizeof one);
        for (int l = 0; l < 8; l++) seen |= w[l];
        if (__builtin_expect(seen != 0, 0)) /* subnormal scales, without a finite inverse */
            for (int l = 0; l < LANES; l++)
                if (tiny[l]) {
                    if (scale[l] * 255.0f < span[l]) scale[l] = float_of(bits_of(scale[l]) + 1);
                    units[l] = 0x1p126f;
                    (*bias)[l] *= units[l];
                    (*inverse)[l] = 1.0f / (scale[l] * units[l]);
                }
        memcpy(scales, &scale, (size_t)live * 4);
        special = ~sane;
    } else {
        const vf u = splat(unit);
        a = pick(sane, a, zero) * u;
        b = pick(sane, b, zero) * u;
        vf m = vmax((vf)((vi)a & positive), (vf)((vi)b & positive)), span = b - a;
        uint16_t scale16[LANES], bias16[LANES];
        vf held = half_round(a, bias16), rest = b - held;
        vf scale = half_round(pick(rest == zero, one, rest / splat((float)((1 << bits) - 1))), scale16);
        for (int l = 0; l < LANES; l++) scale16[l] = scale16[l] & 0x7fff ? scale16[l] : 0x3c00;
        scale = pick(scale == zero, one, scale);
        special = ~sane | ~(m < splat(32768.0f));
        special |= ~((span >= splat(ldexpf(1.0f, 2 * bits - 21))) | (span <= m * splat(0x1p-9f)));
        special |= constant & (held != a);
        *bias = pick(sane, held, zero);
        *inverse = pick(sane, one / scale, zero);
        for (int l = 0; l < LANES; l++) scale16[l] = sane[l] ? scale16[l] : 0;
        memcpy(scales, scale16, (size_t)live * 2);
        memcpy(biases, bias16, (size_t)live * 2);
    }
    special &= lane < live;
    int count = 0;
    for (int l = 0; l < LANES; l++) count -= special[l];
    return count;
}

INLINE void ask_for(const char *row, int64_t width) {
    for (int64_t j = 0; j < width && j < 512; j += 64) __builtin_prefetch(row + j, 0, 3);
    __builtin_prefetch(row + width - 1, 0, 3);
}

INLINE int64_t encode_as(const float *x, int64_t n, int64_t d, const int bits, float unit, int given, float *lo,
                         float *hi, void *scales, void *biases, uint8_t *codes) {
    const vf zero = splat(0.0f), top = splat((float)((1 << bits) - 1)), magic = splat(MAGIC), u = splat(unit);
    const int64_t width = (d * bits + 7) / 8, word = bits == 8 ? 4 : 2;
    int64_t special = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        int live = n - i < LANES ? (int)(n - i) : LANES;
        const float *block = x + i * d;
        if (!given) row_block_ranges(block, d, live, lo + i, hi + i);
        vf bias, inverse;
        float bias_of[LANES], inverse_of[LANES], unit_of[LANES]; /* unit_of: 8 bits only */
        special += row_pairs(load_some(lo + i, live, 0.0f), load_some(hi + i, live, 0.0f), bits, unit, live, &bias, &inverse,
                             unit_of, (char *)scales + i * word, (char *)biases + i * word);
        memcpy(bias_of, &bias, sizeof bias);
        memcpy(inverse_of, &inverse, sizeof inverse);
        for (int r = 0; r < live; r++) {
            const vf bb = splat(bias_of[r]), inv = splat(inverse_of[r]);
            const int tiny = bits == 8 && unit_of[r] != 1.0f;
            const float *p = block + r * d;
            uint8_t *out = codes + (i + r) * width;
            for (int64_t j = 0; j < d; j += 64) {
                float tail[64];
                const float *q = p + j;
                int some = d - j < 64 ? (int)(d - j) : 64;
                /* Ranges are bound by memory, codes by computation: prefetch later rows meanwhile. */
                const char *ahead = (const char *)((uintptr_t)q + 2 * sizeof(vf) * (size_t)d);
                if (some < 64 || __builtin_expect(tiny, 0)) {
                    ask_for(ahead, 4 * some);
                    memcpy(tail, q, (size_t)some * 4);
                    for (int k = some; k < 64; k++) tail[k] = 0.0f;
                    for (int k = 0; tiny && k < some; k++) tail[k] *= unit_of[r];
                    q = tail;
                } else {
                    ask_for(ahead, 256);
                }
                vi c[4];
                for (int k = 0; k < 4; k++) {
                    vf v = load(q + LANES * k);
                    if (bits != 8) v *= u;
                    c[k] = (vi)(vmin(vmax((v - bb) * inv, zero), top) + magic) & 0xff;
                }
                vb64 bytes = narrow(c);
                if (some < 64) {
                    uint8_t t[64], packed[64];
                    memcpy(t, &bytes, 64);
                    memset(t + some, 0, (size_t)(64 - some));
                    memcpy(&bytes, t, 64);
                    pack_block(bytes, bits, packed);
                    memcpy(out + j * bits / 8, packed, (size_t)((some * bits + 7) / 8));
                } else {
                    pack_block(bytes, bits, out + j * bits / 8);
                }
            }
        }
    }
    return special;
}

static int64_t DS_NAME(encode)(const float *x, int64_t n, int64_t d, int bits, float unit, int given, float *lo,
                               float *hi, void *scales, void *biases, uint8_t *codes) {
    switch (bits) { /* makes the width a compile-time constant */
    case 2: return encode_as(x, n, d, 2, unit, given, lo, hi, scales, biases, codes);
    case 3: return encode_as(x, n, d, 3, unit, given, lo, hi, scales, biases, codes);
    case 4: return encode_as(x, n, d, 4, unit, given, lo, hi, scales, biases, codes);
    default: return encode_as(x, n, d, 8, unit, given, lo, hi, scales, biases, codes);
    }
}

/* `live` <= 16 rows as tile[j] = column j, rows in lanes; missing rows repeat the first. */
INLINE void load_tile(const float *x, int64_t d, int live, vf *tile) {
    for (int64_t j = 0; j < d; j += LANES) {
        vf r[LANES];
        int some = d - j < LANES ? (int)(d - j) : LANES;
        for (int i = 0; i < LANES; i++) {
            const float *p = x + (i < live ? i : 0) * d + j;
            r[i] = some == LANES ? load(p) : load_some(p, some, 0.0f);
        }
        rows_to_lanes(r);
        for (int k = 0; k < some; k++) tile[j + k] = r[k];
    }
}

/* Squared errors of two ranges at once. */
INLINE void two_losses(const vf *tile, int64_t d, vf qmax, vf lo1, vf hi1, vf lo2, vf hi2, vf *e1, vf *e2) {
    const vf zero = splat(0.0f), one = splat(1.0f);
    vf s1 = (hi1 - lo1) / qmax, s2 = (hi2 - lo2) / qmax;
    s1 = pick(s1 == zero, one, s1);
    s2 = pick(s2 == zero, one, s2);
    vf i1 = one / s1, i2 = one / s2, sum1 = zero, sum2 = zero;
    for (int64_t j = 0; j < d; j++) {
        vf v = tile[j];
        vf q1 = rounded(vmin(vmax((v - lo1) * i1, zero), qmax));
        vf q2 = rounded(vmin(vmax((v - lo2) * i2, zero), qmax));
        vf d1 = v - (q1 * s1 + lo1), d2 = v - (q2 * s2 + lo2);
        sum1 += d1 * d1;
        sum2 += d2 * d2;
    }
    *e1 = sum1;
    *e2 = sum2;
}

static int DS_NAME(greedy)(const float *x, int64_t n, int64_t d, int bits, int bins, int steps, float *lo, float *hi) {
    vf *tile = aligned_alloc(64, (size_t)d * sizeof(vf));
    if (!tile) return -1;
    const vf qmax = splat((float)((1 << bits) - 1));
    for (int64_t i = 0; i < n; i += LANES) {
        int live = n - i < LANES ? (int)(n - i) : LANES;
        load_tile(x + i * d, d, live, tile);
        vf a = load_some(lo + i, live, 0.0f), b = load_some(hi + i, live, 0.0f);
        vf step = (b - a) / splat((float)bins), best_a = a, best_b = b, best, other;
        two_losses(tile, d, qmax, a, b, a, b, &best, &other);
        for (int k = 0; k < steps; k++) {
            vf e1, e2, a1 = a + step, b2 = b - step;
            two_losses(tile, d, qmax, a1, b, a, b2, &e1, &e2);
            vi left = e1 < e2;
            a = pick(left, a1, a);
            b = pick(left, b, b2);
            vf e = pick(left, e1, e2);
            vi better = e < best;
            best = pick(better, e, best);
            best_a = pick(better, a, best_a);
            best_b = pick(better, b, best_b);
        }
        memcpy(lo + i, &best_a, (size_t)live * 4);
        memcpy(hi + i, &best_b, (size_t)live * 4);
    }
    free(tile);
    return 0;
}

/* One least-squares fit from each of `k` (1 or 2) ranges: explained squares, scale and bias. */
INLINE void fit(const vf *tile, int64_t d, vf qmax, int k, const vf *low, const vf *scale, vf *gain, vf *slope, vf *base) {
    const vf zero = splat(0.0f), one = splat(1.0f), count = splat((float)d);
    vf inv[2], q1[2], q2[2], qv[2];
    for (int s = 0; s < k; s++) {
        inv[s] = one / scale[s];
        q1[s] = q2[s] = qv[s] = zero;
    }
    for (int64_t j = 0; j < d; j++) {
        vf v = tile[j];
        for (int s = 0; s < k; s++) {
            vf q = rounded(vmin(vmax((v - low[s]) * inv[s], zero), qmax));
            q1[s] += q;
            q2[s] += q * q;
            qv[s] += q * v;
        }
    }
    for (int s = 0; s < k; s++) {
        vf spread = q2[s] - q1[s] * q1[s] / count;
        vf sc = qv[s] / spread;
        gain[s] = qv[s] * sc;
        slope[s] = sc;
        base[s] = zero - sc * q1[s] / count;
    }
}

static int DS_NAME(refit)(const float *x, int64_t n, int64_t d, int bits, const float *trims, int starts, int passes,
                          float *lo, float *hi) {
    vf *tile = aligned_alloc(64, (size_t)d * sizeof(vf));
    if (!tile) return -1;
    const vf qmax = splat((float)((1 << bits) - 1)), zero = splat(0.0f);
    for (int64_t i = 0; i < n; i += LANES) {
        int live = n - i < LANES ? (int)(n - i) : LANES;
        load_tile(x + i * d, d, live, tile);
        vf a = load_some(lo + i, live, 0.0f), b = load_some(hi + i, live, 0.0f);
        vf mean = zero, span = b - a;
        for (int64_t j = 0; j < d; j++) mean += tile[j];
        mean /= splat((float)d);
        for (int64_t j = 0; j < d; j++) tile[j] -= mean;
        vf best = zero, slope = zero, base = zero, gains[2], slopes[2], bases[2], low[2], scale[2];
        for (int s = 0; s < starts; s += 2) {
            int k = starts - s < 2 ? 1 : 2;
            for (int t = 0; t < k; t++) {
                low[t] = (a - mean) + splat(trims[2 * (s + t)]) * span;
                scale[t] = (((b - mean) - splat(trims[2 * (s + t) + 1]) * span) - low[t]) / qmax;
            }
            if (k == 2)
                fit(tile, d, qmax, 2, low, scale, gains, slopes, bases);
            else
                fit(tile, d, qmax, 1, low, scale, gains, slopes, bases);
            for (int t = 0; t < k; t++) {
                vi better = (gains[t] > best) & (slopes[t] > zero) & (scale[t] > zero);
                best = pick(better, gains[t], best);
                slope = pick(better, slopes[t], slope);
                base = pick(better, bases[t], base);
            }
        }
        for (int p = 1; p < passes; p++) {
            low[0] = base;
            scale[0] = slope;
            fit(tile, d, qmax, 1, low, scale, gains, slopes, bases);
            vi better = (gains[0] > best) & (slopes[0] > zero) & (scale[0] > zero);
            best = pick(better, gains[0], best);
            slope = pick(better, slopes[0], slope);
            base = pick(better, bases[0], base);
        }
        vi found = best > zero;
        vf low_end = base + mean, high_end = low_end + slope * qmax;
        a = pick(found, low_end, a);
        b = pick(found, high_end, b);
        memcpy(lo + i, &a, (size_t)live * 4);
        memcpy(hi + i, &b, (size_t)live * 4);
    }
    free(tile);
    return 0;
}

/* Scattered rows of a model are not read again soon, and a fully written cache line need not be read first. So large
 * scatters into aligned rows use non-temporal stores (twice as fast for tables larger than the caches). */
#if DS_LEVEL == 2
#define DS_AROUND 1
INLINE void write_around(char *p, vf v) { _mm512_stream_ps((float *)p, (__m512)v); }
INLINE void settle(void) { _mm_sfence(); }
#elif DS_LEVEL == 1
#define DS_AROUND 1
INLINE void write_around(char *p, vf v) {
    __m256 h[2];
    memcpy(h, &v, 64);
    _mm256_stream_ps((float *)p, h[0]);
    _mm256_stream_ps((float *)p + 8, h[1]);
}
INLINE void settle(void) { _mm_sfence(); }
#else
#define DS_AROUND 0
INLINE void write_around(char *p, vf v) { memcpy(p, &v, 64); }
INLINE void settle(void) {}
#endif

/* 16 codes, starting at a byte, of which at least 8 bytes (16 for 8 bits) may be read. */
INLINE vf codes16(const uint8_t *p, int bits) {
    if (bits == 8) {
#if DS_LEVEL == 2
        return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif DS_LEVEL == 1
        __m256 h[2];
        for (int i = 0; i < 2; i++) h[i] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8 * i))));
        vf v;
        memcpy(&v, h, 64);
        return v;
#else
        vi w = __builtin_convertvector(*(const vb16 *)p, vi);
        return __builtin_convertvector(w, vf);
#endif
    }
    uint64_t packed;
    memcpy(&packed, p, 8);
    const uint64_t pair = 2 * (uint64_t)bits, low = (1u << bits) - 1, high = low << bits;
    vq w = {packed, packed, packed, packed, packed, packed, packed, packed};
    const vq shift = {0, pair, 2 * pair, 3 * pair, 4 * pair, 5 * pair, 6 * pair, 7 * pair};
    w >>= shift;
    w = (w & low) | ((w & high) << (32 - bits));
    return __builtin_convertvector((vi)w, vf);
}

/* Columns [0, d) of one row whose codes start at a byte; `left` bytes may be read from p. */
INLINE void decode_row(const uint8_t *p, int64_t left, int bits, float s, float b, char *out, int64_t d, int store,
                       int around) {
    const vf ss = splat(s), bb = splat(b);
    const int step = 2 * bits, reads = bits == 8 ? 16 : 8;
    for (int64_t j = 0; j < d; j += LANES, p += step, left -= step) {
        int some = d - j < LANES ? (int)(d - j) : LANES;
        uint8_t copy[16] = {0};
        const uint8_t *from = p;
        if (left < reads) {
            memcpy(copy, p, (size_t)(left < 0 ? 0 : left));
            from = copy;
        }
        vf v = codes16(from, bits);
#if DS_LEVEL == 2
        v = (vf)_mm512_fmadd_ps((__m512)v, (__m512)ss, (__m512)bb);
#else
        if (bits == 8) {
#if DS_LEVEL == 1
            __m256 h[2];
            memcpy(h, &v, 64);
            for (int i = 0; i < 2; i++) h[i] = _mm256_fmadd_ps(h[i], _mm256_set1_ps(s), _mm256_set1_ps(b));
            memcpy(&v, h, 64);
#else
            for (int l = 0; l < LANES; l++) v[l] = __builtin_fmaf(v[l], s, b);
#endif
        } else {
            v = v * ss + bb; /* the product of an 11-bit scale and a 4-bit code is exact: as good as fused */
        }
#endif
        if (store == AS_IS32) {
            if (some == LANES && around)
                write_around(out + 4 * j, v);
            else if (some == LANES)
                *(vfu *)(out + 4 * j) = v;
            else
                memcpy(out + 4 * j, &v, (size_t)some * 4);
        } else {
            float t[LANES];
            memcpy(t, &v, sizeof t);
            for (int l = 0; l < some; l++) {
                if (store == AS_IS64) {
                    double wide = (double)t[l];
                    memcpy(out + 8 * (j + l), &wide, 8);
                } else {
                    uint16_t h = store == AS_HALF ? half_bits(t[l]) : bfloat_bits(t[l]);
                    memcpy(out + 2 * (j + l), &h, 2);
                }
            }
        }
    }
}

static void DS_NAME(decode)(const uint8_t *codes, int64_t width, const void *scales, const void *biases, int bits,
                            float unit, int64_t first, char *out, int64_t stride, int64_t d, int store,
                            const int64_t *rows, const uint8_t *take, int64_t n) {
    const int large = DS_AROUND && store == AS_IS32 && d % LANES == 0 && n * d * 4 >= AROUND_FROM;
    for (int64_t i = 0; i < n; i++) {
        if (take && !take[i]) continue;
        const uint8_t *row = codes + i * width;
        char *to = out + rows[i] * stride;
        const int around = large && !((uintptr_t)to & 63);
        float s, b;
        if (bits == 8) {
            memcpy(&s, (const float *)scales + i, 4);
            memcpy(&b, (const float *)biases + i, 4);
        } else {
            uint16_t scale16, bias16;
            memcpy(&scale16, (const uint16_t *)scales + i, 2);
            memcpy(&bias16, (const uint16_t *)biases + i, 2);
            if ((scale16 & 0xff00) == 0x7d00) {
                s = 0.0f;
                b = float_of((uint32_t)bias16 << 16 | (uint32_t)row[0] << 8 | (scale16 & 0xff));
            } else {
                s = half_value(scale16) * unit;
                b = half_value(bias16) * unit;
            }
        }
        if (first * bits & 7 || (store != AS_IS32 && store != AS_IS64 && store != AS_HALF && store != AS_BFLOAT)) {
            /* A column range that starts inside a byte is rare: decode one value at a time. */
            for (int64_t j = 0; j < d; j++) {
                int64_t bit = (first + j) * bits, at = bit >> 3;
                uint32_t word = row[at];
                if (at + 1 < width) word |= (uint32_t)row[at + 1] << 8;
                float v = __builtin_fmaf((float)((word >> (bit & 7)) & ((1u << bits) - 1)), s, b);
                uint16_t h = store == AS_HALF ? half_bits(v) : bfloat_bits(v);
                double wide = (double)v;
                if (store == AS_IS32)
                    memcpy(to + 4 * j, &v, 4);
                else if (store == AS_IS64)
                    memcpy(to + 8 * j, &wide, 8);
                else
                    memcpy(to + 2 * j, &h, 2);
            }
            continue;
        }
        const uint8_t *p = row + first * bits / 8;
        /* Reading past a row's codes is allowed up to the end of the section. */
        int64_t left = (n - i) * width - first * bits / 8;
        if (store == AS_IS32) {
            if (bits == 8)
                decode_row(p, left, 8, s, b, to, d, AS_IS32, around);
            else if (bits == 4)
                decode_row(p, left, 4, s, b, to, d, AS_IS32, around);
            else if (bits == 3)
                decode_row(p, left, 3, s, b, to, d, AS_IS32, around);
            else
                decode_row(p, left, 2, s, b, to, d, AS_IS32, around);
        } else {
            decode_row(p, left, bits, s, b, to, d, store, 0);
        }
    }
    settle();
}

static void DS_NAME(copy)(const char *values, int64_t from, char *out, int64_t stride, int64_t width, const int64_t *rows,
                          const uint8_t *take, int64_t n) {
    const int large = DS_AROUND && width % 64 == 0 && n * width >= AROUND_FROM;
    for (int64_t i = 0; i < n; i++) {
        if (take && !take[i]) continue;
        const char *p = values + i * from;
        char *to = out + rows[i] * stride;
        if (large && !((uintptr_t)to & 63))
            for (int64_t j = 0; j < width; j += 64) write_around(to + j, load((const float *)(p + j)));
        else
            memcpy(to, p, (size_t)width);
    }
    settle();
}

/* Copies row rows[i] to place i, or to places[i]: scattered reads and writes; full-line stores avoid reading the line. */
static void DS_NAME(gather)(const char *values, int64_t stride, int64_t width, const int64_t *rows, int64_t n, char *out,
                            const int64_t *places) {
    const int whole = DS_AROUND && width % 64 == 0 && !((uintptr_t)out & 63);
    const int around = whole && (places || n * width >= AROUND_FROM);
    for (int64_t i = 0; i < n; i++) {
        if (i + AHEAD < n) {
            /* Several narrow rows gathered in order share a cache line. */
            if (width >= 64 || places) ask_for(values + rows[i + AHEAD] * stride, width);
            if (places && !around) __builtin_prefetch(out + places[i + AHEAD] * width, 1);
        }
        const char *p = values + rows[i] * stride;
        char *to = out + (places ? places[i] : i) * width;
        if (around)
            for (int64_t j = 0; j < width; j += 64) write_around(to + j, load((const float *)(p + j)));
        else if (width == 4)
            memcpy(to, p, 4);
        else
            memcpy(to, p, (size_t)width);
    }
    settle();
}

/* Returns bit l = (flags[l] has a bit of `mask`) for 64 flags. */
INLINE uint64_t raised(const uint8_t *flags, uint8_t mask) {
#if DS_LEVEL == 2
    return _mm512_test_epi8_mask(_mm512_loadu_si512(flags), _mm512_set1_epi8((char)mask));
#else
    uint64_t found = 0;
    for (int l = 0; l < 64; l++) found |= (uint64_t)((flags[l] & mask) != 0) << l;
    return found;
#endif
}

static int64_t DS_NAME(find)(const uint8_t *flags, int64_t n, int mask, int64_t *rows) {
    int64_t count = 0, i = 0;
    for (; i + 64 <= n; i += 64) {
        uint64_t found = raised(flags + i, (uint8_t)mask);
        if (!rows)
            count += __builtin_popcountll(found);
        else
            for (; found; found &= found - 1) rows[count++] = i + __builtin_ctzll(found);
    }
    for (; i < n; i++)
        if (flags[i] & mask) {
            if (rows) rows[count] = i;
            count++;
        }
    return count;
}

static void DS_NAME(move_flags)(uint8_t *flags, int64_t n, int bits, int left) {
    const uint8_t from = (uint8_t)bits, kept = (uint8_t)~bits;
    if (left)
        for (int64_t i = 0; i < n; i++) flags[i] = (uint8_t)((flags[i] & kept) | (flags[i] & from) << 1);
    else
        for (int64_t i = 0; i < n; i++) flags[i] = (uint8_t)((flags[i] & kept) | (flags[i] & from) >> 1);
}

static void DS_NAME(hash)(const uint32_t *words, int64_t k, const uint64_t *weights, const int64_t *rows, int64_t n,
                          uint64_t *out) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t *p = words + (rows ? rows[i] : i) * k;
        if (rows && i + AHEAD < n) ask_for((const char *)(words + rows[i + AHEAD] * k), 4 * k);
        uint64_t h = 0;
        int64_t j = 0;
#if DS_LEVEL == 2
        __m512i low = _mm512_setzero_si512(), high = low;
        for (; j + 8 <= k; j += 8) {
            __m512i v = _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)(p + j)));
            __m512i w = _mm512_loadu_si512(weights + j);
            low = _mm512_add_epi64(low, _mm512_mul_epu32(v, w));
            high = _mm512_add_epi64(high, _mm512_mul_epu32(v, _mm512_srli_epi64(w, 32)));
        }
        uint64_t a[8], b[8], upper = 0;
        memcpy(a, &low, 64), memcpy(b, &high, 64);
        for (int l = 0; l < 8; l++) h += a[l], upper += b[l];
        h += upper << 32;
#elif DS_LEVEL == 1
        __m256i low = _mm256_setzero_si256(), high = low;
        for (; j + 4 <= k; j += 4) {
            __m256i v = _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(p + j)));
            __m256i w = _mm256_loadu_si256((const __m256i *)(weights + j));
            low = _mm256_add_epi64(low, _mm256_mul_epu32(v, w));
            high = _mm256_add_epi64(high, _mm256_mul_epu32(v, _mm256_srli_epi64(w, 32)));
        }
        uint64_t a[4], b[4];
        memcpy(a, &low, 32), memcpy(b, &high, 32);
        h = a[0] + a[1] + a[2] + a[3] + ((b[0] + b[1] + b[2] + b[3]) << 32);
#endif
        for (; j < k; j++) h += weights[j] * p[j];
        out[i] += h;
    }
}

#undef splat
#undef load
#undef load_some
#undef vmax
#undef vmin
#undef pick
#undef rows_to_lanes
#undef pack_block
#undef half_round
#undef row_pairs
#undef encode_as
#undef write_around
#undef settle
#undef DS_AROUND
#undef narrow
#undef row_block_ranges
#undef load_tile
#undef two_losses
#undef fit
#undef codes16
#undef decode_row
#undef rounded
#undef ask_for
#undef raised
#undef MERGE
#undef LO1
#undef HI1
#undef LO2
#undef HI2
#undef LO4
#undef HI4
#undef LO8
#undef HI8
#endif
