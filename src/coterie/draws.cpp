// Minibatches of many clients in one call: NumPy's SeedSequence, PCG64, `permutation` and `integers`, bit for bit.

#include <cstdint>
#include <cstring>

namespace {

typedef unsigned __int128 Wide;

// What `numpy.random.default_rng(seed)` is for a seed of 64 bits.
class Generator {
  public:
    explicit Generator(uint64_t seed) {
        uint32_t pool[4], hash = 0x43b0d7e5u;
        const auto hashed = [&hash](uint32_t value) {
            value ^= hash;
            hash *= 0x931e8875u;
            value *= hash;
            return value ^ value >> 16;
        };
        for (int i = 0; i < 4; i++) pool[i] = hashed(i < 2 ? uint32_t(seed >> 32 * i) : 0);
        for (int from = 0; from < 4; from++)
            for (int to = 0; to < 4; to++)
                if (from != to) {
                    const uint32_t mixed = 0xca01f9ddu * pool[to] - 0x4973f715u * hashed(pool[from]);
                    pool[to] = mixed ^ mixed >> 16;
                }
        uint64_t words[4] = {};
        hash = 0x8b51f9ddu;
        for (int i = 0; i < 8; i++) {
            uint32_t value = pool[i % 4] ^ hash;
            hash *= 0x58f38dedu;
            value *= hash;
            words[i / 2] |= uint64_t(value ^ value >> 16) << 32 * (i % 2);
        }
        increment = (Wide(words[2]) << 64 | words[3]) << 1 | 1;
        state = increment + (Wide(words[0]) << 64 | words[1]);
        step();
    }

    uint64_t next() {  // 64 bits
        step();
        const uint64_t high = state >> 64, mixed = high ^ uint64_t(state);
        const int turn = high >> 58;
        return mixed >> turn | mixed << (-turn & 63);
    }

    uint32_t up_to(uint32_t most) {  // evenly: as many bits as it has, until they are no more
        const uint32_t bits = most ? ~0u >> __builtin_clz(most) : 0;
        uint32_t value;
        do value = half() & bits;
        while (value > most);
        return value;
    }

  private:
    void step() { state = state * (Wide(0x2360ED051FC65DA4u) << 64 | 0x4385DF649FCCF645u) + increment; }

    uint32_t half() {  // 64 bits are used as two halves, the lower one first
        if (kept) {
            kept = false;
            return rest;
        }
        const uint64_t both = next();
        kept = true;
        rest = both >> 32;
        return both;
    }

    Wide state, increment;
    bool kept = false;
    uint32_t rest = 0;
};

}  // namespace

// See `draw` in minibatches.py: for each client, `epochs` passes over its own examples, each of `longest` minibatches.
extern "C" void draw(int64_t clients, int64_t epochs, int64_t longest, int64_t width, int64_t batch, const uint64_t* seeds,
                     const int64_t* const* examples, const int64_t* sizes, int64_t* index, float* mask, int64_t* key) {
    const int64_t room = longest * width;
    for (int64_t client = 0; client < clients; client++) {
        Generator generator(seeds[client]);
        const int64_t* own = examples[client];
        const int64_t size = sizes[client], steps = (size + batch - 1) / batch, used = steps * width;
        for (int64_t epoch = 0; epoch < epochs; epoch++, index += room, mask += room) {
            std::memcpy(index, own, size * sizeof(int64_t));
            for (int64_t i = size - 1; i > 0; i--) {
                const int64_t other = generator.up_to(i), mine = index[i];
                index[i] = index[other];
                index[other] = mine;
            }
            for (int64_t i = size; i < used; i++) index[i] = index[i - size];  // and begins again
            for (int64_t i = used; i < room; i++) index[i] = own[0];
            for (int64_t i = 0; i < room; i++) mask[i] = i < size;
        }
        for (int64_t epoch = 0; epoch < epochs; epoch++, key += longest)
            for (int64_t i = 0; i < longest; i++) key[i] = i < steps ? generator.next() >> 2 : 0;
    }
}
