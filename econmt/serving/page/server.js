// What the page asks of its server.

export class Failed extends Error {}

async function read(response) {
  const text = await response.text();
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Failed(`The server answered with no JSON (status ${response.status}).`);
  }
  if (!response.ok) throw new Failed(found.error ?? `The server refused (status ${response.status}).`);
  return { found, bytes: new TextEncoder().encode(text).length };
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failed("The server cannot be reached.");
  }
}

export async function get(path) {
  return (await read(await reach(path))).found;
}

// The answer, and the bytes and milliseconds that it took.
export async function post(path, fields, signal) {
  const body = JSON.stringify(fields);
  const begun = performance.now();
  const response = await reach(path, { method: "POST", headers: { "Content-Type": "application/json" }, body, signal });
  const { found, bytes } = await read(response);
  return { found, received: bytes, sent: new TextEncoder().encode(body).length, milliseconds: performance.now() - begun };
}
