"""Templates of C++ loops, which ``cpp`` fills with the translated functions of a rule.

Each loop over elements is a function by itself: compilers do not vectorize a loop in a parallel
region that shares many variables. The functions of one role are in a namespace, in which ``BLOCK``
is the number of elements of a block.

Arguments with one meaning in all functions:

- ``table``: ``n_rows`` rows of ``COLUMNS`` integers (see ``table``).
- ``grads``: the address of the gradient of each row of the work, 0 for a row without one.
- ``numbers``: variants of the numbers of a row, one after another. A variant is the reciprocal of
  the scale, the clip coefficient, and then what the functions of a rule take as ``h``.
- ``which``: for each row, the index of its variant in ``numbers``; -1 without a gradient.
"""

__all__ = [
    "APPLY",
    "AVERAGES",
    "BEFORE_SUMS",
    "BLOCKS",
    "REDUCE",
    "SCALARS",
    "TABLE",
    "UPDATE",
    "WHOLE_BLOCKS",
]

BLOCKS = """
    for (int64_t block = start; block < end; block += BLOCK) {{
        const int64_t size = lesser(BLOCK, end - block);
        {fetched}
        #pragma omp simd
        for (int64_t i = block; i < block + size; ++i) {{
            {each}
        }}
        {after}
    }}
"""

# Where blocks have further loops before or after that over elements, whole blocks and the rest are
# separate: loops of a constant number of elements are faster.
WHOLE_BLOCKS = """
    int64_t block = start;
    for (; block + BLOCK <= end; block += BLOCK) {{
        constexpr int32_t size = BLOCK;
        {fetched}
        #pragma omp simd
        for (int64_t i = block; i < block + size; ++i) {{
            {each}
        }}
        {after}
    }}
    if (block < end) {{
        const int32_t size = end - block;
        {fetched}
        for (int64_t i = block; i < block + size; ++i) {{
            {each}
        }}
        {after}
    }}
"""

TABLE = """
// Columns of the table: TENSORS tensors, of which the first one is the row's index in the work, in
// place of the gradient; then scalar states; then these.
constexpr int64_t TENSORS = {tensors}, NUMEL = TENSORS + {scalars}, VARIANT = NUMEL + 1;
constexpr int64_t FIRST = VARIANT + 1, KEY = FIRST + 1, JUMPS = KEY + 1;
constexpr int64_t COLUMNS = {has_indices} ? JUMPS + {jumps} : FIRST;

// The tensors of a row, with its gradient.
struct Tensors {{
    void* of[TENSORS];
    Tensors(const int64_t* grads, const int64_t* row) {{
        of[0] = (void*)grads[row[0]];
        for (int64_t i = 1; i < TENSORS; ++i) of[i] = (void*)row[i];
    }}
}};

constexpr int64_t WORTH_THREADS = {worth_threads};
"""

# Rows with the inputs of the row before share its numbers, unless each has places of its own.
SCALARS = """
static void compute(
    const int64_t* grads, const int64_t* table, int64_t n_rows, const double* hyper, double inverse,
    double clip, const double* sums, const double* totals, double* numbers, int64_t* which
) {{
    int64_t n = 0, last_variant = -1;
    double last[{n_inputs}], next[{n_inputs}];
    for (int64_t i = 0; i < n_rows; ++i) {{
        const int64_t* row = table + i * COLUMNS;
        which[i] = -1;
        if (!grads[row[0]]) continue;
        const double inputs[] = {{{inputs}}};
        const double* h = hyper + row[VARIANT] * {n_hyper};
        if ({has_indices} || row[VARIANT] != last_variant ||
            __builtin_memcmp(inputs, last, sizeof inputs)) {{
            __builtin_memcpy(last, inputs, sizeof inputs);
            last_variant = row[VARIANT];
            double* result = numbers + {width} * n++;
            result[0] = inverse, result[1] = clip;
            {statements}
        }}
        {stores}
        which[i] = n - 1;
    }}
}}
"""

APPLY = """
__attribute__((noinline)) static void apply(
    const double* h, void* const* tensors, int64_t start, int64_t end
) {{
    {before}
    {blocks}
}}
"""

UPDATE = """
// Where a thread begins: at the element ``at``, or at its block, whose elements may share a scale.
static inline int64_t cut(int64_t at, int64_t n) {{
    return at < 0 ? 0 : at < n ? at / BLOCK * BLOCK : n;
}}

// Gradients that the update has just read, and that are in the cache still.
static inline void unscale({grad}* grads, {number} inverse, int64_t start, int64_t end) {{
    for (int64_t i = start; i < end; ++i) grads[i] = {store}({load}(grads[i]) * inverse);
}}

// Advances the scalar states of each row that has a gradient, then updates its elements, which all
// threads share. Stores the gradients unscaled if ``unscales``.
extern "C" void update(
    const int64_t* grads, const int64_t* table, int64_t n_rows, const double* hyper, double inverse,
    double clip, const double* sums, const double* totals, double* numbers, int64_t* which,
    int64_t threads, bool unscales
) {{
    of_scalars::compute(
        grads, table, n_rows, hyper, inverse, clip, sums, totals, numbers, which);
    int64_t n = 0;
    for (int64_t i = 0; i < n_rows; ++i) if (which[i] >= 0) n += table[i * COLUMNS + NUMEL];
    if (n <= WORTH_THREADS) threads = 1;
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t thread = 0; thread < threads; ++thread) {{
        int64_t first = n * thread / threads, last = n * (thread + 1) / threads;
        for (int64_t i = 0; i < n_rows; ++i) {{
            if (which[i] < 0) continue;
            const int64_t* row = table + i * COLUMNS;
            int64_t from = cut(first, row[NUMEL]);
            const int64_t to = cut(last, row[NUMEL]);
            const Tensors tensors(grads, row);
            for (int64_t end; from < to; from = end) {{
                end = unscales ? lesser(from + 32 * BLOCK, to) : to;
                apply(numbers + which[i] * {width}, tensors.of, from, end);
                if (unscales) unscale(({grad}*)tensors.of[0], inverse, from, end);
            }}
            first -= row[NUMEL], last -= row[NUMEL];
        }}
    }}
}}
"""

BEFORE_SUMS = """
// Computes the numbers of ``reduce`` and ``averages``.
extern "C" void before_sums(
    const int64_t* grads, const int64_t* table, int64_t n_rows, const double* hyper, double inverse,
    double clip, double* numbers, int64_t* which
) {
    compute(grads, table, n_rows, hyper, inverse, clip, nullptr, nullptr, numbers, which);
}
"""

REDUCE = """
// A part of a row is added up by one thread: the blocks of the part to its first block, in memory
// order; then the second half of that block to its first half, until one number is left.
__attribute__((noinline)) static void sum_part(
    const double* h, void* const* tensors, int64_t start, int64_t end, double* out
) {{
    {before}
    double terms[{n_terms}][BLOCK] = {{}};
    for (int64_t block = start; block < end; block += BLOCK) {{
        const int64_t size = lesser(BLOCK, end - block);
        {fetched}
        #pragma omp simd
        for (int64_t j = 0; j < size; ++j) {{
            const int64_t i = block + j;
            {each}
        }}
    }}
    for (int64_t k = 0; k < {n_terms}; ++k) out[k] = halved(terms[k], BLOCK);
}}

// Writes the sum of each term over each row that has a gradient, at the row's index in the work.
// The parts of a row are added one after another. ``numbers`` and ``which`` are those of
// before_sums.
extern "C" void reduce(
    const int64_t* grads, const int64_t* table, int64_t n_rows, const double* numbers,
    const int64_t* which, int64_t threads, double* out
) {{
    const auto parts_of = [=](int64_t i) {{
        return which[i] < 0 ? 0 : (table[i * COLUMNS + NUMEL] + {part} - 1) / {part};
    }};
    int64_t n_parts = 0;
    for (int64_t i = 0; i < n_rows; ++i) n_parts += parts_of(i);
    double* parts = new double[n_parts * {n_terms}];
    if (n_parts * {part} <= WORTH_THREADS) threads = 1;
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t thread = 0; thread < threads; ++thread) {{
        const int64_t first = n_parts * thread / threads, last = n_parts * (thread + 1) / threads;
        for (int64_t i = 0, part = 0; i < n_rows && part < last; part += parts_of(i++)) {{
            const int64_t* row = table + i * COLUMNS;
            const int64_t end = lesser(parts_of(i), last - part);
            for (int64_t own = first > part ? first - part : 0; own < end; ++own) {{
                const int64_t start = own * {part};
                sum_part(
                    numbers + which[i] * {width}, Tensors(grads, row).of, start,
                    lesser(start + {part}, row[NUMEL]), parts + (part + own) * {n_terms});
            }}
        }}
    }}
    for (int64_t i = 0, part = 0; i < n_rows; ++i) {{
        double* sums = out + table[i * COLUMNS] * {n_terms};
        for (const int64_t end = part + parts_of(i); part < end; ++part)
            for (int64_t k = 0; k < {n_terms}; ++k) sums[k] += parts[part * {n_terms} + k];
    }}
    delete[] parts;
}}
"""

# A stack of matrices is processed in bands: up to ROWS rows of a matrix. Each band has its own
# sums of columns, which are added up at the end.
AVERAGES = """
constexpr int64_t N_TERMS = {n_terms}, ROWS = 32;
constexpr bool OF_ROWS[] = {{{of_rows}}};

static inline double total(const double* x, int64_t n) {{
    constexpr int64_t LANES = 8;
    double sum = 0;
    int64_t i = 0;
    if (n >= LANES) {{
        double lanes[LANES] = {{}};
        for (; i + LANES <= n; i += LANES)
            for (int64_t j = 0; j < LANES; ++j) lanes[j] += x[i + j];
        sum = halved(lanes, LANES);
    }}
    for (; i < n; ++i) sum += x[i];
    return sum;
}}

// Adds the terms of the bands ``first`` to ``last`` of matrices of m rows and n columns to the sum
// of each row, or of each column of each band.
__attribute__((noinline)) static void sum_bands(
    const double* h, void* const* tensors, int64_t m, int64_t n, int64_t first, int64_t last,
    double* const* sums
) {{
    {before}
    double terms[N_TERMS][BLOCK];
    const int64_t bands = (m + ROWS - 1) / ROWS;
    for (int64_t band = first; band < last; ++band) {{
        const int64_t top = band / bands * m + band % bands * ROWS;
        const int64_t bottom = lesser(top + ROWS, (band / bands + 1) * m);
        for (int64_t row = top; row < bottom; ++row) for (int64_t at = 0; at < n; at += BLOCK) {{
            const int64_t block = row * n + at, size = lesser(BLOCK, n - at);
            {fetched}
            #pragma omp simd
            for (int64_t j = 0; j < size; ++j) {{
                const int64_t i = block + j;
                {each}
            }}
            for (int64_t k = 0; k < N_TERMS; ++k) {{
                if (OF_ROWS[k]) sums[k][row] += total(terms[k], size);
                else for (int64_t j = 0; j < size; ++j) sums[k][band * n + at + j] += terms[k][j];
            }}
        }}
    }}
}}

// Writes the sums over the rows and columns of each row of the table that has a gradient; ``sums``
// has the addresses of zeros for them. Which elements are summed together does not depend on the
// number of threads, so no bit of the result does either.
extern "C" void averages(
    const int64_t* grads, const int64_t* table, int64_t n_rows, const double* numbers,
    const int64_t* which, int64_t threads, double* const* sums
) {{
    for (int64_t i = 0; i < n_rows; ++i, sums += N_TERMS) {{
        const int64_t* row = table + i * COLUMNS;
        if (which[i] < 0 || !row[NUMEL]) continue;
        const double* h = numbers + which[i] * {width};
        const Tensors tensors(grads, row);
        const int64_t m = row[TENSORS - 2], n = row[TENSORS - 1], bands = (m + ROWS - 1) / ROWS;
        const int64_t all = row[NUMEL] / (m * n) * bands;
        const int64_t own = row[NUMEL] > WORTH_THREADS ? threads : 1;
        double* to[N_TERMS];
        for (int64_t k = 0; k < N_TERMS; ++k) to[k] = OF_ROWS[k] ? sums[k] : new double[all * n]();
        #pragma omp parallel for num_threads(own) if (own > 1)
        for (int64_t thread = 0; thread < own; ++thread)
            sum_bands(h, tensors.of, m, n, all * thread / own, all * (thread + 1) / own, to);
        for (int64_t k = 0; k < N_TERMS; ++k) if (!OF_ROWS[k]) {{
            for (int64_t band = 0; band < all; ++band) for (int64_t j = 0; j < n; ++j)
                sums[k][band / bands * n + j] += to[k][band * n + j];
            delete[] to[k];
        }}
    }}
}}
"""
