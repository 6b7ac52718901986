// Keeps the page and its model in the browser, so that it translates without a network after the first visit. The page names
// the model's checksum in the address of this file: other files come with another one.

const PREFIX = `econmt ${new URL("./", location.href).href} `;
const NAME = PREFIX + location.search.slice(1);
const page = new URL("./", location.href).href;

// A file with this checksum: the one that the page has just loaded, or, if that is of another model, the server's.
async function fetched(name, checksum) {
  for (const cache of ["no-cache", "reload"]) {
    const answer = await fetch(new Request(name, { cache }));
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", await answer.clone().arrayBuffer()));
    if (Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("") === checksum) return answer;
  }
  throw new Error(`${name} is not of this model`);
}

addEventListener("install", (event) => {
  const fill = async () => {
    const answer = await fetch(new Request("model.json", { cache: "reload" }));
    const cache = await caches.open(NAME);
    await cache.put("model.json", answer.clone());
    for (const [name, checksum] of Object.entries((await answer.json()).files)) await cache.put(name, await fetched(name, checksum));
    await skipWaiting();
  };
  event.waitUntil(fill());
});

addEventListener("activate", (event) => {
  const clean = async () => {
    for (const name of await caches.keys()) if (name.startsWith(PREFIX) && name !== NAME) await caches.delete(name);
    await clients.claim();
  };
  event.waitUntil(clean());
});

addEventListener("fetch", (event) => {
  const { method, mode, url } = event.request;
  if (method !== "GET" || !url.startsWith(page)) return;
  const address = mode === "navigate" ? url.split(/[?#]/)[0] : url; // links elsewhere add a query to the page's
  const kept = async () => (await caches.open(NAME)).match(address === page ? `${page}index.html` : address);
  event.respondWith(kept().then((answer) => answer ?? fetch(event.request)));
});
