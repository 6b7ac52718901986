// Translates as one types, line by line, and shows what the server knows of it.

import { AttentionPicture } from "./attention.js";
import { Editor } from "./editor.js";
import { Failed, get, post, postFile } from "./server.js";
import { TargetView } from "./target.js";

const PAUSE = 150; // milliseconds after a key before the server is asked
const PART = 2000; // characters of a request
const KINDS = {
  html: "text/html",
  htm: "text/html",
  docx: "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
};
const part = (name) => document.getElementById(name);
const [target, glossary, avoid, key, pair] = ["target", "glossary", "avoid", "key", "pair"].map(part);
// A row is a line of the text: {text, sentences}, whose sentences are null until they are translated.
const state = { settings: null, models: [], rows: [], shown: null, asking: null, timer: 0, again: 0, file: "translation", wishes: {} };

function bytes(number) {
  const units = ["bytes", "kB", "MB", "GB"];
  let rank = 0;
  while (number >= 1000 && rank < 3) [number, rank] = [number / 1000, rank + 1];
  return `${rank ? number.toPrecision(3) : number} ${units[rank]}`;
}

function fail(error) {
  if (error.name === "AbortError") return;
  if (!(error instanceof Failed)) throw error;
  tell(error.message + (error.seconds ? ` It is tried again in ${error.seconds} s.` : ""), error.field);
  const again = state.settings ? translate : start;
  if (error.seconds) state.again = setTimeout(() => again().catch(fail), 1000 * error.seconds);
}

// Shows a message below the field that it is about, in place of all others; an empty one hides them.
function tell(message, field = "text") {
  for (const box of document.querySelectorAll(".wrong")) {
    box.textContent = box.dataset.field === field ? message : "";
    part(box.dataset.field)?.setAttribute("aria-invalid", String(Boolean(box.textContent)));
  }
}

const model = () => state.models[pair.selectedIndex] ?? state.models[0];
const languages = () => ({ source: model().source, target: model().target });

function wishes() {
  const avoided = avoid.value.split(",").map((phrase) => phrase.trim()).filter(Boolean);
  return { glossary: glossary.value, avoid: avoided, ...(key.value ? { api_key: key.value } : {}) };
}

// Takes over the wishes as they stand; called when a line of them is left, so that half a line is never judged.
function settle() {
  const now = wishes();
  if (JSON.stringify(now) === JSON.stringify(state.wishes)) return;
  state.wishes = now;
  forget();
}

function later() {
  count();
  arrange();
  if (!state.settings) return; // the start does the rest
  clearTimeout(state.timer);
  clearTimeout(state.again);
  state.timer = setTimeout(() => translate().catch(fail), PAUSE);
}

function count() {
  const most = state.settings?.charLimit;
  const length = editor.text.length;
  part("count").textContent = most ? `${length.toLocaleString("en")} of ${most.toLocaleString("en")} characters` : "";
  part("clear").disabled = !length;
}

// Lines that are as they were keep their translations; others show the old one, greyed, until theirs comes.
function arrange() {
  const kept = new Map();
  for (const row of state.rows) if (row.sentences) kept.set(row.text, row);
  state.rows = editor.lines.map((text, number) => {
    const old = state.rows[number];
    if (old?.text === text) return old;
    if (!text.trim()) return { text, sentences: [] };
    return kept.get(text) ?? { text, sentences: null, old: old?.sentences ?? old?.old };
  });
  show();
}

function forget() {
  state.asking?.abort(); // its translations would not follow the new wishes
  for (const row of state.rows) if (row.text.trim() && row.sentences) Object.assign(row, { old: row.sentences, sentences: null });
  show();
  later();
}

async function translate() {
  if (!state.settings) return;
  state.asking?.abort();
  state.asking = new AbortController();
  const { signal } = state.asking;
  const figures = { here: 0, all: 0, sent: 0, received: 0 };
  let waiting = state.rows.filter((row) => !row.sentences);
  const size = waiting.reduce((sum, row) => sum + row.text.length, 0);
  if (size > state.settings.charLimit) {
    const most = state.settings.charLimit.toLocaleString("en");
    throw new Failed(`The text has ${size.toLocaleString("en")} characters, and this server takes ${most} at a time. Translate it in parts.`);
  }
  while (waiting.length) {
    let length = 0;
    const rows = waiting.filter((row, number) => (length += row.text.length) <= PART || number === 0);
    const answer = await post("translate", { q: rows.map((row) => row.text), ...query(), details: true, attention: false }, signal);
    rows.forEach((row, number) => Object.assign(row, { sentences: answer.found.details[number], old: null }));
    figures.here += answer.found.milliseconds;
    figures.all += answer.milliseconds;
    figures.sent += answer.sent;
    figures.received += answer.received;
    waiting = waiting.slice(rows.length);
    state.figures = figures;
    show();
  }
  tell("");
}

const query = () => ({ ...languages(), ...state.wishes, alternatives: Math.min(4, state.settings.alternatives) });
const sentences = () => state.rows.flatMap((row) => row.sentences ?? []);

function show() {
  view.show(state.rows, [...part("source").children]);
  const spoken = sentences();
  for (const name of ["copy", "save"]) part(name).disabled = !spoken.length;
  const doubts = spoken.filter((sentence) => view.doubt(sentence)).length;
  const doubtful = doubts === 1 ? "One sentence" : `${doubts} sentences`;
  part("doubts").textContent = doubts ? `${doubtful} may be incomplete; see the marks.` : "";
  if (!spoken.includes(state.shown)) state.shown = spoken.find((sentence) => sentence.tokens.length) ?? null;
  const whole = spoken.filter((sentence) => sentence.tokens.length);
  part("figures").textContent = "";
  if (whole.length && state.figures) {
    const mean = whole.reduce((sum, sentence) => sum + sentence.confidence, 0) / whole.length;
    const { here, all, sent, received } = state.figures;
    part("figures").textContent =
      `Confidence ${Math.round(100 * mean)} % · ${Math.round(here)} ms at the server, ${Math.round(all)} ms in all · ` +
      `${bytes(sent)} sent, ${bytes(received)} received`;
  }
  about();
}

// What stands below: the other translations and the attention of one sentence.
function about() {
  const sentence = state.shown;
  const others = (sentence?.nbest ?? []).filter(
    (entry, rank, all) =>
      entry.translation.trim() &&
      entry.translation !== sentence.translation &&
      all.findIndex((each) => each.translation === entry.translation) === rank,
  );
  part("others-card").hidden = !others.length;
  part("attention-card").hidden = !sentence?.attention?.length && !sentence?.refusal;
  part("attention").hidden = !sentence?.attention?.length;
  if (!sentence) return;
  part("readout").textContent = sentence.refusal ?? "";
  if (sentence.attention?.length) picture.show(sentence);
  if (!sentence.attention && part("details").open) look(sentence).catch(fail);
  part("others-source").textContent = sentence.source;
  part("others").replaceChildren(...others.map((entry) => other(sentence, entry)));
}

// Asks for the attention of a sentence and of its other translations, which is large: only where somebody looks at it.
async function look(sentence) {
  if (sentence.asked) return;
  Object.assign(sentence, { asked: true, refusal: undefined });
  try {
    const answer = await post("translate", { q: [sentence.source], ...query(), details: true });
    const found = answer.found.details[0][0]?.nbest ?? [];
    for (const each of [sentence, ...sentence.nbest])
      each.attention = found.find((entry) => entry.translation === each.translation)?.attention ?? [];
  } catch (error) {
    if (!(error instanceof Failed)) throw error;
    sentence.refusal = error.message;
    if (error.seconds) setTimeout(() => Object.assign(sentence, { asked: false }), 1000 * error.seconds);
  }
  if (sentence === state.shown) about();
}

function other(sentence, entry) {
  const item = document.createElement("li");
  const text = document.createElement("span");
  Object.assign(text, { textContent: entry.translation, dir: "auto" });
  const share = document.createElement("small");
  Object.assign(share, { className: "figure quiet", textContent: ` ${Math.round(100 * entry.confidence)} %` });
  const button = (name, act) => {
    const made = document.createElement("button");
    Object.assign(made, { type: "button", className: "small", textContent: name });
    made.setAttribute("aria-label", `${name} “${entry.translation}”`);
    made.addEventListener("click", () => act(made));
    return made;
  };
  const use = button("Use", () => {
    const { translation, tokens, attention, confidence, cut } = entry;
    Object.assign(sentence, { translation, tokens, attention, confidence, cut });
    show();
    view.focus(sentence, 0);
  });
  item.append(text, share, use, button("Copy", (made) => copied(entry.translation, made)));
  return item;
}

function pointAt(sentence, number) {
  if (sentence !== state.shown) {
    state.shown = sentence;
    about();
  }
  if (sentence.attention?.length) picture.mark(number, -1);
  view.highlight(sentence, number);
}

async function copied(text, button) {
  button.textContent = await copy(text).then(() => "Copied", () => "Not copied");
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// Copies text; by a field, where a page over plain http has no clipboard.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const focused = document.activeElement;
  const field = Object.assign(document.createElement("textarea"), { value: text, className: "unseen" });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused.focus();
  if (!done) throw new Error("not copied");
}

// Text of a file in UTF-8, or in UTF-16 with a byte order mark.
function decoded(buffer) {
  const bytes = new Uint8Array(buffer);
  const encoding = { 0xfffe: "utf-16le", 0xfeff: "utf-16be" }[(bytes[0] << 8) | bytes[1]] ?? "utf-8";
  if (bytes[0] === 0x1f && bytes[1] === 0x8b) throw new Failed("This file is compressed with gzip. Unpack it first.");
  if (encoding === "utf-8" && bytes.includes(0)) throw new Failed("This file is no text. Choose a .txt, .html or .docx file.");
  try {
    return new TextDecoder(encoding, { fatal: true }).decode(buffer);
  } catch {
    throw new Failed("This text is not in UTF-8. Save it in UTF-8, or choose a .html or .docx file.");
  }
}

async function open(file) {
  const [, name, ending] = /^(.*?)(?:\.([^.]*))?$/.exec(file.name);
  const kind = KINDS[ending?.toLowerCase()];
  try {
    const text = kind ? "" : decoded(await file.arrayBuffer());
    if (!kind && text.length <= state.settings.charLimit) {
      state.file = name;
      editor.text = text.replace(/\r\n?/g, "\n");
      return;
    }
    tell(`Translating ${file.name} …`);
    settle();
    const translated = await postFile(file, kind ?? "text/plain", languages(), state.wishes);
    save(translated, `${name}.${languages().target}.${ending ?? "txt"}`);
    tell(`${file.name} is translated and saved.`);
  } catch (error) {
    fail(Object.assign(error, { seconds: 0 }));
  }
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const editor = new Editor(part("source"), later);
const view = new TargetView(target, pointAt);
const picture = new AttentionPicture(part("attention"), part("readout"), (number) => state.shown && view.highlight(state.shown, number));

function theme(chosen) {
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (chosen) document.documentElement.dataset.theme = chosen;
  part("theme").textContent = dark ? "Light" : "Dark";
  part("theme").setAttribute("aria-label", `Use ${dark ? "light" : "dark"} colours`);
}

function remember(field) {
  field.value = localStorage.getItem(field.id) ?? "";
  field.addEventListener("input", () => localStorage.setItem(field.id, field.value));
  for (const leaving of ["blur", "change"]) field.addEventListener(leaving, settle);
}

// Settles the wishes when the cursor comes to another line of the glossary.
function watchLines() {
  const line = () => glossary.value.slice(0, glossary.selectionStart).split("\n").length;
  let before = line();
  const moved = () => {
    if (line() === before) return;
    before = line();
    settle();
  };
  for (const moving of ["input", "keyup", "pointerup"]) glossary.addEventListener(moving, moved);
}

function listen() {
  [glossary, avoid, key].forEach(remember);
  state.wishes = wishes();
  watchLines();
  theme(localStorage.getItem("theme"));
  part("theme").addEventListener("click", () => {
    const chosen = part("theme").textContent === "Light" ? "light" : "dark";
    localStorage.setItem("theme", chosen);
    theme(chosen);
  });
  part("details").open = localStorage.getItem("details") === "open";
  const technical = () => document.body.classList.toggle("technical", part("details").open);
  part("details").addEventListener("toggle", () => {
    localStorage.setItem("details", part("details").open ? "open" : "");
    technical();
    about();
  });
  technical();
  part("copy").addEventListener("click", () => copied(view.text(state.rows), part("copy")));
  part("save").addEventListener("click", () => {
    save(new Blob([view.text(state.rows)], { type: "text/plain" }), `${state.file}.${languages().target}.txt`);
  });
  part("clear").addEventListener("click", () => {
    editor.text = "";
    part("source").focus();
  });
  part("file").addEventListener("change", (event) => {
    for (const file of event.target.files) open(file);
    event.target.value = "";
  });
  document.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
  document.addEventListener("drop", (event) => {
    const { files } = event.dataTransfer;
    if (!files.length) return;
    event.preventDefault();
    if (files.length > 1) tell("Drop one file at a time.");
    else open(files[0]);
  });
  part("key-field").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("resize", () => view.align([...part("source").children]));
  pair.addEventListener("change", () => {
    named();
    forget();
  });
}

async function start() {
  const [settings, known] = await Promise.all([get("frontend/settings"), get("languages")]);
  const { source } = settings.language; // "auto": any language, so that only the target is chosen
  const names = new Map([...known, source].map((each) => [each.code, each.name]));
  const pairs = known.flatMap(({ code, targets }) => targets.map((target) => ({ source: code, target })));
  const targets = [...new Set(pairs.map(({ target }) => target))].sort((one, other) => names.get(one).localeCompare(names.get(other), "en"));
  const models = source.code === "auto" ? targets.map((target) => ({ source: "auto", target })) : pairs;
  Object.assign(state, { settings, models, names });
  part("key-field").hidden = !settings.keyRequired;
  for (const each of models) pair.append(new Option(`${name(each.source)} to ${name(each.target)}`));
  pair.parentElement.hidden = models.length < 2;
  named();
  later();
}

const name = (code) => state.names.get(code) ?? code;

function named() {
  part("source-name").textContent = name(languages().source);
  part("target-name").textContent = name(languages().target);
  part("source").lang = languages().source === "auto" ? "" : languages().source;
  target.lang = languages().target;
}

listen();
part("source").focus();
start().catch(fail);
