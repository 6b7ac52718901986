// What the page asks of its server, and its errors in a person's words.

// `field` is the one that the message is about; after `seconds` the same request may succeed.
export class Failed extends Error {
  constructor(message, field = "text", seconds = 0) {
    super(message);
    Object.assign(this, { field, seconds });
  }
}

const REASONS = [
  [/api_key is none/, () => "This key is not one of the server's.", "key"],
  [/wants an api_key/, () => "This server wants a key; whoever runs the server has it.", "key"],
  [/(?:constraint|the glossary's translation) ['"](.+?)['"] has characters/, (word) => `The model cannot write “${word}”. Change or remove it.`, "glossary"],
  [/(?:constraint|the glossary's translation) ['"](.+?)['"] contains an avoided/, (word) => `“${word}” is in the glossary and among the words to avoid. Remove it from one of them.`, "glossary"],
  [/glossary:(\d+): .* has another translation/, (line) => `Line ${line} gives another translation to a term that has one already.`, "glossary"],
  [/glossary:(\d+): /, (line) => `Line ${line} cannot be read. Write “dog = Hund”.`, "glossary"],
  [/avoid\[.*the character (U\+\w+) is not/, (code) => `The character ${code} cannot be read. Remove it.`, "avoid"],
  [/the character (U\+\w+) is not/, (code) => `The text has a character that cannot be read, ${code}. Remove it.`],
  [/([\d,]+) characters, this server takes ([\d,]+)/, (many, most) => `The text has ${many} characters, and this server takes ${most} at a time. Translate it in parts.`],
  [/glossary and avoid have/, () => "The glossary and the words to avoid are too long for this server. Shorten them.", "glossary"],
  [/constraints and target_prefix have/, () => "These terms are longer than a translation can be. Shorten them.", "glossary"],
  [/a sentence of [\d,]+ tokens/, () => "A sentence is too long to be translated whole. Break it into shorter ones."],
  [/weights, at most/, () => "This sentence is too long for its attention to be shown."],
  [/sentences, more than/, () => "The text has too many sentences. Translate it in parts."],
  [/not a \.docx|no document/, () => "This file cannot be read as a Word document. Save it as .docx again, or paste its text."],
];
const STATUSES = {
  408: "The connection was too slow. Try again.",
  413: "The text is too long for this server. Translate it in parts.",
  415: "This kind of file cannot be translated. Choose a .txt, .html or .docx file.",
  429: "Too many requests in a short time.",
  503: "The server is busy.",
};

function refusal(response, line) {
  const seconds = Number(response.headers.get("Retry-After") ?? 0);
  for (const [pattern, words, field] of REASONS) {
    const match = pattern.exec(line);
    if (match) return new Failed(words(...match.slice(1)), field, seconds);
  }
  const fallback = response.status >= 500 ? "Something went wrong at the server" : "The server cannot translate this";
  return new Failed(STATUSES[response.status] ?? `${fallback}: ${line}`, undefined, seconds);
}

async function checked(response) {
  if (response.ok) return response;
  const text = await response.text();
  let line = text;
  try {
    line = JSON.parse(text).error ?? text;
  } catch {
    // A proxy answers with a page of its own.
  }
  throw refusal(response, line.slice(0, 500));
}

async function reach(path, options) {
  try {
    return await checked(await fetch(path, options));
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Failed) throw error;
    throw new Failed("The server does not answer. Check that it is running and that you are connected to it.", undefined, 5);
  }
}

async function parsed(response) {
  const text = await response.text();
  try {
    return { found: JSON.parse(text), received: new TextEncoder().encode(text).length };
  } catch {
    throw new Failed("The answer cannot be understood. Is there another program at this address?");
  }
}

export async function get(path) {
  return (await parsed(await reach(path))).found;
}

// The answer, and the bytes and milliseconds that it took.
export async function post(path, fields, signal) {
  const body = JSON.stringify(fields);
  const begun = performance.now();
  const response = await reach(path, { method: "POST", headers: { "Content-Type": "application/json" }, body, signal });
  const sent = new TextEncoder().encode(body).length;
  return { ...(await parsed(response)), sent, milliseconds: performance.now() - begun };
}

// The translation of a file, in its own form, by the glossary and the words to avoid.
export async function postFile(file, kind, languages, { glossary, avoid, api_key: key }) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const body = new FormData();
  body.append("file", new Blob([file], { type: kind }));
  body.append("glossary", glossary);
  for (const phrase of avoid) body.append("avoid", phrase);
  const response = await reach(`translate_file?${new URLSearchParams(languages)}`, { method: "POST", headers, body });
  return response.blob();
}
