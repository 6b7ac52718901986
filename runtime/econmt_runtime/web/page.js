// Translates as one types, in the browser alone.

const PAUSE = 150; // milliseconds after a key before the text is translated
const GLOSSARY_PAUSE = 600;
const ALTERNATIVES = 5;
const CHUNK = 64; // sentences that are translated before they are shown
const READY = "Ready. The text stays in this browser.";
const SPACELESS = /^(zh|ja|yue|cmn)(?![a-z])/; // languages without blanks between sentences
const WIDE_END = /[。｡！？]["”’」』】）〉》]*$/; // of a sentence that needs no blank after it
const part = (name) => document.getElementById(name);
const [source, target, status, wrong, bar, glossary] = ["source", "target", "status", "wrong", "progress", "glossary"].map(part);
const choice = part("language"); // of the target languages of a model that has several
// Sentences of the text: {text, after, result}; `after` is the space that follows, and the result is null until it comes.
const state = { sentences: [], asking: null, timer: 0, shown: null, model: null, divide: null };

// The files that a page of one file holds, by name; null if they lie beside it.
function ownFiles() {
  const held = document.querySelectorAll("[data-file]");
  if (!held.length) return null;
  const files = {};
  for (const element of held) {
    const text = atob(element.textContent);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    files[element.dataset.file] = new Blob([bytes], { type: "text/javascript" });
    element.remove();
  }
  return files;
}

// Divides text into sentences and the space after each, as the language of the translation has it; line ends always divide.
function divided(text) {
  const found = [];
  for (const line of text.split(/(?<=\n)/)) {
    const segments = state.divide ? [...state.divide.segment(line)].map(({ segment }) => segment) : [line];
    segments.forEach((segment, number) => {
      const kept = segment.trim();
      const at = segment.indexOf(kept);
      let after = segment.slice(at + kept.length);
      if (number + 1 < segments.length) {
        if (SPACELESS.test(target.lang)) after = "";
        else if (WIDE_END.test(segment)) after = " ";
      }
      found.push({ before: segment.slice(0, at), text: kept, after, result: null });
    });
  }
  return found;
}

// Shows a sentence in its own element: the translation, or the old one, greyed, until it comes.
function fill(sentence) {
  const { span, text, result, old } = sentence;
  span.className = `sentence${result ? "" : " stale"}${sentence === state.shown ? " at" : ""}`;
  span.textContent = (result ?? old)?.text ?? "";
  if (text && result) Object.assign(span, { tabIndex: 0, role: "button", title: "Show other translations" });
}

function show() {
  const all = document.createDocumentFragment();
  for (const sentence of state.sentences) {
    const span = (sentence.span = document.createElement("span"));
    const ask = () => sentence.result && sentence.text && alternatives(sentence).catch(fail);
    span.addEventListener("click", ask);
    span.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      ask();
    });
    fill(sentence);
    all.append(sentence.before, span, sentence.after);
  }
  target.replaceChildren(all);
  buttons();
}

function buttons() {
  part("copy").disabled = !state.sentences.some(({ result }) => result?.text);
  part("clear").disabled = !source.value;
}

function fail(error) {
  if (error.name === "AbortError") return;
  status.textContent = "";
  const line = /^glossary, (.*)/.exec(error.message)?.[1];
  if (line) part("wishes").open = true;
  part("glossary-wrong").textContent = line ? `${line[0].toUpperCase()}${line.slice(1)}.` : "";
  if (!line) wrong.textContent = error.message.replace(/^line \d+: /, ""); // its number counts sentences of a part
}

// Translates soon what is new; with another glossary or language everything is.
function later(event, pause = PAUSE) {
  const known = new Map();
  for (const { text, result } of state.sentences) if (result && ![glossary, choice].includes(event?.target)) known.set(text, result);
  const before = state.sentences;
  state.sentences = divided(source.value).map((sentence, number) => {
    const result = sentence.text ? (known.get(sentence.text) ?? null) : { text: "" };
    return { ...sentence, result, old: before[number]?.result ?? before[number]?.old };
  });
  state.shown = null;
  part("others-card").hidden = true;
  show();
  const full = source.value.length >= source.maxLength; // browsers need seconds to lay out much more
  wrong.textContent = full ? `The page takes ${source.maxLength.toLocaleString("en")} characters at a time. Translate longer text in parts.` : "";
  clearTimeout(state.timer);
  state.timer = setTimeout(() => translate().catch(fail), pause);
}

// What all translations follow: the glossary, and the target language if there are several.
const chosen = () => ({ glossary: glossary.value, target: choice.value || undefined });

async function translate() {
  if (!state.model) return;
  state.asking?.abort();
  const asking = (state.asking = new AbortController());
  const { sentences } = state;
  const waiting = sentences.filter(({ result }) => !result);
  const begin = performance.now();
  const words = waiting.reduce((sum, { text }) => sum + text.split(/\s+/).length, 0);
  part("stop").hidden = waiting.length <= CHUNK;
  status.textContent = words ? "Translating …" : READY;
  try {
    for (let at = 0; !at || at < waiting.length; at += CHUNK) {
      const some = waiting.slice(at, at + CHUNK);
      const wishes = { ...chosen(), signal: asking.signal };
      const found = await state.model.translate(some.map(({ text }) => text), wishes);
      part("glossary-wrong").textContent = "";
      some.forEach((sentence, number) => fill(Object.assign(sentence, { result: found[number] })));
      buttons();
    }
    const cut = sentences.some(({ result }) => result.cut);
    const time = Math.round(performance.now() - begin);
    if (words) status.textContent = `${words.toLocaleString("en")} words in ${time.toLocaleString("en")} ms, in this browser alone.`;
    if (cut) status.textContent += " Of a sentence that is too long only the beginning is translated.";
  } finally {
    if (state.asking === asking) part("stop").hidden = true;
  }
}

// Copies text; by a field, where a page over plain http has no clipboard.
async function copy(text) {
  const told = (done) => (status.textContent = done ? "Copied." : "The browser does not let this page copy.");
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => told(true), () => told(false));
  const field = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(field);
  field.select();
  told(document.execCommand("copy"));
  field.remove();
  part("copy").focus();
}

async function alternatives(sentence) {
  state.shown = sentence;
  [...target.children].forEach((span, number) => span.classList.toggle("at", state.sentences[number] === sentence));
  const beam = Math.max(ALTERNATIVES, state.model.config.decoding.beam_size);
  const [found] = await state.model.translate([sentence.text], { ...chosen(), beam, nbest: ALTERNATIVES });
  if (state.shown !== sentence) return;
  const texts = new Set(found.nbest.map(({ text }) => text));
  texts.delete(sentence.result.text);
  part("others-card").hidden = !texts.size;
  part("others-source").textContent = sentence.text;
  part("others").replaceChildren(
    ...[...texts].map((text) => Object.assign(document.createElement("li"), { textContent: text, dir: "auto" })),
  );
}

function name(code) {
  try {
    return new Intl.DisplayNames(["en"], { type: "language", fallback: "none" }).of(code) ?? code;
  } catch {
    return code;
  }
}

// Shows the languages: those of a model of one pair, or of several targets a menu, whose sources are in any language.
function named({ languages: [from, to], targets }) {
  if (targets) {
    const options = targets.map((code) => new Option(name(code), code));
    choice.append(...options.sort((one, other) => one.text.localeCompare(other.text, "en")));
    const spoken = navigator.languages.map((code) => code.split("-")[0]);
    const first = [remembered("target"), ...spoken, "en"].find((code) => targets.includes(code));
    if (first) choice.value = first;
    part("choice").hidden = false;
    [from, to] = ["", choice.value];
    if (glossary.value) remembered(glossaryName(), glossary.value); // typed while the model was loading
    remembered("glossary", "");
    recallGlossary();
  } else {
    part("source-name").textContent = name(from);
    part("target-name").textContent = name(to);
  }
  [source.lang, target.lang] = [from, to];
  try {
    state.divide = new Intl.Segmenter(from || "en", { granularity: "sentence" });
  } catch {
    state.divide = null; // an old browser, or a language that it does not know: lines stay whole
  }
}

// Has the browser keep the files for use without a network; what is new on the server is there at the next visit.
async function keep() {
  try {
    const { checksum } = await (await fetch("model.json?new", { cache: "no-store" })).json();
    await navigator.serviceWorker?.register(`offline.js?${checksum}`);
  } catch {
    // no network, or a browser that keeps nothing of this page
  }
}

// What is kept by a name from visit to visit, where the browser lets a page keep something.
function remembered(name, value) {
  const key = `${name} ${location.pathname}`;
  try {
    if (value !== undefined) localStorage.setItem(key, value);
    return localStorage.getItem(key) ?? "";
  } catch {
    return "";
  }
}

// Each target language of several has a glossary of its own.
const glossaryName = () => `glossary ${choice.value}`.trim();

function recallGlossary() {
  glossary.value = remembered(glossaryName());
  if (glossary.value) part("wishes").open = true;
}

async function begin() {
  status.textContent = "Loading the model …";
  bar.hidden = false;
  recallGlossary();
  glossary.addEventListener("input", (event) => {
    remembered(glossaryName(), glossary.value);
    later(event, GLOSSARY_PAUSE);
  });
  choice.addEventListener("change", (event) => {
    remembered("target", (target.lang = choice.value));
    recallGlossary();
    later(event);
  });
  source.addEventListener("input", later);
  part("clear").addEventListener("click", () => {
    source.value = "";
    later();
    source.focus();
  });
  part("stop").addEventListener("click", () => {
    state.asking?.abort();
    status.textContent = "Stopped.";
  });
  part("copy").addEventListener("click", () => copy(target.textContent));
  const files = ownFiles();
  const engine = files ? URL.createObjectURL(files["econmt.js"]) : "./econmt.js";
  const { load } = await import(engine);
  state.model = await load("./", { files, progress: (bytes, all) => all && (bar.value = bytes / all) });
  bar.hidden = true;
  named(state.model.config);
  later();
  if (!files) await keep();
}

begin().catch((error) => {
  bar.hidden = true;
  fail(error);
});
