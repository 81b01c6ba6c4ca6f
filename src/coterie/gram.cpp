// Products of rows with each other, in float64, and rows mixed: what `attention.py` needs of a few dozen models. It comes
// after native.cpp, whose products it uses.

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t PIECE = 248;  // numbers of a row at once: those of 8 rows, in float64, fill half of the nearest cache
constexpr int64_t WORTH = 500000;  // numbers, for another thread: it takes some 50 microseconds to begin
constexpr int LINES = 4;        // rows by rows that are multiplied in registers
#if defined(__AVX512F__)
constexpr int DOUBLES = 8;
#elif defined(__AVX__)
constexpr int DOUBLES = 4;
#else
constexpr int DOUBLES = 2;
#endif

typedef double Doubles __attribute__((vector_size(DOUBLES * sizeof(double))));
typedef float Floats __attribute__((vector_size(DOUBLES * sizeof(float))));
typedef float Loose __attribute__((vector_size(DOUBLES * sizeof(float)), aligned(4), may_alias));

inline Doubles multiply_add(Doubles a, Doubles b, Doubles sum) {
#if defined(__AVX512F__)
    return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)sum);
#elif defined(__FMA__)
    return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)sum);
#else
    return sum + a * b;
#endif
}

inline double total(Doubles value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_pd((__m512d)value);
#else
    double sum = 0;
    for (int i = 0; i < DOUBLES; i++) sum += value[i];
    return sum;
#endif
}

// sums[i][j] += a[i][k] b[j][k], vector by vector along k, which is padded with zeros to whole ones.
void add_products(const double* a, const double* b, Doubles* sums) {
    Doubles held[LINES][LINES];
    EACH for (int i = 0; i < LINES; i++) EACH for (int j = 0; j < LINES; j++) held[i][j] = sums[i * LINES + j];
    for (int64_t k = 0; k < PIECE; k += DOUBLES) {
        Doubles y[LINES];
        EACH for (int j = 0; j < LINES; j++) y[j] = *reinterpret_cast<const Doubles*>(b + j * PIECE + k);
        EACH for (int i = 0; i < LINES; i++) {
            const Doubles x = *reinterpret_cast<const Doubles*>(a + i * PIECE + k);
            EACH for (int j = 0; j < LINES; j++) held[i][j] = multiply_add(x, y[j], held[i][j]);
        }
    }
    EACH for (int i = 0; i < LINES; i++) EACH for (int j = 0; j < LINES; j++) sums[i * LINES + j] = held[i][j];
}

// Room for so many numbers, where a vector may begin.
double* aligned(std::vector<double>& room, int64_t numbers) {
    room.assign(numbers + DOUBLES, 0.0);
    double* begin = room.data();
    while (reinterpret_cast<uintptr_t>(begin) % sizeof(Doubles)) begin++;
    return begin;
}

// `into` = the numbers of all rows as doubles, less their means if `centre`d; so many numbers are a whole vector.
void widen(const float* x, int64_t rows, int64_t apart, bool centre, double* into) {
    Floats mean = {};
    if (centre) {
        const float share = 1.0f / rows;  // the sum itself may be too large for a float
        for (int64_t i = 0; i < rows; i++) mean += share * *reinterpret_cast<const Loose*>(x + i * apart);
    }
    const Doubles less = __builtin_convertvector(mean, Doubles);
    for (int64_t i = 0; i < rows; i++) {
        const Floats each = *reinterpret_cast<const Loose*>(x + i * apart);
        *reinterpret_cast<Doubles*>(into + i * PIECE) = __builtin_convertvector(each, Doubles) - less;
    }
}

// to [padded, padded], zeros so far, = X X' over the numbers from `start` to `end` of each row. With `centre`, X is less
// its mean over the rows, as float32 has it: any point in the middle would do.
void gram_of(const float* x, int64_t rows, int64_t numbers, int64_t padded, bool centre, int64_t start, int64_t end,
             double* to) {
    if (start >= end) return;
    std::vector<double> room, more;
    double* piece = aligned(room, padded * PIECE);
    Doubles* sums = reinterpret_cast<Doubles*>(aligned(more, padded * padded * DOUBLES));
    for (; start < end; start += PIECE) {
        const int64_t width = std::min(PIECE, end - start), whole = width / DOUBLES * DOUBLES;
        for (int64_t k = 0; k < whole; k += DOUBLES) widen(x + start + k, rows, numbers, centre, piece + k);
        if (width < PIECE)  // the last one: what is not there is 0
            for (int64_t i = 0; i < rows; i++) std::fill(piece + i * PIECE + whole, piece + (i + 1) * PIECE, 0.0);
        if (whole < width) {
            std::vector<float> rest(rows * DOUBLES);
            for (int64_t i = 0; i < rows; i++)
                std::copy(x + i * numbers + start + whole, x + i * numbers + start + width, &rest[i * DOUBLES]);
            widen(rest.data(), rows, DOUBLES, centre, piece + whole);
        }
        Doubles* block = sums;
        for (int64_t i = 0; i < padded; i += LINES)
            for (int64_t j = i; j < padded; j += LINES, block += LINES * LINES)
                add_products(piece + i * PIECE, piece + j * PIECE, block);
    }
    const Doubles* next = sums;
    for (int64_t i = 0; i < padded; i += LINES)
        for (int64_t j = i; j < padded; j += LINES)
            for (int k = 0; k < LINES * LINES; k++, next++)
                to[(i + k / LINES) * padded + j + k % LINES] = total(*next);
}

// Two halves of some work, at once if there is another core. A thread that is gone afterwards: those of OpenMP would
// keep the core busy, which a worker process is about to need.
template <typename Half>
void in_halves(const Half& half, bool worth) {
    std::thread other;
    if (worth && std::thread::hardware_concurrency() > 1) try {
            other = std::thread([&half] { half(1); });
        } catch (const std::system_error&) {  // there may be no more
        }
    half(0);
    other.joinable() ? other.join() : half(1);
}

}  // namespace

// total [padded, padded] += X X' for X [rows, numbers], less its mean over the rows where `centre`d. `padded` is the
// number of rows, and then some so that it is a multiple of 4. What is below the diagonal is mirrored.
extern "C" void gram(const float* x, int64_t rows, int64_t numbers, int64_t padded, int64_t centre, double* total) {
    const int64_t middle = (numbers / 2 + PIECE - 1) / PIECE * PIECE, size = padded * padded;
    std::vector<double> sums(2 * size);  // apart whoever computes them, so that they are rounded alike
    in_halves(
        [&](int which) {
            const int64_t from = which ? middle : 0, to = which ? numbers : std::min(middle, numbers);
            gram_of(x, rows, numbers, padded, centre, from, to, sums.data() + which * size);
        },
        rows * numbers > WORTH);
    for (int64_t i = 0; i < padded; i++)
        for (int64_t j = i; j < padded; j++) {
            const double value = sums[i * padded + j] + sums[size + i * padded + j];
            total[i * padded + j] += value;
            if (j > i) total[j * padded + i] += value;
        }
}

// out [n, numbers] = weights [n, rows] X.
extern "C" void mix(const float* weights, const float* x, int64_t n, int64_t rows, int64_t numbers, float* out) {
    const int64_t middle = (numbers / 2 + WIDTH - 1) / WIDTH * WIDTH;
    in_halves(
        [&](int which) {
            const int64_t from = which ? std::min(middle, numbers) : 0;
            const int64_t to = which ? numbers : std::min(middle, numbers);
            Op op = {};
            op.batch = 1, op.m = n, op.n = to - from, op.k = rows, op.along_n = 1;
            op.am = rows, op.ak = 1, op.bk = op.cm = op.sm = numbers, op.bn = op.cn = op.sn = 1;
            float* to_half = out + from;
            product(op, {weights, x + from, to_half, to_half, to_half});
        },
        rows * numbers > WORTH);
}
