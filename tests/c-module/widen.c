/* BF16 to F32, in C, from the text of ABI 1 alone: no SDK, no library.
 *
 * A BF16 is the upper half of an F32, so the conversion is exact: the bits
 * move up by 16, a NaN's included. Parameters: {"dtype": "F32"}, as the
 * shipped module cast has it.
 */
#include <stddef.h>
#include <stdint.h>

#define EXPORT(name) __attribute__((export_name(#name)))

enum { ALIGN = 64, PAGE = 65536, DIMS = 32 };

/* ---- memory: nothing is ever freed, an instance lives for one call ---- */

extern uint8_t __heap_base;
static uint32_t top;

static void *take(uint32_t len)
{
    uint64_t start = top ? top : (uint32_t)(uintptr_t)&__heap_base;
    start = (start + ALIGN - 1) / ALIGN * ALIGN;
    uint64_t end = start + len;
    uint64_t have = (uint64_t)__builtin_wasm_memory_size(0) * PAGE;
    if (end > UINT32_MAX)
        return NULL;
    if (end > have && __builtin_wasm_memory_grow(0, (end - have + PAGE - 1) / PAGE) == SIZE_MAX)
        return NULL;
    top = (uint32_t)end;
    return (void *)(uintptr_t)start;
}

/* A u32 length, then text: read by the host after a trap. Exported as a global. */
struct {
    uint32_t len;
    char text[4092];
} wm_panic;

static _Noreturn void panic(const char *why)
{
    while (*why && wm_panic.len < sizeof wm_panic.text)
        wm_panic.text[wm_panic.len++] = *why++;
    __builtin_trap();
}

/* ---- reading JSON: the request is canonical, so there are no spaces ---- */

static const char *end_of_request;

static char peek(const char *at)
{
    return at < end_of_request ? *at : 0;
}

static const char *after_string(const char *at)
{
    for (at++; peek(at) != '"'; at++) {
        if (peek(at) == '\\')
            at++;
        if (at >= end_of_request)
            panic("the request ends inside a string");
    }
    return at + 1;
}

/* The first byte after the value that begins at `at`. */
static const char *after(const char *at)
{
    int depth = 0;
    do {
        char c = peek(at);
        if (c == 0)
            panic("the request ends inside a value");
        if (c == '"') {
            at = after_string(at);
            continue;
        }
        if (c == '{' || c == '[')
            depth++;
        if (c == '}' || c == ']')
            depth--;
        at++;
        if (depth == 0 && c != '}' && c != ']')
            while (peek(at) && peek(at) != ',' && peek(at) != '}' && peek(at) != ']')
                at++;
    } while (depth > 0);
    return at;
}

static int is(const char *value, const char *json)
{
    while (*json && peek(value) == *json)
        value++, json++;
    return *json == 0;
}

/* The member `key` (with its quotes) of the object at `object`, or NULL. */
static const char *member(const char *object, const char *key)
{
    const char *at = object + 1;
    while (peek(at) == '"') {
        const char *value = after_string(at) + 1;
        if (is(at, key))
            return value;
        at = after(value);
        if (peek(at) == ',')
            at++;
    }
    return NULL;
}

static uint64_t number(const char **at)
{
    uint64_t n = 0;
    for (; peek(*at) >= '0' && peek(*at) <= '9'; (*at)++)
        n = n * 10 + (uint64_t)(**at - '0');
    return n;
}

/* ---- writing JSON ---- */

struct text {
    char *bytes;
    uint32_t len;
};

static void put(struct text *out, const char *piece)
{
    while (*piece)
        out->bytes[out->len++] = *piece++;
}

static void put_number(struct text *out, uint64_t n)
{
    char digits[20];
    int len = 0;
    do
        digits[len++] = (char)('0' + n % 10);
    while (n /= 10);
    while (len)
        out->bytes[out->len++] = digits[--len];
}

static int64_t document(const struct text *out)
{
    return (int64_t)((uint64_t)(uintptr_t)out->bytes << 32 | out->len);
}

static int64_t refuse(const char *kind, const char *what, const char *name, const char *message, const char *hint)
{
    struct text out = {take(1024), 0};
    if (!out.bytes)
        panic("there is no memory for an error");
    put(&out, "{\"error\":{\"kind\":\"");
    put(&out, kind);
    put(&out, "\",\"");
    put(&out, what);
    put(&out, "\":\"");
    put(&out, name);
    put(&out, "\",\"message\":\"");
    put(&out, message);
    put(&out, "\",\"hint\":\"");
    put(&out, hint);
    put(&out, "\"}}");
    return document(&out);
}

/* ---- the exports ---- */

EXPORT(wm_abi_v1) void marker(void)
{
}

EXPORT(wm_alloc) void *wm_alloc(uint32_t len)
{
    return take(len);
}

static void put_tiles(struct text *out, uint64_t count, uint64_t elements, uint64_t first)
{
    put(out, "{\"count\":");
    put_number(out, count);
    put(out, ",\"len\":");
    put_number(out, elements * 4);
    put(out, ",\"inputs\":[[{\"copy\":0,\"offset\":");
    put_number(out, first * 2);
    put(out, ",\"len\":");
    put_number(out, elements * 2);
    put(out, ",\"strides\":[");
    put_number(out, elements * 2);
    put(out, "]}]]}");
}

EXPORT(wm_plan) int64_t wm_plan(const char *request, uint32_t len)
{
    end_of_request = request + len;
    const char *params = member(request, "\"params\""), *inputs = member(request, "\"inputs\"");
    const char *tile_bytes = member(request, "\"tile_bytes\"");
    if (!params || !inputs || !tile_bytes)
        panic("the request is not that of ABI 1");
    if (!is(params, "{\"dtype\":\"F32\"}"))
        return refuse("params", "param", "dtype", "expected the one parameter dtype, which is F32", "write dtype = 'F32'");
    const char *input = inputs + 1;
    if (peek(input) != '{' || peek(after(input)) != ']' || !is(member(input, "\"role\""), "\"w\""))
        return refuse("input", "role", "w", "expected one input, w", "give it as w");
    if (!is(member(input, "\"dtype\""), "\"BF16\""))
        return refuse("input", "role", "w", "w must be BF16", "the module cast takes other dtypes");
    const char *outputs = member(request, "\"outputs\"");
    if (!outputs || !(is(outputs, "[\"w\"]") || is(outputs, "[]")))
        return refuse("input", "role", "w", "the one output is w", "ask for w");

    const char *shape = member(input, "\"shape\""), *at = shape;
    uint64_t elements = 1;
    for (int dims = 0; peek(at) != ']' && dims < DIMS && !is(shape, "[]"); dims++) {
        at++;
        elements *= number(&at); /* the host's tensors are below 2^53 bytes */
    }

    struct text out = {take((uint32_t)(after(shape) - shape) + 512), 0};
    if (!out.bytes)
        panic("there is no memory for a plan");
    put(&out, "{\"outputs\":[{\"role\":\"w\",\"dtype\":\"F32\",\"shape\":");
    for (const char *c = shape; c < after(shape); c++)
        out.bytes[out.len++] = *c;
    put(&out, ",\"tiles\":[");
    /* 2 bytes in and 4 out for each; whole leaves of 16,384 bytes where they fit. */
    uint64_t each = number(&tile_bytes) / 6;
    each = each > 4096 ? each / 4096 * 4096 : each ? each : 1;
    if (each > (8u << 20))
        each = 8u << 20;
    uint64_t count = elements / each, rest = elements % each;
    if (count)
        put_tiles(&out, count, each, 0);
    if (count && rest)
        put(&out, ",");
    if (rest)
        put_tiles(&out, 1, rest, count * each);
    put(&out, "]}]}");
    return document(&out);
}

struct window {
    const uint16_t *ptr;
    uint32_t len;
};

/* The run block's first fields; those after inputs_len are not needed. */
struct run_block {
    uint32_t abi, target, group, turn;
    uint64_t offset;
    uint32_t *out_ptr;
    uint32_t out_len;
    const struct window *inputs_ptr;
    uint32_t inputs_len;
};

EXPORT(wm_run) int64_t wm_run(const struct run_block *block)
{
    if (block->abi != 1 || block->inputs_len != 1)
        panic("the run block is not that of this module's plan");
    const uint16_t *from = block->inputs_ptr[0].ptr;
    uint32_t *to = block->out_ptr;
    for (uint32_t i = 0; i < block->out_len / 4; i++)
        to[i] = (uint32_t)from[i] << 16;
    return 0;
}
