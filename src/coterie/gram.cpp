// Products of rows with each other, in float64: what `attention.py` needs of a few dozen models.

#include <algorithm>
#include <cstdint>
#include <vector>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

#define ALONG _Pragma("omp simd")

constexpr int64_t PIECE = 504;  // numbers of a row at once: 30 rows of so many in float64 are in a core's own cache
constexpr int LINES = 4;        // rows by rows that are multiplied in registers
#if defined(__AVX512F__)
constexpr int DOUBLES = 8;
#elif defined(__AVX__)
constexpr int DOUBLES = 4;
#else
constexpr int DOUBLES = 2;
#endif

typedef double Doubles __attribute__((vector_size(DOUBLES * sizeof(double))));

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

// to[i][j] += sum over k of a[i][k] b[j][k]; k is padded with zeros to whole vectors.
void add_products(const double* a, const double* b, double* to, int64_t columns) {
    Doubles sums[LINES][LINES] = {};
    for (int64_t k = 0; k < PIECE; k += DOUBLES) {
        Doubles y[LINES];
        EACH for (int j = 0; j < LINES; j++) y[j] = *reinterpret_cast<const Doubles*>(b + j * PIECE + k);
        EACH for (int i = 0; i < LINES; i++) {
            const Doubles x = *reinterpret_cast<const Doubles*>(a + i * PIECE + k);
            EACH for (int j = 0; j < LINES; j++) sums[i][j] = multiply_add(x, y[j], sums[i][j]);
        }
    }
    EACH for (int i = 0; i < LINES; i++) EACH for (int j = 0; j < LINES; j++) to[i * columns + j] += total(sums[i][j]);
}

}  // namespace

// total [padded, padded] += X X' for X [rows, numbers], less its mean over the rows where `centre`d. `padded` is the
// number of rows, and then some so that it is a multiple of 4. Only blocks on and above the diagonal are computed.
extern "C" void gram(const float* x, int64_t rows, int64_t numbers, int64_t padded, int64_t centre, double* total) {
    std::vector<double> room(padded * PIECE + DOUBLES);
    double* piece = room.data();
    while (reinterpret_cast<uintptr_t>(piece) % sizeof(Doubles)) piece++;
    std::fill(piece, piece + padded * PIECE, 0.0);
    double mean[PIECE];
    for (int64_t start = 0; start < numbers; start += PIECE) {
        const int64_t width = std::min(PIECE, numbers - start);
        std::fill(mean, mean + PIECE, 0.0);
        if (centre) {
            for (int64_t i = 0; i < rows; i++)
                ALONG for (int64_t k = 0; k < width; k++) mean[k] += x[i * numbers + start + k];
            ALONG for (int64_t k = 0; k < width; k++) mean[k] /= rows;
        }
        for (int64_t i = 0; i < rows; i++) {
            double* to = piece + i * PIECE;
            ALONG for (int64_t k = 0; k < width; k++) to[k] = x[i * numbers + start + k] - mean[k];
            std::fill(to + width, to + PIECE, 0.0);
        }
        for (int64_t i = 0; i < padded; i += LINES)
            for (int64_t j = i; j < padded; j += LINES)
                add_products(piece + i * PIECE, piece + j * PIECE, total + i * padded + j, padded);
    }
}
