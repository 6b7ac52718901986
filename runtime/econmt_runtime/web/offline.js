// Keeps the page and its model in the browser, so that it translates without a network after the first visit. The page names
// the model's checksum in the address of this file: other files come with another one.

const PREFIX = `econmt ${new URL("./", location.href).href} `;
const NAME = PREFIX + location.search.slice(1);
const page = new URL("./", location.href).href;

addEventListener("install", (event) => {
  const fill = async () => {
    const fresh = (name) => new Request(name, { cache: "no-cache" });
    const { files } = await (await fetch(fresh("model.json"))).json();
    await (await caches.open(NAME)).addAll([...Object.keys(files), "model.json"].map(fresh));
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
  const { method, url } = event.request;
  if (method !== "GET" || !url.startsWith(page)) return;
  const kept = async () => (await caches.open(NAME)).match(url === page ? `${page}index.html` : url);
  event.respondWith(kept().then((answer) => answer ?? fetch(event.request)));
});
