{
  // Translations of several lists of lines with the same options: text, score and number of the best of each, or what is wrong.
  async translate([texts, options]) {
    const model = await (await import("./econmt.js")).load("./");
    const short = (all) => all.map(({ text, score, nbest }) => [text, score, nbest.length]);
    const found = [];
    for (const lines of texts) {
      const signal = lines.length > 1000 ? AbortSignal.timeout(50) : undefined;
      found.push(await model.translate(lines, { signal, ...options }).then(short, (error) => error.message));
    }
    return found;
  },
  // Ids of lines, and what they are decoded to, by a SentencePiece model.
  async subwords(data) {
    const text = (await (await fetch("worker.js")).text()).replace(
      /work\(\);\s*$/,
      `onmessage = ({ data: [model, lines] }) => {
        const words = new Subwords(Uint8Array.from(model));
        const ids = lines.map((line) => words.encode(normalized(line)));
        postMessage(ids.map((each) => [each, words.decode(each)]));
      };`,
    );
    const worker = new Worker(URL.createObjectURL(new Blob([text])));
    worker.postMessage(data);
    return await new Promise((resolve, reject) =>
      Object.assign(worker, { onmessage: (event) => resolve(event.data), onerror: reject }),
    );
  },
  // Changes fields of the page by their names; the translation that it then shows, and its language.
  async change(fields) {
    for (const [name, value] of Object.entries(fields)) {
      const field = document.getElementById(name);
      field.value = value;
      field.dispatchEvent(new Event(field.tagName === "SELECT" ? "change" : "input"));
    }
    for (let turn = 0; turn < 90000 && document.querySelector(".stale"); turn++) await new Promise((resolve) => setTimeout(resolve, 20));
    const target = document.getElementById("target");
    return [target.innerText, target.lang];
  },
  // What the page says of a copy where browsers give it no clipboard, over plain http; then whether the focus is kept while the translations of many lines come, and the status once they are cleared.
  async lines() {
    const [source, target] = ["source", "target"].map((id) => document.getElementById(id));
    const own = Object.getPrototypeOf(navigator);
    Object.setPrototypeOf(navigator, {});
    document.getElementById("copy").click();
    Object.setPrototypeOf(navigator, own);
    const copied = document.getElementById("status").textContent;
    source.value = "a b c\n".repeat(8000);
    source.dispatchEvent(new Event("input"));
    while (!target.querySelector(".sentence:not(.stale)")) await new Promise((resolve) => setTimeout(resolve, 20));
    const first = target.firstElementChild;
    first.focus();
    const shown = target.querySelectorAll(".sentence:not(.stale)").length;
    while (target.querySelectorAll(".sentence:not(.stale)").length === shown) await new Promise((resolve) => setTimeout(resolve, 20));
    const kept = document.activeElement === first;
    source.value = "";
    source.dispatchEvent(new Event("input"));
    for (let turn = 0; turn < 90000 && document.getElementById("status").textContent.startsWith("Translating"); turn++)
      await new Promise((resolve) => setTimeout(resolve, 20));
    return [copied, kept, document.getElementById("status").textContent.split(".")[0]];
  },
  // What is not as expected of calls that must fail.
  async failures() {
    const { load } = await import("./econmt.js");
    const [Own, text] = [Worker, await (await fetch("worker.js")).text()];
    const error = (promise) => Promise.race([promise.then(() => "no error", ({ message }) => message), new Promise((resolve) => setTimeout(resolve, 1800000, "no answer"))]);
    const after = (first) => {
      window.Worker = function () {
        return new Own(URL.createObjectURL(new Blob([first, text])));
      };
      return error(load("./")).finally(() => (window.Worker = Own));
    };
    const model = await load("./");
    model.close();
    const found = [
      [await error(model.translate(["a"])), "the model has been closed"],
      [await load("http://[").catch(({ name }) => name), "TypeError"],
      [await after("fetch = async () => new Response(new ReadableStream({ pull: () => Promise.reject(TypeError()) }));"), "model.json cannot be loaded; check the connection"],
      [await after(`Object.defineProperty(self, "location", { value: { href: "${location.href}" } }); delete self.WebAssembly;`), "this browser does not run econmt.wasm"],
    ];
    return found.filter(([told, expected]) => !told.startsWith(expected));
  },
}
