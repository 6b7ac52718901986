// The attention of one sentence as a table of words that follows the pointer and the arrow keys.

const SPACE = "\u2581"; // how subwords mark a space before them

// The words that tokens make, each with the numbers of its tokens; a vocabulary of words has none of the marks.
export function wordsOf(tokens) {
  const marked = tokens.some((token) => token.startsWith(SPACE));
  const words = [];
  tokens.forEach((token, number) => {
    const begins = !marked || token.startsWith(SPACE) || !words.length;
    if (begins && !(words.length && words[words.length - 1].text === "")) words.push({ text: "", tokens: [] });
    const word = words[words.length - 1];
    word.text += token.replaceAll(SPACE, "");
    word.tokens.push(number);
  });
  return words;
}

// Weights by words: a word looked at another as much as its tokens on average did at all of that one's.
export function byWords(sentence) {
  const rows = [...wordsOf(sentence.tokens), { text: "end", tokens: [sentence.tokens.length] }];
  const columns = [...wordsOf(sentence.source_tokens), { text: "end", tokens: [sentence.source_tokens.length] }];
  const weights = rows.map((row) =>
    columns.map((column) => {
      let sum = 0;
      for (const at of row.tokens) for (const seen of column.tokens) sum += sentence.attention[at][seen];
      return sum / row.tokens.length;
    }),
  );
  return { rows, columns, weights };
}

const percent = (weight) => `${Math.round(100 * weight)} %`;

function made(name, text, attributes = {}) {
  const element = document.createElement(name);
  if (text) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

export class AttentionPicture {
  // `pointed` is told which row the pointer or the keys are at, -1 for none.
  constructor(table, readout, pointed) {
    this.table = table;
    this.readout = readout;
    this.pointed = pointed;
    this.at = { row: 0, column: 0 };
    table.addEventListener("pointerover", (event) => this.follow(event.target.closest("td, tbody th")));
    table.addEventListener("focusin", (event) => this.follow(event.target.closest("td")));
    table.addEventListener("keydown", (event) => this.move(event));
  }

  show(sentence) {
    const { rows, columns, weights } = byWords(sentence);
    this.words = { rows, columns, weights };
    this.table.querySelectorAll("thead, tbody").forEach((part) => part.remove());
    const head = this.table.createTHead().insertRow();
    head.append(made("td", "", { class: "corner", "aria-hidden": "true" }));
    for (const column of columns) {
      const cell = made("th", "", { scope: "col", title: column.text });
      cell.append(made("span", column.text));
      head.append(cell);
    }
    const body = this.table.createTBody();
    rows.forEach((row, number) => {
      const line = body.insertRow();
      line.append(made("th", row.text, { scope: "row", title: row.text }));
      weights[number].forEach((weight, place) => {
        const cell = made("td", String(Math.round(100 * weight)), { tabindex: number || place ? "-1" : "0" });
        cell.style.setProperty("--weight", weight.toFixed(3));
        cell.classList.toggle("some", weight > 0.4);
        cell.classList.toggle("strong", weight > 0.75);
        line.append(cell);
      });
    });
    this.mark(-1, -1);
  }

  cell(row, column) {
    return this.table.tBodies[0].rows[row].cells[column + 1];
  }

  follow(cell) {
    if (!cell || !cell.closest("tbody")) return;
    const row = cell.parentElement.sectionRowIndex;
    this.mark(row, cell.cellIndex - 1);
    this.pointed(row);
  }

  move(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const { rows, columns } = this.words;
    const row = Math.min(rows.length - 1, Math.max(0, this.at.row + step[0]));
    const column = Math.min(columns.length - 1, Math.max(0, this.at.column + step[1]));
    this.cell(this.at.row, this.at.column).tabIndex = -1;
    this.cell(row, column).tabIndex = 0;
    this.cell(row, column).focus();
  }

  // Marks a row, and a column of it unless that is -1, and says what they are.
  mark(row, column) {
    const { rows, columns, weights } = this.words;
    this.table.querySelectorAll(".at, .here").forEach((element) => element.classList.remove("at", "here"));
    if (row < 0 || row >= rows.length) {
      this.readout.textContent = "Point at a word of the translation, or at the picture, to see where it looked.";
      return;
    }
    this.table.tBodies[0].rows[row].classList.add("at");
    if (column >= 0) {
      this.at = { row, column };
      this.cell(row, column).classList.add("here");
      this.table.tHead.rows[0].cells[column + 1].classList.add("at");
      this.readout.textContent = `“${rows[row].text}” looked at “${columns[column].text}” with ${percent(weights[row][column])}.`;
      return;
    }
    const most = weights[row].map((weight, place) => [weight, place]).sort((one, other) => other[0] - one[0]);
    const told = most.filter(([weight], rank) => rank === 0 || (rank < 3 && weight >= 0.05));
    for (const [, place] of told) this.table.tHead.rows[0].cells[place + 1].classList.add("at");
    const list = told.map(([weight, place]) => `“${columns[place].text}” ${percent(weight)}`).join(", ");
    this.readout.textContent = `“${rows[row].text}” looked at ${list}.`;
  }
}
