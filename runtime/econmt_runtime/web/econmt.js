// Translates in the browser with a model that `econmt export --web` wrote; no server takes part.
//
//   import { load } from "./econmt.js";
//   const model = await load("./");
//   const [first] = await model.translate(["A dog runs."], { beam: 2 });
//   console.log(first.text, first.score);
//
// worker.js does the work, so that the page never waits.

const CLOSED = "the model has been closed";

// Loads the model below an address. Options: progress(bytes, all) is called while it comes; files: blobs by name, instead of
// the address. The result has translate, config and close.
export async function load(address, { progress, files } = {}) {
  const worker = new Worker(files ? URL.createObjectURL(files["worker.js"]) : new URL("worker.js", import.meta.url));
  const waiting = new Map();
  let last = 0;
  let closed = false;
  const fail = (message) => {
    for (const { reject } of waiting.values()) reject(new Error(message));
    waiting.clear();
  };
  worker.onerror = (event) => fail(event.message || "the worker cannot be started; this browser is too old");
  worker.onmessage = ({ data }) => {
    const call = waiting.get(data.id);
    if (!call) return;
    if (data.progress) return call.progress?.(...data.progress);
    waiting.delete(data.id);
    if (data.error === undefined) call.resolve(data.result);
    else call.reject(new Error(data.error));
  };
  const ask = (message, watch, signal) =>
    new Promise((resolve, reject) => {
      const id = ++last;
      const stop = () => {
        waiting.delete(id);
        worker.postMessage({ id, cancel: true });
        reject(signal.reason);
      };
      if (signal?.aborted) return reject(signal.reason);
      if (closed) return reject(new Error(CLOSED));
      signal?.addEventListener("abort", stop, { once: true });
      const settled = (act) => (value) => {
        signal?.removeEventListener("abort", stop);
        act(value);
      };
      waiting.set(id, { resolve: settled(resolve), reject: settled(reject), progress: watch });
      worker.postMessage({ id, ...message });
    });
  const close = () => {
    closed = true;
    worker.terminate();
    fail(CLOSED);
  };
  const base = files ? null : new URL(address, document.baseURI).href;
  return ask({ load: base, files }, progress).then(
    (config) => ({
      config,
      close,
      // Translates sentences. Options: beam, nbest, shortlist (translations of each word; 0: any word), glossary (pairs of a term
      // and its translation, or text as `econmt translate --glossary` reads it), target (one of config.targets, if the model has
      // several: sentences get its tag), signal (to cancel) and progress(sentences, all).
      // Each result has text, score, logProbability, nbest (the same, best first) and cut (true if
      // only the beginning of the text was translated).
      translate: (texts, { signal, progress: watch, ...options } = {}) => ask({ translate: texts, options }, watch, signal),
    }),
    (error) => {
      worker.terminate();
      throw error;
    },
  );
}
