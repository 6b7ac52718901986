// The translation: a paragraph for each line of the source, beside it, made of words that can be pointed at.

const DOUBTS = {
  cut: "The translation of this sentence was cut off.",
  short: "The translation of this sentence is much shorter than the sentence; parts may be missing.",
};

const TAG = /^\u2581?<2[-\w]+>$/; // of a target language, which is no part of the sentence

export class TargetView {
  // `pointed` gets a sentence and the number of a word.
  constructor(element, pointed) {
    Object.assign(this, { element, pointed });
    element.addEventListener("keydown", (event) => this.key(event));
    element.addEventListener("focusin", (event) => {
      const word = event.target.closest(".word");
      if (word) this.rove(word);
    });
  }

  // Why a translation may be incomplete, or an empty text.
  doubt(sentence) {
    if (sentence.cut ?? sentence.nbest[0]?.cut) return DOUBTS.cut;
    const read = sentence.source_tokens.filter((token) => !TAG.test(token));
    return 3 * sentence.tokens.length < read.length ? DOUBTS.short : "";
  }

  text(rows) {
    return rows.map((row) => (row.sentences ?? []).map((each) => each.before + each.translation).join("")).join("\n");
  }

  show(rows, sources) {
    const focused = this.words().indexOf(document.activeElement);
    this.places = new Map();
    this.element.replaceChildren(...rows.map((row) => this.paragraph(row)));
    const words = this.words();
    words.forEach((word, number) => (word.tabIndex = number ? -1 : 0));
    if (focused >= 0) words[Math.min(focused, words.length - 1)]?.focus();
    this.align(sources);
  }

  words() {
    return [...this.element.querySelectorAll(".word:enabled")];
  }

  paragraph(row) {
    const block = document.createElement("p");
    block.dir = "auto";
    block.classList.toggle("stale", !row.sentences);
    block.setAttribute("aria-busy", String(!row.sentences));
    for (const sentence of row.sentences ?? row.old ?? []) {
      const piece = document.createElement("span");
      const words = sentence.translation.split(" ").filter(Boolean);
      const buttons = words.map((text, number) => this.word(text, row, sentence, number));
      buttons.forEach((word, number) => piece.append(...(number ? [" ", word] : [word])));
      this.places.set(sentence, buttons);
      const doubt = row.sentences ? this.doubt(sentence) : "";
      if (doubt) {
        piece.className = "doubtful";
        const mark = document.createElement("span");
        Object.assign(mark, { className: "doubt", title: doubt }); // its text comes from the style, so that nobody copies it
        mark.setAttribute("role", "note");
        mark.setAttribute("aria-label", doubt);
        piece.append(" ", mark);
      }
      block.append(sentence.before, piece);
    }
    return block;
  }

  word(text, row, sentence, number) {
    const word = document.createElement("button");
    Object.assign(word, { type: "button", className: "word", textContent: text, tabIndex: -1 });
    if (!row.sentences) {
      word.disabled = true;
      return word;
    }
    const pointAt = () => this.pointed(sentence, number);
    word.addEventListener("pointerenter", pointAt);
    word.addEventListener("focus", pointAt);
    return word;
  }

  // The words are one stop of the Tab key; arrow keys move among them.
  rove(word) {
    this.element.querySelectorAll(".word[tabindex='0']").forEach((each) => (each.tabIndex = -1));
    word.tabIndex = 0;
  }

  key(event) {
    const words = this.words();
    const at = words.indexOf(event.target);
    if (at < 0) return;
    const forward = getComputedStyle(event.target.parentElement).direction === "rtl" ? -1 : 1;
    const line = (way) => {
      const box = words[at].getBoundingClientRect();
      const there = words.filter((word) => way * (word.getBoundingClientRect().top - box.top) > box.height / 2);
      const top = there.length && there[way > 0 ? 0 : there.length - 1].getBoundingClientRect().top;
      const distance = (word) => Math.abs(word.getBoundingClientRect().left - box.left);
      const level = there.filter((word) => Math.abs(word.getBoundingClientRect().top - top) < box.height / 2);
      return words.indexOf(level.sort((one, other) => distance(one) - distance(other))[0]);
    };
    const moves = {
      ArrowRight: () => at + forward,
      ArrowLeft: () => at - forward,
      ArrowDown: () => line(1),
      ArrowUp: () => line(-1),
      Home: () => 0,
      End: () => words.length - 1,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    words[moves[event.key]()]?.focus();
  }

  focus(sentence, number) {
    this.places.get(sentence)?.[number]?.focus();
  }

  highlight(sentence, number) {
    this.element.querySelectorAll(".word.at").forEach((word) => word.classList.remove("at"));
    this.places.get(sentence)?.[number]?.classList.add("at");
  }

  // Gives each line of the source and its translation the same height, where they stand side by side.
  align(sources) {
    const pairs = [...this.element.children].map((block, number) => [sources[number], block]).filter(([line]) => line);
    const lines = pairs.flat();
    for (const line of lines) line.style.minHeight = "";
    const source = sources[0]?.parentElement.getBoundingClientRect();
    if (!source || this.element.getBoundingClientRect().left < source.right) return;
    const heights = pairs.map((pair) => Math.max(...pair.map((line) => line.getBoundingClientRect().height)));
    pairs.forEach((pair, number) => pair.forEach((line) => (line.style.minHeight = `${heights[number]}px`)));
  }
}
