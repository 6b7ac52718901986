// Translates as one types, and shows what the server knows of it.

import { AttentionPicture } from "./attention.js";
import { Menu } from "./menu.js";
import { Failed, get, post } from "./server.js";

const PAUSE = 150; // milliseconds after a key before the server is asked
const part = (name) => document.getElementById(name);
const [source, target, glossary, avoid, key, pair] = ["source", "target", "glossary", "avoid", "key", "pair"].map(part);
const state = { settings: null, models: [], begun: [], lines: [], sentences: [], shown: 0, asking: null, timer: 0 };

function bytes(number) {
  const units = ["bytes", "kB", "MB", "GB"];
  let rank = 0;
  while (number >= 1000 && rank < 3) [number, rank] = [number / 1000, rank + 1];
  return `${rank ? number.toPrecision(3) : number} ${units[rank]}`;
}

function fail(error) {
  if (error.name === "AbortError") return;
  if (!(error instanceof Failed)) throw error;
  part("error").textContent = error.message;
  part("error").hidden = false;
  target.classList.remove("stale");
}

const languages = () => {
  const model = state.models[pair.selectedIndex] ?? state.models[0];
  return { source: model.source, target: model.target };
};

function wishes() {
  const terms = {};
  for (const line of glossary.value.split("\n")) {
    const [term, ...rest] = line.split(/[=\t]/);
    const translation = rest.join("=").trim();
    if (term.trim() && translation) terms[term.trim()] = translation;
  }
  const avoided = avoid.value.split(",").map((phrase) => phrase.trim()).filter(Boolean);
  return { glossary: terms, avoid: avoided, ...(key.value ? { api_key: key.value } : {}) };
}

function count() {
  const most = state.settings?.charLimit;
  part("count").textContent = most ? `${source.value.length.toLocaleString("en")} of ${most.toLocaleString("en")} characters` : "";
}

function later() {
  count();
  clearTimeout(state.timer);
  state.timer = setTimeout(() => translate().catch(fail), PAUSE);
}

// A beginning that was chosen for a line holds as long as the line stays what it was.
function beginnings(lines) {
  return lines.map((line, number) => (state.lines[number] === line ? state.begun[number] ?? "" : ""));
}

async function translate() {
  if (!state.settings) return;
  state.asking?.abort();
  state.asking = new AbortController();
  const lines = source.value.split("\n");
  state.begun = beginnings(lines);
  state.lines = lines;
  if (!source.value.trim()) {
    show([], "");
    return;
  }
  target.classList.add("stale");
  const answer = await post(
    "translate",
    {
      q: lines.map((text, number) => ({ text, target_prefix: text.trim() ? state.begun[number] : "" })),
      ...languages(),
      ...wishes(),
      alternatives: Math.min(4, state.settings.alternatives),
      details: true,
    },
    state.asking.signal,
  );
  part("error").hidden = true;
  const model = state.models[pair.selectedIndex] ?? state.models[0];
  const here = `${Math.round(answer.found.milliseconds)} ms`;
  const figures =
    `${here} at the server, ${Math.round(answer.milliseconds)} ms in all · ${bytes(answer.sent)} sent, ` +
    `${bytes(answer.received)} received · model ${bytes(model.bytes)}`;
  show(answer.found.details.map((each) => each[0]), figures);
}

function show(sentences, figures) {
  state.sentences = sentences;
  const spoken = sentences.length > 0;
  target.classList.remove("stale");
  target.replaceChildren(...sentences.map(paragraph));
  part("copy").disabled = !spoken;
  part("hint").hidden = !spoken;
  const whole = sentences.filter((sentence) => sentence.tokens.length);
  part("figures").replaceChildren();
  if (whole.length) {
    const mean = whole.reduce((sum, sentence) => sum + sentence.confidence, 0) / whole.length;
    const meter = document.createElement("meter");
    Object.assign(meter, { min: 0, max: 1, low: 0.3, high: 0.6, optimum: 1, value: mean });
    meter.setAttribute("aria-hidden", "true");
    part("figures").append(`Confidence ${Math.round(100 * mean)} % `, meter, ` · ${figures}`);
  }
  state.shown = Math.max(0, sentences.findIndex((sentence) => sentence.tokens.length));
  about();
}

// What stands below: the attention and the other translations of one sentence.
function about() {
  const sentence = state.sentences[state.shown];
  const some = Boolean(sentence?.tokens.length);
  part("attention-card").hidden = !some;
  part("others-card").hidden = !some || sentence.nbest.length < 2;
  if (!some) return;
  picture.show(sentence);
  part("others").replaceChildren(
    ...sentence.nbest.slice(1).map((other) => {
      const item = document.createElement("li");
      const share = document.createElement("span");
      share.className = "quiet";
      share.textContent = ` ${Math.round(100 * other.confidence)} %`;
      item.append(other.translation, share);
      return item;
    }),
  );
}

function paragraph(sentence, line) {
  const block = document.createElement("p");
  sentence.translation.split(" ").filter(Boolean).forEach((text, number) => {
    const word = document.createElement("button");
    word.type = "button";
    word.className = "word";
    word.textContent = text;
    word.setAttribute("aria-haspopup", "menu");
    word.setAttribute("aria-expanded", "false");
    const pointAt = () => point(line, number);
    word.addEventListener("pointerenter", pointAt);
    word.addEventListener("focus", pointAt);
    word.addEventListener("click", () => others(word, line, number).catch(fail));
    block.append(word, " ");
  });
  return block;
}

function point(line, number) {
  if (line !== state.shown) {
    state.shown = line;
    about();
  }
  picture.mark(number, -1);
  highlight(number);
}

function highlight(number) {
  target.querySelectorAll(".word.at").forEach((word) => word.classList.remove("at"));
  target.children[state.shown]?.querySelectorAll(".word")[number]?.classList.add("at");
}

async function others(word, line, number) {
  const before = state.sentences[line].translation.split(" ").filter(Boolean).slice(0, number);
  menu.open(word, "Looking for other words …");
  try {
    const { found } = await post("alternatives", {
      q: state.lines[line].trim(),
      target_prefix: before.join(" "),
      ...languages(),
      ...wishes(),
      alternatives: 6,
    });
    if (menu.owner !== word) return;
    const different = found.alternatives.filter((entry) => entry.word !== word.textContent);
    menu.fill(different, (entry) => {
      state.begun[line] = [...before, entry.word].join(" ");
      translate()
        .then(() => target.children[line]?.querySelectorAll(".word")[number]?.focus())
        .catch(fail);
    });
  } catch (error) {
    menu.close();
    throw error;
  }
}

const picture = new AttentionPicture(part("attention"), part("readout"), highlight);
const menu = new Menu(part("menu"));

function theme(chosen) {
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (chosen) document.documentElement.dataset.theme = chosen;
  part("theme").textContent = dark ? "Light" : "Dark";
  part("theme").setAttribute("aria-label", `Use ${dark ? "light" : "dark"} colours`);
}

function remember(field) {
  field.value = localStorage.getItem(field.id) ?? "";
  field.addEventListener("input", () => {
    localStorage.setItem(field.id, field.value);
    later();
  });
}

async function begin() {
  [glossary, avoid, key].forEach(remember);
  theme(localStorage.getItem("theme"));
  part("theme").addEventListener("click", () => {
    const chosen = part("theme").textContent === "Light" ? "light" : "dark";
    localStorage.setItem("theme", chosen);
    theme(chosen);
  });
  part("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(state.sentences.map((sentence) => sentence.translation).join("\n"));
    part("copy").textContent = "Copied";
    setTimeout(() => (part("copy").textContent = "Copy"), 1500);
  });
  part("key-field").addEventListener("submit", (event) => event.preventDefault());
  source.addEventListener("input", later);
  pair.addEventListener("change", () => {
    named();
    later();
  });
  const [settings, health, known] = await Promise.all([get("frontend/settings"), get("health"), get("languages")]);
  Object.assign(state, { settings, models: health.models, names: new Map(known.map((each) => [each.code, each.name])) });
  part("key-field").hidden = !settings.keyRequired;
  for (const model of health.models) pair.append(new Option(`${name(model.source)} to ${name(model.target)}`));
  pair.parentElement.hidden = health.models.length < 2;
  named();
  later();
}

const name = (code) => state.names.get(code) ?? code;

function named() {
  part("source-name").textContent = name(languages().source);
  part("target-name").textContent = name(languages().target);
  source.lang = languages().source;
  target.lang = languages().target;
}

begin().catch(fail);
