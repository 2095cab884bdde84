// Loops over the elements of gradients of one dtype, which gradients.py compiles for each dtype and
// calls. FORMAT is the dtype's index in dtypes.py. So that a first step hardly waits for the
// compiler, they use no header of torch or Python, and what few steps need is compiled only for
// them: to unscale in place, and sums of squares, with LEVEL 1 or more; measures with LEVEL 2.

// Without this, g++ uses vectors of half the width of the processor's.
#if defined(__AVX512F__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include "preamble.h"

// The magnitude of a float16, for which processors without an instruction of their own need half as
// long as from_float16 does.
static inline float magnitude16(int16_t b) {
    b &= 0x7FFF;
    const int32_t from_infinity_on = (0x7BFF - b) >> 31;  // vectorized, unlike a branch
    return number(uint32_t(b) << 13 | (from_infinity_on & 0x7F800000)) * 0x1p112f;
}

// The type of an element, as an integer, and of the number that it is.
#if FORMAT == 0
typedef int16_t T;
typedef float Number;
#define NUMBER magnitude16
#define LOAD from_float16
#define STORE to_float16
#elif FORMAT == 1
typedef int16_t T;
typedef float Number;
#define NUMBER from_bfloat16
#define LOAD from_bfloat16
#define STORE to_bfloat16
#elif FORMAT == 2
typedef int32_t T;
typedef float Number;
#define NUMBER number
#else
typedef int64_t T;
typedef double Number;
static inline double NUMBER(int64_t bits) { double x; __builtin_memcpy(&x, &bits, 8); return x; }
#endif

constexpr T MAGNITUDE = T(~(uint64_t(1) << (8 * sizeof(T) - 1)));  // all bits but the sign

// Bytes of a vector. Vectors wider than the processor's may be processed number by number.
#if defined(__AVX512BW__)
constexpr int64_t VECTOR = 64;
#elif defined(__AVX2__)
constexpr int64_t VECTOR = 32;
#else
constexpr int64_t VECTOR = 16;
#endif
constexpr int64_t LANES = VECTOR / sizeof(T);
typedef T Vector __attribute__((vector_size(VECTOR)));

// Converts elements to numbers, or to their magnitudes.
static inline void convert(const Vector& values, Number (&numbers)[LANES]) {
#if FORMAT == 0 && defined(WIDENED)
    uint16_t halves[LANES];
    __builtin_memcpy(halves, &values, VECTOR);
    widen<from_float16>(halves, LANES, numbers);
#else
    for (int64_t lane = 0; lane < LANES; ++lane) numbers[lane] = NUMBER(values[lane]);
#endif
}

// A row of a work: its index, and its number of elements. The address of its gradient is
// grads[place], 0 if this step has none.
struct Row {
    int64_t place, size;
};

// Rows are divided into parts, each processed by one thread. The bounds and the order of parts do
// not depend on the number of threads, so results do not either.
static inline int64_t parts_of(const int64_t* grads, const Row& row) {
    return grads[row.place] ? (row.size + PART - 1) / PART : 0;
}

static int64_t count_parts(const int64_t* grads, const Row* rows, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += parts_of(grads, rows[i]);
    return count;
}

constexpr int64_t WORTH_THREADS = 64;  // fewer parts take less time than starting threads does

// Calls each(elements, their number, index of the part) for each part.
template <typename Each>
static inline void each_part(
    const int64_t* grads, const Row* rows, int64_t n, int64_t threads, int64_t count,
    const Each& each
) {
    if (count < WORTH_THREADS) threads = 1;
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t thread = 0; thread < threads; ++thread) {
        const int64_t from = count * thread / threads, to = count * (thread + 1) / threads;
        int64_t part = 0;
        for (int64_t i = 0; i < n && part < to; ++i) {
            T* x = (T*)grads[rows[i].place];
            const int64_t own = parts_of(grads, rows[i]);
            int64_t k = from > part ? from - part : 0;
            for (; k < own && part + k < to; ++k) {
                const int64_t left = rows[i].size - k * PART;
                each(x + k * PART, left < PART ? left : PART, part + k);
            }
            part += own;
        }
    }
}

// As integers, the bits of magnitudes are in the order of the magnitudes, with infinity and the
// NaNs above all others.
__attribute__((noinline)) static T largest(const T* x, int64_t size) {
    T most = 0;
    for (int64_t i = 0; i < size; ++i) {
        const T magnitude = x[i] & MAGNITUDE;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

// Whether the bits of all magnitudes are below ``bound``. Sets ``flags[place]`` of each other row.
// Calls then(elements, their number) for each part, once its elements are read.
template <typename Then>
static inline int64_t test(
    const int64_t* grads, const Row* rows, int64_t n, int64_t threads, int64_t bound, char* flags,
    const Then& then
) {
    const int64_t count = count_parts(grads, rows, n);
    T* most = new T[count];
    each_part(grads, rows, n, threads, count, [=](T* x, int64_t size, int64_t part) {
        most[part] = largest(x, size);
        then(x, size);
    });
    bool below = true;
    for (int64_t i = 0, part = 0; i < n; ++i)
        for (const int64_t end = part + parts_of(grads, rows[i]); part < end; ++part)
            if (most[part] >= bound) below = false, flags[rows[i].place] = 1;
    delete[] most;
    return below;
}

// See test().
extern "C" int64_t all_below(
    const int64_t* grads, const Row* rows, int64_t n, int64_t threads, int64_t bound, char* flags
) {
    return test(grads, rows, n, threads, bound, flags, [](T*, int64_t) {});
}

#if LEVEL >= 1

__attribute__((noinline)) static void multiply(T* x, int64_t size, Number factor) {
#if FORMAT < 2
    uint16_t* halves = (uint16_t*)x;
    constexpr int64_t BLOCK = 64;
    float numbers[BLOCK];
    for (int64_t i = 0; i < size; i += BLOCK) {
        const int64_t n = lesser(BLOCK, size - i);
        widen<LOAD>(halves + i, n, numbers);
        for (int64_t j = 0; j < n; ++j) numbers[j] *= factor;
        narrow<STORE>(numbers, n, halves + i);
    }
#else
    Number* numbers = (Number*)x;
    for (int64_t i = 0; i < size; ++i) numbers[i] *= factor;
#endif
}

// Also multiplies each element by ``inverse``, in float64 if it is float64, else in float32. The
// memory is read once, as a part stays in the cache.
extern "C" int64_t unscale(
    const int64_t* grads, const Row* rows, int64_t n, int64_t threads, int64_t bound, char* flags,
    double inverse
) {
    return test(grads, rows, n, threads, bound, flags, [=](T* x, int64_t size) {
        multiply(x, size, inverse);
    });
}

// x * x + y, rounded twice, or once where that is faster and the same: the square of a float has at
// most 48 bits.
static inline double square_and(double x, double y) {
#if defined(__FP_FAST_FMA) && FORMAT != 3
    return __builtin_fma(x, x, y);
#else
    return x * x + y;
#endif
}

// The sum of the squares of one part, whose elements ``each`` is given in vectors. There are as many
// sums as processors need, so that no addition waits for the one before; at the end, the second
// half of them is added to the first half until one is left.
template <typename Each>
static inline double squares(const T* x, int64_t size, const Each& each) {
    constexpr int64_t SUMS = VECTOR / 2;
    double sums[SUMS] = {};
    const auto add = [&](const T* block) {
        Number numbers[SUMS];
        for (int64_t i = 0; i < SUMS; i += LANES) {
            Vector values;
            __builtin_memcpy(&values, block + i, VECTOR);
            each(values);
            convert(values, *(Number(*)[LANES])(numbers + i));
        }
        for (int64_t i = 0; i < SUMS; ++i) sums[i] = square_and(numbers[i], sums[i]);
    };
    int64_t at = 0;
    for (; at + SUMS <= size; at += SUMS) add(x + at);
    if (at < size) {
        T last[SUMS] = {};
        __builtin_memcpy(last, x + at, (size - at) * sizeof(T));
        add(last);
    }
    for (int64_t half = SUMS / 2; half; half /= 2)
        for (int64_t i = 0; i < half; ++i) sums[i] += sums[half + i];
    return sums[0];
}

// The sum of squares of each row, at its place in ``sums``, which is 0 before.
extern "C" void sums_of_squares(
    const int64_t* grads, const Row* rows, int64_t n, int64_t threads, double* sums
) {
    const int64_t count = count_parts(grads, rows, n);
    double* partial = new double[count];
    each_part(grads, rows, n, threads, count, [=](const T* x, int64_t size, int64_t part) {
        partial[part] = squares(x, size, [](const Vector&) {});
    });
    for (int64_t i = 0, part = 0; i < n; ++i)
        for (const int64_t end = part + parts_of(grads, rows[i]); part < end; ++part)
            sums[rows[i].place] += partial[part];
    delete[] partial;
}

#endif
#if LEVEL >= 2

struct Measures {
    int64_t overflows, nonzero, not_flushed;
    double largest, squares;
};

// Measures one part. Unscaled, magnitudes of at least bounds[0] are not 0, those of at least
// bounds[1] would not flush to 0 in float16, and those of at least bounds[2] are not finite. The
// sum of squares includes the magnitudes that are not finite.
static inline Measures measures(const T* x, int64_t size, const int64_t* bounds) {
    const T smallest = bounds[0], smallest_not_flushed = bounds[1], infinite = bounds[2];
    Vector largest = {}, nonzero = {}, above = {};  // a part has too few for 16 bits
    Measures result = {};
    result.squares = squares(x, size, [&](Vector values) {
        values &= MAGNITUDE;
        largest = values > largest ? values : largest;
        nonzero = values >= smallest ? nonzero + 1 : nonzero;
        above = values >= smallest_not_flushed ? above + 1 : above;
    });
    T most = 0;
    for (int64_t lane = 0; lane < LANES; ++lane) {
        most = largest[lane] > most ? largest[lane] : most;
        result.nonzero += nonzero[lane];
        result.not_flushed += above[lane];
    }
    result.overflows = most >= infinite;
    if (result.overflows) {  // seldom, so the largest finite magnitude is searched for only then
        most = 0;
        for (int64_t i = 0; i < size; ++i) {
            const T magnitude = x[i] & MAGNITUDE;
            const bool finite = magnitude < infinite;
            most = finite && magnitude > most ? magnitude : most;
            result.nonzero -= !finite;
            result.not_flushed -= !finite;
        }
    }
    result.largest = NUMBER(most);
    return result;
}

// For each row, at its place, writes whether it overflows, and four columns: the sum of squares
// before unscaling; the largest finite magnitude, unscaled; how many elements are not 0; and how
// many of these would flush to 0. ``flags`` and ``columns`` are 0 before. bounds[3] is 1 if the
// arithmetic is float64.
extern "C" void measure(
    const int64_t* grads, const Row* rows, int64_t n, int64_t threads, const int64_t* bounds,
    double inverse, char* flags, double (*columns)[4]
) {
    const int64_t count = count_parts(grads, rows, n);
    Measures* partial = new Measures[count];
    each_part(grads, rows, n, threads, count, [=](const T* x, int64_t size, int64_t part) {
        partial[part] = measures(x, size, bounds);
    });
    for (int64_t i = 0, part = 0; i < n; ++i) {
        double* of = columns[rows[i].place];
        for (const int64_t end = part + parts_of(grads, rows[i]); part < end; ++part) {
            if (partial[part].overflows) flags[rows[i].place] = 1;
            of[0] += partial[part].squares;
            of[1] = partial[part].largest > of[1] ? partial[part].largest : of[1];
            of[2] += partial[part].nonzero;
            of[3] += partial[part].nonzero - partial[part].not_flushed;
        }
        of[1] = __builtin_fabs(bounds[3] ? of[1] * inverse : float(of[1]) * float(inverse));
        if (bounds[2] == 0) of[1] = of[2] = of[3] = 0;  // 1 / scale is infinite: even 0 is NaN
    }
    delete[] partial;
}

#endif
