// A scan as one call: the kernels of a compiled step, and the matrix products between them, step after step.
//
// What a step does is a list of `Op`s. Where its operands are, in each step, is a row of pointers.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

#define EACH _Pragma("GCC unroll 8")  // so that what a tile holds is in registers

#if defined(__AVX512F__)
constexpr int WIDTH = 16;  // numbers in a vector
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
// A tile of the result that is held in registers: rows x vectors (or rows x rows, where both sides are read along K).
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS = 5, COLUMNS = 4;
#else
constexpr int ROWS = 5, COLUMNS = 2;
#endif
constexpr int64_t SHORT = 64;

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float))));
typedef float Anywhere __attribute__((vector_size(WIDTH * sizeof(float)), aligned(4), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Anywhere*>(from); }

inline void store(float* to, Vector value) { *reinterpret_cast<Anywhere*>(to) = value; }

inline Vector load(const float* from, int64_t number) {  // the others are 0
#if defined(__AVX512F__)
    return (Vector)_mm512_maskz_loadu_ps((__mmask16)((1u << number) - 1), from);
#else
    Vector value = {};
    std::memcpy(&value, from, number * sizeof(float));
    return value;
#endif
}

inline void store(float* to, Vector value, int64_t number) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << number) - 1), (__m512)value);
#else
    std::memcpy(to, &value, number * sizeof(float));
#endif
}

inline Vector multiply_add(Vector a, Vector b, Vector sum) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

inline float total(Vector value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)value);
#else
    float sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += value[i];
    return sum;
#endif
}

enum { KERNEL, PRODUCT, READ };

struct Op {
    int64_t kind;    // KERNEL of the compiled step; PRODUCT c = a b, with more added to it; READ examples
    void* kernel;
    int64_t first;   // of its columns in the row: all pointers of a kernel; a, b, c, s; or the pool, positions, to
    int64_t number;  // of them
    int64_t batch, m, n, k;  // READ: m examples of k bytes each, of n in the pool
    int64_t add;      // c = a b; 1: s + a b
    int64_t along_n;  // how it is summed: see below
    int64_t ab, am, ak, bb, bk, bn, cb, cm, cn;  // strides: a of batch, m and k; b of batch, k and n; c likewise
    int64_t sb, sm, sn;  // of s, which may be c
};
static_assert(sizeof(Op) == 22 * sizeof(int64_t), "OP_FIELDS in replay.py");

// The operands of a product, or where a tile of it begins.
struct Place {
    const float *a, *b;
    float* c;
    const float* s;

    Place batch(const Op& op, int64_t l) const {
        return {a + l * op.ab, b + l * op.bb, c + l * op.cb, s + l * op.sb};
    }

    Place tile(const Op& op, int64_t i, int64_t j) const {
        const int64_t at = i * op.sm + j * op.sn;
        return {a + i * op.am, b + j * op.bn, c + i * op.cm + j * op.cn, s + at};
    }
};

// c = a b where a and b are contiguous along k: sums of products of vectors.
template <int R, int C>
void along_k(const Op& op, const Place& p) {
    const int64_t am = op.am, bn = op.bn, whole = op.k / WIDTH * WIDTH, left = op.k - whole;
    const float *a = p.a, *b = p.b;
    Vector sums[R][C] = {};
    for (int64_t k = 0; k < whole; k += WIDTH) {
        Vector y[C];
        EACH for (int j = 0; j < C; j++) y[j] = load(b + j * bn + k);
        EACH for (int i = 0; i < R; i++) {
            const Vector x = load(a + i * am + k);
            EACH for (int j = 0; j < C; j++) sums[i][j] = multiply_add(x, y[j], sums[i][j]);
        }
    }
    EACH for (int i = 0; i < R; i++) EACH for (int j = 0; j < C; j++) {
        Vector sum = sums[i][j];
        if (left) sum = multiply_add(load(a + i * am + whole, left), load(b + j * bn + whole, left), sum);
        const int64_t at = i * op.sm + j * op.sn;
        const float start = op.add ? p.s[at] : 0;
        p.c[i * op.cm + j * op.cn] = start + total(sum);
    }
}

// c = a b where b, c and s are contiguous along n: every number of a times vectors of b, the last of which has `left`.
template <int R, int C, bool WHOLE>
void along_n(const Op& op, const Place& p, int64_t left = WIDTH) {
    const int64_t am = op.am, ak = op.ak, bk = op.bk;
    const float *a = p.a, *b = p.b;
    Vector sums[R][C];
    EACH for (int i = 0; i < R; i++) EACH for (int j = 0; j < C; j++) {
        const int64_t at = i * op.sm + j * WIDTH;
        const Vector start = op.add ? (WHOLE ? load(p.s + at) : load(p.s + at, left)) : Vector{};
        sums[i][j] = start;
    }
    for (int64_t k = 0; k < op.k; k++) {
        Vector y[C];
        EACH for (int j = 0; j < C; j++) y[j] = WHOLE ? load(b + k * bk + j * WIDTH) : load(b + k * bk, left);
        EACH for (int i = 0; i < R; i++) {
            const Vector x = a[i * am + k * ak] - Vector{};
            EACH for (int j = 0; j < C; j++) sums[i][j] = multiply_add(x, y[j], sums[i][j]);
        }
    }
    EACH for (int i = 0; i < R; i++) EACH for (int j = 0; j < C; j++) {
        float* to = p.c + i * op.cm + j * WIDTH;
        WHOLE ? store(to, sums[i][j]) : store(to, sums[i][j], left);
    }
}

template <int R>
void rows(const Op& op, const Place& p) {
    int64_t j = 0;
    if (op.along_n) {
        for (; j + COLUMNS * WIDTH <= op.n; j += COLUMNS * WIDTH) along_n<R, COLUMNS, true>(op, p.tile(op, 0, j));
        for (; j + WIDTH <= op.n; j += WIDTH) along_n<R, 1, true>(op, p.tile(op, 0, j));
        if (j < op.n) along_n<R, 1, false>(op, p.tile(op, 0, j), op.n - j);
    } else {
        for (; j + COLUMNS <= op.n; j += COLUMNS) along_k<R, COLUMNS>(op, p.tile(op, 0, j));
        for (; j < op.n; j++) along_k<R, 1>(op, p.tile(op, 0, j));
    }
}

// b turned, so that it is contiguous along n: where sums are short, adding up each of them costs more.
const float* turned(const Op& op, const float* b) {
    static thread_local std::vector<float> room;
    room.resize(op.k * op.n);
    for (int64_t j = 0; j < op.n; j++)
        for (int64_t k = 0; k < op.k; k++) room[k * op.n + j] = b[k * op.bk + j * op.bn];
    return room.data();
}

void product(const Op& given, const Place& all) {
    Op op = given;
    const bool turn = !given.along_n && given.cn == 1 && given.sn == 1 && given.k <= SHORT;
    if (turn) op.along_n = 1, op.bk = given.n, op.bn = 1;
    for (int64_t l = 0; l < op.batch; l++) {
        Place p = all.batch(op, l);
        if (turn) p.b = turned(given, p.b);
        int64_t i = 0;
        for (; i + ROWS <= op.m; i += ROWS) rows<ROWS>(op, p.tile(op, i, 0));
        switch (op.m - i) {
            case 1: rows<1>(op, p.tile(op, i, 0)); break;
            case 2: rows<2>(op, p.tile(op, i, 0)); break;
            case 3: rows<3>(op, p.tile(op, i, 0)); break;
            case 4: rows<4>(op, p.tile(op, i, 0)); break;
        }
    }
}

void read(const Op& op, const char* pool, const int64_t* positions, char* to) {
    for (int64_t i = 0; i < op.m; i++, to += op.k) {
        if (positions[i] < 0 || positions[i] >= op.n) throw std::out_of_range("an example that is not in the pool");
        std::memcpy(to, pool + positions[i] * op.k, op.k);
    }
}

// All arguments are pointers, and a function ignores those beyond its own.
template <std::size_t... I>
void call(void* kernel, void* const* with, std::index_sequence<I...>) {
    using Kernel = void (*)(decltype((void)I, (void*)nullptr)...);
    reinterpret_cast<Kernel>(kernel)(with[I]...);
}

void take_step(const Op* ops, int64_t number, void* const* row) {
    for (const Op* op = ops; op < ops + number; op++) {
        void* const* with = row + op->first;
        const auto numbers = [&](int k) { return (float*)with[k]; };
        if (op->kind == PRODUCT)
            product(*op, {numbers(0), numbers(1), numbers(2), numbers(3)});
        else if (op->kind == READ)
            read(*op, (const char*)with[0], (const int64_t*)with[1], (char*)with[2]);
        else if (op->number <= 32)
            call(op->kernel, with, std::make_index_sequence<32>());
        else
            call(op->kernel, with, std::make_index_sequence<128>());
    }
}

// A scan of many clients. In a step of one of them, operand k is at
//     base[step % 2][k] + client * apart[step % 2][k] + (where the client's minibatches begin + step) * ahead[k].
struct Scan {
    const Op* ops;
    int64_t num_ops;
    int64_t width;         // operands
    const int64_t* apart;  // two rows: bytes from client to client, in even steps and in odd ones
    const int64_t* ahead;  // bytes from step to step
    const struct Part* parts;
    int64_t num_parts;
    const struct Leaf* leaves;
    int64_t num_leaves;
};

struct Part {  // of the work: one client's steps
    int64_t client, begin, end;
};

struct Leaf {  // of the carry: rows of the clients
    const char* from;
    int64_t apart;
    char* to;  // one after another, where each is changed from step to step
    int64_t bytes;
};

struct Room {  // of a thread
    char* const* base;    // two rows
    char* const* others;  // where a leaf of the carry is after odd steps; null: where it was
};

void take(const Scan& scan, const Part& part, const Room& room, void** row) {
    for (int64_t k = 0; k < scan.num_leaves; k++) {
        const Leaf& leaf = scan.leaves[k];
        std::memcpy(leaf.to + part.client * leaf.bytes, leaf.from + part.client * leaf.apart, leaf.bytes);
    }
    for (int64_t step = 0; step < part.end - part.begin; step++) {
        const int64_t turn = step % 2 * scan.width;
        for (int64_t k = 0; k < scan.width; k++)
            row[k] = room.base[turn + k] + part.client * scan.apart[turn + k] + (part.begin + step) * scan.ahead[k];
        take_step(scan.ops, scan.num_ops, row);
    }
    if ((part.end - part.begin) % 2 == 0) return;
    for (int64_t k = 0; k < scan.num_leaves; k++)
        if (room.others[k])
            std::memcpy(scan.leaves[k].to + part.client * scan.leaves[k].bytes, room.others[k], scan.leaves[k].bytes);
}

int64_t now() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

// All of `ops`, once, with the operands of a row. Returns what went wrong, or null.
extern "C" const char* run(const Op* ops, int64_t number, void* const* row) {
    static thread_local std::string wrong;
    try {
        take_step(ops, number, row);
        return nullptr;
    } catch (const std::exception& error) {
        wrong = error.what();
        return wrong.c_str();
    }
}

// All parts of a scan, each by the first of `threads` that is free: this one, and others that live as long as this call.
// `times` are each thread's first and last nanosecond. Returns what went wrong, or null.
extern "C" const char* scan(const Scan* scan, const Room* rooms, int64_t threads, int64_t* times) {
    static thread_local std::string wrong;
    std::atomic<int64_t> next{0};
    std::vector<std::string> errors(threads);
    const auto work = [&](int64_t thread) {
        times[2 * thread] = now();
        try {
            std::vector<void*> row(scan->width);
            for (int64_t at = next++; at < scan->num_parts; at = next++)
                take(*scan, scan->parts[at], rooms[thread], row.data());
        } catch (const std::exception& error) {
            errors[thread] = error.what();
        }
        times[2 * thread + 1] = now();
    };
    std::vector<std::thread> others;
    try {
        for (int64_t thread = 1; thread < threads; thread++) others.emplace_back(work, thread);
    } catch (const std::system_error&) {  // there may be no more of them: those that are there do it all
    }
    work(0);
    for (std::thread& other : others) other.join();
    for (const std::string& error : errors)
        if (!error.empty()) {
            wrong = error;
            return wrong.c_str();
        }
    return nullptr;
}
