// ABI 1 on V8, from its specification (guest-sdk/src/abi/mod.rs) alone: an
// engine and an executor that share no code with the host.
//
//     node weightmill.mjs jobs.json > tables.json
//
// jobs.json is a list of jobs. A job says which tensors go into which module
// (the recipe's work, done by the host), and how to go about it:
//
//     {"applications": [{"module": PATH, "params": {…}, "tp": {"rank", "size"},
//                        "inputs": [{"role", "index", "dtype", "shape", "from": FROM}], "outputs": [ROLE]}],
//      "tensors": [{"name", "from": FROM}], "tile_bytes": N, "seed": N | null}
//     FROM = {"file", "offset", "dtype", "shape"} | {"application": N, "role"}
//
// With a seed the tiles of each tensor run in a shuffled order. The answer has
// for each job a table of tensors, or the error. V8 does not make NaNs
// canonical, so each row has a second digest, with every NaN replaced by one.

import { createHash } from "node:crypto";
import { closeSync, openSync, readFileSync, readSync } from "node:fs";

const ALIGN = 64;
const LEAF_BYTES = 16384;
const PANIC_MAX = 4092;
const BITS = {
  BOOL: 8, F4: 4, F6_E2M3: 6, F6_E3M2: 6, U8: 8, I8: 8, F8_E5M2: 8, F8_E4M3: 8, F8_E8M0: 8, F8_E4M3FNUZ: 8,
  F8_E5M2FNUZ: 8, I16: 16, U16: 16, F16: 16, BF16: 16, I32: 32, U32: 32, F32: 32, C64: 64, F64: 64, I64: 64, U64: 64,
};

function expect(condition, message) {
  if (!condition) throw new Error(message);
}

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

function tensorBytes({ dtype, shape }) {
  expect(dtype in BITS, `unknown dtype ${dtype}`);
  return (shape.reduce((a, b) => a * b, 1) * BITS[dtype]) / 8;
}

/** RFC 8785: numbers and strings as ECMAScript writes them, keys sorted by UTF-16. */
function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const members = Object.keys(value).sort().map((key) => `${JSON.stringify(key)}:${canonical(value[key])}`);
  return `{${members.join(",")}}`;
}

// --- Modules and calls

class Module {
  constructor(path) {
    const compiled = new WebAssembly.Module(readFileSync(path));
    expect(WebAssembly.Module.imports(compiled).length === 0, `${path} imports something`);
    const exported = new Map(WebAssembly.Module.exports(compiled).map(({ name, kind }) => [name, kind]));
    const wanted = { memory: "memory", wm_abi_v1: "function", wm_alloc: "function", wm_plan: "function", wm_run: "function", wm_panic: "global" };
    for (const [name, kind] of Object.entries(wanted)) expect(exported.get(name) === kind, `${path} exports no ${kind} ${name}`);
    const sections = WebAssembly.Module.customSections(compiled, "weightmill");
    expect(sections.length === 1, `${path} has ${sections.length} sections 'weightmill'`);
    this.compiled = compiled;
    this.metadata = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(sections[0]));
    expect(this.metadata.abi === 1, `${path} is of ABI ${this.metadata.abi}`);
  }

  /** Calls `work` with a fresh instance; a trap says what the module left in its panic buffer. */
  fresh(work) {
    const instance = new WebAssembly.Instance(this.compiled, {}).exports;
    try {
      return work(instance);
    } catch (error) {
      if (!(error instanceof WebAssembly.RuntimeError)) throw error;
      const at = instance.wm_panic.value >>> 0;
      const memory = Buffer.from(instance.memory.buffer);
      const length = at + 4 <= memory.length ? memory.readUInt32LE(at) : 0;
      const text = length > 0 && length <= PANIC_MAX ? memory.toString("utf8", at + 4, at + 4 + length) : error.message;
      throw new Error(`${this.metadata.name} trapped: ${text}`);
    }
  }

  plan(request) {
    const bytes = Buffer.from(canonical(request), "utf8");
    return this.fresh((instance) => {
      const at = allocate(instance, bytes.length);
      bytes.copy(Buffer.from(instance.memory.buffer), at);
      const answer = JSON.parse(document(instance, instance.wm_plan(at, bytes.length)));
      if (answer.error) throw new Error(`${this.metadata.name} refuses: ${answer.error.message}`);
      return { outputs: answer.outputs, scratch: answer.scratch ?? [] };
    });
  }

  /** Runs one tile; `windows` are its inputs' bytes. */
  run({ target, group, turn, tile, offset, length, args, params }, windows) {
    let end = 0;
    const place = (bytes) => {
      const start = Math.ceil(end / ALIGN) * ALIGN;
      end = start + bytes;
      return start;
    };
    place(64);
    const inputsAt = place(8 * windows.length);
    const argsAt = place(8 * args.length);
    const paramsAt = place(params.length);
    const outAt = place(length);
    const windowsAt = windows.map((window) => place(window.length));
    return this.fresh((instance) => {
      const base = allocate(instance, end);
      const memory = Buffer.from(instance.memory.buffer);
      memory.fill(0, base, base + end);
      const u32 = (at, value) => memory.writeUInt32LE(value, base + at);
      u32(0, 1);
      u32(4, target);
      u32(8, group);
      u32(12, turn);
      memory.writeBigUInt64LE(BigInt(offset), base + 16);
      u32(24, base + outAt);
      u32(28, length);
      u32(32, base + inputsAt);
      u32(36, windows.length);
      u32(40, base + argsAt);
      u32(44, args.length);
      u32(48, base + paramsAt);
      u32(52, params.length);
      u32(56, tile);
      windows.forEach((window, i) => {
        u32(inputsAt + 8 * i, base + windowsAt[i]);
        u32(inputsAt + 8 * i + 4, window.length);
        window.copy(memory, base + windowsAt[i]);
      });
      args.forEach((arg, i) => memory.writeBigInt64LE(BigInt(arg), base + argsAt + 8 * i));
      params.copy(memory, base + paramsAt);
      const packed = instance.wm_run(base);
      if (packed !== 0n) throw new Error(`${this.metadata.name}: ${JSON.parse(document(instance, packed)).message}`);
      // The memory may have grown: its buffer is another one then.
      return Buffer.from(Buffer.from(instance.memory.buffer).subarray(base + outAt, base + outAt + length));
    });
  }
}

function allocate(instance, length) {
  const at = instance.wm_alloc(length) >>> 0;
  expect(at !== 0 && at % ALIGN === 0, `wm_alloc returned ${at}`);
  expect(at + length <= instance.memory.buffer.byteLength, `wm_alloc returned ${at} for ${length} bytes, beyond the memory`);
  return at;
}

/** The text of a packed document. */
function document(instance, packed) {
  const bits = BigInt.asUintN(64, packed);
  const [at, length] = [Number(bits >> 32n), Number(bits & 0xffffffffn)];
  expect(length > 0 && at + length <= instance.memory.buffer.byteLength, `a document of ${length} bytes at ${at}`);
  return Buffer.from(instance.memory.buffer).toString("utf8", at, at + length);
}

// --- Parts, views, tiles

/** Appends the bytes of `parts` to the list `out`. `turns` are those of the enclosing repeats, outermost first. */
function gather(parts, source, turns, out) {
  for (const part of parts) {
    if ("copy" in part) {
      const strides = part.strides ?? [];
      expect(strides.length <= turns.length, "a copy has more strides than repeats around it");
      const start = (part.offset ?? 0) + sum(strides.map((stride, k) => stride * turns[k]));
      const bytes = source(part.copy);
      expect(part.len >= 1 && start + part.len <= bytes.length, `a copy of ${part.len} bytes at ${start} of ${bytes.length}`);
      out.push(bytes.subarray(start, start + part.len));
    } else if ("fill" in part) {
      out.push(Buffer.alloc(part.len, part.fill));
    } else {
      for (let turn = 0; turn < part.repeat; turn++) gather(part.parts, source, [...turns, turn], out);
    }
  }
}

function gathered(parts, source, turns) {
  const runs = [];
  gather(parts, source, turns, runs);
  return Buffer.concat(runs);
}

/** One application: plans when it is first asked for an output, and makes what is asked for. */
class Application {
  constructor(job, description, load) {
    const { module, params, tp, inputs, outputs } = description;
    this.job = job;
    this.module = load(module);
    this.params = Buffer.from(canonical(params), "utf8");
    this.inputs = inputs;
    this.request = {
      abi: 1,
      inputs: inputs.map(({ role, index, dtype, shape }) => ({ role, index, dtype, shape })),
      outputs,
      params,
      tile_bytes: job.tile_bytes,
      tp: this.module.metadata.uses_tp ? tp : { rank: 0, size: 1 },
    };
    this.made = new Map();
  }

  /** The tensor of an output role. */
  output(role) {
    this.plan ??= this.module.plan(this.request);
    const position = this.plan.outputs.findIndex((output) => output.role === role);
    expect(position >= 0, `no output '${role}' is answered`);
    const { dtype, shape } = this.plan.outputs[position];
    return { dtype, shape, bytes: this.source(this.inputs.length + position) };
  }

  /** The bytes of a source number. */
  source(number) {
    if (!this.made.has(number)) {
      this.made.set(number, null);
      this.made.set(number, this.make(number));
    }
    const bytes = this.made.get(number);
    expect(bytes !== null, `source ${number} depends on itself`);
    return bytes;
  }

  make(number) {
    if (number < this.inputs.length) return bytesFrom(this.job, this.inputs[number].from);
    const target = number - this.inputs.length;
    const { outputs, scratch } = this.plan;
    const tensor = target < outputs.length ? outputs[target] : scratch[target - outputs.length];
    expect(tensor !== undefined, `there is no source ${number}`);
    const source = (wanted) => this.source(wanted);
    const inputsOnly = (wanted) => {
      expect(wanted < this.inputs.length, "a view reads inputs only");
      return this.source(wanted);
    };
    const bytes = tensor.view ? gathered(tensor.view, inputsOnly, []) : this.tiles(target, tensor.tiles, source);
    expect(bytes.length === tensorBytes(tensor), `target ${target} has ${bytes.length} bytes, ${tensorBytes(tensor)} are due`);
    return bytes;
  }

  tiles(target, groups, source) {
    const places = [];
    let [offset, tile] = [0, 0];
    groups.forEach(({ count = 1, len }, group) => {
      for (let turn = 0; turn < count; turn++, tile++, offset += len) places.push({ group, turn, tile, offset, length: len });
    });
    const bytes = Buffer.alloc(offset);
    for (const place of shuffled(places, this.job.seed)) {
      const { inputs = [], args = [] } = groups[place.group];
      const windows = inputs.map((parts) => gathered(parts, source, [place.turn]));
      this.module.run({ target, ...place, args, params: this.params }, windows).copy(bytes, place.offset);
    }
    return bytes;
  }
}

function shuffled(items, seed) {
  if (seed === null) return items;
  let state = seed >>> 0;
  for (let i = items.length - 1; i > 0; i--) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    const j = state % (i + 1);
    [items[i], items[j]] = [items[j], items[i]];
  }
  return items;
}

// --- Files, digests

function readRange(file, offset, length) {
  const bytes = Buffer.alloc(length);
  const descriptor = openSync(file, "r");
  try {
    for (let done = 0; done < length; ) {
      const read = readSync(descriptor, bytes, done, length - done, offset + done);
      expect(read > 0, `${file} ends early`);
      done += read;
    }
  } finally {
    closeSync(descriptor);
  }
  return bytes;
}

function tensorFrom(job, from) {
  if ("application" in from) return job.built[from.application].output(from.role);
  return { dtype: from.dtype, shape: from.shape, bytes: readRange(from.file, from.offset, tensorBytes(from)) };
}

const bytesFrom = (job, from) => tensorFrom(job, from).bytes;

const sha256 = (bytes) => createHash("sha256").update(bytes).digest();

/** SHA-256 over the length and the hashes of leaves of 16,384 bytes. */
function tensorDigest(bytes) {
  const hash = createHash("sha256").update(`weightmill tensor v1\n${bytes.length}\n`);
  for (let at = 0; at < bytes.length; at += LEAF_BYTES) hash.update(sha256(bytes.subarray(at, at + LEAF_BYTES)));
  return hash.digest("hex");
}

/** The bytes with every NaN of a float dtype replaced by the canonical one. */
function withOneNan(dtype, bytes) {
  const kinds = {
    F16: [2, 0x7c00n, 0x03ffn, 0x7e00n],
    BF16: [2, 0x7f80n, 0x007fn, 0x7fc0n],
    F32: [4, 0x7f800000n, 0x007fffffn, 0x7fc00000n],
    F64: [8, 0x7ff0000000000000n, 0x000fffffffffffffn, 0x7ff8000000000000n],
    F8_E4M3: [1, 0x7fn, 0x7fn, 0x7fn],
  };
  const [size, exponent, mantissa, nan] = kinds[dtype] ?? [0, 0n, 0n, 0n];
  if (size === 0) return bytes;
  const out = Buffer.from(bytes);
  const read = { 1: "readUInt8", 2: "readUInt16LE", 4: "readUInt32LE", 8: "readBigUInt64LE" }[size];
  const write = { 1: "writeUInt8", 2: "writeUInt16LE", 4: "writeUInt32LE", 8: "writeBigUInt64LE" }[size];
  for (let at = 0; at < out.length; at += size) {
    const bits = BigInt(out[read](at));
    if ((bits & exponent) === exponent && (bits & mantissa) !== 0n) out[write](size === 8 ? nan : Number(nan), at);
  }
  return out;
}

function tableOf(job, load) {
  job.built = [];
  for (const description of job.applications) job.built.push(new Application(job, description, load));
  const table = {};
  for (const { name, from } of job.tensors) {
    const { dtype, shape, bytes } = tensorFrom(job, from);
    table[name] = { dtype, shape, digest: tensorDigest(bytes), digest_with_one_nan: tensorDigest(withOneNan(dtype, bytes)) };
  }
  return table;
}

const modules = new Map();
function load(path) {
  if (!modules.has(path)) modules.set(path, new Module(path));
  return modules.get(path);
}

const tables = JSON.parse(readFileSync(process.argv[2], "utf8")).map((job) => {
  try {
    return { tensors: tableOf(job, load) };
  } catch (error) {
    return { error: error.message };
  }
});
process.stdout.write(JSON.stringify(tables));
