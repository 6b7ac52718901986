// Interactive documentation of the interface: reads its OpenAPI description and tries each request.

const made = (name, text = "", attributes = {}) => {
  const element = document.createElement(name);
  element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
};
const key = document.getElementById("key");
document.documentElement.dataset.theme = localStorage.getItem("theme") ?? "";

function typeOf(schema) {
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "values"}`;
  return schema.type ?? "any";
}

// A table of names with their types and meanings.
function fields(rows) {
  const table = made("table", "", { class: "fields" });
  for (const row of rows) {
    const line = table.insertRow();
    row.forEach((text, place) => line.append(made(place ? "td" : "th", text, place ? {} : { scope: "row" })));
  }
  return table;
}

function rowsOf(schema) {
  return Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const fixed = field.default === undefined ? "" : `, default ${JSON.stringify(field.default)}`;
    const needed = schema.required?.includes(name) ? ", required" : "";
    return [name, `${typeOf(field)}${needed}${fixed}`, field.description ?? ""];
  });
}

function exampleOf(schema) {
  const example = {};
  for (const name of schema.required ?? []) example[name] = schema.properties[name].examples?.[0] ?? "";
  return JSON.stringify(example, null, 2);
}

// The form that tries a request: a body of JSON, or a file.
function trial(path, method, operation, schema) {
  const form = made("form");
  const kinds = Object.keys(operation.requestBody?.content ?? {});
  const id = `${method}${path}`;
  let body = null;
  const queries = (operation.parameters ?? []).map(({ name }) => {
    const input = made("input", "", { type: "text", id: `${id}?${name}`, name });
    form.append(made("label", name, { for: input.id }), input);
    return input;
  });
  if (kinds.length) {
    body = schema ? made("textarea", "", { rows: "6", spellcheck: "false", id }) : made("input", "", { type: "file", id });
    if (schema) body.value = exampleOf(schema);
    form.append(made("label", schema ? "Body" : `File (${kinds.join(", ")})`, { for: id }), body);
  }
  const answer = made("pre", "", { class: "answer", "aria-live": "polite", tabindex: "0" });
  answer.hidden = true;
  form.append(made("button", "Send", { type: "submit" }), answer);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const file = body?.files?.[0];
    const headers = key.value ? { Authorization: `Bearer ${key.value}` } : {};
    if (body) headers["Content-Type"] = schema ? "application/json" : file?.type || "text/plain";
    const query = new URLSearchParams(queries.filter((each) => each.value).map((each) => [each.name, each.value]));
    answer.hidden = false;
    answer.textContent = "…";
    try {
      const address = path.slice(1) + (query.size ? `?${query}` : "");
      const response = await fetch(address, { method, headers, body: body ? (schema ? body.value : file) : undefined });
      const binary = response.headers.get("Content-Type")?.startsWith("application/vnd");
      const text = binary ? `${(await response.blob()).size} bytes` : await response.text();
      answer.textContent = `${response.status} ${response.statusText}\n${shown(text)}`;
    } catch (error) {
      answer.textContent = `No answer: ${error.message}`;
    }
  });
  return form;
}

function shown(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function section(path, method, operation, schemas) {
  const part = made("section", "", { class: "card operation" });
  const details = made("details");
  const summary = made("summary");
  summary.append(made("strong", `${method.toUpperCase()} ${path}`), ` ${operation.summary}`);
  const reference = operation.requestBody?.content["application/json"]?.schema.$ref;
  const schema = reference ? schemas[reference.split("/").pop()] : null;
  details.append(summary);
  if (schema) details.append(made("h2", "Fields"), fields(rowsOf(schema)));
  const responses = Object.entries(operation.responses).map(([status, { description }]) => [status, description]);
  details.append(made("h2", "Answers"), fields(responses), made("h2", "Try it"), trial(path, method, operation, schema));
  part.append(details);
  return part;
}

async function begin() {
  const description = await (await fetch("spec")).json();
  document.getElementById("about").textContent = `${description.info.description} Version ${description.info.version}.`;
  document.getElementById("key-field").hidden = !description.security;
  key.value = localStorage.getItem("key") ?? "";
  for (const [path, methods] of Object.entries(description.paths))
    for (const [method, operation] of Object.entries(methods))
      document.getElementById("operations").append(section(path, method, operation, description.components.schemas));
}

begin().catch((error) => {
  const box = document.getElementById("error");
  box.hidden = false;
  box.textContent = `The description cannot be read: ${error.message}`;
});
