"use strict";
// The browser keeps the text. It asks for a few tokens at a time, so that it can stop at any of them.

const AT_ONCE = 4;
const at = (id) => document.getElementById(id);
let names = {};
let draft = null; // prompt, seed, selection, temperature, tokens, authors: what the next tokens depend on
let shown = []; // a token each: text, kind (senior, junior, person), surprisal
let running = false;
let over = false;
let pointed = -1;

async function ask(question, body) {
  const response = await fetch(`/${question}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function say(status) {
  at("status").textContent = status;
}

function update() {
  at("pause").disabled = !running;
  at("resume").disabled = running || draft === null || over;
  at("share").disabled = running || shown.length === 0;
  at("typed").disabled = at("say").disabled = running || draft === null || over;
  at("start").disabled = running;
}

function add(token, kind) {
  draft.tokens.push(token.id);
  draft.authors.push(token.author);
  const span = document.createElement("span");
  span.className = kind;
  span.textContent = token.text;
  span.dataset.index = shown.length;
  at("text").append(span);
  shown.push({ text: token.text, kind, surprisal: token.surprisal });
}

async function write() {
  running = true;
  at("error").textContent = "";
  update();
  try {
    while (running && !over) {
      const piece = await ask("write", { ...draft, count: AT_ONCE });
      for (const token of piece.tokens) add(token, token.author === 1 ? "senior" : "junior");
      over = piece.stop !== null;
      const next = piece.next === 1 ? "senior" : "junior";
      const ends = piece.stop === "length" ? "no room is left" : "the text has ended";
      say(`${shown.length} tokens; ${over ? ends : `next: the ${next}`}.`);
    }
  } catch (error) {
    at("error").textContent = error.message;
  } finally {
    running = false;
    update();
  }
}

function point(index) {
  at("text").querySelector(".pointed")?.classList.remove("pointed");
  pointed = Math.max(0, Math.min(index, shown.length - 1));
  const token = shown[pointed];
  if (token === undefined) return;
  at("text").children[pointed].classList.add("pointed");
  const word = JSON.stringify(token.text);
  at("surprisal").textContent = `${word}, by the ${token.kind}: ${token.surprisal.toFixed(2)} nats.`;
}

at("settings").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return;
  const strategy = at("strategy").value;
  const selection = { strategy, first: at("first").value, prob_senior: Number(at("prob_senior").value) };
  draft = {
    prompt: at("prompt").value,
    seed: Number(at("seed").value),
    temperature: Number(at("temperature").value),
    selection,
    tokens: [],
    authors: [],
  };
  shown = [];
  over = false;
  at("text").replaceChildren();
  at("surprisal").textContent = "";
  write();
});
at("pause").addEventListener("click", () => {
  running = false;
});
at("resume").addEventListener("click", write);
at("takeover").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = at("typed").value;
  if (running || draft === null || over || text === "") return;
  running = true;
  update();
  try {
    const piece = await ask("say", { ...draft, text });
    for (const token of piece.tokens) add(token, "person");
    at("typed").value = "";
    say(`${shown.length} tokens; the last ones are yours. Type more, or let them go on.`);
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
for (const [slider, output] of [["prob_senior", "share-shown"], ["temperature", "temperature-shown"]]) {
  at(slider).addEventListener("input", () => {
    at(output).textContent = at(slider).value;
  });
}

ask("begin", {}).then((about) => {
  names = { senior: about.senior, junior: about.junior };
  at("senior-name").textContent = `(${about.senior})`;
  at("junior-name").textContent = `(${about.junior})`;
  for (const strategy of about.strategies) at("strategy").append(new Option(strategy));
  at("strategy").value = about.defaults.strategy;
  at("prob_senior").value = about.defaults.prob_senior;
  at("prompt").value = about.prompt;
  at("seed").value = new URLSearchParams(location.search).get("seed") ?? 0;
  for (const slider of ["prob_senior", "temperature"]) at(slider).dispatchEvent(new Event("input"));
  update();
}).catch((error) => {
  at("error").textContent = error.message;
});
