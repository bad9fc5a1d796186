"use strict";
// The browser keeps the text. It asks for a few tokens at a time, so that it can stop at any of them. What it keeps is
// also in the storage of its tab, so that a reload loses nothing.

const AT_ONCE = 4;
const NOTHING = "Nothing is generated yet.";
const ENDS = {
  length: "no room is left",
  untranslatable: "one model cannot read what the other has written",
};
const KINDS = { 1: "senior", 0: "junior", "-1": "context" }; // by author
const FIELDS = ["prompt", "strategy", "first", "max_tokens", "prob_senior", "temperature", "seed", "typed"];
const at = (id) => document.getElementById(id);
let place = ""; // in the tab's storage: other models have other texts
let names = {};
let problems = []; // prompts whose answers are known
let draft = null; // prompt, seed, selection, temperature, tokens, authors, given: what the next tokens depend on
let shown = []; // a span each: text, special, kind (senior, junior, person, context), surprisal, end (in tokens)
let held = 0; // the surprisal of tokens at the end that are no whole character yet
let verdict = null; // correct, answer, expected
let running = false;
let over = false;
let pointed = -1;

async function ask(question, body) {
  const response = await fetch(`/${question}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  }).catch(() => {
    throw new Error("The server does not answer; is tandemrl play still running?");
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function say(status) {
  at("status").textContent = status;
}

function update() {
  const idle = !running && draft !== null;
  at("start").disabled = running;
  at("pause").disabled = !running;
  at("resume").disabled = at("typed").disabled = at("say").disabled = !idle || over;
  at("share").disabled = !idle || shown.length === 0;
  at("handovers").disabled = at("share").disabled || !problems.includes(draft.prompt);
  if (running || draft === null) at("heat").hidden = true;
  at("verdict").textContent = verdict === null ? "" : judged(verdict);
  at("verdict").className = verdict?.correct ? "correct" : "incorrect";
  at("probability-shown").textContent = at("prob_senior").value;
  at("temperature-shown").textContent = at("temperature").value;
  at("settings-shown").textContent =
    `${at("strategy").value}, senior ${at("prob_senior").value}, temperature ${at("temperature").value}, ` +
    `${at("max_tokens").value} tokens, seed ${at("seed").value}`;
  const fields = Object.fromEntries(FIELDS.map((id) => [id, at(id).value]));
  const kept = { draft, shown, held, verdict, over, fields, status: at("status").textContent };
  try {
    sessionStorage.setItem(place, JSON.stringify(kept));
  } catch {
    // it is full, or the browser has none: a reload begins anew
  }
}

function restore() {
  let kept = null;
  try {
    kept = JSON.parse(sessionStorage.getItem(place));
  } catch {
    // the browser has no storage
  }
  if (kept === null) return;
  ({ draft, held, verdict, over } = kept);
  for (const span of kept.shown) show(span);
  for (const id of FIELDS) at(id).value = kept.fields[id];
  say(kept.status);
}

function judged({ correct, answer, expected }) {
  if (correct) return `✓ Correct: ${answer ?? expected}`;
  const found = answer === null ? "no answer found" : `found ${answer}`;
  return `✗ ${over ? "Incorrect" : "Not correct yet"}: ${found}, expected ${expected}`;
}

function show(span) {
  const element = document.createElement("span");
  element.className = span.special ? `${span.kind} special` : span.kind;
  element.textContent = span.text + (span.special ? SPECIAL : "");
  if (span.special) element.title = span.special;
  element.dataset.index = shown.length;
  at("text").append(element);
  shown.push(span);
}

// A token that is part of a character is shown, and its surprisal counted, with the token that makes it whole.
function add(token, kind) {
  draft.tokens.push(token.id);
  draft.authors.push(token.author);
  held += token.surprisal;
  if (token.text === "" && token.special === "") return;
  show({ text: token.text, special: token.special, kind, surprisal: held, end: draft.tokens.length });
  held = 0;
}

function clear() {
  draft = verdict = null;
  shown = [];
  held = 0;
  over = false;
  pointed = -1;
  at("text").replaceChildren();
  at("surprisal").textContent = at("error").textContent = "";
  say(NOTHING);
}

async function write() {
  let left = Number(at("max_tokens").value);
  running = true;
  verdict = null;
  at("error").textContent = "";
  update();
  try {
    while (running && !over && left > 0) {
      const piece = await ask("write", { ...draft, count: Math.min(AT_ONCE, left) });
      for (const token of piece.tokens) add(token, KINDS[token.author]);
      left -= piece.tokens.length;
      over = piece.stop !== null;
      const ends = ENDS[piece.stop] ?? "the text has ended";
      const stopped = left > 0 ? "" : "; stopped at max new tokens";
      say(`${draft.tokens.length} tokens${over ? `; ${ends}` : stopped}.`);
      update();
    }
    if ((over || left <= 0) && problems.includes(draft.prompt)) verdict = (await ask("grade", draft)).verdict;
  } catch (error) {
    if (draft.tokens.length === 0) clear(); // refused
    at("error").textContent = error.message;
  } finally {
    running = false;
    update();
  }
}

// The text twice: as red or green as handing over after a word costs or gains, and as red as a word is surprising.
function heat(places) {
  const most = Math.max(...shown.map(({ surprisal }) => surprisal), 1e-9);
  const colour = (id, part) => {
    const spans = shown.map((span) => {
      const element = document.createElement("span");
      const { value, title, note } = part(span);
      const bare = span.text.trimEnd();
      element.textContent = bare + (note ?? "") + span.text.slice(bare.length);
      element.title = title;
      element.className = value > 0 ? "gain" : "";
      element.style.setProperty("--heat", Math.min(1, Math.abs(value)));
      return element;
    });
    at(id).replaceChildren(...spans);
  };
  colour("effects", ({ end }) => {
    const place = places.find((each) => each.at >= end);
    if (place === undefined) return { value: 0, title: "" };
    const [effect, low, high] = [place.effect, place.low, place.high].map(signed);
    const sure = place.at === end && (place.high < 0 || place.low > 0);
    return { value: place.effect, title: `${effect} [${low}, ${high}]`, note: sure ? ` ${effect}` : "" };
  });
  colour("surprises", (span) => ({ value: -span.surprisal / most, title: nats(span) }));
  at("heat").hidden = false;
}

function signed(value) {
  return (value < 0 ? "−" : "+") + Math.abs(value).toFixed(2);
}

function point(index) {
  at("text").querySelector(".pointed")?.classList.remove("pointed");
  pointed = Math.max(0, Math.min(index, shown.length - 1));
  const span = shown[pointed];
  if (span === undefined) return;
  at("text").children[pointed].classList.add("pointed");
  at("surprisal").textContent = `${named(span)}, by the ${span.kind}: ${nats(span)}.`;
}

at("settings").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return;
  clear();
  const strategy = at("strategy").value;
  draft = {
    prompt: at("prompt").value,
    seed: Number(at("seed").value),
    temperature: Number(at("temperature").value),
    selection: { strategy, first: at("first").value, prob_senior: Number(at("prob_senior").value) },
    tokens: [],
    authors: [],
    given: 0, // where what a person inserted last ends
  };
  at("text").scrollIntoView({ block: "nearest" });
  write();
});
at("pause").addEventListener("click", () => {
  running = false;
});
at("resume").addEventListener("click", () => {
  if (at("max_tokens").reportValidity()) write();
});
at("another").addEventListener("click", () => {
  at("prompt").value = problems[(problems.indexOf(at("prompt").value) + 1) % problems.length];
  update();
});
at("handovers").addEventListener("click", async () => {
  const before = at("status").textContent;
  running = true;
  update();
  at("pause").disabled = true;
  say("Junior and senior go on from each word …");
  let places = [];
  try {
    ({ places } = await ask("handovers", draft));
    at("error").textContent = "";
  } catch (error) {
    at("error").textContent = error.message;
  }
  running = false;
  say(before);
  update();
  if (places.length) heat(places);
});
at("takeover").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = at("typed").value;
  if (running || draft === null || over || text === "") return;
  running = true;
  verdict = null;
  update();
  try {
    const piece = await ask("say", { ...draft, text });
    for (const token of piece.tokens) add(token, "person");
    draft.given = draft.tokens.length;
    at("typed").value = "";
    say(`${draft.tokens.length} tokens; the last ones are yours. Insert more, or continue.`);
    at("error").textContent = "";
  } catch (error) {
    at("error").textContent = error.message;
  } finally {
    running = false;
    update();
    at("typed").focus();
  }
});
at("text").addEventListener("mouseover", (event) => {
  if (event.target.dataset.index !== undefined) point(Number(event.target.dataset.index));
});
at("text").addEventListener("keydown", (event) => {
  const moves = { ArrowRight: 1, ArrowLeft: -1 };
  if (!(event.key in moves)) return;
  event.preventDefault();
  point(pointed + moves[event.key]);
});
at("share").addEventListener("click", async () => {
  const style = await (await fetch("/play.css")).text();
  const page = new Blob([sharedPage(draft, shown, names, style)], { type: "text/html" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(page);
  link.download = "tandem.html";
  link.click();
  URL.revokeObjectURL(link.href);
});
document.addEventListener("input", update);
at("more").addEventListener("invalid", () => { // the browser points at the field, which has to be seen
  at("more").open = true;
}, true);

ask("begin", {}).then((about) => {
  names = { senior: about.senior, junior: about.junior };
  place = `tandemrl play ${location.search} ${JSON.stringify([names, about.strategies])}`;
  problems = about.problems;
  at("senior-name").textContent = `(${about.senior})`;
  at("junior-name").textContent = `(${about.junior})`;
  for (const strategy of about.strategies) at("strategy").append(new Option(strategy));
  for (const id of ["strategy", "first", "max_tokens", "prob_senior"]) at(id).value = about.defaults[id];
  at("prompt").value = problems[0];
  at("seed").value = new URLSearchParams(location.search).get("seed") ?? 0;
  at("another").hidden = problems.length < 2;
  at("handovers").hidden = !about.handovers;
  restore();
  update();
}).catch((error) => {
  at("error").textContent = error.message;
});
