// SHA-256 of the leaves of a block in device memory: one thread a leaf.
//
// A leaf is at most 16,384 bytes and begins on a multiple of 16 bytes. `leaves`
// holds (offset in the block, length) for every leaf; `hashes` takes 32 bytes a
// leaf, in SHA-256's own byte order. Leaves are independent, so the kernel has
// no shared memory and no synchronisation; it is bound by the latency of the
// 64 rounds, and still hashes faster than the link delivers (see the
// performance page).
//
// leaf_sha256.ptx is made from this file by leaf_sha256.sh.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Leaf {
    u64 offset;
    u64 len;
};

__constant__ u32 K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

__device__ __forceinline__ u32 rotr(u32 x, int n) { return __funnelshift_r(x, x, n); }
__device__ __forceinline__ u32 swap(u32 x) { return __byte_perm(x, 0, 0x0123); }

// One 64-byte block, given as big-endian words in w.
__device__ __forceinline__ void compress(u32 state[8], u32 w[16]) {
    u32 a = state[0], b = state[1], c = state[2], d = state[3];
    u32 e = state[4], f = state[5], g = state[6], h = state[7];
#pragma unroll
    for (int i = 0; i < 64; i++) {
        u32 x;
        if (i < 16) {
            x = w[i];
        } else {
            u32 w15 = w[(i + 1) & 15], w2 = w[(i + 14) & 15];
            u32 s0 = rotr(w15, 7) ^ rotr(w15, 18) ^ (w15 >> 3);
            u32 s1 = rotr(w2, 17) ^ rotr(w2, 19) ^ (w2 >> 10);
            x = w[i & 15] + s0 + w[(i + 9) & 15] + s1;
            w[i & 15] = x;
        }
        u32 t1 = h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & f) ^ (~e & g)) + K[i] + x;
        u32 t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g;
        g = f;
        f = e;
        e = d + t1;
        d = c;
        c = b;
        b = a;
        a = t1 + t2;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
    state[5] += f;
    state[6] += g;
    state[7] += h;
}

extern "C" __global__ void leaf_sha256(const unsigned char *block, const Leaf *leaves, u32 count, u32 *hashes) {
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count) {
        return;
    }
    Leaf leaf = leaves[index];
    const unsigned char *bytes = block + leaf.offset;
    u32 state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    u32 w[16];

    u64 whole = leaf.len / 64;
    const uint4 *words = reinterpret_cast<const uint4 *>(bytes);
    // The next 64 bytes are loaded before this block's rounds, which hide the
    // latency of the loads.
    uint4 next[4];
    if (whole > 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) next[i] = words[i];
    }
#pragma unroll 1
    for (u64 n = 0; n < whole; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[4 * i] = swap(next[i].x);
            w[4 * i + 1] = swap(next[i].y);
            w[4 * i + 2] = swap(next[i].z);
            w[4 * i + 3] = swap(next[i].w);
        }
        if (n + 1 < whole) {
#pragma unroll
            for (int i = 0; i < 4; i++) next[i] = words[4 * (n + 1) + i];
        }
        compress(state, w);
    }

    // The tail: what is left, 0x80, zeros, the length in bits. One block if
    // the marker and the length fit behind the tail, else two.
    u32 rest = (u32)(leaf.len % 64);
    const unsigned char *tail = bytes + whole * 64;
    int blocks = rest < 56 ? 1 : 2;
#pragma unroll 1
    for (int n = 0; n < blocks; n++) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            u32 word = 0;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 at = 64 * n + 4 * i + k;
                u32 byte = at < rest ? tail[at] : (at == rest ? 0x80 : 0);
                word = (word << 8) | byte;
            }
            w[i] = word;
        }
        if (n == blocks - 1) {
            w[14] = (u32)(leaf.len >> 29);
            w[15] = (u32)(leaf.len << 3);
        }
        compress(state, w);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) hashes[8 * (u64)index + i] = swap(state[i]);
}
