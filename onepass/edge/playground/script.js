"use strict";
// The form is the state: it is read whenever something is sent or shown as code. Text goes in as text, never as HTML.

const KINDS = {
  noul: { more: "", name: "Yes or no", ask: "Is the customer asking for a refund?", criteria: [["yes", ""], ["no", ""]] },
  choice: { more: "+ Option", name: "Choice", ask: "Which team should handle this?", criteria: [["", ""], ["", ""]] },
  score: { more: "+ Level", name: "Score", ask: "How angry is the customer?", criteria: ["", "", ""] },
};
const EXAMPLES = [
  {
    name: "A customer writes",
    state: "I was charged twice for order 1182 and nobody answers my mails. I want a refund, now!",
    questions: [
      { id: "refund", type: "noul", instructions: "Does the customer want a refund?", criteria: [["yes", ""], ["no", ""]] },
      { id: "team", type: "choice", instructions: "Which team should handle this?", criteria: [["billing", "Payments, invoices and refunds"], ["delivery", "Parcels and shipping"], ["account", "Login and password"]] },
      { id: "anger", type: "score", instructions: "How angry is the customer?", criteria: ["Calm", "Annoyed", "Furious"] },
    ],
  },
  {
    name: "A ticket as JSON",
    isJson: true,
    state: JSON.stringify({ title: "App crashes when I export a report", version: "4.2.1", os: "Android 15", body: "Every time I tap Export the app freezes and then closes. I lost an hour of work." }, null, 2),
    questions: [
      { id: "topic", type: "choice", instructions: "What is the ticket about?", criteria: [["crash", "The app crashes or freezes"], ["payment", "A payment or an invoice"], ["feature", "A wish for something new"]] },
      { id: "severity", type: "score", instructions: "How bad is it?", criteria: ["Cosmetic", "Annoying", "Blocks the work", "Data is lost"] },
      { id: "reproducible", type: "noul", instructions: "", criteria: [["yes", "It happens every time"], ["no", "It happened once"]] },
    ],
  },
  {
    name: "A voice command",
    state: "set an alarm for half past six tomorrow",
    questions: [
      { id: "intent", type: "choice", instructions: "What does the user want?", criteria: [["set_alarm", "Set an alarm"], ["play_music", "Play music"], ["weather", "Ask about the weather"], ["lights", "Switch the lights"], ["calendar", "Add something to the calendar"]] },
      { id: "urgent", type: "score", instructions: "How urgent is it?", criteria: ["Can wait", "Today", "Right now"] },
    ],
  },
];
const STAGES = ["read", "parse", "render", "queue", "model", "readout"];
const MAX_SHOWN_ID = 64; // where the server cuts a name in an error
const POLL_MS = 2000;

const $ = (id) => document.getElementById(id);
const form = $("form");
const pictures = []; // {name, file, base64}
let sending = null; // the AbortController of the request under way
let lastAnswer = ""; // as the server wrote it
let shownCode = "curl";

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// JSON is written by hand: an object of JavaScript would sort keys like "10" and lose "__proto__"
const quote = (text) => JSON.stringify(text);
const objectText = (pairs) => `{${pairs.map(([key, value]) => `${quote(key)}:${value}`).join(",")}}`;
const tokens = (json) => json.match(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g) || [];

function indent(json, { step = "  ", width = 84, start = 0 } = {}) {
  // What fits on a line stays on it
  const all = tokens(json);
  const ends = new Map(); // opening token -> closing token
  const open = [];
  all.forEach((token, place) => {
    if (token === "{" || token === "[") open.push(place);
    if (token === "}" || token === "]") ends.set(open.pop(), place);
  });
  const flat = (from, to) => all.slice(from, to + 1).map((token) => (token === "," || token === ":" ? `${token} ` : token)).join("");
  let depth = start;
  let text = "";
  for (let place = 0; place < all.length; place += 1) {
    const token = all[place];
    const line = text.length - text.lastIndexOf("\n") - 1;
    if (ends.has(place) && (ends.get(place) === place + 1 || line + flat(place, ends.get(place)).length <= width)) {
      text += flat(place, ends.get(place));
      place = ends.get(place);
    } else if (token === "{" || token === "[") {
      depth += 1;
      text += `${token}\n${step.repeat(depth)}`;
    } else if (token === "}" || token === "]") {
      depth -= 1;
      text += `\n${step.repeat(depth)}${token}`;
    } else text += token === "," ? `,\n${step.repeat(depth)}` : token === ":" ? ": " : token;
  }
  return text;
}

// Questions

function addQuestion({ id, type, instructions = "", criteria = KINDS[type].criteria }) {
  const card = $("question").content.firstElementChild.cloneNode(true);
  card.querySelector(".id").value = id;
  card.querySelector(".instructions").value = instructions;
  card.querySelector(".type").value = type;
  setKind(card, type, criteria);
  $("questions").append(card);
  return card;
}

function setKind(card, type, criteria) {
  card.classList.remove(...Object.keys(KINDS));
  card.classList.add(type);
  card.querySelector(".instructions").placeholder = `The question, such as: ${KINDS[type].ask}`;
  card.querySelector(".more").textContent = KINDS[type].more;
  card.querySelector(".options").replaceChildren();
  for (const item of criteria) addOption(card, type === "score" ? ["", item] : item);
}

function addOption(card, [label, description]) {
  const type = card.querySelector(".type").value;
  const item = $("option").content.firstElementChild.cloneNode(true);
  const [labelInput, descriptionInput] = item.querySelectorAll("input");
  labelInput.value = label;
  descriptionInput.value = description;
  labelInput.placeholder = "label";
  descriptionInput.placeholder = { noul: "when? (optional)", choice: "what it means (optional)", score: "what this level means" }[type];
  card.querySelector(".options").append(item);
  numberOptions(card);
  return item;
}

function numberOptions(card) {
  const type = card.querySelector(".type").value;
  [...card.querySelectorAll(".option")].forEach((item, place) => {
    const [label, description] = item.querySelectorAll("input");
    item.querySelector(".mark").textContent = type === "noul" ? `${label.value} means` : type === "score" ? String(place) : "";
    label.setAttribute("aria-label", `Label ${place + 1}`);
    description.setAttribute("aria-label", type === "noul" ? `What ${label.value} means` : type === "score" ? `Level ${place}` : `What label ${place + 1} means`);
  });
}

function freeId(type) {
  const taken = new Set([...document.querySelectorAll(".question .id")].map((input) => input.value));
  let number = 1;
  while (taken.has(`${type}_${number}`)) number += 1;
  return `${type}_${number}`;
}

function show(example) {
  form.kind.value = example.isJson ? "json" : "text";
  $("state").value = example.state;
  $("questions").replaceChildren();
  example.questions.forEach(addQuestion);
  clearProblems();
  refresh();
}

// Reading the form

function readForm() {
  // {fields: [name, JSON][], questions, places: Map of error location -> element, mistakes: [element, text][]}
  const places = new Map();
  const mistakes = [];
  const at = (element, ...loc) => places.set(quote(loc.map(shorten)), element);
  const isJson = form.kind.value === "json";
  let state = quote($("state").value);
  at($("state"), "state");
  if (isJson) {
    state = $("state").value.trim();
    try {
      JSON.parse(state);
    } catch (error) {
      mistakes.push([$("state"), state ? `This is not JSON: ${error.message}` : "Write JSON here, or switch to Text"]);
    }
  }
  const questions = [...document.querySelectorAll(".question")].map((card) => readQuestion(card, at, mistakes));
  repeated(questions.map((question) => [question.card.querySelector(".id"), question.id]), "Another question has this id", mistakes);
  at($("questions-problem"), "questions");
  at($("encoding"), "encoding");
  at($("files"), "images");
  for (const { name, input } of pictures) at(input || $("files"), "images", name);
  const fields = [["state", state], ["questions", objectText(questions.map(({ id, json }) => [id, json]))]];
  if ($("encoding").value) fields.push(["encoding", quote($("encoding").value)]);
  return { fields, questions, places, mistakes, isJson };
}

function readQuestion(card, at, mistakes) {
  const id = card.querySelector(".id").value;
  const type = card.querySelector(".type").value;
  const instructions = card.querySelector(".instructions").value;
  const rows = [...card.querySelectorAll(".option")].map((item) => {
    const [label, description] = item.querySelectorAll("input");
    return { item, label, description };
  });
  at(card.querySelector(".id"), "questions", id);
  at(card.querySelector(".type"), "questions", id, "type");
  at(card.querySelector(".instructions"), "questions", id, type, "instructions");
  at(card.querySelector(".options"), "questions", id, type, "criteria");
  const pairs = [["type", quote(type)]];
  if (instructions) pairs.push(["instructions", quote(instructions)]);
  let options;
  if (type === "score") {
    const levels = rows.filter(({ description }) => description.value !== "");
    levels.forEach(({ description }, place) => at(description, "questions", id, type, "criteria", place));
    options = levels.map(({ description }, place) => ({ key: String(place), text: description.value }));
    pairs.push(["criteria", `[${options.map(({ text }) => quote(text)).join(",")}]`]);
  } else {
    const used = rows.filter(({ label, description }) => (type === "noul" ? description.value : label.value || description.value) !== "");
    used.forEach(({ label, description }) => at(type === "noul" ? description : label, "questions", id, type, "criteria", label.value));
    if (type === "choice") repeated(used.map(({ label }) => [label, label.value]), "Another option has this label", mistakes);
    options = used.map(({ label, description }) => ({ key: label.value, text: description.value }));
    const criteria = objectText(options.map(({ key, text }) => [key, text === "" ? "null" : quote(text)]));
    if (type === "choice" || options.length) pairs.push(["criteria", criteria]);
  }
  return { card, id, type, instructions, options, json: objectText(pairs) };
}

function repeated(inputs, text, mistakes) {
  const seen = new Set();
  for (const [input, value] of inputs) {
    if (seen.has(value)) mistakes.push([input, text]);
    seen.add(value);
  }
}

function shorten(place) {
  const chars = typeof place === "string" ? Array.from(place) : [];
  return chars.length > MAX_SHOWN_ID ? `${chars.slice(0, MAX_SHOWN_ID).join("")}…` : place;
}

// Problems, each at the field that it names

const problemOf = (element) => {
  if (element.id) return element.id === "files" ? $("pictures-problem") : element.classList.contains("problem") ? element : $(`${element.id}-problem`);
  if (element.closest(".option")) return element.closest(".option").querySelector(".problem");
  return element.closest(".question").querySelector(`[data-of="${{ options: "criteria" }[element.className] || element.className}"]`);
};

function showProblem(element, text) {
  const problem = problemOf(element);
  problem.textContent = problem.hidden ? text : `${problem.textContent}. ${text}`;
  problem.hidden = false;
  problem.id = problem.id || `problem-${crypto.getRandomValues(new Uint32Array(1))[0]}`;
  element.setAttribute("aria-invalid", "true");
  element.setAttribute("aria-describedby", problem.id);
}

function clearProblem(element) {
  element.removeAttribute("aria-invalid");
  const problem = problemOf(element);
  if (problem) problem.hidden = true;
}

function clearProblems() {
  document.querySelectorAll("[aria-invalid]").forEach(clearProblem);
  document.querySelectorAll(".problem").forEach((problem) => { problem.hidden = true; });
  $("banner").hidden = true;
}

function focusFirstProblem() {
  const first = document.querySelector("[aria-invalid]");
  if (!first) return;
  const target = first.matches("input, select, textarea") ? first : first.querySelector("input") || first.closest("section").querySelector("button");
  target.focus({ preventScroll: true });
  first.scrollIntoView({ block: "center" });
}

function showBanner(message, detail = "") {
  $("banner").querySelector(".message").textContent = message;
  $("banner").querySelector(".detail").textContent = detail;
  $("banner").hidden = false;
}

function showError(status, headers, text, places) {
  const id = headers.get("x-typesafe-request-id") || "";
  const retry = headers.get("retry-after");
  let detail;
  try {
    ({ detail } = JSON.parse(text));
  } catch {
    detail = null;
  }
  const rest = [];
  if (Array.isArray(detail)) {
    for (const { loc, msg } of detail) {
      const path = loc.slice(1);
      while (path.length && !places.has(quote(path))) path.pop();
      if (path.length) showProblem(places.get(quote(path)), msg);
      else rest.push(`${loc.join(".")}: ${msg}`);
    }
    const count = detail.length - rest.length;
    if (count) rest.unshift(count === 1 ? "One field needs a change; it is marked." : `${count} fields need a change; they are marked.`);
  } else {
    const message = (detail && detail.message) || (typeof detail === "string" ? detail : "The answer could not be read.");
    const picture = pictures.find(({ name }) => status === 400 && message.includes(name));
    if (status === 401) showProblem($("key"), message);
    else if (picture) showProblem($("files"), message);
    else if (detail && detail.error_type === "max_tokens_exceeded") showProblem($("state"), message);
    rest.push(message);
  }
  if (retry) rest.push(`Try again in ${retry} s.`);
  showBanner(rest.join(" "), `status ${status} · ${id}`);
  focusFirstProblem();
}

// Sending

async function send() {
  if (sending) {
    sending.abort();
    return;
  }
  clearProblems();
  const { fields, questions, places, mistakes } = readForm();
  mistakes.forEach(([element, text]) => showProblem(element, text));
  if (mistakes.length) {
    focusFirstProblem();
    return;
  }
  if (pictures.length) fields.push(["images", objectText(pictures.map(({ name, base64 }) => [name, quote(base64)]))]);
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value.trim()}`;
  sending = new AbortController();
  $("send").firstChild.data = "Stop ";
  $("answers").classList.add("stale");
  const started = performance.now();
  try {
    const response = await fetch("v1/systemone", { method: "POST", headers, body: objectText(fields), signal: sending.signal });
    lastAnswer = await response.text();
    const elapsed = performance.now() - started;
    if (response.status === 503) askHealth();
    if (response.ok) showAnswers(lastAnswer, questions, response.headers, elapsed);
    else showError(response.status, response.headers, lastAnswer, places);
  } catch (error) {
    if (error.name === "AbortError") showBanner("Stopped: the question was taken back.");
    else {
      showBanner("No answer came.", String(error.message));
      askHealth();
    }
  } finally {
    sending = null;
    $("send").firstChild.data = "Ask ";
    refresh();
  }
}

// Answers

const percent = (p) => `${(p * 100).toFixed(1)} %`;
const milliseconds = (ms) => `${ms < 10 ? ms.toFixed(2) : ms < 100 ? ms.toFixed(1) : Math.round(ms)} ms`;

function bar(share, tag = "span") {
  const fill = make(tag, { className: "fill" });
  fill.style.width = `${Math.min(100, share * 100)}%`;
  return make("span", { className: "track" }, fill);
}

function bars(items, best) {
  return make("ul", { className: "bars" }, ...items.map(({ key, name, p }) => make(
    "li", { className: key === best ? "best" : "" },
    make("span", { className: "name" }, ...name), bar(p), make("span", { className: "value" }, percent(p)),
  )));
}

function showAnswer({ id, type, instructions, options }, answer) {
  let items;
  let verdict;
  let best;
  if (type === "noul") {
    const p = answer.noul;
    items = [{ key: "yes", name: ["yes"], p }, { key: "no", name: ["no"], p: 1 - p }];
    best = p >= 0.5 ? "yes" : "no";
    verdict = [best];
  } else if (type === "choice") {
    items = options.map(({ key }) => ({ key, name: [key === "" ? "(empty)" : key], p: answer.probabilities[key] }));
    best = answer.choice;
    verdict = [answer.choice];
  } else {
    items = options.map(({ key, text }) => ({ key, name: [make("i", {}, key), text], p: answer.probabilities[key] }));
    best = items.reduce((top, item) => (item.p > top.p ? item : top)).key;
    verdict = [answer.score.toFixed(2), make("small", {}, ` of 0 to ${options.length - 1}`)];
  }
  const card = make("article", { className: "card answer" },
    make("div", { className: "row" }, make("h3", {}, id), make("p", { className: "verdict" }, ...verdict)),
    make("p", { className: "asked" }, instructions || KINDS[type].name),
    bars(items, best));
  if (answer.confidence !== undefined) {
    card.append(make("p", { className: "confidence" }, "confidence", bar(answer.confidence), make("output", {}, answer.confidence.toFixed(2))));
  }
  return card;
}

function showAnswers(text, questions, headers, elapsed) {
  const decision = JSON.parse(text);
  const answers = new Map(Object.entries(decision.answers));
  $("answers").classList.remove("stale"); // what stands there after an error is of an earlier request
  $("answers").replaceChildren(...questions.map((question) => showAnswer(question, answers.get(question.id))));
  const times = new Map((headers.get("server-timing") || "").split(",").map((part) => {
    const match = part.match(/^\s*([a-z]+);dur=([\d.]+)/);
    return match ? [match[1], Number(match[2])] : ["", 0];
  }));
  const total = times.get("total") || decision.x_latency_ms;
  const figures = [["in the server", milliseconds(total)], ["round trip", milliseconds(elapsed)], ["tokens read", String(decision.usage.input_tokens)], ["tokens written", String(decision.usage.output_tokens)]];
  if (decision.usage.image_tokens !== undefined) figures.push(["picture tokens", String(decision.usage.image_tokens)]);
  figures.push(["model", decision.model], ["request", headers.get("x-typesafe-request-id") || ""]);
  $("figures").querySelector(".totals").replaceChildren(...figures.map(([name, value]) => make(
    "div", { className: name === "model" || name === "request" ? "wide" : "" }, make("dt", {}, name), make("dd", {}, value),
  )));
  const known = STAGES.filter((stage) => times.has(stage)).map((stage) => [stage, times.get(stage)]);
  const rest = total - known.reduce((sum, [, ms]) => sum + ms, 0);
  const parts = [...known, ["other", Math.max(0, rest)]];
  $("figures").querySelector(".stack").replaceChildren(...parts.map(([, ms], place) => {
    const part = make("span", { className: `stage-${place + 1}` });
    part.style.flexGrow = String(ms);
    return part;
  }));
  $("figures").querySelector(".legend").replaceChildren(...parts.map(([stage, ms], place) => make(
    "li", {}, make("i", { className: `stage-${place + 1}` }), `${stage} ${milliseconds(ms)}`,
  )));
  $("figures").hidden = false;
  if (matchMedia("(max-width: 860px)").matches) $("result").scrollIntoView();
}

// Code

const endpoint = () => new URL("v1/systemone", location.href).href;
const shellQuote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function asCurl({ fields }) {
  const head = `curl -s ${endpoint()} \\\n  -H 'Content-Type: application/json'${$("key").value ? ' \\\n  -H "Authorization: Bearer $ONEPASS_API_KEY"' : ""} \\\n`;
  if (!pictures.length) return `${head}  -d ${shellQuote(indent(objectText(fields), { start: 1 }))}\n`;
  const files = pictures.map(({ name, file }) => [name, `"$(base64 < ${shellQuote(file.name)} | tr -d '\\n')"`]);
  const text = indent(objectText(fields)).replace(/[\\$`]/g, "\\$&"); // a here-document, for the pictures' sake
  return `${head}  -d @- <<END\n${text.slice(0, -1).trimEnd()},\n  "images": ${objectText(files)}}\nEND\n`;
}

function asPython({ fields, questions }) {
  const literal = (json) => tokens(json).map((token) => ({ true: "True", false: "False", null: "None", ",": ", ", ":": ": " }[token] || token)).join("");
  const values = new Map(fields);
  const names = [...new Set(questions.map(({ type }) => type[0].toUpperCase() + type.slice(1)))].sort();
  const key = $("key").value ? 'os.environ["ONEPASS_API_KEY"]' : '"unused"';
  const calls = questions.map(({ id, type, instructions, options }) => {
    const given = instructions ? [`instructions=${quote(instructions)}`] : [];
    const sides = options.map(({ key: side, text }) => [{ yes: "true", no: "false" }[side] || side, quote(text)]);
    if (type === "noul" && options.length) given.push(`criteria=${literal(objectText(sides))}`);
    if (type === "choice") given.push(`criteria=${literal(objectText(options.map(({ key: label, text }) => [label, text === "" ? "null" : quote(text)])))}`);
    if (type === "score") given.push(`criteria=[${options.map(({ text }) => quote(text)).join(", ")}]`);
    return `            ${quote(id)}: ${type[0].toUpperCase() + type.slice(1)}(${given.join(", ")}),\n`;
  });
  const state = values.get("state");
  const named = pictures.filter(({ name }) => state.includes(`<image:${name}>`));
  const unnamed = pictures.filter((picture) => !named.includes(picture));
  const extra = [];
  if (values.has("encoding")) extra.push(`"encoding": ${values.get("encoding")}`);
  if (unnamed.length) extra.push(`"images": {${unnamed.map(({ name, file }) => `${quote(name)}: b64encode(Path(${quote(file.name)}).read_bytes()).decode()`).join(", ")}}`);
  const assets = named.map(({ name, file }) => `"<image:${name}>": Image(Path(${quote(file.name)}))`);
  const imports = [
    ...($("key").value ? ["import os"] : []),
    ...(unnamed.length ? ["from base64 import b64encode"] : []),
    ...(pictures.length ? ["from pathlib import Path"] : []),
  ];
  return `${imports.length ? `${imports.join("\n")}\n\n` : ""}from typesafe_sdk import ${[...names, ...(named.length ? ["Image"] : []), "TypeSafeClient"].sort().join(", ")}

with TypeSafeClient(api_key=${key}, base_url=${quote(new URL(".", location.href).href.replace(/\/$/, ""))}) as client:
    answer = client.system_one(
        state=${literal(state)},
        questions={
${calls.join("")}        },
${assets.length ? `        assets={${assets.join(", ")}},\n` : ""}${extra.length ? `        extra_body={${extra.join(", ")}},\n` : ""}    )

for question, found in answer.answers.items():
    print(question, found)
`;
}

function refresh() {
  const read = readForm();
  const hasMistake = read.mistakes.length > 0;
  document.querySelector("#state-card").classList.toggle("json", read.isJson);
  let text = "";
  if (shownCode === "answer") text = lastAnswer ? indent(lastAnswer) : "No answer yet.";
  else if (hasMistake) text = `Not yet: ${read.mistakes[0][1]}`;
  else text = shownCode === "curl" ? asCurl(read) : asPython(read);
  $("snippet").textContent = text;
}

async function copySnippet() {
  const text = $("snippet").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no clipboard without HTTPS or localhost: select it instead
    getSelection().selectAllChildren($("snippet"));
    $("copy").textContent = "Press Ctrl C";
    return;
  }
  $("copy").textContent = "Copied";
  setTimeout(() => { $("copy").textContent = "Copy"; }, 1500);
}

function chooseTab(tab) {
  for (const other of document.querySelectorAll("[role=tab]")) {
    other.setAttribute("aria-selected", String(other === tab));
    other.tabIndex = other === tab ? 0 : -1;
  }
  shownCode = tab.dataset.code;
  $("snippet").setAttribute("aria-labelledby", tab.id);
  $("copy").textContent = "Copy";
  refresh();
}

// Pictures

function pictureName(file) {
  const stem = file.name.replace(/\.[^.]*$/, "").replace(/[^A-Za-z0-9_-]+/g, "-").replace(/^-|-$/g, "") || "picture";
  let name = stem;
  for (let number = 2; pictures.some((picture) => picture.name === name); number += 1) name = `${stem}-${number}`;
  return name;
}

async function addPictures(files) {
  clearProblem($("files"));
  for (const file of files) {
    if (!/^image\/(png|jpeg|webp|gif)$/.test(file.type)) {
      showProblem($("files"), `${file.name} is no PNG, JPEG, WebP or GIF`);
      continue;
    }
    const url = await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
    const picture = { name: pictureName(file), file, base64: url.slice(url.indexOf(",") + 1) };
    pictures.push(picture);
    const remove = make("button", { type: "button", ariaLabel: `Remove ${picture.name}` }, "remove");
    const item = make("li", {}, make("img", { src: url, alt: picture.name }), make("span", {}, `<image:${picture.name}>`), remove);
    remove.addEventListener("click", () => {
      pictures.splice(pictures.indexOf(picture), 1);
      item.remove();
      if (form.kind.value === "text") $("state").value = $("state").value.replaceAll(`<image:${picture.name}>`, "").trimEnd();
      refresh();
    });
    $("pictures").querySelector(".thumbs").append(item);
    if (form.kind.value === "text") {
      const before = $("state").value;
      $("state").value = `${before}${before && !/\s$/.test(before) ? "\n" : ""}<image:${picture.name}>`;
    }
  }
  refresh();
}

function takeDropped(event, transfer) {
  if ($("pictures").hidden || !transfer || !transfer.files.length) return;
  event.preventDefault();
  addPictures([...transfer.files]);
}

// What is served

async function askHealth() {
  let state = "down";
  let text = "the server cannot be reached";
  try {
    const response = await fetch("health", { cache: "no-store" });
    const facts = await response.json();
    state = response.ok ? "ready" : "waiting";
    text = response.ok ? [facts.model, facts.backend, facts.device, facts.dtype].filter(Boolean).join(" · ") : `${facts.model || "the model"}: ${facts.reason || facts.status || "not ready"}`;
    $("pictures").hidden = facts.images !== true;
  } catch { /* the text above says so */ }
  $("served").className = `served ${state}`;
  $("served").querySelector(".text").textContent = text;
  if (state !== "ready") setTimeout(askHealth, POLL_MS);
}

// Events

form.addEventListener("submit", (event) => { event.preventDefault(); send(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  } else if (event.key === "Enter" && event.target.closest(".option input")) {
    event.preventDefault();
    const item = event.target.closest(".option");
    const next = item.nextElementSibling || (item.closest(".noul") ? null : addOption(item.closest(".question"), ["", ""]));
    if (next) [...next.querySelectorAll("input")].find((input) => input.offsetParent).focus();
    refresh();
  } else if (event.key.startsWith("Arrow") && event.target.role === "tab") {
    const tabs = [...document.querySelectorAll("[role=tab]")];
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key] || 0;
    const tab = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
    chooseTab(tab);
    tab.focus();
  }
});
document.addEventListener("input", (event) => {
  const { target } = event;
  if (target.name === "kind") clearProblem($("state"));
  else if (target.id !== "files") clearProblem(target);
  const options = target.closest(".options");
  if (options) clearProblem(options);
  if (target.classList.contains("type")) {
    const card = target.closest(".question");
    setKind(card, target.value, KINDS[target.value].criteria);
  }
  refresh();
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const card = button.closest(".question");
  if (button.dataset.add) {
    const added = addQuestion({ id: freeId(button.dataset.add), type: button.dataset.add });
    added.querySelector(".instructions").focus();
    $("questions-problem").hidden = true;
  } else if (button.classList.contains("remove")) {
    card.remove();
    document.querySelector("[data-add]").focus();
  } else if (button.classList.contains("more")) {
    [...addOption(card, ["", ""]).querySelectorAll("input")].find((input) => input.offsetParent).focus();
  } else if (button.classList.contains("drop-option")) {
    button.closest(".option").remove();
    numberOptions(card);
    card.querySelector(".more").focus();
  } else if (button.role === "tab") {
    chooseTab(button);
    return;
  } else if (button.id === "copy") {
    copySnippet();
    return;
  } else return;
  refresh();
});
$("files").addEventListener("change", (event) => { addPictures([...event.target.files]); event.target.value = ""; });
document.addEventListener("paste", (event) => takeDropped(event, event.clipboardData));
document.addEventListener("drop", (event) => { document.body.classList.remove("dragged"); takeDropped(event, event.dataTransfer); });
for (const [name, isOver] of [["dragover", true], ["dragleave", false]]) {
  document.addEventListener(name, (event) => {
    if ($("pictures").hidden) return;
    event.preventDefault();
    document.body.classList.toggle("dragged", isOver);
  });
}

for (const example of EXAMPLES) {
  const button = make("button", { type: "button" }, example.name);
  button.addEventListener("click", () => show(example));
  document.querySelector(".examples").append(button);
}
show(EXAMPLES[0]);
askHealth();
