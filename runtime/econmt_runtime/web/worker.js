// The worker of econmt.js: reads a model that `econmt export --web` wrote, and translates with econmt.wasm, the C library of
// econmt. Encoder, search and scores are those of econmt_runtime, and subwords those of SentencePiece; tests compare both.

"use strict";

const [PAD, UNK, BOS, EOS] = [0, 1, 2, 3];
const FORMAT = "econmt-runtime-4";
const AGAIN = "export the model again";

class Failed extends Error {}

// ---------------------------------------------------------------------------------------------------------------------
// Subwords

// Values by number of a message in the format of protocol buffers.
function readMessage(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const values = new Map();
  let at = 0;
  const number = () => {
    let value = 0;
    for (let factor = 1; ; factor *= 128) {
      const byte = view.getUint8(at++);
      value += (byte & 127) * factor;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const key = number();
    const [name, kind] = [Math.floor(key / 8), key % 8];
    let value;
    if (kind === 0) value = number();
    else if (kind === 2) {
      const size = number();
      value = bytes.subarray(at, at + size);
      at += size;
    } else if (kind === 5) {
      value = view.getFloat32(at, true);
      at += 4;
    } else if (kind === 1) at += 8;
    else throw new Failed("not a SentencePiece model");
    if (at > bytes.length) throw new Failed("the SentencePiece model is cut off");
    if (values.has(name)) values.get(name).push(value);
    else values.set(name, [value]);
  }
  return values;
}

const one = (message, name, otherwise) => message.get(name)?.[0] ?? otherwise;
const decoded = (bytes) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);

function utf8(code) {
  if (code < 0x80) return [code];
  if (code < 0x800) return [0xc0 | (code >> 6), 0x80 | (code & 63)];
  if (code < 0x10000) return [0xe0 | (code >> 12), 0x80 | ((code >> 6) & 63), 0x80 | (code & 63)];
  return [0xf0 | (code >> 18), 0x80 | ((code >> 12) & 63), 0x80 | ((code >> 6) & 63), 0x80 | (code & 63)];
}

// SentencePiece's normalizer: longest rules of a double array first, and blanks.
class Normalizer {
  constructor(message, suffix, marked) {
    this.marked = marked;
    this.prefixed = Boolean(one(message, 3, 1));
    this.trims = Boolean(one(message, 4, 1));
    this.space = one(message, 5, 1) ? "\u2581" : " ";
    this.suffix = suffix;
    this.rules = new Map();
    const blob = one(message, 2, new Uint8Array());
    if (!blob.length) return;
    const size = new DataView(blob.buffer, blob.byteOffset).getUint32(0, true);
    this.trie = new Uint32Array(blob.slice(4, 4 + size).buffer);
    this.replacements = blob.slice(4 + size);
  }

  rule(place) {
    if (!this.rules.has(place)) {
      const end = this.replacements.indexOf(0, place);
      this.rules.set(place, decoded(this.replacements.subarray(place, end < 0 ? undefined : end)));
    }
    return this.rules.get(place);
  }

  // What the text becomes at a place, and how long it was.
  prefix(text, at) {
    const marked = this.marked.find((each) => text.startsWith(each, at));
    if (marked) return [marked, marked.length];
    const first = text.codePointAt(at) > 0xffff ? 2 : 1;
    if (!this.trie) return [text.substr(at, first), first];
    let [size, place] = [0, 0];
    const below = (unit) => (unit >>> 10) << ((unit & 512) >>> 6);
    let node = below(this.trie[0]);
    search: for (let i = at; i < text.length; ) {
      const code = text.codePointAt(i);
      let unit = 0;
      for (const byte of utf8(code)) {
        node ^= byte;
        unit = this.trie[node];
        if ((unit & 0x800000ff) !== byte) break search;
        node ^= below(unit);
      }
      i += code > 0xffff ? 2 : 1;
      if (unit & 256) [size, place] = [i - at, this.trie[node] & 0x7fffffff];
    }
    return size ? [this.rule(place), size] : [text.substr(at, first), first];
  }

  text(input) {
    let at = 0;
    while (this.trims && at < input.length) {
      const [found, size] = this.prefix(input, at);
      if (found !== " ") break;
      at += size;
    }
    if (at === input.length) return "";
    let made = this.prefixed && !this.suffix ? this.space : "";
    for (let blank = this.trims; at < input.length; ) {
      let [found, size] = this.prefix(input, at);
      if (blank) found = found.replace(/^ +/, "");
      if (found) {
        made += found.replaceAll(" ", this.space);
        blank = this.trims && found.endsWith(" ");
      }
      at += size;
    }
    let end = made.length;
    while (this.trims && end && made[end - 1] === this.space) end--;
    return made.slice(0, end) + (this.prefixed && this.suffix ? this.space : "");
  }
}

// Pairs of neighbours, of which `pop` returns the one with the highest score, of equal ones the leftmost.
class Agenda {
  items = [];

  push(item) {
    const { items } = this;
    let at = items.push(item) - 1;
    while (at) {
      const above = (at - 1) >> 1;
      if (!this.before(item, items[above])) break;
      items[at] = items[above];
      at = above;
    }
    items[at] = item;
  }

  pop() {
    const { items } = this;
    const top = items[0];
    const item = items.pop();
    if (!items.length) return top;
    let at = 0;
    for (;;) {
      let below = 2 * at + 1;
      if (below >= items.length) break;
      if (below + 1 < items.length && this.before(items[below + 1], items[below])) below++;
      if (!this.before(items[below], item)) break;
      items[at] = items[below];
      at = below;
    }
    items[at] = item;
    return top;
  }

  before(one, other) {
    return one.score > other.score || (one.score === other.score && one.left < other.left);
  }
}

const [NORMAL, UNKNOWN, CONTROL, MARKED, UNUSED, BYTE] = [1, 2, 3, 4, 5, 6];

// Vocabulary of a SentencePiece model of type bpe or unigram.
class Subwords {
  constructor(bytes) {
    const model = readMessage(bytes);
    const trainer = readMessage(one(model, 2, new Uint8Array()));
    const [type, suffix] = [one(trainer, 3, 1), Boolean(one(trainer, 24, 0))];
    if (type !== 1 && type !== 2) throw new Failed("not a SentencePiece model of type bpe or unigram");
    this.unigram = type === 1;
    this.unknownText = trainer.has(44) ? decoded(one(trainer, 44)) : " \u2047 ";
    this.bytewise = Boolean(one(trainer, 35, 0));
    this.list = [];
    this.pieces = new Map();
    this.reserved = new Map();
    this.byteIds = [];
    let [least, most] = [3.4028234663852886e38, 1.1754943508222875e-38];
    for (const [id, entry] of (model.get(1) ?? []).entries()) {
      const piece = readMessage(entry);
      const [text, score, kind] = [decoded(one(piece, 1, new Uint8Array())), one(piece, 2, 0), one(piece, 3, NORMAL)];
      this.list.push({ text, score, kind });
      ([NORMAL, MARKED, UNUSED].includes(kind) ? this.pieces : this.reserved).set(text, id);
      if (kind === UNKNOWN) this.unknown = id;
      if (kind === BYTE) this.byteIds[parseInt(text.slice(3), 16)] = id;
      if (kind === NORMAL) [least, most] = [Math.min(least, score), Math.max(most, score)];
    }
    if (["<pad>", "<unk>", "<s>", "</s>"].some((text, id) => this.list[id]?.text !== text))
      throw new Failed("not a vocabulary of econmt: its first subwords are not <pad> <unk> <s> </s>");
    this.unknownScore = Math.fround(least - 10);
    this.most = most;
    this.longest = Math.max(0, ...[...this.pieces.keys()].map((text) => text.length));
    this.marked = this.list.filter(({ kind }) => kind === MARKED).map(({ text }) => text);
    this.marked.sort((one, other) => other.length - one.length);
    const spec = readMessage(one(model, 3, new Uint8Array()));
    this.normalizer = new Normalizer(spec, suffix, this.marked);
    const back = readMessage(one(model, 5, new Uint8Array()));
    this.back = one(back, 2, "").length ? new Normalizer(back, false, []) : null;
    this.drops = this.normalizer.prefixed || this.normalizer.trims;
  }

  get size() {
    return this.list.length;
  }

  // For each subword 1 if it goes on with the word before it.
  get joins() {
    return (this.joining ??= Uint8Array.from(this.list, ({ kind, text }) => ![UNKNOWN, CONTROL].includes(kind) && ofWord(text)));
  }

  // Length of the character, or of the marked symbol, at a place.
  step(text, at) {
    const marked = this.marked.find((each) => text.startsWith(each, at));
    return marked ? marked.length : text.codePointAt(at) > 0xffff ? 2 : 1;
  }

  // Ids of a line, without BOS and EOS. `written` gets the text of each.
  encode(line, written = []) {
    const text = this.normalizer.text(line);
    const ids = [];
    let before = false;
    for (const { id, begin, end } of this.unigram ? this.best(text) : this.merged(text)) {
      const unknown = id === this.unknown;
      const piece = text.slice(begin, end);
      if (unknown && this.bytewise) {
        for (const byte of new TextEncoder().encode(piece)) written[ids.push(this.byteIds[byte]) - 1] = "";
        written[ids.length - 1] = piece;
      } else if (unknown && before) written[ids.length - 1] += piece;
      else written[ids.push(id) - 1] = piece;
      before = unknown;
    }
    return ids;
  }

  // Byte-pair encoding: the neighbours whose union has the highest score are merged first.
  merged(text) {
    const [begins, ends, previous, next, frozen] = [[], [], [], [], []];
    for (let at = 0; at < text.length; ) {
      const size = this.step(text, at);
      frozen.push(this.marked.includes(text.substr(at, size)));
      previous.push(begins.length - 1);
      begins.push(at);
      ends.push((at += size));
      next.push(at < text.length ? begins.length : -1);
    }
    const [agenda, halves] = [new Agenda(), new Map()];
    const consider = (left, right) => {
      if (left < 0 || right < 0 || frozen[left] || frozen[right] || ends[right] - begins[left] > this.longest) return;
      const piece = text.slice(begins[left], ends[right]);
      const id = this.pieces.get(piece);
      if (id === undefined) return;
      agenda.push({ score: this.list[id].score, left, right, size: piece.length });
      if (this.list[id].kind === UNUSED) halves.set(piece, ends[left] - begins[left]);
    };
    for (let i = 1; i < begins.length; i++) consider(i - 1, i);
    while (agenda.items.length) {
      const { left, right, size } = agenda.pop();
      if (begins[left] === ends[left] || begins[right] === ends[right]) continue;
      if (ends[left] - begins[left] + ends[right] - begins[right] !== size) continue;
      ends[left] = ends[right];
      begins[right] = ends[right];
      next[left] = next[right];
      if (next[right] >= 0) previous[next[right]] = left;
      consider(previous[left], left);
      consider(left, next[left]);
    }
    const made = [];
    const divide = (begin, end) => {
      const piece = text.slice(begin, end);
      const id = this.reserved.get(piece) ?? this.pieces.get(piece) ?? this.unknown;
      const half = this.list[id].kind === UNUSED ? halves.get(piece) : undefined;
      if (half === undefined) made.push({ id, begin, end });
      else {
        divide(begin, begin + half);
        divide(begin + half, end);
      }
    };
    for (let i = text ? 0 : -1; i >= 0; i = next[i]) divide(begins[i], ends[i]);
    return made;
  }

  // Unigram language model: the division with the highest sum of scores, in float32 as SentencePiece adds them.
  best(text) {
    const scores = new Float32Array(text.length + 1);
    const starts = new Int32Array(text.length + 1).fill(-1);
    const ids = new Int32Array(text.length + 1);
    const offer = (begin, end, id, exact) => {
      const score = Math.fround(exact);
      if (starts[end] >= 0 && !(score > scores[end])) return;
      [scores[end], starts[end], ids[end]] = [score, begin, id];
    };
    for (let begin = 0; begin < text.length; ) {
      const single = begin + (text.codePointAt(begin) > 0xffff ? 2 : 1);
      let known = false;
      for (let end = begin + 1; end <= Math.min(text.length, begin + this.longest); end++) {
        const id = this.pieces.get(text.slice(begin, end));
        if (id === undefined || this.list[id].kind === UNUSED) continue;
        let { score } = this.list[id];
        if (this.list[id].kind === MARKED)
          score = Math.fround(new TextEncoder().encode(text.slice(begin, end)).length * this.most) - 0.1;
        offer(begin, end, id, score + scores[begin]);
        known ||= end === single;
      }
      if (!known) offer(begin, single, this.unknown, this.unknownScore + scores[begin]);
      begin = single;
    }
    const made = [];
    for (let end = text.length; end > 0; end = starts[end]) made.push({ id: ids[end], begin: starts[end], end });
    return made.reverse();
  }

  decode(ids) {
    let [text, first, seen, bytes] = ["", true, false, []];
    const flush = () => {
      if (bytes.length) text += new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes));
      bytes = [];
    };
    for (const id of ids) {
      let { text: piece, kind } = this.list[id];
      if (kind === BYTE) {
        bytes.push(parseInt(piece.slice(3), 16));
        continue;
      }
      flush();
      if (seen || text) first = false;
      seen = false;
      if (kind === CONTROL) continue;
      if (kind === UNKNOWN) {
        text += this.unknownText;
        continue;
      }
      if (first && this.drops && piece.startsWith("\u2581")) {
        piece = piece.slice(1);
        seen = !this.normalizer.trims;
      }
      text += piece.replaceAll("\u2581", " ");
    }
    flush();
    return this.back ? this.back.text(text) : text;
  }
}

const BLANKS = " \t\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000";
const AROUND = new RegExp(`^[${BLANKS}]+|[${BLANKS}]+$`, "g");
const SPACE = "\\t\\n\\v\\f\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const OUTSIDE = new RegExp(`^[${SPACE}]+|[${SPACE}]+$`, "g");
const SIGN = "[!#-%'*-;=?-~\\u00c0-\\u0dff]|&amp;|&(?!#?[\\p{L}\\p{N}_]+;)";
// Addresses, as in econmt_runtime.text.
const ADDRESS = new RegExp(
  `(?<![A-Za-z0-9])(?:[A-Za-z][A-Za-z0-9+.-]{1,20}://|www\\.)(?:${SIGN}|\\((?:${SIGN})*\\))*` +
    `(?:[#-%/0-9=@A-Za-z&\\u00c0-\\u0dff]|\\((?:${SIGN})*\\))(?<!&)` +
    `|(?<![\\p{L}\\p{N}_.%+-])(?:mailto:)?[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\\.[A-Za-z0-9-]{1,63})+`,
  "gu",
);
const hasWords = (text) => /\p{L}/u.test(text) && /\p{L}/u.test(text.replace(ADDRESS, " "));
const oneLine = (text) => text.replace(/[\n\r]/g, " ").replace(OUTSIDE, "");

// ---------------------------------------------------------------------------------------------------------------------
// The C library

// Fields of the structures of kernels.h that are used here: whole numbers of 64 bits, and pointers with a star.
const STRUCTURES = {
  weight: "kind inputs outputs *values *sums *scales *bias",
  product_int8: "rows inputs outputs *left left_stride *weight *sums *scales *bias *start start_stride *output output_stride",
  products_by_owner: "rows most *left left_stride *weights *owners *output output_stride",
  layer_sequence:
    "rows positions hidden cell backwards *recurrent *vectors *table *places *lengths *outputs outputs_stride *last last_stride",
  best_words: "rows vocabulary count *logits logits_stride *barred *owners *skipped *values *words *end",
  search_step: "rows *search *owners *tokens *h *c *output *coverage *seen *log_probs",
  beam_search:
    "sentences positions beam steps nbest layers size compared summed cell fed residual contexts asked embedded watched " +
    "coverage width *weights *vectors *embedding *bytes *scales *shares *known *ids *barred *keys *score *gain *shift " +
    "*coverage_key *coverage_shares *coverage_attention *coverage_recurrent *values *context_bias *output_gain *output_shift " +
    "*padding *first *limits *penalties *watch *stopped *ended *count *grown *seen",
};

function layout(text) {
  let size = 0;
  const places = {};
  for (const field of text.split(" ")) {
    const wide = field.startsWith("*") ? 4 : 8;
    size = Math.ceil(size / wide) * wide;
    places[field.replace("*", "")] = size;
    size += wide;
  }
  return { places, size: Math.ceil(size / 8) * 8 };
}

// The module and its memory. Addresses are numbers; views are made again after every call, which may grow the memory.
const [PAGE, BLOCK] = [1 << 16, 1 << 20]; // bytes of a page, and that are taken from the system at least

class Library {
  layouts = Object.fromEntries(Object.entries(STRUCTURES).map(([name, text]) => [name, layout(text)]));
  blocks = [];
  place = { block: -1, place: Infinity };

  constructor(exports) {
    this.exports = exports;
    exports._initialize();
    exports.econmt_start(0, 0, 0, 3);
    for (const [name, { size }] of Object.entries(this.layouts)) {
      const text = this.take(name.length + 1);
      this.bytes.set(new TextEncoder().encode(`${name}\0`), text);
      if (Number(exports.econmt_size(text)) !== size) throw new Failed("econmt.wasm is of another version than econmt.js");
    }
  }

  refresh() {
    const { buffer } = this.exports.memory;
    if (this.seen === buffer) return;
    this.seen = buffer;
    [this.u8, this.i8, this.i32] = [new Uint8Array(buffer), new Int8Array(buffer), new Int32Array(buffer)];
    [this.f32, this.f64] = [new Float32Array(buffer), new Float64Array(buffer)];
  }

  get bytes() {
    this.refresh();
    return this.u8;
  }

  get signed() {
    this.refresh();
    return this.i8;
  }

  get whole() {
    this.refresh();
    return this.i32;
  }

  get floats() {
    this.refresh();
    return this.f32;
  }

  // Address of so many bytes, aligned to 64. They stay until `reset` is given the place that `mark` returned before.
  take(bytes) {
    const room = bytes + 64;
    let { block, place } = this.place;
    while (!(place + room <= this.blocks[block]?.end)) {
      if (block + 1 >= this.blocks.length) this.grow(room);
      if (place + room <= this.blocks[block]?.end) break;
      place = this.blocks[++block].begin;
    }
    this.place = { block, place: place + room };
    return (place + 63) & ~63;
  }

  // Takes memory from the system, as the C library does for itself: what is next to the last block becomes a part of it.
  grow(room) {
    let begin;
    try {
      begin = this.exports.memory.grow(Math.ceil(Math.max(room, BLOCK) / PAGE)) * PAGE;
    } catch {
      throw new Failed("not enough memory for this text; translate less at a time");
    }
    const end = this.exports.memory.buffer.byteLength;
    const last = this.blocks[this.blocks.length - 1];
    if (last?.end === begin) last.end = end;
    else this.blocks.push({ begin, end });
  }

  // What has been taken so far stays for good.
  keep() {
    this.kept = this.place;
  }

  mark() {
    return this.place;
  }

  reset(place = this.kept) {
    this.place = place;
  }

  zeros(bytes) {
    const address = this.take(bytes);
    this.bytes.fill(0, address, address + bytes);
    return address;
  }

  // Whole numbers of 64 bits, not negative.
  longs(values) {
    const address = this.zeros(8 * values.length);
    this.writeLongs(address, values, values.length);
    return address;
  }

  writeLongs(address, values, count) {
    const to = this.whole;
    for (let i = 0, at = address >> 2; i < count; i++, at += 2) [to[at], to[at + 1]] = [values[i], 0];
  }

  fill(name, address, values) {
    const { places } = this.layouts[name];
    const to = this.whole;
    for (const [field, value] of Object.entries(values)) to[(address + places[field]) >> 2] = Number(value ?? 0);
  }

  structure(name, values) {
    const address = this.zeros(this.layouts[name].size);
    this.fill(name, address, values);
    return address;
  }

  call(name, address) {
    if (this.exports[`econmt_${name}`](address, 1n)) throw new Failed("not enough memory for this text; translate less at a time");
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The model

const CELLS = {
  lstm: { number: 0, gates: 4, states: 2 },
  gru: { number: 1, gates: 3, states: 1 },
  ssru: { number: 2, gates: 2, states: 1 },
  lnlstm: { number: 3, gates: 4, states: 2 },
  lnglstm: { number: 4, gates: 4, states: 2 },
};
const COVERAGES = ["none", "count", "fertility", "tanh", "sigmoid", "relu", "softrelu", "gru"];
const VECTORS = [
  ...["score", "gain", "shift", "vectors", "context_bias", "output_gain", "output_shift"],
  ...["coverage_key", "coverage_attention", "coverage_recurrent"],
];
const STEP = ["words", "own", "query", "readout", "output", "coverage"];
const KINDS = { F32: 4, I8: 1, I16: 2, I32: 4 };
const [FLOATS, BYTES] = [0, 2];
const SHARES = 1 << 25; // bytes of words' shares of gates that are kept
const EPSILON = 1e-5;

class Model {
  constructor(exports, config, content, subwords) {
    this.library = new Library(exports);
    this.config = config;
    [this.source, this.target] = subwords;
    this.arrays = {};
    this.read(content);
    const { decoder } = config;
    this.cell = CELLS[decoder.cell];
    this.contexts = !decoder.fed && decoder.layers > 1;
    this.size = this.arrays["output.bias"].shape[0];
    this.tables = { source: this.table("source") };
    this.tables.target = config.one_table ? this.tables.source : this.table("target");
    this.tables.output = config.tied_output ? this.tables.target : this.table("output");
    const rows = [this.tables.source.rows, this.tables.output.rows, this.arrays["output.bias"].shape[0]];
    if (rows[0] !== this.source.size || rows[1] !== this.target.size || rows[2] !== rows[1])
      throw new Failed(`the model does not fit its vocabulary; ${AGAIN}`);
    this.products = {};
    for (const weight of Object.keys(config.inputs)) {
      const name = weight.slice(0, -".weight".length);
      if (!["source", "target", "output"].includes(name)) this.product(name);
    }
    const layers = Array.from({ length: decoder.layers }, (_, number) => [`layers.${number}.read`, `layers.${number}.recur`]);
    const own = ["words", "own", ...(this.contexts ? ["query"] : []), "coverage"];
    const names = [...STEP.map((name) => (own.includes(name) ? name : "")), ...layers.flat()];
    const { library } = this;
    const stride = library.layouts.weight.size;
    this.weights = library.zeros(names.length * stride);
    names.forEach((name, number) => {
      const from = this.products[name]?.address;
      if (from) library.bytes.copyWithin(this.weights + number * stride, from, from + stride);
    });
    const gates = this.products.words.outputs;
    const shares = this.size * gates * 4 <= SHARES;
    [this.shares, this.known] = shares ? [library.take(this.size * gates * 4), library.zeros(this.size)] : [0, 0];
    this.skipped = library.longs([PAD, BOS]);
    library.keep();
  }

  // Copies the arrays of a safetensors file into the memory of the module.
  read(content) {
    const { library } = this;
    const length = Number(new DataView(content).getBigUint64(0, true));
    if (!(length < content.byteLength - 8)) throw new Failed(`the model's file is cut off; load it again`);
    const header = JSON.parse(decoded(new Uint8Array(content, 8, length)));
    for (const [name, { dtype, shape, data_offsets: range }] of Object.entries(header)) {
      if (name === "__metadata__") continue;
      const [begin, end] = range;
      const count = shape.reduce((product, each) => product * each, 1);
      const bytes = end - begin;
      if (!KINDS[dtype] || bytes !== count * KINDS[dtype] || 8 + length + end > content.byteLength)
        throw new Failed(`${name} does not fit its shape; ${AGAIN}`);
      const address = library.take(bytes);
      library.bytes.set(new Uint8Array(content, 8 + length + begin, bytes), address);
      this.arrays[name] = { address, shape, dtype, count };
    }
    if (header.__metadata__?.format === undefined || !this.arrays["output.bias"]) throw new Failed(`not a model; ${AGAIN}`);
  }

  address(name) {
    return this.arrays[name]?.address ?? 0;
  }

  // Embeddings, and the output layer with the same matrix or its own; of 8 bits, with the sums of the rows.
  table(name) {
    const { address, shape: [rows, width], dtype } = this.arrays[`${name}.weight`];
    const table = { address, rows, width, steps: this.address(`${name}.steps`), bytes: dtype === "I8" };
    if (table.bytes) {
      const from = this.library.signed;
      table.sums = new Int32Array(rows);
      for (let row = 0, at = address; row < rows; row++) for (let k = 0; k < width; k++) table.sums[row] += from[at++];
    }
    return table;
  }

  // Fills the structure of a product whose weight is an array. Those of floats are arranged in groups of 16 outputs.
  product(name) {
    const { library } = this;
    const inputs = this.config.inputs[`${name}.weight`];
    const { address, shape, dtype } = this.arrays[`${name}.weight`];
    const bytes = dtype === "I8";
    const outputs = bytes ? this.arrays[`${name}.steps`].shape[0] : shape[0];
    const groups = Math.ceil(outputs / 16);
    const fits = bytes ? shape[0] === groups && shape[1] === Math.ceil(inputs / 64) * 16 : shape[1] === inputs;
    if (!fits) throw new Failed(`${name} has another size than the model; ${AGAIN}`);
    let values = address;
    if (!bytes) {
      values = library.zeros(groups * 16 * inputs * 4);
      const all = library.floats;
      for (let row = 0, from = address >> 2; row < outputs; row++)
        for (let k = 0, to = (values >> 2) + (row >> 4) * 16 * inputs + (row & 15); k < inputs; k++, to += 16) all[to] = all[from++];
    }
    const fields = { kind: bytes ? BYTES : FLOATS, inputs, outputs, values, bias: this.address(`${name}.bias`) };
    if (bytes) Object.assign(fields, { sums: this.address(`${name}.sums`), scales: this.address(`${name}.steps`) });
    this.products[name] = { address: library.structure("weight", fields), outputs, inputs };
  }

  // Address of the product of rows with a weight.
  apply(name, left, rows) {
    const { library } = this;
    const { address, outputs, inputs } = this.products[name];
    const output = library.take(rows * outputs * 4);
    library.call(
      "products_by_owner",
      library.structure("products_by_owner", {
        ...{ rows, most: outputs, left, left_stride: inputs, weights: address, owners: library.zeros(8 * rows), output },
        output_stride: outputs,
      }),
    );
    return output;
  }

  embed(table, words) {
    const { library } = this;
    const to = library.take(words.length * table.width * 4);
    const { floats, signed } = library;
    words.forEach((word, row) => {
      let [at, from] = [(to >> 2) + row * table.width, table.address + word * table.width];
      if (table.bytes) for (let k = 0, step = floats[(table.steps >> 2) + word]; k < table.width; k++) floats[at++] = signed[from++] * step;
      else floats.copyWithin(at, (table.address >> 2) + word * table.width, (table.address >> 2) + (word + 1) * table.width);
    });
    return to;
  }

  // Outputs (S, B, E) of the encoder, and its last ones (B, E).
  encode(sentences, steps) {
    const { library, config } = this;
    const batch = sentences.length;
    const words = new Map();
    const places = new Array(steps * batch);
    for (let t = 0; t < steps; t++)
      sentences.forEach((ids, row) => {
        const word = ids[t] ?? PAD;
        if (!words.has(word)) words.set(word, words.size);
        places[t * batch + row] = words.get(word);
      });
    let [read, rows, at] = [this.embed(this.tables.source, [...words.keys()]), words.size, library.longs(places)];
    const lengths = library.longs(sentences.map((ids) => ids.length));
    const cell = CELLS[config.encoder.cell];
    let [outputs, last, width] = [0, 0, 0];
    config.encoder.directions.forEach((ways, number) => {
      const names = Array.from({ length: ways }, (_, way) => `encoder.${number}.${way}`);
      const sizes = names.map((name) => this.products[`${name}.read`].outputs / cell.gates);
      const below = outputs;
      width = sizes.reduce((sum, size) => sum + size, 0);
      outputs = library.zeros(steps * batch * width * 4);
      last = library.take(batch * width * 4);
      let column = 0;
      names.forEach((name, way) => {
        const mark = library.mark();
        const table = this.apply(`${name}.read`, read, rows);
        library.call(
          "layer_sequence",
          library.structure("layer_sequence", {
            ...{ rows: batch, positions: steps, hidden: sizes[way], cell: cell.number, places: at, lengths, table },
            ...{ backwards: ways > 1 ? way === 1 : config.encoder.reverse_input, recurrent: this.products[`${name}.recur`]?.address },
            ...{ vectors: this.address(`${name}.vectors`), outputs: outputs + 4 * column, outputs_stride: width },
            ...{ last: last + 4 * column, last_stride: width },
          }),
        );
        library.reset(mark);
        column += sizes[way];
      });
      if (config.encoder.residual && number > 0) {
        const { floats } = library;
        for (let k = 0, to = outputs >> 2, from = below >> 2; k < steps * batch * width; k++) floats[to++] += floats[from++];
      }
      [read, rows] = [outputs, steps * batch];
      if (number + 1 < config.encoder.directions.length) at = library.longs(Array.from({ length: rows }, (_, k) => k));
    });
    return { outputs, last, width };
  }

  // The structure of the search for sentences, with EOS, and the decoder's first state, a row for each sentence.
  begin(sentences) {
    const { library, config } = this;
    const [batch, { decoder }] = [sentences.length, config];
    const steps = Math.max(...sentences.map((ids) => ids.length));
    const { outputs, last, width } = this.encode(sentences, steps);
    const values = library.take(batch * steps * width * 4);
    for (let t = 0; t < steps; t++)
      for (let row = 0; row < batch; row++) {
        const from = outputs + (t * batch + row) * width * 4;
        library.bytes.copyWithin(values + (row * steps + t) * width * 4, from, from + width * 4);
      }
    const summary = decoder.average ? this.mean(values, sentences, steps, width) : last;
    const flat = batch * steps;
    let keys = this.products.keys ? this.apply("keys", values, flat) : values;
    const compared = this.products.keys?.outputs ?? width;
    let summed = this.apply("values", values, flat);
    let sums = this.products.values.outputs;
    if (decoder.scale !== 1) keys = this.scaled(keys, flat * compared, Math.fround(decoder.scale));
    if (this.contexts) {
      const both = library.take(flat * (sums + width) * 4);
      for (let row = 0; row < flat; row++) {
        const to = both + row * (sums + width) * 4;
        library.bytes.copyWithin(to, summed + row * sums * 4, summed + (row + 1) * sums * 4);
        library.bytes.copyWithin(to + sums * 4, values + row * width * 4, values + (row + 1) * width * 4);
      }
      [summed, sums] = [both, sums + width];
    }
    const padding = library.zeros(flat);
    sentences.forEach((ids, row) => library.bytes.fill(1, padding + row * steps + ids.length, padding + (row + 1) * steps));
    const { target } = this.tables;
    const search = library.structure("beam_search", {
      ...{ sentences: batch, positions: steps, beam: 1, nbest: 1, compared, summed: sums, keys, values: summed },
      ...{ padding, cell: this.cell.number, contexts: this.contexts, coverage: COVERAGES.indexOf(decoder.coverage) },
      ...Object.fromEntries(["layers", "size", "fed", "residual", "asked", "width"].map((name) => [name, decoder[name]])),
      ...Object.fromEntries(VECTORS.map((name) => [name, this.address(name)])),
      ...{ weights: this.weights, shares: this.shares, known: this.known, embedded: target.width, scales: target.steps },
      [target.bytes ? "bytes" : "embedding"]: target.address,
      coverage_shares: this.products.coverage_shares ? this.apply("coverage_shares", values, flat) : 0,
    });
    return { search, steps, ...this.first(summary, batch) };
  }

  scaled(from, count, factor) {
    const to = this.library.take(count * 4);
    const { floats } = this.library;
    for (let k = 0; k < count; k++) floats[(to >> 2) + k] = floats[(from >> 2) + k] * factor;
    return to;
  }

  mean(values, sentences, steps, width) {
    const { library } = this;
    const to = library.take(sentences.length * width * 4);
    const { floats } = library;
    sentences.forEach((ids, row) => {
      for (let k = 0; k < width; k++) {
        let sum = 0;
        for (let t = 0; t < steps; t++) sum += floats[(values >> 2) + (row * steps + t) * width + k];
        floats[(to >> 2) + row * width + k] = sum / ids.length;
      }
    });
    return to;
  }

  // First h and c (layers, B, H).
  first(summary, batch) {
    const { library, config: { decoder } } = this;
    const { layers, size } = decoder;
    const bytes = layers * batch * size * 4;
    const [h, c] = [library.zeros(bytes), library.zeros(bytes)];
    if (!this.products.start) return { h, c };
    const exact = this.apply("start", summary, batch);
    const { floats } = library;
    const [gain, shift] = [this.address("start.gain") >> 2, this.address("start.shift") >> 2];
    const { states } = this.cell;
    for (let row = 0; row < batch; row++)
      for (let part = 0; part < states * layers; part++) {
        const from = (exact >> 2) + (row * states * layers + part) * size;
        const values = Float64Array.from(floats.subarray(from, from + size));
        if (gain) {
          const mean = values.reduce((sum, value) => sum + value, 0) / size;
          const spread = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / size;
          const factor = 1 / Math.sqrt(spread + EPSILON);
          for (let k = 0; k < size; k++)
            values[k] = (values[k] - mean) * (floats[gain + part * size + k] * factor) + floats[shift + part * size + k];
        }
        const [kind, layer] = [Math.floor(part / layers), part % layers];
        for (let k = 0; k < size; k++) {
          const [value, place] = [Math.tanh(values[k]), (layer * batch + row) * size + k];
          if (kind === 0) floats[(h >> 2) + place] = value;
          if (kind === states - 1) floats[(c >> 2) + place] = value;
        }
      }
    return { h, c };
  }

  // Makes the output layer of all words, which stays.
  keepWhole() {
    if (this.whole) return;
    this.library.reset();
    this.whole = this.outputWeight(null);
    this.library.keep();
  }

  // The output layer with the given words, ascending; null: all of them. Its fields in the structure of a weight.
  outputWeight(words) {
    const { library } = this;
    const { address, rows, width, steps, bytes, sums } = this.tables.output;
    const count = words ? words.length : rows;
    const [groups, wide] = [Math.ceil(count / 16), bytes ? Math.ceil(width / 64) * 64 : 4 * width];
    const values = library.zeros(groups * 16 * wide);
    const [bias, scales, totals] = [library.take(groups * 64), library.take(groups * 64), library.take(groups * 64)];
    const { whole, floats, signed } = library;
    const biases = this.address("output.bias") >> 2;
    for (let n = 0; n < count; n++) {
      const word = words ? words[n] : n;
      floats[(bias >> 2) + n] = floats[biases + word];
      let to = (values >> 2) + (n >> 4) * 4 * wide + (n & 15);
      if (bytes) {
        floats[(scales >> 2) + n] = floats[(steps >> 2) + word];
        whole[(totals >> 2) + n] = sums[word];
      }
      if (bytes && width % 4) {
        for (let k = 0, from = address + word * width; k < width; k++) signed[4 * (to + (k >> 2) * 16) + (k & 3)] = signed[from + k];
      } else {
        for (let from = (address + word * width * (bytes ? 1 : 4)) >> 2, end = from + width / (bytes ? 4 : 1); from < end; to += 16) whole[to] = whole[from++];
      }
    }
    for (let n = count; n < 16 * groups; n++) whole[(totals >> 2) + n] = 0;
    const fields = { kind: bytes ? BYTES : FLOATS, inputs: width, outputs: count, values, bias };
    return bytes ? { ...fields, sums: totals, scales } : fields;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Glossaries, as in econmt/data/text/glossary.py and econmt/decoding/constraints, which say why

const SPACELESS =
  "\\u0e00-\\u0fff\\u1000-\\u109f\\u1780-\\u17ff\\u3040-\\u30ff\\u3400-\\u4dbf\\u4e00-\\u9fff\\uf900-\\ufaff\\u{20000}-\\u{3ffff}";
const UNIT = new RegExp(`[${SPACELESS}]|(?:(?![${SPACELESS}])[\\p{L}\\p{N}_])+|[^${SPACE}]`, "gu");
const OF_WORD = new RegExp(`^(?![${SPACELESS}])[\\p{L}\\p{M}\\p{N}]`, "u");
const BEGINS_SPACELESS = new RegExp(`^[${SPACELESS}]`, "u");
const CSV = /\s*(?:"((?:[^"]|"")*)"|([^,"\s][^,]*|))(,|$)/y;
const MARKER = "\ufffe"; // in no text: what follows is divided as within a word
const normalized = (text) => text.normalize("NFC").replace(AROUND, "");
const ofWord = (sign = "") => OF_WORD.test(sign);
const lastSign = (text) => Array.from(text.slice(-2)).pop();

// Small letters, and letters of both cases as one; Turkish and Azeri have two letters i.
const hasDotless = (language) => /^(tr|tur|az|aze)(?![a-z])/i.test(language);
const lower = (text, language) => (hasDotless(language) ? text.toLocaleLowerCase("tr") : text.toLowerCase());
function folded(text, language) {
  const small = hasDotless(language) ? lower(text, language) : text;
  return Array.from(small, (sign) => (sign === "\u0131" ? sign : sign.toLowerCase().toUpperCase().toLowerCase())).join("");
}

// Term and translation of a line: divided by a tab, or an equals sign, or as CSV.
function columns(line) {
  const text = normalized(line);
  if (line.includes("\t")) return line.split("\t");
  if (!text.startsWith('"') && (text.includes("=") || !text.includes(","))) return text.split(/=(.*)/s).slice(0, 2);
  const found = [];
  CSV.lastIndex = 0;
  for (let match; (match = CSV.exec(text)); ) {
    found.push(match[1]?.replaceAll('""', '"') ?? match[2]);
    if (!match[3]) return found;
  }
  return [];
}

class Glossary {
  // `given`: a text with a term a line, or a list of pairs.
  constructor(given, vocabulary, language) {
    this.language = language;
    this.terms = new Map();
    const pairs = typeof given === "string" ? given.split(/\r\n?|\n/).map((line) => (/^\s*(#|$)/.test(line) ? null : columns(line))) : given;
    if (!Array.isArray(pairs)) throw new Failed('glossary: use a list of terms with their translations, as [["dog", "Hund"]]');
    const targets = new Map();
    pairs.forEach((pair, number) => {
      if (pair === null) return;
      const where = `glossary, line ${number + 1}`;
      const isPair = Array.isArray(pair) && pair.length === 2 && pair.every((each) => typeof each === "string");
      const [source, target] = isPair ? pair.map(normalized) : [];
      if (!target || !this.units(source).length) throw new Failed(`${where}: write a term and its translation, as dog = Hund`);
      if ((targets.get(source) ?? target) !== target) throw new Failed(`${where}: ${source} has another translation in a line before`);
      if (targets.has(source)) return;
      targets.set(source, target);
      const words = this.units(source).map(([word]) => word);
      const key = JSON.stringify(words.map((word) => folded(word, language)));
      const ids = this.written(target, vocabulary);
      if (!ids.length || ids.includes(UNK)) throw new Failed(`${where}: the model cannot write ${target}; change or remove it`);
      const small = words.every((word) => word === lower(word, language));
      const term = { words: words.join(" "), small, size: words.length, phrase: { ids, endsWord: ofWord(lastSign(target)) } };
      this.terms.set(key, [...(this.terms.get(key) ?? []), term].sort((one, other) => one.small - other.small));
    });
    this.sizes = [...new Set([...this.terms.values()].map(([{ size }]) => size))].sort((one, other) => other - one);
  }

  units(text) {
    return [...text.matchAll(UNIT)];
  }

  // Ids of a translation within a sentence.
  written(text, vocabulary) {
    const ids = vocabulary.encode(text);
    if (ids.includes(UNK) || !BEGINS_SPACELESS.test(text)) return ids;
    const marked = vocabulary.encode(MARKER + text);
    return marked.slice(marked.indexOf(UNK) + 1);
  }

  // Phrases of the terms in a normalised sentence, in order, and where each term begins and ends.
  occurrences(text) {
    const words = this.terms.size ? this.units(text) : [];
    const inOneCase = words.map(([word]) => folded(word, this.language));
    const found = [];
    for (let at = 0; at < words.length; ) {
      const fits = (size) => {
        if (size > words.length - at) return false;
        const alike = this.terms.get(JSON.stringify(inOneCase.slice(at, at + size))) ?? [];
        const own = alike.length ? words.slice(at, at + size).map(([word]) => word).join(" ") : "";
        const term = alike.find(({ words: capitals, small }) => small || capitals === own);
        const end = words[at + size - 1];
        if (term) found.push({ phrase: term.phrase, start: words[at].index, end: end.index + end[0].length });
        return Boolean(term);
      };
      at += this.sizes.find(fits) ?? 1;
    }
    return found;
  }
}

const [OTHER, JOINING, BETWEEN, ENDED] = [-1, -2, -2, -1];
const MOST_READINGS = 32;
const inOrder = (one, other) => {
  const field = ["remaining", "kind", "written", "unmet"].find((name) => one[name] !== other[name]);
  return field === undefined ? 0 : one[field] < other[field] ? -1 : 1;
};

// The automaton of econmt/decoding/constraints/inclusion.py: its states are lists of readings.
class Phrases {
  constructor(phrases, joins) {
    const name = ({ ids, endsWord }) => `${ids.map((id) => String(id).padStart(9, "0"))} ${Number(endsWord)}`;
    const names = phrases.map(name).sort();
    this.joins = joins;
    this.kinds = [...new Map(phrases.map((phrase) => [name(phrase), phrase]))].sort(([one], [other]) => (one < other ? -1 : 1));
    this.bits = this.kinds.map(([own]) => names.reduce((bits, each, at) => (each === own ? bits | (1n << BigInt(at)) : bits), 0n));
    this.kindOf = phrases.map((phrase) => this.kinds.findIndex(([own]) => own === name(phrase)));
    this.kinds = this.kinds.map(([, phrase]) => phrase);
    this.begun = new Map();
    this.kinds.forEach(({ ids }, kind) => this.begun.set(ids[0], [...(this.begun.get(ids[0]) ?? []), kind]));
    this.tokens = [...new Set(phrases.flatMap(({ ids }) => ids))].sort((one, other) => one - other);
    this.size = phrases.reduce((sum, { ids }) => sum + ids.length, 0);
    this.start = [{ remaining: this.size, kind: BETWEEN, written: 0, unmet: (1n << BigInt(phrases.length)) - 1n }];
  }

  // How often each kind of phrase is missing.
  missing([{ unmet }]) {
    return this.bits.map((bits) => (unmet & bits).toString(2).replaceAll("0", "").length);
  }

  after(progress, token) {
    if (!this.begun.has(token) && progress.every(({ kind }) => kind === BETWEEN)) return progress;
    const made = progress.flatMap((reading) => this.read(reading, token)).sort(inOrder);
    const kept = [];
    for (const reading of made) {
      const alike = kept.filter(({ kind }) => (kind === BETWEEN) === (reading.kind === BETWEEN)).length;
      const covers = ({ kind, written, unmet }) =>
        (kind === BETWEEN || (kind === reading.kind && written === reading.written)) && !(unmet & ~reading.unmet);
      if (alike < MOST_READINGS && !kept.some(covers)) kept.push(reading);
    }
    return kept;
  }

  read(reading, token) {
    const { remaining, kind, written, unmet } = reading;
    if (kind >= 0) return this.kinds[kind].ids[written] === token ? [this.written(reading)] : [];
    if (kind === ENDED && (token === JOINING || (token >= 0 && this.joins(token)))) return [];
    const found = [{ remaining, kind: BETWEEN, written: 0, unmet }];
    for (const begun of this.begun.get(token) ?? []) {
      const alike = unmet & this.bits[begun];
      if (!alike) continue;
      const highest = 1n << BigInt(alike.toString(2).length - 1);
      found.push(this.written({ remaining, kind: begun, written: 0, unmet: unmet ^ highest }));
    }
    return found;
  }

  written({ remaining, kind, written, unmet }) {
    const { ids, endsWord } = this.kinds[kind];
    if (written + 1 < ids.length) return { remaining: remaining - 1, kind, written: written + 1, unmet };
    return { remaining: remaining - 1, kind: endsWord ? ENDED : BETWEEN, written: 0, unmet };
  }
}

// True if a text has phrases at places of their own, none of them part of a longer word.
function containsAll(text, phrases) {
  const numbers = new Map();
  const joining = [];
  const signs = (each) => {
    let before = false;
    return Array.from(each, (sign) => {
      const joins = before && ofWord(sign);
      before = ofWord(sign);
      if (!numbers.has(sign + joins)) joining[numbers.size] = joins;
      if (!numbers.has(sign + joins)) numbers.set(sign + joins, numbers.size);
      return numbers.get(sign + joins);
    });
  };
  const wanted = phrases.map((phrase) => ({ ids: signs(phrase), endsWord: ofWord(lastSign(phrase)) }));
  const automaton = new Phrases(wanted, (number) => joining[number]);
  return signs(text).reduce((progress, sign) => automaton.after(progress, sign), automaton.start)[0].remaining === 0;
}

const [LEAST_ATTENTION, LEAST_OF_MODEL, MOST_SPENT, COST] = [0.5, 0.1, 0.9, 1];

// Chooses the continuations of one sentence's hypotheses, which must contain phrases: econmt/decoding/constraints/batch.py and
// anchors.py. A hypothesis has `held`: its progress, and of each phrase the step that began it and the attention spent on it.
class Chooser {
  constructor({ phrases, spans }, joins, length, penalty) {
    this.automaton = new Phrases(phrases, joins);
    Object.assign(this, { phrases, spans, joins, penalty, step: 0 });
    this.anchored = spans.some((span) => span.length);
    const growth = phrases.reduce((sum, { ids }, at) => sum + (spans[at].length ? ids.length - spans[at].length : 0), 0);
    this.usual = penalty(length + growth);
    const none = phrases.map(() => 0);
    this.start = { progress: this.automaton.start, begun: none, spent: none, given: 0, lowered: 0 };
  }

  // Phrases that a token would begin after the progress.
  begins(progress, token) {
    if (progress[0].kind >= 0) return this.phrases.map(() => false);
    const missing = this.automaton.missing(progress);
    return this.phrases.map(({ ids }, at) => ids[0] === token && missing[this.automaton.kindOf[at]] > 0);
  }

  // The continuations that enter the beam. Of `rows`: what they hold, total, logits, their sum and attention. `idOf` and
  // `wordOf`: ids of words and back; `room`: tokens that may follow.
  extend(rows, { idOf, wordOf, free, room, beam }) {
    this.step++;
    const needs = rows.map(({ held }) => held.progress[0].remaining);
    const least = free < beam ? 0 : Math.min(...needs);
    const isLost = ({ begun, spent }) => this.spans.some((span, at) => span.length && !begun[at] && spent[at] >= MOST_SPENT);
    const lost = rows.map(({ held }) => isLost(held));
    const better = free < beam || lost.includes(false);
    const offers = [];
    rows.forEach((row, number) => {
      if (lost[number] && better) return;
      const { held, logits } = row;
      const possible = (word) => (room < 0 ? word === EOS : word !== PAD && word !== BOS);
      const attention = this.spans.map((span) => span.reduce((sum, at) => sum + row.attention[at], 0));
      const paid = COST * attention.reduce((sum, each) => sum + each, 0);
      const [first] = this.highest(logits, 1, possible);
      const anywhere = !this.anchored || (first === EOS && needs[number] === least) || needs[number] >= room;
      const away = (token, share, possible) => {
        const begins = this.begins(held.progress, token);
        const here = (at) => !this.spans[at].length || (possible(at) && attention[at] >= share);
        return !anywhere && begins.includes(true) && !begins.some((each, at) => each && here(at));
      };
      const after = (token) => {
        const counts = this.automaton.tokens.includes(token) && !away(token, LEAST_OF_MODEL, (at) => !held.begun[at]);
        return this.automaton.after(held.progress, counts ? token : this.joins(token) ? JOINING : OTHER);
      };
      const candidates = new Set();
      for (const token of this.automaton.tokens) {
        const advances = this.automaton.after(held.progress, token)[0]?.remaining === needs[number] - 1;
        const withheld = away(token, LEAST_ATTENTION, (at) => held.spent[at] < MOST_SPENT && !held.begun[at]);
        if (advances && !withheld) candidates.add(wordOf(token));
      }
      // Of the words that undo a complete phrase, by going on with its last word, only the best counts.
      const [other, joining] = [OTHER, JOINING].map((token) => this.automaton.after(held.progress, token)[0].remaining);
      const undoes = (word) => other < joining && this.joins(idOf(word));
      const may = (word) => possible(word) && !(word === EOS && needs[number]);
      for (const word of this.highest(logits, beam, (word) => may(word) && !undoes(word))) candidates.add(word);
      if (other < joining) for (const word of this.highest(logits, 1, (word) => may(word) && undoes(word))) candidates.add(word);
      for (const word of candidates.add(EOS)) {
        if (!may(word)) continue;
        const value = Math.fround(logits[word] - row.sum);
        const progress = after(idOf(word));
        const { remaining } = progress[0];
        const outside = remaining >= needs[number];
        const cost = this.anchored && outside ? paid : 0;
        const total = row.total + value - cost;
        if (!(total > -Infinity) || remaining > Math.max(room, 0)) continue;
        const bank = this.automaton.size - remaining + (remaining === 0 && needs[number] === 0 ? 1 : 0);
        offers.push({ number, word, value, total, cost, bank, progress, outside, attention, lapsed: remaining > needs[number] });
      }
    });
    return this.shared(offers).slice(0, beam).map((offer) => ({ ...offer, held: this.grown(rows[offer.number].held, offer, idOf) }));
  }

  // The best of each bank, those with most tokens of phrases first, then the second of each, and so on.
  shared(offers) {
    offers.sort((one, other) => other.bank - one.bank || other.total - one.total);
    offers.forEach((offer, at) => (offer.rank = at && offers[at - 1].bank === offer.bank ? offers[at - 1].rank + 1 : 0));
    return offers.sort((one, other) => one.rank - other.rank);
  }

  // Places of the highest values that may be, equal ones in their order.
  highest(values, count, may = () => true) {
    const found = [];
    for (let at = 0, bar = -Infinity; at < values.length; at++) {
      if (!(values[at] > bar) || !may(at)) continue;
      let place = found.length;
      while (place && values[at] > values[found[place - 1]]) place--;
      found.splice(place, 0, at);
      if (found.length > count) found.pop();
      if (found.length === count) bar = values[found[count - 1]];
    }
    return found;
  }

  // What a hypothesis holds after a continuation.
  grown(held, { word, value, cost, progress, outside, attention, lapsed }, idOf) {
    const spent = held.spent.map((each, at) => each + (outside && attention[at] >= LEAST_ATTENTION ? attention[at] : 0));
    const begun = [...held.begun];
    if (!outside) {
      const begins = this.begins(held.progress, idOf(word));
      const [at] = this.highest(attention.map((each, phrase) => (begins[phrase] && !begun[phrase] ? each : -1)), 1);
      if (begins[at] && !begun[at]) begun[at] = this.step;
    }
    if (lapsed) {
      const missing = this.automaton.missing(progress);
      const { kindOf } = this.automaton;
      const lastFirst = [...begun.keys()].filter((at) => begun[at]).sort((one, other) => begun[other] - begun[one]);
      for (const at of lastFirst) {
        const same = [...begun.keys()].filter((each) => kindOf[each] === kindOf[at]);
        if (same.filter((each) => begun[each]).length > same.length - missing[kindOf[at]]) [begun[at], spent[at]] = [0, MOST_SPENT];
      }
    }
    return { progress, begun, spent, given: held.given + (outside ? 0 : value), lowered: held.lowered + cost };
  }

  // What the score of a translation gains that ends a hypothesis now: length must not outweigh terms that are improbable.
  added({ given }, penalty) {
    return this.anchored ? given / Math.min(this.usual, penalty) - given / penalty : 0;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The search

const [FEWEST_ROWS, MOST_ROWS, POSITIONS] = [24, 48, 1000]; // of hypotheses that grow together, half of econmt_runtime's
const CHARACTERS = 50; // for each token of the longest source; longer lines are cut before they are divided
const EXTRA = 10;
const MOST_WORDS = 64;
const TURN = 16; // milliseconds of work between two looks at messages

const pause = () =>
  new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(0);
  });

// Translations of a search, and of the next one as many as are missing; the best of the first stays first.
function merged(kept, found, most) {
  const known = new Set(kept.map(({ ids }) => ids.join()));
  const more = found.filter(({ ids }) => !known.has(ids.join())).slice(0, most - kept.length);
  return [...kept.slice(0, 1), ...[...kept.slice(1), ...more].sort((one, other) => other.score - one.score)];
}

class Translator {
  constructor(model) {
    this.model = model;
    // The tags by which a sentence of a model of several target languages says its own.
    this.tags = new Map((model.config.targets ?? []).map((code) => [code, model.source.encode(`<2${code}>`)]));
    const lexicon = model.arrays.lexicon;
    if (lexicon) this.lexicon = { ...lexicon, width: lexicon.shape[1] };
    this.turn = performance.now();
  }

  // Lets messages come in now and then, and stops if one of them cancelled this call.
  async rest(call) {
    const now = performance.now();
    if (now - this.turn < TURN) return;
    await pause();
    this.turn = performance.now();
    if (call.cancelled) throw new Failed("cancelled");
  }

  settings({ beam, nbest = 1, shortlist, glossary, target, ...unknown } = {}) {
    for (const name in unknown) throw new Failed(`${name}: unknown option; use beam, nbest, shortlist, glossary or target`);
    const { decoding } = this.model.config;
    const options = { ...decoding, beam: beam ?? decoding.beam_size, nbest, shortlist, tag: this.tags.get(target) };
    const whole = (value, least, most) => Number.isInteger(value) && value >= least && value <= most;
    if (!whole(options.beam, 1, MOST_WORDS)) throw new Failed(`beam: use a whole number from 1 to ${MOST_WORDS}`);
    if (!whole(nbest, 1, options.beam)) throw new Failed(`nbest: use a whole number from 1 to the beam size, ${options.beam}`);
    if (shortlist !== undefined && !whole(shortlist, 0, Infinity)) throw new Failed("shortlist: use 0, for any word, or more");
    if (shortlist && !this.lexicon) throw new Failed("shortlist: the model has no lexicon; export it with one");
    if (target !== undefined && !this.tags.has(target)) {
      const codes = [...this.tags.keys()].join(", ");
      throw new Failed(`target: ${codes ? `use one of ${codes}` : "the model has one target language; leave it out"}`);
    }
    const key = JSON.stringify(glossary ?? []);
    if (key !== this.key) this.glossary = new Glossary(glossary ?? [], this.model.target, this.model.config.languages[0]);
    this.key = key;
    return options;
  }

  // Ids of a line, whether it was cut, and what its terms ask for, or null; no ids for a line that is copied. The tag comes
  // before a line that has words and no tag of its own.
  encode(line, tag) {
    const cap = this.model.config.max_input_length;
    const most = cap * CHARACTERS;
    const terms = this.glossary.occurrences(normalized(line));
    const phrases = terms.map(({ phrase }) => phrase);
    if (!hasWords(line) && this.satisfies(phrases.length ? this.model.target.encode(line) : [], phrases)) return { ids: [], cut: false, terms: null };
    let text = line;
    if (line.length > most) text = Array.from(line.slice(0, 2 * most)).slice(0, most).join("");
    text = normalized(text);
    const written = [];
    const ids = this.model.source.encode(text, written);
    if (tag && ![...this.tags.values()].some((own) => own.every((id, at) => id === ids[at]))) {
      ids.unshift(...tag);
      written.unshift(...tag.map(() => ""));
    }
    const cut = ids.length > cap || text.length < normalized(line).length;
    return { ids: ids.slice(0, cap), cut, terms: terms.length ? this.placed(text, written, terms, cap) : null };
  }

  // Phrases and source positions of the terms of a normalised text, those after the first `cap` tokens left out.
  placed(text, written, terms, cap) {
    const isBlank = (sign) => sign === " " || sign === "\u2581";
    const signs = written.flatMap((piece, at) => Array.from(piece).filter((sign) => !isBlank(sign)).map(() => at));
    const owners = [];
    let next = 0;
    for (const sign of text) {
      const owner = isBlank(sign) ? undefined : signs[next++];
      for (let k = 0; k < sign.length; k++) owners.push(owner);
    }
    const placed = terms.filter(({ end }) => end <= text.length).map(({ phrase, start, end }) => {
      return { phrase, span: [...new Set(owners.slice(start, end))].filter((at) => at !== undefined) };
    });
    const kept = placed.filter(({ span }) => span.every((at) => at < cap));
    return kept.length ? { phrases: kept.map(({ phrase }) => phrase), spans: kept.map(({ span }) => span) } : null;
  }

  // True if a translation has the phrases as text, whatever the subwords.
  satisfies(ids, phrases) {
    const text = (each) => normalized(this.model.target.decode(each)).split(" ").filter(Boolean).join(" ");
    return !phrases.length || containsAll(text(ids), phrases.map(({ ids: own }) => text(own)).filter(Boolean));
  }

  async translate(lines, given, call = {}, progress = () => {}) {
    if (!Array.isArray(lines) || lines.some((line) => typeof line !== "string"))
      throw new Failed('translate takes a list of lines of text, as translate(["A dog."])');
    const options = this.settings(given);
    lines.forEach((line, number) => {
      const found = /\p{Cs}/u.exec(line);
      const code = found?.[0].charCodeAt(0).toString(16).toUpperCase();
      if (found) throw new Failed(`line ${number + 1}: the character U+${code} is not allowed in text; remove it`);
    });
    if (!this.lexicon || options.shortlist === 0) this.model.keepWhole();
    const sources = [];
    for (const line of lines) {
      sources.push(this.encode(line, options.tag));
      await this.rest(call);
    }
    const results = lines.map((line) => {
      const entry = { text: oneLine(line), score: 0, logProbability: 0 };
      return { ...entry, nbest: entry.text ? [entry] : [], cut: false };
    });
    const order = [...sources.keys()].filter((i) => sources[i].ids.length);
    order.sort((one, other) => sources[other].ids.length - sources[one].ids.length);
    // Without the glossary first; what falls short is searched again, and keeps the translations that do not.
    const kept = lines.map(() => []);
    let done = lines.length - order.length;
    const turn = async (waiting, constrained) => {
      const short = [];
      for (let at = 0; at < waiting.length; ) {
        const rows = Math.min(MOST_ROWS, Math.max(FEWEST_ROWS, Math.floor(POSITIONS / sources[waiting[at]].ids.length)));
        const batch = waiting.slice(at, at + Math.max(1, Math.floor(rows / options.beam)));
        at += batch.length;
        try {
          const found = await this.search(batch.map((i) => sources[i]), options, call, constrained);
          batch.forEach((i, number) => {
            const all = found[number];
            if (!all.length) throw new Failed(`line ${i + 1}: the model gives no finite probability to any translation`);
            const { terms, cut } = sources[i];
            const good = terms && !constrained ? all.filter(({ ids }) => this.satisfies(ids, terms.phrases)) : all;
            if (good[0] === all[0]) kept[i] = merged(kept[i], good, options.nbest);
            if (good.length < all.length) return short.push(i);
            const nbest = kept[i].map(({ ids, ...rest }) => ({ text: oneLine(this.model.target.decode(ids)), ...rest }));
            results[i] = { ...nbest[0], nbest, cut };
            done++;
          });
        } finally {
          this.model.library.reset();
        }
        progress(done, lines.length);
      }
      return short;
    };
    await turn(await turn(order, false), true);
    return results;
  }

  // The words that a sentence may use, ascending, `more` among them; null: all.
  allowed(ids, { shortlist }, more) {
    if (!this.lexicon || shortlist === 0) return null;
    const { address, width, dtype } = this.lexicon;
    const { library, config, size } = this.model;
    const words = new Set([PAD, UNK, BOS, EOS, ...more]);
    const [table, at] = dtype === "I16" ? [new Uint16Array(library.bytes.buffer), address >> 1] : [library.whole, address >> 2];
    for (const id of [BOS, ...ids, EOS]) {
      if (config.joint) words.add(id);
      for (let k = 0; k < Math.min(width, shortlist ?? width); k++) words.add(table[at + id * width + k]);
    }
    const found = [...words];
    if (found.some((word) => word >= size)) throw new Failed(`the lexicon has words outside of the vocabulary; ${AGAIN}`);
    return Uint32Array.from(found).sort();
  }

  // n best translations of each sentence, with the phrases of its terms if `constrained`.
  async search(sources, options, call, constrained) {
    const { model } = this;
    const { library, config: { decoder, ...config } } = model;
    const [count, beam] = [sources.length, options.beam];
    const sentences = sources.map(({ ids }) => [...ids, EOS]);
    const { search, steps, h, c } = model.begin(sentences);
    const penalty = (length) => ((options.length_penalty_beta + length) / (options.length_penalty_beta + 1)) ** options.length_penalty_alpha;
    const choosers = sources.map(({ ids, terms }) => (constrained ? new Chooser(terms, (id) => model.target.joins[id] === 1, ids.length + 1, penalty) : null));
    const lists = sentences.map((ids, i) => this.allowed(ids, options, choosers[i]?.automaton.tokens ?? []));
    const size = lists[0] ? Math.max(...lists.map((list) => list.length)) : model.size;
    const stride = library.layouts.weight.size;
    const weights = library.zeros(count * stride);
    lists.forEach((list, i) => library.fill("weight", weights + i * stride, list ? model.outputWeight(list) : model.whole));
    const width = Math.min(beam, size);
    const limits = sources.map(({ ids: { length } }, i) => {
      const limit = Math.floor(length * options.max_output_factor) + EXTRA;
      const most = Math.min(limit, Math.max(length + EXTRA, Math.floor(config.max_length * options.max_output_factor) + EXTRA));
      return Math.max(most, choosers[i]?.automaton.size ?? 0);
    });

    const most = count * beam;
    const covered = steps * decoder.width;
    const parts = [decoder.layers * decoder.size, decoder.layers * decoder.size, decoder.size, covered];
    let state = [h, c, library.zeros(most * decoder.size * 4), library.zeros(most * covered * 4)];
    let spare = parts.map((part) => library.take(most * part * 4));
    state = state.map((from, kind) => {
      const to = library.take(most * parts[kind] * 4);
      library.bytes.copyWithin(to, from, from + count * parts[kind] * 4);
      return to;
    });
    const [ownersAt, tokensAt] = [library.take(8 * most), library.take(8 * most)];
    const [seen, logits] = [library.take(4 * most * steps), library.take(4 * most * size)];
    const [values, numbers, ends] = [library.take(4 * most * width), library.take(8 * most * width), library.take(4 * most)];
    const step = library.structure("search_step", { search, owners: ownersAt, tokens: tokensAt, seen });
    const layer = library.structure("products_by_owner", {
      ...{ most: size, left_stride: decoder.size, weights, owners: ownersAt, output: logits, output_stride: size },
    });
    const choice = library.structure("best_words", {
      ...{ vocabulary: size, count: width, logits, logits_stride: size, skipped: model.skipped, values, words: numbers, end: ends },
    });

    // Rows, the growing hypotheses: sentence, last word, log-probability.
    let rows = sentences.map((_, sentence) => ({ sentence, token: BOS, total: 0, held: choosers[sentence]?.start }));
    const finished = sentences.map(() => []);
    const best = sentences.map(() => new Array(options.nbest).fill(-Infinity));
    const trace = [];
    for (let position = 1; rows.length; position++) {
      await this.rest(call);
      library.writeLongs(ownersAt, rows.map((row) => row.sentence), rows.length);
      library.writeLongs(tokensAt, rows.map(({ sentence, token }) => (lists[sentence] ? lists[sentence][token] : token)), rows.length);
      library.fill("search_step", step, { rows: rows.length, h: state[0], c: state[1], output: state[2], coverage: covered ? state[3] : 0 });
      library.call("search_step", step);
      const mark = library.mark();
      const read = model.products.readout ? model.apply("readout", state[2], rows.length) : state[2];
      const inputs = model.products.readout?.outputs ?? decoder.size;
      library.fill("products_by_owner", layer, { rows: rows.length, left: read, left_stride: inputs });
      library.call("products_by_owner", layer);
      library.reset(mark);
      library.fill("best_words", choice, { rows: rows.length });
      library.call("best_words", choice);
      const grown = [];
      for (let from = 0, to; from < rows.length; from = to) {
        const { sentence } = rows[from];
        for (to = from + 1; to < rows.length && rows[to].sentence === sentence; to++);
        const limit = limits[sentence];
        const chosen = choosers[sentence]
          ? this.constrain(choosers[sentence], rows.slice(from, to), {
              ...{ from, size, steps, logits, values, numbers, width, seen, list: lists[sentence], room: limit - position },
              ...{ beam: options.beam, free: options.beam - finished[sentence].length },
            })
          : this.choose({ rows, from, to, last: position > limit, width, values, numbers, ends, options });
        this.grow({ chosen, sentence, position, penalty, limit, options, finished, best, grown, chooser: choosers[sentence] });
      }
      trace.push(grown);
      grown.forEach(({ parent }, row) => this.copyRow(state, spare, parts, parent, rows.length, row, grown.length));
      [state, spare, rows] = [spare, state, grown];
    }
    return finished.map((entries, sentence) => {
      const sorted = entries.sort((one, other) => other.score - one.score).slice(0, options.nbest);
      return sorted.map(({ score, total, position, row }) => {
        const ids = [];
        for (let at = position - 2, place = row; at >= 0; at--) {
          const { token, parent } = trace[at][place];
          ids.push(lists[sentence] ? lists[sentence][token] : token);
          place = parent;
        }
        return { ids: ids.reverse(), score, logProbability: total };
      });
    });
  }

  // The best continuations of one sentence's hypotheses, best first.
  choose({ rows, from, to, last, width, values, numbers, ends, options }) {
    const { floats, whole } = this.model.library;
    const { sentence } = rows[from];
    const chosen = [];
    const offer = (row, token, value) => {
      const total = rows[row].total + value;
      if (!(total > -Infinity) || (chosen.length === options.beam && !(total > chosen[chosen.length - 1].total))) return;
      if (chosen.length === options.beam) chosen.pop();
      let place = chosen.length;
      while (place && total > chosen[place - 1].total) place--;
      chosen.splice(place, 0, { sentence, token, total, parent: row });
    };
    for (let row = from; row < to; row++) {
      if (last) offer(row, EOS, floats[(ends >> 2) + row]);
      else for (let k = row * width; k < (row + 1) * width; k++) offer(row, whole[(numbers >> 2) + 2 * k], floats[(values >> 2) + k]);
    }
    return chosen;
  }

  // The same under constraints, from all logits: their sum is what the best word's lacks to its log-probability.
  constrain(chooser, rows, { from, size, steps, logits, values, numbers, width, seen, list, room, ...rest }) {
    const { floats, whole } = this.model.library;
    const places = list && new Map(Array.from(list, (id, place) => [id, place]));
    const looked = rows.map((row, at) => {
      const part = (address, wide, length = wide) => floats.subarray((address >> 2) + (from + at) * wide, (address >> 2) + (from + at) * wide + length);
      const own = part(logits, size, list?.length);
      const sum = own[whole[(numbers >> 2) + 2 * (from + at) * width]] - part(values, width)[0];
      return { ...row, logits: own, sum, attention: part(seen, steps) };
    });
    const words = { idOf: (word) => (list ? list[word] : word), wordOf: (id) => (places ? places.get(id) : id) };
    const found = chooser.extend(looked, { ...words, room, ...rest });
    return found.map(({ number, word, total, held }) => ({ sentence: rows[0].sentence, token: word, total, parent: from + number, held }));
  }

  // Adds to one sentence's finished and growing hypotheses.
  grow({ chosen, sentence, position, penalty, limit, options, finished, best, grown, chooser }) {
    const free = options.beam - finished[sentence].length;
    const growing = [];
    for (const entry of chosen.slice(0, free)) {
      if (entry.token !== EOS) {
        growing.push(entry);
        continue;
      }
      const { total, parent, held } = entry;
      const score = total / penalty(position) + (chooser?.added(held, penalty(position)) ?? 0);
      finished[sentence].push({ score, total: total + (held?.lowered ?? 0), position, row: parent });
      best[sentence].push(score);
      best[sentence].sort((one, other) => other - one).pop();
    }
    // Totals only fall as a hypothesis grows, and penalties only rise with its length.
    const most = Math.max(...growing.map(({ total }) => total));
    if (best[sentence][options.nbest - 1] < most / penalty(limit + 1)) grown.push(...growing);
  }

  // Copies the state of a row; h and c have a part for each layer.
  copyRow(state, spare, parts, from, before, to, after) {
    const { bytes } = this.model.library;
    const { layers, size } = this.model.config.decoder;
    state.forEach((address, kind) => {
      const count = kind < 2 ? layers : 1;
      const wide = 4 * (kind < 2 ? size : parts[kind]);
      for (let layer = 0; wide && layer < count; layer++) {
        const begin = address + (layer * before + from) * wide;
        bytes.copyWithin(spare[kind] + (layer * after + to) * wide, begin, begin + wide);
      }
    });
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The worker

// Reads one file of the model; `count` is called with the bytes that have come, and first with none and the size.
async function readFile(base, files, name, count = () => {}) {
  if (files) {
    if (!files[name]) throw new Failed(`${name} is missing; ${AGAIN}`);
    return files[name].arrayBuffer();
  }
  try {
    const answer = await fetch(new URL(name, base));
    if (!answer.ok) throw new Failed(`${name} cannot be loaded (${answer.status})`);
    return await readBody(answer, count);
  } catch (error) {
    if (error instanceof Failed) throw error;
    throw new Failed(`${name} cannot be loaded; check the connection`);
  }
}

async function readBody(answer, count) {
  if (!answer.body) return answer.arrayBuffer();
  count(0, Number(answer.headers.get("content-length")));
  const chunks = [];
  let size = 0;
  const reader = answer.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    chunks.push(value);
    size += value.length;
    count(value.length);
  }
  const content = new Uint8Array(size);
  let at = 0;
  for (const chunk of chunks) {
    content.set(chunk, at);
    at += chunk.length;
  }
  return content.buffer;
}

async function verify(content, name, expected) {
  if (!globalThis.crypto?.subtle || expected === undefined) return; // pages over plain http have none
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", content));
  const hex = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
  if (hex !== expected) throw new Failed(`${name} is damaged or of another model; load the page again`);
}

async function compiled(content) {
  try {
    return await WebAssembly.instantiate(content);
  } catch (error) {
    throw new Failed(`this browser does not run econmt.wasm: use a newer one, or permit WebAssembly (${error.message})`);
  }
}

// Reads and checks everything; `files` are blobs by name or null.
async function openModel(base, files, progress = () => {}) {
  const config = JSON.parse(decoded(await readFile(base, files, "model.json")));
  if (config.format !== FORMAT) throw new Failed(`model.json is not of format ${FORMAT}; ${AGAIN} with this version`);
  let [bytes, all] = [0, 0];
  const read = async (name) => {
    const content = await readFile(base, files, name, (more, size = 0) => progress((bytes += more), (all += size)));
    await verify(content, name, config.files[name]);
    return content;
  };
  const engine = readFile(location.href, files, "econmt.wasm");
  const names = config.vocabulary_files;
  const [module, arrays, ...vocabularies] = await Promise.all([
    engine.then(compiled),
    ...["arrays.safetensors", ...names].map(read),
  ]);
  const subwords = vocabularies.map((content) => new Subwords(new Uint8Array(content)));
  const model = new Model(module.instance.exports, config, arrays, [subwords[0], subwords[subwords.length - 1]]);
  return new Translator(model);
}

function work() {
  const calls = new Map();
  let translator;
  let queue = Promise.resolve();
  const answer = async (call, data) => {
    const progress = (...values) => postMessage({ id: data.id, progress: values });
    if (data.load !== undefined) {
      translator = await openModel(data.load, data.files, progress);
      return translator.model.config;
    }
    if (call.cancelled) throw new Failed("cancelled");
    return translator.translate(data.translate, data.options, call, progress);
  };
  onmessage = ({ data }) => {
    if (data.cancel) {
      if (calls.has(data.id)) calls.get(data.id).cancelled = true;
      return;
    }
    const call = { cancelled: false };
    calls.set(data.id, call);
    queue = queue.then(() => answer(call, data)).then(
      (result) => postMessage({ id: data.id, result }),
      (error) => postMessage({ id: data.id, error: error instanceof Failed ? error.message : `${error.name}: ${error.message}` }),
    );
    queue = queue.then(() => calls.delete(data.id));
  };
}

work();
