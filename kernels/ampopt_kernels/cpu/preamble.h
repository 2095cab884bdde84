// What every source begins with: conversions, prefetches, and functions of the language of rules.

#include <cstdint>

// In place of <cmath>, which takes a compiler as long as everything else here.
namespace math {
#define MATH(name) \
    static inline float name(float x) { return __builtin_##name##f(x); } \
    static inline double name(double x) { return __builtin_##name(x); }
MATH(fabs) MATH(sqrt) MATH(floor) MATH(ceil)
MATH(exp) MATH(exp2) MATH(log) MATH(log2) MATH(sin) MATH(cos)
#undef MATH
}

// The functions that Python calls for numbers.
namespace libm {
extern "C" double exp(double), log(double), log2(double), pow(double, double);
extern "C" double sin(double), cos(double);
}

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// The sum of ``n`` numbers: the second half is added to the first half until one number is left.
static inline double halved(double* x, int64_t n) {
    for (int64_t half; n > 1; n = half) {
        half = (n + 1) / 2;
        for (int64_t j = 0; j < n - half; ++j) x[j] += x[half + j];
    }
    return x[0];
}

// Prefetches a block that is read some blocks later. Processors do so by themselves, but they start
// again at each page, and do not prefetch memory that is only written. AMD's are faster without
// this: on Zen 4, it makes a loop up to a fifth slower. But where states are encoded, or
// masters are split, hundreds of instructions lie between the reads of two blocks, and those of the
// next one start late: this is done ``always``, and saves up to a fifth of a step on Zen 5.
#if defined(__x86_64__)
static const bool FETCHES = (__builtin_cpu_init(), !__builtin_cpu_is("amd"));
#else
static const bool FETCHES = true;
#endif
template <int64_t BLOCK, typename T>
static inline void fetch(const T* block, bool always = false) {
    if (!FETCHES && !always) return;
    constexpr int64_t AHEAD = BLOCK < 128 ? 16 * BLOCK : 2048, LINE = 64 / sizeof(T);
    for (int64_t i = 0; i < BLOCK; i += LINE) __builtin_prefetch(block + AHEAD + i);
}

static inline uint32_t bits(float x) { uint32_t b; __builtin_memcpy(&b, &x, 4); return b; }
static inline float number(uint32_t b) { float x; __builtin_memcpy(&x, &b, 4); return x; }

// See ``log2_linear`` and ``exp2_linear`` of the language.
static inline float log2_linear(float x) {
    return float(int32_t(bits(x)) - 0x3F800000) * 0x1p-23f;
}
static inline float exp2_linear(float y) {
    return number(uint32_t(int32_t(y * 0x1p23f) + 0x3F800000));
}

static inline float from_bfloat16(uint16_t x) { return number(uint32_t(x) << 16); }

// ``x`` is NaN, or a number that bfloat16 holds.
static inline uint16_t as_bfloat16(float x) { return x != x ? 0xFFFF : bits(x) >> 16; }

// Rounds to nearest, ties to even.
static inline uint16_t to_bfloat16(float x) {
    const uint32_t b = bits(x);
    return x != x ? 0xFFFF : (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
}

// Without branches, so that compilers vectorize them (as in Maratyszcza's FP16): the exponent is
// moved by a multiplication, or for subnormal numbers by a subtraction, both of which are exact.
static inline float from_float16(uint16_t x) {
    const uint32_t w = uint32_t(x) << 16, twice = w + w;
    const uint32_t normal = bits(number((twice >> 4) + (0xE0u << 23)) * 0x1p-112f);
    const uint32_t subnormal = bits(number((twice >> 17) | (126u << 23)) - 0.5f);
    return number((w & 0x80000000u) | (twice < (1u << 27) ? subnormal : normal));
}

// Rounds to nearest, ties to even: the addition of ``size`` rounds at the last bit of float16. NaNs
// keep their sign and upper bits, as in the processor's own conversion, and so torch's.
static inline uint16_t to_float16(float x) {
    const uint32_t w = bits(x), twice = w + w, exponent = twice & 0xFF000000u;
    const float size = (math::fabs(x) * 0x1p112f) * 0x1p-110f;
    const uint32_t bias = exponent < 0x71000000u ? 0x71000000u : exponent;
    const uint32_t b = bits(number((bias >> 1) + 0x07800000u) + size);
    const uint32_t rounded = ((b >> 13) & 0x7C00u) + (b & 0x0FFFu);
    const uint32_t nan = 0x7E00u | (w >> 13 & 0x3FFu);
    return ((w & 0x80000000u) >> 16) | (twice > 0xFF000000u ? nan : rounded);
}

// Up to BLOCK numbers in half precision are converted before and after the loop over elements. In
// that loop, compilers do not make vectors of the processor's own conversions of float16; these
// have vectors as long as those of it: a load of more than one store wrote waits for the stores.
// bfloat16, converted in that loop, made a step with AVX2 up to a seventh slower.
#if defined(__AVX512F__)
typedef float Floats __attribute__((vector_size(64)));
typedef short Halves __attribute__((vector_size(32)));
#define WIDENED(halves) __builtin_ia32_vcvtph2ps512_mask(halves, Floats{}, -1, 4)
#define NARROWED(floats) __builtin_ia32_vcvtps2ph512_mask(floats, 0, Halves{}, -1)
#elif defined(__F16C__)
typedef float Floats __attribute__((vector_size(32)));
typedef short Halves __attribute__((vector_size(16)));
#define WIDENED(halves) __builtin_ia32_vcvtph2ps256(halves)
#define NARROWED(floats) __builtin_ia32_vcvtps2ph256(floats, 0)  // ties to even
#endif

template <auto load> static inline void widen(const uint16_t* x, int64_t n, float* out) {
    int64_t i = 0;
#if defined(WIDENED)
    constexpr int64_t lanes = sizeof(Halves) / 2;
    if constexpr (load == from_float16)
        for (Halves halves; i + lanes <= n; i += lanes) {
            __builtin_memcpy(&halves, x + i, sizeof(Halves));
            const Floats floats = WIDENED(halves);
            __builtin_memcpy(out + i, &floats, sizeof(Floats));
        }
#endif
    for (; i < n; ++i) out[i] = load(x[i]);
}

template <auto store> static inline void narrow(const float* x, int64_t n, uint16_t* out) {
    int64_t i = 0;
#if defined(NARROWED)
    constexpr int64_t lanes = sizeof(Halves) / 2;
    if constexpr (store == to_float16)
        for (Floats floats; i + lanes <= n; i += lanes) {
            __builtin_memcpy(&floats, x + i, sizeof(Floats));
            const Halves halves = NARROWED(floats);
            __builtin_memcpy(out + i, &halves, sizeof(Halves));
        }
#endif
    for (; i < n; ++i) out[i] = store(x[i]);
}

// Reads the factor of the row, or column, of each element: next() writes those of the next ``size``
// elements, the first of which is the element ``start``.
template <typename T> struct Spread {
    const bool rows;
    const int64_t m, n;
    int64_t column, left;
    const T *row, *columns;
    Spread(const void* of, bool rows, int64_t m, int64_t n, int64_t start)
        : rows(rows), m(m), n(n), column(start % n), left(m - start / n % m),
          row((const T*)of + start / n), columns((const T*)of + start / n / m * n) {}
    void next(int64_t size, T* out) {
        for (const T* end = out + size; out < end;) {
            const int64_t here = lesser(end - out, n - column);
            for (int64_t j = 0; j < here; ++j) out[j] = rows ? *row : columns[column + j];
            out += here, column += here;
            if (column == n) {
                column = 0, ++row;
                if (--left == 0) left = m, columns += n;
            }
        }
    }
};
