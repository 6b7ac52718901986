// Keeps the page and its model in the browser, so that it translates without a network after the first visit.

const FILES = {};
const NAME = `econmt ${Object.values(FILES).map((checksum) => checksum.slice(0, 8)).join(" ")}`;
const addresses = Object.keys(FILES).map((name) => new URL(name, location.href).href);
const page = new URL("./", location.href).href;

addEventListener("install", (event) => {
  const fill = async () => (await caches.open(NAME)).addAll(addresses.map((each) => new Request(each, { cache: "no-cache" })));
  event.waitUntil(fill().then(() => skipWaiting()));
});

// Earlier versions of this page leave; pages of other folders keep what they have.
addEventListener("activate", (event) => {
  const clean = async () => {
    for (const name of await caches.keys()) {
      if (name === NAME || !name.startsWith("econmt ")) continue;
      const cache = await caches.open(name);
      const [first] = await cache.keys();
      if (!first || new URL("./", first.url).href === page) await caches.delete(name);
    }
    await clients.claim();
  };
  event.waitUntil(clean());
});

addEventListener("fetch", (event) => {
  const address = event.request.url.split(/[?#]/)[0];
  const wanted = address === page ? `${page}index.html` : address;
  if (event.request.method !== "GET" || !addresses.includes(wanted)) return;
  const answer = async () => (await (await caches.open(NAME)).match(wanted)) ?? fetch(event.request);
  event.respondWith(answer());
});
