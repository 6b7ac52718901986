// The source text, editable, with an element for each line, so that a line can be as tall as its translation.

const UNDONE = 200; // lines of a paste that can be undone; for twice as many a browser takes four times as long

// The lines in a node; browsers also make bare text and line breaks.
function linesIn(node) {
  const lines = [""];
  const read = (parent) => {
    const children = [...parent.childNodes];
    children.forEach((child, number) => {
      if (child.nodeType === Node.TEXT_NODE) {
        const [first, ...rest] = child.data.replaceAll("\u200b", "").split("\n");
        lines[lines.length - 1] += first;
        lines.push(...rest);
      } else if (child.nodeName === "BR") {
        if (number + 1 < children.length && parent.childNodes.length > 1) lines.push("");
      } else if (child.nodeType === Node.ELEMENT_NODE) {
        if (number && (child.nodeName === "DIV" || child.nodeName === "P")) lines.push("");
        read(child);
      }
    });
  };
  read(node);
  return lines;
}

const isText = (node) => node.nodeType === Node.TEXT_NODE && !node.data.includes("\n");
const isLine = (node) =>
  node.nodeName === "DIV" &&
  node.className === "line" &&
  node.childNodes.length > 0 &&
  ((node.childNodes.length === 1 && node.firstChild.nodeName === "BR") || [...node.childNodes].every(isText));

export class Editor {
  // `changed` is called after each change.
  constructor(element, changed) {
    this.element = element;
    this.changed = changed;
    this.fill("");
    document.execCommand("defaultParagraphSeparator", false, "div");
    element.addEventListener("beforeinput", (event) => {
      if (event.inputType.startsWith("format")) event.preventDefault();
    });
    this.pasting = false;
    element.addEventListener("input", (event) => {
      if (this.pasting) return; // browsers tell each line of it
      if (!event.isComposing) this.tidy();
      changed();
    });
    element.addEventListener("compositionend", () => this.tidy());
    element.addEventListener("paste", (event) => {
      event.preventDefault();
      const text = event.clipboardData.getData("text/plain").replaceAll("\r\n", "\n");
      this.pasting = true;
      if (text.split("\n").length <= UNDONE) document.execCommand("insertText", false, text);
      else this.insert(text);
      this.pasting = false;
      this.tidy();
      changed();
    });
  }

  // Puts text in place of the selection, without undo.
  insert(text) {
    const selection = getSelection();
    if (!selection.isCollapsed) document.execCommand("delete");
    const node = document.createTextNode(text);
    selection.getRangeAt(0).insertNode(node);
    selection.collapse(node, node.length);
  }

  get lines() {
    return linesIn(this.element);
  }

  get text() {
    return this.lines.join("\n");
  }

  set text(text) {
    this.fill(text);
    this.changed();
  }

  fill(text) {
    this.element.replaceChildren(
      ...text.split("\n").map((content) => {
        const line = document.createElement("div");
        line.className = "line";
        line.dir = "auto";
        line.append(content || document.createElement("br"));
        return line;
      }),
    );
    this.blank();
  }

  blank() {
    this.element.classList.toggle("blank", !this.element.textContent);
  }

  // Makes each line an element again, after what browsers do to them, and keeps the cursor.
  tidy() {
    this.blank();
    if (this.element.childNodes.length && [...this.element.childNodes].every(isLine)) return;
    const selection = getSelection();
    const before = document.createRange();
    before.selectNodeContents(this.element);
    const inside = selection.rangeCount && this.element.contains(selection.focusNode);
    if (inside) before.setEnd(selection.focusNode, selection.focusOffset);
    const read = linesIn(before.cloneContents());
    this.fill(this.text);
    if (!inside) return;
    const line = this.element.childNodes[Math.min(read.length, this.element.childNodes.length) - 1];
    const text = line.firstChild;
    const at = text.nodeType === Node.TEXT_NODE ? Math.min(read[read.length - 1].length, text.length) : 0;
    selection.collapse(text.nodeType === Node.TEXT_NODE ? text : line, at);
  }
}
