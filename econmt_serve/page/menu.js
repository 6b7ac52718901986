// The words that may stand in the place of one, as a menu under it.

export class Menu {
  constructor(element) {
    this.element = element;
    this.owner = null;
    element.addEventListener("keydown", (event) => this.key(event));
    element.addEventListener("focusout", (event) => {
      if (event.relatedTarget && !element.contains(event.relatedTarget)) this.close();
    });
    document.addEventListener("pointerdown", (event) => {
      if (this.owner && !element.contains(event.target) && event.target !== this.owner) this.close();
    });
  }

  open(owner, message) {
    this.close();
    this.owner = owner;
    owner.setAttribute("aria-expanded", "true");
    this.say(message);
    this.element.hidden = false;
    const place = owner.getBoundingClientRect();
    const left = Math.min(place.left, document.documentElement.clientWidth - this.element.offsetWidth - 12);
    this.element.style.left = `${Math.max(12, left) + window.scrollX}px`;
    this.element.style.top = `${place.bottom + window.scrollY + 4}px`;
  }

  say(message) {
    const line = document.createElement("p");
    line.textContent = message;
    this.element.replaceChildren(line);
  }

  // Entries are {word, probability}; `choose` gets the one that is chosen.
  fill(entries, choose) {
    if (!entries.length) {
      this.say("The model knows no other word here.");
      return;
    }
    this.element.replaceChildren(
      ...entries.map((entry) => {
        const item = document.createElement("button");
        item.type = "button";
        item.setAttribute("role", "menuitem");
        item.title = entry.translation;
        const share = document.createElement("small");
        share.className = "figure";
        share.textContent = `${(100 * entry.probability).toPrecision(2)} %`;
        item.append(entry.word, share);
        item.addEventListener("click", () => {
          this.close();
          choose(entry);
        });
        return item;
      }),
    );
    this.element.firstElementChild.focus();
  }

  key(event) {
    const items = [...this.element.querySelectorAll("button")];
    const at = items.indexOf(document.activeElement);
    const steps = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 };
    if (event.key in steps && items.length) {
      event.preventDefault();
      items[(steps[event.key] + items.length) % items.length].focus();
    } else if (event.key === "Escape") {
      const owner = this.owner;
      this.close();
      owner?.focus();
    } else if (event.key === "Tab") {
      this.close();
    }
  }

  close() {
    this.owner?.setAttribute("aria-expanded", "false");
    this.owner = null;
    this.element.hidden = true;
  }
}
